"""The logical clock: numbers rise on each node and from node to node, and a new leader gives none that the lost one gave."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.cluster_process import FAR
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import Node, cluster_of
from turtlemq.engine import Engine
from turtlemq.logical_clock import AHEAD_MS_MAX, LogicalClock, PeerAhead, PeerTime, next_number, number_at, time_of
from turtlemq.model import DUE_MS_MAX, Message
from turtlemq.replica.frames import Beat, Welcome
from turtlemq.segment.ids import server_seq
from turtlemq.server.following import Following
from turtlemq.server.replication import AHEAD_MS, first_number

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
times = st.integers(0, 10**13)
NODES = 3


@steady
@given(st.lists(times, max_size=30))
def test_numbers_rise_whatever_the_wall_clock_does(walls: list[int]) -> None:
    clock = LogicalClock()
    numbers = [clock.tick(wall) for wall in walls]
    assert numbers == sorted(set(numbers))
    assert all(time_of(number) >= wall for number, wall in zip(numbers, walls, strict=True))
    assert clock.now() == (numbers[-1] if numbers else -1)


@steady
@given(
    st.lists(st.integers(-AHEAD_MS_MAX // 2, AHEAD_MS_MAX // 2), min_size=NODES, max_size=NODES),
    st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(0, 50)), max_size=60),
)
def test_an_effect_has_a_higher_number_than_its_cause(skews: list[int], steps: list[tuple[int, int, int]]) -> None:
    """Nodes with different clocks send each other messages; a step to itself is an event of one node."""
    clocks, now_ms, most = [LogicalClock() for _ in skews], 10**12, 10**12 + max(skews)
    past: list[set[int]] = [set() for _ in skews]  # numbers of all events that a node knows of
    for sender, receiver, passed in steps:
        now_ms, most = now_ms + passed, most + passed
        number = clocks[sender].tick(now_ms + skews[sender])
        assert all(number > earlier for earlier in past[sender])
        past[sender].add(number)
        if receiver != sender:
            arrived = clocks[receiver].merge(number, now_ms + skews[receiver])
            past[receiver] |= past[sender]
            assert all(arrived > earlier for earlier in past[receiver])
            past[receiver].add(arrived)
        assert all(time_of(clock.now()) <= most for clock in clocks)  # no further than the fastest clock


@steady
@given(times, st.integers(AHEAD_MS_MAX - 5, AHEAD_MS_MAX + 5), st.integers(0, (1 << 20) - 1))
def test_a_peer_that_is_far_ahead_is_refused(now_ms: int, ahead_ms: int, counter: int) -> None:
    clock = LogicalClock()
    before, peer = clock.tick(now_ms), number_at(now_ms + ahead_ms) + counter
    if ahead_ms > AHEAD_MS_MAX:
        with pytest.raises(PeerAhead, match="60 s are the most"):
            clock.merge(peer, now_ms)
        assert clock.now() == before
    else:
        assert clock.merge(peer, now_ms) == clock.now() == peer + 1


@hypothesis_settings(steady, max_examples=30)
@given(st.lists(st.tuples(st.integers(10**12, FAR), st.integers(1, 5)), min_size=1, max_size=10))
def test_seqs_of_a_topic_are_such_numbers(tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, int]]) -> None:
    engine, last = Engine.open(tmp_path_factory.mktemp("data")), -1
    try:
        for now_ms, count in puts:
            stored = engine.submit("t", [Message(b"x", due_ms=DUE_MS_MAX)] * count, now_ms=now_ms)
            seqs = [server_seq(id_) for id_ in stored.ids]
            assert seqs == [next_number(last, now_ms) + i for i in range(count)]
            last = seqs[-1] or 0
    finally:
        engine.close()


# Where a follower takes over


def test_a_late_heartbeat_does_not_set_the_peers_clock_back() -> None:
    peer = PeerTime()
    for under_way_ms in (3, 900, 1, 400):
        peer.heard(told_ms=50_000, now_ms=45_000 + under_way_ms)
    assert peer.at(60_000) == 60_000 + 4_999
    for _ in range(8):  # its clock was set back
        peer.heard(told_ms=50_000, now_ms=50_010)
    assert peer.at(60_000) == 59_990


@steady
@given(
    st.integers(-AHEAD_MS_MAX, AHEAD_MS_MAX),
    st.lists(st.integers(0, AHEAD_MS - 1), min_size=1, max_size=12),
    st.integers(0, 9_999),
)
def test_the_first_number_is_above_all_of_the_lost_leader(ahead_ms: int, under_way_ms: list[int], silent_ms: int) -> None:
    """`ahead_ms`: the leader's clock less this node's. It gives numbers until the moment before another one leads."""
    now_ms, peer = 10**12, PeerTime()
    for passed in under_way_ms:
        now_ms += 600
        peer.heard(told_ms=now_ms + ahead_ms - passed, now_ms=now_ms)
    now_ms += silent_ms
    theirs = number_at(now_ms + ahead_ms)
    assert first_number(peer, now_ms) >= number_at(now_ms + AHEAD_MS)
    assert first_number(peer, now_ms) > theirs


def test_a_clock_that_was_far_ahead_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    peer = PeerTime()
    peer.heard(told_ms=200_000, now_ms=100_000)
    with caplog.at_level("ERROR", "turtlemq"):
        assert first_number(peer, 100_000) == number_at(100_000 + AHEAD_MS)
    assert [record.message for record in caplog.records] == ["leader_clock_refused"]


def test_a_standby_listens_to_the_clock_of_its_present_leader() -> None:
    async def story() -> None:
        part, standby = SimpleNamespace(refusal=""), SimpleNamespace()
        told: list[Any] = []
        following = Following(part, SimpleNamespace(), standby, told.append)  # type: ignore[arg-type]
        beat = Beat(epoch=1, n=1, lsn=1, covered=1, clock_ms=FAR)
        standby.saw_beat(beat)
        assert following.leader_time.at(0) > FAR // 2
        deciding = asyncio.ensure_future(standby.decide(Welcome(2, "resume", 1, 600)))
        await asyncio.sleep(0)
        assert following.leader_time.at(5) == 5
        following.go_on()
        assert await deciding

    asyncio.run(story())


AHEAD_S = 20
CLOCK = f"import time\ntrue = time.time_ns\ntime.time_ns = lambda: true() + {AHEAD_S} * 10**9\n"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not is_installed():
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.mark.slow
def test_ids_of_a_leader_whose_clock_was_ahead_stay_unique(tmp_path: Path, endpoint: str) -> None:
    """The other node's clock is 20 s behind, and it has not got the last message."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)

    def given_by(node: Node, size: int = 1) -> int:
        stored = node.server.ok("POST", "/v1/topics/t/messages", {"messages": [{"body": "x" * size, "due_ms": FAR}]})
        return server_seq(stored["ids"][0]) or 0

    with cluster_of(tmp_path, endpoint) as cluster:
        cluster.settings = {"acks": "local", "max_clock_skew_ms": 60_000, "lag_max_s": 30}
        cluster.start("a", path=str(tmp_path / "clock"))
        first, other = cluster.leader(), cluster.nodes["b"]
        cluster.start("b")
        cluster.until_in_sync()
        given_by(first)
        cluster.until_equal()
        other.signal(signal.SIGSTOP)
        lost = max(given_by(first, 1_000_000) for _ in range(20))  # more than the sockets between both hold
        first.kill()
        other.signal(signal.SIGCONT)
        assert cluster.leader(other_than="a") is other
        assert given_by(other) > lost
