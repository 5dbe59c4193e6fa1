"""The table entries of replays. They belong to the table in `operations`."""

from __future__ import annotations

from turtlemq.server.auth import READ
from turtlemq.server.handlers import replays
from turtlemq.server.operation import Operation
from turtlemq.server.replays import Job

_TOPIC = "/v1/topics/{topic}"
_HOUR = {"from_ms": 1_690_000_000_000, "to_ms": 1_690_003_600_000}
_JOB = {
    "id": "5f0c2a91d3e4",
    "topic": "orders",
    "into": "orders-again",
    **_HOUR,
    "started_ms": 1_790_010_000_000,
    "delay_ms": 0,
    "per_s": 500.0,
    "state": "running",
    "total": 120_000,
    "scanned": 4_000,
    "copied": 3_988,
    "duplicates": 0,
    "ended_ms": None,
    "error": "",
}

REPLAYS = [
    Operation(
        f"POST {_TOPIC}/replay",
        replays.begin,
        READ,
        "beginReplay",
        "Copy a range of delivered messages into another topic",
        Job,
        "Messages that became ready from `from_ms` on and before `to_ms`, as far as they are kept; cancelled ones are left "
        "out. Needs the right to produce into the other topic. The id of a copy follows from its message, so a replay that is "
        "begun again copies only the rest. `filter`: `state` over all groups, `prefix` of ids, `headers` that a message has.",
        status=202,
        body=replays.Replay,
        body_example=_HOUR | {"into": "orders-again", "per_s": 500, "filter": {"state": "dead"}},
        errors=(404, 408, 413, 415, 507),
        answer_example=_JOB,
        audit="replay",
    ),
    Operation(
        f"GET {_TOPIC}/replays",
        replays.replays,
        READ,
        "listReplays",
        "The newest replays of a topic",
        replays.ReplayList,
        errors=(404,),
        answer_example={"replays": [_JOB]},
    ),
    Operation(
        f"GET {_TOPIC}/replays/{{replay}}",
        replays.replay,
        READ,
        "getReplay",
        "The progress of a replay",
        Job,
        "`interrupted`: the server ended meanwhile. Begin it again: it copies nothing twice.",
        errors=(404,),
        answer_example=_JOB,
    ),
    Operation(
        f"DELETE {_TOPIC}/replays/{{replay}}",
        replays.cancel,
        READ,
        "cancelReplay",
        "End a replay; its copies stay",
        Job,
        "Needs the right to produce into the other topic, as its beginning does.",
        errors=(404, 507),
        answer_example=_JOB | {"state": "cancelled"},
        audit="replay_cancelled",
    ),
]
