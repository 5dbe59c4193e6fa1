"""One of several processes of a server, each with one shard: its configuration, and the work beside its requests."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import structs

from turtlemq.errors import InvalidArgument
from turtlemq.server.accept import Listener
from turtlemq.server.config import Config
from turtlemq.server.listen import Site
from turtlemq.server.service import Service
from turtlemq.server.shards.router import ShardRouter
from turtlemq.server.shards.siblings import SIBLINGS, from_text
from turtlemq.server.supervision import Report
from turtlemq.server.supervisor_line import SupervisorLine
from turtlemq.shard_folders import shard_folder

BEAT_S = 2.0  # between two signs of life for the supervisor


def own_config(config: Config, shard: int) -> Config:
    """The configuration of a shard's process: its folder, and its part of the memory for requests under way."""
    held = max(2 * config.max_body_bytes, config.max_held_bytes // config.shards)
    return structs.replace(config, data=str(shard_folder(Path(config.data), shard)), max_held_bytes=held)


@asynccontextmanager
async def beside(service: Service, site: Site, end: Callable[[], None]) -> AsyncIterator[None]:
    """Share the topics with the other processes, and report to the supervisor. `end`: called when the supervisor has ended.

    The others can connect all the time, and their requests are taken once this process serves."""
    text = os.environ.get(SIBLINGS)
    if text is None:
        raise InvalidArgument("--shard is for the processes that 'turtlemq serve --shards N' starts")
    siblings = service.siblings = from_text(text)
    router = service.router = ShardRouter(service, siblings)
    service.ports |= set(siblings.ports)
    line = SupervisorLine(lambda: Report(_state(service)), end, BEAT_S)
    before, listeners = service.on_start, list[Listener]()

    def started() -> None:
        before()
        line.tell()
        listening = socket.socket(fileno=os.dup(siblings.listening))
        listening.setblocking(False)
        listeners.append(site.accept_siblings(listening))

    service.on_start = started
    task = asyncio.create_task(line.run())
    try:
        yield
    finally:
        task.cancel()
        for listener in listeners:
            listener.close()
        await router.close()


def _state(service: Service) -> str:
    return "stopping" if service.stopping else "serving" if service.serving else "starting"
