"""Checkpoints of a topic: when the next one is due (setting `beat_ms`), and the steps of writing it.

A checkpoint syncs the ready log and the journals, then replaces the file from which the next opening starts. The syncs take long,
so a flusher does them while the event loop goes on; the loop polls until they are done. The content of the file is described in
`broker.checkpoint`, how it is saved in `broker.save`.

Before a checkpoint, documents that the journal has already ended are removed (`Stores.remove_superseded`): the journal that says
so is left behind by it. After a checkpoint, the Index may drop the documents that were handed off.
"""

from __future__ import annotations

from collections.abc import Callable

from turtlemq.broker.save import Save
from turtlemq.errors import DiskFull, Exhausted, OutOfFiles, TurtleError
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.workers import Inline, Job, Worker
from turtlemq.topic.stores import Stores

POLL_MS = 2  # first poll after a checkpoint has begun; later polls wait for as long as it has taken so far
POLL_MS_MAX = 1_000
QUEUE_MS = 5_000  # a topic that waits for a slot asks again after so long, if nothing wakes it before


class SaveSlots:
    """Bounds the checkpoints under way, of all topics together: each holds descriptors until the flusher has written it.

    Topics without a slot wait in a queue; `wake` is called with the name of the first whenever a slot becomes free."""

    def __init__(self, most: int, wake: Callable[[str], None]) -> None:
        self._free, self._wake = most, wake
        self._waiting: dict[str, None] = {}

    def take(self, topic: str) -> bool:
        """Take a slot, or wait for one."""
        if self._free:
            self._free -= 1
            self._waiting.pop(topic, None)
            return True
        self._waiting[topic] = None
        return False

    def give(self) -> None:
        """Give a slot back."""
        self._free += 1
        if self._waiting:
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._wake(first)

    def leave(self, topic: str) -> None:
        """Wait no longer."""
        self._waiting.pop(topic, None)


class Checkpoints:
    """The checkpoint under way, if there is one, and the time of the next. Called by one thread."""

    def __init__(self, stores: Stores, flusher: Worker, ballast: Ballast, slots: SaveSlots) -> None:
        self._stores, self._flusher, self._ballast, self._slots = stores, flusher, ballast, slots
        self._has_slot = self._is_queued = False
        self._due_ms: int | None = None  # None: nothing to sync
        self._saving: tuple[Save, Job] | None = None  # the checkpoint under way
        self._begun_ms = self._poll_ms = 0  # when it began, and when to poll it
        self._recovered_unsaved = False  # recovery found a state that the journals alone do not tell
        self._begun_at = self._saved_at = (-1, -1)  # events and documents up to the checkpoint under way, and to the last one

    # When

    def due_soon(self, now_ms: int) -> None:
        """Something was journaled: the next checkpoint is due within `beat_ms`, or now if replaying the journals would take
        long."""
        if self._stores.broker.unsaved:
            self._due_ms = now_ms
        elif self._due_ms is None:
            self._due_ms = now_ms + self._stores.settings.beat_ms

    def due_now(self, now_ms: int) -> None:
        """The clock went back, so the age of unsynced events is unknown: if there are any, the next checkpoint is due."""
        if self._due_ms is not None:
            self._due_ms = min(self._due_ms, now_ms)

    @property
    def is_needed(self) -> bool:
        """Is there something to sync?"""
        return self._due_ms is not None

    @property
    def wake_ms(self) -> int | None:
        """When `write_if_due` may have something to do; None: not before `due_soon`."""
        return self._poll_ms if self._is_queued or self._saving is not None else self._due_ms

    # What

    def write(self) -> None:
        """Write a checkpoint and wait for it. If the disk is full, ballast or reserve give their room, since
        files are removed after it. If no file can be opened, others are closed."""
        self.finish()
        try:
            self._begin(Inline())
            self.finish()
        except Exhausted as error:
            if not (self._ballast.release() if isinstance(error, DiskFull) else self._stores.door.close_idle()):
                raise
            self._begin(Inline())
            self.finish()

    def write_if_due(self, now_ms: int) -> None:
        """Begin a checkpoint if one is due, and finish one that the flusher has written. Never waits."""
        self._finish_if_done()
        late = self._due_ms is not None and not now_ms < self._due_ms <= now_ms + self._stores.settings.beat_ms
        if self._saving is None and (late or self._stores.broker.unsaved):
            self._has_slot = self._slots.take(self._stores.name)
            self._is_queued = not self._has_slot
            if self._is_queued:
                self._poll_ms = now_ms + QUEUE_MS
                return
            self._begin(self._flusher)
            self._begun_ms = now_ms
            self._finish_if_done()
        self._poll_ms = now_ms + max(POLL_MS, min(now_ms - self._begun_ms, POLL_MS_MAX))

    def begin_last(self, worker: Worker) -> None:
        """Let `worker` write a checkpoint before the topic is closed, unless it would be the same as the last one."""
        self.finish()
        if self._has_changed:
            self._begin(worker)

    def write_last(self) -> None:
        """Wait for the checkpoint of `begin_last`, and write it again if that failed for want of room or descriptors."""
        try:
            self.finish()
        except Exhausted:
            self.write()
        if self._has_changed:
            self.write()

    def note_opened(self) -> None:
        """The topic was opened with the state of its last checkpoint: there is nothing behind it."""
        self._saved_at = self._position

    @property
    def _position(self) -> tuple[int, int]:
        """How many events the journals have had, and documents the ready log."""
        return self._stores.broker.event_count, self._stores.broker.ready.next_offset

    @property
    def _has_changed(self) -> bool:
        """Was anything written since the last checkpoint, or is there something to be written?"""
        stores = self._stores
        waits = stores.has_superseded or stores.broker.has_deferred or self._recovered_unsaved
        return waits or self.is_needed or self._saved_at != self._position

    def _begin(self, worker: Worker) -> None:
        self.leave_queue()
        try:
            self._stores.land_replacements()  # the checkpoint says that all up to the newest seq has taken effect
            self._stores.remove_superseded()
            self._begun_at = self._position
            save = self._stores.broker.begin_save()
        except BaseException:
            self._give_slot()
            raise
        self._due_ms = None
        self._saving = save, worker.submit(save.run, self._stores.door.beside())

    def _give_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._slots.give()

    def _finish_if_done(self) -> None:
        if self._saving is not None and self._saving[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one. Then the Index may drop documents that were handed off."""
        if self._saving is None:
            return
        (save, job), self._saving = self._saving, None
        stores = self._stores
        try:
            job.result()
            stores.broker.end_save(save)
            self._saved_at = self._begun_at
        except BaseException as error:
            self._due_ms = 0  # overdue until there is room, or for good
            if isinstance(error, OutOfFiles):
                stores.door.close_idle()
            raise
        finally:
            self._give_slot()
        stores.index.release(stores.broker.durable_progress)
        for index in stores.indexes:
            index.rest()

    def leave_queue(self) -> None:
        """Wait for no slot any more."""
        self._slots.leave(self._stores.name)
        self._is_queued = False

    def abandon(self) -> None:
        """Wait for the checkpoint under way, and ignore its result: it must not write into a folder that belongs to another topic
        by then."""
        self.leave_queue()
        self._give_slot()
        if self._saving is not None:
            (_, job), self._saving = self._saving, None
            try:
                job.result()
            except (TurtleError, OSError):
                return

    # After recovery

    def save_recovered(self, odd: bool) -> None:
        """Save the state that opening has worked out. Otherwise the next opening would have to work it out again, when other
        documents may have the same offsets. `odd`: the journals alone do not tell this state, so it is written into them, too.

        If the disk is full, or no file can be opened, `retry_recovered` tries again."""
        self._recovered_unsaved = odd
        try:
            if odd:
                self.retry_recovered()
            else:
                self.write()
        except Exhausted:
            return

    def retry_recovered(self) -> None:
        """Write an odd state of recovery that is not on the disk yet. Required before each handoff."""
        if self._recovered_unsaved:
            self._stores.broker.write_state()
            self.write()
            self._recovered_unsaved = False
