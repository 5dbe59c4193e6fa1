"""The interface of every queue under test: TurtleMQ and its peers are driven through this alone.

A `Queue` is a server with its own loopback port and data folder; a `Client` is one connection to it. Bodies are made before the
measurement; a client encodes, sends and waits for the answer, as an application would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import probe


@dataclass(frozen=True, slots=True)
class Put:
    """A message to be delayed."""

    id: str
    due_ms: int  # Unix time
    body: bytes


class Client(ABC):
    """One connection, for one call at a time. All calls wait for the server's answer."""

    @abstractmethod
    async def put(self, messages: Sequence[Put]) -> None:
        """Store messages, as durably as the setting of the queue promises."""

    @abstractmethod
    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        """Reserve up to `count` due messages, waiting for the first. Returns ids and due times; bodies are received too."""

    @abstractmethod
    async def ack(self, ids: Sequence[str]) -> None:
        """Acknowledge messages that this client has fetched."""

    @abstractmethod
    async def cancel(self, id_: str) -> bool:
        """Cancel a sleeping message. Returns whether it was there."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""


class Queue(ABC):
    """A server. `start` and `client` may be called again after `kill`: the data stays in the folder."""

    name: str  # in tables: "Redis, always"
    settings: str  # the relevant ones, for the report
    durable: bool  # an answer means fsynced
    whole_seconds = False  # delays are whole seconds only

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """The name of a missing program or package; None if all are installed."""

    @abstractmethod
    def version(self) -> str:
        """The version that the server reports."""

    @abstractmethod
    async def start(self) -> None:
        """Start the server on a free loopback port, and wait until it answers with all its data."""

    @abstractmethod
    async def client(self) -> Client:
        """A new connection."""

    @abstractmethod
    async def sleepers(self) -> int:
        """Stored messages that are not fetched, as the server counts them."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The server's processes, for memory and processor time."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL for all of the server's processes, by pid."""

    def anonymous_bytes(self) -> int:
        """Anonymous memory of all processes together."""
        return sum(map(probe.anonymous_bytes, self.pids()))

    def disk_bytes(self) -> int:
        """Disk space of the folder."""
        return sum(path.stat().st_blocks * 512 for path in probe.files(self.folder))
