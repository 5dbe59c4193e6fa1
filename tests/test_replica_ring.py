"""The records and the position that a copy keeps over a proper stop, and that count for nothing after any other end."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.replica_pair import leading, until
from turtlemq.errors import DiskFull
from turtlemq.replica import replica_file, ring_file
from turtlemq.replica.records import Kind
from turtlemq.replica.replica_file import ReplicaFile
from turtlemq.replica.stream import Stream
from turtlemq.storage.door import Door

RING = "REPLICA.ring"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def stream_of(count: int, begin: int = 40, size: int = 10) -> Stream:
    stream = Stream(3, begin, 99)
    for n in range(count):
        stream.add(Kind.WRITE, "topic/t/delay_0000000000.bson", n, bytes([n % 256]) * size)
    return stream


def test_a_kept_ring_serves_copies_that_stopped_earlier(tmp_path: Path) -> None:
    stream = stream_of(20)
    ring_file.write(Door(), tmp_path, stream)
    tail = ring_file.take(Door(), tmp_path, stream.lsn, stream.chain)
    again = Stream(5, tail.lsn, tail.chain)
    again.refill(tail.records)
    assert (again.lsn, again.chain, again.epoch) == (stream.lsn, stream.chain, 5)
    assert [entry[:4] for entry in again.after(40) or []] == [entry[:4] for entry in stream.after(40) or []]
    assert again.resumes(40, 99)
    assert not again.resumes(41, 99)
    assert not (tmp_path / RING).exists()


def test_only_the_newest_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_file, "KEPT_BYTES", 1_000)
    stream = stream_of(50, size=50)
    ring_file.write(Door(), tmp_path, stream)
    assert (tmp_path / RING).stat().st_size <= 1_008
    tail = ring_file.take(Door(), tmp_path, stream.lsn, stream.chain)
    again = Stream(3, tail.lsn, tail.chain)
    again.refill(tail.records)
    assert 41 < again.first < again.lsn == stream.lsn
    assert again.chain == stream.chain


def rotten(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def too_long(data: bytes) -> bytes:
    return data + b"x"


@pytest.mark.parametrize("change", [rotten, too_long, lambda data: data[:-3], lambda data: data[:8], lambda _: b""])
def test_a_ring_that_is_not_whole_counts_for_nothing(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    stream = stream_of(20)
    ring_file.write(Door(), tmp_path, stream)
    (tmp_path / RING).write_bytes(change((tmp_path / RING).read_bytes()))
    assert ring_file.take(Door(), tmp_path, stream.lsn, stream.chain) == (stream.lsn, stream.chain, [])


@pytest.mark.parametrize("more", [(0, 1), (1, 0), (-1, 0)])
def test_a_ring_of_another_stop_counts_for_nothing(tmp_path: Path, more: tuple[int, int]) -> None:
    stream = stream_of(20)
    ring_file.write(Door(), tmp_path, stream)
    at = stream.lsn + more[0], stream.chain + more[1]
    assert ring_file.take(Door(), tmp_path, *at) == (*at, [])


def test_without_room_a_stop_keeps_its_position_alone(tmp_path: Path) -> None:
    class Full(Door):
        def replace(self, path: Path, data: bytes, **options: Any) -> None:
            raise OSError(errno.ENOSPC, "made to fail")

    ring_file.write(Full(), tmp_path, stream_of(3))
    assert not (tmp_path / RING).exists()


def test_notes_of_a_running_copy_claim_no_position(tmp_path: Path) -> None:
    """A note that was written while records are applied, and then kill -9: the position of the last stop must not come back."""
    replica_file.write(Door(), tmp_path, replica_file.ReplicaFacts("prod", 0, "r", True, 3, lsn=7, chain=9))
    facts = replica_file.take(Door(), tmp_path, "prod")
    assert (facts.lsn, facts.chain) == (7, 9)
    file = ReplicaFile(Door(), tmp_path, facts)
    changes: list[Callable[[], None]] = [
        partial(file.write, suspect=("FORMAT",)),
        partial(file.note_state, 3, 12),
        partial(file.note, 4),
    ]
    for change in changes:
        change()
        found = replica_file.read(Door(), tmp_path)
        assert found == file.facts
        assert found is not None
        assert (found.lsn, found.chain) == (None, None)


def test_the_newest_state_of_etcd_is_noted(tmp_path: Path) -> None:
    file = ReplicaFile(Door(), tmp_path, replica_file.ReplicaFacts("prod", 0, "r", True, 3, state_epoch=3, revision=10))
    noted = []
    for epoch, revision in ((3, 9), (3, 11), (2, 50), (4, 0), (4, 5), (4, 0)):
        file.note_state(epoch, revision)
        noted.append(file.facts.newest)
    assert noted == [(3, 10), (3, 11), (3, 11), (4, 0), (4, 5), (4, 5)]
    assert file.facts.epoch == 3, "the files are of the leader before"
    file.note(5)
    assert file.facts.newest == (5, 0), "the revision of an earlier epoch does not count"


class FullDoor(Door):
    """A door to a disk without room while `full`."""

    full = False

    def write(self, fd: int, path: Path, offset: int, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        if self.full:
            raise DiskFull
        return super().write(fd, path, offset, buffers)


def test_a_full_disk_keeps_the_state_before(tmp_path: Path) -> None:
    door = FullDoor()
    file = ReplicaFile(door, tmp_path, replica_file.ReplicaFacts("prod", 0, "r", True, 3, state_epoch=3, revision=10))
    file.note_state(3, 11)
    door.full = True
    file.note_state(3, 12)
    assert file.facts == replica_file.read(Door(), tmp_path)
    assert file.facts.newest == (3, 11)
    door.full = False
    file.note_state(3, 13)
    assert file.facts.newest == (3, 13)


def test_a_distrusted_copy_claims_no_old_position(tmp_path: Path) -> None:
    """It was stopped properly, has applied records since, and is killed when it has noted a suspect file."""

    async def story() -> None:
        async with leading(tmp_path) as pair:
            async with pair.following():
                pair.put(10, "a")
                await pair.all_covered()
            async with pair.following() as standby:
                pair.put(10, "b")
                await pair.all_covered()
                standby.distrust(["FORMAT"])
                await until(lambda: standby.facts.suspect)
                found = replica_file.read(Door(), tmp_path / "b")
                assert found is not None
                assert (found.lsn, found.suspect) == (None, ("FORMAT",))

    run(story())
