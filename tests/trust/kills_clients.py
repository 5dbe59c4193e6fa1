"""Clients that put, cancel, move, fetch, ack and fail messages of a server that may be gone at any moment, and tell the judge."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.harness.server_process import Server
from tests.trust.kills_model import GROUPS, Model, Sent, body_of, now_ms
from tests.trust.model import Broken

CLIENTS = 4
FAR_S = 3_600.0
FAR_MS = 1_000_000  # messages due later than this will not come during the test
LEASES_S = (0.2, 0.5, 1.5)  # short: the end waits for leases without an acknowledgement


class Gone(Exception):
    """The server is gone: the outcome of this request is unknown."""


class Client:
    """One connection, one request at a time. Its messages are its own: no other client cancels or moves them."""

    def __init__(self, model: Model, name: str, seed: int) -> None:
        self.model, self.name, self.dice = model, name, random.Random(seed)
        self.mine: list[str] = []  # messages that sleep far in the future
        self.soon: list[str] = []  # some that come any moment
        self.unsure: list[Callable[[], None]] = []  # questions for the next start
        self.spent: list[tuple[str, list[str], str]] = []  # group, ids and lease of deliveries whose end was answered
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
        if response.status == 404 and topic != "t":
            return None
        if response.status not in (200, 201):
            raise Broken(f"{method} {path}: {response.status} {data!r}")
        return json.loads(data)

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def come_back(self, port: int) -> None:
        """To a new server: ask for the outcome of requests that were not answered."""
        self.port = port
        self.hang_up()
        while self.unsure:
            self.unsure[0]()
            self.unsure.pop(0)

    def work(self, port: int) -> None:
        """Do this and that until the server is gone."""
        deeds = [self.put] * 3 + [self.consume] * 3 + [self.cancel, self.cancel_soon, self.move, self.compact, self.drop]
        deeds.append(self.be_late)
        with contextlib.suppress(Gone):
            self.come_back(port)
            while True:
                self.dice.choice(deeds)()

    def put(self) -> None:
        self.count += 1
        batch, n = int(self.name) * 1_000_000 + self.count, self.dice.choice([1, 1, 3, 20, 60])
        delay = self.dice.choice([0.0, 0.0, 0.02, 0.3, FAR_S])
        messages: list[dict[str, Any]] = [{"body": body_of(batch, i), "delay": delay} for i in range(n)]
        if named := self.dice.random() < 0.6:
            for i, message in enumerate(messages):
                message["id"] = f"{batch}-{i}"
        with self.model.lock:
            sent = self.model.sent[batch] = Sent(n, now_ms() + round(delay * 1000))
        try:
            answer = self.call("POST", "/messages", {"messages": messages})
        except Gone:
            if named:
                self.unsure.append(lambda: self._again(batch, messages, sent))
            raise
        if (answer["created"], answer["duplicates"]) != (n, 0):
            raise Broken(f"new messages: {answer}")
        self._accepted(answer["ids"], sent, delay)

    def _again(self, batch: int, messages: list[dict[str, Any]], sent: Sent) -> None:
        """Send a batch once more: it was stored whole, or not at all."""
        answer = self.call("POST", "/messages", {"messages": messages})
        if sorted((answer["created"], answer["duplicates"])) != [0, len(messages)]:
            raise Broken(f"half of batch {batch} was stored: {answer}")
        self._accepted(answer["ids"], sent, messages[0]["delay"])

    def _accepted(self, ids: list[str], sent: Sent, delay: float) -> None:
        with self.model.lock:
            sent.answered = True
            self.model.accepted(ids, sent, far=delay == FAR_S)
        if delay == FAR_S:
            self.mine = self.mine + ids
        else:
            self.soon = (self.soon + ids[:2])[-20:]

    def _some_of_mine(self, most: int) -> list[str]:
        some = self.dice.sample(self.mine, min(len(self.mine), self.dice.randint(1, most)))
        self.mine = [id_ for id_ in self.mine if id_ not in some]
        return some

    def cancel(self) -> None:
        """Sleepers, with a sure answer."""
        ids = self._some_of_mine(5)
        if not ids:
            return
        with self.model.lock:
            self.model.cancel(ids, "maybe")
        try:
            if len(ids) == 1:
                good = self.call("DELETE", f"/messages/{ids[0]}") == {"outcome": "cancelled"}
            else:
                good = self.call("POST", "/cancel", {"ids": ids}) == {"cancelled": len(ids), "missed": {}}
        except Gone:
            self.unsure.append(lambda: self._was_cancelled(ids))
            raise
        if not good:
            raise Broken(f"sleepers {ids} could not be cancelled")
        with self.model.lock:
            self.model.cancel(ids, "yes")

    def _was_cancelled(self, ids: list[str]) -> None:
        """A cancel that was not answered: of all, or of none. Now it is asked for again."""
        answer = self.call("POST", "/cancel", {"ids": ids})
        if answer["cancelled"] not in (0, len(ids)) or answer["cancelled"] + len(answer["missed"]) != len(ids):
            raise Broken(f"half of {ids} was cancelled: {answer}")
        if not set(answer["missed"].values()) <= {"cancelled", "unknown"}:
            raise Broken(f"{ids} must sleep or be cancelled: {answer}")
        with self.model.lock:
            self.model.cancel(ids, "yes")

    def cancel_soon(self) -> None:
        """Cancel a message that comes due, or is in flight: the answer says which was first."""
        if not self.soon:
            return
        id_ = self.soon.pop(self.dice.randrange(len(self.soon)))
        with self.model.lock:
            self.model.cancel([id_], "maybe")
        self.unsure.append(partial(self._cancel_one, id_))
        self._cancel_one(id_)
        self.unsure.pop()

    def _cancel_one(self, id_: str) -> None:
        answer = self.call("POST", "/cancel", {"ids": [id_]})
        gone = answer["cancelled"] or answer["missed"][id_] in ("cancelled", "unknown")
        with self.model.lock:
            self.model.cancel([id_], "yes" if gone else "")

    def move(self) -> None:
        """Let a sleeper come soon, or let it sleep on."""
        for id_ in self._some_of_mine(1):
            delay = self.dice.choice([0.0, 0.1, FAR_S])
            with self.model.lock:
                note = self.model.notes[id_]
                note.dues, note.far = set(), False
                note.earliest_ms = min(note.earliest_ms, now_ms() + round(delay * 1000))
            try:
                answer = self.call("PATCH", f"/messages/{id_}", {"delay": delay})
            except Gone:
                self.unsure.append(partial(self._was_moved, id_))
                raise
            self._moved(id_, answer["due_ms"], far=delay == FAR_S)

    def _was_moved(self, id_: str) -> None:
        """A move that was not answered: it is due then, or as before."""
        due_ms = self.call("GET", f"/messages/{id_}")["due_ms"]
        self._moved(id_, due_ms, far=due_ms > now_ms() + FAR_MS)

    def _moved(self, id_: str, due_ms: int, far: bool) -> None:
        with self.model.lock:
            self.model.notes[id_].dues, self.model.notes[id_].far = {due_ms}, far
        if far:
            self.mine.append(id_)

    def consume(self) -> None:
        group, asked_s = self.dice.choice(GROUPS), time.monotonic()
        asked = {"max": self.dice.choice([1, 20, 100]), "wait": self.dice.choice([0, 0.05]), "ttr": self.dice.choice(LEASES_S)}
        fetched = self.call("POST", f"/groups/{group}/fetch", asked)
        found, lease, got_ms = fetched["messages"], fetched.get("lease"), now_ms()
        if (lease is not None) != bool(found):
            raise Broken(f"{len(found)} messages under the lease {lease}")
        with self.model.lock:
            for message in found:
                self.model.delivered(group, message, asked_s, got_ms)
        ids = [message["id"] for message in found if self.dice.random() < 0.95]  # the others' leases end
        if ids and self.dice.random() < 0.1:
            self.call("POST", f"/groups/{group}/extend", {"ids": ids, "ttr": 1, "lease": lease})
        if ids:
            named = lease if self.dice.random() < 0.8 else None
            self._ack(group, [id_ if self.dice.random() < 0.8 else f"-{id_}" for id_ in ids], named)
            self.spent = [*self.spent, (group, ids, str(lease))][-20:]

    def _ack(self, group: str, acks: list[str], lease: str | None) -> None:
        good = {id_ for id_ in acks if not id_.startswith("-")}
        with self.model.lock:
            self.model.maybe_acked[group] |= good - self.model.acked[group].keys()
        answer = self.call("POST", f"/groups/{group}/ack", acks if lease is None else {"acks": acks, "lease": lease})
        with self.model.lock:
            self.model.settled(group, acks, answer)
            self.model.maybe_acked[group] -= {*answer["unknown"], *answer.get("late", [])}  # others have settled those, or will

    def be_late(self) -> None:
        """Answer once more for deliveries that are over: nothing happens to the messages, in any hands."""
        if not self.spent:
            return
        group, ids, lease = self.dice.choice(self.spent)
        acks = [id_ if self.dice.random() < 0.5 else f"-{id_}" for id_ in ids]
        answer = self.call("POST", f"/groups/{group}/ack", {"acks": acks, "lease": lease})
        longer = self.call("POST", f"/groups/{group}/extend", {"ids": ids, "ttr": 1, "lease": [lease] * len(ids)})
        with self.model.lock:
            self.model.late += len(answer["late"])
        if answer["acked"] or answer["failed"] or answer["dead"] or longer["extended"]:
            raise Broken(f"a late holder changes nothing: {acks} of {group} under {lease}: {answer}, {longer}")

    def drop(self) -> None:
        """A topic of one's own comes and goes, whole."""
        topic, n = f"own{self.name}", 30
        self.unsure.append(lambda: self._is_whole(topic, n))
        self.call("POST", "/messages", {"messages": [{"body": i, "delay": FAR_S} for i in range(n)]}, topic)
        if self.call("GET", "", None, topic)["stats"]["sleep"] != n:
            raise Broken(f"{topic} is new, and holds what was in it before")
        self.call("DELETE", "", None, topic)
        if self.call("GET", "", None, topic) is not None:
            raise Broken(f"{topic} was deleted, and is there")
        self.unsure.pop()

    def _is_whole(self, topic: str, n: int) -> None:
        found = self.call("GET", "", None, topic)
        if found is not None and found["stats"]["sleep"] not in (0, n):
            raise Broken(f"{topic} is there by half: {found['stats']}")
        self.call("DELETE", "", None, topic)

    def compact(self) -> None:
        if self.dice.random() < 0.1:
            self.call("POST", "/compact")


def new_clients(model: Model, seed: int) -> list[Client]:
    return [Client(model, str(number), seed * 100 + number) for number in range(1, CLIENTS + 1)]


def all_work(clients: list[Client], server: Server, end: Callable[[], object], others: Sequence[Callable[[], None]] = ()) -> None:
    """All clients at once, and the work of others, until `end` has ended the server."""
    with ThreadPoolExecutor(CLIENTS + len(others)) as pool:
        working = [pool.submit(client.work, server.port) for client in clients]
        working += [pool.submit(work) for work in others]
        try:
            end()
        finally:
            server.process.kill()  # else they would never end
        for one in working:
            one.result(30)
