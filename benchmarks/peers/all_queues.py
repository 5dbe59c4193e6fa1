"""All queues of the comparison by name: TurtleMQ first, then its peers, each in its fastest and in its safest setup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.beanstalkd import BeanstalkQueue
from benchmarks.peers.bullmq import BullQueue
from benchmarks.peers.model import Queue
from benchmarks.peers.postgres import PostgresQueue
from benchmarks.peers.redis import RedisQueue
from benchmarks.peers.turtle import Turtle, TurtleBson, TurtleBsonServerIds, TurtleServerIds

Maker = Callable[[Path], Queue]
_MAKERS: tuple[Maker, ...] = (
    Turtle,
    TurtleBson,
    TurtleServerIds,
    TurtleBsonServerIds,
    lambda folder: RedisQueue(folder, "everysec"),
    lambda folder: RedisQueue(folder, "always"),
    lambda folder: PostgresQueue(folder, "lease"),
    lambda folder: PostgresQueue(folder, "transaction"),
    lambda folder: BeanstalkQueue(folder, 50),
    lambda folder: BeanstalkQueue(folder, 0),
    BullQueue,
)
OURS: tuple[str, str] = (Turtle.name, TurtleBson.name)
SERVER_IDS: tuple[str, str] = (TurtleServerIds.name, TurtleBsonServerIds.name)
ALL_QUEUES: dict[str, Maker] = {maker(Path()).name: maker for maker in _MAKERS}
# A queue that differs from another one in some parts only is measured in these parts.
ONLY_PARTS: dict[str, tuple[str, ...]] = {
    Turtle.name: ("in", "sleep", "drain", "late"),
    **dict.fromkeys(SERVER_IDS, ("in",)),
    "PostgreSQL, transaction": ("drain",),
}
