"""Real supervisors of nodes on loopback, for tests: their folders, configuration files and logs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import free_port
from tests.harness.server_process import PATIENCE_S, PROGRAM, environment

STAND_IN = (
    "import sys; from pathlib import Path; from turtlemq.server.config import load; from turtlemq.server.node import run_node; "
    "from turtlemq.errors import InvalidArgument\n"
    "try:\n"
    "    home = Path(sys.argv[1]); child = [sys.executable, '-m', 'tests.harness.stand_in_replica', str(home)]\n"
    "    sys.exit(run_node(load({}, {}, home / 'turtle.toml'), lambda _: child))\n"
    "except InvalidArgument as error:\n"
    "    print(error, file=sys.stderr); sys.exit(2)\n"
)


_given: set[int] = set()  # ports that nothing may listen on yet


def own_port() -> int:
    """A free port that was not given to another node."""
    while (port := free_port()) in _given:
        pass
    _given.add(port)
    return port


@dataclass
class NodeHome:
    """The home of a node: configuration, data and log."""

    home: Path
    node: str
    port: int = field(default_factory=own_port)
    peer: int = field(default_factory=own_port)
    process: subprocess.Popen[bytes] | None = None

    def configure(self, endpoint: str, *lines: str, cluster: str = "prod", heartbeat_ms: int = 200) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "secret").write_text("a secret of this cluster")
        text = f"""
data = "{self.home / "data"}"
port = {self.port}
[cluster]
name = "{cluster}"
node = "{self.node}"
etcd = ["{endpoint}"]
peer = "127.0.0.1:{self.peer}"
secret_file = "{self.home / "secret"}"
heartbeat_ms = {heartbeat_ms}
"""
        (self.home / "turtle.toml").write_text("\n".join([text, *lines]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def events(self, name: str) -> list[str]:
        """The lines of one event."""
        return [line for line in self.log.splitlines() if f"event={name}" in line.split()]

    def children(self) -> list[int]:
        """The process ids of replica processes, in the order of their starts."""
        return [int(found[1]) for line in self.events("child_started") if (found := re.search(r"pid=(\d+)", line))]

    def has_ended(self, pid: int) -> bool:
        return f"pid={pid} " in " ".join(f"{line} " for line in self.events("child_ended"))

    def get(self, path: str = "/", timeout_s: float = PATIENCE_S) -> bytes:
        with urlopen(self.url + path, timeout=timeout_s) as answer:
            data: bytes = answer.read()
            return data

    def start(self, *, stand_in: bool = True) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", STAND_IN, str(self.home)]
        if not stand_in:
            command = [*PROGRAM, "serve", "--config", str(self.home / "turtle.toml")]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=self.home)
        return self.process

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.ended()


@contextmanager
def running_node(node: NodeHome, *, stand_in: bool = True) -> Iterator[NodeHome]:
    """A node whose replica process has started. It is ended if the test has not done so, and leaves no process."""
    before = len(node.children()) if (node.home / "log").exists() else 0
    process = node.start(stand_in=stand_in)
    try:
        eventually(lambda: len(node.children()) > before or process.poll() is not None)
        assert process.poll() is None, node.log
        yield node
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
        eventually(lambda: not any(is_running(pid) for pid in node.children()))


def is_running(pid: int) -> bool:
    """Is there a process of this number, zombies left out?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
