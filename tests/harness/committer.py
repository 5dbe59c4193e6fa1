"""A committer with a slow disk below it, without HTTP: batches, and a server-like loop that commits them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from turtlemq.engine import Engine
from turtlemq.model import Batch
from turtlemq.server.commit import Committer
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

T = TypeVar("T")


SMALL = Settings(segment_bytes=16_384, run_messages=64)


class Slow(Door):
    """Syncs of delay segments wait for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.syncs = 0

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "fdatasync" and path is not None and path.name.startswith("delay"):
            self.syncs += 1
            if threading.current_thread() is not threading.main_thread():
                assert self.gate.wait(20)
        return action(*args)


def batch(*ids: str, due_ms: int = 10**9) -> Batch:
    return Batch([b"x" * 20] * len(ids), [due_ms] * len(ids), list(ids))


class Server:
    """An engine with a committer, as the service has them."""

    def __init__(self, folder: Path, door: Door, settings: Settings = SMALL) -> None:
        self.engine = Engine.open(folder, door=door, settings=settings)
        self.commits: list[int] = []
        self.committer = Committer(lambda topic: self.engine.changed(topic, 0), lambda _, size: self.commits.append(size))

    async def put(self, *ids: str, due_ms: int = 10**9, now_ms: int = 0, topic: str = "t") -> list[bool]:
        found, receipt = self.engine.stage(topic, batch(*ids, due_ms=due_ms), now_ms)
        await self.committer.commit(found)
        return list(receipt.created)

    async def cancel(self, id_: str, now_ms: int = 0) -> str:
        found, staged = self.engine.stage_cancel("t", [id_], now_ms)
        await self.committer.commit(found)
        return self.engine.finish_cancel(found, staged, now_ms)[id_]

    async def move(self, id_: str, due_ms: int) -> None:
        found, _ = self.engine.stage_reschedule("t", id_, 0, due_ms=due_ms)
        await self.committer.commit(found)

    def close(self) -> None:
        self.committer.close()
        self.engine.close()
