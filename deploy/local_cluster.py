"""A cluster on this machine, to try it out: a private etcd and three nodes on loopback. `make cluster` runs it; Ctrl-C ends all.

Everything is in `data/cluster/`: configuration, messages and log of the nodes `a`, `b` and `c`, the data of etcd, the secret.
A second start finds the same messages; remove the folder to begin anew. A node that ends is started again, as systemd would do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from turtlemq.errors import TurtleError  # noqa: E402 - after the path to it
from turtlemq.replica.cluster_init import Shape, init_cluster  # noqa: E402
from turtlemq.replica.etcd import Etcd, EtcdError  # noqa: E402

NAME, NODES = "local", ("a", "b", "c")
HAS_GRPC = find_spec("h2") is not None  # turtlemq[grpc] is installed
START_S = 60.0  # until all nodes are in sync
STOP_S = 15.0  # for the nodes to end; then they are killed
AGAIN_S = 3.0  # after its end, a node is started again
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
ETCD_MISSING = """etcd is not installed, and this cluster needs it: it decides which node leads.
On Debian or Ubuntu: sudo apt-get install etcd-server, then sudo systemctl disable --now etcd (make cluster starts its own)."""


@dataclass(frozen=True)
class Place:
    """Folder and ports of the cluster. All ports follow from the first: by default 8878 to 8880 for clients."""

    folder: Path
    port: int

    def client_port(self, node: str) -> int:
        return self.port + NODES.index(node)

    def grpc_port(self, node: str) -> int:
        return self.port + 50 + NODES.index(node)

    def peer_port(self, node: str) -> int:
        return self.port + 22 + 10 * NODES.index(node)

    @property
    def etcd_port(self) -> int:
        return self.port + 100

    def ports(self) -> list[int]:
        return [port for node in NODES for port in self._ports(node)] + [self.etcd_port, self.etcd_port + 1]

    def _ports(self, node: str) -> list[int]:
        return [self.client_port(node), self.peer_port(node), *([self.grpc_port(node)] if HAS_GRPC else [])]

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.client_port(node)}"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.etcd_port}"

    def config(self, node: str) -> Path:
        return self.folder / node / "turtlemq.toml"

    def etcd_command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self.etcd_port + 1}"
        options = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "auto-compaction-retention": "1h",
        }
        return ["etcd", *(f"--{name}={value}" for name, value in options.items())]


def write_files(place: Place) -> None:
    """Write the secret and the configuration of each node."""
    place.folder.mkdir(parents=True, exist_ok=True)
    secret = place.folder / "cluster.secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text(secrets.token_urlsafe(24))
    for node in NODES:
        place.config(node).parent.mkdir(exist_ok=True)
        place.config(node).write_text(
            f'data = "{place.folder / node / "data"}"\n'
            f"port = {place.client_port(node)}\n"
            + (f"grpc_port = {place.grpc_port(node)}\n\n" if HAS_GRPC else "\n")
            + "[cluster]\n"
            f'name = "{NAME}"\n'
            f'node = "{node}"\n'
            f'etcd = ["{place.endpoint}"]\n'
            f'peer = "127.0.0.1:{place.peer_port(node)}"\n'
            f'secret_file = "{secret}"\n'
        )


def ports_in_use(place: Place) -> list[int]:
    """Ports on which something listens already."""
    found = []
    for port in place.ports():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.append(port)
    return found


class Processes:
    """etcd and the nodes, each with a log file. They end with this process, even if it is killed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False

    async def start(self, name: str) -> None:
        """Start etcd or a node, and again whenever it ends."""
        command = [sys.executable, "-m", "turtlemq", "serve", "--config", str(self._place.config(name))]
        log = self._place.folder / name / "log"
        if name == "etcd":
            command, log = self._place.etcd_command(), self._place.folder / "etcd.log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                process_group=0,  # Ctrl-C is for this process, which ends the others in order
                preexec_fn=_end_with_parent,
            )
        self._running[name] = process
        self._watching[name] = asyncio.create_task(self._watch(name, process, log))

    async def _watch(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        code = await process.wait()
        if self._is_stopping:
            return
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        print(f"{name} has ended ({how}), see {_short(log)}; it starts again in {AGAIN_S:g} s", flush=True)
        await asyncio.sleep(AGAIN_S)
        if not self._is_stopping:
            await self.start(name)

    async def stop(self) -> None:
        """End the nodes, then etcd. Those that take too long are killed."""
        self._is_stopping = True
        nodes = [process for name, process in self._running.items() if name != "etcd"]
        for group in (nodes, [self._running[name] for name in ("etcd",) if name in self._running]):
            for process in group:
                _signal(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await asyncio.gather(*(process.wait() for process in group))
            except TimeoutError:
                for process in group:
                    _signal(process, signal.SIGKILL)
                    await process.wait()
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _end_with_parent() -> None:
    """In a new process: get SIGTERM when the parent ends (Linux)."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


async def make_cluster(etcd: Etcd) -> None:
    """Wait for etcd, and make the cluster if it is new."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            await init_cluster(etcd, NAME, Shape(replicas=len(NODES)))
        except EtcdError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def leader(url: str) -> str | None:
    """The node that leads, once all nodes are in sync: the command that scripts use tells it."""
    command = [sys.executable, "-m", "turtlemq", "cluster", "status", "--check", "--json", "--url", url]
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=pipe, stderr=nothing, cwd=ROOT)
    told, _ = await process.communicate()
    return str(json.loads(told)["leaders"][0]["node"]) if process.returncode == 0 else None


async def until_in_sync(url: str) -> str | None:
    """Wait for a leader and two standbys in sync. Returns the node that leads; None if it takes too long."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if (found := await leader(url)) is not None:
            return found
        await asyncio.sleep(0.2)
    return None


def explanation(place: Place, leading: str | None) -> str:
    """Addresses, and commands to try."""
    command = ".venv/bin/turtlemq" if (ROOT / ".venv/bin/turtlemq").exists() else f"{sys.executable} -m turtlemq"
    first, second = place.url(NODES[0]), place.url(NODES[1])
    lines = [
        f"  node {node}   {place.url(node)}   {_short(place.folder / node)}{'   leads' if node == leading else ''}"
        for node in NODES
    ]
    if HAS_GRPC:
        lines += ["  gRPC     " + ", ".join(f"127.0.0.1:{place.grpc_port(node)}" for node in NODES)]
    lines += [f"  etcd     {place.endpoint}", "", "Every node takes every request. Try:"]
    lines += [
        f"  {command} put orders hello --delay 5s --url {first}",
        f"  kill -9 $(cat {_short(place.folder)}/{leading or NODES[0]}/data/shard/00/LOCK)     # the process that leads",
        f"  {command} fetch orders --wait 10s --url {second}",
        "",
        f"State: {command} cluster status --url {first}",
    ]
    return "\n".join(lines)


async def run(place: Place) -> int:
    """Run the cluster until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    write_files(place)
    processes = Processes(place)
    waiting = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(_start(place, processes))
    try:
        await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await waiting
        return 0
    except TurtleError as error:
        print(f"The cluster cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        print("\nending the nodes and etcd", flush=True)
        starting.cancel()
        waiting.cancel()
        await asyncio.gather(starting, waiting, return_exceptions=True)
        await processes.stop()
        print(f"all ended; the messages stay in {_short(place.folder)}", flush=True)


async def _start(place: Place, processes: Processes) -> None:
    print(f"starting etcd and the nodes {', '.join(NODES)}; their logs are {_short(place.folder)}/*/log", flush=True)
    await processes.start("etcd")
    async with Etcd([place.endpoint]) as etcd:
        await make_cluster(etcd)
        for node in NODES:
            await processes.start(node)
    leading = await until_in_sync(place.url(NODES[0]))
    if leading is None:
        print(f"Not all nodes are in sync after {START_S:g} s: see their logs.", flush=True)
    print(f"{explanation(place, leading)}\n\nCtrl-C ends all.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description="A private etcd and three nodes on this machine.")
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "cluster", help="where everything is kept (data/cluster)")
    parser.add_argument("--port", type=int, default=8878, help="of the first node; the others follow from it (8878)")
    given = parser.parse_args()
    if shutil.which("etcd") is None:
        print(ETCD_MISSING, file=sys.stderr)
        return 1
    place = Place(given.folder.absolute(), given.port)
    if used := ports_in_use(place):
        print(
            f"Something listens on port {', '.join(map(str, used))} already: a server, or another cluster? "
            f'End it, or choose other ports: make cluster ARGS="--port {given.port + 1000}"',
            file=sys.stderr,
        )
        return 1
    os.chdir(ROOT)
    return asyncio.run(run(place))


if __name__ == "__main__":
    sys.exit(main())
