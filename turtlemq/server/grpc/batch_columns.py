"""The columns of a `Batch` message as a batch of the engine, and deliveries as columns. Pure.

A column is empty (the default for all), has one value for all messages, or one for each body. Every error names the index of the
first message that is wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from turtlemq.errors import InvalidArgument, InvalidFireAt, InvalidId, InvalidMessage
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.server.errors import InvalidJson
from turtlemq.server.incoming.batches import DueRules, check_dues
from turtlemq.server.incoming.decode import check_text
from turtlemq.server.incoming.depth import check_depth
from turtlemq.server.incoming.times import MS_MIN, due_time

SLICE, SLICE_BYTES = 2_000, 1 << 20  # messages and bytes that are decoded at once: about 1 ms
_texts = msgspec.json.Decoder(list[Raw])
_text = msgspec.json.Decoder(Raw)


def decode_slices(batch: Any, now_ms: int, rules: DueRules) -> Generator[None, None, Batch]:
    """Decode a `Batch` message in steps of about a millisecond. The generator returns the batch of the engine. Raises for what
    that batch could not show, and for due times and JSON that are not allowed; the Index checks the rest."""
    count = len(batch.bodies)
    if not 1 <= count <= BATCH_MESSAGES_MAX:
        raise InvalidArgument(f"a batch holds 1 to {BATCH_MESSAGES_MAX:,} messages, this one {count:,}")
    bodies = list[bytes]()
    while len(bodies) < count:
        bodies += batch.bodies[len(bodies) : len(bodies) + SLICE]
        if len(bodies) < count:
            yield
    flags = _column("flags", batch.flags, count)
    if flags is not None:
        yield from _check_json(bodies, flags)
    headers = _column("headers", batch.headers, count)
    yield
    due = _due_times(_column("due_ms", batch.due_ms, count), _column("delay_ms", batch.delay_ms, count), count, now_ms)
    check_dues(due, now_ms, rules)
    yield
    expires = _column("expires_ms", batch.expires_ms, count)
    return Batch(
        bodies=bodies,
        due_ms=due,
        ids=_ids(batch.ids, count),
        ttr_ms=_column("ttr_ms", batch.ttr_ms, count),
        flags=flags,
        expires_ms=None if expires is None else [at or None for at in expires],
        headers=None if headers is None else [dict(one.fields) or None for one in headers],
    )


def _column(name: str, given: Any, count: int) -> list[Any] | None:
    """A value for each message; None if there are none, or all numbers are 0."""
    if len(given) == count:
        values = list(given)
    elif len(given) <= 1:
        values = list(given) * count
    else:
        i = min(len(given), count)
        text = f"{name} has {len(given):,} values for {count:,} bodies; give none, one for all, or one for each"
        raise InvalidMessage(f"message {i}: {text}", index=i)
    return values if any(values) else None


def _ids(given: Any, count: int) -> list[str | None] | None:
    """An id for each message; None: the server gives one."""
    ids = _column("ids", given, count)
    if ids is None:
        return None
    if len(given) < count:
        raise InvalidId("message 1: there is one id for several messages; give each its own, or none", index=1)
    return [id_ or None for id_ in ids]


def _due_times(due: list[int] | None, delay: list[int] | None, count: int, now_ms: int) -> list[int]:
    """The due time of each message: as given, after a delay, or now."""
    if delay is None:
        out = [now_ms] * count if due is None else [at or now_ms for at in due]
    elif due is None:
        out = [now_ms + pause for pause in delay]
    else:
        out = [at or now_ms + pause for at, pause in zip(due, delay, strict=True)]
        if both := [i for i, pair in enumerate(zip(due, delay, strict=True)) if all(pair)]:
            raise InvalidFireAt(f"message {both[0]}: it has one of due_ms and delay_ms, not both", index=both[0])
    if due is not None and min(at or MS_MIN for at in due) < MS_MIN:
        i = next(i for i, at in enumerate(due) if 0 < at < MS_MIN)
        due_time(None, due[i], now_ms, i)  # raises: it looks like seconds
    if max(out) > DUE_MS_MAX:
        i = next(i for i, at in enumerate(out) if at > DUE_MS_MAX)
        raise InvalidFireAt(f"message {i}: it would be due at {out[i]}; the last time is {DUE_MS_MAX}, in May 2109", index=i)
    return out


def _check_json(bodies: Sequence[bytes], flags: Sequence[int]) -> Generator[None, None, None]:
    """Raise `InvalidJson` for a body that is to be JSON text and is none, or that is nested too deeply."""
    at = size = 0
    for end, body in enumerate(bodies, 1):
        size += len(body)
        if end == len(bodies) or end - at == SLICE or size > SLICE_BYTES:
            _check_texts(bodies, [i for i in range(at, end) if flags[i] & f.JSON])
            yield from check_depth(bodies[at:end], flags[at:end], InvalidJson, at)
            at, size = end, 0
            yield


def _check_texts(bodies: Sequence[bytes], rows: Sequence[int]) -> None:
    """Raise for the first of some bodies that is no JSON. Tries all as one list: 0.1 µs each. The list itself may be valid where
    its parts are not, so they are compared."""
    texts = [bodies[i] for i in rows]
    whole = b"".join((b"[", b",".join(texts), b"]"))
    try:
        check_text(whole)
        if list(map(bytes, _texts.decode(whole))) == texts:
            return
    except (InvalidJson, msgspec.DecodeError, RecursionError):
        pass
    for i, text in zip(rows, texts, strict=True):
        try:
            check_text(text)
            _text.decode(text)
        except (InvalidJson, msgspec.DecodeError, RecursionError) as wrong:
            raise InvalidJson(f"message {i}: its flags say that its body is JSON text: {wrong}", index=i) from None
