"""All queues that are measured side by side, by name: TurtleMQ first, then its peers, each as it is best and as it is safest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.beanstalkd import BeanstalkQueue
from benchmarks.peers.bullmq import BullQueue
from benchmarks.peers.model import Queue
from benchmarks.peers.postgres import PostgresQueue
from benchmarks.peers.redis import RedisQueue
from benchmarks.peers.turtle import Turtle, TurtleBson, TurtleBsonGiven, TurtleGiven

Maker = Callable[[Path], Queue]
_MAKERS: tuple[Maker, ...] = (
    Turtle,
    TurtleBson,
    TurtleGiven,
    TurtleBsonGiven,
    lambda folder: RedisQueue(folder, "everysec"),
    lambda folder: RedisQueue(folder, "always"),
    lambda folder: PostgresQueue(folder, "lease"),
    lambda folder: PostgresQueue(folder, "transaction"),
    lambda folder: BeanstalkQueue(folder, 50),
    lambda folder: BeanstalkQueue(folder, 0),
    BullQueue,
)
OURS: tuple[str, str] = (Turtle.name, TurtleBson.name)
GIVEN: tuple[str, str] = (TurtleGiven.name, TurtleBsonGiven.name)
EVERY: dict[str, Maker] = {maker(Path()).name: maker for maker in _MAKERS}
# A queue that differs from another one in some of the work only is measured in that.
ONLY: dict[str, tuple[str, ...]] = {
    Turtle.name: ("in", "sleep", "drain", "late"),
    **dict.fromkeys(GIVEN, ("in",)),
    "PostgreSQL, transaction": ("drain",),
}
