"""What the peers have in common: a server process with a folder and a free port, and waiting by looking again.

A peer says its command line and how to ask whether it answers; starting, awaiting and killing it are the same for all.
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
UNTIL_WE_END = ["setpriv", "--pdeathsig", "KILL"]  # whatever happens to the harness, nothing is left behind
START_S = 1800  # reading tens of millions of messages again takes minutes
POLL_S = 0.002  # a client that waits looks this often: another one may put what is due sooner
LEASE_MS = 60_000  # longer than any fetched message is kept in a benchmark

Fetched = list[tuple[str, int]]  # ids and due times


class NotStarted(Exception):
    """The server ended, or did not answer in time. The end of its log stands below."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def program(name: str, *folders: Path) -> str | None:
    """Where a program is; system folders are looked at even if the user's path leaves them out."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", *map(str, folders)]))


def said_version(command: list[str], pattern: str) -> str:
    """The version number in what a command prints."""
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(pattern, said)
    return found.group(1) if found else said.strip()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def look_until_found(look: Callable[[int], Awaitable[Fetched | int | None]], wait_s: float) -> Fetched:
    """Look for due messages again and again: `look(now_ms)` gives some, or else the next due time if it knows one."""
    end_ms = now_ms() + wait_s * 1000
    while True:
        found = await look(now := now_ms())
        if isinstance(found, list):
            return found
        if now >= end_ms:
            return []
        next_ms = end_ms if found is None else min(end_ms, found)
        await asyncio.sleep(min(POLL_S, max(0, next_ms - now_ms()) / 1000))


class ServedQueue(Queue):
    """A queue whose server is one process, or the parent of all its processes."""

    process: subprocess.Popen[bytes] | None = None
    port = 0

    @abstractmethod
    def command(self) -> list[str]:
        """What to run, in the folder, so that it listens on `self.port` and stays in the foreground."""

    @abstractmethod
    async def answers(self) -> bool:
        """Does it answer, with all its data? An OSError is a no."""

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process = self._spawn()
        await self._until_it_answers(self.process)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [*UNTIL_WE_END, *self.command()]
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
