"""kill -9 of a real server that works for clients over HTTP and gRPC: under load, while it starts, in a seal, in a compaction.

Ten kills are the life of a data folder: the number of a case is its life and how many kills came before, and `--only` runs that
life up to it. After each kill a copy of the folder must pass the check of all invariants; after the last one a server must
deliver everything that was promised and not yet settled, and nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.harness.grpc_process import grpc_running
from tests.harness.server_process import PROGRAM, Answer, Server, environment
from tests.trust.kills_clients import FAR_MS, Client, all_work, new_clients
from tests.trust.kills_model import GROUPS, Model, body_in, now_ms
from tests.trust.kills_streams import STREAM_FIGURES, StreamClient, new_streams
from tests.trust.model import Broken, Figures, Part
from turtlemq.engine import Engine

LIFE = 10  # kills of one data folder
KINDS = "load seal start compaction start beat seal start compaction load".split()  # of the kills of a life
SETTINGS = {
    "compact_live_ratio": 0.5,
    "max_attempts": 100_000,
    "backoff": {"base": 0.02, "factor": 1.0, "max": 0.05},
}
ANY_TIME = {"TURTLEMQ_GRPC_PAST_GRACE_MS": "-1"}  # a schedule that is sent again after a kill may be due long ago
SEGMENTS = (4_096, 65_536)  # the smallest there is: rolled, sealed and compacted all the time; larger: a seal takes a moment
START_S = 0.08  # about as long as opening takes
SEAL_S = 3.0  # the worker process must start first
DRAIN_S = 60
COUNTERS = {"segments sealed": "turtlemq_seals_total", "sleepers moved": "turtlemq_compaction_moved_total"}


def run(cases: range, folder: Path) -> Figures:
    """Every life to which these cases belong, each from its beginning."""
    seen = Figures()
    for number in range(cases.start // LIFE, -(-cases.stop // LIFE)):
        place = folder / str(number)
        place.mkdir()
        seen.update(Life(number, place).lead(min(LIFE, cases.stop - number * LIFE)))
        shutil.rmtree(place, ignore_errors=True)
    return seen


class Life:
    """A data folder and its clients, from one kill to the next."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder, self.data = number, folder, folder / "data"
        self.dice, self.model = random.Random(number), Model()
        self.clients, self.streams = new_clients(self.model, number), new_streams(self.model, number)
        self.seen = Figures()

    def lead(self, kills: int) -> Figures:
        """So many kills, and a judgement."""
        for kill in range(kills):
            case = f"case {self.number * LIFE + kill} ({KINDS[kill]})"
            if KINDS[kill] == "start":
                self.seen["in a start"] += killed_at_start(self.data, self.dice.uniform(0, START_S))
            else:
                self._work_and_die(KINDS[kill], first=kill == 0)
            self.seen["kills"] += 1
            calm(self.folder, case)
            check_copy(self.data, self.folder / "copy", case)
            self.model.verdict(case)
        after_all(self.data, self.model, self.clients, was_clean=False, streams=self.streams)
        self.model.verdict(f"the end of case {self.number * LIFE + kills - 1}")
        self.seen.update(self.model.figures())
        for stream in self.streams:
            self.seen.update(stream.seen)
        return self.seen

    def _work_and_die(self, kind: str, first: bool) -> None:
        whole = self.dice.random() < 0.5  # the worker process dies too, or finishes its job
        with grpc_running(self.data, group=True, **ANY_TIME) as (server, port):
            if first:
                prepared(server, SEGMENTS[self.number % len(SEGMENTS)])
            # with a short beat_ms there is a checkpoint every moment, with a long one the journals must tell all
            server.ok("PUT", "/v1/topics/t", {"beat": 0.05 if kind == "beat" else 5})

            def end() -> None:
                kill = partial(os.killpg, server.process.pid, signal.SIGKILL) if whole else server.process.kill
                if kind == "beat":
                    wait_for_seal(server)
                time.sleep(self.dice.uniform(0.05, 0.6))
                self._count(server)
                if kind == "seal":
                    self.seen["in a seal"] += killed_in_seal(self.data, kill, self.dice.choice([0, 0.002, 0.01]))
                elif kind == "compaction":
                    self.seen["in a compaction"] += killed_in_compaction(server, kill, self.dice.uniform(0, 0.02))
                else:
                    kill()
                server.process.wait(10)

            all_work(self.clients, server, end, [partial(stream.work, port) for stream in self.streams])

    def _count(self, server: Server) -> None:
        text = server.call("GET", "/metrics").data.decode()
        for name, metric in COUNTERS.items():
            self.seen[name] += counted(text, metric)


def counted(text: str, metric: str) -> int:
    """A counter of all topics.

    >>> counted('seals_total{topic="a"} 2.0\\nseals_total{topic="b"} 3.0', "seals_total")
    5
    """
    return sum(int(float(value)) for value in re.findall(rf"^{metric}\S* (\S+)", text, re.MULTILINE))


def wait_for_seal(server: Server) -> None:
    """Until a segment was sealed and taken over: most kills come before the worker process has done its first."""
    end = time.monotonic() + DRAIN_S
    while not counted(server.call("GET", "/metrics").data.decode(), COUNTERS["segments sealed"]):
        if time.monotonic() > end:
            raise Broken("nothing was ever sealed")
        time.sleep(0.05)


def prepared(server: Server, segment_bytes: int = SEGMENTS[0]) -> None:
    """The topic and its groups."""
    server.ok("PUT", "/v1/topics/t", SETTINGS | {"segment_bytes": segment_bytes})
    for group in GROUPS:
        server.ok("PUT", f"/v1/topics/t/groups/{group}", {"start": "earliest"})


def killed_at_start(data: Path, after_s: float) -> bool:
    """Start a server and kill it so long after it began to open its files. Had it not finished?"""
    log = data.parent / "server.log"
    before = log.stat().st_size
    with log.open("ab") as errors:
        command = [*PROGRAM, "serve", "--data", str(data), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # it listens at once, and opens its files then
        time.sleep(after_s)
        process.kill()
    return "event=ready" not in log.read_text()[before:]


def killed_in_seal(data: Path, kill: Callable[[], None], after_s: float) -> bool:
    """Kill it as soon as there is an unfinished segment, or a moment later: when it is renamed. Was there one?"""
    end, folder = time.monotonic() + SEAL_S, data / "topic" / "t"
    while time.monotonic() < end:
        found = any(entry.name.startswith("delay_") and entry.name.endswith(".tmp") for entry in os.scandir(folder))
        if found:
            time.sleep(after_s)
            kill()
            return True
        time.sleep(0.0005)
    kill()
    return False


def killed_in_compaction(server: Server, kill: Callable[[], None], after_s: float) -> bool:
    """Ask for a compaction, and kill the server so long after. Was it still at it?"""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/v1/topics/t/compact")
    time.sleep(after_s)
    answered, _, _ = select.select([connection.sock], [], [], 0)
    kill()
    connection.close()
    return not answered


def calm(folder: Path, case: str) -> None:
    """Nothing went wrong in the server, as far as its log tells. A worker process that was about to begin when its server was
    killed has no parent to get its task from, and says so: that is all right."""
    text = (folder / "server.log").read_text()
    for found in re.finditer("Traceback", text):
        before, after = text[: found.start()], text[found.start() :]
        if "in spawn_main" not in after[:300]:
            raise Broken(f"{case}: {before[-500:]}{after[:1500]}")


def check_copy(data: Path, copy: Path, case: str) -> None:
    """Every invariant of the folder as the killed process left it; the server itself must repair the original."""
    make_copy(data, copy)
    check_folder(copy, case)


def make_copy(data: Path, copy: Path) -> None:
    """Replace a folder by a copy of another one."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy, copy_function=_copied)


def check_folder(folder: Path, case: str) -> None:
    """Open a folder without a server, and check every invariant."""
    engine = Engine.open(folder)
    problems = [*engine.check(), *(str(damage) for topic in engine.topics.values() for damage in topic.view.damage())]
    engine.close()
    if problems:
        raise Broken(f"{case}: {problems[:5]}")


def _copied(source: str, target: str) -> None:
    """A file, if it is still there: the worker of a killed server clears up after itself."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(source, target)


def after_all(data: Path, model: Model, clients: list[Client], was_clean: bool, streams: Iterable[StreamClient] = ()) -> None:
    """The last start: every answered request holds, and unanswered ones are whole."""
    with grpc_running(data, **ANY_TIME) as (server, port):
        if server.ok("GET", "/readyz")["was_clean"] != was_clean:
            raise Broken(f"was_clean is not {was_clean}")
        for client in clients:
            client.come_back(server.port)
            client.hang_up()
        for stream in streams:
            stream.come_back(port)
        for group in GROUPS:
            drain(server, model, group)
        model.asleep(sleeping(server, model))
        model.whole()
        if server.stop() != 0:
            raise Broken("it did not end well")
    calm(data.parent, "the last start")
    check_copy(data, data.parent / "copy", "after a proper stop")


class Asked(Protocol):
    """A server, or a cluster, that answers requests."""

    def ok(self, method: str, path: str, value: Any = None) -> Any: ...
    def fetch(self, topic: str, group: str, **asked: Any) -> list[dict[str, Any]]: ...
    def call(self, method: str, path: str) -> Answer: ...


def drain(server: Asked, model: Model, group: str) -> None:
    """Everything that must come, comes; and nothing else."""
    end = time.monotonic() + DRAIN_S
    while True:
        asked_s = time.monotonic()
        found = server.fetch("t", group, max=1_000, wait=0.3, ttr=30)
        for message in found:
            model.delivered(group, message, asked_s, now_ms())
        ids = [message["id"] for message in found]
        if ids:
            model.settled(group, ids, server.ok("POST", f"/v1/topics/t/groups/{group}/ack", ids))
        elif not (missing := sorted(model.missing(group))):
            return
        elif time.monotonic() > end:
            for id_ in missing:
                model.fault(
                    "lost", f"{id_} has never come to {group}: {server.call('GET', f'/v1/topics/t/messages/{id_}').data!r}"
                )
            return


def sleeping(server: Asked, model: Model) -> dict[str, int]:
    """Messages that sleep far in the future, and until when."""
    out: dict[str, int] = {}
    cursor: str | None = ""
    while cursor is not None:
        page = server.ok("GET", f"/v1/topics/t/messages?limit=10000&from_ms={now_ms() + FAR_MS}&cursor={cursor}")
        for message in page["messages"]:
            out[message["id"]] = message["due_ms"]
            body = body_in(message)
            model.sent[body["batch"]].seen.add(body["i"])
        cursor = page["cursor"]
    return out


PART = Part(
    name="kills",
    unit="kills",
    about=(
        "kill -9 of the real server over HTTP and gRPC: under load, while it starts, in a seal and in a compaction. "
        "What was answered holds, what was not is whole."
    ),
    run=run,
    quick=20,
    full=500,
    chunk=LIFE,
    must=("kills", "messages accepted", "deliveries", "acknowledged", "cancelled", *STREAM_FIGURES),
    floors=dict.fromkeys(("in a seal", "in a start", "in a compaction"), 25) | {"segments sealed": 100, "sleepers moved": 1_000},
)
