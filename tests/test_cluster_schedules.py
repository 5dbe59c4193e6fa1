"""Schedules of a cluster with a real etcd: over a killed leader each time is fired exactly once, and none early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import cluster_of
from tests.harness.server_process import Server
from turtlemq.schedules import LEAD_MS

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
EVERY_MS = 500
Firing = tuple[str, int]  # id, due time


def settled(server: Server, wait: int = 0) -> list[Firing]:
    """Fetch firings and acknowledge each."""
    got = server.fetch("t", max=100, wait=wait)
    assert all(message["ready_ms"] >= message["due_ms"] for message in got), "never early"
    ids = [message["id"] for message in got]
    assert not ids or server.ack("t", *ids) == {"acked": len(ids), "failed": 0, "dead": 0, "unknown": []}
    return [(message["id"], message["due_ms"]) for message in got]


def settled_until(server: Server, due_ms: int) -> list[Firing]:
    """Settle firings, up to one of this time."""
    done: list[Firing] = []
    while not any(due >= due_ms for _, due in done):
        done += settled(server, wait=5)
    return done


def test_a_killed_leader_neither_loses_nor_doubles_a_firing(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as endpoint, cluster_of(tmp_path, endpoint, "abc", min_isr=2) as cluster:
        leader = cluster.healthy()
        through = next(node for node in cluster.nodes.values() if node is not leader)
        given = {"every": EVERY_MS / 1000, "body": "tick"}  # a failover takes less than a minute, so none is missed
        first_ms = through.server.ok("PUT", "/v1/topics/t/schedules/s", given)["next_ms"]
        done = settled_until(leader.server, first_ms + 3 * EVERY_MS)
        leader.kill()
        new = cluster.leader(leader.name)
        later_ms = int(time.time() * 1000) + LEAD_MS + 2 * EVERY_MS  # the lost leader cannot have fired it ahead
        done += settled_until(new.server, later_ms)
        new.server.ok("POST", "/v1/topics/t/schedules/s/pause")
        done += settled(new.server)
        last_ms = max(due for _, due in done)
        assert sorted(done) == [(f"s@{due}", due) for due in range(first_ms, last_ms + 1, EVERY_MS)]
        stats = new.server.ok("GET", "/v1/topics/t")["stats"]
        assert (stats["ready"], stats["reserve"], stats["sleep"]) == (0, 0, 0)
        assert stats["history"] == len(done)
