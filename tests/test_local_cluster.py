"""`make cluster`: three real nodes and a private etcd on this machine, by one command; Ctrl-C leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.node_process import is_running
from tests.harness.server_process import PATIENCE_S, ROOT, environment, run

SCRIPT = ROOT / "deploy" / "local_cluster.py"
PORTS_SPAN = 110


def free_base() -> int:
    """A port behind which enough ports are free for a cluster."""
    chosen = random.Random(os.getpid())
    while True:
        base = chosen.randrange(20_000, 30_000)
        if all(is_free(port) for port in range(base, base + PORTS_SPAN)):
            return base


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def run_once(folder: Path, port: int, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--port", str(port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**env))


def test_without_etcd_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = run_once(tmp_path / "cluster", free_base(), PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "apt-get install etcd-server" in done.stderr
    assert not (tmp_path / "cluster").exists()


@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_ports_in_use_are_named_before_anything_starts(tmp_path: Path) -> None:
    base = free_base()
    with socket.create_server(("127.0.0.1", base + 1)):
        done = run_once(tmp_path / "cluster", base)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port {base + 1} already" in done.stderr
    assert not (tmp_path / "cluster").exists()


# The real thing


class LocalCluster:
    """`make cluster`, without make."""

    def __init__(self, folder: Path, port: int, started: list[LocalCluster]) -> None:
        self.folder, self.port, self.said = folder, port, ""
        command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        started.append(self)
        self.read_until("Ctrl-C ends all")

    def read_until(self, words: str) -> str:
        """The lines up to one with these words."""
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                self.said = "".join(lines)
                return self.said
        raise AssertionError("".join(lines) + self.logs())

    def logs(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()}" for log in sorted(self.folder.glob("*/log")))

    def processes(self) -> list[int]:
        """All processes that have to do with the folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes() and is_running(int(path.parent.name)):
                    found.append(int(path.parent.name))
        return found

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.port + 'abc'.index(node)}"

    def leader(self) -> str:
        """The node that leads, once all copies are in sync again."""
        found = ""

        def healthy() -> bool:
            nonlocal found
            done = run("cluster", "status", "--json", "--check", "--url", self.url("a"))
            if done.returncode == 0:
                found = json.loads(done.stdout)["leaders"][0]["node"]
            return done.returncode == 0

        eventually(healthy)
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, rest + self.logs()
        assert "all ended" in rest
        assert self.processes() == []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[LocalCluster]]:
    clusters: list[LocalCluster] = []
    yield clusters
    for cluster in clusters:
        if cluster.process.poll() is None:
            cluster.process.send_signal(signal.SIGINT)
            cluster.process.communicate(timeout=PATIENCE_S)
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_three_nodes_survive_kills_and_leave_no_process(tmp_path: Path, started: list[LocalCluster]) -> None:
    base = free_base()
    cluster = LocalCluster(tmp_path / "cluster", base, started)
    for node in "abc":
        assert cluster.url(node) in cluster.said
    assert run("put", "orders", "hello", "--id", "m1", "--delay", "1s", "--url", cluster.url("a")).returncode == 0
    first = cluster.leader()
    os.kill(int((tmp_path / "cluster" / first / "data" / "shard" / "00" / "LOCK").read_text()), signal.SIGKILL)
    fetched = run("fetch", "orders", "--wait", "20s", "--json", "--url", cluster.url("b"))
    assert '"m1"' in fetched.stdout, fetched.stderr + cluster.logs()
    second = cluster.leader()
    os.kill(int((tmp_path / "cluster" / second / "data" / "LOCK").read_text()), signal.SIGKILL)  # the supervisor
    cluster.read_until(f"{second} has ended (SIGKILL)")
    others = [node for node in "abc" if node != second]
    assert run("put", "orders", "again", "--id", "m2", "--delay", "1s", "--url", cluster.url(others[0])).returncode == 0
    cluster.leader()
    cluster.end()

    again = LocalCluster(tmp_path / "cluster", base, started)
    assert '"m2"' in run("fetch", "orders", "--wait", "20s", "--json", "--url", again.url("c")).stdout, again.logs()
    again.process.kill()  # then all others end as well
    eventually(lambda: again.processes() == [])
