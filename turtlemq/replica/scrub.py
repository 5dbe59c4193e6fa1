"""Scrub: all files of a copy are read from the disk at a low pace, again and again, and checked by their own checksums.

So a byte that has rotted is found while another copy has it still, and not years later when both have lost it. A pass takes as
long as the pace asks for, and passes begin a day apart at least.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from turtlemq.errors import TurtleError, describe
from turtlemq.replica.examine_process import Answer
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.pins import units, walk
from turtlemq.segment.file_check import is_checkable
from turtlemq.storage.door import Door

CYCLE_S = 86_400.0  # between the beginnings of two passes
PAUSE_S = 60.0  # between two passes at least
FIRST_S = 60.0  # before the first pass: a start has other work
Damaged = Callable[[str, Answer], Awaitable[None]]
Log = Callable[..., None]


class Scrub:
    """Examines the files of the data folder `root`. `damaged` is called for each that is not as it was written, `passed` after
    each pass. All methods run on the event loop."""

    def __init__(
        self,
        root: Path,
        examiner: Examiner,
        bytes_per_s: float,
        damaged: Damaged,
        passed: Callable[[], Awaitable[None]] | None = None,
        *,
        log: Log = lambda *_, **__: None,
    ) -> None:
        self.bytes = self.files = self.passes = 0  # examined since the start
        self._root, self._examiner, self._bytes_per_s = root, examiner, bytes_per_s
        self._damaged, self._passed, self._log = damaged, passed, log
        self._door = Door()

    async def run(self, first_s: float = FIRST_S, cycle_s: float = CYCLE_S) -> None:
        """Examine everything, again and again, until it is cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(first_s)
        while True:
            next_s = loop.time() + cycle_s
            try:
                await self.examine_all()
                if self._passed is not None:
                    await self._passed()
            except (OSError, TurtleError) as error:
                self._log("scrub_failed", error=describe(error))
            await asyncio.sleep(max(PAUSE_S, next_s - loop.time()))

    async def examine_all(self) -> None:
        """One pass."""
        bytes_before, files_before = self.bytes, self.files
        for unit in await asyncio.to_thread(units, self._door, self._root):
            for path in await asyncio.to_thread(self._paths, unit):
                answer = await self._examiner.examine(path, self._bytes_per_s)
                self.bytes += answer.bytes
                self.files += not answer.gone
                if answer.damage:
                    await self._damaged(path, answer)
        await self._examiner.rest()
        self.passes += 1
        self._log("scrubbed", files=self.files - files_before, bytes=self.bytes - bytes_before)

    def _paths(self, unit: str) -> list[str]:
        return [path for path in walk(self._door, self._root, unit) if is_checkable(path.rpartition("/")[2])]
