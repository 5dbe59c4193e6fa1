"""The standby's side of a reconcile: it compares its files with the leader's manifest, and makes them equal.

Files are compared and written on threads, one step at a time. Bytes that only an old leader had, and that no answer has told of,
are kept below DIVERGED, up to a limit.

Requires: REPLICA says already, durably, that this copy is not complete.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turtlemq.model import Damage
from turtlemq.replica.copy_files import Changed, Tails
from turtlemq.replica.file_copy import FileCopy, Whole
from turtlemq.replica.frames import Ack, BadPeer, Beat, Done, Frame, Manifest, Piece, Pull, Sync, Welcome
from turtlemq.replica.good_pieces import damage_of, keep_good_pieces
from turtlemq.replica.link import Items, Link
from turtlemq.replica.manifest import CatchUp, FilePlan
from turtlemq.replica.records import Record
from turtlemq.storage.door import Door

WINDOW = 4  # parts of 1 MiB that are asked for at a time
ROUNDS_MAX = 20  # then the connection is ended, and another one begins
FILES_MAX = 2_000_000  # of a manifest
T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """Figures of the copy under way. Any thread may read them."""

    round: int = 0
    files: int = 0  # of the manifest
    bytes_total: int = 0  # that this round pulls
    bytes_done: int = 0


class CopyTarget:
    """A copy under way over one connection. `progress` counts; `tails` keeps diverging bytes."""

    def __init__(
        self,
        root: Path,
        door: Door,
        link: Link,
        progress: Progress,
        tails: Tails,
        suspect: Collection[str] = (),
        *,
        unchecked: bool = True,
    ) -> None:
        """`suspect`: files of this copy that may have damage. `unchecked`: some may have come from a leader earlier, in a copy
        that did not become complete."""
        self.damaged: dict[str, Damage] = {}  # files that are damaged as they have come, and the first damage of each
        self._root, self._door, self._link, self._progress, self._unchecked = root, door, link, progress, unchecked
        self._pulled: set[str] = set()  # files that have come in any round
        self._files = FileCopy(root, door, tails, suspect, keep_good_pieces)
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Record | Frame] = deque()
        self._came = asyncio.Event()
        link.closed.add_done_callback(lambda _: self._came.set())
        link.receive(self._receive)

    async def run(self) -> tuple[Welcome, Whole]:
        """Returns the leader's welcome, and the manifest, when all files are in place and durable. Raises `BadPeer`."""
        changed = ""
        for number in range(ROUNDS_MAX):
            self._progress.round = number + 1
            self._link.send(Sync(number, changed))
            manifest = await self._manifest()
            try:
                await self._make(manifest)
            except Changed as error:
                changed = error.path
                continue
            changed = ""
            self._link.send(Done(manifest.lsn))
            welcome = await self._next(Welcome)
            if welcome.mode == "resume":
                await self._on_thread(self._check, manifest)
                return welcome, manifest
        raise BadPeer("the leader's files have changed again and again while they were compared")

    def rest(self) -> list[Record | Frame]:
        """Records and frames that have come behind the welcome."""
        items = list(self._inbox)
        self._inbox.clear()
        return items

    # Frames

    def _receive(self, items: Items) -> None:
        for item in items:
            if isinstance(item, Beat):
                made = self._progress
                self._link.send(Ack(0, item.n, time.time_ns() // 1_000_000, made.bytes_done, made.bytes_total))
            else:
                self._inbox.append(item)
        self._came.set()

    async def _next(self, kind: type[T], passed: type | None = None) -> T:
        """The next frame, which must be of this kind; frames of the kind `passed` are of the round before."""
        while True:
            while not self._inbox:
                if self._link.closed.done():
                    raise BadPeer(self._link.closed.result())
                self._came.clear()
                await self._came.wait()
            item = self._inbox.popleft()
            if isinstance(item, kind):
                return item
            if passed is None or not isinstance(item, passed):
                raise BadPeer(f"{type(item).__name__} came, {kind.__name__} was expected")

    async def _manifest(self) -> Whole:
        whole = Whole()
        while True:
            part = await self._next(Manifest, passed=Piece)
            whole.lsn, whole.chain = part.lsn, part.chain
            whole.files += part.files
            whole.folders += part.folders
            whole.units |= {unit.name: unit.lsn for unit in part.units}
            if len(whole.files) > FILES_MAX:
                raise BadPeer(f"a manifest of more than {FILES_MAX:,} files")
            if part.last:
                return whole

    # Files

    async def _make(self, manifest: Whole) -> None:
        plans = await self._on_thread(self._files.compare, manifest, time.time_ns())
        self._progress.files = len(plans)
        self._pulled |= {plan.wanted.path for plan in plans}
        self._progress.bytes_total, self._progress.bytes_done = sum(plan.pull_bytes for plan in plans), 0
        parts = ((plan, at, length) for plan in plans for at, length in plan.parts())
        asked: deque[tuple[FilePlan, int, int]] = deque()
        try:
            while True:
                while len(asked) < WINDOW and (part := next(parts, None)) is not None:
                    self._link.send(Pull(part[0].number, part[1], part[2]))
                    asked.append(part)
                if not asked:
                    break
                plan, at, length = asked.popleft()
                piece = await self._next(Piece)
                if (piece.file, piece.offset) != (plan.number, at) or len(piece.data) > length:
                    raise BadPeer("a piece came that was not asked for")
                await self._on_thread(self._files.write, plan, at, length, piece.data)
                self._progress.bytes_done += length
        finally:
            await self._on_thread(self._files.close)
        await self._on_thread(self._files.finish)

    def _check(self, manifest: Whole) -> None:
        """Bytes of the leader may have rotted before they were sent: check all files that came by their own checksums."""
        for file in manifest.files:
            if (self._unchecked or file.path in self._pulled) and (holes := damage_of(self._door, self._root / file.path)):
                self.damaged[file.path] = holes[0]

    async def _on_thread(self, work: Callable[..., T], *args: object) -> T:
        return await self._loop.run_in_executor(None, work, *args)


def catch_up_of(manifest: Whole) -> CatchUp:
    """The records that a copy of these files applies."""
    return CatchUp(manifest.lsn, manifest.units)
