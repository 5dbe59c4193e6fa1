"""An engine with schedules, run from event to event as `server.advance` does, and a Door that stops it at a chosen call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.harness.engine_disk import Syncing
from turtlemq.engine import Engine
from turtlemq.schedules import Schedule, Timing
from turtlemq.settings import Settings
from turtlemq.topic.schedule_store import StoredSchedule

T = TypeVar("T")
NOW = 1_774_000_000_000
SECOND, HOUR, DAY = 1_000, 3_600_000, 86_400_000
SETTINGS = Settings(segment_bytes=16_384, run_messages=16, beat_ms=1_000)


class Stop(BaseException):
    """The process ends here."""


class Stopping(Syncing):
    """Ends the process at call number `at` that changes a file: no later one is made."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name in ("write", "fdatasync", "rename", "unlink"):
            self.calls += 1
            if self.calls > self.at >= 0:
                raise Stop
        return super()._call(name, path, action, *args)


def opened(folder: Path, door: Syncing | None = None, **changes: Any) -> Engine:
    settings = {name: getattr(SETTINGS, name) for name in Settings.__dataclass_fields__} | changes
    return Engine.open(folder, door=door, settings=Settings(**settings))


def put(engine: Engine, name: str, now_ms: int = NOW, topic: str = "t", **given: Any) -> StoredSchedule:
    """Put a schedule. `given`: fields of its timing, and of the schedule itself."""
    own = {key: given.pop(key) for key in ("catch_up", "overlap", "paused") if key in given}
    found = engine.topic(topic, create=True)
    made = found.scheduler.put(StoredSchedule(Schedule(name, Timing(**given), **own), name.encode(), flags=0), now_ms)
    found.scheduler.commit()
    engine.changed(found, now_ms)
    return made


def run(engine: Engine, from_ms: int, to_ms: int, topic: str = "t") -> None:
    """Tick at each time at which something happens by itself."""
    now_ms, found = from_ms, engine.topic(topic)
    engine.tick(now_ms)
    for _ in range(100_000):
        assert engine.trouble == {}
        event_ms = found.next_event(now_ms)
        if event_ms is None or event_ms > to_ms:
            break
        now_ms = max(now_ms, event_ms)
        engine.tick(now_ms)
    else:
        raise AssertionError("it never comes to an end")
    engine.tick(to_ms)


def fetched(engine: Engine, now_ms: int, topic: str = "t", group: str = "g") -> list[str]:
    """All ready messages, fetched and acknowledged, in order."""
    ids: list[str] = []
    while batch := engine.reserve(topic, group, 1_000, now_ms).ids:
        ids += batch
        assert engine.ack(topic, group, batch, now_ms).acked == len(batch)
    return ids
