"""Columns: what each kind of read has to offer, with Spark's types. Times come twice: for people, and as `_ms`."""

from __future__ import annotations

_TIME, _MS, _TEXT, _NUMBER = "timestamp", "bigint", "string", "bigint"


def _times(*names: str) -> dict[str, str]:
    """
    >>> _times("due")
    {'due': 'timestamp', 'due_ms': 'bigint'}
    """
    return {column: type_ for name in names for column, type_ in ((name, _TIME), (f"{name}_ms", _MS))}


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
}
KINDS: dict[str, dict[str, str]] = {
    # sleepers: state is sleep, handed_off, cancelled or replaced; group is set where one sleeps for another attempt of that group
    "delay": {"topic": _TEXT, "id": _TEXT, "group": _TEXT, "state": _TEXT, **_MESSAGE},
    # the ready log: state is ready, or notice for the note that a sleeper was cancelled
    "ready": {"topic": _TEXT, "offset": _NUMBER, "id": _TEXT, "group": _TEXT, "state": _TEXT, **_times("ready"), **_MESSAGE},
    # dead letters: state is dead, deleted (or requeued) or replaced; due is what the producer asked for
    "dead": {"topic": _TEXT, "id": _TEXT, "group": _TEXT, "state": _TEXT, **_times("dropped"), "offset": _NUMBER, **_MESSAGE},
    # what consumers took: one row for each message of an event
    "reserve": {
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
    # how it ended: one row for each message of an event
    "history": {
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
    # how many sleepers come due when, from the tables alone
    "forecast": {"topic": _TEXT, **_times("due"), "messages": _NUMBER},
    # the whole life of a message, one row for each group that has to do with it
    "messages": {
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
    },
}
WITH_BODY = ("delay", "ready", "dead")
BODIES = {"binary": "binary", "string": "string", "json": "variant"}
DAMAGE = "damage"  # on request: what is wrong with a document that cannot be read (mode PERMISSIVE)


def available_columns(kind: str, body: str, body_schema: str = "") -> dict[str, str]:
    """All columns that a read may have, by name."""
    found = dict(KINDS[kind])
    if kind in WITH_BODY and body in BODIES:
        found["body"] = f"struct<{body_schema}>" if body == "json" and body_schema else BODIES[body]
    if kind not in ("messages", "forecast"):
        found[DAMAGE] = _TEXT
    return found
