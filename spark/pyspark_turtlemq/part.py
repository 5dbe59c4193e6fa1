"""A part of a log: documents with one table. And tables that a reader makes itself, over documents that it has scanned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyspark_turtlemq.snapshot_files import File
from turtlemq.errors import Corrupt
from turtlemq.model import I64, U64
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.storage.door import Door

_NONE: I64 = np.empty(0, np.int64)
_NO_HASHES: U64 = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Part:
    """Documents [0, documents) by ordinal, with one table: its path, or its bytes if no file could be written."""

    topic: str
    log: str
    file: File
    sealed: bool
    table: str | bytes
    cover: t.Cover

    def open(self) -> t.Table:
        """The table, mapped."""
        if isinstance(self.table, bytes):
            return t.parse_table(Path(self.file.name), memoryview(self.table))
        table = t.open_table(Door(), Path(self.table))
        if table is None:
            raise Corrupt(f"{self.table} is gone: the snapshot was released while it was being read. Run the query again.")
        return table


def bare_table(cover: t.Cover, keys: U64, positions: I64, ending: I64) -> bytes:
    """A table without ids, which no reader here looks up. `keys` are sorted; `ending`: ordinals of documents that end others."""
    return b"".join(t.build(cover, keys, np.append(positions, cover.end), _NO_HASHES, _NONE, ending))


def ready_table(cover: t.Cover, positions: I64, ready_ms: I64) -> bytes:
    """A bare table over documents of the ready log: its keys are ready times."""
    return bare_table(cover, f.packed_keys(ready_ms, np.arange(len(positions))), positions, _NONE)
