"""Topics that appear: subscriptions by pattern are told the names of new topics, all of them by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from turtlemq.errors import TurtleError
from turtlemq.server.service import Service

LOOK_S = 0.25

Appeared = Callable[[Iterable[str]], object]


class TopicWatch:
    """Compares the names of topics with those before, while a subscription listens."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._listeners: dict[Appeared, None] = {}
        self._known: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, appeared: Appeared) -> None:
        """Call `appeared` with the names of all topics, and later with those of new ones."""
        if self._timer is None:
            self._known = set(self._service.engine.topics)
            self._set_timer()
        self._listeners[appeared] = None
        appeared(self._service.engine.topics)

    def leave(self, appeared: Appeared) -> None:
        """Call it no more."""
        self._listeners.pop(appeared, None)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget(self, topic: str) -> None:
        """A topic was deleted: one of its name is a new one."""
        self._known.discard(topic)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._set_timer()
        try:
            names = self._service.engine.topics.keys()
        except TurtleError:
            return  # the server stops
        if names == self._known:
            return
        new = sorted(names - self._known)
        self._known = set(names)
        for appeared in list(self._listeners):
            appeared(new)
