"""Machines of the simulated cluster, and the connections between replicas."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.trust.simulation_disk import Drive


class Node:
    """A machine: its disk outlives processes, and a wipe replaces it."""

    def __init__(self, name: str, root: Path, skew_ms: int, chance: Random) -> None:
        self.name, self.skew_ms, self.chance = name, skew_ms, chance
        self._root, self._drives = root, 0
        self.up, self.boots = True, 1  # the machine has power; how often it was started
        self.process: Any = None  # a `Replica`, if one runs
        self.wipe()

    def wipe(self) -> None:
        """An empty disk."""
        self._drives += 1
        self.drive = Drive(self._root / f"{self.name}{self._drives}")
        self.chains: dict[int, int] = {0: 0}  # by LSN: all records that the disk has
        self.holes = False  # files are being replaced: they are at no LSN
        self.cut = False  # a power cut may have taken unsynced bytes since the files were last equal to a leader's
        self.full = self.sync_fails = False
        self.complete = True  # `complete` of its file REPLICA
        self.replica = ""  # the id in the file REPLICA

    def __repr__(self) -> str:
        return self.name


class Wire:
    """A connection from a standby to a leader. Frames are tuples; each side has a queue of those on their way to it."""

    def __init__(self, world: Any, standby: Any, leader: Any) -> None:
        self.world, self.standby, self.leader = world, standby, leader
        self.open = True
        self.queues: dict[Any, deque[tuple[Any, ...]]] = {standby: deque(), leader: deque()}
        self.heard_ms = dict.fromkeys((standby, leader), world.now)  # when a frame last came

    def other(self, side: Any) -> Any:
        return self.leader if side is self.standby else self.standby

    def send(self, to: Any, *frame: Any) -> None:
        if self.open:
            self._put(to, frame)

    def _put(self, to: Any, frame: tuple[Any, ...]) -> None:
        self.queues[to].append(frame)
        self.world.later(self.world.latency(), to, self.pump, to)

    def pump(self, to: Any) -> None:
        """The next frame arrives, unless the way is cut."""
        queue = self.queues[to]
        if queue and not self.world.is_cut(self.other(to).node, to.node):
            self.heard_ms[to] = self.world.now
            to.hear(self, queue.popleft())

    def end(self, by: Any) -> None:
        """One side closes the connection, or has ended. The other one hears of it, perhaps without the last frames."""
        if not self.open:
            return
        self.open = False
        self.queues[by].clear()
        other = self.other(by)
        if self.world.chance.random() < 0.3:
            self.queues[other].clear()
        if by.node.up and other.alive:
            self._put(other, ("end",))


@dataclass(eq=False)
class Attached:
    """A standby, as its leader knows it."""

    wire: Wire
    replica: str
    sent: int  # LSN of the last record that was sent; -1: none before its files are copied
    acked: int
    complete: bool
    caught_up_ms: int
    copy: Any = None  # `CopyFrom`, while its files are replaced
