"""Spreading of due times: messages that all want to be due at one round time come due evenly over the time behind it. Pure.

A message that is due at `d` with a spread `s` becomes due at a time in [d, d + s], never before `d`. The place in it follows from
the hash of the id, so the same id has the same place in every process; messages whose id the server gives follow each other in
steps of the golden ratio, which fills an interval evenly at every moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turtlemq.model import DUE_MS_MAX, I64, U64, Batch
from turtlemq.segment.ids import hash_texts

SEED = 0  # a constant, so that the place of an id is the same everywhere
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


class Spreader:
    """Spreads the batches of one topic. Called by one thread."""

    def __init__(self) -> None:
        self._given = 0  # messages without an own id so far

    def spread(self, batch: Batch, default_ms: int) -> Batch:
        """The batch with its final due times. `default_ms`: of messages that do not say how far. O(1) if nothing is spread."""
        if batch.spread_ms is None and not default_ms:
            return batch
        given = [default_ms] * len(batch) if batch.spread_ms is None else batch.spread_ms
        widths = np.array([default_ms if width is None else width for width in given], np.uint64)
        due = np.asarray(batch.due_ms, np.int64)
        later: I64 = due + offsets(self._fractions(batch.ids, len(batch)), widths)
        return replace(batch, due_ms=np.minimum(later, np.maximum(due, DUE_MS_MAX)), spread_ms=None)

    def _fractions(self, ids: Sequence[str | None] | None, count: int) -> U64:
        """The place of each message in its interval, as a fraction of 2^32."""
        numbers = np.arange(self._given, self._given + count, dtype=np.uint64)
        self._given += count
        out: U64 = numbers * np.uint64(_GOLDEN)  # arrays wrap around
        own = [] if ids is None else [i for i, id_ in enumerate(ids) if id_]
        if ids is not None and own:
            out[own] = hash_texts([str(ids[i]).encode() for i in own], SEED)
        return out >> np.uint64(32)


def offsets(fractions: U64, widths: U64) -> I64:
    """Milliseconds from 0 to each width, both included. Requires: widths below 2^32.

    >>> offsets(np.array([0, 1 << 31, (1 << 32) - 1], np.uint64), np.array([600, 600, 600], np.uint64)).tolist()
    [0, 300, 600]
    """
    return (fractions * (widths + np.uint64(1)) >> np.uint64(32)).astype(np.int64)


def what_if(counts: Sequence[int], bucket_ms: int, spread_ms: int) -> tuple[list[int], int]:
    """A forecast as it would be if each message were spread: expected counts, and how many would be due behind the last bucket.
    Herds are due at the beginning of a bucket, so messages count as due there.

    >>> what_if([600, 0, 0, 3], 60_000, 180_000)
    ([200, 200, 200, 1], 2)
    """
    if not spread_ms:
        return list(counts), 0
    steps = min(-(-spread_ms // bucket_ms), len(counts))
    shares = np.minimum(np.arange(1, steps + 1) * bucket_ms, spread_ms) / spread_ms
    through = np.cumsum(np.convolve(np.asarray(counts, np.float64), np.diff(shares, prepend=0.0))[: len(counts)])
    edges = np.rint(through).astype(np.int64)
    return np.diff(edges, prepend=0).tolist(), int(sum(counts) - edges[-1])
