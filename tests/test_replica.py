"""Replication of files: records, the stream of a leader, and a standby that follows it."""

from __future__ import annotations

import errno
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.trust.failover import compare
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, DiskFull, Locked
from turtlemq.model import SEQ_COUNTER_BITS, Message
from turtlemq.replica.follower import FERRY, Follower, ferry_name
from turtlemq.replica.records import DATA_BYTES_MAX, Kind, OutOfStep, Record, parse_head
from turtlemq.replica.shared_files import is_shared, must_ship
from turtlemq.replica.shipping import ShippingDoor
from turtlemq.replica.stream import Entry, Ferried, Stream
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

LOG = "topic/t/delay_0000000000.bson"


def record(entry: Entry) -> Record:
    head, chain = parse_head(entry.head)
    return Record(head, chain, entry.path.decode(), entry.data)


def records(stream: Stream, after: int = 0) -> list[Record]:
    found = stream.after(after)
    assert found is not None
    return [record(entry) for entry in found]


@pytest.fixture
def stream() -> Stream:
    return Stream(3, lock=threading.Lock())


@pytest.fixture
def leader(tmp_path: Path, stream: Stream) -> ShippingDoor:
    (tmp_path / "leader").mkdir()
    return ShippingDoor(stream=stream, root=tmp_path / "leader")


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    (tmp_path / "standby").mkdir()
    return Follower(tmp_path / "standby", Door())


# Which files are replicated


@pytest.mark.parametrize(
    "path",
    [
        "",
        "FORMAT",
        "CLEAN.tmp",
        "HASH_SEED",
        "topic",
        "topic/t",
        LOG,
        LOG + ".tmp",
        "topic/t/dead",
        "topic/t/dead/delay_0000000000.index",
        "topic/t/topic.toml",
        "topic/t/paused.toml",
        "topic/t/offset.tmp",
        "topic/.t.deleted",
        "topic/.t.1.deleted/any",
        "topic/t/reserve_0000000000.bson.deleted",
    ],
)
def test_files_of_the_engine_are_replicated(path: str) -> None:
    assert is_shared(path)
    assert must_ship(path)


@pytest.mark.parametrize(
    "path",
    [
        "LOCK",
        "BALLAST",
        "AUDIT",
        "AUDIT.1",
        "RESERVE",
        "REPLICA",
        "REPLICA.tmp",
        "PINNED/1/0",
        "READERS/x",
        "SYNC/ferry/x",
        "DIVERGED/3/x",
        "topic/t/delay_0000000000.filter.tmp",
        "topic/t/delay_0000000000.bson.77.damaged",
    ],
)
def test_files_of_one_machine_are_not_replicated(path: str) -> None:
    assert not is_shared(path)
    assert not must_ship(path)


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../x",
        "topic/..",
        "topic/../LOCK",
        "topic/t/../../FORMAT",
        "topic/t/dead/../x",
        "/etc/passwd",
        "topic//x",
        "topic/t/",
        "topic/.t.deleted/..",
        "FORMAT\n",
        "topic/t/x.txt",
        "unknown",
        "topic/t/dead/dead/delay_0000000000.bson",
    ],
)
def test_a_path_that_is_neither_is_refused(path: str) -> None:
    assert not is_shared(path)
    with pytest.raises(Corrupt):
        must_ship(path)


# Records and the ring


def test_a_record_that_is_not_the_next_one_is_found(stream: Stream, follower: Follower) -> None:
    for n in range(4):
        stream.add(Kind.MKDIR, f"topic/t{n}")
    first, second, third, _ = records(stream)
    follower.apply(first)
    for wrong in (first, third, Record(second.head, third.chain, second.path, second.data)):
        with pytest.raises(OutOfStep):
            follower.apply(wrong)
    with pytest.raises(OutOfStep, match="changed on its way"):
        follower.apply(Record(second.head, second.chain, "topic/other", second.data))
    follower.apply(second)
    assert follower.lsn == 2


def test_equal_numbers_of_another_history_do_not_fit(follower: Follower) -> None:
    one, other = Stream(1), Stream(1)
    one.add(Kind.MKDIR, "topic/a")
    other.add(Kind.MKDIR, "topic/b")
    for each in (one, other):
        each.add(Kind.MKDIR, "topic/c")
    follower.apply(records(one)[0])
    with pytest.raises(OutOfStep):
        follower.apply(records(other)[1])
    assert one.resumes(1, follower.chain)
    assert not other.resumes(1, follower.chain)


def test_the_ring_forgets_its_oldest_records(follower: Follower) -> None:
    stream = Stream(1, 10, 77, ring_bytes=1_000)
    assert stream.resumes(10, 77)
    for n in range(100):
        stream.add(Kind.MKDIR, f"topic/t{n}")
    assert stream.lsn == 110
    assert not stream.resumes(10, 77)
    assert stream.after(stream.first - 2) is None
    chains = {r.head.lsn: r.chain for r in records(stream, stream.first - 1)}
    assert list(chains) == list(range(stream.first, 111))
    assert all(stream.resumes(lsn, chain) for lsn, chain in chains.items())
    assert not stream.resumes(111, 0)
    assert sum(HEAD + len(r.path) for r in records(stream, stream.first - 1)) <= 1_000


HEAD = 48


def test_many_forgotten_records_take_no_memory() -> None:
    stream = Stream(1, ring_bytes=1_000)
    for _ in range(20_000):
        stream.add(Kind.MKDIR, "topic/t")
    assert len(vars(stream)["_entries"]) < 10_000


# Shipping


def test_every_change_of_a_door_is_repeated(leader: ShippingDoor, stream: Stream, follower: Follower, tmp_path: Path) -> None:
    root = tmp_path / "leader"
    leader.make_folder(root / "topic" / "t")
    path = root / LOG
    with leader.durable_names(path.parent):
        fd = leader.create(path)
    leader.write(fd, path, 0, [b"one", bytearray(b"two"), memoryview(b"three")])
    leader.sync(fd, path)
    leader.truncate(fd, path, 6)
    leader.close(fd)
    leader.replace(root / "FORMAT", b"3\n")
    leader.replace(root / "REPLICA", b"of this machine", durable=False)
    leader.rename(path, path.with_name("delay_0000000000.bson.deleted"))
    leader.remove(path.with_name("delay_0000000000.bson.deleted"))
    leader.make_folder(root / "topic" / "u" / "dead")
    leader.remove_folder(leader.set_aside(root / "topic" / "u"))
    for each in records(stream):
        follower.apply(each)
    follower.close()
    compare(root, tmp_path / "standby")
    assert {r.head.kind for r in records(stream)} == set(Kind) - {Kind.ADOPT}
    assert (tmp_path / "standby" / "FORMAT").read_bytes() == b"3\n"
    assert not (tmp_path / "standby" / "REPLICA").exists()


def test_a_long_write_is_several_records(leader: ShippingDoor, stream: Stream, follower: Follower, tmp_path: Path) -> None:
    path, data = tmp_path / "leader" / "FORMAT", os.urandom(2 * DATA_BYTES_MAX + 5)
    fd = leader.create(path)
    leader.write(fd, path, 3, [data])
    leader.close(fd)
    for each in records(stream):
        follower.apply(each)
    assert [len(r.data) for r in records(stream) if r.head.kind == Kind.WRITE] == [DATA_BYTES_MAX, DATA_BYTES_MAX, 5]
    compare(tmp_path / "leader", tmp_path / "standby")


class Short(ShippingDoor):
    """Writes at most seven bytes in one call, and only twice."""

    left = 2

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if name != "write":
            return super()._call(name, path, action, *args)

        def short(fd: int, buffers: Any, offset: int) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "full")
            data = b"".join(buffers) if isinstance(buffers, list) else bytes(buffers)
            return os.pwrite(fd, data[:7], offset)

        return super()._call(name, path, short, *args)


def test_a_short_write_ships_what_was_written(stream: Stream, follower: Follower, tmp_path: Path) -> None:
    (tmp_path / "leader").mkdir()
    leader, path = Short(stream=stream, root=tmp_path / "leader"), tmp_path / "leader" / "FORMAT"
    fd = leader.create(path)
    with pytest.raises(DiskFull):
        leader.write(fd, path, 0, [b"twenty bytes in all."])
    leader.close(fd)
    for each in records(stream):
        follower.apply(each)
    kinds = [(r.head.kind, len(r.data)) for r in records(stream)]
    assert kinds == [(Kind.CREATE, 0), (Kind.WRITE, 7), (Kind.WRITE, 7), (Kind.CUT, 0)]
    compare(tmp_path / "leader", tmp_path / "standby")


def test_a_sync_is_bracketed_by_two_records(leader: ShippingDoor, stream: Stream, tmp_path: Path) -> None:
    leader.replace(tmp_path / "leader" / "FORMAT", b"3\n")
    found = [
        (r.head.lsn, r.head.kind, r.head.offset)
        for r in records(stream)
        if r.head.kind in (Kind.SYNC, Kind.SYNCED, Kind.SYNC_DIR)
    ]
    assert [(kind, offset) for _, kind, offset in found] == [
        (Kind.SYNC, 0),
        (Kind.SYNCED, found[0][0]),
        (Kind.SYNC_DIR, 0),
        (Kind.SYNCED, found[2][0]),
    ]


class OneProcess(ShippingDoor):
    """Seals run in this process."""

    def fresh(self) -> Door:
        return self.beside()


def test_threads_of_an_engine_are_all_shipped(stream: Stream, follower: Follower, tmp_path: Path) -> None:
    settings = Settings(segment_bytes=64 << 10, run_messages=200)
    leader = OneProcess(stream=stream, root=tmp_path / "leader")
    with ThreadPoolExecutor(1) as flusher:
        engine = Engine.open(tmp_path / "leader", door=leader, flusher=flusher, settings=settings)
        for at in range(0, 4_000, 100):
            engine.submit("t", [Message(b"x" * 50, due_ms=n, id=f"m{n}") for n in range(at, at + 100)], now_ms=0)
            engine.tick(at - 1_000)
            held = engine.reserve("t", "default", 50, now_ms=max(0, at - 1_000))
            engine.ack("t", "default", held.ids[:40], now_ms=max(0, at - 1_000))
        engine.close()
    for each in records(stream):
        follower.apply(each)
    follower.close()
    compare(tmp_path / "leader", tmp_path / "standby")
    names = {r.path.rsplit("/")[-1] for r in records(stream)}
    assert any(name.endswith(".run.tmp") for name in names)
    assert "offset.tmp" in names
    copy = Engine.open(tmp_path / "standby", settings=settings)
    assert copy.check() == []
    copy.close()


# The standby


def test_a_record_that_leads_out_of_the_folder_is_refused(stream: Stream, follower: Follower, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"safe")
    stream.add(Kind.REMOVE, "../victim")
    with pytest.raises(OutOfStep):
        follower.apply(records(stream)[0])
    other = Stream(1)
    other.add(Kind.MKDIR, "topic/t")
    other.add(Kind.RENAME, "topic/t", 0, b"../t")
    follower.apply(records(other)[0])
    with pytest.raises(OutOfStep):
        follower.apply(records(other)[1])
    assert (tmp_path / "victim").read_bytes() == b"safe"


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.CUT, Kind.SYNC, Kind.REMOVE, Kind.RENAME])
def test_a_change_of_a_missing_file_asks_for_a_comparison(kind: Kind, follower: Follower) -> None:
    stream = Stream(1)
    stream.add(kind, LOG, 0, b"FORMAT")
    with pytest.raises(OutOfStep):
        follower.apply(records(stream)[0])
    assert follower.lsn == 0


def test_a_file_that_exists_is_not_created_again(follower: Follower, tmp_path: Path) -> None:
    (tmp_path / "standby" / "FORMAT").write_bytes(b"old")
    stream = Stream(1)
    stream.add(Kind.CREATE, "FORMAT", 0o600)
    with pytest.raises(OutOfStep):
        follower.apply(records(stream)[0])
    assert (tmp_path / "standby" / "FORMAT").read_bytes() == b"old"


def test_a_write_reaches_the_file_that_has_the_name_now(follower: Follower, tmp_path: Path) -> None:
    stream = Stream(1)
    stream.add(Kind.CREATE, "FORMAT", 0o600)
    stream.add(Kind.WRITE, "FORMAT", 0, b"old")
    stream.add(Kind.CREATE, "FORMAT.tmp", 0o600)
    stream.add(Kind.WRITE, "FORMAT.tmp", 0, b"new")
    stream.add(Kind.RENAME, "FORMAT.tmp", 0, b"FORMAT")
    stream.add(Kind.WRITE, "FORMAT", 3, b"er")
    for each in records(stream):
        follower.apply(each)
    assert (tmp_path / "standby" / "FORMAT").read_bytes() == b"newer"


class Slow:
    """A job whose end is noted."""

    def __init__(self, work: Any, args: Any, ended: list[str]) -> None:
        self._work, self._args, self._ended = work, args, ended

    def done(self) -> bool:
        return False

    def result(self) -> Any:
        self._ended.append("synced")
        return self._work(*self._args)


def test_a_sync_is_over_when_the_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "standby").mkdir()
    ended: list[str] = []

    class Syncer:
        def submit(self, work: Any, /, *args: Any) -> Slow:
            return Slow(work, args, ended)

    follower = Follower(tmp_path / "standby", Door(), syncer=Syncer())
    stream = Stream(1)
    stream.add(Kind.CREATE, "FORMAT", 0o600)
    begun = stream.add(Kind.SYNC, "FORMAT")
    stream.add(Kind.WRITE, "FORMAT", 0, b"3")
    stream.add(Kind.SYNCED, "", begun)
    first = records(stream)
    for each in first[:3]:
        follower.apply(each)
    assert ended == []
    follower.apply(first[3])
    assert ended == ["synced"]


def test_a_file_that_came_apart_gets_its_name_by_a_record(follower: Follower, tmp_path: Path) -> None:
    stream, root = Stream(1), tmp_path / "standby"
    stream.add(Kind.MKDIR, "topic/t")
    stream.add(Kind.ADOPT, LOG + ".tmp", 6, (255).to_bytes(8, "little") + LOG.encode())
    first, second = records(stream)
    follower.apply(first)
    with pytest.raises(OutOfStep, match="did not arrive"):
        follower.apply(second)
    (root / "SYNC" / FERRY).mkdir(parents=True)
    (root / "SYNC" / FERRY / ferry_name(LOG + ".tmp", 255)).write_bytes(b"sealed")
    follower.apply(second)
    assert (root / LOG).read_bytes() == b"sealed"


def test_a_ferried_file_is_adopted(leader: ShippingDoor, stream: Stream, tmp_path: Path) -> None:
    leader.make_folder(tmp_path / "leader" / "topic" / "t")
    (tmp_path / "leader" / (LOG + ".tmp")).write_bytes(b"sealed")
    stream.ferried[LOG + ".tmp"] = Ferried(6, 255)
    leader.rename(tmp_path / "leader" / (LOG + ".tmp"), tmp_path / "leader" / LOG)
    last = records(stream)[-1]
    assert (last.head.kind, last.head.offset, last.data) == (Kind.ADOPT, 6, (255).to_bytes(8, "little") + LOG.encode())
    assert stream.ferried == {}


# The engine


def test_an_engine_takes_a_lock_that_its_process_holds(tmp_path: Path) -> None:
    door = Door()
    lock = door.lock(tmp_path / "LOCK")
    with pytest.raises(Locked):
        Engine.open(tmp_path)
    engine = Engine.open(tmp_path, lock=lock)
    with pytest.raises(Locked):
        Engine.open(tmp_path)
    engine.close()
    Engine.open(tmp_path).close()


@pytest.mark.parametrize("replicated", [False, True])
def test_a_replicated_topic_with_damage_keeps_its_files(replicated: bool, stream: Stream, tmp_path: Path) -> None:
    """Alone, maintenance rewrites the rest; with a copy elsewhere, it waits."""
    settings = Settings(segment_bytes=4096)
    engine = Engine.open(tmp_path, settings=settings)
    for n in range(60):
        engine.submit("t", [Message(b"x" * 300, due_ms=10**12 + n, id=f"m{n}")], now_ms=0)
    engine.close()
    folder = tmp_path / "topic" / "t"
    segment = min(folder.glob("delay_*.bson"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    for path in (tmp_path / "CLEAN", *folder.glob("delay_*.index"), *folder.glob("delay_*.run")):
        path.unlink()
    engine = Engine.open(tmp_path, door=ShippingDoor(stream=stream, root=tmp_path) if replicated else Door(), settings=settings)
    assert engine.damage()
    engine.cancel("t", [f"m{n}" for n in range(0, 60, 2)], 0)
    engine.compact("t")
    kept = segment.exists() and segment.read_bytes() == bytes(data)
    engine.close()
    assert kept is replicated


def test_a_thread_that_writes_into_a_dropped_topic_ships_nothing(stream: Stream, follower: Follower, tmp_path: Path) -> None:
    root = tmp_path / "leader"
    leader = ShippingDoor(stream=stream, root=root)
    thread, path = leader.beside(), root / (LOG + ".tmp")
    leader.make_folder(path.parent)
    fd = thread.create(path)
    thread.write(fd, path, 0, [b"before"])
    gone = leader.set_aside(path.parent)
    before = stream.lsn
    thread.write(fd, path, 6, [b"after"])
    thread.sync(fd, path)
    thread.truncate(fd, path, 3)
    assert stream.lsn == before
    leader.make_folder(path.parent)  # a new topic of the same name
    other = leader.create(path)
    thread.write(fd, path, 6, [b"after"])
    thread.close(fd)
    leader.close(other)
    leader.remove_folder(gone)
    for each in records(stream):
        follower.apply(each)
    follower.close()
    compare(root, tmp_path / "standby")


def test_changes_of_many_threads_have_the_order_of_their_records(stream: Stream, follower: Follower, tmp_path: Path) -> None:
    root = tmp_path / "leader"
    leader = ShippingDoor(stream=stream, root=root)
    leader.make_folder(root / "topic" / "t")
    path, rounds = root / LOG, 300

    def remake() -> None:
        """Two threads give the same name to a file and take it away."""
        door = leader.beside()
        for _ in range(rounds):
            with suppress(FileExistsError, FileNotFoundError):
                door.close(door.create(path))
            door.remove(path)

    threads = [threading.Thread(target=remake) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for each in records(stream):
        follower.apply(each)
    follower.close()
    compare(root, tmp_path / "standby")


def test_a_new_leader_gives_no_lost_ids_again(stream: Stream, tmp_path: Path) -> None:
    """The lost leader's clock was a little ahead, and no copy has its last messages."""
    now = 1_000_000

    def given(door: Door, folder: str, count: int) -> list[str]:
        engine = Engine.open(tmp_path / folder, door=door)
        try:
            return list(engine.submit("t", [Message(b"x", due_ms=10**12) for _ in range(count)], now_ms=now).ids)
        finally:
            engine.close()

    lost = given(Door(), "lost", 10)
    door = ShippingDoor(stream=stream, root=tmp_path / "new")
    door.seq_floor = (now + 1_000) << SEQ_COUNTER_BITS
    again = given(door, "new", 10)
    assert not set(lost) & set(again)
    assert again[0] > lost[-1]
    assert set(given(Door(), "other", 10)) == set(lost)  # without it they would be the same
