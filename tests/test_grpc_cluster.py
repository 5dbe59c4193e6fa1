"""gRPC in a cluster: any node takes a connection, the leader serves it, and no message is lost when another one leads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.grpc_peer import Peer, site, soon
from tests.harness.grpc_worker import Worker
from tests.harness.node_process import NodeHome, own_port, running_node
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.topology import Topology
from turtlemq.server.errors import NoLeader
from turtlemq.server.grpc import context, statuses, tunnel
from turtlemq.server.grpc import site as grpc_site
from turtlemq.server.grpc.messages import message

Check, Health = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")
REGISTER = {"register": {"route_key": "t"}}


async def _init(endpoint: str) -> None:
    async with Etcd([endpoint]) as etcd:
        await init_cluster(etcd, "prod", Shape(1, 3, 2))


async def _topology(endpoint: str) -> Topology:
    async with Etcd([endpoint]) as etcd:
        found = await etcd.get("/tmq/prod/", prefix=True)
        return Topology.of({key.key: key for key in found.keys}, found.revision)


def _leader(endpoint: str, copies: int = 3) -> str | None:
    """The leader's node, if so many copies are in sync."""
    topology = asyncio.run(_topology(endpoint))
    place = topology.leader(0)
    return None if place is None or len(topology.leaders[0].isr) < copies else place.node


def _hand_over(home: NodeHome, to: str) -> None:
    url, body = f"{home.url}/v1/cluster/shards/0/handover", json.dumps({"to": to}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()


def _group(home: NodeHome) -> Any:
    return json.loads(home.get("/v1/topics/t/groups/default", 60))


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_streams_survive_a_handover_and_a_killed_leader(tmp_path: Path) -> None:
    homes, ports = {name: NodeHome(tmp_path / name, name) for name in "abc"}, {name: own_port() for name in "abc"}
    with running_etcd(tmp_path) as endpoint, ExitStack() as stack:
        asyncio.run(_init(endpoint))
        for name, home in homes.items():
            home.configure(endpoint, "lease_s = 2")
            file = home.home / "turtle.toml"
            file.write_text(f"grpc_port = {ports[name]}\n{file.read_text()}\n[defaults]\nttr = 3\n")
            stack.enter_context(running_node(home, stand_in=False))
        eventually(lambda: _leader(endpoint) is not None)
        first = _leader(endpoint)
        assert first is not None
        others = [name for name in homes if name != first]
        workers = [Worker(f"127.0.0.1:{ports[name]}", name) for name in others]  # at nodes that do not lead
        workers.append(Worker("ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports.values()), "all"))
        for worker in workers:
            stack.callback(worker.end)
        eventually(lambda: all(len(worker.delivered) > 20 for worker in workers))
        _hand_over(homes[others[1]], others[0])
        eventually(lambda: _leader(endpoint) == others[0])
        assert all(worker.drains for worker in workers)
        before = [len(worker.stored) for worker in workers]
        eventually(lambda: all(len(worker.stored) > count + 20 for worker, count in zip(workers, before, strict=True)))
        os.kill(homes[others[0]].children()[-1], signal.SIGKILL)
        eventually(lambda: _leader(endpoint, 2) not in (None, others[0]))
        before = [len(worker.stored) for worker in workers]
        eventually(lambda: all(len(worker.stored) > count + 20 for worker, count in zip(workers, before, strict=True)))
        for worker in workers:
            worker.calm()
        eventually(lambda: all(worker.is_settled for worker in workers))
        stored = set.union(*(worker.stored for worker in workers))
        eventually(lambda: set.union(*(worker.delivered for worker in workers)) >= stored)
        assert [worker.errors for worker in workers] == [[], [], []]
        assert {status for worker in workers for status in worker.ends} == {grpc.StatusCode.UNAVAILABLE}
        eventually(lambda: _group(homes[first])["stats"]["reserve"] == 0)
        assert _group(homes[first])["stats"]["history"] == len(stored), "each was settled, and none twice stored"


# One node, without a leader or with one elsewhere


def test_a_node_without_a_leader_refuses_calls_as_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "WAIT_S", 0.05)

    async def story() -> None:
        async with asyncio.timeout(60), site(tmp_path, in_cluster=True) as made:
            peer, stream = await made.stream(REGISTER)
            assert await peer.status(stream) == statuses.UNAVAILABLE
            assert peer.trailers[stream]["turtlemq-code"] == NoLeader.code
            assert int(peer.trailers[stream]["grpc-retry-pushback-ms"]) > 0
            await soon(lambda: peer.went_away == 0)
            second = await made.peer()
            assert (await second.unary("/grpc.health.v1.Health/Check", Check(), Health)).status == 2, "NOT_SERVING"

    asyncio.run(story())


def test_a_connection_is_passed_on_to_the_leader_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "WAIT_S", 0.05)
    places, leaders = dict[object, str](), set[object]()
    for module in (tunnel, grpc_site):
        monkeypatch.setattr(module, "leader_address", lambda service: places.get(service, ""))
    for module in (tunnel, context):
        monkeypatch.setattr(module, "leads", leaders.__contains__)

    async def story() -> None:
        async with (
            asyncio.timeout(60),
            site(tmp_path / "a", in_cluster=True) as near,
            site(tmp_path / "b", in_cluster=True) as leader,
        ):
            tunnels = near.grpc._tunnels
            assert tunnels is not None
            leaders.add(leader.service)
            places[near.service] = f"127.0.0.1:{leader.port}"
            leader.put(["m"], body=b"x" * 300_000)
            peer, stream = await near.stream(REGISTER)
            (delivery,) = await peer.until(stream, "delivery")
            peer.send(stream, {"ack": {"id": delivery.id}})
            await soon(lambda: leader.state("m") == "history")
            assert tunnels.passed_on == 1
            peer.transport.abort()
            await soon(lambda: tunnels.passed_on == 0)

            leaders.clear()  # each takes the other for the leader
            places[leader.service] = f"127.0.0.1:{near.port}"
            peer, stream = await near.stream(REGISTER)
            assert await peer.status(stream) == statuses.UNAVAILABLE
            assert peer.trailers[stream]["turtlemq-leader"] == f"127.0.0.1:{near.port}"

    asyncio.run(story())


def test_a_silent_or_odd_connection_is_no_burden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "WAIT_S", 0.05)
    monkeypatch.setattr(tunnel, "FIRST_S", 0.1)

    async def story() -> None:
        async with asyncio.timeout(60), site(tmp_path, in_cluster=True) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            assert await reader.read() == b"", "closed: nothing came"
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(tunnel.MARK[:5])
            assert await reader.read() == b""
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(tunnel.MARK + b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
            peer = await Peer.connect(made.port)
            assert await peer.status(peer.begin()) == statuses.UNAVAILABLE
            peer.transport.abort()

    asyncio.run(story())
