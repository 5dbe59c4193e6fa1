"""Filters over the ids of many tables at once: a stranger among millions of sleepers is known as one by one look at memory, where
asking each table's own filter would be a miss of the cache each.

A part points to the filter that its table was read into, if any. A filter never changes: a larger one is made of the tables
themselves, a stretch of hashes at a time, while others work, and takes its place when it is whole. It lies in a file without a
name, so that the system may take its pages for something better, and nothing of it is left after a crash. Only a cache: where
there is no room for one, tables are asked as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turtlemq.errors import DiskFull
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.segments import KIND, Segments
from turtlemq.segment import bloom as bits
from turtlemq.segment.table import HASH_BITS, Damaged, Table
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Job, Worker

LOOKUPS_MAX = 3  # filters and tables without one that a look-up may ask before some are put together
_STEP = 1 << 17  # ids read in one go: 5 ms


class FilterBuild:
    """A filter that is being made of tables. `step` may run on another thread, one at a time."""

    def __init__(self, door: Door, path: Path, parts: Sequence[TablePart]) -> None:
        self.parts = parts
        self._tables: list[Table] = [part.table for part in parts]
        self._door, self._path = door, path
        ids = sum(part.table.id_count for part in parts)
        self._words = bits.words_for(ids)
        self._at, self._span = 0, max(1, self._words * _STEP // ids)  # words that are done, and those of a step
        self._fd = door.create(self._path)
        try:
            door.remove(self._path)
        except OSError:
            self.close()
            raise

    def step(self) -> bits.BloomFilter | None:
        """The next stretch of it. Returns the filter when that was the last."""
        last = min(self._at + self._span, self._words)
        words = np.zeros(last - self._at, np.uint64)
        low, high = bits.first_hash(self._at, self._words), bits.first_hash(last, self._words)
        for table in self._tables:
            table.verify_prints()
            bits.enter(table.ids(low, high), words, self._at, self._words)
        self._door.write(self._fd, self._path, 8 * self._at, [words.tobytes()])
        self._at = last
        return None if last < self._words else bits.BloomFilter(self._door.map_open(self._fd, self._path))

    def close(self) -> None:
        self._door.close(self._fd)


class Filters:
    """Has filters made for the parts of a segments when there are many without."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._seen: list[Part] = []  # the parts when there was nothing to do
        self._build: FilterBuild | None = None
        self._job: Job | None = None

    def step(self, worker: Worker) -> None:
        """Go on with what is to be done, by `worker`, a step at each call. Raises `Damaged` for a table that is."""
        segments = self._segments
        try:
            if self._job is None:
                if self._seen is segments.parts:
                    return
                self._seen = segments.parts
                if not (chosen := choose(segments.parts)):
                    return
                name = names.filter_(KIND, segments.active.base) + names.TMP
                self._build = FilterBuild(segments.door, segments.folder / name, chosen)
            elif not self._job.done():
                return
            elif (made := self._job.result()) is not None:
                self._put(made)
                return
            assert self._build is not None, "there is work"
            self._job = worker.submit(self._build.step)
        except (OSError, DiskFull):  # until other parts come, tables are asked
            self.close()
        except BaseException as error:
            self.close()
            broken = error.details["table"] if isinstance(error, Damaged) else None
            if broken is None or any(part.table is broken for part in segments.parts if isinstance(part, TablePart)):
                raise  # else it has gone, and needs no mending

    def _put(self, made: bits.BloomFilter) -> None:
        assert self._build is not None, "it was just made"
        for part in self._build.parts:
            part.filter = made
        self._seen = []
        self.close()

    def close(self) -> None:
        """Let go of what is under way."""
        if self._job is not None and not self._job.done():
            try:
                self._job.result()
            except (OSError, DiskFull, Damaged):
                pass
        if self._build is not None:
            self._build.close()
        self._build = self._job = None


def choose(parts: Sequence[Part]) -> list[TablePart]:
    """Which parts a new filter is to be made of: the smaller ones, as long as what is added is not much more than what there is
    already, so that an id is read into a few filters in its life. None while a look-up asks few of them."""
    asked: dict[object, list[TablePart]] = {}
    for part in parts:
        if isinstance(part, TablePart) and part.table.id_count and part.table.id_bits == HASH_BITS:
            asked.setdefault(part.filter or part, []).append(part)
    if len(asked) <= LOOKUPS_MAX:
        return []
    chosen: list[TablePart] = []
    total, left = 0, len(asked)
    for some in sorted(asked.values(), key=_ids):
        if left < LOOKUPS_MAX and _ids(some) > 2 * total:
            break
        chosen += some
        total, left = total + _ids(some), left - 1
    return chosen


def _ids(parts: Sequence[TablePart]) -> int:
    return sum(part.table.id_count for part in parts)
