"""One connection of a standby to its leader: records are queued for the thread that applies them, and acknowledged when applied.

The event loop receives, the thread applies in order. Some frames have their place between two records: the thread
gets them in their turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from time import perf_counter

from turtlemq.errors import DiskFull
from turtlemq.replica.follow_figures import FollowFigures
from turtlemq.replica.follower import Follower
from turtlemq.replica.frames import Ack, Beat, Broken, Distrust, Examine, Examined, Frame, Full, Handover, Verify
from turtlemq.replica.link import Items, Link
from turtlemq.replica.records import HEAD_BYTES, Kind, OutOfStep, Record
from turtlemq.replica.stream import Stream

QUEUE_BYTES_MAX = 16 << 20  # of records that wait to be applied; then nothing more is read


def _refuse(frame: Frame) -> None:
    raise OutOfStep(f"{type(frame).__name__} is not for this standby")


class Session:
    """The records of one connection: a queue, the thread that applies them, and the acknowledgements."""

    def __init__(
        self,
        follower: Follower,
        stream: Stream,
        link: Link,
        saw: Callable[[Beat], None],
        is_complete: Callable[[], bool],
        between: Callable[[Frame], None] = _refuse,
        applying: AbstractContextManager[object] | None = None,
        figures: FollowFigures | None = None,
    ) -> None:
        """`applying` is held while files change."""
        self._follower, self._stream, self._link, self._saw = follower, stream, link, saw
        self._is_complete, self._complete, self._between = is_complete, is_complete(), between
        self._loop = asyncio.get_running_loop()
        self._applying = applying or nullcontext()
        self._figures = figures or FollowFigures()
        self._queue: SimpleQueue[list[Record] | Frame | None] = SimpleQueue()
        self._came = self._done = 0  # bytes of records that came, and of those that were applied
        self._beat = 0
        self._told = False  # the event loop will acknowledge soon
        self._error: BaseException | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._apply_all, name="apply", daemon=True)
        self._thread.start()

    def received(self, items: Items) -> None:
        """On the event loop: records go to the thread, a heartbeat is acknowledged at once."""
        records = [item for item in items if isinstance(item, Record)]
        if len(records) == len(items):
            self._enqueue(records)
            return
        records = []
        for item in items:
            match item:
                case Record():
                    records.append(item)
                case Beat():
                    self._beat = item.n
                    self._saw(item)
                    self.acknowledge()
                case Verify() | Examine() | Examined() | Distrust() | Handover():
                    self._enqueue(records)
                    records = []
                    self._queue.put(item)
                case _:
                    self._link.close(f"{type(item).__name__} is not for a standby")
        self._enqueue(records)

    def _enqueue(self, records: list[Record]) -> None:
        if records:
            self._came += sum(map(_size, records))
            self._queue.put(records)
            if self._came - self._done > QUEUE_BYTES_MAX:
                self._link.pause_reading()

    def drop(self) -> None:
        """Apply nothing of all that is still in the queue."""
        self._dropped = True

    def finish(self) -> BaseException | None:
        """Apply everything that has arrived, unless it was dropped. Returns the error that has stopped it. Not on the event
        loop."""
        self._queue.put(None)
        self._thread.join()
        return self._error

    def _apply_all(self) -> None:
        while (records := self._queue.get()) is not None:
            if self._error is None and not self._dropped:
                try:
                    with self._applying:
                        self._apply(records) if isinstance(records, list) else self._between(records)
                except Exception as error:  # noqa: BLE001 - the owner of the session decides
                    self._error = error
            self._tell()

    def _apply(self, records: list[Record]) -> None:
        began = perf_counter()
        for record in records:
            self._follower.apply(record)
            self._stream.repeat(record)
            self._done += _size(record)
            if record.head.kind == Kind.SYNCED:  # answers may wait for it
                self._tell()
        self._figures.batches.add(perf_counter() - began)
        self._complete = self._complete or self._is_complete()

    def _tell(self) -> None:
        """Let the event loop acknowledge, once for many records."""
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._acknowledge_applied)
            except RuntimeError:  # the event loop has ended
                return

    def _acknowledge_applied(self) -> None:
        self._told = False  # before the position is read
        if self._error is not None:
            report(self._link, self._error)
            return
        self.acknowledge()
        if self._came - self._done < QUEUE_BYTES_MAX // 2:
            self._link.resume_reading()

    def acknowledge(self) -> None:
        """Tell the leader which records are applied, and the last heartbeat."""
        lsn = self._follower.lsn if self._complete else 0  # nothing of a copy that is not complete counts
        self._link.send(Ack(lsn, self._beat, time.time_ns() // 1_000_000))


def report(link: Link, error: BaseException) -> None:
    """Tell the leader why this copy stops."""
    kind = Full if isinstance(error, DiskFull) else Broken
    link.send(kind(str(error)[:1_000], str(getattr(error, "filename", "") or "")[:1_000]))
    link.close(str(error))


def _size(record: Record) -> int:
    return HEAD_BYTES + record.head.path_bytes + record.head.data_bytes
