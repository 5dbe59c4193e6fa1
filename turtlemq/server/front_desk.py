"""The common part of all connections: the application, its hot routes, limits, and the set of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from turtlemq.server.auth import AUTH
from turtlemq.server.forward import answers, leads
from turtlemq.server.hot_heads import Head, Heads, hot_routes
from turtlemq.server.proxy import PARTITION
from turtlemq.server.request import SERVICE

_TOPIC = "/v1/topics/{topic}"
_GROUP = f"{_TOPIC}/groups/{{group}}"
_MESSAGE = f"{_TOPIC}/messages/{{id}}"
HOT = frozenset(
    {
        f"POST {_TOPIC}/messages",
        *(f"POST {place}/{name}" for place in (_TOPIC, _GROUP) for name in ("fetch", "ack", "extend")),
        f"POST {_TOPIC}/cancel",
        f"POST {_TOPIC}/transaction",
        f"DELETE {_MESSAGE}",
        f"PATCH {_MESSAGE}",
    }
)


PASSED_BYTES = 256 << 10  # of a body that goes on to another process as soon as it is here


class Connection(Protocol):
    """A connection, as far as it is ended here."""

    @property
    def is_busy(self) -> bool: ...

    def end(self) -> None: ...


class Desk:
    """The connections of an application, and their common part. `limits`: arguments of aiohttp's connections."""

    def __init__(self, app: web.Application, server: web.Server, limits: Mapping[str, Any]) -> None:
        self.app, self.server, self.limits = app, server, limits
        self.keepalive_s: float = limits["keepalive_timeout"]
        self.allows: Callable[[str], bool] = app[AUTH].allows
        self.heads = Heads(hot_routes(_hot_handlers(app)))
        self.sibling_heads = Heads(hot_routes(_hot_handlers(app)), of_siblings=True)
        self.open: set[Connection] = set()
        self.is_ending = False
        self._service = app[SERVICE]
        self.steps = app[SERVICE].meter.steps

    def answers(self, head: Head) -> bool:
        """Whether this process itself answers a request about a topic; else it goes on to the leader, or to its shard."""
        service, router, topic = self._service, self._service.router, head.place["topic"]
        if router is None:
            return service.cluster is None or answers(service, topic)
        return router.has(topic, head.headers.get(PARTITION)) and (service.cluster is None or leads(service))

    def passed_bytes(self, head: Head) -> int:
        """How long the body of a request may be that goes on to the process of its topic from here. 0: the request is not hot, or
        its answer may be large, and aiohttp passes it on."""
        if self._service.router is None or head.place is None:
            return 0
        return 0 if head.place.route.canonical.endswith("/fetch") else PASSED_BYTES

    async def end(self, timeout_s: float) -> None:
        """Close all connections, those with a request under way when it is answered, or at the end of the time."""
        self.is_ending = True
        for front in [front for front in self.open if not front.is_busy]:
            front.end()
        end = asyncio.get_running_loop().time() + timeout_s
        while any(front.is_busy for front in self.open) and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # once in the life of a process
        for front in list(self.open):
            front.end()


def _hot_handlers(app: web.Application) -> dict[str, Callable[[Any], Any]]:
    """The handlers of hot routes by method and path, with the middleware around them."""
    found: dict[str, Callable[[Any], Any]] = {}
    for route in app.router.routes():
        operation = f"{route.method} {route.resource and route.resource.canonical}"
        if operation in HOT:
            handler: Callable[..., Any] = route.handler
            for middleware in reversed(app.middlewares):
                handler = partial(middleware, handler=handler)
            found[operation] = handler
    return found
