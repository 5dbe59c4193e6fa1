"""The leader's side of a reconcile: it links its files, tells their checksums, and sends the bytes that a standby asks for.

Links are made on the event loop, in small steps. Files are read on one thread. A standby asks for a few pieces at a time, so that
little is under way; requests are served one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from turtlemq.errors import TurtleError
from turtlemq.replica.frames import Done, Manifest, Piece, Pull, Sync
from turtlemq.replica.link import Link
from turtlemq.replica.manifest import FileState, UnitState, frames_of
from turtlemq.replica.pins import LINKS, Pins, pin, unpin, unpin_all
from turtlemq.replica.stream import Stream
from turtlemq.replica.sums import Sums
from turtlemq.storage import names
from turtlemq.storage.door import Door

REQUESTS_MAX = 64  # of one standby that wait to be served
_NAMES_AT_ONCE = 1_000  # in one frame of the manifest
_PAUSE_S = 0.005  # before the next look whether the standby can take more

Request = Sync | Pull | Done


class CopySource:
    """Copies of the data folder `root`, whose changes are in `stream`. `door`: makes a plain Door for one thread."""

    def __init__(self, root: Path, stream: Stream, door: Callable[[], Door] = Door) -> None:
        self.root, self.stream = root, stream
        self.sent_bytes = 0  # of pieces
        self._numbers = count()
        self._linker, self._reader = door(), door()
        self._sums: Sums | None = None
        self._thread = ThreadPoolExecutor(1, "copy")
        unpin_all(self._linker, root)

    def begin(self, link: Link, copied: Callable[[int | None], None]) -> Copying:
        """A standby is about to compare its files. `copied` is called when it has them: with the LSN behind which records must
        follow, or with None if the ring has lost some of them and the standby must compare again."""
        folder = self.root / names.SYNC / LINKS / str(next(self._numbers))
        return Copying(self, link, folder, copied)

    def close(self) -> None:
        """Remove all links. A copy under way ends."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        unpin_all(self._linker, self.root)

    async def pin(self, pins: Pins) -> None:
        for _ in pin(self._linker, self.root, self.stream, pins):
            await asyncio.sleep(0)

    async def unpin(self, pins: Pins) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, unpin, self._reader, pins)

    async def states(self, pins: Pins, changed: str = "") -> list[FileState]:
        """The files with their checksums. Noted ones of the file `changed` do not count."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_states, pins, changed)

    def _read_states(self, pins: Pins, changed: str) -> list[FileState]:
        self._sums = self._sums or Sums(self._reader, self.root)
        self._sums.forget(changed)
        now_ns = time.time_ns()
        found = [
            FileState(path, size, self._sums.of(path, pins.link(number), size, now_ns))
            for number, (path, size) in enumerate(pins.files)
        ]
        self._sums.save()
        return found

    async def read(self, pins: Pins, pull: Pull) -> bytes:
        """Bytes of a file, as far as it was linked."""
        size = pins.files[pull.file][1]
        length = max(0, min(pull.length, size - pull.offset))
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._thread, self._reader.read, pins.link(pull.file), pull.offset, length)
        self.sent_bytes += len(data)
        return data


class Copying:
    """The copy of one standby. All methods run on the event loop."""

    def __init__(self, source: CopySource, link: Link, folder: Path, copied: Callable[[int | None], None]) -> None:
        self._source, self._link, self._folder, self._copied = source, link, folder, copied
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._pins: Pins | None = None
        self._rounds = count()
        self._task = asyncio.get_running_loop().create_task(self._serve())
        link.closed.add_done_callback(lambda _: self._task.cancel())

    def take(self, request: Request) -> None:
        """A request of the standby has come."""
        if self._requests.qsize() >= REQUESTS_MAX:
            self._link.close("it asks for too much at a time")
            return
        self._requests.put_nowait(request)

    async def end(self) -> None:
        """The connection has ended: remove the links."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._unpin()

    async def _serve(self) -> None:
        try:
            while await self._answer(await self._requests.get()):
                pass
        except (OSError, TurtleError, IndexError) as error:
            self._link.close(f"its copy cannot go on: {error}")

    async def _answer(self, request: Request) -> bool:
        """Returns False when the copy is made."""
        source, pins = self._source, self._pins
        if isinstance(request, Sync):
            await self._unpin()
            await self._offer(request.changed)
            return True
        if pins is None:
            raise IndexError("nothing was offered")
        if isinstance(request, Pull):
            self._link.send(Piece(request.file, request.offset, await source.read(pins, request)))
            return True
        await self._unpin()
        with source.stream.lock:
            fits = source.stream.resumes(pins.lsn, pins.chain)
        self._copied(pins.lsn if fits else None)
        return not fits

    async def _offer(self, changed: str) -> None:
        pins = self._pins = Pins(self._folder / str(next(self._rounds)))
        await self._source.pin(pins)
        files = await self._source.states(pins, changed)
        for group in frames_of(files):
            await self._send(Manifest(pins.lsn, pins.chain, group, [], [], False))
        units = [UnitState(name, lsn) for name, lsn in pins.units.items()]
        for at in range(0, max(len(units), len(pins.folders)), _NAMES_AT_ONCE):
            until = at + _NAMES_AT_ONCE
            await self._send(Manifest(pins.lsn, pins.chain, [], units[at:until], pins.folders[at:until], False))
        await self._send(Manifest(pins.lsn, pins.chain, [], [], [], True))

    async def _send(self, frame: Manifest) -> None:
        while self._link.paused:  # noqa: ASYNC110 - the sender of records waits for the same event
            await asyncio.sleep(_PAUSE_S)
        self._link.send(frame)

    async def _unpin(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            await self._source.unpin(pins)
