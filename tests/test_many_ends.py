"""Many documents of one due time that end together: found by batches of reads, not one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.harness.index_world import abandon
from turtlemq.index.index import Index
from turtlemq.index.parts import TablePart
from turtlemq.index.recover import open_index
from turtlemq.model import Batch, Progress
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

NOW, COUNT = 1_800_000_000_000, 3_000


class Counting(Door):
    """Counts the reads of documents: a batch is one."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, path: Path, position: int, size: int) -> bytes:
        self.reads += 1
        return super().read(path, position, size)

    def read_many(self, path: Path, positions: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        self.reads += 1
        return super().read_many(path, positions, sizes)


def open_at(folder: Path, door: Door) -> Index:
    return open_index(door, folder, "t", Settings(), Progress())


def equal_dues(folder: Path, door: Door) -> tuple[Index, list[str]]:
    """An Index with a table of messages that are all due at one time."""
    index = open_at(folder, door)
    ids = [f"id-{n}" for n in range(COUNT)]
    index.append(Batch([b"x" * 500] * COUNT, [NOW] * COUNT, ids), NOW)
    index.maintenance.flush()
    return index, ids


def test_opening_ends_many_documents_of_one_due_time_with_few_reads(tmp_path: Path) -> None:
    index, ids = equal_dues(tmp_path, Door())
    index.cancel(ids[::2])
    abandon(index)
    door = Counting()
    index = open_at(tmp_path, door)
    assert index.stats().sleep == COUNT // 2
    assert door.reads < 100  # one by one: a dozen for each of them
    assert [index.find(id_) is None for id_ in ids[:4]] == [True, False, True, False]
    abandon(index)


def test_documents_that_end_without_a_known_place_need_few_reads(tmp_path: Path) -> None:
    door = Counting()
    index, ids = equal_dues(tmp_path, door)
    documents = index.find_many(ids[::3])
    door.reads = 0
    index._segments.end_documents([(document.seq, NOW) for document in documents.values()])
    assert door.reads < 100
    assert index.stats().sleep == COUNT - COUNT // 3
    abandon(index)


def test_drop_of_the_oldest_segment_reads_none_of_its_tombstones(tmp_path: Path) -> None:
    """They end documents before them, which go with the segment."""
    door = Counting()
    index, ids = equal_dues(tmp_path, door)
    index.cancel(ids)
    index.maintenance.roll()
    index.maintenance.flush()
    door.reads = 0
    assert index.maintenance.drop(min(index._segments.by_base))
    assert door.reads == 0
    abandon(index)


def test_damaged_document_hides_no_other_of_its_due_time(tmp_path: Path) -> None:
    index, _ = equal_dues(tmp_path, Door())
    part = index._segments.parts[0]
    assert isinstance(part, TablePart)
    starts, _ = part.spans_of(np.arange(COUNT))
    seqs = f.prefixes(part.path.read_bytes(), starts)["seq"]
    data = bytearray(part.path.read_bytes())
    for ordinal, seq in ((COUNT // 2, 1), (COUNT // 4, 1 << 60)):  # where a binary search looks first
        data[int(starts[ordinal]) + f.AT_SEQ : int(starts[ordinal]) + f.AT_SEQ + 8] = seq.to_bytes(8, "little")
    part.path.write_bytes(data)
    found = part.locate_many(Door(), np.full(COUNT, NOW), seqs)
    assert sorted(found.tolist()) == [n for n in range(COUNT) if n not in (COUNT // 2, COUNT // 4)]
    abandon(index)
