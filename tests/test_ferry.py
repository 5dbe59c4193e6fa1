"""The ferry: sealed files go to standbys beside the stream, whole, compared and synced, before they get their names."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import pair_of
from tests.harness.replica_pair import Pair, leading, until
from tests.harness.server_process import Server
from tests.trust.failover import compare
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull
from turtlemq.index.seal import Sealed, SealJob, files_of
from turtlemq.replica import arrivals, link
from turtlemq.replica.arrivals import Dock
from turtlemq.replica.ferry import PIECE_BYTES, Ferry, load, piece
from turtlemq.replica.follower import FERRY, ferry_name
from turtlemq.replica.frames import BadPeer, File, FileOk
from turtlemq.replica.pace import Pace
from turtlemq.replica.records import OutOfStep, Record, parse_head
from turtlemq.replica.stream import Entry
from turtlemq.storage.door import Door
from turtlemq.storage.process_worker import ProcessWorker
from turtlemq.storage.workers import Inline

SEGMENT = "topic/t/delay_0000000000.bson"
TMP = SEGMENT + ".tmp"
FAR = 4 * 10**12


# One file


class Noting(Door):
    """Notes calls that change something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if name in ("write", "fdatasync", "rename", "unlink"):
            self.calls.append(name)
        return super()._call(name, path, action, *args)


def record(entry: Entry) -> Record:
    head, chain = parse_head(entry.head)
    return Record(head, chain, "", entry.data)


def summed(tmp_path: Path, data: bytes) -> int:
    (tmp_path / "file").write_bytes(data)
    return load(Door(), tmp_path, "file").sum


def test_a_file_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    door = Noting()
    dock, total = Dock(tmp_path, door), summed(tmp_path, b"sealed bytes")
    assert dock.take(File(1, TMP, 12, total)) is None
    assert dock.take(record(piece(1, 0, b"sealed"))) is None
    whole = dock.take(record(piece(1, 6, b" bytes")))
    assert whole == (File(1, TMP, 12, total), FileOk(1))
    assert door.calls == ["write", "write", "fdatasync", "rename"]
    assert (tmp_path / "SYNC" / FERRY / ferry_name(TMP, total)).read_bytes() == b"sealed bytes"
    assert os.listdir(tmp_path / "SYNC" / FERRY) == [ferry_name(TMP, total)]


def test_an_empty_file_needs_no_pieces(tmp_path: Path) -> None:
    dock, total = Dock(tmp_path, Door()), summed(tmp_path, b"")
    assert dock.take(File(1, TMP, 0, total)) is not None


def test_a_rotten_byte_is_refused(tmp_path: Path) -> None:
    """A piece that was changed under way does not fit its own checksum, one that was read wrongly not that of the file."""
    dock, total = Dock(tmp_path, Door()), summed(tmp_path, b"sealed")
    dock.take(File(1, TMP, 6, total))
    good = piece(1, 0, b"sealed")
    with pytest.raises(OutOfStep, match="changed"):
        dock.take(record(good._replace(data=b"sealeD")))
    with pytest.raises(OutOfStep, match="changed"):
        dock.take(record(piece(1, 0, b"sealeD")))
    dock.drop()
    assert os.listdir(tmp_path / "SYNC" / FERRY) == []


@pytest.mark.parametrize(
    "items",
    [
        [record(piece(1, 0, b"x"))],
        [File(1, "../x", 1, 0)],
        [File(1, "LOCK", 1, 0)],
        [File(1, TMP, 1, 0), File(1, TMP, 1, 0)],
        [File(n, TMP, 1, 0) for n in range(arrivals.FILES_MAX + 1)],
        [FileOk(1)],
    ],
)
def test_what_belongs_to_no_file_is_refused(tmp_path: Path, items: list[Any]) -> None:
    dock = Dock(tmp_path, Door())
    for item in items[:-1]:
        dock.take(item)
    with pytest.raises(BadPeer):
        dock.take(items[-1])
    dock.drop()


@pytest.mark.parametrize("offset", [1, 5])
def test_a_gap_is_refused(tmp_path: Path, offset: int) -> None:
    dock = Dock(tmp_path, Door())
    dock.take(File(1, TMP, 6, 0))
    with pytest.raises(OutOfStep, match="follow"):
        dock.take(record(piece(1, offset, b"xx")))
    dock.drop()


def test_left_overs_are_removed(tmp_path: Path) -> None:
    arrivals.clear(Door(), tmp_path)
    folder = tmp_path / "SYNC" / FERRY
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"x")
    arrivals.clear(Door(), tmp_path)
    assert not folder.exists()


def test_the_pace_is_kept() -> None:
    pace, now = Pace(50e6), 0.0
    for _ in range(200):
        now += pace.wait_s(PIECE_BYTES, now)
    assert now == pytest.approx(199 * PIECE_BYTES / 50e6, abs=1e-3)


# A leader and standbys on one event loop


def sealing(folder: Path, data: bytes) -> Callable[[], Sealed]:
    """Writes a file in place of a seal."""

    def work() -> Sealed:
        (folder / TMP).write_bytes(data)
        return Sealed(0, 2, 1, len(data), (), (folder / TMP,))

    return work


class Threaded:
    """A worker that is a thread: its functions need not be importable."""

    def __init__(self) -> None:
        self._inner = Inline()

    def submit(self, work: Any, *args: Any) -> Any:
        job, made = self._inner.submit(work, *args), Future[Any]()
        made.set_result(job.result())
        return made

    def close(self, timeout_s: float | None = None) -> None:
        return


@asynccontextmanager
async def ferrying(root: Path, mb_per_s: float = 1_000, **more: Any) -> AsyncIterator[tuple[Pair, Ferry]]:
    async with leading(root, **more) as pair:
        worker: Any = Threaded()
        ferry = Ferry(pair.lead, root / "leader", worker, mb_per_s * 1e6, log=pair.log)
        pair.put(10)
        yield pair, ferry
        ferry.stop()
        await asyncio.to_thread(ferry.close)


def boats(ferry: Ferry) -> int:
    return len(ferry._boats)


def adopt(pair: Pair) -> None:
    """Give the sealed file a name of its own."""
    folder = pair.root / "leader"
    pair.engine.door.rename(folder / TMP, folder / "topic/t/delay_0000000099.bson")


DATA = bytes(range(256)) * 4_000


class SlowSync(Door):
    """Syncs of a file that comes take a while."""

    def beside(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if name == "fdatasync" and path is not None and path.suffix == ".part":
            time.sleep(0.2)
        return super()._call(name, path, action, *args)


def test_a_seal_is_with_all_standbys_before_it_is_done(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            ferrying(tmp_path, required=("b", "c")) as (pair, ferry),
            pair.following("b"),
            pair.following("c", door=SlowSync()),
        ):
            await until(lambda: boats(ferry) == 2)
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            for node in "bc":
                (only,) = (tmp_path / node / "SYNC" / FERRY).iterdir()
                assert only.read_bytes() == DATA
            adopt(pair)
            await pair.all_covered()
            assert pair.logged("file_needed") == []
            for node in "bc":
                compare(tmp_path / "leader", tmp_path / node)
            assert not pair.lead.stream.ferried

    asyncio.run(story())


def test_a_standby_that_comes_later_asks_for_the_file(tmp_path: Path) -> None:
    async def story() -> None:
        async with ferrying(tmp_path) as (pair, ferry):
            async with pair.following("b"):
                await pair.all_covered()
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            adopt(pair)
            assert pair.lead.ferried_bytes == 0
            async with pair.following("b"):
                await pair.all_covered()
                compare(tmp_path / "leader", tmp_path / "b")
            assert [each["found"] for each in pair.logged("file_needed")] == [True]

    asyncio.run(story())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_standby_cannot_get_a_file_that_is_gone(tmp_path: Path, replaced: bool) -> None:
    async def story() -> None:
        async with ferrying(tmp_path) as (pair, ferry):
            async with pair.following("b"):
                await pair.all_covered()
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            adopt(pair)
            target = tmp_path / "leader" / "topic/t/delay_0000000099.bson"
            pair.engine.door.remove(target)
            if replaced:
                pair.engine.door.replace(target, DATA[::-1])
            async with pair.following("b"):
                await until(lambda: any("any more" in each["why"] for each in pair.logged("leader_lost")))

    asyncio.run(story())


def test_a_connection_that_ends_under_way_is_not_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with ferrying(tmp_path, mb_per_s=1) as (pair, ferry):
            async with pair.following("b"):
                await until(lambda: boats(ferry) == 1)
                job = ferry.submit(sealing(tmp_path / "leader", DATA))
                await until(lambda: pair.lead.ferried_bytes > 0)
                assert not job.done()
            await until(job.done)
            assert job.exception() is None
            assert not any(path.suffix == ".part" for path in (tmp_path / "b" / "SYNC" / FERRY).iterdir())
            adopt(pair)
            async with pair.following("b"):
                await pair.all_covered()
                compare(tmp_path / "leader", tmp_path / "b")

    asyncio.run(story())


def test_a_byte_that_rots_under_way_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotten: list[Entry] = []
    plain = link.Link.send_records

    def send(self: link.Link, entries: Any) -> None:
        if not rotten and len(entries) == 1 and entries[0].data[:256] == DATA[:256]:
            rotten.append(entries[0])
            entries = [entries[0]._replace(data=b"X" + entries[0].data[1:])]
        plain(self, entries)

    monkeypatch.setattr(link.Link, "send_records", send)

    async def story() -> None:
        async with ferrying(tmp_path) as (pair, ferry), pair.following("b"):
            await until(lambda: boats(ferry) == 1)
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            adopt(pair)
            await pair.all_covered()
            compare(tmp_path / "leader", tmp_path / "b")
            assert len(pair.logged("file_refused")) == len(rotten) == 1

    asyncio.run(story())


class FullOnce(Door):
    """The disk is full for the first bytes of a file that comes."""

    left = 2  # the file comes, and is asked for

    def beside(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if name == "write" and path is not None and path.suffix == ".part" and self.left:
            self.left -= 1
            raise DiskFull
        return super()._call(name, path, action, *args)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with ferrying(tmp_path) as (pair, ferry), pair.following("b", door=FullOnce()):
            await until(lambda: boats(ferry) == 1)
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            adopt(pair)
            await pair.all_covered()
            compare(tmp_path / "leader", tmp_path / "b")
            assert len(pair.logged("standby_stopped")) == 1

    asyncio.run(story())


def test_a_file_made_anew_is_no_sealed_one(tmp_path: Path) -> None:
    """The engine itself may write a file of the same unfinished name later: its rename is a plain one."""

    async def story() -> None:
        async with ferrying(tmp_path) as (pair, ferry), pair.following("b"):
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
            assert TMP in pair.lead.stream.ferried
            pair.engine.door.replace(tmp_path / "leader" / SEGMENT.replace("0.bson", "7.bson"), b"x")
            pair.engine.door.close(pair.engine.door.create(tmp_path / "leader" / TMP))
            assert not pair.lead.stream.ferried
            adopt(pair)
            await pair.all_covered()
            compare(tmp_path / "leader", tmp_path / "b")

    asyncio.run(story())


def test_unfinished_files_are_removed_at_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with ferrying(tmp_path) as (_, ferry):
            job = ferry.submit(sealing(tmp_path / "leader", DATA))
            await until(job.done)
        assert not (tmp_path / "leader" / TMP).exists()

    asyncio.run(story())


# Real processes


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


SMALL = "[defaults]\nsegment_bytes = 1048576\n"


def put(server: Server, count: int, prefix: str) -> Any:
    messages = [{"id": f"{prefix}{n}", "body": "x" * 100, "due_ms": FAR + n * 7 % 1_000} for n in range(count)]
    return server.ok("POST", "/v1/topics/t/messages", {"messages": messages})


def seals(server: Server) -> int:
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("turtlemq_seals_total")))


def shipped(server: Server, kind: str) -> int:
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    return round(
        sum(float(line.split()[-1]) for line in lines if line.startswith(f'turtlemq_shipped_bytes_total{{kind="{kind}"'))
    )


def test_seals_under_load_leave_equal_copies(tmp_path: Path, endpoint: str) -> None:
    with pair_of(tmp_path, endpoint, SMALL) as (cluster, leader, standby):
        for n in range(16):
            put(leader.server, 1_000, f"m{n}-")
        eventually(lambda: seals(leader.server) >= 2)
        put(leader.server, 1, "last")
        assert shipped(leader.server, "adopt") > 0
        assert "file_needed" not in leader.log
        cluster.until_equal()
        standby.kill()
        leader.kill()
    engine = Engine.open(standby.data)
    assert engine.check() == []
    engine.close()


def test_a_standby_killed_while_a_file_comes_holds_up_nothing(tmp_path: Path, endpoint: str) -> None:
    with pair_of(tmp_path, endpoint, SMALL, bulk_mb_per_s=1) as (cluster, leader, standby):
        threads = [threading.Thread(target=put, args=(leader.server, 2_000, f"m{n}-")) for n in range(8)]
        for thread in threads:
            thread.start()
        ferry = standby.data / "SYNC" / FERRY
        eventually(lambda: any(path.suffix == ".part" for path in (ferry.iterdir() if ferry.exists() else ())))
        standby.kill()
        for thread in threads:
            thread.join()
        eventually(lambda: seals(leader.server) >= 1)
        assert all(leader.server.call("GET", f"/v1/topics/t/messages/m{n}-1999").status == 200 for n in range(8))
        assert any(path.suffix == ".part" for path in ferry.iterdir())
        cluster.start(standby.name)
        cluster.until_in_sync()
        assert not ferry.exists() or not any(path.suffix == ".part" for path in ferry.iterdir())


def test_the_worker_process_has_ended_when_the_folder_is_given_up() -> None:
    worker = ProcessWorker()
    job = worker.submit(time.sleep, 600)
    eventually(job.running)
    worker.close(0.1)
    assert multiprocessing.active_children() == []
    assert isinstance(job.exception(), BrokenProcessPool)
    assert worker.submit(max, 2, 3).result() == 3
    worker.close()


def test_a_seal_job_names_its_files(tmp_path: Path) -> None:
    job = SealJob(tmp_path, "t", 7, 2, None, None, 0, (), 0, 0)  # type: ignore[arg-type]
    assert [path.name for path in files_of(job)] == ["delay_0000000007.bson.tmp", "delay_0000000007.index.tmp"]
