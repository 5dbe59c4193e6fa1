"""The choice of documents by their table: those whose time is in a range, and as many of them as one Arrow batch takes."""

from __future__ import annotations

import numpy as np

from pyspark_turtlemq.part import Part
from pyspark_turtlemq.predicates import Predicates
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS
from turtlemq.segment import format as f
from turtlemq.segment import table as t

ROWS = 1 << 14  # in an Arrow batch: their prefixes, 1 MB, stay in the processor's cache
_BYTES = 64 << 20  # of documents in an Arrow batch
_KEY_TIMES = {"delay": "due", "dead": "dropped"}  # the time by which a table's keys are sorted


def due_ranks(part: Part, table: t.Table, predicates: Predicates) -> tuple[int, int] | None:
    """Ranks [first, last) of the table's keys whose time is in the range of the predicates; None if it is not limited."""
    low, high = predicates.range(_KEY_TIMES.get(part.log, ""))
    if low <= 0 and high >= DUE_MS_MAX:
        return None
    edges = (min(max(due, 0), DUE_MS_MAX + 1) << ORDINAL_BITS for due in (low, high + 1))
    first, last = (table.rank(edge) for edge in edges)
    return first, last


def ordinals_by_due(part: Part, table: t.Table, predicates: Predicates) -> I64 | None:
    """Ordinals, sorted, of the documents in a growing segment whose time can match, by its table; None if all must be read.

    Documents without a key (tombstones, and those that had ended when the table was made) can always match."""
    ranks = None if part.sealed else due_ranks(part, table, predicates)
    if ranks is None:
        return None
    ordinals = f.key_ordinals(table.slice(*ranks))
    if len(table) < table.cover.documents:
        keyless = np.ones(table.cover.documents, np.bool_)
        keyless[f.key_ordinals(table.slice(0, len(table)))] = False
        ordinals = np.concatenate((ordinals, np.flatnonzero(keyless)))
    return np.sort(ordinals)


def batch_end(table: t.Table, ordinals: I64, first: int) -> int:
    """The end of a batch that begins at index `first`: limited by rows and bytes, one document at least."""
    last = min(first + ROWS, len(ordinals))
    begin = table.span_of(int(ordinals[first]))[0]
    while last - first > 1 and table.span_of(int(ordinals[last - 1]))[1] - begin > _BYTES:
        last = first + (last - first) // 2
    return last
