"""The table of HTTP operations on recurring schedules. Its entries belong to the table in `operations`."""

from __future__ import annotations

from typing import Any

from turtlemq.server.auth import OPERATE, READ
from turtlemq.server.handlers import schedules
from turtlemq.server.incoming.schedules import NewSchedule
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_ALL = "/v1/topics/{topic}/schedules"
_ONE = _ALL + "/{name}"
_NOW = 1_790_000_000_000
_CRON: dict[str, Any] = {"cron": "0 9 * * MON-FRI", "zone": "Europe/Berlin"}
_SCHEDULE = {
    "name": "report",
    **_CRON,
    "start_ms": None,
    "end_ms": None,
    "count": None,
    "jitter": 0,
    "catch_up": "one",
    "overlap": "allow",
    "paused": False,
    "body": {"report": "daily"},
    "headers": {},
    "priority": "normal",
    "ttr": None,
    "next_ms": _NOW + 60_000,
    "last_ms": None,
    "fired": 0,
    "ended_ms": None,
    "created_ms": _NOW,
}


def _pausing(verb: str, handler: Any, summary: str, description: str) -> Operation:
    return Operation(
        f"POST {_ONE}/{verb}",
        handler,
        OPERATE,
        f"{verb}Schedule",
        summary,
        answers.Paused,
        description,
        errors=(404, 507),
        answer_example={"paused": verb == "pause"},
        audit="pause" if verb == "pause" else "resume",
    )


SCHEDULES = [
    Operation(
        f"PUT {_ONE}",
        schedules.put,
        OPERATE,
        "putSchedule",
        "Create a schedule, or replace the one of its name",
        schedules.SchedulePut,
        "One of `cron` (five fields, or six with seconds, in a `zone` of the IANA database), `every` and `delays`, and the "
        "message that is put at each of its times, under the id `name@due_ms`. Put again with the same timing, it goes on where "
        "it was; with another one it begins anew. `next_ms` is null if it is paused or has ended.",
        body=NewSchedule,
        body_example={**_CRON, "body": {"report": "daily"}},
        errors=(404, 408, 413, 415, 507),
        answer_example={"name": "report", "next_ms": _NOW + 60_000, "created": True},
        audit="schedule_changed",
    ),
    Operation(
        f"GET {_ONE}",
        schedules.get,
        READ,
        "getSchedule",
        "A schedule, its next time and its last one",
        schedules.ScheduleAnswer,
        errors=(404,),
        answer_example=_SCHEDULE,
    ),
    Operation(
        f"GET {_ALL}",
        schedules.list_,
        READ,
        "listSchedules",
        "Schedules, a page at a time",
        schedules.ScheduleList,
        "Those that fire next come first, then those that have ended and paused ones. A schedule that fires while pages are "
        "read may be on two of them.",
        query=schedules.ListQuery,
        errors=(404,),
        answer_example={"schedules": [_SCHEDULE], "cursor": None},
    ),
    Operation(
        f"DELETE {_ONE}",
        schedules.remove,
        OPERATE,
        "dropSchedule",
        "Delete a schedule",
        answers.Outcome,
        "Messages that have come due stay.",
        errors=(404, 507),
        answer_example={"outcome": "deleted"},
        audit="schedule_deleted",
    ),
    Operation(
        f"POST {_ONE}/trigger",
        schedules.trigger,
        OPERATE,
        "triggerSchedule",
        "Put the message of a schedule now",
        schedules.Triggered,
        "Also of one that is paused or has ended. Its times stay as they are, and so does `fired`. `409 CONFLICT` for the "
        "thousandth in one second.",
        errors=(404, 409, 507),
        answer_example={"id": f"report@{_NOW}", "due_ms": _NOW},
        audit="schedule_triggered",
    ),
    Operation(
        f"GET {_ONE}/next",
        schedules.upcoming,
        READ,
        "nextOfSchedule",
        "The next times of a schedule",
        schedules.Upcoming,
        "Fewer than `count` if it ends before. Of one that is paused, as if it was resumed now.",
        query=schedules.NextQuery,
        errors=(404,),
        answer_example={"next_ms": [_NOW + 60_000, _NOW + 86_460_000]},
    ),
    _pausing(
        "pause",
        schedules.pause,
        "Let a schedule fire no more until it is resumed",
        "A firing that sleeps ahead of its time, by up to 3 s, is taken back. It survives restarts.",
    ),
    _pausing("resume", schedules.resume, "Let a schedule fire again", "Times that passed in the pause are left out."),
]
