"""The port for standbys: a node that cannot have it says so, keeps no copy, does not lead, and goes on when the port is free."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.cluster_process import eventually, put
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import Node, cluster_of
from tests.harness.server_process import PATIENCE_S

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Another program listens on this port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


def until_it_says_so(node: Node) -> None:
    eventually(lambda: node.events("peer_port_unusable"))
    (line,) = node.events("peer_port_unusable")
    assert all(text in line for text in ("level=error", f"127.0.0.1:{node.peer}", "in use", "cluster.peer")), line


def test_the_first_leader_waits_for_its_port_and_leads_then(tmp_path: Path, endpoint: str) -> None:
    with cluster_of(tmp_path, endpoint) as cluster:
        first = cluster.nodes["a"]
        with taken(first.peer):
            cluster.start()
            until_it_says_so(first)
            assert (cluster.state, cluster.lead) == (None, None)
            refusal = first.server.call("GET", "/v1/topics", headers={"X-Turtlemq-Budget-Ms": "300"})
            assert (refusal.status, refusal.json["error"]["code"]) == (503, "NO_LEADER")
        assert cluster.leader() is first
        cluster.until_in_sync()
        assert first.events("peer_port_open")
        with socket.create_connection(("127.0.0.1", cluster.nodes["b"].peer), PATIENCE_S) as connection:
            assert connection.recv(1) == b"", "it does not lead"


def test_another_member_leads_while_a_port_is_taken(tmp_path: Path, endpoint: str) -> None:
    with cluster_of(tmp_path, endpoint, "abc") as cluster:
        cluster.start()
        old = cluster.leader()
        cluster.until_in_sync()
        without, other = (node for node in cluster.nodes.values() if node is not old)
        assert without.stop() == 0
        with taken(without.peer):
            cluster.start(without.name)
            until_it_says_so(without)
            eventually(lambda: without.name not in cluster.in_sync())
            put(without.server, 10, "forwarded")
            old.kill()
            assert cluster.leader(old.name) is other
            put(without.server, 10, "f")
            assert "elected" not in without.log
        cluster.until_in_sync(without.name, other.name)
        other.kill()
        assert cluster.leader(other.name) is without
