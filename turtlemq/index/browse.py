"""Read-only views of sleepers: pages in due order, and a forecast (counts by due time).

Pages read keys first and then only the documents of the page; a forecast reads no document. Nothing is changed.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # numpy.unique loads it at its first call: 20 ms that no tick should wait for

from turtlemq.errors import InvalidArgument
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import Cursor, KeyArray, Part, TablePart, rank_behind
from turtlemq.index.segments import Segments
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS, U64, Forecast
from turtlemq.segment import format as f

BUCKETS_MAX = 100_000
LIMIT_MAX = 10_000
PAGE_BYTES = 16 << 20  # of documents on one page
_STRIDE = 512  # keys read at once: many of them may be cancelled


def browse(
    segments: Segments, from_ms: int, to_ms: int, limit: int, cursor: str | None, newest: bool = False
) -> tuple[list[f.Document], str | None]:
    """A page of sleepers due in [from_ms, to_ms], ordered by (due, seq), and the cursor of the next page, None if this is the
    last. `newest`: in the reverse order, for which the cursor must be of that order, too. A page may have fewer than `limit`
    messages if they are large. O(limit × segments)."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidArgument(f"limit is 1 to {LIMIT_MAX}, not {limit}")
    if not 0 <= from_ms <= to_ms <= DUE_MS_MAX:
        raise InvalidArgument(f"from_ms {from_ms} and to_ms {to_ms} do not make a range within 0 to {DUE_MS_MAX}")
    beyond = None if cursor is None else parse_cursor(cursor)
    wanted, bytes_max = limit + 1, PAGE_BYTES
    while True:
        parts, ordinals = _next_keys(segments, from_ms, to_ms, beyond, wanted, newest)
        taken = _fitting(segments, parts, ordinals, bytes_max)
        documents = _read(segments, parts[:taken], ordinals[:taken])
        more = taken < len(ordinals) or len(ordinals) >= wanted
        if len(documents) > limit or (documents and taken < len(ordinals)) or not more:
            break
        wanted, bytes_max = 2 * wanted, 2 * bytes_max  # damaged documents left the page empty or short
    page = documents[:limit]
    return page, f"{page[-1].due_ms}-{page[-1].seq}" if more or len(documents) > limit else None


def _next_keys(
    segments: Segments, from_ms: int, to_ms: int, beyond: tuple[int, int] | None, wanted: int, newest: bool
) -> tuple[I64, I64]:
    """The next `wanted` sleepers behind `beyond` = (due, seq), or before it if the newest come first: numbers of their parts, and
    their ordinals. Fewer only if there are no more."""
    slices: list[tuple[int, U64]] = [(0, np.empty(0, np.uint64))]
    for number, part in enumerate(segments.parts):
        for cursor in _cursors(part):
            first = max(cursor.pos, cursor.keys.rank(from_ms << ORDINAL_BITS))
            last = cursor.keys.rank((to_ms + 1) << ORDINAL_BITS)
            if beyond is not None and newest:
                last = min(last, rank_behind(segments.door, part, cursor.keys, beyond[0], beyond[1] - 1))
            elif beyond is not None:
                first = max(first, rank_behind(segments.door, part, cursor.keys, *beyond))
            left = wanted
            while first < last and left > 0:
                step = min(max(left, _STRIDE), last - first)
                keys = cursor.keys.slice(last - step, last) if newest else cursor.keys.slice(first, first + step)
                keys = keys[part.alive(f.key_ordinals(keys))]
                keys = keys[-left:] if newest else keys[:left]
                slices.append((number, keys))
                first, last = (first, last - step) if newest else (first + step, last)
                left -= len(keys)
    keys = np.concatenate([keys for _, keys in slices])
    parts = np.repeat(np.array([number for number, _ in slices]), [len(keys) for _, keys in slices])
    ordinals = f.key_ordinals(keys)
    order = np.lexsort((ordinals, parts, f.key_dues(keys)))  # parts are in the order of their seqs
    order = order[::-1][:wanted] if newest else order[:wanted]
    return parts[order], ordinals[order]


def _fitting(segments: Segments, parts: I64, ordinals: I64, bytes_max: int) -> int:
    """How many of these documents, one at least, fit into `bytes_max`."""
    sizes = np.zeros(len(ordinals), np.int64)
    for number in np.unique(parts).tolist():
        starts, ends = segments.parts[number].spans_of(ordinals[parts == number])
        sizes[parts == number] = ends - starts
    return max(1, int(np.searchsorted(np.cumsum(sizes), bytes_max, side="right")))


def _read(segments: Segments, parts: I64, ordinals: I64) -> list[f.Document]:
    """Documents in this order, without damaged ones, which are reported."""
    by_row: dict[int, f.Document] = {}
    for number in np.unique(parts).tolist():
        rows = np.flatnonzero(parts == number)
        documents = segments.read_many(segments.parts[number], ordinals[rows])
        by_row |= {row: document for row, document in zip(rows.tolist(), documents, strict=True) if document is not None}
    return [by_row[row] for row in sorted(by_row)]


def parse_cursor(cursor: str) -> tuple[int, int]:
    """The (due, seq) where the page before ended."""
    try:
        due, seq = cursor.split("-")
        if not (cursor.isascii() and due.isdigit() and seq.isdigit() and int(due) <= DUE_MS_MAX and int(seq) < 1 << 63):
            raise ValueError
        return int(due), int(seq)
    except ValueError:
        raise InvalidArgument(f"{cursor!r:.80} is no cursor of this list") from None


def _cursors(part: Part) -> list[Cursor]:
    if not isinstance(part, Memtable) or not part.single_keys:
        return part.cursors
    return [*part.cursors, Cursor(part, KeyArray(np.array(list(part.single_keys), np.uint64)), part.first_seq)]


def forecast(segments: Segments, now_ms: int, bucket_ms: int, buckets: int) -> Forecast:
    """Counts of sleepers by due time, from keys and ended bits alone."""
    if not 1 <= bucket_ms <= DUE_MS_MAX or not 1 <= buckets <= BUCKETS_MAX or not 0 <= now_ms <= DUE_MS_MAX:
        raise InvalidArgument(f"a forecast has 1 to {BUCKETS_MAX:,} buckets of at least a millisecond, from 1970 to May 2109")
    edges = now_ms + bucket_ms * np.arange(buckets + 1, dtype=np.int64)
    keys = np.minimum(edges, DUE_MS_MAX + 1).astype(np.uint64) << np.uint64(ORDINAL_BITS)
    total = 0
    below = np.zeros(buckets + 1, np.int64)
    for part in segments.parts:
        for cursor in _cursors(part):
            counted, everything = _count(part, cursor, keys)
            below += counted
            total += everything
    counts = np.diff(below)
    return Forecast(now_ms, bucket_ms, counts.tolist(), int(below[0]), int(total - below[-1]))


def _count(part: Part, cursor: Cursor, keys: U64) -> tuple[I64, int]:
    """How many sleepers of a cursor sort below each of `keys`, and how many there are in all."""
    ranks = np.maximum(cursor.keys.ranks(keys), cursor.pos)
    end = len(cursor.keys)
    if part.ended is None:
        return ranks - cursor.pos, end - cursor.pos
    if isinstance(part, TablePart) and part.sealed and not cursor.late:  # sealed in due order: an ordinal is a rank
        ended_below = part.ended.counts_before(np.concatenate((ranks, [cursor.pos, end])))
    else:
        ended = ~part.alive(f.key_ordinals(cursor.keys.slice(0, end)))
        ended_below = np.append(0, np.cumsum(ended))[np.concatenate((ranks, [cursor.pos, end]))]
    at_ranks, at_pos, at_end = ended_below[:-2], int(ended_below[-2]), int(ended_below[-1])
    return ranks - cursor.pos - (at_ranks - at_pos), end - cursor.pos - (at_end - at_pos)
