"""Faults of a cluster: processes that are killed or stopped, networks that are cut or slow, disks, clocks, and planned work.

A fault is a method of `Faults`, which has ended it, as far as it can be ended, when it returns. The seed decides everything but
the time that processes take, and which node leads.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.harness.machines import ETCD_HOSTS, NODES, SHARD, Machines, Node, signal_to, until
from tests.harness.network import DRIVER
from tests.trust.machines_clients import ClusterModel, Gate
from tests.trust.machines_probe import Probe
from tests.trust.model import Broken, Figures

WHOLE_S_MAX = 90  # until all copies are in sync after the end of a fault
LONG_S = 5.0  # longer than a lease lasts, or than the leader waits for a standby
CHANGE_S_MAX = 15  # until another node leads
REST_S = 4  # after the last request: messages that are due were moved, leases have ended, and the checkpoint is written
SEAL_S = 30  # until a leader has begun to seal
_HANDOVERS = 3


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has ended."""

    text: str
    outage_s: float = 0.0  # no answers can be expected for so long
    measured: str = ""  # the kind of failover that was measured, if the fault is of one kind


class Faults:
    """The faults of one life of a cluster."""

    def __init__(self, machines: Machines, model: ClusterModel, probe: Probe, gate: Gate, seen: Figures) -> None:
        self.machines, self.model, self.probe, self.gate, self.seen = machines, model, probe, gate, seen
        self.dice = random.Random()  # for the next fault

    # helpers

    @property
    def nodes(self) -> dict[str, Node]:
        return self.machines.nodes

    def _leader(self) -> Node:
        return self.nodes[self.machines.until_whole(WHOLE_S_MAX)]

    def _standbys(self, leader: Node) -> list[Node]:
        others = [node for node in self.nodes.values() if node is not leader]
        self.dice.shuffle(others)
        return others

    def _kill_replica(self, node: Node) -> None:
        until(lambda: node.replica is not None, f"{node.name} has a process for its shard", 30)
        signal_to(node.replica or 0, signal.SIGKILL)

    def any_node(self) -> Node:
        return self.dice.choice(list(self.nodes.values()))

    def _wait(self, leader: Node, seconds: float | None) -> str:
        """Some time; None: until another node leads, and has answered for a while, so that the old leader knows less. Returns its
        description."""
        if seconds is not None:
            time.sleep(seconds)
            return f"for {seconds:g} s"
        until(lambda: self.machines.leader() not in (None, leader.name), f"another node than {leader.name} leads", CHANGE_S_MAX)
        self._answers()
        time.sleep(self.dice.uniform(0, 1))
        return "until another node led"

    def _answers(self) -> None:
        """Until a put that is sent now is answered."""
        now = time.monotonic()
        until(lambda: self.probe.first_after(now) is not None, "an answer", 60)

    # processes

    def leader_killed(self) -> Struck:
        """kill -9 of the leader's process; sometimes of a standby's as well, or of the next leader's."""
        leader = self._leader()
        also = self.dice.choice(["", "", "", "", "", "a standby", "the next leader"])
        if also == "a standby":
            self._kill_replica(self._standbys(leader)[0])
        self._kill_replica(leader)
        self.seen["leader kills"] += 1
        if also == "the next leader":
            until(lambda: self.machines.leader() not in (None, leader.name), "the next leader", 30)
            time.sleep(self.dice.uniform(0, 0.5))
            self._kill_replica(self.nodes[self.machines.leader() or leader.name])
            self.seen["leader kills"] += 1
        self._answers()
        return Struck(f"{leader.name}{' and ' * bool(also)}{also}", outage_s=10 * bool(also), measured="" if also else "killed")

    def standby_killed(self) -> Struck:
        """kill -9 of the process of a standby, or of both."""
        some = self._standbys(self._leader())[: self.dice.choice([1, 1, 2])]
        for node in some:
            self._kill_replica(node)
        self.seen["standby kills"] += len(some)
        return Struck(" ".join(node.name for node in some))

    def supervisor_killed(self) -> Struck:
        """kill -9 of a supervisor: its child ends by itself."""
        leader = self._leader()
        node = self.dice.choice([leader, self._standbys(leader)[0]])
        signal_to(node.supervisor, signal.SIGKILL)
        node.until_ended()
        self.seen["supervisor kills"] += 1
        self._answers()
        node.start()
        return Struck(f"{node.name}, {'leader' if node is leader else 'standby'}")

    def node_killed(self) -> Struck:
        """All processes of a machine at once."""
        leader = self._leader()
        node = self.dice.choice([leader, leader, self._standbys(leader)[0]])
        node.kill_all()
        self.seen["node kills"] += 1
        if self.dice.random() < 0.7:
            self._answers()
        time.sleep(self.dice.choice([0, 0, 3]))
        node.start()
        self._answers()
        return Struck(node.name, measured="lost" if node is leader else "")

    def leader_stopped(self) -> Struck:
        """SIGSTOP of the leader's process alone: its supervisor kills it, or it goes on."""
        leader, seconds = self._leader(), self.dice.choice([0.5, 1.5, None])
        pid = leader.replica
        assert pid is not None
        signal_to(pid, signal.SIGSTOP)
        span = self._wait(leader, seconds)
        signal_to(pid, signal.SIGCONT)
        self.seen["stops"] += 1
        return Struck(f"{leader.name} {span}", measured="" if seconds else "lost")

    def leader_frozen(self) -> Struck:
        """SIGSTOP of all processes of the leader's machine, and SIGCONT when another one leads. Requests wait meanwhile."""
        return self._frozen(self._leader(), None)

    def node_frozen(self) -> Struck:
        """SIGSTOP of all processes of a machine, for some time."""
        leader = self._leader()
        node = self.dice.choice([leader, *self._standbys(leader)])
        return self._frozen(node, self.dice.choice([1, 2.5, LONG_S]))

    def _frozen(self, node: Node, seconds: float | None) -> Struck:
        node.signal_all(signal.SIGSTOP)
        span = self._wait(node, seconds)
        node.signal_all(signal.SIGCONT)
        self.seen["stops"] += 1
        return Struck(f"{node.name} {span}", measured="" if seconds else "lost")

    # the network

    def partition(self) -> Struck:
        """A cut between some hosts, for some time."""
        leader, seconds = self._leader(), self.dice.choice([1, 3, LONG_S])
        one, other = (node.name for node in self._standbys(leader))
        name = self.dice.choice(sorted(self._cuts(leader.name, one, other)))
        outage_s = seconds if name in ("everything at random", "both standbys are cut off") else 0
        is_lost = name in ("leader is cut off", "leader sees clients only") and seconds == LONG_S
        self._cuts(leader.name, one, other)[name]()
        span = self._wait(leader, None if is_lost else seconds)
        self.machines.network.heal()
        self.seen["partitions"] += 1
        self.seen[f"tried: cut: {name}"] += 1
        return Struck(f"{name} ({leader.name}) {span}", outage_s, "lost" if is_lost else "")

    def leader_alone(self) -> Struck:
        """Only readers reach the leader: it has nothing new of its own that could not be answered, and must not tell the old.
        Its worker process is stopped: it does not end by itself when the leader is deposed, and must be killed."""
        leader = self._leader()
        self.send(leader, "PUT", "topics/sealed", {"segment_bytes": 4_096})
        for _ in range(5):  # a batch is in one segment
            self.send(leader, "POST", "topics/sealed/messages", {"messages": [{"body": n, "delay": 3_600} for n in range(100)]})
        until(lambda: bool(leader.workers), "a segment is sealed", SEAL_S)
        with self.gate.closed(), self.probe.puts_elsewhere(leader.name):
            time.sleep(REST_S)
            workers = leader.workers
            for pid in workers:
                signal_to(pid, signal.SIGSTOP)
            self.machines.network.cut_between([leader.name], {*NODES, *ETCD_HOSTS} - {leader.name})
            span = self._wait(leader, None)
        self.machines.network.heal()
        if self.machines.leader() == leader.name:
            for pid in workers:
                signal_to(pid, signal.SIGCONT)
        self.seen["partitions"] += 1
        self.seen["workers of deposed leaders"] += len(workers)
        return Struck(f"{leader.name} {span}", measured="lost")

    def _cuts(self, leader: str, one: str, other: str) -> dict[str, Callable[[], None]]:
        net = self.machines.network
        others = (one, other)
        everything = list(itertools.permutations((*NODES, *ETCD_HOSTS), 2))
        return {
            "leader is cut off": lambda: net.cut_between([leader], (*others, *ETCD_HOSTS, DRIVER)),
            "leader sees clients only": lambda: net.cut_between([leader], (*others, *ETCD_HOSTS)),
            "leader without standbys": lambda: net.cut_between([leader], others),
            "leader without one standby": lambda: net.cut_between([leader], [one]),
            "leader without etcd": lambda: net.cut_between([leader], ETCD_HOSTS),
            "leader is heard by no standby": lambda: net.cut((leader, one), (leader, other)),
            "leader hears no standby": lambda: net.cut((one, leader), (other, leader)),
            "leader is not heard by etcd": lambda: net.cut(*((leader, host) for host in ETCD_HOSTS)),
            "leader does not hear etcd": lambda: net.cut(*((host, leader) for host in ETCD_HOSTS)),
            "a standby is cut off": lambda: net.cut_between([one], (leader, other, *ETCD_HOSTS)),
            "both standbys are cut off": lambda: net.cut_between(others, (*others, leader, *ETCD_HOSTS)),
            "a standby without etcd": lambda: net.cut_between([one], ETCD_HOSTS),
            "standbys without each other": lambda: net.cut_between([one], [other]),
            "one pair in one direction": lambda: net.cut(self.dice.choice(everything)),
            "everything at random": lambda: net.cut(*(pair for pair in everything if self.dice.random() < 0.3)),
            "an etcd member is cut off": lambda: net.cut_between([self.dice.choice(ETCD_HOSTS)], (*NODES, *ETCD_HOSTS)),
        }

    def slow_network(self) -> Struck:
        """Packets between all hosts are late, and some are lost."""
        leader = self._leader()
        delay_ms, loss = self.dice.choice([5, 30, 80]), self.dice.choice([0, 0, 0.02])
        self.machines.network.slow((*NODES, *ETCD_HOSTS), delay_ms, delay_ms, loss)
        time.sleep(4)
        kill = self.dice.random() < 0.5
        if kill:
            self._kill_replica(self.nodes[self.machines.leader() or leader.name])
            self.seen["leader kills"] += 1
            self._answers()
        self.machines.network.fast()
        self.seen["slow networks"] += 1
        return Struck(f"{delay_ms} to {2 * delay_ms} ms, {loss:.0%} lost{', leader killed' * kill}", outage_s=10)

    def another_tail(self) -> Struck:
        """A leader that only clients reach writes on without an answer; it is killed, and comes back as a standby."""
        leader = self._leader()
        self.machines.network.cut_between([leader.name], {*NODES, *ETCD_HOSTS} - {leader.name})
        time.sleep(self.dice.uniform(0.2, 2))
        leader.kill_all()
        self.machines.network.heal()
        self._answers()
        leader.start()
        self.seen["leaders with another tail"] += 1
        return Struck(leader.name)

    # etcd

    def etcd_killed(self) -> Struck:
        """One member of etcd, or its leader, or all of them, are killed or stopped for some seconds."""
        etcd, how = self.machines.etcd, self.dice.choice(["one", "leader", "leader", "all", "all", "leader stopped"])
        self._leader()
        chief = etcd.leader() or ETCD_HOSTS[0]
        hosts = {"one": [self.dice.choice(ETCD_HOSTS)], "all": list(ETCD_HOSTS)}.get(how, [chief])
        seconds = self.dice.choice([1.0, 4.0])
        for host in hosts:
            if how == "leader stopped":
                etcd.signal(host, signal.SIGSTOP)
            else:
                etcd.kill(host)
            self.seen["etcd kills"] += 1
        time.sleep(seconds)
        if how == "leader stopped":
            etcd.signal(chief, signal.SIGCONT)
        else:
            etcd.start(*hosts)
        etcd.until_healthy()
        return Struck(f"{how} for {seconds:g} s")

    # disks and clocks

    def standby_wiped(self) -> Struck:
        """A standby is killed or stopped, and its disk is lost; sometimes the leader is killed while it is copied again.
        After a kill the new node waits for the lease of the old one: eight seconds."""
        leader = self._leader()
        node = self._standbys(leader)[0]
        killed = self.dice.random() < 0.3
        (node.kill_all if killed else node.stop)()
        node.wipe()
        time.sleep(self.dice.choice([0, 0.5]))
        node.start()
        self.seen["wiped standbys"] += 1
        kill = self.dice.random() < 0.4
        if kill:
            until(lambda: node.replica is not None, f"{node.name} has a process for its shard", 30)
            time.sleep(self.dice.uniform(0.3, 1))
            self._kill_replica(leader)
            self.seen["leader kills"] += 1
        self._answers()
        return Struck(f"{node.name}{' was killed' * killed}{', leader killed' * kill}", outage_s=10 * kill)

    def disk_full(self) -> Struck:
        """No room on the disk of a standby, or of the leader, for some seconds."""
        leader = self._leader()
        node = self.dice.choice([leader, *self._standbys(leader)])
        filler = node.fill(self.dice.choice([0, 4_096, 200_000]))
        time.sleep(4)
        filler.unlink()
        self.seen["full disks"] += 1
        return Struck(f"{node.name}, {'leader' if node is leader else 'standby'}", outage_s=5 if node is leader else 0)

    def clock_set(self) -> Struck:
        """A clock of a node is set, then the leader is killed."""
        leader = self._leader()
        node = self.dice.choice([leader, *self._standbys(leader)])
        ahead_s = self.dice.choice([-20, -0.3, 0.3, 20])
        slack_ms = round(abs(ahead_s) * 1000) + 500  # from now on: the leader's clock decides when a message is due
        self.model.slack_ms = max(self.model.slack_ms, slack_ms)
        node.set_clock(ahead_s)
        time.sleep(3)
        self._kill_replica(leader)
        self.seen["leader kills"] += 1
        self.seen["clocks set"] += 1
        self._answers()
        node.set_clock(0)
        return Struck(f"{node.name}{' (leader)' * (node is leader)} by {ahead_s:g} s", outage_s=10)

    # planned work

    def planned(self) -> Struck:
        """Handovers, or a node that is drained, as an operator asks for them."""
        return self.dice.choice([self._handovers, self._drain])()

    def _handovers(self) -> Struck:
        """Some handovers, one after the other; each is measured."""
        for _ in range(_HANDOVERS):
            leader = self._leader()
            target = self._standbys(leader)[0]
            begin = time.monotonic()
            self._post(self.any_node(), f"shards/{SHARD}/handover", {"to": target.name})
            self._until_leads(target)
            self._answers()
            self.seen["handovers"] += 1
            self.measure("handover", self.probe.longest_gap_s(begin, time.monotonic()))
        return Struck(f"{_HANDOVERS} handovers")

    def _until_leads(self, node: Node) -> None:
        until(lambda: self.machines.leader() == node.name, f"{node.name} leads after a handover", 30)

    def _drain(self) -> Struck:
        """The leader is drained: another node leads, and goes on to lead when the drain is over."""
        leader = self._leader()
        begin = time.monotonic()
        self._post(leader, f"nodes/{leader.name}/drain")
        until(lambda: self.machines.leader() not in (None, leader.name), f"{leader.name} hands over when it is drained", 30)
        self._answers()
        self.measure("handover", self.probe.longest_gap_s(begin, time.monotonic()))
        self._post(self._standbys(leader)[0], f"nodes/{leader.name}/drain", method="DELETE")
        self.seen["drains"] += 1
        return Struck(f"{leader.name} is drained")

    def rolling_restart(self) -> Struck:
        """Every node is stopped properly and started again, the leader last."""
        leader = self._leader()
        for node in (*self._standbys(leader), leader):
            begin = time.monotonic()
            node.stop()
            if node is leader:
                self._answers()
                self.measure("restart of the leader", self.probe.longest_gap_s(begin, time.monotonic()))
            node.start()
            self.machines.until_whole(WHOLE_S_MAX)
        self.seen["rolling restarts"] += 1
        return Struck(f"leader {leader.name} last")

    def measure(self, kind: str, seconds: float) -> None:
        """Note a time without answers, for the sum at the end."""
        self.seen[f"tried: {kind}: {round(seconds * 1000)}"] += 1

    def _post(self, node: Node, path: str, value: object = None, method: str = "POST") -> None:
        self.send(node, method, f"cluster/{path}", value)

    def send(self, node: Node, method: str, path: str, value: object = None) -> Any:
        """A request to a node, which must be carried out. Returns the answer."""
        data = json.dumps(value).encode() if value is not None else None
        request = urllib.request.Request(f"{node.url}/v1/{path}", data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise Broken(f"{method} {path} to {node.name}: {error.code} {error.read()!r}") from error
