"""The writer of the log: lines wait in a bounded queue, and a thread writes them. A pipe that nothing reads stops no request.

Lines beyond the bound are dropped and counted; the count is written as a line of its own as soon as lines can be written again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

WAITING_BYTES_MAX = 1 << 20
_PIECE_BYTES = 64 << 10  # written with one system call
_BUSY_S = 0.05  # until the next try, if the descriptor does not block


class LogWriter(logging.Handler):
    """Writes the lines of all loggers to a descriptor. `note_dropped`: makes the line that tells how many were dropped."""

    def __init__(self, fd: int, note_dropped: Callable[[int], str]) -> None:
        super().__init__()
        self.dropped = 0  # lines since the start
        self._fd, self._note_dropped = fd, note_dropped
        self._noted = 0  # dropped lines that the log tells of
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of the lines, and of those that are being written
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record."""
        try:
            self.write(self.format(record))
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)

    def write(self, line: str) -> None:
        """Queue a line, or drop it if too many wait. Never blocks."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._bytes + len(data) > WAITING_BYTES_MAX:
                self.dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every line is written, no longer than `timeout_s`. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                piece = self._take()
            written = self._write(piece)
            with self._changed:
                self._bytes -= sum(map(len, piece))
                self._changed.notify_all()
                if not written:
                    self.dropped += len(piece)
                count, self._noted = (self.dropped - self._noted, self.dropped) if written else (0, self._noted)
            if count:
                self.write(self._note_dropped(count))

    def _take(self) -> list[bytes]:
        piece = [self._lines.popleft()]
        size = len(piece[0])
        while self._lines and size + len(self._lines[0]) <= _PIECE_BYTES:
            size += len(self._lines[0])
            piece.append(self._lines.popleft())
        return piece

    def _write(self, lines: list[bytes]) -> bool:
        """Write lines, however long that takes. Returns False if they cannot be written."""
        rest = memoryview(b"".join(lines))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                time.sleep(_BUSY_S)
            except OSError:  # its reader is gone, or the disk is full
                return False
        return True
