"""Documents of the ready log as messages of a group, in columns."""

from __future__ import annotations

import numpy as np

from turtlemq import small_batches
from turtlemq.broker.group import MessageColumns
from turtlemq.model import I64
from turtlemq.segment import fields, log
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather


def columns(name: str, read: log.Documents, offsets: I64, times: I64, which: I64, attempts: I64 | None) -> MessageColumns:
    """The documents `which` of a read as messages of group `name`. `attempts`: the number of each delivery, if the caller knows
    it."""
    heads, starts = read.heads, read.starts
    if len(which) < len(starts):
        heads, starts, offsets, times = heads[which], starts[which], offsets[which], times[which]
    ids = _ids(read, starts + f.PREFIX_BYTES, heads["idlen"])
    counted = np.ones(len(which), np.int64) if attempts is None else attempts
    due_ms = heads["due"].astype(np.int64)
    if len(slept := np.flatnonzero(heads["flags"] & f.META)):
        noted, due_ms[slept] = _notes(read, which[slept])
        if attempts is None:
            counted[slept] = noted
        for k in slept.tolist():
            ids[k] = ids[k][len(name) + 1 :]  # on disk they are group/id
    return MessageColumns(offsets, heads["seq"].astype(np.int64), due_ms, times, counted, ids)


def _ids(read: log.Documents, starts: I64, lengths: I64) -> list[str]:
    """Ids as texts. On disk each ends with a NUL, and has none in it: 50 ns each if few lengths differ, else 300 ns."""
    return gather(read.buffer, starts, lengths)[:-1].decode().split("\0") if len(starts) else []


def _notes(read: log.Documents, which: I64) -> tuple[I64, I64]:
    """Attempts and due times of retries that slept."""
    if len(which) < small_batches.DOCUMENTS:
        notes = [read.decode(i).meta for i in which.tolist()]
        return np.array([int(meta["attempt"]) for meta in notes]), np.array([int(meta["due"]) for meta in notes])
    view = memoryview(read.buffer)
    return fields.retry_notes(view, fields.locate(view, read.starts[which], read.heads[which]).meta)
