"""The clock of a server: the wall clock, or under `virtual_clock` one that stands still until it is moved.

`now_ms` is the only clock by which a server calls its engine. A virtual clock counts for the thread that uses it, which is
that of the server's event loop: several servers in one process each have their own.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from turtlemq.errors import Corrupt, InvalidArgument
from turtlemq.model import DUE_MS_MAX
from turtlemq.storage import names
from turtlemq.storage.door import Door

_virtual: dict[int, VirtualClock] = {}  # by thread


def now_ms() -> int:
    """The time of this thread's server: epoch milliseconds, rounded down."""
    if _virtual and (clock := _virtual.get(threading.get_ident())) is not None:
        return clock.now_ms
    return time.time_ns() // 1_000_000


class VirtualClock:
    """A clock that only `move` moves. The time that it has reached is in the data folder: a restart goes on from there, and a new
    folder begins at `begin_ms`, by default the time of the wall clock. Requires: the folder is locked."""

    def __init__(self, door: Door, root: Path, begin_ms: int | None = None) -> None:
        self._door, self._path = door, root / names.CLOCK
        self.now_ms = time.time_ns() // 1_000_000 if begin_ms is None else begin_ms
        if door.exists(self._path):
            self.now_ms = self._read()
        else:
            self._write()

    def _read(self) -> int:
        text = self._door.read_all(self._path).decode(errors="replace").strip()
        if not (text.isascii() and text.isdigit() and int(text[:20]) <= DUE_MS_MAX):
            raise Corrupt(f"{self._path} should hold epoch milliseconds, not {text[:40]!r}. Remove it to begin at the present.")
        return int(text)

    def _write(self) -> None:
        self._door.replace(self._path, f"{self.now_ms}\n".encode())

    def check(self, to_ms: int) -> None:
        """Raise `InvalidArgument` for a time to which the clock cannot be moved."""
        if to_ms < self.now_ms:
            raise InvalidArgument(f"a virtual clock never goes back: it is {self.now_ms} now, {self.now_ms - to_ms} ms later")
        if to_ms > DUE_MS_MAX:
            raise InvalidArgument(f"the last time that messages can have is {DUE_MS_MAX}")

    def move(self, to_ms: int) -> None:
        """Set the time, durably."""
        self.check(to_ms)
        before, self.now_ms = self.now_ms, to_ms
        try:
            self._write()
        except BaseException:
            self.now_ms = before
            raise

    def use(self) -> None:
        """Let this thread's `now_ms` be the time of this clock, until `leave`."""
        _virtual[threading.get_ident()] = self

    def leave(self) -> None:
        """End `use`, on the same thread."""
        _virtual.pop(threading.get_ident(), None)
