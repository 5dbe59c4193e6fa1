"""A real server with several shards: its processes, and the address of each."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.harness.server_process import PATIENCE_S, Answer, Server
from turtlemq.shards import shard_of


def topic_in(shard: int, shards: int, base: str = "topic") -> str:
    """The name of a topic that lives in this shard."""
    return next(name for name in (f"{base}-{n}" for n in range(10_000)) if shard_of(name, shards) == shard)


@dataclass
class AnyProcess(Server):
    """A server of several processes, each of which gets the next request in turn. `ports`: where they listen."""

    ports: tuple[int, ...] = ()
    turn: int = 0

    def call(self, method: str, path: str, value: Any = None, **more: Any) -> Answer:
        """One request to the next process."""
        self.port = self.ports[self.turn % len(self.ports)]
        self.turn += 1
        return super().call(method, path, value, **more)


@dataclass
class PartitionedServer(AnyProcess):
    """A server whose topics for tests have partitions. It gives fetched messages in the order in which they were put: between
    partitions there is none."""

    partitions: int = 1
    rank: dict[str, int] = field(default_factory=dict)  # of ids, in the order of puts

    def make(self, topic: str) -> None:
        """Make a topic with partitions."""
        self.ok("PUT", f"/v1/topics/{topic}", {"partitions": self.partitions})

    def call(self, method: str, path: str, value: Any = None, **more: Any) -> Answer:
        """One request, whose new ids are remembered."""
        answer = super().call(method, path, value, **more)
        if path.partition("?")[0].endswith("/messages") and answer.status == 201:
            for id_ in answer.json["ids"]:
                self.rank[id_] = len(self.rank)
        return answer

    def fetch(self, topic: str, group: str = "default", **asked: Any) -> list[dict[str, Any]]:
        """Messages, in the order of their puts."""
        found = super().fetch(topic, group, **asked)
        return sorted(found, key=lambda message: self.rank.get(message["id"], 0))


def through_any(server: Server, ports: Sequence[int], partitions: int = 1) -> AnyProcess:
    """A server whose processes at these ports get requests in turn, for tests of topics with so many partitions."""
    own = server.process, server.port, server.data, server.tls, server.grpc_port, tuple(ports)
    return AnyProcess(*own) if partitions == 1 else PartitionedServer(*own, partitions=partitions)


def header_names(process: Server, path: str, body: str) -> list[str]:
    """The names of all headers of the answer to a POST, in lower case and in order; one that came twice is there twice."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        return sorted(name.lower() for name, _ in answer.getheaders())
    finally:
        connection.close()


def own_processes(server: Server) -> list[Server]:
    """The processes of a server, by shard, each at its own port."""
    leaders = server.ok("GET", "/v1/cluster")["leaders"]
    return [Server(server.process, urlsplit(leader["url"]).port or 0, server.data) for leader in leaders]


def children(pid: int) -> dict[int, int]:
    """The running processes of a supervisor: process ids by shard."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            if "--shard" in words:
                found[int(words[words.index("--shard") + 1])] = int(child)
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pids: list[int]) -> None:
    """Wait until processes have ended."""
    end = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if is_running(pid)]
        time.sleep(0.02)


def until_replaced(server: Server, shard: int, killed: int) -> int:
    """Wait until a shard has another process. Returns its id."""
    end = time.monotonic() + PATIENCE_S
    while (now := children(server.process.pid).get(shard, killed)) == killed:
        assert time.monotonic() < end, server.log
        time.sleep(0.02)
    return now


def kill(pid: int, number: int) -> None:
    """Send a signal to one process."""
    os.kill(pid, number)
