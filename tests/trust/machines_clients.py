"""Clients of a cluster: those of `kills_clients`, which go to any node and on to the next when one does not answer.

A request without an answer may be carried out later, by a node that was stopped or cut off, after the client has asked again. So
a message in such doubt is not moved or cancelled any more, and after a move in doubt it is not judged: late requests of clients
are no fault of the server.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.harness.machines import PORT
from tests.trust.kills_clients import FAR_S, Client, Gone
from tests.trust.kills_model import FAULTS, Model, Sent
from tests.trust.model import Broken, Figures

CLIENTS = 4
BUDGET_MS = 4_000  # for a request: the node gives up before the client does
TIMEOUT_S = 7.0
PAUSE_S = 0.02  # between two deeds: failovers are to be measured, not a full processor
DOUBT = {408, 421, 429, 500, 502, 503, 504, 507}  # perhaps done, perhaps not
BUDGET, DIRECT = "X-Turtlemq-Budget-Ms", "X-Turtlemq-Direct"


@dataclass
class ClusterModel(Model):
    """All answers of all nodes. `slack_ms`: clocks of nodes differ by so much."""

    faults: Figures = field(
        default_factory=lambda: Figures(dict.fromkeys((*FAULTS, "stored twice", "stale reads", "wrong answers"), 0))
    )
    slack_ms: int = 0
    doubtful: dict[str, set[str]] = field(default_factory=lambda: {"a": set(), "b": set()})  # by group: acks without an answer
    ids: dict[tuple[int, int], str] = field(default_factory=dict)  # of each body

    def delivered(self, group: str, message: dict[str, Any], asked_s: float, got_ms: int) -> None:
        """A fetch that was sent at `asked_s` brought this, from any node."""
        self.known(message)
        batch = self.sent[message["body"]["batch"]]
        asked_for, batch.earliest_ms = batch.earliest_ms, batch.earliest_ms - self.slack_ms
        note = self.notes.get(message["id"])
        if note is not None:
            note.earliest_ms -= self.slack_ms
        super().delivered(group, message, asked_s, got_ms + self.slack_ms)
        batch.earliest_ms = asked_for
        if note is not None:
            note.earliest_ms += self.slack_ms

    def known(self, message: dict[str, Any]) -> None:
        """A body has one id: a batch that was sent once is stored once."""
        body = message["body"]
        first = self.ids.setdefault((body["batch"], body["i"]), message["id"])
        if first != message["id"]:
            self.fault("stored twice", f"message {body['i']} of batch {body['batch']} is {first} and {message['id']}")

    def missing(self, group: str) -> set[str]:
        """Messages that have not come to a group, and must. One whose ack is in doubt need not."""
        return super().missing(group) - self.doubtful[group]


class Gate:
    """Lets deeds begin while it is open. `closed` waits for those under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._shut = 0, False

    @contextmanager
    def deed(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()


class ClusterClient(Client):
    """One request at a time, to a node that it changes when that does not answer."""

    model: ClusterModel

    def __init__(self, model: ClusterModel, name: str, seed: int, addresses: Mapping[str, str]) -> None:
        super().__init__(model, name, seed)
        self._addresses = dict(addresses)
        self.node = self.dice.choice(sorted(self._addresses))
        self.answers, self.doubts, self.topics = 0, 0, 0

    def call(self, method: str, path: str, value: Any = None, topic: str = "t") -> Any:
        """The answer; `Gone` if there was none that tells the outcome, None if there is no such topic."""
        headers = {"Content-Type": "application/json", BUDGET: str(BUDGET_MS)}
        if self.dice.random() < 0.3:
            headers[DIRECT] = "1"
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._addresses[self.node], PORT, timeout=TIMEOUT_S)
            body = None if value is None else json.dumps(value)
            self._connection.request(method, f"/v1/topics/{topic}{path}", body, headers)
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.elsewhere()
            raise Gone from error
        if response.status in DOUBT:
            self.elsewhere()
            raise Gone
        if response.status == 404 and topic != "t":
            return None
        if response.status not in (200, 201):
            raise Broken(f"{method} {path} to {self.node}: {response.status} {data!r}")
        self.answers += 1
        return json.loads(data)

    def elsewhere(self) -> None:
        """The next request goes to any node."""
        self.hang_up()
        self.doubts += 1
        self.node = self.dice.choice(sorted(self._addresses))

    def labour(self, gate: Gate, ended: threading.Event) -> None:
        """Do this and that, through all faults."""
        deeds = [self.put] * 3 + [self.consume] * 3 + [self.look] * 2
        deeds += [self.cancel, self.cancel_soon, self.move, self.compact, self.drop, self.be_late]
        while not ended.is_set():
            with gate.deed():
                try:
                    self.settle_doubts()
                    self.dice.choice(deeds)()
                except Gone:
                    pass
                except (Broken, AssertionError, LookupError, TypeError, ValueError) as error:  # an answer that does not fit
                    self.model.fault("wrong answers", f"{type(error).__name__}: {error}")
                    return
            time.sleep(PAUSE_S)

    def settle_doubts(self) -> None:
        """Ask for the outcome of requests that were not answered."""
        while self.unsure:
            self.unsure[0]()
            self.unsure.pop(0)

    def _again(self, batch: int, messages: list[dict[str, Any]], sent: Sent) -> None:
        """Send a batch once more: it was stored whole, or not at all. The first request may still come."""
        kept = self.mine, self.soon
        super()._again(batch, messages, sent)
        self.mine, self.soon = kept

    def look(self) -> None:
        """A sleeper is there, by the word of any node."""
        if not self.mine:
            return
        id_ = self.dice.choice(self.mine)
        if self._view(id_) is None:
            self.model.fault("stale reads", f"{id_} sleeps, and {self.node} does not know it")

    def _view(self, id_: str) -> Any:
        try:
            return self.call("GET", f"/messages/{id_}")
        except Broken as error:
            if ": 404 " in str(error):
                return None
            raise

    def move(self) -> None:
        """Let a sleeper come soon, or let it sleep on. In doubt, it is judged no more."""
        ids = list(self.mine)
        try:
            super().move()
        except Gone:
            self.unsure.pop()
            with self.model.lock:
                for id_ in set(ids) - set(self.mine):
                    self.model.notes[id_].cancelled = "maybe"
            raise

    def cancel_soon(self) -> None:
        """Cancel a message that comes due, or is in flight: the answer says which was first."""
        if not self.soon:
            return
        id_ = self.soon.pop(self.dice.randrange(len(self.soon)))
        with self.model.lock:
            self.model.cancel([id_], "maybe")
        try:
            self._cancelled(id_, sure=True)
        except Gone:
            self.unsure.append(partial(self._cancelled, id_, sure=False))
            raise

    def _cancelled(self, id_: str, sure: bool) -> None:
        """If an earlier cancel is in doubt, only a success tells the outcome."""
        answer = self.call("POST", "/cancel", {"ids": [id_]})
        gone = answer["cancelled"] or answer["missed"][id_] in ("cancelled", "unknown")
        if gone or sure:
            with self.model.lock:
                self.model.cancel([id_], "yes" if gone else "")

    def _ack(self, group: str, acks: list[str], lease: str | None) -> None:
        good = {id_ for id_ in acks if not id_.startswith("-")}
        try:
            super()._ack(group, acks, lease)
        except Gone:
            with self.model.lock:
                self.model.doubtful[group] |= good
            raise

    def drop(self) -> None:
        """A topic of one's own comes and goes, whole. After a doubt its name is not used again."""
        topic, n = f"own{self.name}-{self.topics}", 30
        try:
            self.call("POST", "/messages", {"messages": [{"body": i, "delay": FAR_S} for i in range(n)]}, topic)
            if self.call("GET", "", None, topic)["stats"]["sleep"] != n:
                raise Broken(f"{topic} is new, and holds what was in it before")
            self.call("DELETE", "", None, topic)
            if self.call("GET", "", None, topic) is not None:
                raise Broken(f"{topic} was deleted, and is there")
        except Gone:
            self.topics += 1
            self.unsure.append(partial(self._is_whole, topic, n))
            raise


def new_clients(model: ClusterModel, seed: int, addresses: Mapping[str, str]) -> list[ClusterClient]:
    return [ClusterClient(model, str(number), seed * 100 + number, addresses) for number in range(1, CLIENTS + 1)]
