"""The life of a cluster: one fault after the other under load, and after each a judgement: `python -m tests.trust.machines_life`.

Arguments: number of the life, how many of its faults, an empty folder, `namespaces` or `loopback`, and names of faults, if they
are to be others. Figures are printed as JSON on standard output, progress on standard error; a broken promise is written to the
file `failure` in the folder.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.harness.machines import NODES, SHARD, Machines, Node
from tests.harness.server_process import PROGRAM, ROOT, Answer, environment
from tests.trust.failover import compare
from tests.trust.kills import SETTINGS, check_folder, drain, make_copy, sleeping
from tests.trust.kills_clients import Gone
from tests.trust.kills_model import GROUPS
from tests.trust.machines_clients import ClusterClient, ClusterModel, Gate, new_clients
from tests.trust.machines_faults import WHOLE_S_MAX, Faults, Struck
from tests.trust.machines_probe import TOPIC, Probe
from tests.trust.model import Broken, Figures

FIRST = "leader_killed another_tail leader_alone planned standby_wiped leader_frozen".split()  # so that few cases see much
REST = (
    *["leader_killed"] * 9,
    *["partition"] * 3,
    *["leader_stopped"] * 2,
    *"node_frozen etcd_killed standby_wiped standby_killed supervisor_killed node_killed disk_full slow_network".split(),
    "rolling_restart",
)
LIFE = len(FIRST) + len(REST) + 1  # and a clock that is set, at the end: times are judged with less precision then
WITHOUT_ROOT = {
    "partition",
    "leader_alone",
    "slow_network",
    "another_tail",
    "disk_full",
}  # faults that cannot be made on loopback
GAP_S_MAX = 15  # without answers, beside the time for which none can be expected
EQUAL_S_MAX = 60
VERIFY_S_MAX = 60
START_S_MAX = 60
SEGMENTS = (16_384, 65_536, 1 << 20)


_HARMLESS = ("in spawn_main", "in write_bytes")  # a worker without its parent; aiohttp's client, whose connection has ended
_LATE = re.compile(r"event=restarting\n(?:(?!TurtleMQ listens|child_started).*\n)*?.*event=(?:attached|reconcile_begun).*")


def schedule(life: int) -> list[str]:
    """The faults of a life, in order.

    >>> len(schedule(3)), schedule(3)[0], schedule(3)[-1], schedule(3) == schedule(3)
    (30, 'leader_killed', 'clock_set', True)
    """
    rest = list(REST)
    random.Random(f"order {life}").shuffle(rest)
    return [*FIRST, *rest, "clock_set"]


class Life:
    """A cluster with its clients."""

    def __init__(self, number: int, folder: Path, namespaces: bool) -> None:
        self.number = number
        self.machines = Machines(folder, namespaces, min_isr=1 + number % 2)
        self.folder = self.machines.folder
        nodes = self.machines.nodes.values()
        self.model, self.seen = ClusterModel(), Figures()
        self.clients = new_clients(self.model, number, {node.name: node.address for node in nodes})
        self.probe = Probe({node.name: node.url for node in nodes}, self.model)
        self.gate, self._ended = Gate(), threading.Event()
        self.faults = Faults(self.machines, self.model, self.probe, self.gate, self.seen)
        self._checks = ProcessPoolExecutor(1, get_context("spawn"), os.nice, (10,))  # behind servers, whose times are measured
        self._check_under_way: Future[None] | None = None
        self._threads = [threading.Thread(target=client.labour, args=(self.gate, self._ended)) for client in self.clients]

    def lead(self, faults: Sequence[str]) -> Figures:
        """These faults, one after the other, and a judgement."""
        try:
            self._begin()
            for index, name in enumerate(faults):
                case = f"case {self.number * LIFE + index} ({name.replace('_', ' ')})"
                if name in WITHOUT_ROOT and not self.machines.namespaces:
                    self.seen["faults that need root"] += 1
                    print(f"{case}: left out, it needs network namespaces", file=sys.stderr, flush=True)
                    continue
                self._strike(case, name, index)
            self._finish()
            return self.seen
        finally:
            self._ended.set()
            self.probe.end()
            self._checks.shutdown(wait=False, cancel_futures=True)
            self.machines.close()
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()

    def _begin(self) -> None:
        self.machines.start()
        self.machines.until_whole(START_S_MAX)
        front = Front(self.clients[0])
        front.ok("PUT", "/v1/topics/t", SETTINGS | {"segment_bytes": SEGMENTS[self.number % len(SEGMENTS)], "beat": 1})
        front.ok("PUT", f"/v1/topics/{TOPIC}", {"beat": 1})
        for group in GROUPS:
            front.ok("PUT", f"/v1/topics/t/groups/{group}", {"start": "earliest"})
        for thread in self._threads:
            thread.start()
        self.probe.start()
        time.sleep(1)

    def _strike(self, case: str, name: str, index: int) -> None:
        self.faults.dice = random.Random(f"{self.number} {index}")
        begin = time.monotonic()
        try:
            struck: Struck = getattr(self.faults, name)()
            ended = time.monotonic()
            self._until_answered(ended)
            self.machines.until_whole(WHOLE_S_MAX)
        except TimeoutError as error:
            raise Broken(f"{case}: {error}; etcd knows {self.machines.keys()}") from error
        gap_s = self.probe.longest_gap_s(begin, time.monotonic())
        whole_s = time.monotonic() - ended
        if struck.measured:
            self.faults.measure(struck.measured, gap_s)
        if gap_s > GAP_S_MAX + struck.outage_s:
            raise Broken(f"{case}: {struck.text}: no answer for {gap_s:.1f} s")
        self._judge(case)
        self.seen["faults"] += 1
        told = f"{case}: {struck.text}: {gap_s:.2f} s without answers, all in sync {whole_s:.1f} s after"
        print(f"{told}, leader {self.machines.leader()}, {len(self.probe.answered):,} probes", file=sys.stderr, flush=True)

    def _until_answered(self, moment: float) -> None:
        end = time.monotonic() + WHOLE_S_MAX
        while self.probe.first_after(moment) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no answer within {WHOLE_S_MAX} s of the end of the fault")
            time.sleep(0.02)

    def _judge(self, case: str) -> None:
        """No promise was broken so far. In a quiet moment all copies are equal, by a comparison from outside, and one of them is
        sound; under load they are equal, by the product's own word."""
        with self.gate.closed(), self.probe.paused():
            self.model.verdict(case)
            self.until_equal(case)
            self._no_orphans(case)
            self._begin_check(self._standby(), case)
        self._verify(case)
        self._calm(case)

    def _standby(self) -> Node:
        leader = self.machines.elected()
        return self.faults.dice.choice([node for node in self.machines.nodes.values() if node.name != leader])

    def _begin_check(self, node: Node, case: str) -> None:
        """Check a copy of a node's folder while the life goes on; the end of the last check comes first. The node stands still
        meanwhile: messages come due although no client works, and a copy must be of one moment."""
        self._end_check()
        node.signal_all(signal.SIGSTOP)
        try:
            make_copy(node.data, self.folder / "copy")
        finally:
            node.signal_all(signal.SIGCONT)
        self._check_under_way = self._checks.submit(check_folder, self.folder / "copy", f"{case}, folder of {node.name}")

    def _end_check(self) -> None:
        if self._check_under_way is not None:
            self._check_under_way.result()
            self._check_under_way = None
            self.seen["checks"] += 1

    def _verify(self, case: str) -> None:
        """`POST /v1/cluster/shards/0/verify` to any node, while clients work: all copies are equal."""
        end = time.monotonic() + VERIFY_S_MAX
        while not are_equal(told := self.faults.send(self.faults.any_node(), "POST", f"cluster/shards/{SHARD}/verify"), case):
            if time.monotonic() > end:
                raise Broken(f"{case}: verify does not reach all copies within {VERIFY_S_MAX} s: {told}")
            time.sleep(0.1)
        self.seen["verifications"] += 1

    def _verify_by_command(self, case: str) -> None:
        """`turtlemq cluster verify 0`, as an operator runs it."""
        command = [*PROGRAM, "cluster", "verify", str(SHARD), "--url", self.faults.any_node().url]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=VERIFY_S_MAX)
        if done.returncode or done.stdout.count("equal") != len(NODES) - 1:
            raise Broken(f"{case}: cluster verify ended with {done.returncode}: {done.stdout}{done.stderr}")
        self.seen["verifications by command"] += 1

    def until_equal(self, case: str) -> None:
        """All folders are equal byte for byte, at some moment soon: just now the leader may move messages or rename files. Files
        that its worker process writes have no copies before they get their names."""
        end = time.monotonic() + EQUAL_S_MAX
        first, *others = (node.data for node in self.machines.nodes.values())
        while True:
            try:
                for other in others:
                    compare(first, other, unfinished=False)
            except (Broken, FileNotFoundError) as error:
                if time.monotonic() > end:
                    raise Broken(f"{case}: copies differ: {error}") from error
                time.sleep(0.05)
            else:
                self.seen["comparisons"] += 1
                return

    def _no_orphans(self, case: str) -> None:
        """A standby has no process besides its replica and the one that examines files for it: the worker of a leader that was
        deposed has ended."""
        leader = self.machines.elected()
        for node in self.machines.nodes.values():
            others = {pid: command for pid, command in node.processes().items() if pid not in (node.supervisor, node.replica)}
            left = {pid: command for pid, command in others.items() if "examine_process" not in command}
            if left and node.name != leader:
                raise Broken(f"{case}: {node.name} does not lead, and these processes are left: {left}")

    def _calm(self, case: str) -> None:
        """No node has logged a traceback."""
        for node in self.machines.nodes.values():
            text = node.log.read_text(errors="replace")
            for found in re.finditer("Traceback", text):
                after = text[found.start() : found.start() + 3_000]
                if not any(text in after[:400] for text in _HARMLESS):
                    raise Broken(f"{case}: log of {node.name}: {text[max(0, found.start() - 500) : found.start()]}{after}")
            if found_late := _LATE.search(text):
                raise Broken(f"{case}: {node.name} changes its files while it replaces itself: {found_late[0][-1_000:]}")

    def _finish(self) -> None:
        """Everything that was answered holds."""
        self._ended.set()
        self.probe.end()
        for thread in self._threads:
            thread.join()
        case = f"the end of life {self.number}"
        self.model.verdict(case)
        front = Front(self.clients[0])
        for client in self.clients:
            front.patiently(client.settle_doubts)
        for group in GROUPS:
            drain(front, self.model, group)
        self.model.asleep(sleeping(front, self.model))
        self.model.whole()
        self._probes_are_there(front)
        self.model.verdict(case)
        self.machines.until_whole(WHOLE_S_MAX)
        self.until_equal(case)
        self._end_check()
        self._verify_by_command(case)
        self.seen.update(self.model.figures())
        self.seen["answers in doubt"] += sum(client.doubts for client in self.clients)
        self.seen["probes answered"] += len(self.probe.answered)
        self.seen["reads of probes"] += self.probe.reads

    def _probes_are_there(self, front: Front) -> None:
        found: set[str] = set()
        cursor: str | None = ""
        while cursor is not None:
            page = front.ok("GET", f"/v1/topics/{TOPIC}/messages?limit=10000&cursor={cursor}")
            found |= {message["id"] for message in page["messages"]}
            cursor = page["cursor"]
        for _, _, id_ in self.probe.answered:
            if id_ not in found:
                self.model.fault("lost", f"probe {id_}")


def are_equal(told: dict[str, Any], case: str) -> bool:
    """Does an answer of `verify` call both copies equal? A copy that has just come back may not be reached yet.

    >>> equal, away = {"node": "b", "state": "equal"}, {"node": "c", "state": "not reached"}
    >>> are_equal({"state": "done", "copies": [equal, equal]}, ""), are_equal({"state": "done", "copies": [equal, away]}, "")
    (True, False)
    >>> are_equal({"state": "done", "copies": [equal, away | {"state": "differs"}]}, "case 7")
    Traceback (most recent call last):
    tests.trust.model.Broken: case 7: verify: [{'node': 'c', 'state': 'differs'}]
    """
    if differing := [copy for copy in told["copies"] if copy["state"] == "differs"]:
        raise Broken(f"{case}: verify: {differing}")
    return told["state"] == "done" and [copy["state"] for copy in told["copies"]] == ["equal"] * (len(NODES) - 1)


class Front:
    """Requests of the judge, to any node, until they are answered."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    def ok(self, method: str, path: str, value: Any = None) -> Any:
        topic, slash, rest = path.removeprefix("/v1/topics/").partition("/")
        return self.patiently(lambda: self._client.call(method, slash + rest, value, topic))

    def call(self, method: str, path: str) -> Answer:
        """For the text of a failure."""
        try:
            return Answer(200, {}, json.dumps(self.ok(method, path)).encode())
        except Broken as error:
            return Answer(500, {}, str(error).encode())

    def fetch(self, topic: str, group: str, **asked: Any) -> list[dict[str, Any]]:
        return list(self.ok("POST", f"/v1/topics/{topic}/groups/{group}/fetch", asked)["messages"])

    def patiently(self, request: Any) -> Any:
        end = time.monotonic() + WHOLE_S_MAX
        while True:
            try:
                return request()
            except Gone as error:
                if time.monotonic() > end:
                    raise Broken("no node answers the judge") from error
                time.sleep(0.1)


def main(number: int, faults: Sequence[str], folder: Path, namespaces: bool) -> int:
    life = Life(number, folder, namespaces)
    try:
        figures = life.lead(faults)
    except (Broken, TimeoutError) as error:
        (life.folder / "failure").write_text(str(error))
        for name in NODES:  # disks of nodes end with this process
            shutil.copytree(life.folder / name, life.folder / f"{name}.disk", ignore=shutil.ignore_patterns("filler"))
        return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    _number, _count, _place, _how, *_named = sys.argv[1:]
    sys.exit(main(int(_number), _named or schedule(int(_number))[: int(_count)], Path(_place), _how == "namespaces"))
