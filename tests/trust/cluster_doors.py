"""Doors of the processes of a simulated cluster, whose disks may be full or fail, and streams that remember every record."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.harness.doors import NEEDS_ROOM
from tests.trust.simulation_disk import Process
from turtlemq.replica.records import Kind, Record
from turtlemq.replica.shipping import ShippingDoor
from turtlemq.replica.stream import Stream
from turtlemq.storage.door import Door
from turtlemq.storage.names import TOPICS

T = TypeVar("T")


class NodeDoor(Process):
    """Of a process on a node: `full` and `sync_fails` of the node are errors. `worker`: for another process that seals; None:
    this one does so."""

    node: Any
    worker: Door | None = None

    def boot_id(self) -> str:
        return f"run {self.node.boots}"

    def random_bytes(self, count: int) -> bytes:
        return self.node.chance.randbytes(count)  # type: ignore[no-any-return]

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        node = self.node
        if node.sync_fails and name == "fdatasync" and not self.ended and path is not None and TOPICS in path.parts:
            node.sync_fails = False
            raise OSError(errno.EIO, "made to fail")
        if node.full and path is not None and TOPICS in path.parts and not self.ended:
            creates = name == "open" and args[1] & os.O_CREAT
            if creates or (name in NEEDS_ROOM and name not in ("open", "fdatasync")):
                raise OSError(errno.ENOSPC, "made to fail")
        return super()._call(name, path, action, *args)


class LeaderDoor(ShippingDoor, NodeDoor):
    """Of a process that leads. Its threads share its Door."""

    def beside(self) -> Door:
        return self

    def fresh(self) -> Door:
        return self if self.worker is None else self.worker


class NotedStream(Stream):
    """A stream that notes the chain of every record, for as long as its disk lives."""

    def __init__(self, chains: dict[int, int], epoch: int, lsn: int, chain: int, ring_bytes: int) -> None:
        super().__init__(epoch, lsn, chain, ring_bytes=ring_bytes)
        self._chains = chains
        chains[lsn] = chain

    def add(self, kind: Kind, path: str, offset: int = 0, data: bytes = b"", total: int | None = None) -> int:
        lsn = super().add(kind, path, offset, data, total)
        self._chains[lsn] = self.chain
        return lsn

    def repeat(self, record: Record) -> None:
        super().repeat(record)
        self._chains[self.lsn] = self.chain
