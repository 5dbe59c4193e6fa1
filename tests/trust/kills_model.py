"""The judge of a server that is killed: the requests of clients, the answers, and which promise was broken.

It knows the contract and nothing else. A request that was not answered may have happened or not, but as a whole; an answer
holds for ever. A delivery is judged when it comes, a missing one at the end.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.trust.model import Broken, Figures

GROUPS = ("a", "b")
FAULTS = ("lost", "early", "delivered after ack", "delivered after cancel", "wrong bytes")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def body_of(batch: int, i: int) -> dict[str, Any]:
    """The body of the i-th message of a batch: nothing that could be another's."""
    return {"batch": batch, "i": i, "x": f"{batch}-{i} " * ((batch + i) % 12)}


def body_in(message: dict[str, Any]) -> Any:
    """The body of a message that came over HTTP. Those that were put over gRPC are bytes."""
    return message["body"] if "body" in message else json.loads(base64.b64decode(message["body_base64"]))


@dataclass
class Note:
    """All that is known about a message."""

    dues: set[int] = field(default_factory=set)  # possible due times; empty: some time from `earliest_ms` on
    earliest_ms: int = 0
    far: bool = False  # it sleeps for good, as far as is known
    cancelled: str = ""  # "", "maybe" or "yes"
    cancelled_s: float = 0.0  # when that was answered


@dataclass
class Sent:
    """A batch that a client has sent."""

    size: int
    earliest_ms: int  # no message of it may be due before
    answered: bool = False
    seen: set[int] = field(default_factory=set)  # which of its messages came to any consumer, or sleep


@dataclass
class Model:
    """All answers. All methods under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    notes: dict[str, Note] = field(default_factory=dict)
    acked: dict[str, dict[str, float]] = field(default_factory=lambda: {group: {} for group in GROUPS})
    maybe_acked: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})
    sent: dict[int, Sent] = field(default_factory=dict)
    faults: Figures = field(default_factory=lambda: Counter(dict.fromkeys(FAULTS, 0)))
    texts: list[str] = field(default_factory=list)  # about the faults
    deliveries: int = 0
    halves: int = 0  # answers of which a part came
    late: int = 0  # acks of holders whose lease was over, of messages that another one held

    def fault(self, kind: str, text: str) -> None:
        """Write it down; `verdict` raises it, with all others."""
        self.faults[kind] += 1
        self.texts.append(f"{kind}: {text}")

    def verdict(self, case: str) -> None:
        """Nothing was wrong so far."""
        if self.texts:
            raise Broken(f"{case}: {dict(self.faults)}; {'; '.join(self.texts[:5])}")

    def delivered(self, group: str, message: dict[str, Any], asked_s: float, got_ms: int) -> None:
        """A fetch that was sent at `asked_s` brought this."""
        self.deliveries += 1
        id_, due_ms, body = message["id"], message["due_ms"], body_in(message)
        if body != body_of(body["batch"], body["i"]):
            self.fault("wrong bytes", f"{id_} says {body}")
        batch = self.sent[body["batch"]]
        batch.seen.add(body["i"])
        note = self.notes.setdefault(id_, Note(earliest_ms=batch.earliest_ms))  # it may come before its sender has its answer
        settled_s = self.acked[group].get(id_)
        if settled_s is not None and settled_s < asked_s:
            self.fault("delivered after ack", f"{id_} to {group}: {message}")
        if note.cancelled == "yes" and note.cancelled_s < asked_s:
            self.fault("delivered after cancel", f"{id_} to {group}: {message}")
        if got_ms < due_ms or due_ms < note.earliest_ms:
            self.fault("early", f"{id_} came at {got_ms}, due at {due_ms}, asked for {note.earliest_ms} at the earliest")
        if note.dues and due_ms not in note.dues and message["attempt"] == 1:
            self.fault("early", f"{id_} is due at {due_ms}, not at any of {note.dues}")
        note.far = False

    def accepted(self, ids: list[str], sent: Sent, far: bool) -> None:
        """A batch was answered."""
        for id_ in ids:
            self.notes.setdefault(id_, Note(earliest_ms=sent.earliest_ms, far=far))

    def settled(self, group: str, acks: list[str], answer: dict[str, Any]) -> None:
        """An ack was answered."""
        left_alone = {*answer["unknown"], *answer.get("late", [])}
        good = [id_ for id_ in acks if not id_.startswith("-") and id_ not in left_alone]
        if answer["acked"] != len(good):
            raise Broken(f"{len(good)} were acknowledged, and {answer['acked']} counted")
        for id_ in good:
            if id_ in self.acked[group]:
                self.fault("delivered after ack", f"{id_} was acknowledged twice in {group}")
            self.acked[group][id_] = time.monotonic()
            self.maybe_acked[group].discard(id_)

    def cancel(self, ids: Iterable[str], outcome: str) -> None:
        """A cancel is on its way ("maybe"), or was answered: with "yes", or "" because it came too late."""
        for id_ in ids:
            self.notes[id_].cancelled, self.notes[id_].cancelled_s = outcome, time.monotonic()

    def missing(self, group: str) -> set[str]:
        """Messages that have not come to a group, and must."""
        return {
            id_
            for id_, note in self.notes.items()
            if not note.far and not note.cancelled and id_ not in self.acked[group] and id_ not in self.maybe_acked[group]
        }

    def asleep(self, found: dict[str, int]) -> None:
        """These, and no others, sleep far in the future at the end, until then."""
        for id_, note in self.notes.items():
            if note.far and not note.cancelled:
                if id_ not in found:
                    self.fault("lost", f"{id_} slept")
                elif note.dues and found[id_] not in note.dues:
                    self.fault("early", f"{id_} is due at {found[id_]}, not at any of {note.dues}")
            elif note.cancelled == "yes" and id_ in found:
                self.fault("delivered after cancel", f"{id_} sleeps on")

    def whole(self) -> None:
        """Batches that were not answered are there as a whole, or not at all."""
        for number, sent in self.sent.items():
            if not sent.answered and len(sent.seen) not in (0, sent.size):
                raise Broken(f"of batch {number} {len(sent.seen)} of {sent.size} were stored")

    def figures(self) -> Figures:
        """The work done, and each kind of fault."""
        done = Counter(
            {
                "messages accepted": sum(sent.size for sent in self.sent.values() if sent.answered),
                "deliveries": self.deliveries,
                "acknowledged": sum(map(len, self.acked.values())),
                "cancelled": sum(note.cancelled == "yes" for note in self.notes.values()),
                "late acks told so": self.late,
            }
        )
        done.update(self.faults)
        return done
