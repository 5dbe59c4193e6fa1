"""Machines of a cluster: nodes and etcd members on hosts of a `Network`, as an operator starts them, and ways to hurt them.

Every process of a machine has the variable MACHINE in its environment, also without its parent: so the processes of a machine are
found although supervisors and children come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.etcd_members import EtcdMembers
from tests.harness.network import Network
from tests.harness.server_process import PROGRAM, ROOT, environment
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.etcd import Etcd

NODES, ETCD_HOSTS = ("a", "b", "c"), ("x", "y", "z")
PORT, PEER_PORT = 8_878, 8_900
NAME, SHARD = "prod", 0
_DISK_MIB = 512  # of a node; in memory
_CLOCKS = Path(__file__).parent / "fake_clock"
_ENDS_S_MAX = 30


class Node:
    """A machine with a supervisor and its child. `folder` is its disk."""

    def __init__(self, name: str, network: Network, etcd: EtcdMembers, folder: Path, mounts: bool) -> None:
        self.name, self.folder = name, folder
        self.address = network.address(name)
        self._prefix, self._mark = network.command(name), f"{secrets.token_hex(6)}-{name}"
        self.log = folder.parent / f"{name}.log"
        self._clock = folder.parent / f"{name}.clock"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        if mounts:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", str(folder)], check=True)
        self._clock.write_bytes(bytes(8))
        self._config = folder.parent / f"{name}.toml"
        self._configure(etcd.endpoints)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"

    @property
    def data(self) -> Path:
        """The data folder of the shard."""
        return self.folder / "data" / "shard" / f"{SHARD:02}"

    def _configure(self, endpoints: list[str]) -> None:
        secret = self.folder.parent / "secret"
        secret.write_text("a secret of this cluster")
        secret.chmod(0o600)
        self._config.write_text(
            f"data = {json.dumps(str(self.folder / 'data'))}\n"
            f'host = "{self.address}"\nport = {PORT}\nallowed_hosts = ["*"]\nslow_request_ms = 0\n'
            f'[cluster]\nname = "{NAME}"\nnode = "{self.name}"\netcd = {json.dumps(endpoints)}\n'
            f'peer = "{self.address}:{PEER_PORT}"\nurl = "{self.url}"\nsecret_file = {json.dumps(str(secret))}\n'
        )

    def start(self) -> None:
        more = {"MACHINE": self._mark, "CLOCK_FILE": str(self._clock), "PYTHONPATH": f"{_CLOCKS}{os.pathsep}{ROOT}"}
        with self.log.open("ab") as log:
            log.write(f"-- {self.name} starts at {time.time():.3f}\n".encode())
            log.flush()
            command = [*self._prefix, *PROGRAM, "serve", "--config", str(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(**more), cwd=self.folder.parent)

    # processes

    def processes(self) -> dict[int, str]:
        """Processes of this machine that have not ended, with their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # it has just ended
                    if f"MACHINE={self._mark}\0".encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def replica(self) -> int | None:
        """The process of the shard; None if there is none at the moment."""
        return next((pid for pid, command in self.processes().items() if " --replica " in command), None)

    @property
    def workers(self) -> list[int]:
        """Processes that seal segments for the leader."""
        return [pid for pid, command in self.processes().items() if "spawn_main" in command]

    def signal_all(self, number: int) -> None:
        for pid in self.processes():
            signal_to(pid, number)

    def kill_all(self) -> None:
        """As if the power was cut, as far as processes can tell."""
        end = time.monotonic() + _ENDS_S_MAX
        while self.processes():
            self.signal_all(signal.SIGKILL)
            assert time.monotonic() < end, f"{self.name}: {self.processes()} do not end"
            time.sleep(0.01)
        self._reap()

    def until_ended(self, seconds: float = _ENDS_S_MAX) -> None:
        """Until no process is left."""
        until(lambda: not self.processes(), f"{self.name} ends", seconds)
        self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(_ENDS_S_MAX)
            self._process = None

    def stop(self) -> None:
        """SIGTERM to the supervisor, and wait for the end of all."""
        signal_to(self.supervisor, signal.SIGTERM)
        self.until_ended()

    # disk and clock

    def wipe(self) -> None:
        """An empty disk. Requires: no process runs."""
        for path in self.folder.iterdir():
            shutil.rmtree(path)

    def fill(self, leave: int = 0) -> Path:
        """Take all free room of the disk but so many bytes. Returns the file to remove."""
        path = self.folder / "filler"
        piece = bytes(1 << 20)
        with path.open("wb", buffering=0) as file:
            while piece:
                try:
                    if file.write(piece) < len(piece):
                        piece = piece[: len(piece) // 2]
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece = piece[: len(piece) // 2]
            file.truncate(max(0, file.tell() - leave))
        return path

    def set_clock(self, ahead_s: float) -> None:
        self._clock.write_bytes(struct.pack("<q", round(ahead_s * 1e9)))


class Machines:
    """Three nodes and three members of etcd."""

    def __init__(self, folder: Path, namespaces: bool, min_isr: int) -> None:
        self.network = Network((*NODES, *ETCD_HOSTS), namespaces)
        self.folder = folder = self.network.place_for(folder)
        self.etcd = EtcdMembers(self.network, ETCD_HOSTS, folder)
        self.namespaces = namespaces
        self.nodes = {name: Node(name, self.network, self.etcd, folder / name, namespaces) for name in NODES}
        self.etcd.start()
        self.etcd.until_healthy()
        asyncio.run(self._init(min_isr))

    async def _init(self, min_isr: int) -> None:
        async with Etcd(self.etcd.endpoints, timeout_s=10) as etcd:
            await init_cluster(etcd, NAME, Shape(1, len(NODES), min_isr))

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def keys(self) -> dict[str, Any]:
        """Keys of the shard, by their last word: state, lead, want. Raises `OSError`."""
        prefix = f"/tmq/{NAME}/shards/{SHARD:02}/"
        return {key.removeprefix(prefix): value for key, value in self.etcd.read(prefix).items()}

    def leader(self) -> str | None:
        """The node that leads by etcd's word."""
        with contextlib.suppress(OSError):
            lead = self.keys().get("lead")
            return str(lead["node"]) if lead else None
        return None

    def elected(self) -> str | None:
        """The node that was elected last. It leads on without its lease while etcd does not reach it."""
        with contextlib.suppress(OSError):
            state = self.keys().get("state")
            return str(state["nodes"][state["leader"]]) if state else None
        return None

    def in_sync(self) -> set[str]:
        """Nodes of the in-sync set by etcd's word."""
        with contextlib.suppress(OSError):
            state = self.keys().get("state")
            return {state["nodes"][replica] for replica in state["isr"]} if state else set()
        return set()

    def until_whole(self, seconds: float) -> str:
        """Wait until a node leads and all nodes are in sync. Returns the leader."""
        leader = ""

        def whole() -> bool:
            nonlocal leader
            leader = self.leader() or ""
            return bool(leader) and self.in_sync() == set(NODES)

        until(whole, "a leader, and all nodes in sync", seconds)
        return leader

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill_all()
        self.etcd.close()
        self.network.close()


def signal_to(pid: int, number: int) -> None:
    """To a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def until(check: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for something. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
