"""The column `attempts`: the last deliveries of a message to a group, a list of structs with the fields of an `Attempt`.

It is made from Python objects, message by message, so only reads that ask for it pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from turtlemq import attempts as a
from turtlemq.attempts import Attempt, Attempts
from turtlemq.broker import events
from turtlemq.model import I64

NAME = "attempts"
_TYPES = {
    "attempt": ("int", pa.int32()),
    "consumer": ("string", pa.string()),
    "reserved_ms": ("bigint", pa.int64()),
    "ended_ms": ("bigint", pa.int64()),
    "outcome": ("string", pa.string()),
    "error": ("string", pa.string()),
    "next_ms": ("bigint", pa.int64()),
}
SPARK_TYPE = f"array<struct<{','.join(f'{name}:{type_}' for name, (type_, _) in _TYPES.items())}>>"
ARROW_TYPE = pa.list_(pa.struct([(name, type_) for name, (_, type_) in _TYPES.items()]))


def of_metas(metas: Mapping[int, Mapping[str, Any]], count: int) -> pa.Array:
    """The attempts that retries and dead letters tell, by row; null for other documents."""
    return of_rows({i: a.of_notes(meta) for i, meta in metas.items()}, range(count))


def of_rows(by_row: Mapping[int, Attempts], rows: Iterable[int]) -> pa.Array:
    """The attempts of messages, given by row; null for those without."""
    known = (by_row.get(row) for row in rows)
    return pa.array([[one.fields() for one in own] if own else None for own in known], ARROW_TYPE)


def decoded(column: pa.ChunkedArray) -> list[Attempts]:
    """The attempts in a column that `of_metas` made."""
    return [tuple(Attempt(**one) for one in own or ()) for own in column.to_pylist()]


def settled(fields: Mapping[str, Any], at_ms: int, which: I64) -> list[Attempts]:
    """The attempts of messages that a SETTLE event tells, given by their index in it."""
    outcome, error = str(fields["outcome"]), str(fields["error"])
    earlier = a.decode_many(fields["earlier"]) if "earlier" in fields else {}
    numbers, reserved = (events.unpack(fields[name]) for name in ("attempts", "reserved"))
    found: list[Attempts] = []
    for i in which.tolist():
        last = Attempt(int(numbers[i]), events.consumer_at(dict(fields), i), int(reserved[i]), at_ms, outcome, error, None)
        found.append((*earlier.get(i, ()), *(() if outcome == events.EXPIRED else (last,))))
    return found


def joined(parts: Iterable[Attempts]) -> Attempts:
    """The last attempts of a message that several sources tell, each once."""
    found: Attempts = ()
    for part in parts:
        known = {_key(one) for one in part}
        found = (*(one for one in found if _key(one) not in known), *part)
    return a.latest(sorted(found, key=lambda one: one.reserved_ms))


def _key(one: Attempt) -> tuple[int, int, int | None]:
    return one.attempt, one.reserved_ms, one.ended_ms
