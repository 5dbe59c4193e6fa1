"""The table of HTTP operations on dead letters. Its entries belong to the table in `operations`."""

from __future__ import annotations

from typing import Any

from turtlemq.server.auth import OPERATE, READ
from turtlemq.server.handlers import dead
from turtlemq.server.media_types import NDJSON
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_TOPIC = "/v1/topics/{topic}"
_CHANGE = (408, 413, 415, 404, 507)  # an operation with a body that writes to an existing topic


_OTHERS = [
    Operation(
        f"GET {_TOPIC}/dead/summary",
        dead.summary,
        READ,
        "summariseDead",
        "How many died of what",
        answers.Causes,
        query=dead.DeadFilter,
        errors=(404,),
        answer_example={"total": 3, "errors": {"no connection": 3}},
    ),
    Operation(
        f"GET {_TOPIC}/dead/export",
        dead.export,
        READ,
        "exportDead",
        "All of them, a line each",
        NDJSON,
        query=dead.DeadFilter,
        errors=(404,),
    ),
    Operation(
        f"POST {_TOPIC}/dead/requeue",
        dead.requeue,
        OPERATE,
        "requeueDead",
        "Let them sleep again",
        answers.Requeued,
        "By `ids`, or by `filter` (`{}`: all). `per_s` spreads them over time.",
        body=dead.DeadRequeue,
        body_example={"filter": {"group": "default"}, "delay": 60, "per_s": 100},
        errors=_CHANGE,
        answer_example={"requeued": 3, "unknown": []},
        audit="requeue",
    ),
    Operation(
        f"POST {_TOPIC}/dead/delete",
        dead.delete,
        OPERATE,
        "deleteDead",
        "Delete them",
        answers.Deleted,
        body=dead.DeadChoice,
        body_example={"ids": ["order-17"]},
        errors=_CHANGE,
        answer_example={"deleted": 1, "unknown": []},
        audit="dead_deleted",
    ),
]


def dead_operations(letter: dict[str, Any]) -> list[Operation]:
    """The operations. `letter`: an example of a dead letter."""
    listing = Operation(
        f"GET {_TOPIC}/dead",
        dead.list_dead,
        READ,
        "listDead",
        "Dead letters in the order in which they died",
        answers.Letters,
        query=dead.DeadPage,
        errors=(404,),
        answer_example={"messages": [letter], "cursor": None},
    )
    return [listing, *_OTHERS]
