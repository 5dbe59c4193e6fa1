"""Faults of the simulated cluster, and the rows of the table of failures that a run must have seen.

Each fault is a function of the story. It counts under the name of its row where it took effect, and ends by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.trust.cluster_nodes import Node
from tests.trust.cluster_replica import Replica
from tests.trust.cluster_story import NO_LEADER_MS, StoryOfCluster
from tests.trust.model import Broken
from tests.trust.simulation_ledger import Sent
from tests.trust.simulation_review import Review
from turtlemq.replica.member_events import State, Unwatched
from turtlemq.replica.shared_files import is_shared

ROWS = (
    "leader killed",
    "leader's machine gone",
    "leader stopped",
    "leader stopped with its supervisor",
    "standby killed",
    "standby cut off",
    "standby cut off in one direction",
    "standby stopped",
    "standby: disk full",
    "standby: sync fails",
    "standby wiped",
    "leader: disk full",
    "leader: sync fails",
    "leader cut off from standbys",
    "leader cut off from etcd",
    "leader cut off from all",
    "etcd down",
    "etcd has another leader",
    "etcd restored from an old copy",
    "etcd restored within an epoch",
    "power cut of everything",
    "elected after a power cut",
    "the only member lost for good",
    "byte rots on the leader",
    "byte rots on a standby",
    "handovers",
    "all nodes restarted properly",
    "requests to deposed leaders",
    "changes in doubt",
    "bids in doubt",
    "leads claimed again",
    "hello: resume",
    "resumed from records before the start",
    "hello: later",
    "copies made",
    "copies that must be compared again",
    "behind by more than the ring",
    "files ferried",
    "files asked for",
)
_DELAYS_MS = (0, 0, 1, 3, 20, 300)  # before a fault
_SPANS_MS = (200, 1_000, 4_000, 9_000)  # of a fault
Fault = Callable[["StoryWithFaults"], None]


class StoryWithFaults(StoryOfCluster):
    """A run in which things go wrong."""

    def meddle(self) -> None:
        if self.luck.random() < self.faults:
            fault = self.luck.choice(_FAULTS)
            self.world.later(self.luck.choice(_DELAYS_MS), None, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        if self.faults:  # else the story has become calm since the fault was planned
            fault(self)

    def span(self) -> int:
        return self.luck.choice(_SPANS_MS)

    def note(self, row: str) -> None:
        self.seen[row] += 1

    def send(self, name: str, audit: Review, batch: list[Sent], body: bytes | None = None) -> None:
        """Now and then the leader's disk refuses something of it."""
        dice = self.luck.random()
        if dice < self.faults / 2:
            self.find()
            node = self.at.node
            node.full, node.sync_fails = dice < self.faults / 4, dice >= self.faults / 4
            failing, self.refusing = node.sync_fails, True
            super().send(name, audit, batch, body)
            self.refusing = False
            if failing and not node.sync_fails:
                self.sync_failed(node)
            node.full = node.sync_fails = False
        else:
            super().send(name, audit, batch, body)

    def called(self, call: Callable[[], object]) -> object:  # type: ignore[override]
        """Disks refuse in the request itself, not while its answer waits."""
        told = super().called(call)
        self.at.node.full = False
        return told

    def sync_failed(self, node: Node) -> None:
        """The topic has stopped: another member leads, and this copy is not trusted any more. Alone, the process starts again."""
        self.note("leader: sync fails")
        process = node.process
        if process is not None and process is self.at and self.works(process):
            hand_over(self, process)
            if process.alive:
                self.world.kill(process)
        self.find()

    def drain(self) -> None:
        """Some stories end otherwise."""
        dice = self.luck.random() if self.faults else 0.5
        if dice < 0.05 or dice > 0.95:
            self.calm()
            (restore_etcd if dice < 0.05 else lose_only_member)(self)
            self.end_all()
        else:
            super().drain()


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────


def _leader(story: StoryWithFaults) -> Replica | None:
    return story.world.leader()


def _standby(story: StoryWithFaults) -> Replica | None:
    found = [p for p in story.world.standbys() if not p.paused]
    return story.luck.choice(found) if found else None


def kill_leader(story: StoryWithFaults) -> None:
    if (process := _leader(story)) is not None:
        story.note("leader killed")
        story.world.kill(process)


def kill_standby(story: StoryWithFaults) -> None:
    if (process := _standby(story)) is not None:
        story.note("standby killed")
        story.world.kill(process)


def stop_leader(story: StoryWithFaults) -> None:
    process = _leader(story)
    if process is not None and not process.paused:
        whole = story.luck.random() < 0.6
        story.note("leader stopped with its supervisor" if whole else "leader stopped")
        story.world.pause(process, story.luck.choice([1_000, 4_000, 30_000]), whole_node=whole)


def stop_standby(story: StoryWithFaults) -> None:
    if (process := _standby(story)) is not None:
        story.note("standby stopped")
        story.world.pause(process, story.span(), whole_node=story.luck.random() < 0.5)


def restart_all(story: StoryWithFaults) -> None:
    """Every process is stopped properly, the leader without another one to hand over to, and started again."""
    world = story.world
    standbys = [p for p in world.standbys() if p.wire is not None]
    leader = _leader(story)
    if leader is None or leader.paused or any(p.paused for p in standbys):
        return
    for process in standbys:
        world.guard(process, process.stop_properly)
    world.guard(leader, leader.stop_properly)
    story.note("all nodes restarted properly")


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────


def lose_machine(story: StoryWithFaults) -> None:
    if (process := _leader(story)) is not None:
        story.note("leader's machine gone")
        story.world.power_off(process.node, cut=story.luck.random() < 0.7)
        story.world.later(story.span(), None, story.world.power_on, process.node)


def cut_power(story: StoryWithFaults) -> None:
    story.note("power cut of everything")
    for node in story.world.nodes.values():
        story.world.power_off(node)
        story.world.later(story.luck.choice([100, 100, 1_000, 5_000]), None, story.world.power_on, node)


def fill_disk(story: StoryWithFaults) -> None:
    if (process := _standby(story)) is not None:
        process.node.full = True
        story.world.later(story.span(), None, setattr, process.node, "full", False)


def fail_sync(story: StoryWithFaults) -> None:
    """The copy is not trusted any more; an operator gives the node another disk."""
    process = _standby(story)
    if process is not None and may_lose(story, process.node):
        process.node.sync_fails = True
        story.world.later(story.span(), None, _mend, story, process.node)


def _mend(story: StoryWithFaults, node: Node) -> None:
    node.sync_fails = False
    stuck = node.process is not None and node.process.member.state is State.STUCK
    if stuck and may_lose(story, node):
        _wipe(story, node)
    elif stuck:
        story.world.later(1_000, None, _mend, story, node)


def wipe(story: StoryWithFaults) -> None:
    process = _standby(story)
    if process is not None and may_lose(story, process.node):
        story.note("standby wiped")
        _wipe(story, process.node)


def _wipe(story: StoryWithFaults, node: Node) -> None:
    story.world.power_off(node, cut=False)
    node.wipe()
    story.world.later(500, None, story.world.power_on, node)


def may_lose(story: StoryWithFaults, node: Node) -> bool:
    """Whether the disk of a node is not the last one that has everything. It may become so by its own election, or if the files
    of the leader cannot be trusted any more."""
    state = story.world.etcd.state
    candidate = node.process is not None and node.process.member.state in (State.RUN, State.OPEN, State.LEAD)
    leads = state.leader == node.replica or candidate
    leader = next((other for other in story.world.nodes.values() if other.replica == state.leader), None)
    return not leads and leader is not None and leader.complete and not story.world.bids_of(node)


def rot(story: StoryWithFaults) -> None:
    """A byte of a file changes; a comparison of the copies tells which one is bad, and the copy is made anew."""
    leader = _leader(story)
    of_leader = story.luck.random() < 0.5
    process = leader if of_leader else _standby(story)
    if process is None or leader is None or process.paused or not (of_leader or may_lose(story, process.node)):
        return
    if of_leader and not all(each.complete for each in process.attached.values()):
        return  # a copy that is made from these files would get the wrong byte: `tests/test_healing.py` tells of that
    files = [path for path in sorted(process.node.drive.root.rglob("*.bson")) if path.stat().st_size > 100]
    files = [path for path in files if is_shared(str(path.relative_to(process.node.drive.root)))]
    if not files or (of_leader and not hand_over(story, process, begin=False)):
        return
    path = story.luck.choice(files)
    at = story.luck.randrange(path.stat().st_size)
    story.note("byte rots on the leader" if of_leader else "byte rots on a standby")
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    if of_leader:
        hand_over(story, process)
    else:
        story.world.guard(process, process.distrust)


def hand_over(story: StoryWithFaults, process: Replica, *, begin: bool = True) -> bool:
    """Let another member lead, because this copy is bad. Returns False if there is none."""
    assert process.book is not None
    failing = {node.replica for node in story.world.nodes.values() if node.sync_fails}  # two disks do not fail at once
    members = sorted((process.book.isr & process.member.seen.isr) - failing)
    others = [replica for replica in members if replica in process.attached]
    if not others:
        return False
    if begin:
        story.world.guard(process, process.retire_untrusted, story.luck.choice(others))
    return True


# ── network and etcd ─────────────────────────────────────────────────────────────────────────────────────


def _cut(story: StoryWithFaults, *ways: tuple[str, str]) -> None:
    span = story.span()
    for source, target in ways:
        story.world.cut(source, target)
        story.world.later(span, None, story.world.heal, source, target)


def cut_off_standby(story: StoryWithFaults) -> None:
    process, leader = _standby(story), _leader(story)
    if process is not None and leader is not None and process is not leader:
        here, there = process.node.name, leader.node.name
        ways = [(here, there), (there, here)]
        if story.luck.random() < 0.5:
            ways = [story.luck.choice(ways)]
        story.note("standby cut off" if len(ways) == 2 else "standby cut off in one direction")
        _cut(story, *ways)


def cut_off_leader(story: StoryWithFaults) -> None:
    """From its standbys, from etcd, or from both."""
    leader = _leader(story)
    if leader is None:
        return
    name = leader.node.name
    peers = [way for other in story.world.nodes if other != name for way in ((name, other), (other, name))]
    etcd = [(name, "etcd"), ("etcd", name)]
    row, ways = story.luck.choice(
        [
            ("leader cut off from standbys", peers),
            ("leader cut off from etcd", etcd),
            ("leader cut off from all", [*peers, *etcd]),
        ]
    )
    story.note(row)
    _cut(story, *ways)


def stop_etcd(story: StoryWithFaults) -> None:
    story.note("etcd down")
    story.world.etcd_down = True
    story.world.later(story.span(), None, _start_etcd, story)


def _start_etcd(story: StoryWithFaults) -> None:
    story.world.etcd_down = False
    change_etcd(story)


def change_etcd(story: StoryWithFaults) -> None:
    """Etcd has a new leader of its own: all leases begin anew, all watches end."""
    story.note("etcd has another leader")
    story.world.etcd.renew_all(story.world.now)
    for node in story.world.nodes.values():
        if node.process is not None:
            story.world.later(story.world.latency(), node.process, node.process.tell, Unwatched())


_FAULTS: tuple[Fault, ...] = (
    *[kill_leader, kill_standby, stop_leader, stop_standby, lose_machine, cut_off_standby] * 2,
    *[cut_off_leader] * 4,
    *[cut_power, fill_disk, fail_sync, wipe, rot, stop_etcd, change_etcd, restart_all],
)


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────


def restore_etcd(story: StoryWithFaults) -> None:
    """R8: etcd knows less than it did, perhaps within one epoch. Every process says so, and none of them goes on; the same holds
    for one that has started since, except on a disk that is new since then: it has noted nothing, and is no member. So `state`
    stays as the old copy has it."""
    world = story.world
    if not world.run(lambda: _all_have_noted(story), 5_000):
        return
    newest = world.etcd.state
    old = [seen for seen in world.etcd.history if seen.epoch and seen.revision < newest.revision]
    if not old:
        return
    before = story.luck.choice([seen for seen in old if seen.epoch == newest.epoch] or old if story.luck.random() < 0.5 else old)
    story.note("etcd restored from an old copy")
    if before.epoch == newest.epoch:
        story.note("etcd restored within an epoch")
    running = [node.process for node in world.nodes.values() if node.process is not None]
    noted = {process.member.me for process in running}
    world.etcd.state, world.etcd.history = before._replace(lead=None, lease=0), []
    world.etcd.leases.clear()
    world.rewind()
    restart = story.luck.random() < 0.5
    for process in running:
        if restart:
            world.kill(process)
        else:
            world.later(story.luck.randint(0, 500), process, process.tell, Unwatched())
    world.pass_time(20_000)
    # A process that a fault of before ends in the meantime may have said nothing: the one that follows it has read `state`.
    running = [node.process for node in world.nodes.values() if node.process is not None]
    silent = [p for p in running if p.member.me in noted and not any(alarm.startswith(p.name) for alarm in world.alarms)]
    if silent:
        raise Broken(f"{story.case}: R8: {silent} went on, and etcd went back to {before}, from {newest}")
    if world.leaders():
        raise Broken(f"{story.case}: R8: {world.leaders()} lead, and etcd went back")
    if world.etcd.state.revision != before.revision:
        raise Broken(f"{story.case}: R8: etcd went back to {before}, and a replica has changed it to {world.etcd.state}")


def _all_have_noted(story: StoryWithFaults) -> bool:
    """Whether the newest `state` is on the disk of every node."""
    state = story.world.etcd.state
    processes = [node.process for node in story.world.nodes.values()]
    return all(p is not None and p.facts.newest == (state.epoch, state.revision) for p in processes)


def lose_only_member(story: StoryWithFaults) -> None:
    """Without the only member there is no leader, until an operator forces one."""
    world = story.world
    leader = world.leader()
    if leader is None or world.min_isr > 1:
        return
    others = [node for node in world.nodes.values() if node is not leader.node]

    def is_alone() -> bool:
        for node in others:  # an earlier fault may have planned to switch one of them on again
            if node.up:
                world.power_off(node, cut=False)
        return world.etcd.state.isr == {leader.member.me}

    if not world.run(is_alone, NO_LEADER_MS):
        raise Broken(f"{story.case}: members that are gone are not let go: {world.etcd.state}")
    if not world.run(story.has_leader, NO_LEADER_MS):
        raise Broken(f"{story.case}: the only member does not lead: {leader}, {world.etcd.state}")
    story.note("the only member lost for good")
    world.power_off(leader.node, cut=False)
    leader.node.wipe()
    for node in (*others, leader.node):
        world.power_on(node)
    if world.run(lambda: bool(world.leaders()), 20_000):
        raise Broken(f"{story.case}: {world.leaders()} leads, and lacks answers that the lost member has given")
    chosen = story.luck.choice(others)
    world.answered = max((lsn, chain) for lsn, chain in chosen.chains.items())
    world.etcd.force(chosen.replica)
    if not world.run(story.has_leader, NO_LEADER_MS):
        raise Broken(f"{story.case}: the forced leader does not lead: {world.etcd.state}")
    forced = world.leader()
    assert forced is not None
    assert forced.engine is not None
    problems = forced.engine.check()
    if forced.node is not chosen or problems:
        raise Broken(f"{story.case}: the forced leader: {forced}, {problems}")
