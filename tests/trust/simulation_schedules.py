"""Recurring schedules in the stories: a topic of their own, with an auditor that knows only the requests and their answers.

Its rules: each time of a schedule that catches up is fired exactly once, never early, and none that is not a time of it; a firing
that was acknowledged comes no more; a trigger puts one message. The process may end in the midst of all of it, with or without
the power, and a standby may go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tests.trust.model import Broken
from tests.trust.simulation_review import Review
from turtlemq.schedules import LEAD_MS, Schedule, Timing, firing_id
from turtlemq.topic.schedule_store import StoredSchedule
from turtlemq.topic.topic import Topic

if TYPE_CHECKING:
    from tests.trust.simulation_story import Story

TOPIC, GROUP = "timed", "g"
PLANS_MAX = 3  # schedules at one time
_FORGETS = ("power cuts", "power cuts of standbys")  # after which an acknowledged message may come again


@dataclass(slots=True)
class Plan:
    """A schedule as it was asked for."""

    name: str
    put_ms: int
    every_ms: int = 0
    delays_ms: tuple[int, ...] = ()
    dropped_ms: int | None = None  # no later time is fired

    def times(self, to_ms: int) -> Iterator[int]:
        """Its times up to this one."""
        at_ms = self.put_ms
        for step_ms in self.delays_ms or iter(lambda: self.every_ms, None):
            at_ms += step_ms
            if at_ms > to_ms:
                return
            yield at_ms


class Timetable:
    """The schedules of one story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._plans: dict[str, Plan] = {}
        self._triggered: dict[str, bool] = {}  # by id: whether the request was answered
        self._fired: set[str] = set()  # delivered at least once
        self._done: set[str] = set()  # acknowledged, surely
        self._count = self._cuts = 0

    def step(self, _: str, audit: Review) -> None:
        """Something happens to schedules."""
        chance = self._story.chance
        live = [plan for plan in self._plans.values() if plan.dropped_ms is None]
        if len(live) < PLANS_MAX:
            self._put(audit)
        elif chance.random() < 0.2 and self._consume(audit):
            self._drop(audit, chance.choice(live))
        elif chance.random() < 0.3:
            self._trigger(audit, chance.choice(live))
        if chance.random() < 0.6:
            self._story.pass_time(chance.choice([100, 700, 2_500, 5_000, 11_000]))
        self._consume(audit)

    def finish(self, audit: Review) -> None:
        """The end of the story: the process does not end any more."""
        while not self._consume(audit):
            pass
        for plan in self._plans.values():
            if plan.dropped_ms is None:
                self._drop(audit, plan)

    # Requests

    def _topic(self) -> Topic:
        engine = self._story.engine
        topic = engine.topic(TOPIC, create=True)
        if topic.settings.group_expire_hours or topic.settings.max_in_flight < 1_000:
            engine.configure(TOPIC, group_expire_hours=0.0, max_in_flight=100_000)
        return topic

    def _put(self, audit: Review) -> None:
        story, pick = self._story, self._story.chance.choice
        self._count += 1
        plan = Plan(f"s{self._count}", story.now)
        if pick([True, True, False]):
            plan.every_ms = pick([700, 3_000, 5_000, 20_000])
        else:
            plan.delays_ms = tuple(pick([1, 1_000, 4_000, 30_000]) for _ in range(pick([1, 5])))
        schedule = Schedule(plan.name, Timing(every_ms=plan.every_ms, delays_ms=plan.delays_ms), catch_up="all")

        def put() -> int | None:
            topic = self._topic()
            made = topic.scheduler.put(StoredSchedule(schedule, plan.name.encode(), flags=0), story.now)
            self._commit(topic)
            return made.schedule.next_ms

        told = story.ask(audit, put, lambda _: None)
        if told is not None and told != next(plan.times(told)):
            self._fail("the answer to a put has the first time", plan, told)
        if told is not None or self._exists(audit, plan.name):
            self._plans[plan.name] = plan
            story.seen["schedules put"] += 1

    def _commit(self, topic: Topic) -> None:
        topic.scheduler.commit()
        self._story.engine.changed(topic, self._story.now)

    def _exists(self, audit: Review, name: str) -> bool:
        """Whether a request without an answer was carried out."""
        story = self._story

        def look() -> bool:
            return TOPIC in story.engine.topics and story.engine.topic(TOPIC).scheduler.find(name) is not None

        while (told := story.ask(audit, look, lambda _: None)) is None:
            pass
        return told

    def _drop(self, audit: Review, plan: Plan) -> None:
        story, now = self._story, self._story.now

        def drop() -> bool:
            topic, is_over = self._topic(), bool(plan.delays_ms) and plan.put_ms + sum(plan.delays_ms) <= now
            if not is_over or topic.scheduler.find(plan.name) is not None:  # an ended one goes with the history
                topic.scheduler.remove(plan.name, now)
                self._commit(topic)
            return True

        if story.ask(audit, drop, lambda _: None):
            plan.dropped_ms = now
        elif not self._exists(audit, plan.name):
            plan.dropped_ms = now + LEAD_MS  # without an answer, a firing that slept ahead may be left

    def _trigger(self, audit: Review, plan: Plan) -> None:
        story, ids = self._story, list[str]()

        def trigger() -> str:
            topic = self._topic()
            at_ms = story.now
            ids.append(firing_id(plan.name, at_ms))
            id_, _ = topic.scheduler.trigger(plan.name, at_ms)
            story.engine.changed(topic, at_ms)
            return id_

        told = story.ask(audit, trigger, lambda _: None)
        if told is not None and (told in self._fired or told in self._triggered):
            self._fail("each trigger puts a message of its own", told)
        for id_ in ids if told is None else [told]:
            self._triggered[id_] = told is not None

    # Judgement

    def _consume(self, audit: Review) -> bool:
        """Fetch and acknowledge everything. If the process did not end meanwhile, every time up to now was fired."""
        story, process = self._story, self._story.process
        story.run_ticks()
        while TOPIC in story.engine.topics:
            cuts = sum(story.seen[name] for name in _FORGETS)
            if cuts > self._cuts:
                self._cuts, self._done = cuts, set()
            got = story.ask(audit, self._fetch, lambda _: None)
            if got is None:
                return False
            for id_, due_ms, body in got:
                self._delivered(id_, due_ms, body)
            if not got:
                break
            ids = [id_ for id_, _, _ in got]
            if len(set(ids)) < len(ids):
                self._fail("each time is fired once", sorted(ids))
            told = story.ask(audit, lambda i=ids: story.engine.ack(TOPIC, GROUP, i, story.now), lambda _: None)  # type: ignore[misc]
            if told is None:
                return False
            self._done.update(ids)
        if story.process is not process:
            return False
        self._complete()
        return True

    def _fetch(self) -> list[tuple[str, int, bytes]]:
        out = self._story.engine.reserve(TOPIC, GROUP, 1_000, self._story.now)
        dues = [due for piece in out.pieces for due in piece.messages.due_ms.tolist()]
        return list(zip(out.ids, dues, (document.body for document in out.documents()), strict=True))

    def _delivered(self, id_: str, due_ms: int, body: bytes) -> None:
        name, _, time = id_.partition("@")
        plan = self._plans.get(name)
        if plan is None or body != name.encode() or int(time) != due_ms:
            self._fail("nothing is fired that no schedule asks for", id_, due_ms, body)
        is_time = due_ms in plan.times(due_ms) and not (plan.dropped_ms is not None and due_ms > plan.dropped_ms)
        if not is_time and not any(self._is_of_trigger(id_, asked) for asked in self._triggered):
            self._fail("only times of a schedule are fired", id_, plan)
        if due_ms > self._story.now:
            self._fail("no firing is early", id_, self._story.now)
        if id_ in self._done:
            self._fail("each time is fired once", id_, plan)
        self._fired.add(id_)
        self._story.seen["schedules fired"] += 1

    def _is_of_trigger(self, id_: str, asked: str) -> bool:
        """Is it the message of this trigger? Of one without an answer, it may lie some ms before."""
        if id_ == asked or self._triggered[asked]:
            return id_ == asked
        name, _, at_ms = asked.partition("@")
        return id_.startswith(f"{name}@") and 0 <= int(at_ms) - int(id_.partition("@")[2]) < 5

    def _complete(self) -> None:
        """Every time of each schedule has its message."""
        story = self._story
        wanted = {id_ for id_, sure in self._triggered.items() if sure}
        for plan in self._plans.values():
            to_ms = story.now if plan.dropped_ms is None else 0
            wanted.update(firing_id(plan.name, at_ms) for at_ms in plan.times(to_ms))
        for id_ in sorted(wanted - self._fired):
            if story.engine.message(TOPIC, id_) is None:
                self._fail("each time is fired", id_, self._plans[id_.partition("@")[0]])

    def _fail(self, promise: str, *facts: object) -> NoReturn:
        raise Broken(f"{self._story.case}: {promise}: {facts}")
