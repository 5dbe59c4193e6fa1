"""Arrivals: the standby's side of the ferry. Files come over a second connection, and wait in a folder of their own.

A file is written piece by piece, compared with its checksum, synced, and only then gets the name under which the record that
adopts it looks for it. The event loop receives; threads write, one piece at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import xxhash

from turtlemq.replica.follower import FERRY, ferry_name
from turtlemq.replica.frames import BadPeer, File, FileOk, Need, NoFile
from turtlemq.replica.link import Link
from turtlemq.replica.records import Kind, NotArrived, OutOfStep, Record, check
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage import names
from turtlemq.storage.door import Door

RETRY_S = 0.5  # before the next connection
FILES_MAX = 64  # that come at a time over one connection
T = TypeVar("T")


def clear(door: Door, root: Path) -> None:
    """Remove files that came apart from the stream and were not adopted. Requires: nothing follows in this folder."""
    folder = root / names.SYNC / FERRY
    if door.exists(folder):
        door.remove_folder(folder)


class Dock:
    """The folder of files that came apart from the stream, and those that are coming."""

    def __init__(self, root: Path, door: Door) -> None:
        self._folder, self._door = root / names.SYNC / FERRY, door
        self._coming: dict[int, _Coming] = {}  # by number

    def take(self, item: object) -> tuple[File, FileOk] | None:
        """A frame, or a part of a file. Returns the file if it is whole now. Raises `OutOfStep` for a part that was changed
        on its way, and `BadPeer` for one that does not belong here."""
        match item:
            case File(number=number) if number not in self._coming and len(self._coming) < FILES_MAX and is_shared(item.path):
                self._door.make_folder(self._folder, durable=False)
                coming = self._coming[number] = _Coming(self._door, self._folder, item)
            case Record() if item.head.kind == Kind.WRITE and item.head.lsn in self._coming:
                coming = self._coming[item.head.lsn]
                check(item, 0)
                coming.write(item.head.offset, item.data)
            case _:
                raise BadPeer(f"{type(item).__name__} does not belong to a file that comes here")
        if coming.at < coming.file.size:
            return None
        coming.finish(self._folder / ferry_name(coming.file.path, coming.file.sum))
        del self._coming[coming.file.number]
        return coming.file, FileOk(coming.file.number)

    def drop(self) -> None:
        """The connection has ended: forget files that are not whole."""
        for coming in self._coming.values():
            coming.drop()
        self._coming.clear()


class _Coming:
    """A file that is coming."""

    def __init__(self, door: Door, folder: Path, file: File) -> None:
        self.file, self.at = file, 0
        self._door, self._path = door, folder / f"{file.number}.part"
        self._sum = xxhash.xxh3_64()
        self._fd = door.create(self._path)

    def write(self, offset: int, data: bytes) -> None:
        if offset != self.at or offset + len(data) > self.file.size or not data:
            raise OutOfStep(f"a part of {self.file.path} does not follow the one before it")
        self._door.write(self._fd, self._path, offset, [data])
        self._sum.update(data)
        self.at += len(data)

    def finish(self, target: Path) -> None:
        """Sync the file, and give it the name under which it is looked for."""
        if self._sum.intdigest() != self.file.sum:
            raise OutOfStep(f"{self.file.path} was changed on its way")
        self._door.sync(self._fd, self._path)
        self._door.close(self._fd)
        self._door.rename(self._path, target)

    def drop(self) -> None:
        self._door.close(self._fd)
        self._door.remove(self._path)


class Arrivals:
    """Receives files for as long as a standby follows a leader. `connect` makes a second connection to it.

    `ask` is called by the thread that applies records, everything else on the event loop."""

    def __init__(
        self, root: Path, door: Door, connect: Callable[[], Awaitable[Link]], log: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._dock, self._connect, self._log = Dock(root, door.beside()), connect, log
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._asked: tuple[Need, Future[None]] | None = None
        self._ended = False
        self._task = self._loop.create_task(self._run())

    def ask(self, need: Need) -> None:
        """Get a file that is missing, and wait for it. Raises `NotArrived` if the connection ends, `OutOfStep` if the leader
        has it no more, and errors of the disk."""
        arrived: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(self._ask, need, arrived)
        except RuntimeError:  # the event loop has ended
            raise NotArrived(NotArrived.__doc__) from None
        arrived.result()

    def _ask(self, need: Need, arrived: Future[None]) -> None:
        self._asked = need, arrived
        if self._ended:
            self._answer(NotArrived(NotArrived.__doc__))
        elif self._link is not None:
            self._link.send(need)

    def _answer(self, error: Exception | None = None) -> None:
        """Let the thread that waits for a file go on."""
        if self._asked is not None:
            arrived, self._asked = self._asked[1], None
            if error is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(error)

    async def end(self) -> None:
        """Receive no more. A thread that waits for a file goes on with an error."""
        self._ended = True
        self._answer(NotArrived(NotArrived.__doc__))
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        told = False
        while True:
            try:
                self._link = link = await self._connect()
            except (BadPeer, TimeoutError, OSError) as error:
                if not told:
                    self._log("no_ferry", why=str(error) or "it was silent")
                told = True
            else:
                told = False
                await self._receive(link)
            await asyncio.sleep(RETRY_S)

    async def _receive(self, link: Link) -> None:
        """Receive files until the connection ends."""
        if self._asked is not None:
            link.send(self._asked[0])
        try:
            while True:
                await self._take(link, await link.frame(object))
        except BadPeer as error:
            link.close(str(error))
        except OutOfStep as error:
            self._log("file_refused", why=str(error))
            link.close(str(error))
        except Exception as error:  # noqa: BLE001 - the thread that waits for a file raises it
            self._log("file_refused", why=str(error))
            self._answer(error)
        finally:
            self._link = None
            link.close("this standby receives no more files", at_once=True)
            await _on_thread(self._dock.drop)

    async def _take(self, link: Link, item: object) -> None:
        if isinstance(item, NoFile):
            if self._asked is not None and (item.path, item.sum) == (self._asked[0].path, self._asked[0].sum):
                self._answer(OutOfStep(f"the leader does not have {item.path} any more"))
            return
        link.pause_reading()
        arrived = await _on_thread(self._dock.take, item)
        link.resume_reading()
        if arrived is not None:
            file, answer = arrived
            link.send(answer)
            if self._asked is not None and (file.path, file.sum) == (self._asked[0].path, self._asked[0].sum):
                self._answer()


async def _on_thread(work: Callable[..., T], *args: object) -> T:
    """Call a function on a thread. It is over when this returns, even if the task is cancelled."""
    call = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
