"""The table of HTTP operations: route, handler, access right, types of request and answer, texts and examples, each written once.

Everything else is derived from it: `app` makes the routes, `auth` looks up the right that a request needs (`ACCESS`), `openapi`
writes the document. To add an operation, write its handler and one entry here; tests check the rest. Entries stand in the order
of the document; the router tries routes in the same order, so daily work comes first.
"""

from __future__ import annotations

from typing import Any

from turtlemq.server.audit import Action
from turtlemq.server.auth import ADMIN, ALL, ANY, CHANGE, CONSUME, GROUP, OPEN, OPERATE, PRODUCE, READ, TOKEN, Access
from turtlemq.server.client_operations import CLIENTS
from turtlemq.server.cluster_operations import CLUSTER
from turtlemq.server.dead_operations import dead_operations
from turtlemq.server.handlers import backup, command, consume, find, history, messages, metrics, pages, produce, status, topics
from turtlemq.server.media_types import HTML, JSON, TEXT
from turtlemq.server.metrics.exposition import OPENMETRICS
from turtlemq.server.operation import MESSAGES, Handler, Operation, tagged
from turtlemq.server.operator_operations import AUDITS, CLOCKS, EVENTS, PAUSES, TENANTS
from turtlemq.server.outgoing import answers
from turtlemq.server.outgoing.reply import LEASE_HEADER, PAUSED_HEADER
from turtlemq.server.replay_operations import REPLAYS
from turtlemq.server.schedule_operations import SCHEDULES
from turtlemq.server.topic_settings import TopicSettings
from turtlemq.server.transaction_operations import TRANSACT

# Statuses that an operation may answer with, beside those that any request may meet.
_BODY = (408, 413, 415)  # the body is slow, too large, or of an unknown type
_CHANGE = (*_BODY, 404, 507)  # an operation with a body that writes to an existing topic


PAGES = "Pages"
_TOPIC = "/v1/topics/{topic}"
_GROUP = _TOPIC + "/groups/{group}"

# Parts of examples.
_NOW = 1_790_000_000_000
_COUNTS: dict[str, float] = {"sleep": 2, "ready": 1, "reserve": 0, "history": 5, "dead": 0, "cancelled": 0}
_COUNTS |= {
    "bytes": 4096,
    "segments": 2,
    "live_ratio": 1.0,
    "oldest_ready_ms": _NOW,
    "next_due_ms": _NOW + 1_800_000,
    "damaged": 0,
    "schedules": 0,
}
_GROUP_COUNTS: dict[str, Any] = {"ready": 1, "reserve": 0, "history": 5, "dead": 0, "offset": 5, "lag": 1, "changed_ms": _NOW}
_GROUP_COUNTS |= {"paused": False, "high_weight": 6.0, "preempting": False}
_ORDERS = {
    "topic": "orders",
    "settings": {"ttr": 60, "max_attempts": 16},
    "stats": _COUNTS,
    "groups": {"default": _GROUP_COUNTS},
    "paused": False,
}
_MESSAGE = {"id": "order-17", "body": {"close": 17}, "headers": {}, "due_ms": _NOW, "created_ms": _NOW - 1_800_000}
_FETCHED = _MESSAGE | {"ready_ms": _NOW + 1, "attempt": 1, "priority": "normal", "lease_until_ms": _NOW + 30_000}
_SLEEPER = _MESSAGE | {"state": "sleep", "priority": "normal", "expires_ms": None}
_ATTEMPT = {"group": "default", "attempt": 16, "consumer": "worker-1", "reserved_ms": _NOW + 50_000, "ended_ms": _NOW + 60_000}
_ATTEMPT |= {"outcome": "dead", "error": "no connection", "next_ms": None}
_LETTER = _MESSAGE | {"group": "default", "dropped_ms": _NOW + 60_000, "attempts": 16, "error": "no connection"}
_LETTER |= {"last_attempts": [_ATTEMPT]}
_TIMELINE = [{"at_ms": _NOW, "event": "due", "group": "", "detail": ""}]
_VIEW = _SLEEPER | {"attempt": 0, "ttr": None, "groups": {}, "attempts": [], "timeline": _TIMELINE}


def _consuming(base: str, suffix: str, whose: str) -> list[Operation]:
    """Fetch, ack and extend: of the default group (`base` is a topic), or of a named one."""
    return [
        Operation(
            f"POST {base}/fetch",
            consume.fetch,
            CONSUME,
            f"fetch{suffix}",
            f"Fetch messages that are due{whose}",
            answers.Messages,
            "Waits up to `wait` seconds for the first. With `Accept: application/bson` the messages come as BSON documents, one "
            "behind the other. What is not acknowledged by `lease_until_ms` comes again. `lease` names the lease of these "
            f"messages (in a BSON answer the header `{LEASE_HEADER}` does); acks and extends that name it change no other lease. "
            f"`paused` (in a BSON answer `{PAUSED_HEADER}: true`): the group or its topic is paused.",
            body=consume.Fetch,
            body_example={"max": 100, "wait": 10, "ttr": 30},
            errors=_CHANGE,
            answer_example={"messages": [_FETCHED], "lease": "1c-1a0d3e2b400"},
        ),
        Operation(
            f"POST {base}/ack",
            consume.ack,
            CONSUME,
            f"ack{suffix}",
            f"Acknowledge, or report as failed{whose}",
            answers.Acked,
            "A list of ids, `-` before each that failed; or an object with `acks`, where `retry_delay` and `error` are about the "
            "failed ones. An id that the group does not hold in reserve is `unknown`, never an error. With `lease`, an id that "
            "is held under another lease by now is `late`, and nothing happens to it.",
            body=list[str] | consume.Ack,
            body_example=["order-17", "-order-18"],
            errors=_CHANGE,
            answer_example={"acked": 1, "failed": 1, "dead": 0, "unknown": []},
        ),
        Operation(
            f"POST {base}/extend",
            consume.extend,
            CONSUME,
            f"extend{suffix}",
            f"Give consumers more time{whose}",
            answers.Extended,
            "The leases of these messages end `ttr` seconds from now. With `lease`, an id that is held under another lease by "
            "now is `late`, and its lease stays as it is.",
            body=consume.Extend,
            body_example={"ids": ["order-17"], "ttr": 120},
            errors=_CHANGE,
            answer_example={"extended": 1, "unknown": []},
        ),
    ]


OPERATIONS: list[Operation] = [
    *tagged(
        "Produce",
        Operation(
            f"POST {_TOPIC}/messages",
            produce.produce,
            PRODUCE,
            "produce",
            "Store messages: all of them or none",
            answers.Stored,
            "One message, or `messages` with up to 100,000. The answer comes when they are durable. An id that the topic knows "
            "is not stored again and counts as a duplicate, unless `if_exists` (1,000 messages at most) says otherwise.",
            status=201,
            body=MESSAGES,
            query=produce.ProduceQuery,
            body_example={"messages": [{"id": "order-17", "body": {"close": 17}, "delay": 1800}, {"body": "any JSON value"}]},
            errors=(*_CHANGE, 409),
            answer_example={
                "ids": ["order-17", "0qjZ0b9Xo0"],
                "created": 2,
                "duplicates": 0,
                "replaced": 0,
                "rescheduled": 0,
                "durable": "fsync",
            },
        ),
        Operation(
            f"GET {_TOPIC}/messages/{{id}}",
            messages.get_message,
            ANY,
            "getMessage",
            "Everything about one message",
            answers.MessageAnswer,
            "With `at_ms`: as it was at that moment, as far as files that retention has left tell; `410 NOT_KEPT` with "
            "`known_from_ms` for a moment whose journals are gone.",
            query=messages.MessageQuery,
            errors=(404, 410, 413),
            answer_example=_VIEW,
        ),
        Operation(
            f"PATCH {_TOPIC}/messages/{{id}}",
            messages.patch,
            CHANGE,
            "changeMessage",
            "Reschedule or edit a sleeper",
            answers.Changed,
            body=messages.Patch,
            body_example={"delay": 7200, "headers": {"why": "later"}},
            errors=(*_BODY, 404, 409, 507),
            answer_example={"outcome": "rescheduled", "due_ms": _NOW + 7_200_000},
            audit="reschedule",
        ),
        Operation(
            f"DELETE {_TOPIC}/messages/{{id}}",
            messages.remove,
            CHANGE,
            "cancelMessage",
            "Cancel a message that sleeps, is ready or waits for a retry",
            answers.Outcome,
            errors=(404, 409, 507),
            answer_example={"outcome": "cancelled"},
            audit="cancel",
        ),
        Operation(
            f"POST {_TOPIC}/messages/{{id}}/retry",
            messages.retry,
            OPERATE,
            "retryMessage",
            "Try a message again now",
            answers.Outcome,
            "A message that waits for its next attempt, or is dead, is ready now: in `group`, or in every group of which this is "
            "so. A dead letter is requeued and counts its attempts from 1 again.",
            body=messages.Retry,
            body_example={"group": "default"},
            errors=(*_BODY, 404, 409, 507),
            answer_example={"outcome": "ready"},
            audit="retry",
        ),
        Operation(
            f"POST {_TOPIC}/cancel",
            messages.cancel,
            CHANGE,
            "cancelMany",
            "Cancel many, by id or by due time",
            answers.Cancelled,
            body=messages.Cancel,
            body_example={"ids": ["order-17", "order-18"]},
            errors=_CHANGE,
            answer_example={"cancelled": 1, "missed": {"order-18": "reserve"}},
            audit="cancel",
        ),
    ),
    *tagged("Produce", TRANSACT),
    *tagged("Consume", *_consuming(_TOPIC, "", ""), *_consuming(_GROUP, "InGroup", ", for a group")),
    *tagged(
        "Look",
        Operation(
            f"GET {_TOPIC}/messages",
            messages.browse,
            READ,
            "listMessages",
            "Messages in one state, a page at a time",
            answers.Listing,
            "Sleepers by due time, the dead by when they died, all others in the order in which they came due.",
            query=messages.BrowseQuery,
            errors=(404,),
            answer_example={"messages": [_SLEEPER], "cursor": None},
        ),
        Operation(
            "GET /v1/find",
            find.find,
            TOKEN,
            "findMessage",
            "Find an id in all topics",
            answers.Found,
            "In all topics that the token may read; an empty list if none knows the id.",
            query=find.FindQuery,
            answer_example={"found": [{"topic": "orders", "id": "order-17", "state": "sleep", "due_ms": _NOW, "next_ms": None}]},
        ),
        Operation(
            f"GET {_TOPIC}/forecast",
            messages.forecast,
            ANY,
            "forecast",
            "How much comes due when",
            messages.ForecastAnswer,
            "From the index alone. `what_if_spread` adds counts as if each message had it, `capacity` how late they will be.",
            query=messages.ForecastQuery,
            errors=(404,),
            answer_example={"from_ms": _NOW, "bucket_ms": 60_000, "counts": [0, 12, 7], "overdue": 0, "beyond": 3},
        ),
        Operation(
            f"GET {_TOPIC}/history",
            history.of_topic,
            ANY,
            "topicHistory",
            "Figures of a topic in the last 24 hours, by the minute",
            history.History,
            "Kept in memory since the start, for the 50 busiest topics; no rows for others.",
            query=history.HistoryQuery,
            errors=(404,),
        ),
        *EVENTS,
        *REPLAYS,
    ),
    *tagged(
        "Topics",
        Operation(
            "GET /v1/topics",
            topics.list_topics,
            TOKEN,
            "listTopics",
            "All topics",
            answers.Topics,
            answer_example={"topics": [_ORDERS]},
        ),
        Operation(
            f"PUT {_TOPIC}",
            topics.put_topic,
            ADMIN,
            "putTopic",
            "Create a topic, or change its settings",
            answers.TopicAnswer,
            "What is left out stays as it is.",
            body=TopicSettings,
            body_example={"ttr": 30, "max_attempts": 5, "backoff": {"base": 1, "factor": 2, "max": 600, "jitter": "equal"}},
            errors=(*_BODY, 507),
            answer_example=_ORDERS,
            audit="settings",
        ),
        Operation(
            f"GET {_TOPIC}",
            topics.get_topic,
            ANY,
            "getTopic",
            "A topic's settings and figures",
            answers.TopicAnswer,
            errors=(404,),
            answer_example=_ORDERS,
        ),
        Operation(
            f"DELETE {_TOPIC}",
            topics.drop_topic,
            ADMIN,
            "dropTopic",
            "Delete a topic with everything in it",
            answers.Outcome,
            errors=(404,),
            answer_example={"outcome": "deleted"},
            audit="topic_deleted",
        ),
        Operation(
            f"POST {_TOPIC}/compact",
            topics.compact,
            OPERATE,
            "compact",
            "Free what can be freed",
            answers.Compacted,
            errors=(404, 507),
            answer_example={"outcome": "compacted", "bytes_before": 9000, "bytes": 4096, "live_ratio": 1.0},
            audit="compact",
        ),
        Operation(
            f"PUT {_GROUP}",
            topics.put_group,
            GROUP,
            "putGroup",
            "Make a group, or move it: replay",
            answers.GroupAnswer,
            body=topics.GroupStart,
            body_example={"start": "earliest"},
            errors=_CHANGE,
            answer_example={"topic": "orders", "group": "audit", "stats": _GROUP_COUNTS},
            audit="group_moved",
        ),
        Operation(
            f"GET {_GROUP}",
            topics.get_group,
            ANY,
            "getGroup",
            "A group's figures",
            answers.GroupAnswer,
            errors=(404,),
            answer_example={"topic": "orders", "group": "audit", "stats": _GROUP_COUNTS},
        ),
        Operation(
            f"DELETE {_GROUP}",
            topics.drop_group,
            OPERATE,
            "dropGroup",
            "Forget a group",
            answers.Outcome,
            errors=(404, 507),
            answer_example={"outcome": "deleted"},
            audit="group_deleted",
        ),
        *PAUSES,
    ),
    *tagged("Schedules", *SCHEDULES),
    *tagged("Dead letters", *dead_operations(_LETTER)),
    *tagged("Clients", *CLIENTS),
    *tagged(
        "Operate",
        Operation("GET /healthz", status.healthz, OPEN, "alive", "The process lives", answers.Alive),
        Operation(
            "GET /readyz",
            status.readyz,
            OPEN,
            "ready",
            "It serves; 503 while it starts or stops",
            answers.Ready,
            "A node of a cluster that does not lead is ready while there is a leader to forward requests to.",
            query=status.ReadyQuery,
        ),
        Operation("GET /metrics", metrics.metrics, ALL, "metrics", "Figures for Prometheus", f"{TEXT} {OPENMETRICS}"),
        Operation(
            "GET /v1/status", status.status, TOKEN, "status", "What the dashboard shows", status.Status, query=status.StatusQuery
        ),
        Operation(
            "GET /v1/status/history",
            history.of_server,
            ALL,
            "statusHistory",
            "Figures of the server in the last 24 hours, by the minute",
            history.History,
            "Kept in memory since the start.",
            query=history.HistoryQuery,
        ),
        Operation(
            "POST /v1/command",
            command.command,
            TOKEN,
            "command",
            "The command protocol of Youzan-style queues",
            command.CommandAnswer,
            "`add`, `pop`, `finish` and `delete`; always 200, success or not is in the answer.",
            body=command.Command,
            body_example={"command": "add", "topic": "jobs", "id": "j1", "delay": 0, "TTR": 30, "body": "work"},
            answer_example={"success": True, "error": "", "id": "j1", "value": None},
        ),
        Operation(
            "POST /v1/backup",
            backup.pin,
            ADMIN,
            "pinBackup",
            "Keep all files as they are for a copy",
            answers.Pinned,
            status=201,
            audit="backup",
        ),
        Operation("GET /openapi.json", pages.openapi, OPEN, "openapi", "This document", JSON),
        Operation("DELETE /v1/backup", backup.unpin, ADMIN, "unpinBackup", "The copy is made, or given up", answers.Outcome),
    ),
    *tagged("Operate", *AUDITS, *CLOCKS, *TENANTS),
    *tagged("Cluster", *CLUSTER),
    *tagged(
        PAGES,
        Operation("GET /docs", pages.docs, OPEN, "docs", "A page to read it", HTML),
        Operation("GET /cluster", pages.cluster, OPEN, "clusterPage", "Nodes and copies of a cluster", HTML),
        Operation("GET /", pages.dashboard, OPEN, "dashboard", "The dashboard", HTML),
        Operation(
            "GET /pages/{file}",
            pages.file,
            OPEN,
            "pageFile",
            "What pages are made of",
            "text/css text/javascript image/svg+xml text/html",
            errors=(404,),
        ),
    ),
]

# Operations for programs: the OpenAPI document leaves out the pages, which no client calls.
DOCUMENTED = [operation for operation in OPERATIONS if operation.tag != PAGES]
# The access right of every route, by `Operation.route`.
ACCESS: dict[str, Access] = {operation.route: operation.access for operation in OPERATIONS}
# The action that the audit log names, by the handler of an operation that it notes.
AUDITED: dict[Handler, Action] = {operation.handler: operation.audit for operation in OPERATIONS if operation.audit}
