"""The table of HTTP operations on registered clients. Its entries belong to the table in `operations`."""

from __future__ import annotations

from turtlemq.server.auth import CONSUME, GROUP, READ
from turtlemq.server.handlers import clients
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_CLIENTS = "/v1/topics/{topic}/groups/{group}/clients"
_CLIENT = _CLIENTS + "/{client}"
_BODY = (408, 413, 415)
_NOW = 1_790_000_000_000
_FIELDS = {
    "client": "worker-1",
    "name": "worker-1",
    "group": "default",
    "transport": "http",
    "state": "active",
    "capacity": 16,
    "window": 4,
    "unacked": 1,
    "since_ms": _NOW,
    "beat_ms": _NOW + 10_000,
    "url": "https://hooks.shop.example/orders",
    "ttl": 30,
    "timeout": 30.0,
    "at_most_once": False,
    "failures": 0,
    "last_error": "",
}

CLIENTS = [
    Operation(
        f"POST {_CLIENTS}",
        clients.register,
        CONSUME,
        "registerClient",
        "Register a URL for callbacks",
        answers.Registered,
        "The server sends ready messages of the group to the URL, signed with `secret`, which no other answer shows. A heartbeat "
        "is due each `beat_s` seconds; with `ttl` 0 the endpoint stays until it is deleted, which needs the right `admin`. "
        "Refused unless `push_hosts` of the server allows the URL. See PUSH.md.",
        status=201,
        body=clients.Register,
        body_example={"name": "worker-1", "url": "https://hooks.shop.example/orders", "capacity": 16, "ttl": 30},
        errors=(*_BODY, 404, 409, 507),
        answer_example={"client": "worker-1", "secret": "whsec_" + "A" * 43 + "=", "beat_s": 10.0, "state": "pending"},
        audit="client_registered",
    ),
    Operation(
        f"GET {_CLIENTS}",
        clients.list_group,
        READ,
        "listGroupClients",
        "The registered clients of a group",
        answers.ClientList,
        "Those with a URL and those with a stream.",
        errors=(404,),
        answer_example={"clients": [_FIELDS]},
    ),
    Operation(
        "GET /v1/topics/{topic}/clients",
        clients.list_topic,
        READ,
        "listClients",
        "The registered clients of all groups of a topic",
        answers.ClientList,
        errors=(404,),
        answer_example={"clients": [_FIELDS]},
    ),
    Operation(
        f"GET {_CLIENT}",
        clients.get,
        READ,
        "getClient",
        "One registered client",
        answers.ClientAnswer,
        errors=(404,),
        answer_example=_FIELDS,
    ),
    Operation(
        f"PUT {_CLIENT}",
        clients.beat,
        GROUP,
        "beatClient",
        "A heartbeat; pause or resume deliveries",
        answers.ClientAnswer,
        "`404 UNKNOWN_CLIENT`: register again. `free`: how many more deliveries the client could begin.",
        body=clients.Beat,
        body_example={"free": 12},
        errors=(*_BODY, 404, 507),
        answer_example=_FIELDS,
    ),
    Operation(
        f"DELETE {_CLIENT}",
        clients.remove,
        CONSUME,
        "deleteClient",
        "Send no more callbacks to a client",
        answers.Outcome,
        "Callbacks under way come to their end.",
        errors=(404, 507),
        answer_example={"outcome": "deleted"},
        audit="client_deleted",
    ),
    Operation(
        f"PUT {_CLIENT}/secret",
        clients.rotate,
        CONSUME,
        "rotateSecret",
        "Sign with another secret",
        answers.Rotated,
        "For `overlap` seconds each callback has the signatures of both secrets.",
        body=clients.Rotate,
        body_example={"overlap": 3600},
        errors=(*_BODY, 404, 507),
        answer_example={"client": "worker-1", "secret": "whsec_" + "B" * 43 + "=", "old_until_ms": _NOW + 3_600_000},
        audit="client_secret_changed",
    ),
]
