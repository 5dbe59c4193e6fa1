"""Validation of a batch before anything changes: numbers in range, sizes, ids, headers.

Whole columns are checked at once; only a bad one is searched for its first bad item, whose index is in the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from turtlemq import small_batches
from turtlemq.errors import InvalidArgument, InvalidFireAt, InvalidId, InvalidMessage, TooLarge
from turtlemq.index.columns import number_column, optional_elements
from turtlemq.message_fields import FIELDS, NAMES, Kind, OptionalField
from turtlemq.model import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BODY_BYTES_MAX,
    DUE_MS_MAX,
    HEADERS_BYTES_MAX,
    ID_BYTES_MAX,
    SEQ_MAX,
    TTR_MS_MAX,
    VERSIONS_MAX,
    Batch,
    CheckedBatch,
    Message,
)
from turtlemq.segment import format as f
from turtlemq.segment import kernel
from turtlemq.segment.ids import hash_any

_CHECKED_AT_ONCE = 2_048  # ids: a join of 100,000 on a thread would keep the event loop waiting for 150 ms, as one bytecode
_TEXT_BYTES = 7  # that BSON adds to a name and its value: a thousand tiny headers must not exceed the limit of a document
_MAY_BE_NONE = attrgetter("ids", "ttr_ms", *NAMES)
_NOTHING_ELSE = (None,) * len(("ids", "ttr_ms", *NAMES))
_GOOD_FLAGS = frozenset(flag for flag in range(f.USER_FLAGS + 1) if flag & f.PRIORITY != f.PRIORITY)


def checked(batch: Batch, seed: int) -> CheckedBatch:
    """A checked batch, which `Index.stage` need not check again. Raises as `check_batch` does. `seed`: for the hashes of ids.

    Up to 3 µs a message, 7 µs with optional fields; pure, so the server calls it on a thread for a large batch."""
    batch = with_due_column(batch)
    check_batch(batch)
    columns = {column.name: getattr(batch, column.name) for column in fields(Batch)}
    raw_ids = [b"" if id_ is None else id_.encode() for id_ in batch.ids or ()]
    hashes, own_ids, lacks_ids = hash_any(raw_ids, seed), frozenset(filter(None, raw_ids)), not all(raw_ids)
    if lacks_ids:
        hashes[[not raw for raw in raw_ids]] = 0
    elements = optional_elements(batch, range(len(batch)))
    return CheckedBatch(**columns, raw_ids=raw_ids, own_ids=own_ids, hashes=hashes, lacks_ids=lacks_ids, elements=elements)


def pick(batch: CheckedBatch, rows: Sequence[int]) -> CheckedBatch:
    """These messages of a checked batch with ids."""

    def some(column: Any) -> Any:
        return column if column is None or isinstance(column, int) else [column[i] for i in rows]

    columns = {column.name: some(getattr(batch, column.name)) for column in fields(Batch)}
    columns["due_ms"] = np.asarray(columns["due_ms"], np.int64)
    raw_ids, hashes = some(batch.raw_ids), batch.hashes[rows]
    own_ids = frozenset(filter(None, raw_ids))
    elements = None if batch.elements is None else (some(batch.elements[0]), some(batch.elements[1]))
    return CheckedBatch(**columns, raw_ids=raw_ids, own_ids=own_ids, hashes=hashes, lacks_ids=not all(raw_ids), elements=elements)


def with_due_column(batch: Batch) -> Batch:
    """The batch with its due times as an array, unless it is small."""
    if len(batch.bodies) >= small_batches.DOCUMENTS and isinstance(batch.due_ms, list):
        return replace(batch, due_ms=number_column(batch.due_ms))
    return batch


def check_batch(batch: Batch) -> None:
    """Raise for a batch with anything outside the limits."""
    count = len(batch.bodies)
    if count == 1 and _is_simple(batch):
        return
    if not 1 <= count <= BATCH_MESSAGES_MAX:
        raise InvalidArgument(f"a batch holds 1 to {BATCH_MESSAGES_MAX:,} messages, this one {len(batch):,}")
    if batch.if_exists is not None and count > VERSIONS_MAX:
        raise TooLarge(f"a batch with `if_exists` holds at most {VERSIONS_MAX:,} messages, this one {count:,}: put it in parts")
    for column in (batch.due_ms, batch.flags, *_MAY_BE_NONE(batch)):
        if column is not None and not isinstance(column, int) and len(column) != count:
            raise InvalidArgument(f"a column has {len(column)} entries for {len(batch)} messages")
    size = _check_bodies(batch.bodies)
    _check_range(batch.due_ms, 0, DUE_MS_MAX, InvalidFireAt, "due_ms")
    if batch.ttr_ms is not None:
        _check_range(batch.ttr_ms, 0, TTR_MS_MAX, InvalidMessage, "ttr_ms")
    if batch.flags is not None:
        _check_flags([batch.flags] if isinstance(batch.flags, int) else batch.flags)
    if batch.ids is not None:
        check_ids(batch.ids)
    for row in FIELDS:
        if (column := getattr(batch, row.name)) is not None:
            size += _check_optional(row, column)
    if size > BATCH_BYTES_MAX:
        raise TooLarge(f"a batch has at most {BATCH_BYTES_MAX:,} bytes of bodies and headers, this one {size:,}")


def _is_simple(batch: Batch) -> bool:
    """Fast path for one message with nothing but a body, a due time and flags. False: it must be checked in full."""
    if _MAY_BE_NONE(batch) != _NOTHING_ELSE or len(batch.due_ms) != 1:
        return False
    body, due_ms, flags = batch.bodies[0], batch.due_ms[0], batch.flags
    if type(body) is not bytes or len(body) > BODY_BYTES_MAX or type(due_ms) is not int or not 0 <= due_ms <= DUE_MS_MAX:
        return False
    return flags is None or (
        isinstance(flags, Sequence) and len(flags) == 1 and type(flags[0]) is int and flags[0] in _GOOD_FLAGS
    )


def _check_bodies(bodies: Sequence[bytes]) -> int:
    """Check bodies. Returns their total size in bytes."""
    if kernel.compiled is not None and (known := kernel.compiled.sizes(bodies)) is not None and known[1] <= BODY_BYTES_MAX:
        return int(known[0])
    if set(map(type, bodies)) != {bytes}:
        i = next(i for i, body in enumerate(bodies) if type(body) is not bytes)
        raise InvalidMessage(f"message {i}: a body is bytes, this one is {type(bodies[i]).__name__}", index=i)
    sizes = list(map(len, bodies))
    if max(sizes) > BODY_BYTES_MAX:
        i = next(i for i, size in enumerate(sizes) if size > BODY_BYTES_MAX)
        raise TooLarge(f"message {i}: a body has at most {BODY_BYTES_MAX:,} bytes, this one {sizes[i]:,}", index=i)
    return sum(sizes)


def _check_flags(flags: Sequence[int]) -> None:
    _check_range(flags, 0, f.USER_FLAGS, InvalidMessage, "flags")
    for flag in set(flags):
        if flag & f.PRIORITY == f.PRIORITY:
            i = list(flags).index(flag)
            raise InvalidMessage(f"message {i}: there is no priority {f.PRIORITY}", index=i)


def _check_range(values: Any, low: int, high: int, error: type[InvalidMessage | InvalidFireAt], name: str) -> None:
    if _in_range(values, low, high):
        return
    for i, value in enumerate(values):
        if isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_) and low <= value <= high:
            continue
        shown = value.item() if isinstance(value, np.generic) else value
        raise error(f"message {i}: {name} is a whole number from {low} to {high}, this one is {shown!r:.80}", index=i)


def _in_range(values: Any, low: int, high: int) -> bool:
    if len(values) < small_batches.DOCUMENTS:
        return set(map(type, values)) == {int} and min(values) >= low and max(values) <= high
    if not isinstance(values, np.ndarray) and set(map(type, values)) != {int}:
        return False
    try:
        column = np.asarray(values)
        return column.dtype.kind in "iu" and bool(column.min() >= low) and bool(column.max() <= high)
    except (ValueError, OverflowError, TypeError):
        return False


def _plain_ids(ids: Sequence[Any]) -> bool:
    """Fast path without a loop: are all ids certainly valid?"""
    if kernel.compiled is not None and kernel.compiled.are_plain_ids(ids, ID_BYTES_MAX):
        return True
    try:
        text = "/".join(ids)
    except TypeError:
        return False
    apart = text.count("/") == len(ids) - 1 and "//" not in text and not text.startswith(("/", "-")) and not text.endswith("/")
    longest = ID_BYTES_MAX if text.isascii() else ID_BYTES_MAX // 4
    return bool(text) and apart and "/-" not in text and text.isprintable() and max(map(len, ids)) <= longest


def check_ids(ids: Sequence[Any]) -> None:
    """Raise for an id that is not 1 to 200 bytes of printable UTF-8, starts with '-' or contains '/'. None: the server gives
    one."""
    for first in range(0, len(ids), _CHECKED_AT_ONCE):
        _check_ids(ids[first : first + _CHECKED_AT_ONCE], first)


def _check_ids(ids: Sequence[Any], first: int) -> None:
    """`check_ids` for a slice of a list of ids. `first`: the index of the first one."""
    if _plain_ids(ids):
        return
    for i, id_ in enumerate(ids, first):
        if id_ is None:
            continue
        if not isinstance(id_, str) or not id_ or id_[0] == "-" or "/" in id_ or not id_.isprintable():
            raise InvalidId(f"message {i}: {id_!r:.220} is no id. {InvalidId.__doc__}", index=i)
        if len(id_) > ID_BYTES_MAX // 4 and len(id_.encode()) > ID_BYTES_MAX:
            raise InvalidId(f"message {i}: an id has at most {ID_BYTES_MAX} bytes, this one {len(id_.encode())}", index=i)


def _check_optional(row: OptionalField, column: Sequence[Any]) -> int:
    """Refuse a column of an optional field with a bad value. Returns the number of bytes that texts in it take."""
    if row.kind is Kind.TEXTS:
        return sum(_check_texts(row.name, texts, i) for i, texts in enumerate(column) if texts is not None)
    low, high = (0, DUE_MS_MAX) if row.kind is Kind.TIME else (-SEQ_MAX, SEQ_MAX)
    _check_range([0 if value is None else value for value in column], low, high, InvalidMessage, row.name)
    return 0


def check_expiry(batch: Batch, now_ms: int) -> None:
    """Refuse a message that sleeps until it has expired: it could only die. One whose due time has come is only late."""
    if batch.expires_ms is None:
        return
    column = batch.expires_ms
    expires = column if isinstance(column, np.ndarray) else np.array([DUE_MS_MAX + 1 if at is None else at for at in column])
    due = np.asarray(batch.due_ms)
    if (wrong := (due > now_ms) & (expires <= due)).any():
        i = int(wrong.argmax())
        raise InvalidMessage(
            f"message {i}: expires_ms {expires[i]} is not after its due time, {due[i]}: it could only die", index=i
        )


def check_new_due(message: Message, due_ms: int | None, now_ms: int) -> None:
    """Refuse another due time for a message that has expired by then. None: it keeps the one that it has."""
    if due_ms is not None and message.expires_ms is not None and now_ms < due_ms >= message.expires_ms:
        raise InvalidFireAt(
            f"{message.id!r} has expires_ms {message.expires_ms}, and would be due at {due_ms}: it could only die"
        )


def _check_texts(field: str, texts: Any, i: int) -> int:
    """Refuse bad texts by name, such as headers. Returns how many bytes they take."""
    if not isinstance(texts, dict):
        raise InvalidMessage(f"message {i}: {field} are text by name, not {type(texts).__name__}", index=i)
    size = 0
    for name, value in texts.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "\0" in name:
            raise InvalidMessage(f"message {i}: {field} are text by name, without NUL in a name", index=i)
        try:
            size += len(name.encode()) + len(value.encode()) + _TEXT_BYTES
        except UnicodeEncodeError:
            raise InvalidMessage(f"message {i}: a {field.removesuffix('s')} is not valid text", index=i) from None
    if size > HEADERS_BYTES_MAX:
        raise TooLarge(
            f"message {i}: {field} have at most {HEADERS_BYTES_MAX:,} bytes with {_TEXT_BYTES} for each, these {size:,}", index=i
        )
    return size
