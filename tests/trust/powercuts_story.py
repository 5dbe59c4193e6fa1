"""A story: the whole engine at random work on a disk that remembers, with the ledger of its answers beside it.

Made from a seed. At every change of a file in it the power may go: `cuts` has these moments, each with the promises then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.harness.deferred_syncs import durably
from tests.trust.powercuts_disk import Disk, Inodes, Tree, cut
from tests.trust.powercuts_harvest import abandon, run_to_rest
from tests.trust.powercuts_ledger import ANY, COMES, DEAD, FRESH, GONE, Fate, Key, Ledger, Sent
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidFireAt, UnknownMessage
from turtlemq.if_exists import IfExists
from turtlemq.model import Batch, Message, Priority
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.transaction import Reschedule, Transaction

MAIN, OTHER = "t", "u"
GROUPS = ("g", "h")
STEPS = 34


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment at which the power may go: the disk, and the answers before and those that would have followed."""

    step: str
    disk: Inodes
    before: Ledger
    after: Ledger
    together: tuple[Key, ...] = ()


class Story:
    """One run of the story from its seed: the engine, the disk, the ledger and the moments of cuts."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.folder, self.chance = folder, Random(seed)
        pick = self.chance.choice
        self.retaining, self.single, self.uses_timers = seed % 4 == 1, seed % 3 > 0, seed % 5 == 2
        self.uses_transactions = seed % 5 == 3
        self.settings = Settings(
            segment_bytes=pick([4096, 4096, 8192]),
            run_messages=pick([3, 6, 50]),
            compact_live_ratio=pick([0.1, 0.6]),
            max_attempts=pick([2, 3]),
            backoff_base_ms=pick([10, 40_000]),
            backoff_jitter="none",
            ttr_ms=pick([50, 5_000]),
            ack_durability=pick(["beat", "beat", "fsync"]),
            history_hours=0.001 if self.retaining else 1000,
        )
        self.now, self.newest, self.count = 1_000_000, 1_000_000, 0
        self.ledger = Ledger()
        self.cuts: list[Cut] = []
        self.together: list[Key] = []
        self.held: dict[Key, list[str]] = {}
        self.lives = 0

    def run(self) -> None:
        """Tell it from the beginning to the end."""
        self._begin({})
        for _ in range(STEPS):
            self._tell(self.chance.choice(self._steps()))
        abandon(self.engine)

    def _steps(self) -> list[Callable[[], None]]:
        often = [
            self.submit,
            self.submit,
            self.tick,
            self.tick,
            self.tick,
            self.reserve,
            self.reserve,
            self.ack,
            self.ack,
            self.fail,
        ]
        seldom = [self.cancel, self.reschedule, self.extend, self.give_back, self.compact, self.requeue, self.delete_dead]
        rare = [self.place, self.drop_group, self.reopen, self.power_cut]
        others = [] if self.single else [self.other_topic] * 4
        timers = [self.start_timers] * 20 if self.uses_timers else []
        transactions = [self.transact] * 20 if self.uses_transactions else []
        return often * 5 + seldom * 3 + rare * 2 + others + timers + transactions

    def _tell(self, step: Callable[[], None]) -> None:
        """One step. The power may go at each change of a file in it, and when it has been answered."""
        before, first, disk = self.ledger.copy(), len(self.disk.moments), self.disk
        self.together = []
        step()
        if self.disk is not disk:  # a step of its own began there
            return
        self._note(step.__name__, before, first)

    def _note(self, name: str, before: Ledger, first: int) -> None:
        after, together = self.ledger.copy(), tuple(self.together)
        self.cuts += [Cut(name, disk, before, after, together) for disk in self.disk.moments[first:]]
        self.cuts.append(Cut(f"after {name}", self.disk.moments[-1], after, after))

    # Beginnings and ends

    def _begin(self, tree: Tree) -> None:
        self.lives += 1
        self.disk = Disk(self.folder / f"life{self.lives}", tree)
        before = self.ledger.copy()
        self._open()
        self._observe()
        self._note("opening", before, 0)

    def _open(self) -> None:
        self.engine = Engine.open(self.disk.root, door=self.disk, settings=self.settings)

    def _observe(self) -> None:
        """Opening decides things that were not sure: its result, one or the other, is sure from now on."""
        for (topic, group, id_), fate in self.ledger.fates.items():
            if fate.sure is None or topic not in self.engine.topics:
                continue
            view = self.engine.message(topic, id_)
            state = None if view is None else view.groups.get(group, {}).get("state", "ready")
            may = {GONE} if state in (None, "history") else {DEAD} if state == "dead" else {COMES}
            self.ledger.fates[topic, group, id_] = Fate(frozenset(may) if may <= fate.may else fate.may)

    def reopen(self) -> None:
        self.engine.close()
        self.ledger = self.ledger.settle()
        self._open()

    def power_cut(self) -> None:
        """The story goes on with the state that a cut has left."""
        abandon(self.engine)
        _, tree = cut(self.disk.moments[-1], self.chance)
        self.held.clear()
        self._begin(tree)

    # Producing

    def _topic(self) -> str:
        return OTHER if OTHER in self.engine.topics and self.chance.random() < 0.4 else MAIN

    def _some(self, topic: str, most: int) -> list[str]:
        ids = [id_ for there, id_ in self.ledger.sent if there == topic]
        return self.chance.sample(ids, min(len(ids), self.chance.randint(1, most)))

    def submit(self) -> None:
        pick, topic = self.chance.choice, self._topic()
        batch = []
        for _ in range(pick([1, 1, 2, 3, 8])):
            due = self.now + pick([0, 0, 5, 60, 60, 2_000, 50_000])
            expires, body = pick([None] * 15 + [due + 100]), b"%d," % self.count * pick([0, 5, 20, 100, 200])
            level, headers = Priority(pick([0, 0, 0, 1, 2])), pick([None, None, {"k": "v"}])
            batch.append(Message(body, due, f"m{self.count}", 0, level, expires_ms=expires, headers=headers))
            self.count += 1
        self.together = [(topic, str(message.id)) for message in batch]
        known = [] if self.retaining else [id_ for id_ in self._some(topic, 2) if not self.ledger.sent[topic, id_].cancelled]
        again = [Message(b"other", self.now, id_) for id_ in known]
        receipt = self.engine.submit(topic, [*batch, *again], self.now)
        assert receipt.created == [True] * len(batch) + [False] * len(again), (receipt, self.now)
        for message in batch:
            self.ledger.sent[topic, str(message.id)] = Sent(message.due_ms, message.body, message.expires_ms is not None)

    def cancel(self) -> None:
        topic = self._topic()
        ids = self._some(topic, 3)
        if ids:
            for id_, outcome in durably(self.engine, topic, lambda: self.engine.cancel(topic, ids, self.now)).items():
                if outcome == "cancelled":
                    self.ledger.change(topic, id_, cancelled=True)

    def reschedule(self) -> None:
        topic = self._topic()
        for id_ in self._some(topic, 1):
            due, body = self.now + self.chance.choice([0, 60, 9_000]), b"new,%d" % self.count
            try:
                self.engine.reschedule(topic, id_, self.now, due_ms=due, body=body)
            except (Conflict, UnknownMessage, InvalidFireAt):  # also if it would be due after its expiry
                continue
            self.ledger.change(topic, id_, due_ms=due, body=body)

    def start_timers(self) -> None:
        """Messages take the place of others with their ids, all of them or none, unless a consumer has one."""
        topic = self._topic()
        ids = self._some(topic, 3)
        if not ids:
            return
        bodies = [b"timer,%d,%d" % (self.count, i) for i in range(len(ids))]
        dues = [self.now + self.chance.choice([0, 60, 9_000, 50_000]) for _ in ids]
        self.count += 1
        self.together = [(topic, id_) for id_ in ids]
        try:
            receipt = self.engine.submit(topic, Batch(bodies, dues, ids, if_exists=IfExists.REPLACE), self.now)
        except Conflict:
            self.together = []
            return
        assert receipt.duplicates == 0, receipt
        for id_, due, body in zip(ids, dues, bodies, strict=True):
            self.ledger.sent[topic, id_] = Sent(due, body)
            for group in GROUPS:
                self.ledger.fates.pop((topic, group, id_), None)

    def transact(self) -> None:
        """Puts, a cancel and a reschedule in one commit: all of it or nothing."""
        topic = self._topic()
        sleepers = self.engine.browse(topic)[0] if topic in self.engine.topics else []
        asleep = [message.id for message in sleepers if not message.group]
        ended, moved = self.chance.sample(asleep, 2) if len(asleep) > 1 else [*asleep, None, None][:2]
        new, due = [f"m{self.count}", f"m{self.count + 1}"], self.now + self.chance.choice([60, 9_000])
        self.count += 2
        batch = Batch([b"with,%d" % self.count] * 2, [self.now + 60] * 2, new)
        moves = [] if moved is None else [Reschedule(moved, due)]
        given = Transaction(batch, [] if ended is None else [ended], moves)
        opened = self.engine.topic(topic, create=True)
        self.together = [(topic, id_) for id_ in (*new, ended, moved) if id_ is not None]
        try:
            opened.stage_transaction(given, self.now)
        except InvalidFireAt:  # it would be due after its expiry
            self.together = []
            return
        opened.commit()
        self.engine.changed(opened, self.now)
        for id_, body in zip(new, batch.bodies, strict=True):
            self.ledger.sent[topic, id_] = Sent(self.now + 60, body)
        if ended is not None:
            self.ledger.change(topic, ended, cancelled=True)
        if moved is not None:
            self.ledger.change(topic, moved, due_ms=due)

    # Time

    def tick(self) -> None:
        self.now += self.chance.choice([1, 30, 100, 100, 1_000, 6_000, 45_000, 61_000])
        self.newest = max(self.now, self.newest)
        run_to_rest(self.engine, self.now)
        assert not self.engine.trouble, self.engine.trouble
        self.ledger.beat(self.now)

    # Consuming

    def _answered(self, topic: str, group: str, ids: Iterable[str], *sure: str, at_once: bool = False) -> None:
        at_once |= self.settings.ack_durability == "fsync"
        for id_ in ids:
            self.ledger.answered(topic, group, id_, sure, self.now, 0 if at_once else self.settings.beat_ms)

    def _group(self) -> tuple[str, str]:
        return self._topic(), self.chance.choice(GROUPS)

    def reserve(self) -> None:
        topic, group = self._group()
        if topic not in self.engine.topics:
            return
        if (topic, group) not in self.ledger.groups:
            self._enters(topic, group)
        auto = self.chance.random() < 0.1
        ids = self.engine.reserve(topic, group, self.chance.choice([1, 3, 20]), self.now, auto=auto).ids
        for id_ in ids:
            self.ledger.change(topic, id_, deliveries=self.ledger.sent[topic, id_].deliveries + 1)
        if auto:
            self._answered(topic, group, ids, GONE, at_once=True)
        else:
            self.held.setdefault((topic, group), []).extend(ids)

    def _enters(self, topic: str, group: str) -> None:
        """A group that is new sees retained messages: not those that all others have settled long ago."""
        self.ledger.groups.add((topic, group))
        if self.retaining:
            others = [other for there, other in self.ledger.groups if there == topic and other != group]
            for there, id_ in self.ledger.sent:
                if there == topic and all(self.ledger.fate(topic, other, id_) is not FRESH for other in others):
                    self.ledger.fates[topic, group, id_] = Fate(ANY)

    def _take(self, most: int) -> tuple[str, str, list[str]]:
        """Some of the messages that a group holds, each once: of one that is named twice in a list, the second is unknown."""
        topic, group = self._group()
        held = self.held.get((topic, group), [])
        ids = [held.pop(self.chance.randrange(len(held))) for _ in range(min(len(held), self.chance.randint(1, most)))]
        return topic, group, [] if topic not in self.engine.topics else list(dict.fromkeys(ids))

    def ack(self) -> None:
        topic, group, ids = self._take(6)
        if ids:
            unknown = durably(self.engine, topic, lambda: self.engine.ack(topic, group, ids, self.now)).unknown
            self._answered(topic, group, set(ids) - set(unknown), GONE)

    def fail(self) -> None:
        topic, group, ids = self._take(1)
        if ids:
            delay = self.chance.choice([None, None, 0, 100, 35_000])
            out = self.engine.ack(topic, group, [f"-{ids[0]}"], self.now, retry_delay_ms=delay, error="no")
            if out.dead:
                self._answered(topic, group, ids, DEAD)

    def extend(self) -> None:
        topic, group, ids = self._take(3)
        if ids:
            self.engine.extend(topic, group, ids, 500, self.now)
            self.held[topic, group] += ids

    def give_back(self) -> None:
        topic, group, ids = self._take(3)
        if ids:
            self.engine.give_back(topic, group, ids, self.now)

    # Groups and topics

    def place(self) -> None:
        topic, group = self._group()
        if topic in self.engine.topics:
            start: str | int = self.chance.choice(("earliest", "latest", "time"))
            self.engine.move_group(topic, group, self.now - 100 if start == "time" else start, self.now)
            self.ledger.groups.add((topic, group))
            self._loosen(topic, group)

    def drop_group(self) -> None:
        topic, group = self._group()
        if topic in self.engine.topics and group in self.engine.groups(topic):
            self.engine.drop_group(topic, group, self.now)
            self._loosen(topic, group)

    def _loosen(self, topic: str, group: str) -> None:
        """A group's cursor is not sure before the next checkpoint, so nothing is known of messages that came due already."""
        self.held.pop((topic, group), None)
        for there, id_ in self.ledger.sent:
            if there == topic and self.ledger.sent[there, id_].due_ms <= self.newest:
                self.ledger.fates[topic, group, id_] = Fate(ANY)

    def other_topic(self) -> None:
        """It is made with settings of its own, or removed."""
        if OTHER in self.engine.topics:
            self.together = [key for key in self.ledger.sent if key[0] == OTHER and self._sure_to_come(key)]
            self.engine.drop_topic(OTHER)
            self.ledger.drop(OTHER)
            for group in GROUPS:
                self.held.pop((OTHER, group), None)
        else:
            attempts = self.chance.choice([2, 5])
            self.engine.configure(OTHER, max_attempts=attempts)
            self.ledger.settings[OTHER] = attempts

    def _sure_to_come(self, key: Key) -> bool:
        fates = [self.ledger.fate(key[0], group, key[1]) for there, group in self.ledger.groups if there == key[0]]
        return bool(fates) and not self.ledger.sent[key].cancelled and all(GONE not in fate.may for fate in fates)

    # The rest

    def compact(self) -> None:
        topic = self._topic()
        if topic in self.engine.topics:
            self.engine.compact(topic)

    def _letters(self, topic: str) -> list[DeadLetter]:
        letters = list(self.engine.topic(topic).view.dead_letters.all(Filter())) if topic in self.engine.topics else []
        return self.chance.sample(letters, min(len(letters), 3))

    def requeue(self) -> None:
        topic = self._topic()
        letters = self._letters(topic)
        if letters:
            due = self.now + self.chance.choice([0, 50, 90_000])
            self.engine.requeue(topic, letters, self.now, due_ms=due, reset_attempts=self.chance.random() < 0.5)
            self._left(topic, letters, COMES)

    def delete_dead(self) -> None:
        topic = self._topic()
        letters = self._letters(topic)
        if letters:
            self.engine.delete_dead(topic, letters, self.now)
            self._left(topic, letters, GONE)

    def _left(self, topic: str, letters: Iterable[DeadLetter], outcome: str) -> None:
        """Dead letters have gone, durably. Of those from before their group was moved that tells nothing."""
        for letter in letters:
            if self.ledger.fate(topic, letter.group, letter.id).may != ANY:
                self.ledger.fates[topic, letter.group, letter.id] = Fate(frozenset((outcome,)))
