"""Requests of the server that promise durability, without a server: the sync that they ask for comes after the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from turtlemq.engine import Engine

T = TypeVar("T")


def durably(engine: Engine, topic: str, call: Callable[[], T]) -> T:
    """Call the engine as a handler does: with the sync of the logs deferred, and done before the answer."""
    opened = engine.topic(topic)
    with opened.deferring_syncs():
        result = call()
    if opened.owes_sync:
        sync = opened.begin_sync()
        sync.run(engine.door.beside())
        opened.end_sync(sync)
    return result
