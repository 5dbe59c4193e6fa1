"""Answers of a standby about its own files, over one connection, and its questions about those of the leader.

The leader asks for checksums of units at an LSN: the thread that applies records links the files between two of them, and another
thread reads them at a limited pace. Both sides may ask whether bytes pass their own checksums on the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from turtlemq.errors import TurtleError, describe
from turtlemq.replica import pictures
from turtlemq.replica.differences import overlaps
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.frames import Distrust, Examine, Examined, Frame, Verified, Verify
from turtlemq.replica.link import Link
from turtlemq.replica.manifest import FileState, frames_of
from turtlemq.replica.pins import Pins
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage.door import Door

ANSWER_S = 600.0  # for an answer of the other side: it may have to read a whole segment


class Ended(TurtleError):
    """The connection for which files are read has ended."""


class Distrusted(TurtleError):
    """Files of this copy are wrong: they are compared with the leader's, and replaced."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(f"{Distrusted.__doc__} ({', '.join(paths[:3])}{', …' if len(paths) > 3 else ''})")
        self.paths = paths


async def examined(examiner: Examiner, question: Examine, bytes_per_s: float) -> Examined:
    """The answer to a question about a file of this side."""
    if not is_shared(question.path):
        return Examined(question.number, False, "this is no replicated file")
    found = await examiner.examine(question.path, bytes_per_s)
    await examiner.rest()
    wrong = [reason for at, size, reason in found.damage if overlaps(at, size, question.start, question.end)]
    why = "it does not exist" if found.gone else found.error or "; ".join(wrong)
    return Examined(question.number, not why, why[:1_000])


class Inspector:
    """The answers and questions over one connection. `take` is called by the thread that applies records, the rest on the event
    loop."""

    def __init__(self, root: Path, link: Link, bytes_per_s: float, examiner: Examiner) -> None:
        self._root, self._link, self._bytes_per_s, self._examiner = root, link, bytes_per_s, examiner
        self._loop = asyncio.get_running_loop()
        self._door = Door()
        self._thread = ThreadPoolExecutor(1, "inspect")
        self._numbers = count(1)
        self._questions: dict[int, asyncio.Future[Examined]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    def take(self, frame: Frame, lsn: int) -> None:
        """A frame of the leader, between two records. `lsn`: of the last one that was applied. Raises `Distrusted`."""
        match frame:
            case Verify():
                self._picture(frame, lsn)
            case Examine():
                self._call(self._begin, self._examine(frame))
            case Examined():
                self._call(self._answered, frame)
            case Distrust(paths=paths):
                raise Distrusted(paths)

    async def ask(self, path: str, start: int, end: int) -> Examined:
        """Ask the leader whether these bytes of a file pass their own checksums there."""
        number = next(self._numbers)
        future = self._questions[number] = self._loop.create_future()
        self._link.send(Examine(number, path, start, end))
        try:
            await asyncio.wait([future, self._link.closed], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else Examined(number, False, "the leader did not answer")
        finally:
            self._questions.pop(number).cancel()

    async def end(self) -> None:
        """The connection has ended: stop reading."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        await asyncio.to_thread(pictures.clear, self._door, self._root)

    # Checksums of a picture

    def _picture(self, frame: Verify, lsn: int) -> None:
        if frame.lsn != lsn:
            self._send(Verified(frame.number, lsn, [], True, f"it is at record {lsn:,}, not at {frame.lsn:,}"))
            return
        pins = pictures.take(self._door, self._root, frame.units, lsn)
        self._thread.submit(self._answer, frame, pins)

    def _answer(self, frame: Verify, pins: Pins) -> None:
        pace = min(self._bytes_per_s, frame.bytes_per_s or self._bytes_per_s)
        try:
            groups: list[list[FileState]] = list(frames_of(pictures.sums_of(pins, pace, self._go_on)))
        except (OSError, TurtleError) as error:
            self._send(Verified(frame.number, pins.lsn, [], True, describe(error)[:1_000]))
            return
        for at, group in enumerate(groups):
            self._send(Verified(frame.number, pins.lsn, group, at == len(groups) - 1))

    def _go_on(self, _: int) -> None:
        if self._ended:
            raise Ended(Ended.__doc__)

    # Checksums of documents

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examine(self, question: Examine) -> None:
        self._link.send(await examined(self._examiner, question, self._bytes_per_s))

    def _answered(self, frame: Examined) -> None:
        future = self._questions.get(frame.number)
        if future is not None and not future.done():
            future.set_result(frame)

    def _send(self, frame: Frame) -> None:
        self._call(self._link.send, frame)

    def _call(self, work: Any, argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(work, argument)
        except RuntimeError:  # the event loop has ended
            if asyncio.iscoroutine(argument):
                argument.close()
