"""A small shop whose every figure can be worked out by hand, written by the engine. Times are milliseconds after 14:00:00."""

from __future__ import annotations

from pathlib import Path

from turtlemq.engine import Engine
from turtlemq.model import Message

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
