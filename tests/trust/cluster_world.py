"""Nodes, a network, a clock and a model of etcd, in which replicas with real files live: a queue of events, from one seed.

Delays are random; a cut holds frames back, in one direction or both; a broken connection loses some of them. A process that is
stopped (SIGSTOP) hears nothing until it goes on. Time passes only in `run`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

from tests.trust.cluster_nodes import Node, Wire
from tests.trust.cluster_replica import Replica
from tests.trust.membership_etcd import Etcd
from tests.trust.membership_shell import Call
from tests.trust.model import Broken, Figures
from tests.trust.simulation_disk import Crash
from turtlemq.replica.member_events import Seen, State, Unwatched
from turtlemq.replica.tenure import BEAT_MS

CALL_MS = 1_000  # a request to etcd is given up after this time
SILENT_MS = 5 * BEAT_MS  # a process that gives no sign for so long is killed by its supervisor
NODES = "abc"


class World:
    """Everything around the replicas. `ends`: how often a process is about to end while it starts."""

    def __init__(self, root: Path, chance: Random, story: Any) -> None:
        self.chance, self.story, self.now = chance, story, 0
        self.seen = Figures()
        self.etcd = Etcd()
        self.etcd_down = self.restored = False
        self.ends = 0.0  # how often a process is about to end in its work
        self.min_isr = chance.choice([1, 1, 2])
        self.ring_bytes = chance.choice([8_000, 30_000, 200_000, 1 << 20])
        self.calls: list[Call] = []
        self.wires: list[Wire] = []
        self.cuts: set[tuple[str, str]] = set()  # from node to node, or "etcd"
        self.answered = (0, 0)  # LSN and chain of the last record that was answered
        self.answered_epoch = 0
        self.alarms: list[str] = []
        self._events: list[tuple[int, int, Replica | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = self._processes = 0
        self._bids: list[Call] = []  # that may still be applied
        self._told = 0  # entries of etcd's history that watches were told of
        skews = [chance.choice([0, 0, 3, -40, 400, -400]) for _ in NODES]
        self.nodes = {name: Node(name, root, skew, chance) for name, skew in zip(NODES, skews, strict=True)}
        for node in self.nodes.values():
            self.start(node)

    # Events

    def later(self, delay_ms: int, owner: Replica | None, work: Callable[..., None], *args: Any) -> None:
        """Let a process do something, unless it has ended by then."""
        self._count += 1
        heappush(self._events, (self.now + delay_ms, self._count, owner, work, args))

    def run(self, until: Callable[[], bool], most_ms: int) -> bool:
        """Let time pass until something is true, or it has become so late. Returns whether it is true."""
        end = self.now + most_ms
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return until()
            self.now, _, owner, work, args = heappop(self._events)
            self._do(owner, work, args)
        return True

    def pass_time(self, ms: int) -> None:
        self.run(lambda: False, ms)

    def _do(self, owner: Replica | None, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if owner is None:
            work(*args)
        elif owner.alive and owner.paused:
            owner.missed.append((work, args))
        elif owner.alive:
            self.guard(owner, work, *args)
        self.check()

    def guard(self, process: Replica, work: Callable[..., None], *args: Any) -> None:
        """A process works, and may end meanwhile."""
        try:
            work(*args)
        except Crash:
            pass
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            process.fail(error)
        if process.alive and process.crashed:
            self.kill(process)
        self._watch()

    def latency(self) -> int:
        return self.chance.choice([0, 1, 1, 2, 5])

    # Processes

    def start(self, node: Node) -> None:
        """The supervisor of a node starts its process."""
        if not node.up or node.process is not None:
            return
        self._processes += 1
        node.process = Replica(self, node, self._processes)
        self.guard(node.process, node.process.begin)

    def kill(self, process: Replica) -> None:
        """A process ends; its supervisor sees that, if the machine is up, revokes its lease and starts another one."""
        self.ended(process)
        if process.node.up:
            if process.lease is not None:
                self.call(process, "revoke", (process.lease[0],), told=True)
            self.later(self.chance.choice([100, 300, 2_000]), None, self.start, process.node)

    def ended(self, process: Replica) -> None:
        process.alive = False
        process.die()
        process.node.process = None
        for wire in [wire for wire in self.wires if process in wire.queues]:
            wire.end(process)
        self.wires = [wire for wire in self.wires if process not in wire.queues or any(wire.queues.values())]

    def pause(self, process: Replica, ms: int, *, whole_node: bool) -> None:
        """SIGSTOP. The supervisor kills a process that is silent, unless it stands still itself."""
        process.paused = True
        if whole_node or ms < SILENT_MS:
            self.later(ms, None, self.resume, process)
        else:
            self.later(SILENT_MS, None, self._end_silent, process)

    def resume(self, process: Replica) -> None:
        process.paused = False
        missed, process.missed = process.missed, []
        for work, args in missed:
            self.later(0, process, work, *args)

    def _end_silent(self, process: Replica) -> None:
        if process.alive and process.paused:
            self.kill(process)

    def power_off(self, node: Node, *, cut: bool = True) -> None:
        """The machine stops. Without `cut`, as one whose disk was synced before."""
        node.up = False
        if node.process is not None:
            self.ended(node.process)
        if cut:
            node.drive.cut(self.chance)
            node.cut = True

    def power_on(self, node: Node) -> None:
        node.boots += not node.up
        node.up = True
        self.start(node)

    def leader(self) -> Replica | None:
        """The process that etcd names, if it leads."""
        return next(
            (p for p in self.leaders() if p.member.me == self.etcd.state.leader and p.term == self.etcd.state.epoch), None
        )

    def leaders(self) -> list[Replica]:
        """All processes that believe to lead."""
        running = [node.process for node in self.nodes.values()]
        return [p for p in running if p is not None and p.engine is not None and p.member.state is State.LEAD]

    def standbys(self) -> list[Replica]:
        """Processes that follow the leader."""
        found = [node.process for node in self.nodes.values()]
        return [p for p in found if p is not None and p.member.state in (State.FOLLOW, State.IN_SYNC)]

    # Network

    def is_cut(self, source: Node, target: Node) -> bool:
        return (source.name, target.name) in self.cuts or not source.up

    def cut(self, source: str, target: str) -> None:
        self.cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self.cuts.discard((source, target))
        for wire in self.wires:
            for to, queue in wire.queues.items():
                for _ in queue:
                    self.later(self.latency(), to, wire.pump, to)
        for node in self.nodes.values():
            if node.process is not None and node.name in (source, target):
                self.later(self.latency(), node.process, node.process.tell, Unwatched())
                self.later(self.latency(), node.process, node.process.watch)

    def connect(self, standby: Replica, replica: str | None) -> Wire | None:
        """A connection to the process with this replica; None: nothing listens there."""
        target = next((n.process for n in self.nodes.values() if n.process is not None and n.replica == replica), None)
        if target is None or target is standby or target.book is None or self.is_cut(standby.node, target.node):
            return None
        wire = Wire(self, standby, target)
        self.wires.append(wire)
        return wire

    def forget(self, wire: Wire) -> None:
        if wire in self.wires:
            self.wires.remove(wire)

    def calm(self) -> None:
        """All that went wrong is mended."""
        self.etcd_down = False
        for node in self.nodes.values():
            node.full = node.sync_fails = False
            for process in [node.process] if node.process is not None else ():
                for door in process.doors:
                    door.ends_in = -1
                if process.paused:
                    self.resume(process)
            self.power_on(node)
        for source, target in sorted(self.cuts):
            self.heal(source, target)

    # Etcd

    def reaches_etcd(self, node: Node) -> bool:
        return not (self.etcd_down or {(node.name, "etcd"), ("etcd", node.name)} & self.cuts)

    def call(self, process: Replica, kind: str, args: tuple[Any, ...], *, told: bool = False) -> None:
        call = Call(process, kind, args, self.now, told=told)
        slow = kind in ("bid", "change", "claim", "hand_over") and self.chance.random() < 0.1
        lost = self.chance.random() < 0.01
        if kind in ("bid", "hand_over") and not lost:
            self._bids.append(call)
        if not lost:
            self.later(self.chance.randint(500, 4_000) if slow else self.latency(), None, self._arrive, call)
        if not told:
            self.later(CALL_MS, process, self._time_out, call)
        elif lost:  # the supervisor asks again
            self.later(CALL_MS, None, self._arrive, call)

    def _arrive(self, call: Call) -> None:
        node = call.process.node
        if self.etcd_down or (node.name, "etcd") in self.cuts:
            if call.kind == "revoke" and call.told and node.up:
                self.later(CALL_MS, None, self._arrive, call)
            return
        args = () if call.kind in ("read", "grant") else call.args
        call.result = getattr(self.etcd, call.kind)(self.now, *args)
        self._bids = [other for other in self._bids if other is not call]
        if call.kind == "bid" and call.result is not None:
            self._check_elected(call)
        self.seen["handovers"] += call.kind == "hand_over" and call.result is not None
        if call.kind == "grant":
            self.later(self.etcd.leases[call.result] - self.now, None, self._expire, call.result)
        if not call.told and self.chance.random() > 0.01 and ("etcd", node.name) not in self.cuts:
            self.later(self.latency(), call.process, self._answer, call)
        self._watch()

    def _answer(self, call: Call) -> None:
        if not call.told:
            call.told = True
            call.process.hear_etcd(call)

    def _time_out(self, call: Call) -> None:
        if not call.told:
            call.told = True
            call.process.miss_etcd(call)

    def _expire(self, lease: int) -> None:
        until = self.etcd.leases.get(lease)
        if until is None:
            return
        if until > self.now:
            self.later(until - self.now + self.chance.randint(0, 500), None, self._expire, lease)
            return
        self.etcd.end_lease(lease)
        self.seen["leases ended"] += 1
        self._watch()

    def _watch(self) -> None:
        """Tell all processes of changes in etcd."""
        if self._told < len(self.etcd.history):
            self._told = len(self.etcd.history)
            for node in self.nodes.values():
                if node.process is not None:
                    self.later(self.latency(), node.process, node.process.watch)

    def bids_of(self, node: Node) -> bool:
        """Whether a transaction is under way that may elect this node."""
        return any(node.replica in (call.args[0], *call.args[2:3]) for call in self._bids)

    def rewind(self) -> None:
        """Etcd was stopped, and starts again with an old copy: watches begin anew, and requests that were under way are lost with
        their connections. The restored etcd gives revisions a second time: if it carried out a late transaction, the lost
        `state` could be there again, or another one with its revision, and no replica that starts later could tell."""
        self.restored = True
        self._told = 0
        self._bids = []
        self._events = [event for event in self._events if event[3] != self._arrive]
        heapify(self._events)
        for node in self.nodes.values():
            if node.process is not None:
                node.process.watched = 0

    # Invariants

    def _check_elected(self, call: Call) -> None:
        self.seen["elections"] += 1
        node = next((n for n in self.nodes.values() if n.replica == call.args[0]), None)
        if node is not None and node.holes:
            raise Broken(f"C4: {node} is elected while its files are replaced")

    def check(self) -> None:
        """C1, C2 and C5; C4 is looked at by the model of etcd, C6 with each answer. The in-sync set of an etcd that was restored
        is an old one, which says nothing about copies: C2 and C5 speak of the true one, and no replica may act on this (R8)."""
        state = Seen(at=0) if self.restored else self.etcd.state
        lsn, chain = self.answered
        for node in self.nodes.values():
            if node.replica in state.isr and (node.holes or node.chains.get(lsn) != chain):
                raise Broken(f"C5: {node} is in the ISR and lacks record {lsn:,}, which was answered")
            if node.holes and node.process is not None and node.process.facts.complete:
                raise Broken(f"C1: {node} says that it is complete while its files are replaced")
        leader = self.leader()
        if leader is not None and leader.book is not None and not state.isr <= leader.book.required():
            required = sorted(leader.book.required())
            raise Broken(f"C2: etcd's ISR is {sorted(state.isr)}, its leader requires {required} only")

    def note_answer(self, leader: Replica, lsn: int) -> None:
        """An answer goes out that may tell of all records up to this one."""
        if leader.term < self.answered_epoch:
            raise Broken(f"C6: {leader} answers in epoch {leader.term}, after a leader of epoch {self.answered_epoch}")
        self.answered, self.answered_epoch = (lsn, leader.node.chains[lsn]), leader.term
        self.seen["answers of deposed leaders"] += leader.term < self.etcd.state.epoch
        self.check()
