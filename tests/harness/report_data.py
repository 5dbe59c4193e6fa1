"""A small shop whose every figure can be worked out by hand, written by the engine. Times are milliseconds after 14:00:00."""

from __future__ import annotations

from pathlib import Path

from tests.harness.engine_disk import abandon
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter

T = 1_789_999_200_000  # 2026-09-21 14:00:00 UTC
HOUR, DAY = 3_600_000, 86_400_000
NOW = T + 62_500  # when the report is made

DELAYS = {"d1": 0, "a1": 1_000, "a2": 1_000, "a3": 1_000, "a4": 1_000, "b1": 60_000, "b2": 60_000}
ASLEEP = {"c1": 2 * HOUR, "e1": 3 * DAY, "f1": 30 * DAY}


def opened(root: Path) -> Engine:
    """The shop at two o'clock: ten messages sleep."""
    engine = Engine.open(root)
    engine.configure("shop", max_attempts=2, backoff_base_ms=1_000, backoff_jitter="none", ttr_ms=60_000)
    engine.submit("shop", [Message(b"x", T + delay, id_) for id_, delay in (DELAYS | ASLEEP).items()], T)
    return engine


def first_half(engine: Engine) -> None:
    """Five come due, 5 and 10 ms late. w1 takes three after 1025 and 20 ms, handles two in 100 ms each and fails with one after
    200; w2 takes two after 30 ms and handles one of them in 500."""
    engine.tick(T + 5)
    engine.tick(T + 1_010)
    assert engine.reserve("shop", "default", 3, T + 1_030, consumer="w1").ids == ["d1", "a1", "a2"]
    assert engine.reserve("shop", "default", 10, T + 1_040, consumer="w2").ids == ["a3", "a4"]
    engine.ack("shop", "default", ["d1", "a1"], T + 1_130)
    engine.ack("shop", "default", ["-a2"], T + 1_230, error="KeyError: 'user_17'")
    engine.ack("shop", "default", ["a3"], T + 1_540)


def second_half(engine: Engine) -> None:
    """Two more come due, 20 ms late, w1 takes them after 10 ms with the one that failed, which dies after 20 ms, and handles them
    in 100. w2 lets the time of its other one run out, 60,010 ms after it took it. A consumer of another group holds one."""
    engine.tick(T + 60_020)
    assert set(engine.reserve("shop", "default", 10, T + 60_030, consumer="w1").ids) == {"a2", "b1", "b2"}
    engine.ack("shop", "default", ["-a2"], T + 60_050, error="KeyError: 'user_99'")
    engine.ack("shop", "default", ["b1", "b2"], T + 60_130)
    engine.tick(T + 61_050)
    assert engine.reserve("shop", "audit", 1, T + 62_000, consumer="x").ids == ["d1"]


PERIOD = 7 * 60_000  # longer than a bucket of the report


class Years:
    """Topics that live on, period after period; after each the engine is restarted or killed. `keeps` tells whether everything is
    kept; otherwise the history is removed after each report, and segments are compacted. Messages live on alike."""

    def __init__(self, root: Path, *, keeps: bool) -> None:
        self.root, self.keeps, self.now, self.number = root, keeps, T, 0
        self.settings = Settings(
            max_attempts=2,
            backoff_base_ms=1_000,
            backoff_jitter="none",
            ttr_ms=60_000,
            segment_bytes=4_096,
            compact_live_ratio=0.3,
        )
        self.engine = Engine.open(root, settings=self.settings)

    def live(self) -> None:
        """One period."""
        n, self.now = self.number, T + self.number * PERIOD
        for topic in ["first", *(["second"] if n >= 2 else []), *(["again"] if n != 3 else [])]:
            self._topic(topic, n)
        if n == 3:
            self.engine.drop_topic("again")  # and it is made anew in the next period
        self.number += 1

    def _topic(self, topic: str, n: int) -> None:
        engine, now = self.engine, self.now
        ids = [f"{n}-{i}" for i in range(10)]  # few enough for exact percentiles
        if n == 5:
            engine.move_group(topic, "other", "latest", now)  # dropped in the period before
        engine.submit(topic, [Message(b"x" * 100, now + i * 100, id_) for i, id_ in enumerate(ids)], now)
        engine.submit(topic, [Message(b"x", now + PERIOD + HOUR, f"{n}-later"), Message(b"x", now + DAY, f"{n}-off")], now)
        engine.cancel(topic, [f"{n}-off"], now + 5)
        engine.tick(now + 2_000 + n)
        for group, consumer in (("g", "w1"), ("g", "w2"), ("other", "x")):
            held = engine.reserve(topic, group, 5, now + 2_050 + n, consumer=consumer).ids
            fresh = [id_ for id_ in held if id_ in ids]
            engine.ack(topic, group, [id_ for id_ in held if id_ not in fresh], now + 2_100)
            engine.ack(topic, group, fresh[:2], now + 2_100 + n)
            engine.ack(topic, group, [f"-{id_}" for id_ in fresh[2:3]], now + 2_200, error=f"KeyError: {n}")
            engine.ack(topic, group, [f"-{id_}" for id_ in fresh[3:4]], now + 2_300, error="slow", retry_delay_ms=PERIOD)
        engine.tick(now + 4_000)
        again = engine.reserve(topic, "g", 2, now + 4_100, consumer="w2").ids
        engine.ack(topic, "g", [f"-{id_}" for id_ in again], now + 4_200, error="again")  # some die
        if n == 2:
            engine.move_group(topic, "other", "latest", now + 4_300)
        if n == 4:
            engine.drop_group(topic, "other", now + 4_300)
        if n == 5:
            letters = list(engine.topic(topic).view.dead_letters.all(Filter()))
            engine.requeue(topic, letters[:2], now + 4_400)
        engine.reserve(topic, "g", 3, now + 4_500, consumer="w1")  # held until the next period, or until they run out

    def after_the_report(self) -> None:
        """Remove and compact, unless everything is kept; restart."""
        for topic in [] if self.keeps else sorted(self.engine.topics):
            self.engine.configure(topic, history_hours=0, history_bytes=0)
            self.engine.compact(topic)
            self.engine.topic(topic).stores.broker.retain(self.now + 10_000)
            self.engine.configure(topic, history_hours=168, history_bytes=1 << 40)
        if self.number % 3 == 0:
            abandon(self.engine)
        else:
            self.engine.close()
        self.engine = Engine.open(self.root, settings=self.settings)
