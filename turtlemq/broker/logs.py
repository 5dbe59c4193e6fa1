"""The three logs of a Broker (ready log, reserve journal, history journal), and when their content is durable.

Order of syncs: documents first, then the events about them, so that no durable event names a lost document. The events
are in `events`, the state that follows from them in `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from turtlemq.broker.events import Fields
from turtlemq.broker.journal import Journal
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.errors import Exhausted
from turtlemq.model import Damage
from turtlemq.settings import Settings

_UNSAVED_BYTES_MAX = 32 << 20  # of journals between two checkpoints: replaying them takes half a second
_UNSAVED_DOCUMENTS_MAX = 500_000  # of the ready log between two checkpoints: counting them takes as long


class Logs:
    """Ready log and journals of one topic, and the events that a full disk has deferred."""

    def __init__(self, ready: ReadyLog, reserve: Journal, history: Journal) -> None:
        self.ready, self.reserve, self.history = ready, reserve, history
        self._deferred: list[tuple[Journal, int, str, Sequence[Fields]]] = []  # see `write_or_defer`
        self._saved = (0, 0)  # bytes of the journals and documents of the ready log at the last checkpoint
        self._last_lease = 0  # the number of the event behind the last lease
        self._deferring = False  # in `deferring_syncs`
        self.owes_sync = False  # a request waits for a sync that was deferred

    @property
    def all(self) -> tuple[ReadyLog, Journal, Journal]:
        return self.ready, self.reserve, self.history

    @property
    def journals(self) -> tuple[Journal, Journal]:
        return self.reserve, self.history

    def configure(self, settings: Settings) -> None:
        for log in self.all:
            log.settings = settings

    def on_disk_full(self, make_room: Callable[[], bool]) -> None:
        """Before an event is refused for a full disk, call `make_room`, and try once more if it returns true."""
        for journal in self.journals:
            journal.make_room = make_room

    # Writing

    def write_lease(self, now_ms: int, name: str, fields: Fields) -> int:
        """Journal that messages are handed out. Returns the number of the event."""
        self.reserve.append(now_ms, name, fields)
        self._last_lease = self.reserve.number
        return self._last_lease - 1  # not the number before: the event may have begun a new file, with a checkpoint

    def write_or_defer(self, journal: Journal, now_ms: int, name: str, pieces: Sequence[Fields]) -> None:
        """Write an event that cannot be undone, since another store has taken the messages over; `pieces`: as it was split. If
        the disk is full, or no file can be opened, the event is kept in memory and written by `write_deferred`."""
        try:
            self.write_deferred()
            journal.append(now_ms, name, *pieces)
        except Exhausted:
            self._deferred.append((journal, now_ms, name, pieces))

    def write_deferred(self) -> None:
        """Write the deferred events. Required before a handoff and before a checkpoint. Raises `Exhausted` if some are left."""
        while self._deferred:
            journal, now_ms, name, pieces = self._deferred[0]
            journal.append(now_ms, name, *pieces)
            del self._deferred[0]

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    # Durability

    def sync(self) -> None:
        """Make everything so far durable."""
        for log in self.all:
            log.sync()
        self.owes_sync = False

    def sync_for_answer(self) -> None:
        """Make everything so far durable, because a request promises it; or leave that to the caller of `deferring_syncs`."""
        if self._deferring:
            self.owes_sync = True
        else:
            self.sync()

    @contextmanager
    def deferring_syncs(self) -> Iterator[None]:
        """In the body of a `with`, requests only note that they need a sync: see `owes_sync`."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def secure_leases(self) -> None:
        """Make every lease so far durable. Required before another store takes leased messages over: if a power cut took the
        lease and not the copy, the message would be found unfetched and be delivered from both."""
        if self._last_lease > self.reserve.durable:
            self.sync()

    @property
    def event_count(self) -> int:
        """Events that the journals have had since the topic began."""
        return self.reserve.number + self.history.number

    @property
    def unsaved(self) -> bool:
        """Whether so much was written since the last checkpoint that replaying it would take long."""
        events, documents = self._journal_bytes - self._saved[0], self.ready.next_offset - self._saved[1]
        return events > _UNSAVED_BYTES_MAX or documents > _UNSAVED_DOCUMENTS_MAX

    def note_saved(self) -> None:
        """A checkpoint of everything so far exists, or is on its way."""
        self._saved = (self._journal_bytes, self.ready.next_offset)

    @property
    def _journal_bytes(self) -> int:
        return self.reserve.end + self.history.end

    # Stopping

    @property
    def stopped(self) -> BaseException | None:
        """The error after which one of the logs accepts no more writes, if there was one."""
        return next((log.stopped for log in self.all if log.stopped is not None), None)

    def refuse_if_journals_stopped(self) -> None:
        """Raise `Stopped` if the journals accept no more events."""
        for journal in self.journals:
            journal.refuse_if_stopped()

    def stop_journals(self, error: BaseException) -> None:
        """Accept no more events until the topic is opened again: it is unknown whether another store took messages over."""
        for journal in self.journals:
            journal.stop(error)

    def close(self) -> None:
        """Close the files. Nothing is synced."""
        for log in self.all:
            log.close()

    # Figures

    @property
    def bytes_total(self) -> int:
        """Bytes on disk."""
        return sum(segment.size for segment in self.ready.segments) + self.reserve.bytes_total + self.history.bytes_total

    @property
    def damage(self) -> list[Damage]:
        """All damage found so far."""
        return [damage for log in self.all for damage in log.damage]
