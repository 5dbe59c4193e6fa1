"""Delayed tasks of a task queue: they sleep in a topic, and a relay gives them to the broker of the task queue when they are due.

Delivery is at least once, as that of the task queues: a relay that dies between the broker's answer and its own ack sends a task
twice, with the same task id.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from turtlemq.client import Client, Consumer, Message, errors, new_id


class DelayedTasks:
    """The topic in which tasks sleep. The client is made at the first use, from the arguments of `Client`, if none is given.

    min_delay: tasks that are due sooner than in so many seconds go to the broker at once, and do not sleep here.
    """

    def __init__(self, topic: str, client: Client | None = None, *, min_delay: float = 1.0, **arguments: Any) -> None:
        self.topic, self.min_delay = topic, min_delay
        self._client, self._arguments = client, arguments

    @property
    def client(self) -> Client:
        """The client for all calls."""
        if self._client is None:
            self._client = Client(**self._arguments)
        return self._client

    def put(self, key: str, body: bytes, due_ms: int, headers: Mapping[str, str]) -> str:
        """Store a task durably under this id, or, if that was used before, under one that begins with it. Returns the id.

        A task queue may send a task with the same id again, as in a retry, which must not be taken for a duplicate.
        """
        id_ = key
        while not self._stored(id_, body, due_ms, headers):
            id_ = f"{key}.{new_id()}"
        return id_

    def _stored(self, id_: str, body: bytes, due_ms: int, headers: Mapping[str, str]) -> bool:
        return self.client.put(self.topic, body, id=id_, due=due_ms, headers=headers).created is True

    def cancel(self, key: str) -> bool:
        """Cancel a task that sleeps. Returns whether it will not run; False: it is due, done, or unknown."""
        try:
            self.client.cancel(self.topic, key)
        except (errors.Conflict, errors.UnknownMessage, errors.UnknownTopic):
            return False
        return True

    def relay(self, forward: Callable[[Message], object], **options: Any) -> Consumer:
        """A consumer that forwards due tasks. Options are those of `Consumer`."""
        return Consumer(self.topic, forward, self.client, **options)


def run_relay(name: str, description: str) -> None:
    """The program of a relay: `python -m MODULE shop.tasks:app` runs the `relay()` of that object until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("object", metavar="MODULE:NAME", help="the app or broker, such as shop.tasks:app")
    parser.add_argument("--concurrency", type=int, default=4, help="tasks that are forwarded at the same time (default: 4)")
    arguments = parser.parse_args()
    module, _, attribute = arguments.object.partition(":")
    if not attribute:
        parser.error("the object is MODULE:NAME, such as shop.tasks:app")
    target = getattr(importlib.import_module(module), attribute)
    target.relay(concurrency=arguments.concurrency).run(signals=True)
