"""Common parts of the peers: a server process with a folder and a free port, and waiting by polling.

A peer defines its command line and a check of readiness; start, wait and kill are here.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.child import environment
from benchmarks.peers.model import Queue

HOST = "127.0.0.1"
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]  # no server outlives the harness
START_S = 1800  # recovery of tens of millions of messages takes minutes
POLL_S = 0.002  # poll interval of a waiting client: another client may put a message that is due sooner
LEASE_MS = 60_000  # longer than any fetched message is kept in a benchmark

Fetched = list[tuple[str, int]]  # ids and due times


class NotStarted(Exception):
    """The server ended, or did not answer in time. The end of its log stands below."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def program(name: str, *folders: Path) -> str | None:
    """The path of a program; also found in system folders that are not in PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", *map(str, folders)]))


def printed_version(command: list[str], pattern: str) -> str:
    """The version number in the output of a command."""
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(pattern, output)
    return match.group(1) if match else output.strip()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def poll_until_found(look: Callable[[int], Awaitable[Fetched | int | None]], wait_s: float) -> Fetched:
    """Poll for due messages. `look(now_ms)` returns some, or the next due time if there is one."""
    end_ms = now_ms() + wait_s * 1000
    while True:
        answer = await look(now := now_ms())
        if isinstance(answer, list):
            return answer
        if now >= end_ms:
            return []
        next_ms = end_ms if answer is None else min(end_ms, answer)
        await asyncio.sleep(min(POLL_S, max(0, next_ms - now_ms()) / 1000))


class ServedQueue(Queue):
    """A queue whose server is one process, or the parent of all its processes."""

    process: subprocess.Popen[bytes] | None = None
    port = 0

    @abstractmethod
    def command(self) -> list[str]:
        """The command line of a server in the foreground that listens on `self.port`; it runs in the folder."""

    @abstractmethod
    async def answers(self) -> bool:
        """Whether the server answers with all its data. An OSError means no."""

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process = self._spawn()
        await self._until_it_answers(self.process)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [*DIE_WITH_PARENT, *self.command()]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())

    async def _until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < end:
            try:
                if await self.answers():
                    return
            except OSError:
                pass
            await asyncio.sleep(0.01)
        self.kill()
        raise NotStarted(f"{self.name}\n{self.log.read_text(errors='replace')[-2000:]}")

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def pids(self) -> list[int]:
        return [] if self.process is None else [self.process.pid]

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process is not None:
            self.process.wait()
            self.process = None
