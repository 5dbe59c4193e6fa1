"""Small helpers for tests with servers of a cluster: waiting, ports, requests of all kinds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from tests.harness.server_process import PATIENCE_S, Server

CLUSTER_METRICS = {  # that a single node does not show
    f"turtlemq_{name}"
    for name in "role epoch lsn covered_lsn isr replica_lag_bytes replica_lag_seconds shipped_bytes_total "
    "ferried_bytes_total reconcile_bytes_total reconcile_progress copies_differ answer_wait_seconds proxied_total replicas "
    "leader_known name_server_up elections_total handovers_total isr_changes_total etcd_seconds scrubbed_bytes_total "
    "healed_files_total clock_skew_seconds apply_seconds standby_sync_seconds".split()
}
STANDBY_METRICS = {"turtlemq_apply_seconds", "turtlemq_standby_sync_seconds"}  # that a leader does not show
FAR = 4 * 10**12


def eventually(check: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


def put(server: Server, count: int, prefix: str, topic: str = "t", **more: Any) -> Any:
    messages = [{"id": f"{prefix}{n}", "body": "x" * 100, **(more or {"due_ms": FAR})} for n in range(count)]
    return server.ok("POST", f"/v1/topics/{topic}/messages", {"messages": messages})


def everything(server: Server) -> None:
    """All kinds of requests."""
    for n in range(5):
        put(server, 200, f"s{n}-")
    put(server, 300, "d", delay=0)
    server.ok("PUT", "/v1/topics/other", {"ttr": 5, "max_attempts": 1})
    put(server, 50, "o", "other", delay=0)
    got = [message["id"] for message in server.fetch("t", max=100, wait=5)]
    server.ack("t", *got[:50])
    server.ack("t", *[f"-{id_}" for id_ in got[50:60]])
    server.ok("DELETE", "/v1/topics/t/messages/s0-1")
    server.ok("PATCH", "/v1/topics/t/messages/s0-2", {"due_ms": FAR + 5})
    dead = [message["id"] for message in server.fetch("other", max=50, wait=5)]
    server.ack("other", *[f"-{id_}" for id_ in dead])
    server.ok("POST", "/v1/topics/other/dead/requeue", {"ids": dead[:5], "delay": 100})
    server.ok("POST", "/v1/command", {"command": "add", "topic": "third", "body": 1, "delay": 1000})
    server.ok("POST", "/v1/topics/third/pause")
    put(server, 10, "g", "gone")
    server.ok("DELETE", "/v1/topics/gone")
    server.ok("POST", "/v1/topics/t/compact")


class Producers:
    """Threads that put messages one by one, and note the ids of those that were answered."""

    def __init__(self, server: Server, count: int = 4) -> None:
        self.server, self.stop = server, False
        self.answered: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        n = 0
        while not self.stop:
            id_ = f"p{number}-{n}"
            n += 1
            try:
                answer = self.server.call("POST", "/v1/topics/t/messages", {"id": id_, "body": n, "due_ms": FAR})
            except (OSError, HTTPException):
                return
            if answer.status == 201:
                self.answered.append(id_)

    def end(self) -> list[str]:
        self.stop = True
        for thread in self.threads:
            thread.join()
        return self.answered
