"""A story of the simulation, told by three replicas. Its clients talk to the leader, and now and then to one that was deposed.

An answer goes out when all required members have everything that it may tell of, and the leader may still answer. If it does not
come, the request may have been done or not, as far as its client knows; the client looks for a leader and goes on there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from tests.harness.index_world import Later
from tests.trust.cluster_ferry import Ferry
from tests.trust.cluster_replica import Replica
from tests.trust.cluster_world import World
from tests.trust.failover import compare
from tests.trust.model import Broken
from tests.trust.simulation_auditor import Fetch
from tests.trust.simulation_disk import Crash
from tests.trust.simulation_polls import request_of
from tests.trust.simulation_review import Review
from tests.trust.simulation_scenes import StoryWithScenes
from turtlemq.broker.results import Reserved
from turtlemq.errors import DiskFull, Stopped, TurtleError, UnknownTopic
from turtlemq.replica import copy_files, manifest, pins, sums
from turtlemq.replica.member_events import State
from turtlemq.server.fetches import Fetches
from turtlemq.server.rate_limit import FlowControl

T = TypeVar("T")
ANSWER_MS = 7_000  # the longest wait for copies
NO_LEADER_MS = 120_000  # faults are over long before
QUIET_MS = 700  # of a long time that passes, so much is lived through by the cluster
COMPARED = 0.1  # of the answers
OLD = 0.3  # of the requests, while a deposed leader does not know that it is one


class StoryOfCluster(StoryWithScenes):
    """A run over one seed."""

    world: World
    at: Replica  # to which clients talk

    def __init__(self, root: Path, case: str, seed: int, **settings: Any) -> None:
        self.root, self.luck = root, Random(seed)
        self.faults = 0.0  # of the requests
        self.refusing = False  # the leader's disk refuses something in this request
        super().__init__(root / "unused", case, seed, **settings)
        self.uses_schedules = False  # their requests go to one engine
        self.confirm(self.at)
        self.faults = self.luck.choice([0.0, 0.02, 0.05, 0.1])
        self.world.ends = self.ends

    # The process that clients talk to

    def begin(self) -> None:
        """Find a leader that answers."""
        if not hasattr(self, "world"):
            self.later = self.worker is not None, self.flusher is not None
            self.skew = self.lived = 0
            self.world = World(self.root, self.luck, self)
        if not self.world.run(self.has_leader, NO_LEADER_MS):
            states = {node.name: str(node.process) for node in self.world.nodes.values()}
            raise Broken(f"{self.case}: no leader answers: {states}, {self.world.etcd.state}, {self.world.alarms}")
        leader = self.world.leader()
        assert leader is not None
        self.world.note_answer(leader, leader.stream.lsn)
        self.face(leader)

    def has_leader(self) -> bool:
        leader = self.world.leader()
        if leader is None or leader.paused or leader.book is None or len(leader.book.isr) < self.world.min_isr:
            return False
        return leader.covered() >= leader.stream.lsn and leader.may_answer()

    def face(self, process: Replica) -> None:
        """Talk to this one from now on."""
        assert process.engine is not None
        self.advance()
        known = hasattr(self, "at") and self.at is process
        self.lose_polls()
        self.turn_to(process)
        for audit in self.topics.values() if not known else ():
            audit.clock(self.now, self.steady)
            audit.started()

    def turn_to(self, process: Replica) -> None:
        self.now += process.node.skew_ms - self.skew
        self.skew = process.node.skew_ms
        self.at, self.drive, self.process = process, process.node.drive, process.leader_door
        assert process.engine is not None
        self.engine, self.worker, self.flusher = process.engine, process.worker, process.flusher
        if process.fetches is None:
            process.fetches = Fetches(process.engine, FlowControl())
        self.fetches = process.fetches

    def advance(self) -> None:
        """The cluster has lived on."""
        passed, self.lived = self.world.now - self.lived, self.world.now
        self.now, self.steady = self.now + passed, self.steady + passed

    def new_workers(self, process: Replica) -> tuple[Later | None, Later | None]:
        """Of the engine of a leader: for seals, which are a ferry's, and for tables."""
        seals, tables = self.later
        return Ferry(process) if seals else None, Later() if tables else None

    def power_was_cut(self) -> None:
        """A copy that has lost its power leads from now on."""
        self.seen["elected after a power cut"] += 1
        for audit in self.topics.values():
            audit.cut()

    def engine_closes(self, process: Replica) -> None:
        if process.fetches is not None:
            process.fetches.end()

    def works(self, process: Replica) -> bool:
        return process.alive and not process.paused and not process.closed and process.member.state is State.LEAD

    def review(self, name: str) -> Review:
        review = super().review(name)
        review.has_one_clock = False
        return review

    # Requests

    def ask(
        self, audit: Review, call: Callable[[], T], heard: Callable[[T | None], None], may_wake: str | None = None
    ) -> T | None:
        self.meddle()
        self.find()
        old = self.deposed()
        if old is not None and not self.ticking:
            self.ask_old(old, audit, call, heard)
            return None
        audit.clock(self.now, self.steady)
        self.seen["requests"] += 1
        self.seen["requests to deposed leaders"] += self.at.term < self.world.etcd.state.epoch
        at, told = self.at, self.called(call)
        if at.alive and self.confirm(at):
            heard(told)
            if may_wake is not None:
                self.fetches.look_after(may_wake)
            return told
        self.seen["unanswered"] += 1
        heard(None)
        self.lose_polls(maybe_answered=True)
        self.undo(at, told)
        self.begin()
        return None

    ticking = False

    def find(self) -> None:
        """Another leader, if the one that clients talk to is gone."""
        if not self.works(self.at):
            self.begin()

    def called(self, call: Callable[[], T]) -> T | None:
        """A request at the process that clients talk to. None: there was no answer, or it was refused."""
        at, told = self.at, None
        try:
            told = call()
        except Crash:
            pass
        except (TurtleError, OSError) as error:
            if not at.crashed and not (self.refusing and isinstance(error, OSError | DiskFull | Stopped)):
                raise
            self.seen["leader: disk full"] += isinstance(error, DiskFull)
        if at.crashed:
            self.world.kill(at)
        return told

    def confirm(self, at: Replica) -> bool:
        """Wait for the copies. Returns whether the answer goes out."""
        lsn, patience = at.stream.lsn, self.luck.choice([ANSWER_MS, ANSWER_MS, 400])
        self.world.run(lambda: not at.alive or at.closed or (not at.paused and at.covered() >= lsn), patience)
        self.advance()
        if not self.works(at) or at.covered() < lsn or not at.may_answer():
            return False
        self.world.note_answer(at, lsn)
        if self.luck.random() < COMPARED:
            self.compare(at)
        return True

    def undo(self, at: Replica, told: object) -> None:
        """Messages that did not reach their consumer are given back, if the process can do so."""
        if self.works(at) and isinstance(told, Reserved) and at.fetches is not None:
            self.called(lambda: at.fetches and at.fetches.give_back(self.asked, told, self.now))

    def compare(self, leader: Replica) -> None:
        """Folders of members that have everything are equal, byte for byte."""
        assert leader.book is not None
        for node in self.world.nodes.values():
            standby = node.process
            if standby is None or standby is leader or standby.member.me not in leader.book.isr or standby.follower is None:
                continue
            if standby.wire is not None and standby.wire.leader is leader and standby.follower.lsn == leader.stream.lsn:
                compare(leader.node.drive.root, node.drive.root, unfinished=False)
                self.seen["comparisons"] += 1

    def deposed(self) -> Replica | None:
        """A process that leads no more, and does not know yet."""
        others = [p for p in self.world.leaders() if p.term < self.world.etcd.state.epoch and self.works(p)]
        return others[0] if others and self.luck.random() < OLD and self.at not in others else None

    def ask_old(self, old: Replica, audit: Review, call: Callable[[], T], heard: Callable[[T | None], None]) -> None:
        """A client that has not heard of the new leader."""
        now = self.at
        self.turn_to(old)
        audit.clock(self.now, self.steady)
        self.seen["requests to deposed leaders"] += 1
        told = unknown = None
        try:
            told = self.called(call)
        except UnknownTopic as error:  # the new leader has made it
            unknown = error
        answered = old.alive and self.confirm(old)
        if answered and unknown is not None:
            raise unknown
        heard(told if answered else None)
        if not answered:
            self.undo(old, told)
        self.advance()
        self.turn_to(now)
        self.find()

    def lose_polls(self, *, maybe_answered: bool = False) -> None:
        """Long polls end with the process, or with an answer that could not be given: messages may have been reserved then, at
        the time of the request."""
        for poll in self.polls.lose():
            if self.at.fetches is not None and self.works(self.at):
                poll.entry.end()
                self.at.fetches.leave(poll.entry)
            if maybe_answered:
                self.topics[poll.topic].fetched(poll.asked, None)

    def fetch_so(self, name: str, audit: Review, asked: Fetch) -> Reserved | None:
        self.asked = request_of(name, asked)
        return super().fetch_so(name, audit, asked)

    # Time

    def pass_time(self, step: int) -> None:
        lived = min(step, QUIET_MS)
        self.world.pass_time(lived)
        self.advance()
        self.now, self.steady = self.now + step - lived, self.steady + step - lived
        self.run_ticks()

    def run_ticks(self) -> None:
        self.find()
        self.ticking = True
        super().run_ticks()
        self.ticking = False

    # Ends, and faults

    def meddle(self) -> None:
        """Something may go wrong, now or soon."""

    def end_now(self) -> None:
        self.find()
        self.world.kill(self.at)
        self.seen["kills"] += 1
        self.begin()

    def stop(self) -> None:
        """A handover to another member, if there is one."""
        self.find()
        at = self.at
        assert at.book is not None
        others = sorted(at.book.isr - {at.member.me})
        if not others:
            return
        self.lose_polls()
        self.world.guard(at, at.ask_handover, self.luck.choice(others))
        self.world.run(lambda: not at.alive, ANSWER_MS)
        self.begin()

    def drain(self) -> None:
        self.calm()
        self.compare(self.at)
        super().drain()

    def calm(self) -> None:
        """Nothing goes wrong any more, and all copies are in sync in the end."""
        self.ends = self.faults = self.world.ends = 0.0
        self.world.calm()
        self.world.run(lambda: len(self.world.etcd.state.isr) == len(self.world.nodes) and self.has_leader(), NO_LEADER_MS)
        if len(self.world.etcd.state.isr) < len(self.world.nodes):
            states = {node.name: str(node.process) for node in self.world.nodes.values()}
            raise Broken(f"{self.case}: not all copies get in sync: {states}, {self.world.etcd.state}, {self.world.alarms}")
        self.begin()

    def close(self) -> None:
        """All copies get the last records, and are equal."""
        at = self.at
        self.engine.close()
        lsn = at.stream.lsn
        all_in = lambda: at.book is not None and len(at.book.isr) == len(self.world.nodes) and at.covered() >= lsn  # noqa: E731
        self.world.run(all_in, NO_LEADER_MS)
        before = self.seen["comparisons"]
        self.compare(at)
        if self.seen["comparisons"] < before + len(self.world.nodes) - 1:
            raise Broken(f"{self.case}: not all copies have everything in the end")
        self.end_all()

    def end_all(self) -> None:
        for node in self.world.nodes.values():
            if node.process is not None:
                self.world.ended(node.process)
        self.seen += self.world.seen


def small_pieces(chance: Random) -> ExitStack:
    """Meanwhile, files are compared and copied in small pieces, and linked in several steps."""
    stack, size = ExitStack(), chance.choice([1_024, 16_384, 4 << 20])
    for module in (manifest, copy_files, sums):
        stack.enter_context(patch.object(module, "PIECE_BYTES", size))
    stack.enter_context(patch.object(pins, "FILES_AT_ONCE", chance.choice([1, 256])))
    return stack
