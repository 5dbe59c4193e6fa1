"""A machine that loses power: its copy may lack records that it had acknowledged, so others go first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turtlemq.replica import replica_file
from turtlemq.replica.cluster_state import Keys, KeyValue, ShardState, encode
from turtlemq.replica.etcd import EtcdError, mod_revision_is
from turtlemq.replica.member import Member, may_run
from turtlemq.replica.member_events import Begin, Event, Marked, PatienceOver, Seen, State, Waited
from turtlemq.replica.shard_view import seen_of
from turtlemq.server import reboot
from turtlemq.server.reboot import Reboot
from turtlemq.storage.door import Door


class Machine(Door):
    """A machine that may restart."""

    boot = "first"

    def boot_id(self) -> str:
        return self.boot


def taken(door: Door, folder: Path) -> replica_file.ReplicaFacts:
    return replica_file.take(door, folder, "prod")


def test_a_killed_process_of_the_same_machine_has_lost_nothing(tmp_path: Path) -> None:
    machine = Machine()
    taken(machine, tmp_path)
    assert not taken(machine, tmp_path).rebooted


def test_a_restart_is_noted_until_the_copy_is_whole(tmp_path: Path) -> None:
    machine = Machine()
    taken(machine, tmp_path)
    machine.boot = "second"
    assert taken(machine, tmp_path).rebooted
    facts = taken(machine, tmp_path)
    assert facts.rebooted, "also after the process was started again"
    assert facts.boot == "second"


def test_a_machine_that_was_stopped_properly_has_lost_nothing(tmp_path: Path) -> None:
    machine = Machine()
    facts = taken(machine, tmp_path)
    replica_file.write(machine, tmp_path, replace(facts, lsn=7, chain=8))
    machine.boot = "second"
    assert not taken(machine, tmp_path).rebooted


@pytest.mark.parametrize("boots", [("", "second"), ("first", "")])
def test_without_an_id_nothing_is_known(tmp_path: Path, boots: tuple[str, str]) -> None:
    machine = Machine()
    machine.boot = boots[0]
    taken(machine, tmp_path)
    machine.boot = boots[1]
    assert not taken(machine, tmp_path).rebooted


def test_this_machine_has_an_id() -> None:
    assert len(Door().boot_id()) == 36


def test_news_of_lost_power_count_until_the_state_changes() -> None:
    keys = Keys("prod")
    state = encode(ShardState(epoch=1, leader="a", isr=("a", "b"), nodes={"a": "na", "b": "nb"}, nonce="n", why="", at_ms=0))

    def seen(*rebooted: tuple[str, int]) -> frozenset[str]:
        values = {keys.state(0): KeyValue(keys.state(0), state, 1, 10, 0)}
        for name, at in rebooted:
            key = keys.rebooted(0, name)
            values[key] = KeyValue(key, b"{}", at, at, 0)
        return seen_of(values, 20, keys, 0, "na").rebooted

    assert seen() == frozenset()
    assert seen(("a", 11), ("b", 9), ("c", 12)) == {"a"}
    assert seen(("a", 11), ("b", 12)) == {"a", "b"}


def member(rebooted: bool = True) -> Member:
    made = Member("a", "p", complete=True, epoch=1)
    made.rebooted = rebooted
    made.handle(Begin(), 0.5)
    return made


def told(isr: str = "ab", rebooted: str = "", at: int = 5, read: int = 0) -> Seen:
    return Seen(at, 3, 1, "b", frozenset(isr), "n", None, 0, False, read, frozenset(rebooted))


@pytest.mark.parametrize(("isr", "rebooted", "runs"), [("ab", "", False), ("ab", "a", False), ("ab", "b", True), ("a", "", True)])
def test_it_runs_if_all_others_have_lost_power_as_well(isr: str, rebooted: str, runs: bool) -> None:
    made = member()
    made.handle(told(isr, rebooted), 0.5)
    assert may_run(made, PatienceOver()) == runs


def test_one_that_was_made_whole_runs() -> None:
    made = member()
    made.handle(told(), 0.5)
    made.handle(Marked(complete=False), 0.5)
    assert made.rebooted
    made.handle(Marked(complete=True), 0.5)
    assert may_run(made, PatienceOver())


def test_one_that_has_waited_long_enough_runs() -> None:
    made = member()
    made.handle(told(), 0.5)
    made.handle(PatienceOver(), 0.5)
    made.handle(told(at=6, read=made.reads), 0.5)
    states = [made.state]
    made.handle(Waited(), 0.5)
    made.handle(told(at=7, read=made.reads), 0.5)
    assert [*states, made.state] == [State.ATTACH, State.RUN]


class Names:
    """Stands for the cluster's part, with an etcd that answers or does not."""

    def __init__(self) -> None:
        self.etcd: Any = self
        self.keys, self.shard = Keys("prod"), 0
        self.puts: list[object] = []
        self.away = True

    async def transact(self, compares: list[dict[str, object]], then: list[dict[str, object]]) -> None:
        assert compares == [mod_revision_is(self.keys.state(0), told().revision)], "a late word does not count"
        self.puts += then
        if self.away:
            raise EtcdError("it is away")


def test_a_process_says_that_power_was_lost_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reboot, "GRACE_S", 0.05)

    async def story() -> None:
        names, events = Names(), list[Event]()
        watch = Reboot(names, member(), events.append)
        for _ in range(3):
            watch.saw(told())
            await asyncio.sleep(0.001)
        assert len(names.puts) == 3, "again, as etcd was away"
        names.away = False
        watch.saw(told(rebooted="a"))
        await asyncio.sleep(0.001)
        assert len(names.puts) == 3
        watch.saw(told()._replace(lead="b"))
        await asyncio.sleep(0.1)
        assert events == [], "there was a leader"
        watch.saw(told())
        await asyncio.sleep(0.1)
        assert events == [Waited()]
        watch.end()
        other = Reboot(names, member(rebooted=False), events.append)
        other.saw(told())
        await asyncio.sleep(0.1)
        assert len(events) == 1

    asyncio.run(story())
