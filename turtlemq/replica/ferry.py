"""The ferry: files that the worker process seals go to all attached standbys apart from the stream, over second connections.

A seal's job is done when every standby with such a connection has its files, synced, or has lost the connection. Then the Index
gives the files their names, which are records with size and checksum. A standby that lacks a file at its record asks for it. So a
large seal does not delay the records of commits, and no standby has the name of a file before its content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from turtlemq.index.seal import Sealed, SealJob, files_of
from turtlemq.replica.frames import File, FileOk, Need, NoFile
from turtlemq.replica.lead import Lead
from turtlemq.replica.link import Items, Link
from turtlemq.replica.pace import Pace
from turtlemq.replica.records import Head, Kind, seal, sum_of
from turtlemq.replica.shared_files import is_shared
from turtlemq.replica.stream import Entry, Ferried
from turtlemq.storage.door import Door
from turtlemq.storage.process_worker import ProcessWorker

PIECE_BYTES = 256 << 10  # of a file, in one record: 5 ms at 50 MB/s
SUM_BYTES = 4 << 20  # that are summed at once
_PAUSED_S = 0.005  # between two looks whether a standby reads again


@dataclass(frozen=True, slots=True)
class Cargo:
    """A file to be sent. The mapping stays as it is, also if the file gets another name or is removed."""

    path: str  # in the data folder, when it was sealed
    view: memoryview
    sum: int


@dataclass(slots=True)
class _Boat:
    """The second connection of a standby."""

    link: Link
    pace: Pace
    under_way: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # by the number of a file
    numbers: count[int] = field(default_factory=lambda: count(1))


def piece(number: int, offset: int, data: bytes) -> Entry:
    """A part of a file, as a record."""
    head = Head(Kind.WRITE, 0, number, offset, 0, len(data), sum_of("", data))
    return Entry(0, seal(head, 0)[0], b"", data, 0)


def load(door: Door, root: Path, path: str) -> Cargo:
    """Map a file, and sum it. 0.1 s for 1 GiB in the page cache."""
    view, total = door.map(root / path), xxhash.xxh3_64()
    for at in range(0, len(view), SUM_BYTES):
        total.update(view[at : at + SUM_BYTES])
    return Cargo(path, view, total.intdigest())


class Ferry:
    """A worker that seals in another process, and then sends the files to the standbys of a leader.

    `submit` may be called by any thread, `close` by any but that of the event loop, everything else on the event loop."""

    def __init__(
        self,
        lead: Lead,
        root: Path,
        worker: ProcessWorker,
        bytes_per_s: float,
        *,
        log: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._lead, self._root, self._worker, self._bytes_per_s, self._log = lead, root, worker, bytes_per_s, log
        self._door = Door()
        self._loop = asyncio.get_running_loop()
        self._boats: dict[str, _Boat] = {}  # by member
        self._unfinished: dict[Path, None] = {}  # files that the worker may be writing
        self._turn = asyncio.Lock()  # a topic may be dropped and made again: the file that was sealed last counts
        self._jobs: set[Future[Any]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        lead.bulk = self.attach

    # A worker

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a function in the worker process. The job is done when the standbys have the files that a seal made."""
        self._unfinished |= dict.fromkeys(path for job in args if isinstance(job, SealJob) for path in files_of(job))
        made = asyncio.run_coroutine_threadsafe(self._carry(self._worker.submit(work, *args)), self._loop)
        self._jobs.add(made)
        made.add_done_callback(self._jobs.discard)
        return made

    async def _carry(self, job: Future[Any]) -> Any:
        result = await asyncio.wrap_future(job)
        if isinstance(result, Sealed):
            async with self._turn:
                await self._carry_files(result)
        return result

    async def _carry_files(self, result: Sealed) -> None:
        for path in result.files:
            cargo = await asyncio.to_thread(load, self._door, self._root, str(path.relative_to(self._root)))
            await asyncio.gather(*(self._send(boat, cargo) for boat in self._boats.values()))
            self._lead.stream.ferried[cargo.path] = Ferried(len(cargo.view), cargo.sum)
            self._unfinished.pop(path, None)

    def stop(self) -> None:
        """Send nothing more. Seals that are not done end with an error, and are repeated at the next start."""
        for job in list(self._jobs):
            job.cancel()
        for task in list(self._sending):
            task.cancel()
        for boat in list(self._boats.values()):
            boat.link.close("the leader stops", at_once=True)

    def close(self, timeout_s: float | None = None) -> None:
        """End the worker process, and wait until it has ended: it writes into the folder. Files that did not get their names are
        removed. Requires: the engine is closed, and `stop` was called."""
        self._worker.close(timeout_s)
        left = {self._root / path for path in self._lead.stream.ferried}
        self._lead.stream.ferried.clear()
        for path in left | self._unfinished.keys():
            self._door.remove(path)

    def kill(self) -> None:
        """End the worker process at once, and wait until it has ended. Not on the event loop."""
        self._worker.close(0)

    # Standbys

    def attach(self, member: str, link: Link) -> None:
        """The second connection of a standby."""
        before = self._boats.get(member)
        if before is not None:
            before.link.close("it has a newer connection", at_once=True)
        boat = self._boats[member] = _Boat(link, Pace(self._bytes_per_s))
        link.receive(lambda items: self._received(boat, items))
        link.closed.add_done_callback(lambda _: self._detach(member, boat))

    def _detach(self, member: str, boat: _Boat) -> None:
        """A connection has ended: its files are not waited for any more."""
        if self._boats.get(member) is boat:
            del self._boats[member]
        for arrived in boat.under_way.values():
            if not arrived.done():
                arrived.set_result(None)

    def _received(self, boat: _Boat, items: Items) -> None:
        for item in items:
            match item:
                case FileOk(number=number) if number in boat.under_way:
                    arrived = boat.under_way[number]
                    if not arrived.done():
                        arrived.set_result(None)
                case Need():
                    task = self._loop.create_task(self._give(boat, item))
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)
                case _:
                    boat.link.close(f"{type(item).__name__} is not for a ferry")
                    return

    async def _give(self, boat: _Boat, need: Need) -> None:
        """A standby has met the record of a file that it lacks. Answers may wait for it, so it is sent as fast as it goes."""
        cargo = await asyncio.to_thread(self._find, need)
        self._log("file_needed", file=need.target, peer=boat.link.peer, found=cargo is not None)
        if cargo is None:
            boat.link.send(NoFile(need.path, need.sum))
        else:
            await self._send(boat, cargo, paced=False)

    def _find(self, need: Need) -> Cargo | None:
        """The file under its new name; None if another one has that name by now."""
        if not is_shared(need.target) or not is_shared(need.path):
            return None
        try:
            cargo = load(self._door, self._root, need.target)
        except OSError:
            return None
        same = (len(cargo.view), cargo.sum) == (need.size, need.sum)
        return Cargo(need.path, cargo.view, cargo.sum) if same else None

    async def _send(self, boat: _Boat, cargo: Cargo, *, paced: bool = True) -> None:
        """Send a file. Returns when the standby has it, or the connection has ended."""
        link, number, size = boat.link, next(boat.numbers), len(cargo.view)
        arrived = boat.under_way[number] = self._loop.create_future()
        try:
            link.send(File(number, cargo.path, size, cargo.sum))
            for at in range(0, size, PIECE_BYTES):
                data = await asyncio.to_thread(bytes, cargo.view[at : at + PIECE_BYTES])
                await asyncio.sleep(boat.pace.wait_s(len(data), self._loop.time()) if paced else 0)
                while link.paused and link.is_open:  # noqa: ASYNC110 - rare, and an event for each connection is more
                    await asyncio.sleep(_PAUSED_S)
                if not link.is_open:
                    return
                link.send_records([piece(number, at, data)])
                self._lead.ferried_bytes += len(data)
            if link.is_open:
                await arrived
        finally:
            del boat.under_way[number]
