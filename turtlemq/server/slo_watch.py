"""The watch over goals for lateness: samples of topics that have one, burn rates, the rates of their consumers, and forecasts.

Every INTERVAL_S seconds the counters of those topics are read; a server without goals does nothing else here. All of it is in
memory: after a restart the windows begin anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from turtlemq.engine import Engine
from turtlemq.lateness_slo import BurnWindows, LatenessForecast, forecast_lateness, learned_rate
from turtlemq.model import Forecast
from turtlemq.server import logs
from turtlemq.server.alarm_timer import AlarmTimer
from turtlemq.server.clock import now_ms
from turtlemq.server.fair_turns import Slices
from turtlemq.server.outgoing.slo import SloAnswer, SloForecast
from turtlemq.server.service import Service
from turtlemq.timing import TimerService
from turtlemq.topic.topic import Topic

INTERVAL_S = 30
BUCKET_MS, BUCKETS = 60_000, 360  # of the forecast: six hours


@dataclass(slots=True)
class Goal:
    """A topic with a goal: its samples, and the rates of its consumers."""

    topic: Topic
    windows: BurnWindows = field(default_factory=BurnWindows)
    looked_ms: int = 0  # the last sample
    handled: dict[str, int] = field(default_factory=dict)  # by group, at the last sample: messages acknowledged or dead
    ready: dict[str, int] = field(default_factory=dict)  # likewise
    rates: dict[str, float] = field(default_factory=dict)  # by group: messages a second that its consumers are able to handle
    forecast: SloForecast | None = None

    def look(self, at_ms: int) -> None:
        """Take a sample, learn the rates of consumers, and forecast."""
        topic = self.topic
        if at_ms < self.looked_ms:  # the clock was set back
            self.windows, self.looked_ms = BurnWindows(), 0
        self.windows.add(at_ms, topic.view.deliveries)
        self._learn(at_ms)
        self.looked_ms = at_ms
        if self.rates:
            found = topic.view.forecast(at_ms, BUCKET_MS, BUCKETS)
            group, late = self.worst(found, at_ms)
            self.forecast = SloForecast(group, round(self.rates[group], 3), late.late_from_ms, late.worst_ms, late.worst_at_ms)

    def _learn(self, at_ms: int) -> None:
        view, seconds = self.topic.view, (at_ms - self.looked_ms) / 1000
        handled = {name: tally.acked + tally.dead for name, tally in view.group_tallies().items()}
        ready = {name: stats.ready for name, stats in view.group_stats().items()}
        for name in handled.keys() & self.handled.keys() if seconds > 0 else ():
            grown = handled[name] - self.handled[name]
            if grown < 0 or view.is_paused(name) or not (grown or ready[name]):
                continue  # another group of that name, or nothing to measure
            is_busy = min(ready[name], self.ready[name]) > 0
            self.rates[name] = learned_rate(self.rates.get(name), grown / seconds, is_busy)
        self.rates = {name: rate for name, rate in self.rates.items() if name in handled}
        self.handled, self.ready = handled, ready

    def worst(self, found: Forecast, at_ms: int) -> tuple[str, LatenessForecast]:
        """The group that will be the latest, and its forecast. Requires: the rate of a group is known."""
        forecasts = {name: lateness_of(self.topic, found, at_ms, rate, name) for name, rate in self.rates.items()}
        name = max(forecasts, key=lambda name: (forecasts[name].worst_ms, name))
        return name, forecasts[name]

    def answer(self, at_ms: int) -> SloAnswer:
        """The goal, burn rates up to now, and the last forecast."""
        view, settings = self.topic.view, self.topic.settings
        counted, overdue = view.deliveries, view.overdue(settings.lateness_slo_ms, at_ms)
        burn = self.windows.rates(at_ms, counted, settings.lateness_slo_share, overdue)
        ms, share = settings.lateness_slo_ms, settings.lateness_slo_share
        return SloAnswer(ms, share, counted.on_time, counted.late, overdue, burn, self.forecast)


def lateness_of(topic: Topic, found: Forecast, at_ms: int, per_s: float, group: str | None = None) -> LatenessForecast:
    """The lateness to come in a group whose consumers handle `per_s`; without a name, in that with most ready messages."""
    groups = topic.view.group_stats()
    chosen = [groups[group]] if group in groups else list(groups.values())
    ready = max((stats.ready for stats in chosen), default=topic.view.stats(oldest=False).ready)
    goal_ms, waiting = topic.settings.lateness_slo_ms, found.overdue + ready
    return forecast_lateness(found.counts, found.from_ms, found.bucket_ms, at_ms, waiting, per_s, goal_ms)


class SloWatch:
    """The goals of a server. As a cleanup context of aiohttp, it looks at them every INTERVAL_S seconds."""

    def __init__(self, service: Service, timer: TimerService | None = None) -> None:
        self._service, self._timer = service, timer or AlarmTimer()
        self._goals: dict[str, Goal] = {}
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, _: object) -> AsyncIterator[None]:
        job = self._timer.every_ms(1000 * INTERVAL_S, self._begin)
        yield
        job.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def _begin(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            if self._service.serving:
                await self.look(self._service.engine, now_ms())
        except Exception as error:  # noqa: BLE001 - logged; the next look may do better
            logs.error("slo_failed", error)

    async def look(self, engine: Engine, at_ms: int) -> None:
        """Look at all topics that have a goal. O(topics), in slices."""
        topics = [topic for topic in engine.topics.values() if topic.settings.lateness_slo_ms]
        self._goals = {topic.name: self._goal(topic, at_ms) for topic in topics}
        slices = Slices()
        for goal in list(self._goals.values()):
            if engine.topics.get(goal.topic.name) is goal.topic:
                goal.look(at_ms)
            await slices.pause()

    def of(self, topic: Topic) -> Goal | None:
        """The goal of a topic; None if it has none. Its first sample is the present."""
        if not topic.settings.lateness_slo_ms:
            return None
        goal = self._goals[topic.name] = self._goal(topic, now_ms())
        return goal

    def _goal(self, topic: Topic, at_ms: int) -> Goal:
        known = self._goals.get(topic.name)
        if known is not None and known.topic is topic:
            return known
        goal = Goal(topic)
        goal.look(at_ms)
        return goal


SLO = web.AppKey("slo", SloWatch)
