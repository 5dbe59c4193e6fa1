"""Both sides of a reconcile in the simulated cluster: pins, manifest, plans and files are the product's, frames are tuples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.trust.cluster_doors import NotedStream
from tests.trust.cluster_nodes import Attached, Wire
from turtlemq.replica.copy_files import Changed, Tails
from turtlemq.replica.copy_target import catch_up_of
from turtlemq.replica.file_copy import FileCopy, Whole
from turtlemq.replica.follower import Follower
from turtlemq.replica.manifest import FilePlan, FileState
from turtlemq.replica.pins import LINKS, Pins, pin, unpin
from turtlemq.replica.sums import Sums
from turtlemq.storage import names

_NEVER_NS = 0  # a time at which every file was changed lately: no checksum is taken from the cache


class CopyFrom:
    """The leader's side, for one standby."""

    def __init__(self, leader: Any, each: Attached) -> None:
        self._leader, self._each = leader, each
        self._door = leader.new_door()
        self._number = len(leader.doors)
        self._pins: Pins | None = None
        self._rounds = 0

    def take(self, kind: str, args: list[Any]) -> None:
        wire = self._each.wire
        if kind == "sync":
            self._begin()
        elif self._pins is None:
            return
        elif kind == "pull":
            number, at, length = args
            size = self._pins.files[number][1]
            data = self._door.read(self._pins.link(number), at, max(0, min(length, size - at)))
            wire.send(wire.standby, "piece", number, at, length, data)
        else:
            pins, stream = self._pins, self._leader.stream
            self.end()
            fits = stream.resumes(pins.lsn, pins.chain)
            self._leader.world.seen["copies that must be compared again"] += not fits
            wire.send(wire.standby, "welcome", self._leader.term, fits)
            if fits:
                self._each.sent = pins.lsn
                self._leader.ship()

    def _begin(self) -> None:
        self.end()
        self._rounds += 1
        root = self._leader.node.drive.root
        folder = root / names.SYNC / LINKS / f"{self._number}-{self._rounds}"
        self._pins = pins = Pins(folder)
        self._step(pins, pin(self._door, root, self._leader.stream, pins))

    def _step(self, pins: Pins, steps: Iterator[None]) -> None:
        if self._pins is not pins:
            return
        if next(steps, self) is None:
            self._leader.later(self._step, pins, steps, ms=self._leader.world.chance.choice([0, 1, 50]))
            return
        sums = Sums(self._door, self._leader.node.drive.root)
        files = [
            FileState(path, size, sums.of(path, pins.link(number), size, _NEVER_NS))
            for number, (path, size) in enumerate(pins.files)
        ]
        chains = {lsn: chain for lsn, chain in self._leader.node.chains.items() if lsn <= pins.lsn}
        wire = self._each.wire
        wire.send(wire.standby, "manifest", Whole(pins.lsn, pins.chain, files, dict(pins.units), list(pins.folders)), chains)

    def end(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            unpin(self._door, pins)


class CopyInto:
    """The standby's side, over one connection."""

    def __init__(self, replica: Any, wire: Wire) -> None:
        self._replica, self._wire = replica, wire
        root, facts = replica.node.drive.root, replica.facts
        keeps = facts.epoch < replica.member.following
        self._tails = Tails(replica.door, root / names.DIVERGED / str(facts.epoch) if keeps else None)
        self._files = FileCopy(root, replica.door, self._tails)
        self._asked: list[tuple[FilePlan, int, int]] = []
        self._whole = Whole()
        self._chains: dict[int, int] = {}

    def ask(self) -> None:
        """Let the leader link its files."""
        self._replica.world.seen["comparisons of files for a copy"] += 1
        self._wire.send(self._wire.leader, "sync")

    def compare(self, whole: Whole, chains: dict[int, int]) -> None:
        """A manifest has come."""
        self._whole, self._chains = whole, chains
        plans = self._files.compare(whole, _NEVER_NS)
        self._asked = [(plan, at, length) for plan in plans for at, length in plan.parts()]
        for plan, at, length in self._asked:
            self._wire.send(self._wire.leader, "pull", plan.number, at, length)
        self._finish()

    def write(self, number: int, at: int, length: int, data: bytes) -> None:
        """A piece has come."""
        if not self._asked or (self._asked[0][0].number, self._asked[0][1]) != (number, at):
            return  # of the round before
        plan, _, _ = self._asked.pop(0)
        try:
            self._files.write(plan, at, length, data)
        except Changed:
            self._files.close()
            self._asked = []
            self.ask()
            return
        self._replica.world.seen["pieces copied"] += 1
        self._finish()

    def _finish(self) -> None:
        if not self._asked:
            self._files.finish()
            self._wire.send(self._wire.leader, "done")

    def close(self) -> None:
        """The connection has ended."""
        self._files.close()

    def resume(self) -> None:
        """Records follow, behind the first pin."""
        replica, whole = self._replica, self._whole
        replica.node.chains = self._chains
        replica.follower = Follower(replica.node.drive.root, replica.door, whole.lsn, whole.chain, syncer=replica.syncer)
        replica.follower.catch_up = catch_up_of(whole)
        epoch = replica.member.following
        replica.stream = NotedStream(self._chains, epoch, whole.lsn, whole.chain, replica.world.ring_bytes)
        replica.copying = None
