"""The table of HTTP operations for operators: pauses, events, the audit log, a virtual clock.

Its entries belong to the table in `operations`.
"""

from __future__ import annotations

from turtlemq.server.auth import ADMIN, ALL, OPERATE, READ, TOKEN
from turtlemq.server.handlers import audit, clock, events, tenants, topics
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_TOPIC = "/v1/topics/{topic}"


def _pausing(base: str, suffix: str, what: str) -> list[Operation]:
    """Pause and resume: of a topic, or of a group."""
    return [
        Operation(
            f"POST {base}/pause",
            topics.pause,
            OPERATE,
            f"pause{suffix}",
            f"Deliver nothing of {what} until it is resumed",
            answers.Paused,
            "Messages still come due; puts, acks and extends work, leases end and retries are scheduled. A fetch answers "
            "`paused`; a long poll waits its time, or until there are messages after a resume. It survives restarts.",
            errors=(404, 507),
            answer_example={"paused": True},
            audit="pause",
        ),
        Operation(
            f"POST {base}/resume",
            topics.resume,
            OPERATE,
            f"resume{suffix}",
            f"Deliver messages of {what} again",
            answers.Paused,
            errors=(404, 507),
            answer_example={"paused": False},
            audit="resume",
        ),
    ]


CLOCKS = [
    Operation(
        "GET /v1/clock",
        clock.get_clock,
        TOKEN,
        "clock",
        "The time of a server with a virtual clock",
        clock.Clock,
        "`409 CONFLICT` on a server that runs on the wall clock.",
        errors=(409,),
        answer_example={"now_ms": 1_790_000_000_000, "virtual": True},
    ),
    Operation(
        "POST /v1/clock",
        clock.move_clock,
        ADMIN,
        "moveClock",
        "Move a virtual clock, for tests",
        clock.Clock,
        "By `advance` (seconds, or a text such as `3d`), by `advance_ms`, or to `now_ms`; never back. The answer comes when all "
        "messages that are due by then were handed off, each at its own time; then long polls get theirs. Leases, back-offs and "
        "retention follow the clock, waits of long polls do not.",
        body=clock.Move,
        body_example={"advance": "3d"},
        errors=(408, 409, 413, 415, 507),
        answer_example={"now_ms": 1_790_259_200_000, "virtual": True},
        audit="clock",
    ),
]
PAUSES = [*_pausing(_TOPIC, "Topic", "a topic"), *_pausing(_TOPIC + "/groups/{group}", "Group", "a group")]
_CHANGE = {"at_ms": 1_790_000_000_000, "token": "support", "client": "10.0.0.7", "action": "requeue", "topic": "orders"}
AUDITS = [
    Operation(
        "GET /v1/audit",
        audit.audit,
        TOKEN,
        "audit",
        "What was changed, when, and by which token",
        audit.AuditAnswer,
        "The newest events, the newest last: of topics on which the token may `read` or `operate`; those about no topic need it "
        "on all. Puts, fetches, acks and extends are not in it. In a cluster each node has its own.",
        query=audit.AuditQuery,
        answer_example={"events": [_CHANGE | {"count": 33, "request_id": "7f3a-41", "target": ""}]},
    )
]
_LIMITS = {"produce_per_s": 5000, "bytes_per_s": 0, "max_in_flight": 10_000, "max_bytes": 0}
_COUNTS = {"in_flight": 120, "held_bytes": 0, "produced": 81_000, "produced_bytes": 9_100_000, "delivered": 80_990}
TENANTS = [
    Operation(
        "GET /v1/tenants",
        tenants.tenants,
        ALL,
        "tenants",
        "The tenants of the configuration, with their limits and figures",
        tenants.TenantsAnswer,
        "In the order of the configuration; see docs/FLOW.md. Figures count from the start. `refused`: requests, by the limit "
        "that refused them: `messages` and `bytes` a second, and `held` bytes.",
        answer_example={
            "tenants": [{"name": "shop", "topics": ["shop.*"], "weight": 2, **_LIMITS, **_COUNTS, "refused": {"messages": 3}}]
        },
    )
]
_FAILED = {"at_ms": 1_790_000_000_000, "event": "failed", "id": "order-17", "group": "default", "consumer": "w1", "attempt": 1}
EVENTS = [
    Operation(
        f"GET {_TOPIC}/events",
        events.events,
        READ,
        "topicEvents",
        "What happens on a topic, event by event",
        answers.Events,
        "In the order of time, from `since_ms` or `cursor` on: `created`, `rescheduled`, `edited`, `replaced`, `ready`, "
        "`reserved`, `acked`, `failed`, `expired`, `given back`, `dead`, `retry now`, `cancelled`, `requeued`, `deleted` (of a "
        "dead letter), `group placed`, `group deleted`. They are read from the files of the topic: a cursor is good after a "
        "restart, and older events go with the retention of these files.",
        query=events.EventsQuery,
        errors=(404,),
        answer_example={"events": [_FAILED | {"error": "KeyError: 'customer'"}], "cursor": "812-3-4100-977", "missed": False},
    )
]
