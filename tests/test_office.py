"""A leader's term with a scripted name server: the lease that counts, members that come and go, the end of the worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.cluster_view import ClusterView
from turtlemq.replica.etcd import InDoubt, Outcome
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import Seen, State
from turtlemq.replica.membership import Change
from turtlemq.replica.tenure import NotLeading
from turtlemq.server import office
from turtlemq.server.cluster_config import Cluster
from turtlemq.server.leadership import Leadership
from turtlemq.server.metrics.meter import Meter
from turtlemq.server.office import Office
from turtlemq.server.replica_names import boot_ms

LEASE = 77


class Scene:
    """An office around scripted requests to etcd, with standbys whose positions the test sets."""

    def __init__(self, isr: str = "ab", lead: str | None = "a", lease: int = LEASE) -> None:
        self.sent: list[Change] = []
        self.outcome: Outcome | Exception = Outcome(True, 20, [])
        self.reads = 0
        self.lead: Any = SimpleNamespace(standbys={}, stream=SimpleNamespace(lsn=50), changed=lambda: None)
        self.lead.lag_bytes, self.lead.lag_s = (lambda _: 0), (lambda _: 0.0)
        self.names: Any = SimpleNamespace(lease=LEASE, lease_sent_ms=boot_ms(), change=self.change)
        keys = Keys("p")
        part: Any = SimpleNamespace(options=Cluster(lag_max_s=1), shard=0, decoded=lambda: ClusterView.of(keys, {}))
        self.member = Member("a", "process", complete=True, epoch=3, state=State.LEAD, term=3)
        self.member.seen = self.seen = Seen(10, 9, 3, "a", frozenset(isr), "n", lead, lease)
        names, led = cast(Any, self.names), cast(Any, self.lead)
        self.office = Office(part, names, self.member, led, None, lambda _: None, self.read, Meter())

    async def change(self, change: Change, *_: object) -> Outcome:
        self.sent.append(change)
        await asyncio.sleep(0)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def read(self) -> None:
        self.reads += 1

    def attach(self, member: str, lsn: int) -> None:
        heard_s = asyncio.get_running_loop().time()
        hello = SimpleNamespace(node=f"node-{member}")
        self.lead.standbys[member] = SimpleNamespace(acked=lsn, hello=hello, link=SimpleNamespace(heard_s=heard_s))
        self.lead.attached(member, lsn)

    def may_answer(self) -> bool:
        try:
            self.lead.check_may_answer()
        except NotLeading:
            return False
        return True


def run(story: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_lease_counts_only_if_lead_hangs_on_it() -> None:
    async def story() -> None:
        scene = Scene(lead=None, lease=0)
        assert not scene.may_answer()
        scene.names.kept(LEASE, boot_ms())
        assert not scene.may_answer(), "the lease is alive, but `lead` is absent"
        scene.office.saw(scene.seen._replace(lead="a", lease=LEASE))
        assert scene.may_answer()
        scene.names.kept(LEASE, boot_ms())
        scene.office.saw(scene.seen._replace(lead=None, lease=0))
        assert not scene.may_answer()

    run(story)


def test_a_wanted_member_is_required_before_etcd_knows_it() -> None:
    async def story() -> None:
        scene = Scene(isr="a")
        process: Any = SimpleNamespace(member=scene.member, spawn=lambda work: work.close())
        led = Leadership(process, None)  # type: ignore[arg-type]
        led.office = scene.office
        scene.attach("b", 30)
        await asyncio.sleep(0.01)
        assert led._required() == {"a", "b"}
        assert scene.sent == [], "it lacks records that were made before"
        scene.lead.acked("b", 50)
        await asyncio.sleep(0.01)
        assert scene.sent == [Change(9, frozenset("ab"))]
        assert scene.office.book.isr == {"a", "b"}

    run(story)


def test_a_member_that_is_away_counts_until_etcd_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        scene = Scene()
        scene.outcome = InDoubt("no answer")
        now = boot_ms()
        monkeypatch.setattr(office, "boot_ms", lambda: now)
        scene.attach("b", 50)
        del scene.lead.standbys["b"]
        scene.lead.detached("b")
        scene.office.look_soon()
        await asyncio.sleep(0.01)
        assert scene.sent == []
        now += 301
        scene.office.look_soon()
        await asyncio.sleep(0.15)
        assert scene.sent[0] == Change(9, frozenset("a"))
        assert scene.office.book.required() == {"a", "b"}, "the transaction may come to nothing"
        assert scene.reads
        scene.outcome = Outcome(True, 21, [])
        scene.office.look_soon()
        await asyncio.sleep(0.15)
        assert scene.office.book.required() == {"a"}

    run(story)


def test_a_standby_that_reconnects_comes_in_though_its_transaction_was_lost() -> None:
    async def story() -> None:
        scene = Scene(isr="a")
        scene.outcome = InDoubt("no answer")
        scene.attach("b", 50)
        await asyncio.sleep(0.01)
        assert scene.sent == [Change(9, frozenset("ab"))]
        del scene.lead.standbys["b"]
        scene.lead.detached("b")
        scene.attach("b", 50)
        scene.outcome = Outcome(True, 20, [])
        while scene.office.book.isr == {"a"}:
            scene.office.saw(scene.seen)
            await asyncio.sleep(0.01)
        assert scene.sent == [Change(9, frozenset("ab"))] * 2
        assert scene.office.book.isr == scene.office.book.required() == {"a", "b"}

    run(story)


def test_files_of_a_member_are_replaced_after_it_has_left() -> None:
    async def story() -> None:
        scene = Scene()
        scene.lead.unfit("b")
        assert not scene.lead.may_sync("b")
        await asyncio.sleep(0.01)
        assert scene.sent == [Change(9, frozenset("a"))]
        assert scene.lead.may_sync("b")

    run(story)


def test_a_deposed_leader_waits_for_the_end_of_its_worker() -> None:
    async def story() -> None:
        done: list[str] = []
        service = SimpleNamespace(retire=lambda _: done.append("refuses"))
        process: Any = SimpleNamespace(service=service)
        led = Leadership(process, None)  # type: ignore[arg-type]
        lead = SimpleNamespace(close=lambda _: done.append("closed"))
        led._leader = SimpleNamespace(lead=lead, kill=lambda: done.append("killed"))  # type: ignore[assignment]
        await led.abandon()
        assert done == ["refuses", "closed", "killed"]

    run(story)
