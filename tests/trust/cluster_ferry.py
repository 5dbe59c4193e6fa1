"""Sealed files of a simulated leader on their way to its standbys, apart from the stream: `replica.ferry` without an event loop.

The seal writes through a Door of another process. Its files go to each attached standby, late, over the network; the job is done
when all of them have said so, or are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.harness.index_world import Later, LaterJob
from tests.trust.cluster_nodes import Attached
from turtlemq.index.seal import Sealed
from turtlemq.replica.arrivals import Dock
from turtlemq.replica.ferry import load, piece
from turtlemq.replica.frames import File, Need
from turtlemq.replica.records import NotArrived, OutOfStep, Record, parse_head
from turtlemq.replica.stream import Ferried

_DELAYS_MS = (0, 1, 5, 300, 2_000)


class FerryJob(LaterJob):
    """A seal, and the way of its files."""

    def __init__(self, ferry: Ferry, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(work, args)
        self._ferry, self.awaited = ferry, set[tuple[str, int]]()  # replicas, with the numbers of files under way

    def done(self) -> bool:
        return super().done() and not self.awaited

    def run(self) -> None:
        if not super().done():
            super().run()
            self._ferry.carry(self)


class Ferry(Later):
    """The worker of one leader."""

    def __init__(self, leader: Any) -> None:
        super().__init__()
        self._leader, self._numbers = leader, 0
        self._under_way: list[FerryJob] = []

    def submit(self, work: Callable[..., Any], /, *args: Any) -> LaterJob:
        job = FerryJob(self, work, args)
        self.jobs.append(job)
        self._under_way.append(job)
        return job

    def carry(self, job: FerryJob) -> None:
        """Send the files of a seal that is done."""
        sealed = job.value
        if not isinstance(sealed, Sealed):
            return
        leader = self._leader
        root = leader.node.drive.root
        for path in sealed.files:
            cargo = load(leader.door, root, str(path.relative_to(root)))
            for each in list(leader.attached.values()):
                self._numbers += 1
                job.awaited.add((each.replica, self._numbers))
                file = File(self._numbers, cargo.path, len(cargo.view), cargo.sum)
                delay = leader.world.chance.choice(_DELAYS_MS)
                leader.later(self._send, each, file, bytes(cargo.view), ms=delay)
            leader.stream.ferried[cargo.path] = Ferried(len(cargo.view), cargo.sum)
            leader.world.seen["files ferried"] += 1

    def _send(self, each: Attached, file: File, data: bytes) -> None:
        each.wire.send(each.wire.standby, "file", file, data)

    def arrived(self, replica: str, number: int) -> None:
        for job in self._under_way:
            job.awaited.discard((replica, number))

    def gone(self, replica: str) -> None:
        """A connection has ended: its files are not waited for any more."""
        for job in self._under_way:
            job.awaited = {one for one in job.awaited if one[0] != replica}

    def find(self, need: Need) -> bytes | None:
        """The file under its new name; None if another one has that name by now."""
        leader = self._leader
        try:
            cargo = load(leader.door, leader.node.drive.root, need.target)
        except OSError:
            return None
        return bytes(cargo.view) if (len(cargo.view), cargo.sum) == (need.size, need.sum) else None


class Quay:
    """A standby's side: files that arrive over one connection."""

    def __init__(self, standby: Any) -> None:
        self._standby = standby
        self._dock = Dock(standby.node.drive.root, standby.door)

    def take(self, file: File, data: bytes) -> None:
        """A whole file has come. Raises `OutOfStep`, or an error of the disk."""
        self._dock.take(file)
        if data:
            entry = piece(file.number, 0, data)
            head, chain = parse_head(entry.head)
            self._dock.take(Record(head, chain, entry.path.decode(), bytes(entry.data)))

    def ask(self, need: Need) -> None:
        """The file of a record did not arrive before it: the leader gives it, or has it no more."""
        wire, world = self._standby.wire, self._standby.world
        if wire is None or not wire.open or world.is_cut(wire.leader.node, self._standby.node):
            raise NotArrived(NotArrived.__doc__)
        ferry = wire.leader.worker
        data = ferry.find(need) if isinstance(ferry, Ferry) and not wire.leader.paused else None
        world.seen["files asked for"] += 1
        if data is None:
            raise OutOfStep(f"the leader does not have {need.path} any more")
        self.take(File(1 << 40, need.path, need.size, need.sum), data)

    def drop(self) -> None:
        self._dock.drop()
