"""Tables whose blocks are damaged: the documents under them are scanned instead. A table is a cache, so no query fails for it.

Each block of a table is verified when it is first used, which may be in the middle of a read. `PartTable.use` then makes the
table anew, in memory, and repeats the step. Ordinals stay the same as long as every document is found; if one is not, it is not
known which ones the splits of other tasks mean, and the query fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from pyspark_turtlemq.part import Part, bare_table, ready_table
from turtlemq.broker.ready_batches import read_batches
from turtlemq.errors import Corrupt
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan

R = TypeVar("R")


class PartTable:
    """The table of a part, for one read."""

    def __init__(self, part: Part) -> None:
        self._part, self._table = part, part.open()

    def use(self, action: Callable[[t.Table], R]) -> R:
        """Run `action` and return its result. If it meets a damaged block, it is run again, with a new table."""
        try:
            return action(self._table)
        except t.Damaged as error:
            print(f"turtlemq: {self._part.topic}/{error} Here its documents are scanned instead.", file=sys.stderr)
            self._table = rebuilt(self._part).open()
            return action(self._table)


def sound_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts, with new tables for damaged ones. Reads every block of every table."""
    return [part if _is_sound(part) else rebuilt(part) for part in parts]


def _is_sound(part: Part) -> bool:
    try:
        part.open().verify()
        return True
    except t.Damaged:
        return False


def rebuilt(part: Part) -> Part:
    """The part with a table in memory, made from its documents. Raises `Corrupt` if one of them is damaged, too.

    The new table of a growing segment has keys of documents that had ended when the old one was made, so that their tombstones
    count again (`killed_seq`)."""
    view, cover = part.file.map(), part.cover if part.sealed else replace(part.cover, killed_seq=0)
    scanned = scan(view, cover.start, cover.end, sealed=True, rising=part.log != "ready" and not part.sealed)
    if part.log == "ready":
        batches = read_batches(view, scanned, cover.start, cover.first_seq, (cover.end, cover.last_seq + 1))
        table, count = ready_table(cover, batches.positions, batches.ready_ms), len(batches.positions)
    else:
        keyed = np.flatnonzero((scanned.flags & f.TOMBSTONE) == 0)
        keys = np.sort(f.packed_keys(scanned.due_ms[keyed], keyed))
        table = bare_table(cover, keys, scanned.positions, np.flatnonzero(scanned.flags & f.ENDS))
        count = len(scanned)
    if count != cover.documents or scanned.damaged:
        name = part.file.name if isinstance(part.table, bytes) else Path(part.table).name
        text = f"{part.topic}/{name} and documents under it are damaged. Start the server, which builds it again."
        raise Corrupt(text)
    return replace(part, table=table, cover=cover)
