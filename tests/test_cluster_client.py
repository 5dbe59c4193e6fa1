"""Programs that use the Python client go through failovers of real nodes: no error, nothing lost, and any node will do."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.node_process import NodeHome, running_node
from turtlemq.client import Client, Consumer, Message, Producer
from turtlemq.client.errors import ClientError
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.topology import Topology

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
PAUSE_S_MAX = 20.0  # of a program, on a machine that has much to do


class Nodes:
    """Three nodes with their supervisors."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.endpoint = endpoint
        self.homes = {name: NodeHome(root / name, name) for name in "abc"}
        asyncio.run(self._init())
        for home in self.homes.values():
            home.configure(endpoint, "lease_s = 2")

    async def _init(self) -> None:
        async with Etcd([self.endpoint]) as etcd:
            await init_cluster(etcd, "prod", Shape(1, 3, 1))

    async def _topology(self) -> Topology:
        async with Etcd([self.endpoint]) as etcd:
            found = await etcd.get("/tmq/prod/", prefix=True)
            return Topology.of({key.key: key for key in found.keys}, found.revision)

    @property
    def topology(self) -> Topology:
        return asyncio.run(self._topology())

    @property
    def urls(self) -> list[str]:
        return [home.url for home in self.homes.values()]

    def until_whole(self) -> NodeHome:
        """Wait until one leads and all are in sync. Returns the leader's node."""
        eventually(lambda: self.topology.leader(0) is not None and len(self.topology.leaders[0].isr) == len(self.homes))
        place = self.topology.leader(0)
        assert place is not None
        assert place.node is not None
        return self.homes[place.node]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    root = tmp_path_factory.mktemp("nodes")
    with running_etcd(root) as endpoint, ExitStack() as stack:
        out = Nodes(root, endpoint)
        for home in out.homes.values():
            stack.enter_context(running_node(home, stand_in=False))
        yield out


class Program:
    """Puts and consumes, and notes each error that it meets: there should be none."""

    def __init__(self, urls: list[str]) -> None:
        self.put: dict[str, float] = {}  # by id: when it was answered
        self.seen: Counter[str] = Counter()
        self.errors: list[ClientError] = []
        self.stop = threading.Event()
        self.client = Client(urls)
        self.producer = Producer("work", self.client)
        self.consumer = Consumer("work", self._handle, self.client, ttr=5)
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _handle(self, message: Message) -> None:
        self.seen[message.id] += 1

    def _run(self, number: int) -> None:
        n = 0
        while not self.stop.is_set():
            n += 1
            id_ = f"{number}-{n}"
            try:
                if n % 2:
                    self.client.put("work", {"n": n}, id=id_)
                else:
                    self.producer.put({"n": n}, id=id_).result(60)
            except ClientError as error:
                self.errors.append(error)
            self.put[id_] = time.monotonic()
            time.sleep(0.01)

    def __enter__(self) -> Program:
        self.consumer.start()
        for thread in self._threads:
            thread.start()
        return self

    def more(self, count: int = 50) -> None:
        wanted = len(self.put) + count
        eventually(lambda: len(self.put) >= wanted)

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()
        eventually(lambda: set(self.put) <= set(self.seen))
        self.consumer.stop()
        self.producer.close()
        self.client.close()

    def check(self) -> None:
        assert self.errors == []
        times = sorted(self.put.values())
        pause_s = max(after - before for before, after in pairwise(times))
        assert pause_s < PAUSE_S_MAX
        assert set(self.put) == set(self.seen)


def test_every_node_answers_and_tells_the_leader(nodes: Nodes) -> None:
    leader = nodes.until_whole()
    for url in nodes.urls:
        with Client(url) as client:
            client.put("jobs", {"from": url}, id=url.rpartition(":")[2])
            assert [topic.topic for topic in client.topics()] == ["jobs"]
    with Client(leader.url) as client:
        assert client.stats("jobs").ready == len(nodes.urls)


def test_a_handover_fails_no_request_at_any_node(nodes: Nodes) -> None:
    """Of plain clients that try nothing again: requests wait at the old leader, and it sends them on before it restarts."""
    leader = nodes.until_whole()
    stop, statuses, refused = threading.Event(), Counter[int](), list[bytes]()

    def produce(home: NodeHome) -> None:
        while not stop.is_set():
            with request_to(home, "POST", "/v1/topics/jobs/messages", {"body": 1}) as answer:
                statuses[answer.status] += 1
                refused.extend([home.node.encode() + answer.read()] if answer.status != 201 else [])

    threads = [threading.Thread(target=produce, args=(home,)) for home in nodes.homes.values()]
    for thread in threads:
        thread.start()
    eventually(lambda: statuses[201] > 20)
    to = next(name for name, home in nodes.homes.items() if home is not leader)
    with request_to(nodes.homes[to], "POST", "/v1/cluster/shards/0/handover", {"to": to}) as answer:
        assert answer.status == 200
    seen = statuses[201]
    eventually(lambda: statuses[201] > seen + 50)
    assert nodes.until_whole() is nodes.homes[to]
    stop.set()
    for thread in threads:
        thread.join()
    assert (set(statuses), refused) == ({201}, [])


@contextmanager
def request_to(home: NodeHome, method: str, path: str, value: Any) -> Iterator[http.client.HTTPResponse]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", home.port, timeout=PAUSE_S_MAX)
    try:
        connection.request(method, path, json.dumps(value), {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def test_a_program_goes_through_kills_of_its_leader(nodes: Nodes) -> None:
    """The process alone, then its supervisor: the process follows it. The last test: a node less is left."""
    leader = nodes.until_whole()
    with Program(nodes.urls) as program:
        program.more()
        os.kill(leader.children()[-1], signal.SIGKILL)
        program.more()
        leader = nodes.until_whole()
        assert leader.process is not None
        os.kill(leader.process.pid, signal.SIGKILL)
        program.more(200)
    program.check()
