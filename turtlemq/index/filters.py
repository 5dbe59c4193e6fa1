"""Bloom filters over the ids of several tables. An unknown id costs one memory access instead of one cache miss per table.

A part refers to the filter that has the ids of its table, if any. A filter never changes: a larger one is built from the tables
in steps, on a worker, and replaces the smaller ones when it is complete. It lies in an unnamed temporary file, so that the system
may evict its pages and a crash leaves nothing. Only a cache: without one, each table is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turtlemq.errors import Exhausted
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.segments import KIND, Segments
from turtlemq.segment import bloom as bits
from turtlemq.segment.table import HASH_BITS, Damaged, Table
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Job, Worker

LOOKUPS_MAX = 3  # filters, and tables without one, that a lookup may ask; if there are more, a filter is built
_STEP = 1 << 17  # ids read in one step: 5 ms


class FilterBuild:
    """A filter that is being built from tables. `step` may run on another thread, one call at a time."""

    def __init__(self, door: Door, path: Path, parts: Sequence[TablePart]) -> None:
        self.parts = parts
        self._tables: list[Table] = [part.table for part in parts]
        self._door, self._path = door, path
        ids = sum(part.table.id_count for part in parts)
        self._words = bits.words_for(ids)
        self._at, self._span = 0, max(1, self._words * _STEP // ids)  # words that are done, and words of one step
        self._fd = door.create(self._path)
        try:
            door.remove(self._path)
        except OSError:
            self.close()
            raise

    def step(self) -> bits.BloomFilter | None:
        """Build the next range of words. Returns the filter after the last one, else None."""
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
    """Builds filters for the parts of an Index when lookups would have to ask too many."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._seen: list[Part] = []  # the parts at the last look, when no filter was needed
        self._build: FilterBuild | None = None
        self._job: Job | None = None

    def step(self, worker: Worker) -> None:
        """Let `worker` do the next step of a build, or begin one if it is needed. Raises `Damaged` for a damaged table."""
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
        except (OSError, Exhausted):  # tables are asked until the parts change
            self.close()
        except BaseException as error:
            self.close()
            broken = error.details["table"] if isinstance(error, Damaged) else None
            if broken is None or any(part.table is broken for part in segments.parts if isinstance(part, TablePart)):
                raise  # else the part is gone and needs no repair

    def _put(self, made: bits.BloomFilter) -> None:
        assert self._build is not None, "it was just made"
        for part in self._build.parts:
            part.filter = made
        self._seen = []
        self.close()

    def close(self) -> None:
        """Abandon the build under way."""
        if self._job is not None and not self._job.done():
            try:
                self._job.result()
            except (OSError, Exhausted, Damaged):
                pass
        if self._build is not None:
            self._build.close()
        self._build = self._job = None


def choose(parts: Sequence[Part]) -> list[TablePart]:
    """The parts for a new filter, all with hashes of one seed; none while a lookup asks few enough.

    The smaller ones first, and larger ones only up to twice the ids so far: so an id is read into few filters in its life."""
    by_seed: dict[int, dict[object, list[TablePart]]] = {}  # the inner ones by filter, or by part if it has none
    for part in parts:
        if isinstance(part, TablePart) and part.table.id_count and part.table.id_bits == HASH_BITS:
            by_seed.setdefault(part.seed, {}).setdefault(part.filter or part, []).append(part)
    asked = max(by_seed.values(), key=len, default={})
    if len(asked) <= LOOKUPS_MAX:
        return []
    chosen: list[TablePart] = []
    total, left = 0, len(asked)
    for group in sorted(asked.values(), key=_ids):
        if left < LOOKUPS_MAX and _ids(group) > 2 * total:
            break
        chosen += group
        total, left = total + _ids(group), left - 1
    return chosen


def _ids(parts: Sequence[TablePart]) -> int:
    return sum(part.table.id_count for part in parts)
