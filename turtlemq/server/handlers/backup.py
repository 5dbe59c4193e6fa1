"""Handlers of live backups: pin all files, so that `turtlemq backup` can copy them, and unpin them. Callers give no paths.

A standby pins between two records that it applies. It has no engine: its files are those of a leader that was killed then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from turtlemq import backup
from turtlemq.errors import Unavailable
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, engine_of
from turtlemq.storage.door import Door

if TYPE_CHECKING:
    from turtlemq.replica.standby import Standby

log = logging.getLogger("turtlemq")
_one_at_a_time = asyncio.Lock()


def _standby_of(request: web.Request) -> Standby | None:
    """The copy of a process that follows; None in one that serves by itself."""
    service = request.app[SERVICE]
    return None if service.serving or service.stopping else service.standby


def _root_of(request: web.Request) -> Path:
    standby = _standby_of(request)
    return standby.root if standby is not None else engine_of(request).root


async def pin(request: web.Request) -> web.Response:
    """POST /v1/backup: hard links to all files as they are now, topic by topic; other requests get their turn in between."""
    name = str(time.time_ns())
    async with _one_at_a_time:
        await _unpin_all(request)  # pins of a backup that was interrupted
        try:
            lengths = await _pinned(request, name)
        except OSError as error:
            await _unpin_all(request)
            raise Unavailable(
                f"the files cannot be pinned ({error.strerror or error}): hard links are needed in the data folder. "
                "Stop the server and back up the folder then."
            ) from None
    log.info("event=backup_pinned name=%s files=%d bytes=%d", name, len(lengths), sum(lengths.values()))
    folder = str((_root_of(request) / backup.PINNED / name).absolute())
    return answer({"name": name, "folder": folder, "files": len(lengths), "bytes": sum(lengths.values())}, 201)


async def _pinned(request: web.Request, name: str) -> dict[str, int]:
    standby, lengths = _standby_of(request), dict[str, int]()
    if standby is not None:
        steps = backup.pin(Door(), _root_of(request), name)
        while (more := await standby.between_records(lambda: next(steps, None))) is not None:
            lengths = more
        return lengths
    engine = engine_of(request)
    for so_far in backup.pin(engine.door, engine.root, name):
        lengths = so_far
        await asyncio.sleep(0)
        engine_of(request)  # raises if the server is stopping
    return lengths


async def unpin(request: web.Request) -> web.Response:
    """DELETE /v1/backup: the copy is complete, or given up."""
    async with _one_at_a_time:
        await _unpin_all(request)
    log.info("event=backup_unpinned")
    return answer({"outcome": "unpinned"})


async def _unpin_all(request: web.Request) -> None:
    """Remove all pins, on a thread: they may be many, and no other code touches them."""
    loop = asyncio.get_running_loop()
    if _standby_of(request) is not None:
        await loop.run_in_executor(None, backup.unpin, Door(), _root_of(request))
        return
    engine = engine_of(request)
    engine.folder.leftovers |= await loop.run_in_executor(None, backup.unpin, engine.door.beside(), engine.root)
