"""The inside of a Broker, for tests that look at its files or break them: its logs. Nothing in turtlemq reaches these."""

from __future__ import annotations

from turtlemq.broker.logs import Logs
from turtlemq.engine import Engine


def logs_of(engine: Engine, topic: str = "t") -> Logs:
    """Ready log and journals of a topic."""
    return engine.topic(topic).stores.broker._logs
