"""A story: producers and consumers of a few topics and groups on a simulated disk and clock, with ends of the process anywhere.

Everything comes from the seed, so a story is the same each time it is told. The story has the knowledge of its clients: ids that
they sent and messages that they were given. Whether the answers are right is the auditor's to say, one for each topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.harness.deferred_syncs import durably
from tests.harness.index_world import Later
from tests.trust.simulation_auditor import Fetch, Got
from tests.trust.simulation_disk import Crash, Drive, Process
from tests.trust.simulation_ledger import Sent, Side
from tests.trust.simulation_polls import Polls, request_of
from tests.trust.simulation_review import Review
from turtlemq.broker.results import Acked, Reserved
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, TurtleError, UnknownGroup, UnknownMessage
from turtlemq.model import Batch, Message, Priority
from turtlemq.server.fetches import Fetches
from turtlemq.server.rate_limit import FlowControl
from turtlemq.settings import Settings
from turtlemq.storage import file_budget
from turtlemq.storage.file_budget import FileBudget
from turtlemq.topic.dead_letters import DeadLetter, Filter

T = TypeVar("T")
Step = Callable[[str, Review], None]  # of a story: a topic's name and its auditor
_START_MS = 1_800_000_000_000


def settings_of(chance: Random) -> Settings:
    """A topic in small: segments, runs and leases that end within the story."""
    pick = chance.choice
    retaining = chance.random() < 0.25
    return Settings(
        segment_bytes=pick([4096, 8192, 40_000]),
        run_messages=pick([4, 8, 50]),
        compact_live_ratio=pick([0.05, 0.3, 0.6]),
        max_attempts=pick([1, 2, 3, 5]),
        backoff_base_ms=pick([10, 1_000, 20_000]),
        backoff_jitter=pick(["none", "equal", "full"]),
        ttr_ms=pick([50, 5_000, 60_000]),
        max_in_flight=pick([20, 100_000]),
        ack_durability=pick(["beat", "beat", "fsync"]),
        history_hours=0.01 if retaining else 1000,
        history_bytes=pick([20_000, 1 << 40]) if retaining else 1 << 40,
        group_expire_hours=pick([0, 0, 0.02, 0.1]),
    )


def priorities_of(chance: Random) -> dict[str, Any]:
    """Settings of priorities."""
    pick = chance.choice
    weights = {f"priority_{level}": pick([0, 1, 5]) for level in ("high", "normal", "low")}
    return weights | {
        "preempt_after_ms": pick([0, 1, 50]),
        "preempt_floor": pick([0, 0.05, 0.5]),
        "priority_high_p95_ms": pick([0, 5]),
    }


FEW_FILES = FileBudget(kept=1, readers=2, saves=1)  # logs give way to each other, in every fifth story


class Story:
    """One run over one seed, in an empty folder."""

    def __init__(self, root: Path, case: str, seed: int, **settings: Any) -> None:
        self.chance = Random(seed)
        self.pace = Random(seed)  # of the answers to long polls
        self.settings = replace(settings_of(self.chance), **priorities_of(Random(seed + 1)), **settings)
        self.drive = Drive(root)
        self.files = FEW_FILES if seed % 5 == 4 else file_budget.DEFAULT
        self.uses_timers, self.uses_schedules = seed % 3 == 0, seed % 3 == 1
        self.worker, self.flusher = (Later() if self.chance.random() < 0.4 else None for _ in range(2))
        self.now, self.steady = _START_MS, 0
        names = self.chance.sample(["a", "b.c", "d-e"], self.chance.choice([1, 1, 2]))
        self.case = case
        self.topics = {name: self.review(name) for name in names}
        self.groups = self.chance.sample(["default", "g", "h"], self.chance.choice([1, 2, 2, 3]))
        self.levels = self.chance.random() < 0.3
        self.count = 0  # messages sent
        self.leases: dict[tuple[str, str, str], list[str]] = {}  # by topic, group and id: the names that a client has heard
        self.unanswered: dict[str, list[list[Sent]]] = {name: [] for name in self.topics}
        self.seen: Counter[str] = Counter()
        self.ends = 0.0  # how often the process is about to end
        self.polls = Polls()
        self.begin()
        for name, audit in self.topics.items():
            for group in self.groups:
                self.engine.move_group(name, group, "earliest", self.now)
                audit.clock(self.now, self.steady)
                audit.groups[group] = Side()
                audit.used(group, made=True)
        self.ends = self.chance.choice([0.0, 0.03, 0.1, 0.2])

    def review(self, name: str) -> Review:
        """An auditor for a new topic."""
        return Review(f"{self.case}, topic {name}", self.settings)

    # The process

    def begin(self) -> None:
        """Start, again and again if it ends while it starts."""
        while True:
            self.process = self.new_process()
            for later in (self.worker, self.flusher):
                if later is not None:
                    later.jobs.clear()  # they ended with the process
            if self.chance.random() < self.ends:
                self.process.ends_in = self.chance.randint(0, 30)
            try:
                self.engine = Engine.open(
                    self.drive.root, door=self.process, settings=self.settings, worker=self.worker, flusher=self.flusher
                )
            except Crash:
                self.after_the_end()
                continue
            if not self.process.ended:
                self.replicate()
                self.fetches = Fetches(self.engine, FlowControl())
                for audit in self.topics.values():
                    audit.clock(self.now, self.steady)
                    audit.started()
                return
            self.after_the_end()

    def new_process(self) -> Process:
        """The process that is about to start."""
        return Process(self.drive, self.files)

    def replicate(self) -> None:
        """An answer is about to be given: standbys, if there are any, apply everything."""

    def after_the_end(self) -> None:
        """The state left by a process that was killed, or whose machine lost its power."""
        self.process.die()
        self.seen["kills"] += 1
        if self.chance.random() < 0.4:
            self.seen["kills"] -= 1
            self.seen["power cuts"] += 1
            self.drive.cut(self.chance)
            self.now, self.steady = self.now + 1, self.steady + 1  # a machine does not start in no time
            for audit in self.topics.values():
                audit.cut()

    def ask(
        self, audit: Review, call: Callable[[], T], heard: Callable[[T | None], None], may_wake: str | None = None
    ) -> T | None:
        """One request. If the process ends meanwhile, there is no answer, and it starts again. `may_wake`: a topic whose long
        polls the handler of this request looks after."""
        audit.clock(self.now, self.steady)
        self.seen["requests"] += 1
        try:
            told = call()
        except Crash:
            told = None
        except (TurtleError, OSError):
            if not self.process.ended:
                raise
            told = None
        if self.process.ended:
            self.seen["unanswered"] += 1
            heard(None)
            for poll in self.polls.lose():  # messages may have been reserved for it
                self.topics[poll.topic].clock(self.now, self.steady)
                self.topics[poll.topic].fetched(poll.asked, None)
            self.after_the_end()
            self.begin()
            return None
        self.replicate()
        heard(told)
        if may_wake is not None:
            self.fetches.look_after(may_wake)
        return told

    def stop(self) -> None:
        """A proper stop and a new start."""

        def stopped(told: bool | None) -> None:
            for audit in self.topics.values() if told else ():
                audit.clock(self.now, self.steady)
                audit.durable()

        def stop() -> bool:
            self.fetches.end()
            self.engine.close()
            return True

        if self.ask(next(iter(self.topics.values())), stop, stopped):
            self.hear_polls()
            self.process.die()
            self.seen["proper stops"] += 1
            self.begin()

    def end_now(self) -> None:
        """Between two requests."""
        self.polls.lose()
        self.after_the_end()
        self.begin()

    # Producers

    def submit(self, name: str, audit: Review) -> None:
        pick = self.chance.choice
        dues = [self.now + pick([0, 0, 5, 30, 200, 3_000, 20_000, 100_000, -20]) for _ in range(pick([1, 1, 2, 5, 30]))]
        self.send(name, audit, self.compose(dues, [0, 10, 100, 300]))
        again = self.unanswered[name].pop() if self.unanswered[name] and self.chance.random() < 0.7 else []
        if again and all(sent.cancelled is False and self.unsettled(audit, sent.id) for sent in again):  # else it may be new
            self.send(name, audit, again)

    def compose(self, dues: Sequence[int], sizes: Sequence[int]) -> list[Sent]:
        """A batch with these due times, and bodies of some of these sizes."""
        pick, batch = self.chance.choice, list[Sent]()
        number = self.count
        for due in dues:
            self.count += 1
            expires = due + pick([10, 3_000]) if self.chance.random() < 0.04 else None
            headers = {"k": f"v{self.count}"} if self.chance.random() < 0.2 else {}
            level = pick([0, 0, 1, 2]) if self.levels else 0
            body = self.chance.randbytes(pick(sizes))
            batch.append(Sent(f"m{self.count}", body, due, number, self.count, level, pick([0, 0, 0, 70]), expires, headers))
        return batch

    def send(self, name: str, audit: Review, batch: list[Sent], body: bytes | None = None) -> None:
        messages = self.messages_of(batch, body)

        def heard(told: list[bool] | None) -> None:
            audit.submitted(batch, told)
            if told is None:
                self.unanswered[name].append(batch)

        self.ask(audit, lambda: self.engine.submit(name, messages, self.now).created, heard)

    def messages_of(self, batch: Sequence[Sent], body: bytes | None) -> list[Message] | Batch:
        """A batch as a producer gives it. `body`: of each of them, in the place of its own."""
        return [
            Message(b, s.due_ms, s.id, s.ttr_ms, Priority(s.level), expires_ms=s.expires_ms, headers=s.headers or None)
            for s in batch
            for b in [s.body if body is None else body]
        ]

    def send_again(self, name: str, audit: Review) -> None:
        """The id is known: nothing changes, for any body."""
        held = [s for s in audit.sent.values() if s.accepted and s.cancelled is False and self.unsettled(audit, s.id)]
        if held:
            self.send(name, audit, [self.chance.choice(held)], b"other")

    def unsettled(self, audit: Review, id_: str) -> bool:
        """In some group, or in all if nothing is ever forgotten."""
        return not audit.forgetful or any(not audit.may_be(group, id_, "done", "dead", "gone") for group in audit.groups)

    def cancel(self, name: str, audit: Review) -> None:
        self.cancel_so(name, audit, self.some([s.id for s in audit.sent.values() if s.accepted], 3))

    def cancel_so(self, name: str, audit: Review, ids: list[str]) -> None:
        def cancel() -> dict[str, str]:
            return durably(self.engine, name, lambda: self.engine.cancel(name, ids, self.now))

        self.ask(audit, cancel, lambda told: audit.cancelled(ids, told))

    def reschedule(self, name: str, audit: Review) -> None:
        for id_ in self.some([s.id for s in audit.sent.values() if s.accepted and not s.ready], 1):
            self.reschedule_so(name, audit, id_, self.now + self.chance.choice([0, 10, 500, 30_000]))

    def reschedule_so(self, name: str, audit: Review, id_: str, due: int) -> None:
        """Another due time, and perhaps another body; not where it is unknown which one it has."""
        ((_, body), *others) = audit.sent[id_].versions
        if others:
            return
        if (end := audit.sent[id_].expires_ms) is not None:
            due = min(due, end - 1)  # a later one is refused
        changes: dict[str, object] = {"due_ms": due}
        if self.chance.random() < 0.3:
            changes["body"] = body = self.chance.randbytes(20)

        def change() -> bool:
            try:
                self.engine.reschedule(name, id_, self.now, **changes)
                return True
            except (Conflict, UnknownMessage):
                return False

        self.ask(audit, change, lambda told: audit.rescheduled(id_, (due, body), told))

    # Time

    def tick(self, *_: object) -> None:
        soon = min((at for audit in self.topics.values() for at in audit.moments(self.now)), default=None)
        if soon is not None and self.chance.random() < 0.4:
            self.pass_time(soon - self.chance.choice([0, 1]) - self.now)
        else:
            self.pass_time(self.chance.choice([1, 10, 40, 100, 1_000, 6_000, 40_000]))

    def tick_to(self, moment: int) -> None:
        """Let it be that late, if it is not later."""
        self.pass_time(max(0, moment - self.now))

    def pass_time(self, step: int) -> None:
        self.now, self.steady = self.now + step, self.steady + step
        self.run_ticks()

    def run_ticks(self) -> None:
        """As long as the engine wants more."""
        audits = list(self.topics.values())
        self.polls.end_late(self.fetches, self.steady)
        for name, audit in self.topics.items():
            audit.clock(self.now, self.steady)
            audit.waiting = self.polls.groups(name)
        self.ask(audits[0], self._until_rest, self._ticked)

    def _until_rest(self) -> bool:
        for later in (self.worker, self.flusher):
            if later is not None and self.chance.random() < 0.5:
                later.finish()
        for _ in range(1000):
            self.fetches.tick(self.now, lambda: self.chance.random() < 0.7)
            self.fetches.answer_polls(self.now, self.steady / 1000, lambda: self.pace.random() < 0.7)
            wake = self.engine.next_wake()
            if (wake is None or wake > self.now) and not self.fetches.has_changed:
                break
        else:
            raise AssertionError("the engine never comes to rest")
        if self.engine.trouble and not self.process.ended:
            raise AssertionError(f"trouble: {self.engine.trouble}")
        return True

    def _ticked(self, told: bool | None) -> None:
        saved = self.flusher is None or all(job.done() for job in self.flusher.jobs)
        for audit in self.topics.values():
            audit.ticked(bool(told), saved)
        if told:
            self.hear_polls()
            for poll in self.polls.waiting:  # nothing is ready for it
                self.topics[poll.topic].fetched(poll.asked, [])

    # Consumers

    def hear_polls(self) -> None:
        """Long polls that were answered, or whose time is up."""
        for poll, out in self.polls.take_answers():
            if out.ids:
                self.topics[poll.topic].fetched(poll.asked, got(out), more=True)
                self.note_leases(poll.topic, poll.asked, out)
                self.seen["polls woken"] += 1

    def poll(self, name: str, audit: Review) -> None:
        """A fetch that waits if nothing is ready."""
        pick = self.chance.choice
        asked = Fetch(pick(self.groups), pick([1, 5, 50]), pick([None, 30]), self.chance.random() < 0.1)
        self.poll_so(name, audit, asked, pick([500, 10_000, 60_000]))

    def poll_so(self, name: str, audit: Review, asked: Fetch, wait: int) -> Reserved | None:
        """Messages that are ready, or a poll that waits for the first; None: the process has ended."""
        out = self.fetch_so(name, audit, asked)
        if out is not None and not out.ids:
            self.polls.add(self.fetches, name, asked, self.steady + wait)
            self.seen["polls"] += 1
            self.run_ticks()
        return out

    def fetch(self, name: str, audit: Review) -> None:
        pick = self.chance.choice
        asked = Fetch(pick(self.groups), pick([1, 5, 50]), pick([None, None, 30, 100_000]), self.chance.random() < 0.1)
        self.fetch_so(name, audit, asked)

    def fetch_so(self, name: str, audit: Review, asked: Fetch) -> Reserved | None:
        out = self.ask(
            audit,
            lambda: self.fetches.fetch(request_of(name, asked), self.now, self.steady / 1000),
            lambda out: audit.fetched(asked, None if out is None else got(out), out is not None and out.more),
        )
        if out is not None:
            self.note_leases(name, asked, out)
        return out

    def note_leases(self, name: str, asked: Fetch, out: Reserved) -> None:
        """A client learns the name of its lease."""
        for id_ in out.ids if out.lease else ():
            self.leases.setdefault((name, asked.group, id_), []).append(out.lease)

    def names(self, name: str, group: str, ids: Sequence[str]) -> list[str] | None:
        """The leases that a request about these messages names: mostly the last one, now and then one that is over. None: the
        request names none, or a client has not heard of one."""
        known = [self.leases.get((name, group, id_), []) for id_ in ids]
        if not known or not all(known) or self.chance.random() < 0.5:
            return None
        return [leases[-1] if self.chance.random() < 0.7 else self.chance.choice(leases) for leases in known]

    def held(self, audit: Review) -> tuple[str, list[str]]:
        """A group, and messages that some consumer of it believes to hold."""
        group = self.chance.choice(self.groups)
        ids = [i for i in audit.groups[group].at if audit.may_be(group, i, "leased")] if group in audit.groups else []
        return group, self.some(ids, self.chance.choice([1, 5, 60]))

    def ack(self, name: str, audit: Review) -> None:
        group, ids = self.held(audit)
        settled = [i for i in audit.groups[group].at if audit.is_(group, i, "done")] if group in audit.groups else []
        acks = [f"-{i}" if self.chance.random() < 0.3 else i for i in (*ids, *self.some(settled, 2))]
        self.ack_so(name, audit, group, acks)

    def ack_so(self, name: str, audit: Review, group: str, acks: list[str], leases: list[str] | None = None) -> Acked | None:
        delay = self.chance.choice([None, None, 0, 100, 40_000])
        names = self.names(name, group, [ack.removeprefix("-") for ack in acks]) if leases is None else leases
        asked = names[0] if names and len(set(names)) == 1 else names
        return self.ask(
            audit,
            lambda: self.engine.ack(name, group, acks, self.now, leases=asked, retry_delay_ms=delay, error="no"),
            lambda told: audit.acked(group, acks, delay, told, names),
            may_wake=name,
        )

    def extend(self, name: str, audit: Review) -> None:
        (group, ids), ttr = self.held(audit), self.chance.choice([10, 500, 10_000])
        names = self.names(name, group, ids)
        self.ask(
            audit,
            lambda: self.engine.extend(name, group, ids, ttr, self.now, names),
            lambda told: audit.extended(group, ids, ttr, told, names),
        )

    def give_back(self, name: str, audit: Review) -> None:
        group, ids = self.held(audit)
        self.ask(
            audit,
            lambda: self.engine.give_back(name, group, ids, self.now),
            lambda told: audit.given_back(group, ids, told),
            may_wake=name,
        )

    def move(self, name: str, audit: Review) -> None:
        """A group starts again, or a new one comes. Not where history goes: it is unknown which messages are left to be seen."""
        if not audit.forgetful:
            group, start = self.chance.choice([*self.groups, "late"]), self.chance.choice(["earliest", "latest"])
            self.ask(
                audit,
                lambda: self.engine.move_group(name, group, start, self.now),
                lambda told: audit.placed(group, start, told is not None),
                may_wake=name,
            )
            self.groups = list(dict.fromkeys([*self.groups, group]))

    def retry_now(self, name: str, audit: Review) -> None:
        """An operator does not want to wait."""
        group = self.chance.choice(self.groups)
        side = audit.groups.get(group)
        ids = [i for i in side.at if audit.may_be(group, i, "waits", "dead") and (group, i) not in audit.stray] if side else []
        for id_ in self.some(ids, 3):
            self.run_ticks()  # a retry hands off all due messages: so they are counted as of a tick
            self.ask(
                audit,
                lambda i=id_: self._retry_now(name, i, group),  # type: ignore[misc]
                lambda told, i=id_: audit.retried(i, group, told),  # type: ignore[misc]
                may_wake=name,
            )
        self.look_at(name, audit, ids[:3])

    def _retry_now(self, name: str, id_: str, group: str) -> str:
        try:
            self.engine.retry_now(name, id_, group, self.now)
            return "done"
        except (Conflict, UnknownMessage, UnknownGroup) as error:
            return str(error)

    # The dead

    def letters(self, name: str, audit: Review) -> list[DeadLetter]:
        """All of them; some that may be worked on are returned."""
        told = self.ask(
            audit,
            lambda: (list(self.engine.topic(name).view.dead_letters.all(Filter())), self.engine.groups(name)),
            lambda told: None if told is None else audit.letters(*told),
        )
        return [] if told is None else self.some(audit.surely_dead(told[0]), 5)

    def requeue(self, name: str, audit: Review) -> None:
        letters, due = self.letters(name, audit), self.now + self.chance.choice([0, 50, 90_000])
        reset, per_s = self.chance.random() < 0.5, self.chance.choice([None, 10.0])
        spread = 100 * len(letters) if per_s else 0
        expires = self.chance.choice([None, None, due + spread + 10, due + spread + 5_000])
        self.ask(
            audit,
            lambda: self.engine.requeue(
                name, letters, self.now, due_ms=due, reset_attempts=reset, per_s=per_s, expires_ms=expires
            ),
            lambda told: audit.requeued(letters, due, spread, reset, expires, told),
            may_wake=name,
        )

    def delete_dead(self, name: str, audit: Review) -> None:
        letters = self.letters(name, audit)
        self.ask(audit, lambda: self.engine.delete_dead(name, letters, self.now), lambda told: audit.deleted(letters, told))

    # Looking, and keeping house

    def look(self, name: str, audit: Review) -> None:
        self.ask(
            audit,
            lambda: (self.engine.stats(name), self.engine.groups(name)),
            lambda told: None if told is None else audit.figures(*told),
        )
        tried = [id_ for side in audit.groups.values() for id_ in side.at]
        self.look_at(name, audit, [*self.some(list(audit.sent), 3), *self.some(tried, 6)])

    def look_at(self, name: str, audit: Review, ids: Sequence[str]) -> None:
        for id_ in ids:
            self.ask(
                audit,
                lambda i=id_: [self.engine.message(name, i)],  # type: ignore[misc]
                lambda told, i=id_: None if told is None else audit.looked(i, told[0]),  # type: ignore[misc]
            )

    def compact(self, name: str, audit: Review) -> None:
        self.ask(audit, lambda: self.engine.compact(name), lambda _: None)

    def some(self, items: list[T], most: int) -> list[T]:
        return self.chance.sample(items, min(len(items), self.chance.randint(1, most)))

    # The run

    def rare_scenes(self) -> list[Step]:
        """Steps of several requests in a row. None here: see `simulation_scenes`."""
        return []

    def rarest_scenes(self) -> list[Step]:
        """Scenes that come half as often."""
        return []

    def tell(self, steps: int) -> Counter[str]:
        """So many steps, and then all of it to the end."""
        often: list[Step] = [self.submit, self.tick, self.tick, self.fetch, self.fetch, self.ack, self.ack]
        seldom: list[Step] = [
            self.cancel,
            self.reschedule,
            self.extend,
            self.give_back,
            self.requeue,
            self.retry_now,
            self.look,
            self.poll,
            self.send_again,
        ]
        rare: list[Step] = [self.delete_dead, self.move, self.compact, *self.rare_scenes()]
        choices: list[Step] = [*often * 12, *seldom * 4, *rare * 2, *self.rarest_scenes()]
        for _ in range(steps):
            dice = self.chance.random()
            if dice < self.ends / 2:
                self.process.ends_in = self.chance.randint(0, 12)
            elif dice < self.ends * 0.7:
                self.end_now()
            elif dice < self.ends * 0.7 + 0.02:
                self.stop()
            name = self.chance.choice(list(self.topics))
            self.chance.choice(choices)(name, self.topics[name])
        self.drain()
        for audit in self.topics.values():
            self.seen += audit.seen
        return self.seen

    def drain(self) -> None:
        """No more ends of the process; all consumers fetch and acknowledge until nothing comes."""
        self.ends, self.process.ends_in = 0.0, -1
        for _ in range(50):
            self.pass_time(100_000)
            for name, audit in self.topics.items():
                for group in self.groups:
                    while (out := self.fetch_so(name, audit, Fetch(group, 1_000, None, False))) is not None and out.ids:
                        told = self.engine.ack(name, group, out.ids, self.now)
                        audit.acked(group, out.ids, None, told)
            if not any(sum(self.left(name)) for name in self.topics):
                break
        for name, audit in self.topics.items():
            self.letters(name, audit)
            self.look(name, audit)
            self.look_at(name, audit, self.some(list(audit.sent), 30))
            audit.end()
            if any(self.left(name)):
                audit.fail("in the end nothing is left over", self.engine.stats(name))
        if problems := self.engine.check():
            next(iter(self.topics.values())).fail("the files are sound", problems)
        self.close()

    def close(self) -> None:
        """The end of the story."""
        self.engine.close()
        self.process.die()

    def left(self, name: str) -> tuple[int, int, int]:
        """The messages that are not over yet."""
        stats = self.engine.stats(name)
        return stats.sleep, stats.ready, stats.reserve


def got(out: Reserved) -> list[Got]:
    """The columns and documents of an answer, message by message."""
    documents, got = iter(out.documents()), list[Got]()
    for piece, until in zip(out.pieces, out.until_ms, strict=True):
        held = piece.messages
        rows = zip(held.ids, held.attempts.tolist(), held.due_ms.tolist(), until.tolist(), strict=True)
        for id_, attempt, due, end in rows:
            document = next(documents)
            got.append(Got(id_, attempt, due, document.body, dict(document.headers), end, out.lease))
    return got
