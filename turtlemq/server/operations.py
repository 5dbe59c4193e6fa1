"""Every operation of the HTTP interface as one table: what it takes, what it answers, an example of each. `openapi` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turtlemq.broker.results import Acked
from turtlemq.model import Forecast
from turtlemq.server.handlers import command, dead, messages, status, topics
from turtlemq.server.outgoing import answers
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.topic_settings import TopicSettings

NOW = 1_790_000_000_000  # a time in examples
BODY = (408, 413, 415)  # what can be wrong with any body
WRITE = (507,)
BSON, NDJSON, JSON, TEXT, HTML = "application/bson", "application/x-ndjson", "application/json", "text/plain", "text/html"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `errors` come beside those that any request may meet."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    answer: Any  # the type of a good answer, or a content type
    text: str = ""
    status: int = 200
    body: Any = None
    example: Any = None  # of the body
    query: Any = None
    errors: tuple[int, ...] = ()
    shows: Any = field(default=None)  # an example of the answer
    open: bool = False  # no token is needed


_T = "/v1/topics/{topic}"
_M = f"{_T}/messages"
_STATS: dict[str, float] = {"sleep": 2, "ready": 1, "reserve": 0, "history": 5, "dead": 0, "cancelled": 0}
_STATS |= {"bytes": 4096, "segments": 2, "live_ratio": 1.0, "oldest_ready_ms": NOW, "next_due_ms": NOW + 1_800_000, "damaged": 0}
_GROUP = {"ready": 1, "reserve": 0, "history": 5, "dead": 0, "offset": 5, "lag": 1, "changed_ms": NOW}
_TOPIC = {"topic": "orders", "settings": {"ttr": 60, "max_attempts": 16}, "stats": _STATS, "groups": {"default": _GROUP}}
_MESSAGE = {"id": "order-17", "body": {"close": 17}, "headers": {}, "due_ms": NOW, "created_ms": NOW - 1_800_000}
_FETCHED = _MESSAGE | {"ready_ms": NOW + 1, "attempt": 1, "priority": "normal", "lease_until_ms": NOW + 30_000}
_SLEEPER = _MESSAGE | {"state": "sleep", "priority": "normal", "expires_ms": None}
_LETTER = _MESSAGE | {"group": "default", "dropped_ms": NOW + 60_000, "attempts": 16, "error": "no connection"}
_VIEW = _SLEEPER | {
    "attempt": 0,
    "ttr": None,
    "groups": {},
    "timeline": [{"at_ms": NOW, "event": "due", "group": "", "detail": ""}],
}


def _consuming(base: str, suffix: str, whose: str) -> list[Operation]:
    return [
        Operation(
            "POST",
            f"{base}/fetch",
            f"fetch{suffix}",
            "Consume",
            f"Fetch messages that are due{whose}",
            answers.Messages,
            "Waits up to `wait` seconds for the first. With `Accept: application/bson` the messages come as BSON documents, one "
            "behind the other. What is not acknowledged by `lease_until_ms` comes again.",
            body=messages.Fetch,
            example={"max": 100, "wait": 10, "ttr": 30},
            errors=(*BODY, 404, *WRITE),
            shows={"messages": [_FETCHED]},
        ),
        Operation(
            "POST",
            f"{base}/ack",
            f"ack{suffix}",
            "Consume",
            f"Acknowledge, or report as failed{whose}",
            Acked,
            "A list of ids, `-` before each that failed; or an object with `acks`, where `retry_delay` and `error` are about the "
            "failed ones. An id that the group does not hold in reserve is `unknown`, never an error.",
            body=list[str] | messages.Ack,
            example=["order-17", "-order-18"],
            errors=(*BODY, 404, *WRITE),
            shows={"acked": 1, "failed": 1, "dead": 0, "unknown": []},
        ),
        Operation(
            "POST",
            f"{base}/extend",
            f"extend{suffix}",
            "Consume",
            f"Give consumers more time{whose}",
            answers.Extended,
            body=messages.Extend,
            example={"ids": ["order-17"], "ttr": 120},
            errors=(*BODY, 404, *WRITE),
            shows={"extended": 1, "unknown": []},
        ),
    ]


PRODUCE = [
    Operation(
        "POST",
        _M,
        "produce",
        "Produce",
        "Store messages: all of them or none",
        answers.Stored,
        "One message, or `messages` with up to 100,000. The answer comes when they are durable. An id that the topic knows is "
        "not stored again and counts as a duplicate.",
        status=201,
        body="messages",
        example={"messages": [{"id": "order-17", "body": {"close": 17}, "delay": 1800}, {"body": "any JSON value"}]},
        errors=(*BODY, 404, *WRITE),
        shows={"ids": ["order-17", "0qjZ0b9Xo0"], "created": 2, "duplicates": 0, "durable": "fsync"},
    ),
    Operation(
        "GET",
        f"{_M}/{{id}}",
        "getMessage",
        "Produce",
        "Everything about one message",
        answers.MessageAnswer,
        errors=(404,),
        shows=_VIEW,
    ),
    Operation(
        "PATCH",
        f"{_M}/{{id}}",
        "changeMessage",
        "Produce",
        "Reschedule or edit a sleeper",
        answers.Changed,
        body=messages.Patch,
        example={"delay": 7200, "headers": {"why": "later"}},
        errors=(*BODY, 404, 409, *WRITE),
        shows={"outcome": "rescheduled", "due_ms": NOW + 7_200_000},
    ),
    Operation(
        "DELETE",
        f"{_M}/{{id}}",
        "cancelMessage",
        "Produce",
        "Cancel a message that nobody has fetched",
        answers.Outcome,
        errors=(404, 409, *WRITE),
        shows={"outcome": "cancelled"},
    ),
    Operation(
        "POST",
        f"{_T}/cancel",
        "cancelMany",
        "Produce",
        "Cancel many, by id or by due time",
        answers.Cancelled,
        body=messages.Cancel,
        example={"ids": ["order-17", "order-18"]},
        errors=(*BODY, 404, *WRITE),
        shows={"cancelled": 1, "missed": {"order-18": "reserve"}},
    ),
]

LOOK = [
    Operation(
        "GET",
        _M,
        "listMessages",
        "Look",
        "Messages in one state, a page at a time",
        answers.Listing,
        "Sleepers by due time, the dead by when they died, all others in the order in which they came due.",
        query=messages.Browse,
        errors=(404,),
        shows={"messages": [_SLEEPER], "cursor": None},
    ),
    Operation(
        "GET",
        f"{_T}/forecast",
        "forecast",
        "Look",
        "How much comes due when",
        Forecast,
        "Answered from the index alone.",
        query=messages.Outlook,
        errors=(404,),
        shows={"from_ms": NOW, "bucket_ms": 60_000, "counts": [0, 12, 7], "overdue": 0, "beyond": 3},
    ),
]

TOPICS = [
    Operation("GET", "/v1/topics", "listTopics", "Topics", "All topics", answers.Topics, shows={"topics": [_TOPIC]}),
    Operation(
        "PUT",
        _T,
        "putTopic",
        "Topics",
        "Create a topic, or change its settings",
        answers.TopicAnswer,
        "What is left out stays as it is.",
        body=TopicSettings,
        example={"ttr": 30, "max_attempts": 5, "backoff": {"base": 1, "factor": 2, "max": 600, "jitter": "equal"}},
        errors=(*BODY, *WRITE),
        shows=_TOPIC,
    ),
    Operation(
        "GET", _T, "getTopic", "Topics", "A topic's settings and figures", answers.TopicAnswer, errors=(404,), shows=_TOPIC
    ),
    Operation(
        "DELETE",
        _T,
        "dropTopic",
        "Topics",
        "Delete a topic with everything in it",
        answers.Outcome,
        errors=(404,),
        shows={"outcome": "deleted"},
    ),
    Operation(
        "POST",
        f"{_T}/compact",
        "compact",
        "Topics",
        "Free what can be freed",
        answers.Compacted,
        errors=(404, *WRITE),
        shows={"outcome": "compacted", "bytes_before": 9000, "bytes": 4096, "live_ratio": 1.0},
    ),
    Operation(
        "PUT",
        f"{_T}/groups/{{group}}",
        "putGroup",
        "Topics",
        "Make a group, or move it: replay",
        answers.GroupAnswer,
        body=topics.GroupStart,
        example={"start": "earliest"},
        errors=(*BODY, 404, *WRITE),
        shows={"topic": "orders", "group": "audit", "stats": _GROUP},
    ),
    Operation(
        "GET",
        f"{_T}/groups/{{group}}",
        "getGroup",
        "Topics",
        "A group's figures",
        answers.GroupAnswer,
        errors=(404,),
        shows={"topic": "orders", "group": "audit", "stats": _GROUP},
    ),
    Operation(
        "DELETE",
        f"{_T}/groups/{{group}}",
        "dropGroup",
        "Topics",
        "Forget a group",
        answers.Outcome,
        errors=(404, *WRITE),
        shows={"outcome": "deleted"},
    ),
]

DEAD = [
    Operation(
        "GET",
        f"{_T}/dead",
        "listDead",
        "Dead letters",
        "Dead letters in the order in which they died",
        answers.Letters,
        query=dead.Page,
        errors=(404,),
        shows={"messages": [_LETTER], "cursor": None},
    ),
    Operation(
        "GET",
        f"{_T}/dead/summary",
        "summariseDead",
        "Dead letters",
        "How many died of what",
        answers.Causes,
        query=dead.Which,
        errors=(404,),
        shows={"total": 3, "errors": {"no connection": 3}},
    ),
    Operation(
        "GET",
        f"{_T}/dead/export",
        "exportDead",
        "Dead letters",
        "All of them, a line each",
        NDJSON,
        query=dead.Which,
        errors=(404,),
    ),
    Operation(
        "POST",
        f"{_T}/dead/requeue",
        "requeueDead",
        "Dead letters",
        "Let them sleep again",
        answers.Requeued,
        "By `ids`, or by `filter` (`{}`: all). `per_s` spreads them over time.",
        body=dead.Requeue,
        example={"filter": {"group": "default"}, "delay": 60, "per_s": 100},
        errors=(*BODY, 404, *WRITE),
        shows={"requeued": 3, "unknown": []},
    ),
    Operation(
        "POST",
        f"{_T}/dead/delete",
        "deleteDead",
        "Dead letters",
        "Delete them",
        answers.Deleted,
        body=dead.Chosen,
        example={"ids": ["order-17"]},
        errors=(*BODY, 404, *WRITE),
        shows={"deleted": 1, "unknown": []},
    ),
]

OPERATE = [
    Operation("GET", "/healthz", "alive", "Operate", "The process lives", answers.Alive, open=True),
    Operation("GET", "/readyz", "ready", "Operate", "It serves; 503 while it starts or stops", answers.Ready, open=True),
    Operation("GET", "/metrics", "metrics", "Operate", "Figures for Prometheus", TEXT),
    Operation("GET", "/v1/status", "status", "Operate", "What the dashboard shows", status.Status, query=status.Look),
    Operation(
        "POST",
        "/v1/command",
        "command",
        "Operate",
        "The command protocol of Youzan-style queues",
        command.Answer,
        "`add`, `pop`, `finish` and `delete`; always 200, success or not is in the answer.",
        body=command.Command,
        example={"command": "add", "topic": "jobs", "id": "j1", "delay": 0, "TTR": 30, "body": "work"},
        shows={"success": True, "error": "", "id": "j1", "value": None},
    ),
    Operation("POST", "/v1/backup", "pinBackup", "Operate", "Keep all files as they are for a copy", answers.Pinned, status=201),
    Operation("DELETE", "/v1/backup", "unpinBackup", "Operate", "The copy is made, or given up", answers.Outcome),
    Operation("GET", "/openapi.json", "openapi", "Pages", "This document", JSON, open=True),
    Operation("GET", "/docs", "docs", "Pages", "A page to read it", HTML, open=True),
    Operation("GET", "/", "dashboard", "Pages", "The dashboard", HTML, open=True),
    Operation(
        "GET",
        "/pages/{file}",
        "pageFile",
        "Pages",
        "What pages are made of",
        "text/css text/javascript image/svg+xml text/html",
        errors=(404,),
        open=True,
    ),
]

OPERATIONS = [
    *PRODUCE,
    *_consuming(_T, "", ""),
    *_consuming(f"{_T}/groups/{{group}}", "InGroup", ", for a group"),
    *LOOK,
    *TOPICS,
    *DEAD,
    *OPERATE,
]
TYPES = (Delivered, answers.Error, answers.Letter)
