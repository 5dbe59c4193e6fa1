"""Replica processes with a real etcd: rotten bytes are healed on leader and standby; a leader with a wrong clock hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.cluster_process import eventually, put
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import Cluster, Node, cluster_of
from tests.harness.rotten_bytes import rot, segment_of
from turtlemq.errors import Conflict
from turtlemq.replica.clock_skew import Clocks, Skew
from turtlemq.server.copy_care import CopyCare

needs_etcd = pytest.mark.skipif(not is_installed(), reason=MISSING)
VERIFY = "/v1/cluster/shards/0/verify"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, endpoint: str) -> Iterator[Cluster]:
    with cluster_of(tmp_path, endpoint) as found:
        yield found


def filled(cluster: Cluster) -> tuple[Node, Node]:
    """The leader and the standby of a cluster with messages."""
    cluster.start()
    cluster.until_in_sync()
    leader = cluster.leader()
    for n in range(5):
        put(leader.server, 50, f"m{n}-")
    (standby,) = (node for node in cluster.nodes.values() if node is not leader)
    return leader, standby


@needs_etcd
@pytest.mark.slow
def test_a_leader_with_a_rotten_byte_hands_over_and_heals(cluster: Cluster) -> None:
    old, new = filled(cluster)
    rot(segment_of(old.data), 5_000)
    assert old.server.ok("POST", VERIFY)["copies"][0]["state"] == "differs"
    assert cluster.leader(other_than=old.name) is new
    eventually(lambda: old.events("healed"))
    cluster.until_in_sync()
    assert new.server.ok("POST", VERIFY)["copies"][0]["state"] == "equal"
    assert old.facts.suspect == ()
    put(new.server, 5, "after")
    cluster.compare(old.name, new.name)
    assert old.events("copy_damaged")
    assert old.events("handed_over")
    eventually(lambda: "turtlemq_healed_files_total 1" in old.server.call("GET", "/metrics").data.decode())


@needs_etcd
@pytest.mark.slow
def test_a_standby_with_a_rotten_byte_heals(cluster: Cluster) -> None:
    leader, standby = filled(cluster)
    rot(segment_of(standby.data), 5_000)
    assert leader.server.ok("POST", VERIFY)["copies"][0]["state"] == "differs"
    eventually(lambda: standby.events("healed"))
    cluster.until_in_sync()
    assert leader.server.ok("POST", VERIFY)["copies"][0]["state"] == "equal"
    assert cluster.leads(leader.name)
    for name in ("turtlemq_copies_differ 0", "turtlemq_clock_skew_seconds{"):
        eventually(lambda name=name: name in leader.server.call("GET", "/metrics").data.decode())  # type: ignore[misc]


# Clocks, without etcd


class Handed(list[str]):
    """Stands for a `ClusterPart` that hands over."""

    options = SimpleNamespace(node="a")
    refuses = False

    async def handover(self, node: str) -> None:
        if self.refuses:
            raise Conflict("not now")
        self.append(node)


def care_of(handed: Handed, offsets: dict[str, int], *, leads: bool = True, own: Skew | None = None) -> CopyCare:
    clocks = Clocks("r-a")
    for name, offset in offsets.items():
        clocks.heard(f"r-{name}", 0, 0, offset)
    standbys = {f"r-{name}": SimpleNamespace(hello=SimpleNamespace(node=name), acked=7) for name in offsets}
    lead = SimpleNamespace(clocks=clocks, standbys=standbys, is_required=lambda _: True)
    config = SimpleNamespace(cluster=SimpleNamespace(max_clock_skew_ms=500, scrub_mb_per_s=0), data="data")
    process: Any = SimpleNamespace(config=config, part=handed, standby=SimpleNamespace(skew=own), service=None)
    care = CopyCare(process)
    if leads:
        care._care = SimpleNamespace(lead=lead)  # type: ignore[assignment]
    return care


@pytest.mark.parametrize(
    ("offsets", "to"),
    [({"b": 0, "c": 0}, []), ({"b": 900, "c": 900}, ["b"]), ({"b": 900}, []), ({"b": 2_900, "c": 900}, ["c"])],
)
def test_a_leader_with_a_wrong_clock_hands_over(offsets: dict[str, int], to: list[str]) -> None:
    async def story() -> None:
        handed = Handed()
        care = care_of(handed, offsets)
        care._check_clocks()
        care._check_clocks()  # not again at once
        await asyncio.sleep(0.01)
        assert sorted(handed) == to or (len(handed) == 1 and handed[0] in "bc" and to == ["b"])
        assert care.clock_is_right() == (not to)

    asyncio.run(story())


def test_a_handover_that_fails_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turtlemq.server.copy_care.RETRY_S", 0.0)

    async def story() -> None:
        handed = Handed()
        handed.refuses = True
        care = care_of(handed, {"b": 900, "c": 900})
        care._check_clocks()
        await asyncio.sleep(0.01)
        handed.refuses = False
        care._check_clocks()
        await asyncio.sleep(0.01)
        assert len(handed) == 1

    asyncio.run(story())


@pytest.mark.parametrize(("own", "right"), [(None, True), (Skew(400, 0), True), (Skew(900, 1), False), (Skew(900, 600), True)])
def test_a_standby_with_a_wrong_clock_does_not_run(own: Skew | None, right: bool) -> None:
    async def story() -> None:
        handed = Handed()
        care = care_of(handed, {}, leads=False, own=own)
        care._check_clocks()
        assert care.clock_is_right() == right
        assert handed == []

    asyncio.run(story())
