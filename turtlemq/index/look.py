"""Looking at sleepers without changing anything: pages of them in due order, and how many come due when."""

from __future__ import annotations

import numpy as np

from turtlemq.errors import InvalidArgument
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Array, Cursor, Part, TablePart
from turtlemq.index.shelf import Shelf
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS, U64, Forecast
from turtlemq.segment import format as f

BUCKETS_MAX = 100_000
LIMIT_MAX = 10_000


def browse(shelf: Shelf, from_ms: int, to_ms: int, limit: int, cursor: str | None) -> tuple[list[f.Document], str | None]:
    """Sleepers due in [from_ms, to_ms], ordered by (due, seq), and a cursor for the next page."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"limit is 1 to {LIMIT_MAX}, not {limit}")
    if not 0 <= from_ms <= to_ms <= DUE_MS_MAX:
        raise InvalidArgument(f"from_ms {from_ms} and to_ms {to_ms} do not make a range within 0 to {DUE_MS_MAX}")
    after = parse_cursor(cursor)
    low = max(from_ms, after[0])
    picked = _first_keys(shelf, low, to_ms, after, limit)
    documents = (shelf.read_one(part, ordinal) for part, ordinal in picked)
    found = sorted((d for d in documents if d is not None and (d.due_ms, d.seq) > after), key=lambda d: (d.due_ms, d.seq))
    page = found[:limit]
    return page, f"{page[-1].due_ms}-{page[-1].seq}" if len(found) > limit else None


def _first_keys(shelf: Shelf, low: int, to_ms: int, after: tuple[int, int], limit: int) -> list[tuple[Part, int]]:
    """The sleepers that can be on the page, as (part, ordinal): `limit` + 1 of them, and ties that the last page had."""
    dues: list[I64] = []
    places: list[tuple[Part, int]] = []
    skipped = 0
    for part in shelf.parts:
        for cursor in _cursors(part):
            first = max(cursor.pos, cursor.keys.rank(low << ORDINAL_BITS))
            last = cursor.keys.rank((to_ms + 1) << ORDINAL_BITS)
            wanted = limit + 1
            if after[1] and part.first_seq <= after[1]:
                ties = max(0, cursor.keys.rank((low + 1) << ORDINAL_BITS) - first)
                wanted, skipped = wanted + ties, skipped + ties
            while first < last and wanted > 0:
                keys = cursor.keys.slice(first, min(first + wanted, last))
                keys = keys[part.alive(f.key_ordinals(keys))]
                dues.append(f.key_dues(keys))
                places += [(part, ordinal) for ordinal in f.key_ordinals(keys).tolist()]
                first, wanted = first + wanted, wanted - len(keys)
    if not places:
        return []
    due = np.concatenate(dues)
    order = np.argsort(due, kind="stable")
    edge = due[order[min(limit + skipped, len(order) - 1)]]
    return [places[i] for i in order[due[order] <= edge].tolist()]


def parse_cursor(cursor: str | None) -> tuple[int, int]:
    """(due, seq) behind which the next page begins."""
    if cursor is None:
        return (0, 0)
    try:
        due, seq = cursor.split("-")
        if not (due.isdigit() and seq.isdigit() and int(due) <= DUE_MS_MAX and int(seq) < 1 << 63):
            raise ValueError
        return int(due), int(seq)
    except ValueError:
        raise InvalidArgument(f"{cursor!r:.80} is no cursor of this list") from None


def _cursors(part: Part) -> list[Cursor]:
    if not isinstance(part, Memtable) or not part.small:
        return part.cursors
    return [*part.cursors, Cursor(part, Array(np.array(list(part.small), np.uint64)), part.first_seq)]


def forecast(shelf: Shelf, now_ms: int, bucket_ms: int, buckets: int) -> Forecast:
    """Counts of sleepers by due time, from keys and dead bits alone."""
    if bucket_ms < 1 or not 1 <= buckets <= BUCKETS_MAX:
        raise InvalidArgument(f"a forecast has 1 to {BUCKETS_MAX:,} buckets of at least a millisecond")
    edges = now_ms + bucket_ms * np.arange(buckets + 1, dtype=np.int64)
    keys = np.minimum(edges, DUE_MS_MAX + 1).astype(np.uint64) << np.uint64(ORDINAL_BITS)
    total = 0
    below = np.zeros(buckets + 1, np.int64)
    for part in shelf.parts:
        for cursor in _cursors(part):
            counted, everything = _count(part, cursor, keys)
            below += counted
            total += everything
    counts = np.diff(below)
    return Forecast(now_ms, bucket_ms, counts.tolist(), int(below[0]), int(total - below[-1]))


def _count(part: Part, cursor: Cursor, keys: U64) -> tuple[I64, int]:
    """How many sleepers of a cursor sort below each key, and how many there are."""
    ranks = np.maximum(cursor.keys.ranks(keys), cursor.pos)
    end = len(cursor.keys)
    if part.dead is None:
        return ranks - cursor.pos, end - cursor.pos
    if isinstance(part, TablePart) and part.sealed and not cursor.late:  # an ordinal is a rank
        dead = part.dead.counts_before(np.concatenate((ranks, [cursor.pos, end])))
    else:
        ended = ~part.alive(f.key_ordinals(cursor.keys.slice(0, end)))
        dead = np.append(0, np.cumsum(ended))[np.concatenate((ranks, [cursor.pos, end]))]
    here, at_pos, at_end = dead[:-2], int(dead[-2]), int(dead[-1])
    return ranks - cursor.pos - (here - at_pos), end - cursor.pos - (at_end - at_pos)
