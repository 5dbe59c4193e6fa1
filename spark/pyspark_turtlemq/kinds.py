"""Kinds of a read: one table with the columns, states, logs and filters of each. Everything else is derived from it.

Rules: columns stand in the order in which a DataFrame has them, with Spark's types. A time has two columns, a timestamp and
epoch milliseconds (`_ms`). docs/SPARK.md shows this table to users; a test compares the two.
Not here: reading a column (`documents`, `journals`, `message_states`, `forecast`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark_turtlemq import attempts_column
from pyspark_turtlemq.snapshot_files import LOGS
from turtlemq.message_fields import FIELDS
from turtlemq.message_fields import Kind as FieldKind

_TIME, _MS, _TEXT, _NUMBER = "timestamp", "bigint", "string", "bigint"
BODY_TYPES = {"binary": "binary", "string": "string", "json": "variant"}  # by option `body`
DEFAULT_KIND = "delay"
DAMAGE = "damage"  # on request: the reason why a document cannot be read (mode PERMISSIVE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of a read."""

    columns: dict[str, str]  # Spark's types by name
    logs: tuple[str, ...]  # logs that a snapshot needs
    states: tuple[str, ...] = ()  # values of the column `state`
    where: tuple[str, ...] = ()  # columns that the option `where` compares; times without `_ms`
    has_body: bool = False
    has_damage: bool = True
    streams: bool = False


def _times(*names: str) -> dict[str, str]:
    """
    >>> _times("due")
    {'due': 'timestamp', 'due_ms': 'bigint'}
    """
    return {column: type_ for name in names for column, type_ in ((name, _TIME), (f"{name}_ms", _MS))}


def _optional_columns() -> dict[str, str]:
    """Columns of the optional fields of messages, by the names of their elements."""
    columns: dict[str, str] = {}
    for row in FIELDS:
        columns |= _times(row.element) if row.kind is FieldKind.TIME else {row.element: _OPTIONAL_TYPES[row.kind]}
    return columns


_ATTEMPTS = {attempts_column.NAME: attempts_column.SPARK_TYPE}
_OPTIONAL_TYPES = {FieldKind.NUMBER: _NUMBER, FieldKind.TEXTS: "map<string,string>"}
_MESSAGE = {
    **_times("due", "created"),
    "seq": _NUMBER,
    "ttr_ms": _MS,
    "priority": _TEXT,
    "json": "boolean",
    **_times("expires"),
    "attempt": "int",
    "error": _TEXT,
    "headers": "map<string,string>",
    "body_bytes": "int",
    "segment": _TEXT,
    "position": _NUMBER,
    **_optional_columns(),  # new ones behind all others; those above keep their places
}
KINDS = {
    "delay": Kind(  # sleepers; `group` is set for a sleeping retry
        {"topic": _TEXT, "id": _TEXT, "group": _TEXT, "state": _TEXT, **_MESSAGE},
        logs=("delay", "ready"),
        states=("sleep", "handed_off", "cancelled", "replaced"),
        where=("topic", "id", "group", "state", "due", "seq"),
        has_body=True,
    ),
    "ready": Kind(  # the ready log; a notice says that a sleeper was cancelled
        {"topic": _TEXT, "offset": _NUMBER, "id": _TEXT, "group": _TEXT, "state": _TEXT, **_times("ready"), **_MESSAGE},
        logs=("ready",),
        states=("ready", "notice"),
        where=("topic", "id", "group", "state", "due", "seq", "offset", "ready"),
        has_body=True,
        streams=True,
    ),
    "dead": Kind(  # dead letters; `due` is the due time that the producer asked for
        {
            "topic": _TEXT,
            "id": _TEXT,
            "group": _TEXT,
            "state": _TEXT,
            **_times("dropped"),
            "offset": _NUMBER,
            **_MESSAGE,
            **_ATTEMPTS,
        },
        logs=("dead",),
        states=("dead", "deleted", "replaced"),
        where=("topic", "id", "group", "state", "dropped", "seq"),
        has_body=True,
    ),
    "reserve": Kind(  # events of leases and retries: one row for each message of an event
        {
            "topic": _TEXT,
            "number": _NUMBER,
            "event": _TEXT,
            "group": _TEXT,
            **_times("at"),
            "epoch": _NUMBER,
            "consumer": _TEXT,
            "offset": _NUMBER,
            "seq": _NUMBER,
            "attempt": "int",
            **_times("until"),
            "error": _TEXT,
        },
        logs=("reserve",),
    ),
    "history": Kind(  # events that end a message: one row for each message of an event
        {
            "topic": _TEXT,
            "number": _NUMBER,
            "event": _TEXT,
            "outcome": _TEXT,
            "group": _TEXT,
            **_times("at"),
            "epoch": _NUMBER,
            "offset": _NUMBER,
            "seq": _NUMBER,
            "id": _TEXT,
            **_times("due", "ready", "reserved"),
            "attempt": "int",
            "error": _TEXT,
        },
        logs=("history",),
        streams=True,
    ),
    "forecast": Kind(  # number of sleepers by due time, from the tables alone
        {"topic": _TEXT, **_times("due"), "messages": _NUMBER}, logs=("delay", "ready"), has_damage=False
    ),
    "schedules": Kind(  # versions of recurring schedules; `id` is the name, body and headers are those of its messages
        {
            "topic": _TEXT,
            "id": _TEXT,
            "state": _TEXT,
            "cron": _TEXT,
            "zone": _TEXT,
            "every_ms": _MS,
            "delays_ms": "array<bigint>",
            **_times("start", "end"),
            "count": _NUMBER,
            "jitter_ms": _MS,
            "catch_up": _TEXT,
            "overlap": _TEXT,
            "paused": "boolean",
            **_times("next", "last"),
            "fired": _NUMBER,
            **_times("ended", "created"),
            "seq": _NUMBER,
            "ttr_ms": _MS,
            "priority": _TEXT,
            "json": "boolean",
            "headers": "map<string,string>",
            "body_bytes": "int",
            "segment": _TEXT,
            "position": _NUMBER,
        },
        logs=("schedules",),
        states=("current", "deleted", "replaced"),
        where=("topic", "id", "state", "seq"),
        has_body=True,
    ),
    "messages": Kind(  # the life of a message: one row for each group that it concerns
        {
            "topic": _TEXT,
            "id": _TEXT,
            "group": _TEXT,
            "state": _TEXT,
            "outcome": _TEXT,
            **_times("created", "due", "ready", "reserved", "settled"),
            "late_ms": _MS,
            "wait_ms": _MS,
            "work_ms": _MS,
            "attempt": "int",
            "error": _TEXT,
            "consumer": _TEXT,
            "offset": _NUMBER,
            "seq": _NUMBER,
            "priority": _TEXT,
            "ttr_ms": _MS,
            "body_bytes": "int",
            **_ATTEMPTS,
        },
        logs=LOGS,
        states=("sleep", "ready", "reserve", "history", "dead", "cancelled"),
        has_damage=False,
    ),
}
TIMES = frozenset(name for kind in KINDS.values() for name, type_ in kind.columns.items() if type_ == _TIME)


def available_columns(kind: str, body: str, body_schema: str = "") -> dict[str, str]:
    """All columns that a read can have, with Spark's types: those of the kind, the body if asked for, and `damage`."""
    columns = dict(KINDS[kind].columns)
    if KINDS[kind].has_body and body in BODY_TYPES:
        columns["body"] = f"struct<{body_schema}>" if body == "json" and body_schema else BODY_TYPES[body]
    if KINDS[kind].has_damage:
        columns[DAMAGE] = _TEXT
    return columns
