"""Nodes, network and a model of etcd for walks over the membership rules, with the invariants that hold after each step."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.trust.membership_etcd import Etcd
from tests.trust.membership_process import Connection, Disk, Process
from tests.trust.membership_shell import Call
from tests.trust.model import Broken, Figures
from turtlemq.replica.member_events import PatienceOver, Retired, RetryNow, State
from turtlemq.replica.tenure import BEAT_MS

Move = tuple[Any, ...]  # the name of a method, and its arguments


class World:
    """Some nodes and an etcd. `moves` are all steps that could happen now; `do` takes one, and checks."""

    def __init__(self, nodes: str, chance: Random, *, timed: bool = True) -> None:
        self.chance, self.timed, self.now = chance, timed, 0
        self.seen = Figures()
        self.etcd = Etcd()
        self.calls: list[Call] = []
        self.connections: list[Connection] = []
        self.answers: set[int] = set()
        self.answered_epoch = 0
        self.records = self.processes = 0
        self.cut_off: set[str] = set()  # nodes that cannot reach etcd
        self.disks = {name: Disk(name) for name in nodes}
        self.running: dict[str, Process | None] = {}
        for name in nodes:
            self.running[name] = self._start(name)

    def _start(self, name: str) -> Process:
        self.processes += 1
        return Process(self, self.disks[name], self.processes)

    def new_record(self) -> int:
        self.records += 1
        return self.records

    def connect(self, standby: Process) -> None:
        """HELLO reaches the process that holds `lead`, as far as this standby knows; else nothing is there."""
        standby.hang_up()
        lead = standby.member.seen.lead
        leader = self.running.get(lead or "")
        connection = Connection(standby, leader or standby, broken=leader is None)
        standby.connection = connection
        disk = standby.disk
        lsn = len(disk.log) if disk.complete and standby.lsn_known else None
        connection.up.append(("hello", standby.member.epoch, lsn, list(disk.log)))
        self.connections.append(connection)

    # Moves of the environment

    def moves(self) -> list[tuple[float, Move]]:
        """All steps, each with its weight."""
        found: list[tuple[float, Move]] = []
        for i, call in enumerate(self.calls):
            cut = call.process.disk.name in self.cut_off
            if not call.done and not cut:
                found.append((0.2 if call.slow else 6, ("carry_out", i)))
            found += [(0.003, ("drop", i))] if not call.done else []
            if not call.told and call.process.alive:
                found += [(6, ("answer", i))] if call.done and not cut else []
                found.append((0.003 if not cut else 1, ("time_out", i)))
        for i, connection in enumerate(self.connections):
            if connection.broken:
                found.append((4, ("lost", i)))
                continue
            found += [(5, ("down", i))] if connection.down and connection.standby.alive else []
            found += [(5, ("up", i))] if connection.up and connection.leader.alive else []
            found.append((0.005, ("cut", i)))
        for name, process in self.running.items():
            if process is None:
                found.append((2, ("restart", name)))
                continue
            found += [(5, ("work", name))] if process.jobs else []
            found += [(5, ("apply", name))] if process.received else []
            fresh = process.watched < len(self.etcd.history) and name not in self.cut_off
            found += [(2, ("watch", name))] if fresh else []
            for timer, when in process.timers.items():
                found += [(4, ("ring", name, timer.__name__))] if self.now >= when or not self.timed else []
            found.append((0.003, ("kill", name)))
            found.append((0.1, ("heal", name)) if name in self.cut_off else (0.005, ("cut_off_etcd", name)))
            found += self.moves_of_leader(name, process)
            found += [(0.3, ("sync", name))] if process.disk.synced < len(process.disk.log) else []
        found += [(0.002, ("power_cut", name)) for name in self.disks] if self.timed else []
        found += [(1, ("expire", lease)) for lease, when in self.etcd.leases.items() if self.now >= when or not self.timed]
        return [*found, (0.01, ("renew_all",)), (1, ("wait",))]

    def moves_of_leader(self, name: str, process: Process) -> list[tuple[float, Move]]:
        book = process.book
        if book is None:
            return []
        found: list[tuple[float, Move]] = []
        if process.retiring:
            found += [(2, ("offer", name)), (0.2, ("retire", name))]
        else:
            found += [(0.5, ("write", name)), (1, ("reply", name)), (0.002, ("hand_over", name))]
            found += [(0.03, ("let_go", name, other)) for other in sorted(book.isr - {name})]
        busy = {call.kind for call in self.calls if call.process is process and not call.told}
        found += [(2, ("keep_alive", name))] if process.lease and "keep_alive" not in busy else []
        found += [(1, ("take_in", name))] if book.required() != book.isr and "change" not in busy else []
        for i, connection in enumerate(self.connections):
            if connection.leader is process and not connection.broken:
                found.append((0.5, ("beat", i)))
                found += [(5, ("ship", i))] if 0 <= connection.sent < len(process.disk.log) else []
                wanted = connection.standby.member.me in book.required()
                found += [(0.03, ("withdraw", i)) if wanted else (1.5, ("want", i))] if connection.complete else []
        return found

    def do(self, move: Move) -> None:
        """One step, and the invariants after it."""
        name, *args = move
        getattr(self, name)(*args)
        self.check()

    # Etcd

    def carry_out(self, i: int) -> None:
        call = self.calls[i]
        args = () if call.kind in ("read", "grant") else call.args
        isr = self.etcd.state.isr
        call.result, call.done = getattr(self.etcd, call.kind)(self.now, *args), True
        if call.kind == "bid" and call.result is not None:
            self._check_elected(call, isr)
        self._forget(call)

    def _check_elected(self, call: Call, isr: frozenset[str]) -> None:
        self.seen["elections"] += 1
        disk = self.disks[call.args[0]]
        if not disk.complete or disk.holes:
            raise Broken(f"C4: {disk.name} is elected, and is not complete")
        lost = self.answers.difference(disk.log)
        late = disk.rebooted and not call.process.alive  # power was lost after the bid was sent: as documented in CLUSTER.md
        self.seen["bids of machines without power"] += late
        if lost and not late and not all(self.disks[name].rebooted for name in isr):
            raise Broken(f"C5: {disk.name} is elected, and lacks records {sorted(lost)}; not all members had lost power")
        self.seen["elections after the power of all was lost"] += bool(isr) and all(self.disks[name].rebooted for name in isr)
        self.answers -= lost

    def drop(self, i: int) -> None:
        """A request never reaches etcd."""
        call = self.calls.pop(i)
        if not call.told and call.process.alive:
            call.process.miss_etcd(call)

    def answer(self, i: int) -> None:
        call = self.calls[i]
        call.told = True
        self._forget(call)
        call.process.hear_etcd(call)

    def time_out(self, i: int) -> None:
        call = self.calls[i]
        call.told = True
        if call.done or call.kind in ("read", "grant", "keep_alive", "delete_lead"):
            self.calls.remove(call)
        call.process.miss_etcd(call)

    def _forget(self, call: Call) -> None:
        if call.done and (call.told or not call.process.alive):
            self.calls.remove(call)

    def expire(self, lease: int) -> None:
        self.etcd.end_lease(lease)
        self.seen["leases ended"] += 1

    def cut_off_etcd(self, name: str) -> None:
        self.cut_off.add(name)

    def heal(self, name: str) -> None:
        self.cut_off.discard(name)

    def renew_all(self) -> None:
        self.etcd.renew_all(self.now)

    def wait(self) -> None:
        """Nothing happens for a while; mostly, until the next timer."""
        timers = [when for process in self.running.values() if process is not None for when in process.timers.values()]
        later = [when for when in (*timers, *self.etcd.leases.values()) if when > self.now]
        self.now = min(later) if later and self.chance.random() < 0.5 else self.now + self.chance.randint(0, 2 * BEAT_MS)

    def watch(self, name: str) -> None:
        process = self._running(name)
        process.watched += 1
        process.see(self.etcd.history[process.watched - 1], 0)

    # Network

    def down(self, i: int) -> None:
        connection = self.connections[i]
        connection.standby.hear(connection)

    def up(self, i: int) -> None:
        connection = self.connections[i]
        connection.leader.listen(connection)

    def cut(self, i: int) -> None:
        self.connections[i].broken = True

    def lost(self, i: int) -> None:
        """The standby notices; frames that were on their way to it, and to the leader, are gone."""
        connection = self.connections.pop(i)
        if connection.standby.alive:
            connection.standby.lose(connection)

    # Nodes

    def _running(self, name: str) -> Process:
        process = self.running[name]
        assert process is not None
        return process

    def work(self, name: str) -> None:
        self._running(name).work()

    def apply(self, name: str) -> None:
        self._running(name).apply()

    def ring(self, name: str, timer: str) -> None:
        process = self._running(name)
        kind = PatienceOver if timer == "PatienceOver" else RetryNow
        del process.timers[kind]
        process.tell(kind())

    def kill(self, name: str) -> None:
        self.seen["kills"] += 1
        self._end(self._running(name))
        self.running[name] = None

    def power_cut(self, name: str) -> None:
        """The machine restarts: records that were not synced are lost, as far as they were not written by chance."""
        self.seen["power cuts"] += 1
        process, disk = self.running[name], self.disks[name]
        if process is not None:
            self.kill(name)
        if not disk.known:
            disk.log = disk.log[: self.chance.randint(disk.synced, len(disk.log))]
            disk.rebooted = True

    def sync(self, name: str) -> None:
        self.disks[name].synced = len(self.disks[name].log)

    def _end(self, process: Process) -> None:
        process.alive = False
        for connection in self.connections:
            connection.broken |= process in (connection.standby, connection.leader)
        self.calls = [call for call in self.calls if call.process is not process or not call.done]
        if process.lease is not None and self.chance.random() < 0.5:  # the supervisor saw it end
            self.calls.append(Call(process, "revoke", (process.lease[0],), self.now, told=True))

    def restart(self, name: str) -> None:
        self.running[name] = self._start(name)

    def replace(self, process: Process, *, clean: bool) -> None:
        """A process executes itself."""
        process.disk.known = clean
        if clean:
            self.sync(process.disk.name)
        self._end(process)
        self.running[process.disk.name] = None

    # The leader

    def write(self, name: str) -> None:
        self._running(name).disk.log.append(self.new_record())

    def ship(self, i: int) -> None:
        connection = self.connections[i]
        connection.down.append(("record", connection.leader.disk.log[connection.sent]))
        connection.sent += 1

    def beat(self, i: int) -> None:
        connection = self.connections[i]
        leader = connection.leader
        assert leader.tenure is not None
        number, promise = len(leader.beats), leader.tenure.asks_promise(self.now)
        leader.beats[number] = (self.now, promise)
        connection.down.append(("beat", number, leader.member.term, promise))

    def keep_alive(self, name: str) -> None:
        process = self._running(name)
        assert process.lease is not None
        process.call("keep_alive", process.lease[0])

    def want(self, i: int) -> None:
        connection = self.connections[i]
        book = connection.leader.book
        assert book is not None
        book.want(connection.standby.member.me, len(connection.leader.disk.log))

    def withdraw(self, i: int) -> None:
        connection = self.connections[i]
        book = connection.leader.book
        assert book is not None
        book.withdraw(connection.standby.member.me)

    def take_in(self, name: str) -> None:
        process = self._running(name)
        assert process.book is not None
        process.propose(process.book.take_in())

    def let_go(self, name: str, other: str) -> None:
        process = self._running(name)
        assert process.book is not None
        process.propose(process.book.let_go({other}, min_isr=1))

    def hand_over(self, name: str) -> None:
        process = self._running(name)
        others = sorted(process.member.seen.isr - {name})
        process.ask_handover(self.chance.choice(others) if others else name)

    def offer(self, name: str) -> None:
        process = self._running(name)
        for connection in self.connections:
            if connection.leader is process and not connection.broken and connection.standby.member.me == process.retiring:
                connection.down.append(("handover", process.member.term, len(process.disk.log)))

    def retire(self, name: str) -> None:
        self._running(name).tell(Retired())

    def reply(self, name: str) -> None:
        """The leader answers all requests whose records are covered."""
        process = self._running(name)
        book, tenure = process.book, process.tenure
        assert book is not None
        assert tenure is not None
        covered = book.covered(len(process.disk.log))
        if process.member.state is not State.LEAD or (self.timed and not tenure.may_answer(self.now, book.required())):
            self.seen["answers held back"] += 1
            return
        epoch = process.member.term
        if self.timed and epoch < self.answered_epoch:
            raise Broken(f"C6: {name} answers in epoch {epoch}, after a leader of epoch {self.answered_epoch}")
        if epoch < self.etcd.state.epoch:
            self.seen["answers of deposed leaders"] += 1
        self.seen["answers"] += covered > process.answered
        self.answered_epoch = max(epoch, self.answered_epoch)
        self.answers.update(process.disk.log[:covered])
        process.answered = covered

    # Invariants

    def check(self) -> None:
        state = self.etcd.state
        for name, disk in self.disks.items():
            if disk.complete and disk.holes:
                raise Broken(f"C1: {name} says that it is complete while its files are replaced")
            if name in state.isr and not disk.rebooted and (disk.holes or not self.answers.issubset(disk.log)):
                raise Broken(f"C5: {name} is in the ISR and lacks records {sorted(self.answers.difference(disk.log))}")
        leader = self.running.get(state.leader)
        if leader is not None and leader.book is not None and leader.member.term == state.epoch:
            required = leader.book.required()
            if not state.isr <= required:
                raise Broken(f"C2: etcd's ISR is {sorted(state.isr)}, its leader requires {sorted(required)} only")
