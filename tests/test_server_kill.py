"""A real server is killed again and again in the middle of everything, and stopped under load. What it had answered must hold.

Clients put, cancel, reschedule, fetch, ack and nack over HTTP, and write down what they asked and what they heard. A request that
was not answered may have happened or not, but as a whole. `TURTLEMQ_KILLS=500` kills more often.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, run, running

KILLS = int(os.environ.get("TURTLEMQ_KILLS", "8"))
LIFE = 8  # kills of one data folder
CLIENTS = 4
GROUPS = ("a", "b")
FAR_S = 3_600.0
FAR_MS = 1_000_000  # what is due later than this will not come during the test
SETTINGS = {
    "segment_bytes": 4_096,  # the smallest there is: segments are rolled, sealed and compacted all the time
    "compact_live_ratio": 0.1,
    "max_attempts": 100_000,
    "backoff": {"base": 0.02, "factor": 1.0, "max": 0.05},
}


class Gone(Exception):
    """The server is: nobody knows what became of this request."""


class Violation(AssertionError):
    """The server has broken its word."""


@dataclass
class Note:
    """What one client knows about a message of its own."""

    dues: set[int] = field(default_factory=set)  # possible due times; empty: some time from `earliest` on
    earliest_ms: int = 0
    far: bool = False  # it sleeps for good, as far as is known
    cancelled: str = ""  # "", "maybe" or "yes"


@dataclass
class Sent:
    """A batch that a client has sent."""

    size: int
    earliest_ms: int  # no message of it may be due before
    answered: bool = False
    seen: set[int] = field(default_factory=set)  # which of its messages came to anybody, or sleep


@dataclass
class Model:
    """What was answered. All methods under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    notes: dict[str, Note] = field(default_factory=dict)
    acked: dict[str, dict[str, float]] = field(default_factory=lambda: {group: {} for group in GROUPS})
    maybe_acked: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})
    sent: dict[int, Sent] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    halves: int = 0  # answers of which a part came

    def delivered(self, group: str, message: dict[str, Any], asked_s: float, now_ms: int) -> None:
        """A fetch that was sent at `asked_s` brought this."""
        id_, due_ms = message["id"], message["due_ms"]
        settled_s = self.acked[group].get(id_)
        if settled_s is not None and settled_s < asked_s:
            raise Violation(f"{id_} was acknowledged, and came again to {group}: {message}")
        if now_ms < due_ms:
            raise Violation(f"{id_} came {due_ms - now_ms} ms early")
        batch = self.sent[message["body"]["batch"]]
        batch.seen.add(message["body"]["i"])
        note = self.notes.setdefault(id_, Note(earliest_ms=batch.earliest_ms))  # it may come before its sender has its answer
        if note.cancelled == "yes":
            raise Violation(f"{id_} was cancelled, and came")
        note.cancelled = ""  # it was not
        if note.dues and due_ms not in note.dues and message["attempt"] == 1:
            raise Violation(f"{id_} is due at {due_ms}, not at any of {note.dues}")
        if due_ms < note.earliest_ms:
            raise Violation(f"{id_} is due {note.earliest_ms - due_ms} ms too early")
        note.far = False

    def settled(self, group: str, acks: list[str], answer: dict[str, Any]) -> None:
        """An ack was answered."""
        good = [id_ for id_ in acks if not id_.startswith("-") and id_ not in answer["unknown"]]
        if answer["acked"] != len(good):
            raise Violation(f"{len(good)} were acknowledged, and {answer['acked']} counted")
        for id_ in good:
            if id_ in self.acked[group]:
                raise Violation(f"{id_} was acknowledged twice in {group}")
            self.acked[group][id_] = time.monotonic()
            self.maybe_acked[group].discard(id_)

    def lost(self, group: str) -> set[str]:
        """What has not come to a group, and must."""
        return {
            id_
            for id_, note in self.notes.items()
            if not note.far and not note.cancelled and id_ not in self.acked[group] and id_ not in self.maybe_acked[group]
        }


class Client:
    """One connection, one request at a time. Its messages are its own: no other client cancels or moves them."""

    def __init__(self, model: Model, name: str, seed: int) -> None:
        self.model, self.name, self.dice = model, name, random.Random(seed)
        self.mine: list[str] = []  # messages that sleep far in the future
        self.unsure: list[Callable[[], None]] = []  # what to look at after the next start
        self.count = 0
        self.port = 0
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, value: Any = None, topic: str = "t") -> Any:
        """The answer; `Gone` if there was none, None if there is no such topic."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            body = None if value is None else json.dumps(value)
            self._connection.request(method, f"/v1/topics/{topic}{path}", body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.hang_up()
            if isinstance(error, http.client.IncompleteRead):
                self.model.halves += 1
            raise Gone from error
        if response.status == 503:
            raise Gone
        with self.model.lock:
            self.model.answers[f"{method} {path.split('/')[-1] if method == 'POST' else ''}"] += 1
        if response.status == 404 and topic != "t":
            return None
        if response.status not in (200, 201):
            raise Violation(f"{method} {path}: {response.status} {data!r}")
        return json.loads(data)

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def work(self, port: int) -> None:
        """Do this and that until nobody answers."""
        self.port = port
        self.hang_up()
        deeds = [
            self.put,
            self.put,
            self.put,
            self.consume,
            self.consume,
            self.consume,
            self.cancel,
            self.move,
            self.compact,
            self.drop,
        ]
        with contextlib.suppress(Gone):
            for look in self.unsure:
                look()
            self.unsure.clear()
            while True:
                self.dice.choice(deeds)()

    def put(self) -> None:
        self.count += 1
        batch, n = int(self.name) * 1_000_000 + self.count, self.dice.choice([1, 1, 3, 20, 60])
        delay = self.dice.choice([0.0, 0.0, 0.02, 0.3, FAR_S])
        ids = [f"{batch}-{i}" for i in range(n)] if self.dice.random() < 0.6 else [None] * n
        messages = [{"body": {"batch": batch, "i": i, "x": "x" * self.dice.randrange(150)}, "delay": delay} for i in range(n)]
        for message, id_ in zip(messages, ids, strict=True):
            message.update({} if id_ is None else {"id": id_})
        earliest = time.time_ns() // 1_000_000 + round(delay * 1000)
        with self.model.lock:
            sent = self.model.sent[batch] = Sent(n, earliest)
        try:
            answer = self.call("POST", "/messages", {"messages": messages})
        except Gone:
            if ids[0] is not None:
                self.unsure.append(lambda: self._again(batch, messages, sent))
            raise
        if (answer["created"], answer["duplicates"]) != (n, 0):
            raise Violation(f"new messages: {answer}")
        self._accepted(answer["ids"], sent, delay)

    def _again(self, batch: int, messages: list[dict[str, Any]], sent: Sent) -> None:
        """The same batch once more: it was stored whole, or not at all."""
        answer = self.call("POST", "/messages", {"messages": messages})
        if sorted((answer["created"], answer["duplicates"])) != [0, len(messages)]:
            raise Violation(f"half of batch {batch} was stored: {answer}")
        self._accepted(answer["ids"], sent, messages[0]["delay"])

    def _accepted(self, ids: list[str], sent: Sent, delay: float) -> None:
        far = delay == FAR_S
        with self.model.lock:
            sent.answered = True
            for id_ in ids:
                self.model.notes.setdefault(id_, Note(earliest_ms=sent.earliest_ms, far=far))
        if far:
            self.mine += ids

    def _some_of_mine(self, most: int) -> list[str]:
        some = self.dice.sample(self.mine, min(len(self.mine), self.dice.randint(1, most)))
        self.mine = [id_ for id_ in self.mine if id_ not in some]
        return some

    def cancel(self) -> None:
        ids = self._some_of_mine(5)
        if not ids:
            return
        with self.model.lock:
            for id_ in ids:
                self.model.notes[id_].cancelled = "maybe"
        try:
            if len(ids) == 1:
                assert self.call("DELETE", f"/messages/{ids[0]}") == {"outcome": "cancelled"}
            else:
                answer = self.call("POST", "/cancel", {"ids": ids})
                if answer != {"cancelled": len(ids), "missed": {}}:
                    raise Violation(f"sleepers were cancelled: {answer}")
        except Gone:
            self.unsure.append(lambda: self._was_cancelled(ids))
            raise
        with self.model.lock:
            for id_ in ids:
                self.model.notes[id_].cancelled = "yes"

    def _was_cancelled(self, ids: list[str]) -> None:
        """A cancel that was not answered: of all, or of none. Now it is asked for again."""
        answer = self.call("POST", "/cancel", {"ids": ids})
        if answer["cancelled"] not in (0, len(ids)) or answer["cancelled"] + len(answer["missed"]) != len(ids):
            raise Violation(f"half of {ids} was cancelled: {answer}")
        if not set(answer["missed"].values()) <= {"cancelled", "unknown"}:
            raise Violation(f"{ids} must sleep or be cancelled: {answer}")
        with self.model.lock:
            for id_ in ids:
                self.model.notes[id_].cancelled = "yes"

    def move(self) -> None:
        """Let a sleeper come soon, or let it sleep on."""
        for id_ in self._some_of_mine(1):
            delay = self.dice.choice([0.0, 0.1, FAR_S])
            with self.model.lock:
                note = self.model.notes[id_]
                now_ms = time.time_ns() // 1_000_000
                note.dues, note.far = set(), False
                note.earliest_ms = min(note.earliest_ms, now_ms + round(delay * 1000))
            try:
                answer = self.call("PATCH", f"/messages/{id_}", {"delay": delay})
            except Gone:
                self.unsure.append(partial(self._was_moved, id_))
                raise
            with self.model.lock:
                note.dues, note.far = {answer["due_ms"]}, delay == FAR_S
            if delay == FAR_S:
                self.mine.append(id_)

    def _was_moved(self, id_: str) -> None:
        """A move that was not answered: it is due then, or as before."""
        found = self.call("GET", f"/messages/{id_}")
        with self.model.lock:
            note = self.model.notes[id_]
            note.dues = {found["due_ms"]}
            note.far = found["due_ms"] > time.time_ns() // 1_000_000 + FAR_MS
        if note.far:
            self.mine.append(id_)

    def consume(self) -> None:
        group = self.dice.choice(GROUPS)
        asked_s = time.monotonic()
        asked = {"max": self.dice.choice([1, 20, 100]), "wait": self.dice.choice([0, 0.05]), "ttr": self.dice.choice([0.2, 1, 5])}
        found = self.call("POST", f"/groups/{group}/fetch", asked)["messages"]
        now_ms = time.time_ns() // 1_000_000
        with self.model.lock:
            for message in found:
                self.model.delivered(group, message, asked_s, now_ms)
        ids = [message["id"] for message in found if self.dice.random() < 0.95]  # the others' leases end
        if ids and self.dice.random() < 0.1:
            self.call("POST", f"/groups/{group}/extend", {"ids": ids, "ttr": 1})
        acks = [id_ if self.dice.random() < 0.8 else f"-{id_}" for id_ in ids]
        if not acks:
            return
        good = {id_ for id_ in acks if not id_.startswith("-")}
        with self.model.lock:
            self.model.maybe_acked[group] |= good - self.model.acked[group].keys()
        answer = self.call("POST", f"/groups/{group}/ack", acks)
        with self.model.lock:
            self.model.settled(group, acks, answer)
            self.model.maybe_acked[group] -= set(answer["unknown"])  # others have settled those, or will

    def drop(self) -> None:
        """A topic of one's own comes and goes, whole."""
        topic, n = f"own{self.name}", 30
        messages = [{"body": i, "delay": FAR_S} for i in range(n)]
        self.unsure.append(lambda: self._is_whole(topic, n))
        self.call("POST", "/messages", {"messages": messages}, topic)
        if self.call("GET", "", None, topic)["stats"]["sleep"] != n:
            raise Violation(f"{topic} is new, and holds what was in it before")
        self.call("DELETE", "", None, topic)
        if self.call("GET", "", None, topic) is not None:
            raise Violation(f"{topic} was deleted, and is there")
        self.unsure.pop()

    def _is_whole(self, topic: str, n: int) -> None:
        found = self.call("GET", "", None, topic)
        if found is not None and found["stats"]["sleep"] not in (0, n):
            raise Violation(f"{topic} is there by half: {found['stats']}")
        self.call("DELETE", "", None, topic)

    def compact(self) -> None:
        if self.dice.random() < 0.1:
            self.call("POST", "/compact")


def all_work(clients: list[Client], server: Server, end: Callable[[], object]) -> None:
    """All clients at once, until `end` has ended the server."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        working = [pool.submit(client.work, server.port) for client in clients]
        try:
            end()
        finally:
            server.process.kill()  # else they would never end
        for one in working:
            one.result(30)


def calm(server: Server) -> None:
    """Nothing went wrong in it."""
    before, found, _ = server.log.partition("Traceback")
    assert not found, server.log[len(before) - 500 : len(before) + 1500]


def copied(source: str, target: str) -> None:
    """A file, if it is still there: the worker of a killed server clears up after itself."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(source, target)


def check_copy(data: Path, copy: Path) -> None:
    """`turtlemq check` of the folder as the killed process left it; the server itself must mend the original."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy, copy_function=copied)
    found = run("check", "--data", str(copy))
    assert found.returncode == 0, found.stdout + found.stderr


def sleeping(server: Server, model: Model) -> dict[str, int]:
    """What sleeps far in the future, and until when."""
    out: dict[str, int] = {}
    cursor, now_ms = "", time.time_ns() // 1_000_000
    while True:
        page = server.ok("GET", f"/v1/topics/t/messages?limit=10000&from_ms={now_ms + FAR_MS}&cursor={cursor}")
        for message in page["messages"]:
            out[message["id"]] = message["due_ms"]
            model.sent[message["body"]["batch"]].seen.add(message["body"]["i"])
        if page["cursor"] is None:
            return out
        cursor = page["cursor"]


def drained(server: Server, model: Model) -> None:
    """Everything that must come, comes, to each group; and nothing else."""
    for group in GROUPS:
        end = time.monotonic() + 30
        while True:
            asked_s = time.monotonic()
            found = server.fetch("t", group, max=1_000, wait=0.3, ttr=30)
            for message in found:
                model.delivered(group, message, asked_s, time.time_ns() // 1_000_000)
            ids = [message["id"] for message in found]
            if ids:
                model.settled(group, ids, server.ok("POST", f"/v1/topics/t/groups/{group}/ack", ids))
            elif not model.lost(group):
                break
            assert time.monotonic() < end, f"{group} has never got {sorted(model.lost(group))[:10]} and others"
    asleep = sleeping(server, model)
    for id_, note in model.notes.items():
        if note.far and not note.cancelled:
            assert id_ in asleep, f"{id_} is lost"
            assert not note.dues or asleep[id_] in note.dues
        elif note.cancelled == "yes":
            assert id_ not in asleep, f"{id_} was cancelled"
    for batch, sent in model.sent.items():
        assert sent.answered or len(sent.seen) in (0, sent.size), f"half of batch {batch} was stored"


def after_all(data: Path, model: Model, clients: list[Client], was_clean: bool) -> None:
    """The last start: whatever was answered holds, and what was not is whole."""
    with running(data) as server:
        assert server.ok("GET", "/readyz")["was_clean"] == was_clean
        for client in clients:
            client.port = server.port
            client.hang_up()
            for look in client.unsure:
                look()
            client.hang_up()
        drained(server, model)
        assert server.stop() == 0
        calm(server)
    found = run("check", "--data", str(data))
    assert found.returncode == 0, found.stdout + found.stderr


def prepared(server: Server) -> None:
    server.ok("PUT", "/v1/topics/t", SETTINGS)
    for group in GROUPS:
        server.ok("PUT", f"/v1/topics/t/groups/{group}", {"start": "earliest"})


def new_clients(model: Model, seed: int) -> list[Client]:
    return [Client(model, str(number), seed * 100 + number) for number in range(1, CLIENTS + 1)]


def wait_for_seal(data: Path) -> None:
    """Most kills come while a segment is being sealed; here one has been."""
    end = time.monotonic() + 20
    while not list((data / "topic" / "t").glob("*.index")):
        assert time.monotonic() < end, "nothing was sealed"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("life", range(-(-KILLS // LIFE)))
def test_what_was_answered_before_a_kill_holds_after_it(tmp_path: Path, life: int) -> None:
    dice, model, data = random.Random(life), Model(), tmp_path / "data"
    clients = new_clients(model, life)
    for kill in range(min(LIFE, KILLS - life * LIFE)):
        with running(data) as server:
            if kill == 0:
                prepared(server)
            # with a short beat there is a checkpoint every moment, with a long one the journals must tell all
            found = server.ok("PUT", "/v1/topics/t", {"beat": 0.05 if kill % 4 == 3 else 5})
            assert found["settings"]["segment_bytes"] == 4_096

            def end(server: Server = server, long: bool = kill % 4 == 3) -> None:
                if long:
                    wait_for_seal(data)
                time.sleep(dice.uniform(0.05, 0.3 if long else 0.9))
                server.stop(signal.SIGKILL)

            all_work(clients, server, end)
            calm(server)
        check_copy(data, tmp_path / "copy")
    after_all(data, model, clients, was_clean=False)
    assert len(model.acked["a"]) > 100, "they did something"
    assert sum(note.cancelled == "yes" for note in model.notes.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_answered_before_a_stop_under_load_holds_after_it(tmp_path: Path, number: signal.Signals) -> None:
    """Each request is answered whole, or not at all, and the stop is a clean one."""
    model, data = Model(), tmp_path / "data"
    clients = new_clients(model, int(number))
    with running(data) as server:
        prepared(server)

        def end() -> None:
            time.sleep(0.7)
            server.process.send_signal(number)
            assert server.process.wait(5) == 0

        all_work(clients, server, end)
        calm(server)
    assert model.halves == 0, "an answer was cut off"
    after_all(data, model, clients, was_clean=True)
    assert len(model.acked["a"]) > 10, "they did something"
