"""What happens by itself, told in the log: damage, dead letters, compaction, seals, topics that come and go, a loop that stalls.

Every few seconds figures are compared with what they were. Nothing has to call anything for that, and a flood is one line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from turtlemq.engine import Engine
from turtlemq.server import logs
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.service import Service
from turtlemq.topic.topic import Topic

LOOK_S = 2.0
DAMAGE_MAX = 20  # lines at once for one topic
STALL_S = 0.2


@dataclass(slots=True)
class Reported:
    """What was said about a topic so far."""

    damage: int = 0
    seals: int = 0
    moved: int = 0
    bytes_dropped: int = 0
    segments_dropped: int = 0
    dropped_dead: int = 0
    dead: dict[str, int] = field(default_factory=dict)
    unsealable: int = 0


class EventLog:
    """See the module."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[str, Reported] | None = None
        self._engine: Engine | None = None  # once it serves
        self._stalls = 0

    async def __call__(self, _: object) -> AsyncIterator[None]:
        """For as long as the application runs."""
        task = asyncio.create_task(self._run())
        yield
        task.cancel()
        if self._engine is not None:
            deque(self.look(self._engine), maxlen=0)  # what was found since the last look is told, too

    async def _run(self) -> None:
        while True:
            try:
                if self._service.serving:
                    self._engine = self._service.engine
                    await in_slices(self.look(self._engine))
                    self._stalled()
            except Exception as error:  # noqa: BLE001 - logged; watching must not end for it
                logs.error("watch_failed", error)
            await asyncio.sleep(LOOK_S if self._known is not None else 0.05)

    def look(self, engine: Engine) -> Iterator[None]:
        """Compare, topic by topic."""
        first, known = self._known is None, self._known or {}
        self._known = known
        for name in [name for name in known if name not in engine.topics]:
            del known[name]
            logs.info("topic_deleted", topic=name)
        for name, topic in list(engine.topics.items()):
            if name not in known:
                known[name] = Reported()
                if not first or name not in self._service.opened:
                    logs.info("topic_created", topic=name)
            self._compare(name, topic, known[name])
            yield

    def _compare(self, name: str, topic: Topic, known: Reported) -> None:
        damage = topic.damage()
        for one in damage[known.damage :][:DAMAGE_MAX]:
            logs.error("damage", topic=name, file=one.file, position=one.position, length=one.length, reason=one.reason)
        known.damage = len(damage)
        counters = topic.totals()
        if counters.seals > known.seals:
            logs.info("sealed", topic=name, segments=counters.seals - known.seals)
        if counters.segments_dropped > known.segments_dropped:
            count, size = counters.segments_dropped - known.segments_dropped, counters.bytes_dropped - known.bytes_dropped
            logs.info("compacted", topic=name, segments=count, bytes=size, moved=counters.moved - known.moved)
            known.moved = counters.moved
        known.seals, known.segments_dropped, known.bytes_dropped = (
            counters.seals,
            counters.segments_dropped,
            counters.bytes_dropped,
        )
        if counters.dead_dropped > known.dropped_dead:
            logs.warning("dead_letters_dropped", topic=name, count=counters.dead_dropped - known.dropped_dead)
            known.dropped_dead = counters.dead_dropped
        for base in list(topic.unsealable)[known.unsealable :]:
            logs.error("seal_failed", topic=name, segment=base, error=topic.unsealable[base])
        known.unsealable = len(topic.unsealable)
        for group, tally in topic.tallies().items():
            if tally.dead > known.dead.get(group, 0):
                logs.warning("dead_letters", topic=name, group=group, count=tally.dead - known.dead.get(group, 0))
            known.dead[group] = tally.dead

    def _stalled(self) -> None:
        lag = self._service.meter.lag
        slow = sum(count for bound, count in zip((*lag.bounds, float("inf")), lag.counts, strict=True) if bound > STALL_S)
        if slow > self._stalls:
            logs.warning("loop_stalled", times=slow - self._stalls, longer_than_ms=round(STALL_S * 1000))
        self._stalls = slow
