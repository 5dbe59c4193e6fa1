"""The ground of a simulation of the whole engine (`engine_simulation`): a door that can crash, the model, producers and time.

The model knows, for each group and message, the one state it must be in. Every answer of the engine is compared with it, and
after every few steps the figures and `Engine.check` are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from tests.harness.index_world import Later
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, UnknownMessage
from turtlemq.model import Message, Priority
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

T = TypeVar("T")
TOPIC = "t"
CHANGES = ("write", "rename", "truncate", "unlink")
HOUR_MS = 3_600_000


class Crash(BaseException):
    """The process ends here."""


class SimDoor(Door):
    """Syncs cost nothing, but are remembered. After `crash_in` more changes of files, the process is gone."""

    def __init__(self, durable: dict[str, int]) -> None:
        super().__init__()
        self.durable = durable  # sizes at the last sync
        self.crash_in = -1
        self.crashed = False

    def fresh(self) -> Door:
        return self

    def random_bytes(self, count: int) -> bytes:
        return b"\x07" * count

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "fdatasync" and not self.crashed:
            self.durable[str(path)] = os.fstat(args[0]).st_size
            return None  # type: ignore[return-value]
        if name == "fsync_dir":
            return None  # type: ignore[return-value]
        if name in CHANGES:
            if self.crash_in == 0 and not self.crashed:
                self.crashed = True
                if name == "write":
                    data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
                    os.pwrite(args[0], data[: len(data) // 3], args[2])
            self.crash_in -= 1
        if self.crashed and name in CHANGES:
            raise Crash
        return action(*args)


@dataclass
class Msg:
    """A message as it was sent."""

    due_ms: int
    arrival: int
    level: int
    ttr_ms: int
    expires_ms: int | None
    headers: dict[str, str] | None
    body: bytes
    state: str = "sleep"  # | ready | cancelled


@dataclass
class At:
    """State of a message in one group: ready, reserve, wait, nap (a sleeping retry), acked, dead, gone."""

    kind: str
    attempt: int = 1
    when: int = 0  # end of the lease, of the back-off or of the nap
    left: int = -1  # the ready offset that it left for a nap
    lasting: bool = False  # it was requeued, and does not expire any more


@dataclass
class Story:
    """A group as it must be."""

    at: dict[str, At] = field(default_factory=dict)
    acks: int = 0
    docs: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # (id, offset) → its attempt, the offset before


class Ground:
    """The ground of a run: the engine, the model, producers, groups and time."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.chance = root, Random(seed)
        pick = self.chance.choice
        self.levels = seed % 3 == 0
        self.retaining = seed % 4 == 1
        self.settings = Settings(
            segment_bytes=pick([4096, 8192, 40_000]),
            run_messages=pick([4, 8, 50]),
            max_attempts=pick([2, 3]),
            backoff_base_ms=pick([10, 20_000]),
            backoff_jitter="none",
            ttr_ms=pick([50, 5_000]),
            max_in_flight=pick([20, 100_000]),
            ack_durability=pick(["beat", "beat", "fsync"]),
            history_hours=0.01 if self.retaining else 1000,
            history_bytes=pick([20_000, 1 << 40]) if self.retaining else 1 << 40,
            dead_max_count=1_000_000,
        )
        self.durable: dict[str, int] = {}
        self.door = SimDoor(self.durable)
        self.flusher = Later() if seed % 2 else None  # tables and checkpoints are written while others go on
        self.engine = Engine.open(root, door=self.door, settings=self.settings, flusher=self.flusher)
        self.now = 1_000_000
        self.msgs: dict[str, Msg] = {}
        self.groups: dict[str, Story] = {}
        self.letters: dict[str, dict[str, int]] = {}
        self.paused: frozenset[str] = frozenset()  # groups, and "" for the topic
        self.naps: list[tuple[int, str, str]] = []  # asleep for one group: when, group, id
        self.log: list[str] = []
        self.arrivals = 0
        self.epochs: dict[str, int] = {}
        self.pending: Callable[[], object] = lambda: None  # the question to answer if the process ends in the middle
        self.done = (0, "")
        self.engine.topic(TOPIC, create=True)
        for name in ("a", "b"):
            self.place(name, "earliest")

    # Small helpers

    @property
    def broker(self) -> Any:
        return self.engine.topic(TOPIC).stores.broker

    def offset(self, id_: str) -> int | None:
        return self.broker.ready.find_ids([id_]).get(id_)  # type: ignore[no-any-return]

    def some(self, items: list[T], most: int) -> list[T]:
        return self.chance.sample(items, min(len(items), self.chance.randint(1, most)))

    # Producing

    def submit(self) -> None:
        pick, batch = self.chance.choice, []
        for _ in range(pick([1, 1, 3, 40])):
            due = self.now + pick([0, 0, 5, 5, 30, 200, 5_000, -20])
            msg = Msg(
                due_ms=max(due, 0),
                arrival=self.arrivals,
                level=pick([0, 0, 0, 1, 2]) if self.levels else 0,
                ttr_ms=pick([0, 0, 0, 70]),
                expires_ms=pick([None] * 9 + [due + 100]),
                headers=pick([None, None, {"k": "v"}]),
                body=b"x" * pick([0, 10, 100]),
            )
            batch.append((f"m{self.arrivals}", msg))
            self.arrivals += 1
        sent = [
            Message(m.body, m.due_ms, i, m.ttr_ms, Priority(m.level), expires_ms=m.expires_ms, headers=m.headers)
            for i, m in batch
        ]
        self.pending = lambda: self._submitted(batch, sure=False)
        receipt = self.engine.submit(TOPIC, sent, self.now)
        assert all(receipt.created)
        self._submitted(batch, sure=True)
        again = self.engine.submit(TOPIC, self.some(sent, 3), self.now)
        assert not any(again.created)

    def _submitted(self, batch: list[tuple[str, Msg]], sure: bool) -> None:
        stored = [self.engine.get(TOPIC, i) is not None for i, _ in batch]
        assert all(stored) or not (sure or any(stored)), "a batch is atomic"
        if all(stored):
            self.msgs.update(batch)

    def duplicate(self) -> None:
        """Ids that sleep, are ready or settled are held as long as the files are."""
        known = [i for i, m in self.msgs.items() if m.state == "sleep" or (m.state != "cancelled" and self.offset(i) is not None)]
        ids = self.some(known, 5)
        if ids:
            receipt = self.engine.submit(TOPIC, [Message(b"other", self.now, id=i) for i in ids], self.now)
            assert not any(receipt.created), ids

    def reschedule(self) -> None:
        ids = self.some(list(self.msgs), 1)
        for id_ in ids:
            msg, due = self.msgs[id_], self.now + self.chance.choice([0, 10, 500])
            if msg.expires_ms is not None:
                due = min(due, msg.expires_ms - 1)  # a later one is refused
            if msg.state == "sleep":
                self.pending = partial(self._rescheduled, id_, due)
                self.engine.reschedule(TOPIC, id_, self.now, due_ms=due)
                self._rescheduled(id_, due)
            elif self.offset(id_) is not None:
                with pytest.raises((Conflict, UnknownMessage)):
                    self.engine.reschedule(TOPIC, id_, self.now, due_ms=due)

    def _rescheduled(self, id_: str, due: int) -> None:
        msg, found = self.msgs[id_], self.engine.get(TOPIC, id_)
        assert found is not None
        assert found.due_ms in (msg.due_ms, due)
        if found.due_ms == due:
            msg.due_ms, msg.arrival = due, self.arrivals
            self.arrivals += 1

    def cancel(self) -> None:
        ids = [i for i in self.some(list(self.msgs), 3) if self.msgs[i].state == "sleep" or self.offset(i) is not None]
        kinds = {i: {story.at[i].kind for story in self.groups.values() if i in story.at} for i in ids}
        self.pending = lambda: self._cancelled(ids)
        outcome = self.engine.cancel(TOPIC, ids, self.now)
        for id_ in ids:
            if self.msgs[id_].state == "cancelled":
                assert outcome[id_] == "cancelled before", (id_, outcome[id_])
                continue
            buried = any(id_ in letters for letters in self.letters.values())
            may = self.msgs[id_].state == "sleep" or (kinds[id_] <= {"ready", "wait", "nap"} and not buried)
            unsure = kinds[id_] & {"any", "gone"} and kinds[id_] <= {
                "ready",
                "wait",
                "nap",
                "any",
                "gone",
            }  # of a late group, or a moved
            assert unsure or (outcome[id_] == "cancelled") == may, (id_, outcome[id_], self.msgs[id_], kinds[id_])
            if outcome[id_] == "cancelled":
                self._note_cancelled(id_)
            else:
                assert unsure or outcome[id_] in ({"dead"} if buried else self._blocking(kinds[id_])), (
                    id_,
                    outcome[id_],
                    kinds[id_],
                )

    def _blocking(self, kinds: set[str]) -> set[str]:
        """The outcomes that an answer may give where a message cannot be cancelled."""
        if "reserve" in kinds:
            return {"reserve"}
        return {"dead", "history"} if "dead" in kinds else {"history", "dead"}

    def _cancelled(self, ids: list[str]) -> None:
        """After a crash: which messages were cancelled?"""
        for id_ in ids:
            if self.msgs[id_].state == "sleep" and self.engine.get(TOPIC, id_) is None:
                self._note_cancelled(id_)
                self.lost_notices = True
            elif self.msgs[id_].state == "ready" and self.broker.ready.is_cancelled_ready(self.offset(id_)):
                self._note_cancelled(id_)

    lost_notices = False  # a crash may have come between a sleeper's end and the note of it

    def _note_cancelled(self, id_: str) -> None:
        self.msgs[id_].state = "cancelled"
        for name, story in self.groups.items():
            at = story.at.pop(id_, At("gone"))
            if at.kind == "nap" and (at.when, name, id_) in self.naps:  # others are void, and sleep on
                self.naps.remove((at.when, name, id_))

    # Time

    def tick(self) -> None:
        self.now += self.chance.choice([1, 10, 40, 100, 100, 1_000, 6_000, -30])
        self.run_tick()

    def jump(self) -> None:
        """The clock goes far ahead, or back."""
        self.now = max(1_000, self.now + self.chance.choice([-50_000, 20_000, 70_000]))
        self.run_tick()

    def run_tick(self) -> None:
        self.pending = self._ticked
        for _ in range(10_000):
            wake = self.engine.tick(self.now)
            if wake is None or wake > self.now:
                break
        else:
            raise AssertionError("the engine never comes to rest")
        if self.door.crashed:
            raise Crash
        assert not self.engine.trouble, self.engine.trouble
        self._ticked(sure=True)

    def _ticked(self, sure: bool = False) -> None:
        due = [i for i, m in self.msgs.items() if m.state == "sleep" and m.due_ms <= self.now]
        for id_ in sorted(due, key=lambda i: (self.msgs[i].due_ms, self.msgs[i].arrival)):
            if sure or self.offset(id_) is not None:
                self.msgs[id_].state = "ready"
                self.log.append(id_)
                for story in self.groups.values():
                    story.at[id_] = At("ready")
        progress = self.engine.topic(TOPIC).stores.index.progress
        self.naps = [nap for nap in self.naps if not (nap[0] <= self.now and (sure or self._nap_over(nap, progress)))]
        for name, story in self.groups.items():
            for id_, at in list(story.at.items()):
                if at.kind == "reserve" and at.when <= self.now and (sure or not self.holds(name, id_)):
                    self.failed(name, id_, 0)

    def _nap_over(self, nap: tuple[int, str, str], progress: Any) -> bool:
        found = self.engine.topic(TOPIC).stores.index.find(f"{nap[1]}/{nap[2]}")
        if found is not None and found.due_ms != nap[0]:  # a later nap of the same message; this one is void
            return bool(progress.covers_one(nap[0], 0))
        return found is None or progress.covers_one(found.due_ms, found.seq)

    def holds(self, name: str, id_: str) -> bool:
        return self.broker.groups[name].lease_of(id_) is not None

    def failed(self, name: str, id_: str, delay: int | None) -> None:
        """A delivery has failed: again soon, after a nap, or dead."""
        story = self.groups[name]
        at = story.at[id_]
        if at.attempt >= self.settings.max_attempts:
            self.died(name, id_, at.attempt)
            return
        backoff = min(self.settings.backoff_base_ms * 2 ** (at.attempt - 1), self.settings.backoff_max_ms)
        wait = backoff if delay is None else delay
        if wait <= 30_000:
            story.at[id_] = At("wait", at.attempt + 1, self.now + wait, at.left)
        else:
            story.at[id_] = At("nap", at.attempt + 1, self.now + wait, at.left)
            self.naps.append((self.now + wait, name, id_))

    def died(self, name: str, id_: str, attempts: int) -> None:
        self.groups[name].at[id_] = At("dead", attempts)
        self.letters.setdefault(name, {})[id_] = attempts

    # Groups

    def place(self, name: str, start: str | int) -> None:
        self.pending = lambda: self._placed(name, None)
        offset = self.engine.move_group(TOPIC, name, start, self.now)
        self._placed(name, offset)

    def _placed(self, name: str, offset: int | None) -> None:
        if offset is None:  # a crash: is it there, and has it been moved?
            if name not in self.broker.groups:
                return
            if name in self.groups and self.broker.groups[name].epoch == self.epochs.get(name):
                return
            offset = self.broker.groups[name].moves[-1][1]
        old = self.groups.get(name, Story())
        new = Story(acks=old.acks)
        for id_ in self.log:
            base = self.offset(id_)
            if self.msgs[id_].state == "ready":
                again = base is not None and base >= offset
                new.at[id_] = At("ready") if again else self._chained(name, old, id_, offset)
        self.groups[name], self.epochs[name] = new, self.broker.groups[name].epoch  # not before: looking may end in a crash

    def _chained(self, name: str, old: Story, id_: str, start: int) -> At:
        """A message whose own document is before the group's new place: a retry of it may be behind."""
        at = old.at.get(id_, At("gone"))
        asleep = (at.when, name, id_) in self.naps
        offset = self.offset(f"{name}/{id_}")
        left, attempt = at.left, at.attempt
        if at.kind == "nap":
            if left < start:
                return At("nap", attempt, at.when, left) if asleep or (offset or 0) >= start else At("gone")
        elif (offset is None or left < start) and (offset or -1) < start:
            return At("gone")
        return At("any")
