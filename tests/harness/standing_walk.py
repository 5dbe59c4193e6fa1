"""Random walks over all operations of an engine; after every step all that can be asked about a message must agree.

Compared are the message view, the listings of every state, the figures of topic and groups, and Spark's kind `messages`. Every
change of a message's state in a group must follow rows of the life cycle table whose events the step can cause. There is no
model of the engine here: the sources of an answer are compared with each other, and with the few counts that answers themselves
give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.engine_disk import abandon
from tests.harness.spark_data import rows as spark_rows
from turtlemq import lifecycle
from turtlemq.broker.results import Extended
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, UnknownMessage
from turtlemq.if_exists import IfExists
from turtlemq.index.columns import as_batch
from turtlemq.model import Message, Priority
from turtlemq.settings import Settings
from turtlemq.standing import NEVER_HAD
from turtlemq.storage.door import Door
from turtlemq.topic import facts
from turtlemq.topic.dead_letters import DeadLetter, Filter
from turtlemq.topic.message_view import MessageView

TOPIC, GROUPS = "t", ("a", "b", "c")
OWN_IDS = [f"k{n}" for n in range(10)]
SERVER_IDS_MAX = 6  # the newest ones are cancelled and rescheduled
CLOCK_EVENTS = ("due", "lease ends", "last attempt fails", "back off", "retention", "delete")
EVENTS = {  # by operation: those that it can cause
    "put": ("put",),
    "put_mode": ("put", "reschedule"),
    "reschedule": ("reschedule",),
    "tick": CLOCK_EVENTS,
    "fetch": ("fetch", "expire", "ack"),
    "ack": ("ack", "fail", "back off", "last attempt fails"),
    "extend": ("extend",),
    "give_back": ("give back",),
    "move_group": ("replay", "skip"),
    "drop_group": (),
    "cancel": ("cancel",),
    "requeue": ("requeue", "delete"),
    "delete_dead": ("delete",),
    "compact": (),
    "checkpoint": (),
    "restart": (),
    "crash": (),
    "traffic": ("put", *CLOCK_EVENTS, "fetch", "expire", "ack", "fail"),
}
WEIGHTS = {"put": 5, "tick": 6, "fetch": 6, "ack": 6, "move_group": 3, "cancel": 3, "traffic": 3, "restart": 0.5, "crash": 0.5}


class Disagreement(AssertionError):
    """Two sources say different things about a message, or its state changed along no row of the life cycle table."""


@dataclass(slots=True)
class Observed:
    """Everything that was asked after a step."""

    views: dict[str, MessageView | None] = field(default_factory=dict)
    letters: dict[tuple[str, str], int] = field(default_factory=dict)  # (group, id) → seq
    born: dict[str, int] = field(default_factory=dict)  # group → the epoch in which it was made
    standings: dict[str, dict[str, str]] = field(default_factory=dict)  # id → group → standing; shown as states in the views
    removed: set[str] = field(default_factory=set)  # ids of which retries or dead letters are left alone


def must(holds: bool, *told: object) -> None:
    if not holds:
        raise Disagreement(*told)


class Walk:
    """One walk from one seed."""

    def __init__(self, root: Path, seed: int, *, spark: bool = True, door: Door | None = None) -> None:
        self.root, self.chance, self.spark, self.door = root, Random(seed), spark, door
        self.retention = self.chance.random() < 0.6
        self.levels = self.chance.random() < 0.5
        self.settings = Settings(
            segment_bytes=4096,
            run_messages=self.chance.choice([4, 8, 1000]),
            max_attempts=self.chance.choice([1, 2, 4]),
            ttr_ms=self.chance.choice([1_000, 50_000]),
            backoff_base_ms=self.chance.choice([0, 1_000, 40_000]),
            backoff_jitter="none",
            history_hours=0 if self.retention else 168,
            history_bytes=0 if self.retention else 1 << 40,
            dead_max_count=self.chance.choice([3, 1_000]),
        )
        self.now = 1_000_000
        self.engine = Engine.open(root, settings=self.settings, door=door)
        self.engine.configure(TOPIC)
        self.given: list[str] = []  # ids that the server gave
        self.cancelled = 0
        self.acked: Counter[str] = Counter()
        self.steps: list[str] = []
        self.seen: Counter[str] = Counter()  # counts for the figures of the trust suite
        self.before = Observed()
        self.known: set[str] = set()  # ids that were stored at some time
        self.reused: set[str] = set()  # by the last step
        self.ended: set[str] = set()  # those of them that the topic does not know any more

    def run(self, steps: int) -> Counter[str]:
        """Take steps, and compare after each. Raises Disagreement."""
        names = list(EVENTS)
        weights = [WEIGHTS.get(name, 1.0) for name in names]
        for number in range(steps):
            operation = self.chance.choices(names, weights)[0]
            self.steps.append(operation)
            self.reused = set()
            step: Callable[[], set[str] | None] = getattr(self, f"_{operation}")
            moved = step()
            self.seen["steps"] += 1
            self.compare(operation, moved)
            if number % 20 == 19:
                must(self.engine.check() == [], self.engine.check())
        self.engine.close()
        return self.seen

    # Operations. Each returns the groups to which its events are limited, None for all.

    def _some(self, of: Iterable[Any], count: int = 3) -> list[Any]:
        every = list(of)
        return self.chance.sample(every, min(len(every), self.chance.randint(1, count)))

    def _ids(self) -> list[str]:
        return OWN_IDS + self.given[-SERVER_IDS_MAX:]

    def _held(self, group: str) -> list[str]:
        return [id_ for id_, view in self.before.views.items() if view and _state_in(view, group) == "reserve"]

    def _group(self) -> str:
        return self.chance.choice(list(self.before.born) or GROUPS)

    def _put(self) -> None:
        messages = []
        free = [id_ for id_ in OWN_IDS if (view := self.before.views.get(id_)) is None or view.state != "cancelled"]
        for id_ in self._some(free + [None] * 3):  # a cancelled id would begin a second life
            due = self.now + self.chance.choice([0, 0, 10, 5_000, 120_000])
            expires = due + self.chance.choice([1, 5_000, 200_000]) if self.chance.random() < 0.15 else None
            level = self.chance.choice(list(Priority)) if self.levels else Priority.NORMAL
            body = b"x" * self.chance.choice([0, 10, 600])
            messages.append(Message(body, due, id=id_, expires_ms=expires, priority=level))
        receipt = self.engine.submit(TOPIC, messages, self.now)
        for message, id_, created in zip(messages, receipt.ids, receipt.created, strict=True):
            if message.id is None:
                self.given.append(id_)
            elif created != (self.before.views.get(id_) is None):
                raise Disagreement("put", id_, "created" if created else "duplicate", self.before.views.get(id_))

    def _put_mode(self) -> None:
        """A batch with `if_exists`, also under ids that were cancelled. A conflict changes nothing."""
        messages = []
        for id_ in self._some(OWN_IDS):
            due = self.now + self.chance.choice([0, 10, 5_000, 120_000])
            messages.append(Message(b"y" * self.chance.choice([0, 10, 600]), due, id=id_))
        batch = as_batch(messages)
        batch.if_exists = [self.chance.choice(list(IfExists)) for _ in messages]
        try:
            receipt = self.engine.submit(TOPIC, batch, self.now)
        except Conflict as error:
            self.seen["conflicts"] += 1
            must(error.details["state"] is not None, "conflict without a state", error)
            return
        for i, message in enumerate(messages):
            id_ = str(message.id)
            if (i in receipt.replaced or receipt.created[i]) and self.before.views[id_] is not None:
                self.reused.add(id_)
        self.seen["puts under known ids"] += len(self.reused)

    def _reschedule(self) -> None:
        id_ = self.chance.choice(self._ids())
        view = self.before.views.get(id_)
        allowed = view is not None and view.state == "sleep" and not view.groups
        due = self.now + self.chance.choice([0, 50_000])
        if view is not None and view.optional.expires_ms is not None:
            due = min(due, view.optional.expires_ms - 1)  # a later one is refused
        try:
            self.engine.reschedule(TOPIC, id_, self.now, due_ms=due)
            must(allowed, "rescheduled", id_, view)
        except (Conflict, UnknownMessage) as error:
            must(not allowed and isinstance(error, UnknownMessage) == (view is None), "not rescheduled", id_, view, error)

    def _tick(self) -> None:
        self.now += self.chance.choice([1, 100, 2_000, 31_000, 61_000, 200_000])
        for _ in range(20):
            wake = self.engine.tick(self.now)
            if wake is None or wake > self.now:
                break

    def _fetch(self) -> set[str]:
        group = self.chance.choice(GROUPS)
        auto = self.chance.random() < 0.1
        ttr = self.chance.choice([None, None, 100, 300_000])
        got = self.engine.reserve(TOPIC, group, self.chance.choice([1, 2, 5]), self.now, ttr_ms=ttr, auto=auto)
        self.acked[group] += len(got) if auto else 0
        self.seen["deliveries"] += len(got)
        return {group}

    def _ack(self) -> set[str]:
        group = self._group()
        acks = [id_ if self.chance.random() < 0.4 else f"-{id_}" for id_ in self._some(self._held(group))]
        delay = self.chance.choice([None, None, 0, 100, 40_000, 90_000])
        out = self.engine.ack(TOPIC, group, [*acks, "nobody"], self.now, retry_delay_ms=delay, error="no")
        must(out.unknown == ["nobody"], "held", acks, out)
        self.acked[group] += out.acked
        return {group}

    def _extend(self) -> set[str]:
        group = self._group()
        ids = self._some(self._held(group))
        must(self.engine.extend(TOPIC, group, ids, 70_000, self.now) == Extended(len(ids), []), "extend", group, ids)
        return {group}

    def _give_back(self) -> set[str]:
        group = self._group()
        ids = self._some(self._held(group))
        must(self.engine.give_back(TOPIC, group, ids, self.now) == (len(ids), []), "give back", group, ids)
        return {group}

    def _move_group(self) -> set[str]:
        group = self.chance.choice(GROUPS)
        past = self.now - self.chance.choice([0, 1_000, 60_000, 200_000])
        start: str | int = self.chance.choice(("earliest", "latest", "")) or past
        self.engine.move_group(TOPIC, group, start, self.now)
        return {group}

    def _drop_group(self) -> None:
        if self.before.born:
            group = self._group()
            self.engine.drop_group(TOPIC, group, self.now)
            del self.acked[group]

    def _cancel(self) -> None:
        ids = self._some([*self._ids(), "nobody"])
        for id_, answer in self.engine.cancel(TOPIC, ids, self.now).items():
            view = self.before.views.get(id_)
            self.cancelled += answer == "cancelled"
            self.seen["cancelled"] += answer == "cancelled"
            if answer == "unknown" or view is None:
                must(answer == "unknown" and view is None, "cancel", id_, answer, view)
            elif answer == "cancelled before":
                must(view.state == "cancelled", "cancel", id_, answer, view)
            elif answer != "cancelled":
                letters = {other for _, other in self.before.letters}
                shown = {view.state, *(entry["state"] for entry in view.groups.values())}
                must(answer in shown or (answer == "dead" and id_ in letters), "cancel", id_, answer, view)

    def _letters(self) -> list[DeadLetter]:
        return list(self.engine.topic(TOPIC).view.dead_letters.all(Filter()))

    def _requeue(self) -> None:
        letters = self._some(self._letters())
        due = self.chance.choice([None, self.now + 100, self.now + 90_000])
        reset = self.chance.random() < 0.5
        count = self.engine.requeue(TOPIC, letters, self.now, due_ms=due, reset_attempts=reset)
        must(count == len(letters), "requeue", count, letters)
        self.seen["requeued"] += count

    def _delete_dead(self) -> None:
        letters = self._some(self._letters())
        must(self.engine.delete_dead(TOPIC, letters, self.now) == len(letters), "delete", letters)

    def _compact(self) -> None:
        self.engine.compact(TOPIC)

    def _checkpoint(self) -> None:
        self.engine.topic(TOPIC).checkpoint()

    def _restart(self) -> None:
        self.engine.close()
        self.engine = Engine.open(self.root, settings=self.settings)

    def _crash(self) -> None:
        abandon(self.engine)
        self.engine = Engine.open(self.root, settings=self.settings)

    def _traffic(self) -> None:
        """Large messages pass through all groups, so that the ready log rolls and retention can remove the others' documents.
        Of the messages with own ids that are delivered with them, half fail with a long back-off."""
        messages = [Message(b"x" * 1_000, self.now) for _ in range(5)]
        self.given += self.engine.submit(TOPIC, messages, self.now).ids
        self._tick()
        for group in self.engine.groups(TOPIC):
            ids = self.engine.reserve(TOPIC, group, 50, self.now).ids
            failed = {id_ for id_ in ids if id_ in OWN_IDS and self.chance.random() < 0.5}
            acks = [f"-{id_}" if id_ in failed else id_ for id_ in ids]
            self.acked[group] += self.engine.ack(TOPIC, group, acks, self.now, retry_delay_ms=90_000).acked
        self._tick()

    # Comparing

    def compare(self, operation: str, limited_to: set[str] | None = None) -> None:
        """Ask everything, and compare the answers with each other and with those before the step."""
        topic = self.engine.topic(TOPIC)
        after = Observed({id_: self.engine.message(TOPIC, id_) for id_ in OWN_IDS + self.given})
        after.letters = {(letter.group, letter.id): letter.document.seq for letter in self._letters()}
        after.born = {name: group.born for name, group in topic.stores.broker.groups.items()}
        ids = [id_ for id_, view in after.views.items() if view is not None and view.groups]
        gathered = facts.gather(topic.stores, ids)
        cancelled = {id_ for id_ in ids if (view := after.views[id_]) is not None and view.state == "cancelled"}
        known = facts.facts_of(topic.stores, ids, gathered, cancelled)
        for id_, view in after.views.items():
            if view is not None and view.groups:
                after.standings[id_] = facts.standings(topic.stores, id_, gathered, known)
                after.removed |= {id_} if id_ not in gathered.located.documents else set()
        self._compare_listings(after)
        self._compare_figures(after)
        if self.spark:
            self._compare_spark(after)
        self._follow_table(after, operation, limited_to)
        self.seen["of which only a retry or a letter was left"] += len(after.removed - self.before.removed)
        self.seen["ids used again"] += operation == "put" and len(self.ended & {id_ for id_ in after.views if after.views[id_]})
        self.ended = {id_ for id_ in self.known if after.views.get(id_) is None}
        self.known |= {id_ for id_, view in after.views.items() if view is not None}
        self.before = after
        self.given = [id_ for id_ in self.given if after.views[id_] is not None]

    def _list(self, state: str) -> list[MessageView]:
        found: list[MessageView] = []
        cursor: str | None = None
        limit = self.chance.choice([5, 100, 100])
        while True:
            page, cursor = self.engine.topic(TOPIC).view.messages(state, limit=limit, cursor=cursor)
            found += page
            if cursor is None:
                return found

    def _compare_listings(self, after: Observed) -> None:
        views = {id_: view for id_, view in after.views.items() if view is not None}
        for state in ("ready", "reserve", "history", "cancelled"):
            listed = sorted(view.id for view in self._list(state))
            must(listed == sorted(id_ for id_, view in views.items() if view.state == state), state, listed, views)
        asleep = sorted((*view.groups, view.id) for view in self._list("sleep"))
        expected = [(id_,) for id_, view in views.items() if view.state == "sleep" and not view.groups]
        retries = [(group, id_) for id_, view in views.items() for group in view.groups if _state_in(view, group) == "sleep"]
        must(asleep == sorted([*expected, *retries]), "sleep", asleep, expected, retries)
        dead = sorted((*view.groups, view.id) for view in self._list("dead"))
        must(dead == sorted(after.letters), "dead", dead, after.letters)
        for group, id_ in dead:
            must(id_ in views and group in views[id_].groups, "a letter without its message", group, id_, after.views[id_])
        shown = {(group, id_) for id_, view in views.items() for group in view.groups if _state_in(view, group) == "dead"}
        must(shown <= {*dead}, "dead without a letter", shown, dead)

    def _compare_figures(self, after: Observed) -> None:
        stats, groups = self.engine.stats(TOPIC), self.engine.groups(TOPIC)
        every = [view for view in after.views.values() if view is not None]
        for name, figures in groups.items():
            states = Counter(_state_in(view, name) for view in every if name in view.groups)
            letters = sum(group == name for group, _ in after.letters)
            told = (figures.ready, figures.reserve, figures.dead, figures.history)
            must(told == (states["ready"], states["reserve"], letters, self.acked[name]), name, told, states, letters, self.acked)
        if not groups:
            must(stats.ready == sum(view.state == "ready" for view in every), "unclaimed", stats, every)
        must(stats.dead == len(after.letters), stats, after.letters)
        must(stats.cancelled == self.cancelled, stats, self.cancelled)
        page, _ = self.engine.browse(TOPIC, limit=10_000)
        must(stats.sleep == len(page), stats, page)

    def _compare_spark(self, after: Observed) -> None:
        table: dict[tuple[str | None, str], dict[str, Any]] = {}
        others: list[dict[str, Any]] = []
        for row in sorted(spark_rows(self.root, topic=TOPIC, kind="messages"), key=lambda row: row["seq"] or 1 << 62):
            if (row["group"], row["id"]) in table:  # an earlier message of the same id
                others.append(table[row["group"], row["id"]])
            table[row["group"], row["id"]] = row
        for id_, view in after.views.items():
            own = {group: row for (group, other), row in table.items() if other == id_}
            self._compare_attempts(id_, view, own)
            others += [own.pop(group) for group in list(own) if not _is_expected(own, group, view)]
            self._compare_rows(id_, view, {group: row["state"] for group, row in own.items()}, after)
        for row in others:
            must(row["state"] in ("history", "cancelled"), "a row too many", row, after.views.get(row["id"]))

    def _compare_attempts(self, id_: str, view: MessageView | None, own: dict[str | None, dict[str, Any]]) -> None:
        """Of groups that were not moved: a lookup searches the history of others no further than it must."""
        groups = self.engine.topic(TOPIC).stores.broker.groups
        for group, row in own.items():
            if view is None or group not in view.groups or group not in groups or groups[group].epoch != groups[group].born:
                continue
            shown = [one.fields() for name, one in view.attempts if name == group]
            must((row["attempts"] or []) == shown, "attempts", id_, group, row["attempts"], shown)
            self.seen["attempts"] += len(shown)

    def _compare_rows(self, id_: str, view: MessageView | None, states: dict[str | None, str], after: Observed) -> None:
        if view is None:
            must(states == {}, id_, view, states)
            return
        standings = after.standings.get(id_, {})
        expected: dict[str | None, str] = {group: _state_in(view, group) for group in view.groups}
        for group, standing in standings.items():
            if standing == NEVER_HAD and group not in states:
                del expected[group]
        there = [group for group in view.groups if group in after.born]
        if all(standings[group] == NEVER_HAD for group in there) and id_ not in after.removed:
            expected[None] = "history" if there else view.state
        must(states == expected, "Spark", id_, states, expected, view)

    def _follow_table(self, after: Observed, operation: str, limited_to: set[str] | None) -> None:
        for id_, view in after.views.items():
            for group, born in after.born.items():
                if self.before.born.get(group) != born or id_ not in self.before.views:
                    continue
                was, now = (_state_of(observed.views[id_], group) for observed in (self.before, after))
                if id_ in self.reused:  # another message
                    continue
                events = EVENTS[operation] if limited_to is None or group in limited_to else ()
                if id_ in self.before.removed:  # retention waited for the last retry or dead letter
                    events = (*events, "retention")
                sources, targets = {was}, {now}
                if operation == "cancel" and self.before.standings.get(id_, {}).get(group) == NEVER_HAD:
                    continue  # it has nothing to do with the group
                if self.before.letters.get((group, id_)) == after.letters.get((group, id_), -1):  # it hides `history`
                    sources |= {"history"} if was == "dead" else set()
                    targets |= {"history"} if now == "dead" else set()
                must(bool(_reachable(sources, events) & targets), operation, id_, group, was, "became", now, view)
                if was != now:
                    self.seen["changes of state"] += 1
                    self.seen[f"tried: {was or 'nowhere'} to {now or 'nowhere'}"] += 1


def _state_in(view: MessageView, group: str) -> str:
    return str(view.groups.get(group, {}).get("state", ""))


def _state_of(view: MessageView | None, group: str) -> str:
    """The state of a message for a group that exists, whether it has to do with the message yet or not."""
    if view is None:
        return lifecycle.NOWHERE
    return _state_in(view, group) or view.state


def _is_expected(rows: dict[str | None, dict[str, Any]], group: str | None, view: MessageView | None) -> bool:
    """Rows that are not: of messages that only the history or a tombstone tells of, and of groups that are gone."""
    if view is None:
        return False
    if group is None:  # a cancelled sleeper whose id has been put again is an earlier message
        return rows[group]["state"] != "cancelled" or view.state == "cancelled"
    return group in view.groups


def _reachable(sources: set[str], events: tuple[str, ...]) -> set[str]:
    found = set(sources)
    while True:
        more = {row.target for row in lifecycle.TRANSITIONS if row.source in found and row.event in events} - found
        if not more:
            return found
        found |= more
