"""Examination of files by their own checksums, in a process of its own with the lowest priority.

The process is started at the first request, and ended by `rest` or `rest_now`. A file whose examination ends the process, such as
one that was cut while it was mapped, counts as changed, not as damaged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from turtlemq.replica.examine_process import Answer, Request
from turtlemq.segment.file_check import is_checkable, is_whole
from turtlemq.storage.door import Door

LINE_BYTES_MAX = 16 << 20  # of an answer: a file may have many damaged stretches


class Examiner:
    """Examines files of the data folder `root`, one at a time. All methods run on the event loop."""

    def __init__(self, root: Path) -> None:
        self._root, self._door = root, Door()
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def examine(self, path: str, bytes_per_s: float) -> Answer:
        """The damage of a file of the data folder, twice found. Without checksums of its own, it has none."""
        answer = await self._examine(path, bytes_per_s)
        return await self._examine(path, bytes_per_s) if answer.damage else answer

    async def _examine(self, path: str, bytes_per_s: float) -> Answer:
        file = self._root / path
        if not is_checkable(file.name):
            return Answer(gone=not self._door.exists(file))
        whole = is_whole(file.name, self._door.names(file.parent))
        async with self._turn:
            try:
                return await self._ask(Request(str(file), whole, bytes_per_s))
            except (OSError, ValueError, msgspec.DecodeError) as error:
                self._kill()
                return Answer(error=str(error) or "the process that examines files has ended")

    async def _ask(self, request: Request) -> Answer:
        if self._process is None:
            command = (sys.executable, "-m", "turtlemq.replica.examine_process")
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(request) + b"\n")
        return msgspec.json.decode(await stdout.readline(), type=Answer)

    async def rest(self) -> None:
        """End the process until the next request."""
        async with self._turn:
            process, self._process = self._process, None
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()

    async def rest_now(self) -> None:
        """End the process at once. Examinations under way fail."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
