"""The table entry of transactions. It belongs to the table in `operations`."""

from __future__ import annotations

from turtlemq.server.auth import PRODUCE
from turtlemq.server.handlers import transaction
from turtlemq.server.operation import Operation

TRANSACT = Operation(
    "POST /v1/topics/{topic}/transaction",
    transaction.transact,
    PRODUCE,
    "transact",
    "Put, cancel and reschedule together: all of it or nothing",
    transaction.Done,
    "One commit, under the conditions of `if`. Sleepers alone can be cancelled and rescheduled here. `409 CONFLICT` with "
    "`condition`, its index, and `state` for the first condition that is not met; with `operation`, `index` and `state` "
    "for an operation that cannot be done. At most 10,000 operations and conditions, and no id in two operations.",
    body=transaction.Operations,
    body_example={
        "put": [{"id": "order-18", "body": {"close": 18}, "delay": 1800}],
        "if": [{"id": "order-18", "state": "unknown"}],
    },
    errors=(404, 408, 409, 413, 415, 507),
    answer_example={
        "put": {
            "ids": ["order-18"],
            "created": 1,
            "duplicates": 0,
            "replaced": 0,
            "rescheduled": 0,
            "durable": "fsync",
        },
        "cancelled": 0,
        "rescheduled": 0,
    },
    audit="transaction",
)
