"""Records over TCP: a leader and its standbys on loopback, with cut connections, wrong peers, slow and full standbys."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tests.harness.replica_pair import BEAT_S, identity, leading, until
from tests.trust.failover import compare
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument, NotEnoughReplicas, NotReplicated
from turtlemq.replica import replica_file
from turtlemq.replica.frames import PROTOCOL, Challenge, Hello, Proof, Welcome, encode
from turtlemq.replica.lead_types import Refusals
from turtlemq.replica.standby import NotTrusted
from turtlemq.replica.tenure import NotLeading
from turtlemq.server import output_commit
from turtlemq.storage.door import Door


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def check_copy(root: Path, name: str = "b", count: int | None = None) -> None:
    """A copy is equal, and opens as a sound data folder."""
    compare(root / "leader", root / name)
    engine = Engine.open(root / name)
    assert engine.check() == []
    if count is not None:
        assert engine.stats("t").sleep == count
    engine.close()


def test_a_standby_has_all_records_when_they_are_covered(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair, pair.following() as standby:
            for n in range(20):
                pair.put(50, f"m{n}-")
                await pair.all_covered()
                assert standby.lsn == pair.lead.stream.lsn
                assert pair.lead.copies(pair.lead.stream.lsn) == 2
            compare(tmp_path / "leader", tmp_path / "b")
            assert pair.lead.lag_bytes("b") == 0
            assert pair.lead.lag_s("b") == 0
            await pair.end()
        check_copy(tmp_path, count=1_000)

    run(story())


def test_an_answer_waits_for_the_required_member(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            pair.put(1)
            lsn = pair.lead.stream.lsn
            with pytest.raises(NotReplicated):
                await pair.lead.covered(lsn, 0.05)
            assert not pair.lead.has(lsn)
            assert pair.lead.copies(lsn) == 1
            waiting = asyncio.ensure_future(pair.lead.covered(lsn, 30))
            async with pair.following():
                await waiting
                assert pair.lead.copies(lsn) == 2

    run(story())


def test_an_answer_goes_on_when_a_member_is_let_go(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            pair.put(1)
            waiting = asyncio.ensure_future(pair.lead.covered(pair.lead.stream.lsn, 30))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            pair.required.clear()
            pair.lead.changed()
            await waiting

    run(story())


def test_a_second_member_is_waited_for_as_well(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ("b", "c")) as pair, pair.following("b"):
            pair.put(1)
            lsn = pair.lead.stream.lsn
            await until(lambda: pair.lead.copies(lsn) == 2)
            with pytest.raises(NotReplicated):
                await pair.lead.covered(lsn, 0.05)
            async with pair.following("c"):
                await pair.lead.covered(lsn, 30)
                assert pair.lead.copies(lsn) == 3

    run(story())


def test_waiting_answers_end_with_the_leader(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            pair.put(1)
            waiting = asyncio.ensure_future(pair.lead.covered(pair.lead.stream.lsn, 30))
            await asyncio.sleep(0.01)
            pair.lead.close()
            with pytest.raises(NotReplicated):
                await waiting

    run(story())


def test_a_standby_resumes_where_it_stopped(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            async with pair.following():
                pair.put(10, "a")
                await pair.all_covered()
            facts = replica_file.read(Door(), tmp_path / "b")
            assert facts is not None
            assert (facts.lsn, facts.complete, facts.epoch) == (pair.lead.stream.lsn, True, 1)
            pair.put(10, "b")
            async with pair.following() as standby:
                facts = replica_file.read(Door(), tmp_path / "b")
                assert facts is not None
                assert facts.lsn is None
                await pair.all_covered()
                assert not pair.logged("reconcile_begun")
                assert standby.stream.first == 1, "the ring was kept as well"
                await pair.end()
        check_copy(tmp_path, count=20)

    run(story())


def test_a_cut_connection_is_made_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            async with pair.following() as standby:
                for n in range(8):
                    pair.put(30, f"m{n}-")
                    await asyncio.sleep(0)
                    if standby.link is not None:
                        standby.link.close("cut by the test", at_once=True)
                    pair.put(30, f"n{n}-")
                    await pair.all_covered()
                await pair.end()
            assert len(pair.logged("standby_attached")) >= 5
        check_copy(tmp_path, count=480)

    run(story())


def test_a_copy_without_position_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            async with pair.following():
                pair.put(1)
                await pair.all_covered()
            replica_file.take(Door(), tmp_path / "b", "prod")  # as a crash would leave it
            async with pair.following():
                await until(lambda: pair.logged("standby_refused"))
            (why,) = {each["why"] for each in pair.logged("standby_refused")}
            assert "compared" in why

    run(story())


def test_a_copy_with_another_history_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path / "one") as pair, pair.following():
            pair.put(1)
            await pair.all_covered()
        (tmp_path / "one" / "b").rename(tmp_path / "two" / "b")
        async with leading(tmp_path / "two") as pair:
            pair.put(5)
            async with pair.following():
                await until(lambda: pair.logged("standby_refused"))
                assert pair.lead.standbys == {}

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(story())


def test_a_copy_behind_the_ring_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ring_bytes=20_000) as pair:
            async with pair.following():
                pair.put(1)
                await pair.all_covered()
            pair.put(300)
            assert pair.lead.is_far_behind()
            async with pair.following():
                await until(lambda: pair.logged("standby_refused"))

    run(story())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"secret": b"another secret"}, "secret_file"), ({"cluster": "test"}, "belongs to cluster"), ({"shard": 3}, "shard 0")],
)
def test_a_wrong_peer_is_refused_with_a_reason(wrong: dict[str, Any], why: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair:
            async with pair.following(me=identity("b", **wrong)):
                await until(lambda: pair.logged("no_leader") or pair.logged("refused_by_leader"))
            told = pair.logged("no_leader") + pair.logged("refused_by_leader")
            assert why in told[0]["why"]
            await until(lambda: pair.logged("standby_refused"))
            (refused,) = pair.logged("standby_refused")
            assert why in refused["why"]
            assert refused["peer"].startswith("127.0.0.1:")
            assert pair.lead.standbys == {}
            assert not (tmp_path / "b" / "FORMAT").exists()

    run(story())


def test_a_peer_that_tries_again_is_named_once_a_minute() -> None:
    now: list[float] = [0.0]
    said: list[tuple[str, ...]] = []
    refusals = Refusals(lambda event, **fields: said.append((event, *fields.values())), lambda: now[0])
    for port in range(5):
        refusals.tell(f"10.0.0.2:{port}", "another secret")
    refusals.tell("10.0.0.3:9", "another secret", node="c")
    refusals.tell("10.0.0.2:9", "another format")
    now[0] = 60.0
    refusals.tell("10.0.0.2:10", "another secret")
    told = [("10.0.0.2:0", "another secret"), ("10.0.0.3:9", "another secret", "c")]
    told += [("10.0.0.2:9", "another format"), ("10.0.0.2:10", "another secret")]
    assert said == [("standby_refused", *each) for each in told]


def test_a_leader_without_the_secret_gets_no_hello(tmp_path: Path) -> None:
    """A standby follows only a leader that knows the secret, even if that one accepts everything."""

    async def story() -> None:
        got = bytearray()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(encode(Challenge(PROTOCOL, "prod", "x", "0" * 64)) + encode(Welcome(9, "resume", 0, 100)))
            got.extend(await reader.read(100_000))
            got.extend(await reader.read(100_000))
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with leading(tmp_path) as pair:
            pair.port = server.sockets[0].getsockname()[1]
            async with pair.following() as standby:
                await until(lambda: pair.logged("refused_by_leader"))
                assert standby.link is None
        server.close()
        assert b"replica" not in got

    run(story())


def test_a_standby_without_the_secret_gets_nothing(tmp_path: Path) -> None:
    """Even one that does not mind that the leader's proof is another one."""

    async def story() -> None:
        async with leading(tmp_path) as pair:
            pair.put(3)
            reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
            writer.write(encode(Challenge(PROTOCOL, "prod", "nonce")))
            writer.write(encode(Proof("0" * 64)) + encode(Hello(0, "b", "x", 0, 0, 0, True, 9, "")))
            got = await reader.read()
            assert b"secret_file" in got
            assert len(got) < 1_000
            assert pair.lead.standbys == {}
            writer.close()

    run(story())


def test_a_folder_of_another_cluster_is_not_taken(tmp_path: Path) -> None:
    replica_file.take(Door(), tmp_path, "prod")
    with pytest.raises(InvalidArgument, match="holds shard 0 of cluster 'prod'"):
        replica_file.take(Door(), tmp_path, "test")


def test_noise_does_not_disturb_a_leader(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair, pair.following():
            for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"", b"\0" * 100_000):
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
                writer.write(noise)
                if noise:
                    assert await reader.read(1) == b""
                writer.close()
            pair.put(3)
            await pair.all_covered()

    run(story())


class FullDisk(Door):
    """A disk that is full for a while, or broken."""

    error: OSError | None = None

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if self.error is not None and name in ("write", "fdatasync") and path is not None and "topic" in path.parts:
            raise self.error
        return super()._call(name, path, action, *args)


def test_a_full_standby_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        door = FullDisk()
        async with leading(tmp_path) as pair, pair.following(door=door):
            pair.put(5, "a")
            await pair.all_covered()
            door.error = OSError(errno.ENOSPC, "full")
            pair.put(5, "b")
            await until(lambda: pair.logged("standby_stopped"))
            assert not pair.lead.has(pair.lead.stream.lsn)
            door.error = None
            await pair.all_covered()
            await pair.end()
        check_copy(tmp_path, count=10)

    run(story())


def test_a_broken_disk_makes_the_copy_worthless(tmp_path: Path) -> None:
    async def story() -> None:
        door = FullDisk()
        async with leading(tmp_path) as pair:
            standby = pair.standby(door=door)
            task = asyncio.ensure_future(pair.follow(standby))
            pair.put(5, "a")
            await pair.all_covered()
            lsn = pair.lead.stream.lsn
            door.error = OSError(errno.EIO, "broken")
            pair.put(5, "b")
            with pytest.raises(NotTrusted):
                await task
            assert not pair.lead.has(lsn + 1) or standby.lsn > lsn
            await standby.stop()
            facts = replica_file.read(Door(), tmp_path / "b")
            assert facts is not None
            assert (facts.complete, facts.lsn) == (False, None)

    run(story())


class SlowDisk(Door):
    """Syncs that wait until they are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        if name == "fdatasync" and path is not None and path.name.startswith("delay"):
            self.free.wait(20)
        return super()._call(name, path, action, *args)


def test_nothing_is_acknowledged_before_it_is_applied(tmp_path: Path) -> None:
    """The standby has every record, but its own sync is not over: it has not applied the record that says so."""

    async def story() -> None:
        door = SlowDisk()
        async with leading(tmp_path) as pair, pair.following(door=door) as standby:
            pair.put(1)
            lsn = pair.lead.stream.lsn
            await until(lambda: pair.lead.standbys and pair.lead.standbys["b"].sent == lsn)
            await asyncio.sleep(4 * BEAT_S)
            assert pair.lead.standbys["b"].acked == standby.lsn < lsn
            assert pair.lead.lag_s("b") > BEAT_S
            with pytest.raises(NotReplicated):
                await pair.lead.covered(lsn, 0.01)
            door.free.set()
            await pair.lead.covered(lsn, 10)

    run(story())


def test_a_standby_with_a_long_queue_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turtlemq.replica.session.QUEUE_BYTES_MAX", 10_000)

    async def story() -> None:
        door = SlowDisk()
        async with leading(tmp_path) as pair, pair.following(door=door) as standby:
            pair.put(1)
            await until(lambda: standby.link is not None)
            for n in range(20):
                pair.put(20, f"m{n}-")
            link = standby.link
            assert link is not None
            await until(lambda: not link.is_reading)
            door.free.set()
            await pair.all_covered()
            await until(lambda: link.is_reading)

    run(story())


def test_too_few_copies_in_sync_refuse_writes(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, min_isr=2, lag_max_s=60) as pair:
            pair.lead.check_writable()  # it has just begun
            pair.lead._began_s -= 61
            with pytest.raises(NotEnoughReplicas) as refused:
                pair.lead.check_writable()
            assert refused.value.details == {"in_sync": 1, "min_isr": 2, "retry_after_ms": 1_000}
            async with pair.following():
                await until(lambda: pair.lead.standbys)
                pair.lead.check_writable()

    run(story())


def test_a_leader_without_the_right_answers_nothing(tmp_path: Path) -> None:
    """The right is asked for behind the wait, also when there is nothing to wait for: a read of a deposed leader is old."""

    async def story() -> None:
        async with leading(tmp_path) as pair, pair.following():
            pair.put(1)
            await pair.all_covered()
            await pair.lead.covered(pair.lead.stream.lsn, 5)
            asked: list[int] = []

            def refuse() -> None:
                asked.append(pair.lead.covered_lsn)
                raise NotLeading

            pair.lead.check_may_answer = refuse
            with pytest.raises(NotLeading):
                await pair.lead.covered(pair.lead.stream.lsn, 5)
            pair.put(1)
            last = pair.lead.stream.lsn
            with pytest.raises(NotLeading):
                await pair.lead.covered(last, 5)
            assert asked[-1] >= last

    run(story())


@pytest.mark.parametrize("acks", ["isr", "local"])
def test_an_answer_needs_the_right_to_give_it(acks: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, (), acks=acks) as pair:
            pair.lead.check_may_answer = Mock(side_effect=NotLeading)
            request = make_mocked_request("GET", "/v1/topics/t/messages/m")
            with pytest.raises(NotLeading):
                await output_commit.confirm(request, pair.lead, web.Response())
            pair.lead.check_may_answer.assert_called_once()

    run(story())


def test_a_heartbeat_may_ask_for_a_promise(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path) as pair, pair.following() as standby:
            seen: list[bool] = []
            given: list[tuple[str, float]] = []
            standby.saw_beat = lambda beat: seen.append(beat.promise)
            pair.lead.promised = lambda member, sent_s: given.append((member, sent_s))
            await until(lambda: len(seen) >= 3)
            assert not given
            pair.lead.asks_promise = lambda: True
            await until(lambda: len(given) >= 2)
            assert seen[-1]
            assert given[0][0] == "b"
            assert given[0][1] < given[1][1] == pair.lead.standbys["b"].beat_s

    run(story())


def test_the_leader_itself_may_be_among_the_required(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ("a",)) as pair:
            pair.put(1)
            await pair.all_covered()
            assert pair.lead.in_sync() == 1
            pair.required.add("b")
            with pytest.raises(NotReplicated):
                await pair.lead.covered(pair.lead.stream.lsn, 0.01)

    run(story())


def test_a_wiped_copy_no_longer_counts(tmp_path: Path) -> None:
    async def story() -> None:
        async with leading(tmp_path, ring_bytes=20_000) as pair:
            async with pair.following():
                for n in range(10):
                    pair.put(30, f"m{n}-")
                    await pair.all_covered()
            assert pair.lead.has(pair.lead.stream.lsn)
            unfit: list[str] = []
            pair.lead.unfit = unfit.append
            (tmp_path / "b").rename(tmp_path / "lost")
            async with pair.following():
                await until(lambda: unfit)
            assert not pair.lead.has(1)

    run(story())


def test_a_silent_standby_is_given_up(tmp_path: Path) -> None:
    """Its machine has gone without a word: the connection stays open, and nothing comes."""

    async def story() -> None:
        async with leading(tmp_path, min_isr=2, lag_max_s=0.3) as pair, pair.following() as standby:
            pair.put(1)
            await pair.all_covered()
            link = standby.link
            assert link is not None
            await asyncio.sleep(0.1)  # the last acknowledgement lets it read on
            link.pause_reading()
            await until(lambda: pair.logged("standby_detached"))
            assert pair.logged("standby_detached")[0]["why"] == "it is silent"
            link.resume_reading()
            pair.put(1, "again")
            await pair.all_covered()

    run(story())


def test_a_later_leader_is_not_forgotten(tmp_path: Path) -> None:
    """A standby that has heard of epoch 5 does not follow a leader of epoch 1, which is told."""

    async def story() -> None:
        async with leading(tmp_path) as pair:
            heard: list[int] = []
            pair.lead.higher_epoch = heard.append
            (tmp_path / "b").mkdir()
            replica_file.write(Door(), tmp_path / "b", replica_file.ReplicaFacts("prod", 0, "x", True, 5, 0, 0))
            async with pair.following():
                await until(lambda: pair.logged("refused_by_leader"))
            assert heard[0] == 5
            assert pair.lead.standbys == {}

    run(story())


def test_a_copy_that_stops_following_can_lead(tmp_path: Path) -> None:
    """Its ring serves another standby that was as far, or a little less."""

    async def story() -> None:
        async with leading(tmp_path, ("b", "c")) as pair:
            b = pair.standby("b")
            follows = asyncio.ensure_future(pair.follow(b))
            async with pair.following("c"):
                pair.put(10, "a")
                await pair.all_covered()
            pair.put(10, "b")
            await until(lambda: b.lsn == pair.lead.stream.lsn)
            await b.cease()
            await follows
        (tmp_path / "leader").rename(tmp_path / "old")
        (tmp_path / "b").rename(tmp_path / "leader")
        b.stream.epoch += 1
        replica_file.write(Door(), tmp_path / "leader", replica_file.ReplicaFacts("prod", 0, "x", True, 2, b.lsn, b.stream.chain))
        async with leading(tmp_path, ("c",), stream=b.stream) as pair, pair.following("c"):
            pair.put(10, "c")
            await pair.all_covered()
            await pair.end()
        check_copy(tmp_path, "c", count=30)

    run(story())
