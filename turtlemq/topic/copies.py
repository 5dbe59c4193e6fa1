"""Copies of delivered messages for another topic: a range of the ready log, a page at a time, as batches to be stored there.

The range is one of ready times, since the ready log has messages in this order; messages that have not come due are not in it,
and need no replay. Retries of a group, notices and cancelled messages are passed over. The id of a copy is made from the topic,
the id and the first seq of its message, so copying again stores nothing twice. A copy has no expiry: it may be over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from turtlemq.model import ID_BYTES_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.topic import facts
from turtlemq.topic.stores import Stores

PAGE = 200  # documents of one page: some milliseconds
PAGE_BYTES = 1 << 20  # of their documents, nearly


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages are copied. An empty field is no condition. `state`: over all groups, at the time of the copy."""

    state: str = ""
    prefix: str = ""  # of their ids
    headers: Mapping[str, str] = field(default_factory=dict)  # that they have, among others


@dataclass(frozen=True, slots=True)
class Page:
    """Copies of the messages in a part of the range. `next`: the ready offset at which the next page begins."""

    batch: Batch
    next: int
    size: int  # bytes of the bodies


def offsets_between(stores: Stores, from_ms: int, to_ms: int) -> tuple[int, int]:
    """The ready offsets of the documents that became ready in [from_ms, to_ms), as far as they are kept."""
    ready = stores.broker.ready
    return ready.offset_at(from_ms), ready.offset_at(to_ms)


def page(stores: Stores, first: int, end: int, wanted: Wanted, due_ms: int) -> Page:
    """The next copies, of offsets from `first` on and before `end`. Requires: first < end."""
    ready = stores.broker.ready
    first = max(first, ready.first_offset)
    if first >= end:
        return Page(Batch([], []), end, 0)
    offsets = np.arange(first, min(first + PAGE, end))
    read, _ = ready.read(offsets, PAGE_BYTES)
    offsets = offsets[: len(read.good)]
    plain = read.good & ((read.heads["flags"] & (f.META | f.NOTICE)) == 0)
    gone = ready.cancelled_among(offsets[plain].tolist())
    found = [read.decode(i) for i in np.flatnonzero(plain).tolist() if int(offsets[i]) not in gone]
    found = [one for one in found if one.id.startswith(wanted.prefix) and wanted.headers.items() <= one.headers.items()]
    if wanted.state and found:
        ids = list(dict.fromkeys(one.id for one in found))
        states = facts.states(facts.facts_of(stores, ids, facts.gather(stores, ids)))
        found = [one for one in found if states[one.id] == wanted.state]
    batch = Batch(
        [one.body for one in found],
        [due_ms] * len(found),
        [copy_id(stores.name, one.id, one.arrived) for one in found],
        [one.ttr_ms for one in found],
        [one.flags & f.USER_FLAGS for one in found],
        headers=[one.headers or None for one in found] if any(one.headers for one in found) else None,
    )
    return Page(batch, int(offsets[-1]) + 1, sum(map(len, batch.bodies)))


def copy_id(topic: str, id_: str, arrived: int) -> str:
    """The id of a copy: that of the message and, behind `@`, its topic (a hash) and its first seq, in hexadecimal digits. The id
    of the message becomes a hash where there is no room for it.

    >>> copy_id("orders", "order-17", 1_790_000_000_000 << 20)
    'order-17@e7b1855b1a0c4506c0000000'
    """
    mark = f"@{xxhash.xxh32_hexdigest(topic.encode())}{arrived:x}"
    if len(id_.encode()) + len(mark) > ID_BYTES_MAX:
        id_ = xxhash.xxh3_128_hexdigest(id_.encode())
    return id_ + mark
