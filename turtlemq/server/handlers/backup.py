"""Handlers of live backups: pin all files, so that `turtlemq backup` can copy them, and unpin them. Callers give no paths."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from turtlemq import backup
from turtlemq.errors import Unavailable
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import engine_of

log = logging.getLogger("turtlemq")
_one_at_a_time = asyncio.Lock()


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
    folder = str((engine_of(request).root / backup.PINNED / name).absolute())
    return answer({"name": name, "folder": folder, "files": len(lengths), "bytes": sum(lengths.values())}, 201)


async def _pinned(request: web.Request, name: str) -> dict[str, int]:
    engine, lengths = engine_of(request), dict[str, int]()
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
    engine = engine_of(request)
    engine.folder.leftovers |= await asyncio.get_running_loop().run_in_executor(
        None, backup.unpin, engine.door.beside(), engine.root
    )
