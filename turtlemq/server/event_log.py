"""The event log: logs damage, dead letters, compactions, seals, new and deleted topics, and stalls of the event loop.

Every INTERVAL_S seconds the figures of all topics are compared with those reported last. So the engine makes no calls for its
log, and a thousand dead letters are one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from turtlemq.engine import Engine
from turtlemq.model import Damage
from turtlemq.server import logs
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic

INTERVAL_S = 2.0
DAMAGE_MAX = 20  # lines for one topic in one comparison


@dataclass(slots=True)
class Reported:
    """The figures of a topic that were logged last."""

    damage: int = 0
    seals: int = 0
    moved: int = 0
    bytes_dropped: int = 0
    segments_dropped: int = 0
    dead_dropped: int = 0
    dead: dict[str, int] = field(default_factory=dict)  # by group
    unsealable: int = 0


class EventLog:
    """Compares and logs for as long as the application runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reported: dict[str, Reported] | None = None  # None before the first comparison
        self._engine: Engine | None = None  # once it serves
        self._stalls = 0

    async def __call__(self, _: object) -> AsyncIterator[None]:
        """A cleanup context of aiohttp: begin to compare, and compare a last time at the end."""
        task = asyncio.create_task(self._run())
        yield
        task.cancel()
        if self._engine is not None:
            await in_slices(self._compare(self._engine))  # events since the last comparison

    async def _run(self) -> None:
        while True:
            try:
                if self._service.serving:
                    self._engine = self._service.engine
                    await in_slices(self._compare(self._engine))
                    self._log_stalls()
            except Exception as error:  # noqa: BLE001 - logged; the next comparison may do better
                logs.error("watch_failed", error)
            await asyncio.sleep(INTERVAL_S if self._reported is not None else 0.05)

    def _compare(self, engine: Engine) -> Iterator[None]:
        """Compare and log, topic by topic."""
        first, reported = self._reported is None, self._reported or {}
        self._reported = reported
        for name in [name for name in reported if name not in engine.topics]:
            del reported[name]
            logs.info("topic_deleted", topic=name)
        for name, topic in list(engine.topics.items()):
            if name not in reported:
                reported[name] = Reported()
                if not first or name not in self._service.opened:
                    logs.info("topic_created", topic=name)
            if new := _log_damage(name, topic, reported[name]):
                self._service.on_damage(name, new)
            _log_maintenance(name, topic, reported[name])
            _log_dead(name, topic, reported[name])
            yield

    def _log_stalls(self) -> None:
        loop = self._service.meter.loop
        if loop.stalls > self._stalls:
            logs.warning("loop_stalled", times=loop.stalls - self._stalls, longest_ms=round(loop.take_longest() * 1000))
        self._stalls = loop.stalls


def _log_damage(name: str, topic: Topic, last: Reported) -> list[Damage]:
    """Returns damage that is new."""
    damage = topic.view.damage()
    new = damage[last.damage :]
    for hit in new[:DAMAGE_MAX]:
        logs.error("damage", topic=name, file=hit.file, position=hit.position, length=hit.length, reason=hit.reason)
    last.damage = len(damage)
    for base in list(topic.view.unsealable)[last.unsealable :]:
        logs.error("seal_failed", topic=name, segment=base, error=topic.view.unsealable[base])
    last.unsealable = len(topic.view.unsealable)
    return new


def _log_maintenance(name: str, topic: Topic, last: Reported) -> None:
    totals = topic.view.totals()
    if totals.seals > last.seals:
        logs.info("sealed", topic=name, segments=totals.seals - last.seals)
    if totals.segments_dropped > last.segments_dropped:
        count, size = totals.segments_dropped - last.segments_dropped, totals.bytes_dropped - last.bytes_dropped
        logs.info("compacted", topic=name, segments=count, bytes=size, moved=totals.moved - last.moved)
        last.moved = totals.moved
    last.seals, last.segments_dropped, last.bytes_dropped = totals.seals, totals.segments_dropped, totals.bytes_dropped
    if totals.dead_dropped > last.dead_dropped:
        logs.warning("dead_letters_dropped", topic=name, count=totals.dead_dropped - last.dead_dropped)
        last.dead_dropped = totals.dead_dropped


def _log_dead(name: str, topic: Topic, last: Reported) -> None:
    for group, tally in topic.view.group_tallies().items():
        if tally.dead > last.dead.get(group, 0):
            logs.warning("dead_letters", topic=name, group=group, count=tally.dead - last.dead.get(group, 0))
        last.dead[group] = tally.dead
