"""Handoff: due messages move from the Index to the Broker, a slice at a time, and how late they were.

The Broker writes documents and the new progress mark in one append; only then the Index counts them as handed off. A full disk
keeps them asleep.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from turtlemq import small_batches
from turtlemq.errors import DiskFull
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.model import SEQ_COUNTER_BITS, Due
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather
from turtlemq.storage.ballast import Ballast
from turtlemq.topic.stores import Stores

SLICE_MESSAGES = 4_000  # handed off before other topics and requests get their turn: 2 to 3 ms
SLICE_BYTES = 4 << 20  # likewise: 10 ms, to read, verify and write them


class Handoff:
    """Moves due messages of one topic."""

    def __init__(self, stores: Stores, ballast: Ballast) -> None:
        self._stores, self._ballast = stores, ballast
        self.lateness = Histogram(LATENESS_MS)  # of handoffs; messages that were due when they arrived do not count

    def run(self, now_ms: int) -> int | None:
        """Hand off one slice. Returns how many messages the Broker took, None if nothing was due. Raises `DiskFull` if there is
        no room; then they stay asleep."""
        index, broker = self._stores.index, self._stores.broker
        room = self._ballast.spare(SLICE_BYTES)
        due = index.due(now_ms, count_max=SLICE_MESSAGES, bytes_max=room)
        if due is None:
            return None
        fresh = self._not_handed_off(due) if len(due) and broker.ready.is_damaged else due
        if len(fresh):
            if len(fresh.raw) > room < SLICE_BYTES:  # `due` gives one message at least
                raise DiskFull
            broker.accept(fresh, now_ms)
            self._note_lateness(fresh, now_ms)
        index.advance(due)
        return len(fresh)

    def _not_handed_off(self, due: Due) -> Due:
        """Without the messages that the ready log already has. Where it is damaged, its newest progress mark may be lost, so that
        messages come due a second time. A retry always counts as new: its id is the same at each attempt."""
        heads = f.prefixes(due.raw, due.starts)
        begin, sizes = due.starts + f.PREFIX_BYTES, heads["idlen"].astype(np.int64) - 1
        texts = [due.raw[a:b] for a, b in zip(begin.tolist(), (begin + sizes).tolist(), strict=True)]
        known = self._stores.broker.ready.find_many(texts)
        cancelled = self._stores.broker.ready.cancelled_among(known.values())  # those ids may have new messages
        known = {i: offset for i, offset in known.items() if offset not in cancelled or self._is_at(offset, int(due.seq[i]))}
        keep = np.array([i for i in range(len(due)) if i not in known or heads["flags"][i] & f.META], np.int64)
        lengths = heads["len"][keep].astype(np.int64)
        raw = bytes(gather(due.raw, due.starts[keep], lengths))
        flags = int(np.bitwise_or.reduce(heads["flags"][keep]))
        starts, due_ms, seq = np.cumsum(lengths) - lengths, due.due_ms[keep], due.seq[keep]
        return replace(due, raw=raw, starts=starts, due_ms=due_ms, seq=seq, flags=flags, hashes=None)

    def _is_at(self, offset: int, seq: int) -> bool:
        """Does the ready log have the document with this seq there?"""
        return int(self._stores.broker.ready.heads(np.array([offset]))["seq"][0]) == seq

    def _note_lateness(self, due: Due, now_ms: int) -> None:
        if len(due) >= small_batches.HISTOGRAM:
            self.lateness.add_many((now_ms - due.due_ms)[due.due_ms > due.seq >> SEQ_COUNTER_BITS])
            return
        for due_ms, seq in zip(due.due_ms.tolist(), due.seq.tolist(), strict=True):
            if due_ms > seq >> SEQ_COUNTER_BITS:
                self.lateness.add(now_ms - due_ms)
