"""What every queue under test can do, in the same few words: TurtleMQ and its peers are driven through this and nothing else.

A `Queue` is a server on a loopback port of its own with its data in a folder of its own; a `Client` is one connection to it.
Bodies are prepared before time is taken; a client encodes, sends, and waits for the answer, as an application would.
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
        """Store them: as durable as the queue's setting promises when this returns."""

    @abstractmethod
    async def fetch(self, count: int, wait_s: float = 0) -> list[tuple[str, int]]:
        """Reserve up to so many that are due: ids and due times. Bodies are received as well. Waits if there is none."""

    @abstractmethod
    async def ack(self, ids: Sequence[str]) -> None:
        """Done with these, which this client has fetched."""

    @abstractmethod
    async def cancel(self, id_: str) -> bool:
        """A sleeping message shall not come. Was it there?"""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""


class Queue(ABC):
    """A queue's server. `start` and `client` may be called again after `kill`: the data stays in the folder."""

    name: str  # in tables: "Redis, always"
    settings: str  # those that matter, for the report
    durable: bool  # an answer means fsynced
    whole_seconds = False  # delays are whole seconds only

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """What is not installed, if anything."""

    @abstractmethod
    def version(self) -> str:
        """Of the server, as it says itself."""

    @abstractmethod
    async def start(self) -> None:
        """Start the server on a free loopback port. Returns when it answers and has all its data again."""

    @abstractmethod
    async def client(self) -> Client:
        """A new connection."""

    @abstractmethod
    async def sleepers(self) -> int:
        """Messages that are stored and not yet due or not yet fetched, counted by the server itself."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The server's processes, for memory and processor time."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL for all of the server's processes, by pid."""

    def anonymous_bytes(self) -> int:
        """Memory that cannot be dropped, of all processes together."""
        return sum(map(probe.anonymous_bytes, self.pids()))

    def disk_bytes(self) -> int:
        """What the folder takes on the disk."""
        return sum(path.stat().st_blocks * 512 for path in probe.files(self.folder))
