"""The stores of a topic: the Index of sleepers, the Broker of due messages, the dead letters, and the schedules.

Index and Broker do not know each other, and only `scheduler` knows the schedules. Here are the writes that concern two of them: a
message that moves from the Broker into an Index, and documents that another store's journal has already ended. Rule: the store
that takes a message over has it durably before the store that gave it removes it, so a crash in between leaves two copies, never
none; `recover` resolves these.

Not here: the schedule (`topic`), and the state of a message, given all its copies (`standing`, `listing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turtlemq.broker.broker import Broker
from turtlemq.broker.failures import EndedDelivery
from turtlemq.broker.opening import Opened, open_broker
from turtlemq.data_folder import logs
from turtlemq.errors import Exhausted, TurtleError
from turtlemq.index.columns import Ended, tombstones
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.model import Damage
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.storage.workers import Inline, Worker
from turtlemq.topic.dead_letters import DeadLetters
from turtlemq.topic.group_documents import retry_columns
from turtlemq.topic.pauses import Pauses
from turtlemq.topic.schedule_store import ScheduleStore


class Stores:
    """Index, Broker, dead letters and schedules of one topic, and its pauses. Made by `open`, which sets these."""

    broker: Broker
    index: Index
    dead_letters: DeadLetters
    schedules: ScheduleStore | None  # None: the topic has never had any
    pauses: Pauses

    def __init__(self, name: str, folder: Path, door: Door, settings: Settings, seed: int) -> None:
        self.name, self.folder, self.door, self.settings = name, folder, door, settings
        self.missing: list[Damage] = []  # files and dead letters that were there at the last stop
        self.superseded_retries: list[Ended] = []  # retries of cancelled messages that still sleep in the Index
        self.requeued_letters: list[f.Document] = []  # dead letters that sleep again, or whose id has a newer message
        self.replacing = 0  # staged batches that replace messages which have come due
        self._seed = seed
        self._flusher: Worker = Inline()

    @classmethod
    def open(
        cls, name: str, folder: Path, door: Door, settings: Settings, clean: dict[str, Any], seed: int
    ) -> tuple[Stores, Opened]:
        """Open the stores of a topic, or create them. Also returns the result of opening the Broker, for `recover.resolve`, which
        must come next. `clean`: the mark that `Topic.close` returned at the last proper stop, {} after a crash. `seed`: for the
        hashes of ids."""
        self, gone = cls(name, folder, door, settings, seed), {*clean.get("files", ())} - {*logs(door, folder)}
        self.missing = [Damage(file, 0, 0, "the file is missing") for file in gone]
        self.pauses = Pauses(door, folder)
        callbacks = (self._store_dead_letters, self._schedule_retries, self._newest_seq)
        opened = open_broker(door, folder, name, settings, *callbacks, clean.get("broker"), seed=seed)
        self.broker = opened.broker
        self.index = open_index(door, folder, name, settings, self.broker.progress, clean.get("end"), seed=seed)
        self.dead_letters = DeadLetters(door, folder, name, settings, clean.get("dead"), seed)
        has_schedules, end = door.is_folder(folder / names.SCHEDULES), clean.get("schedules")
        self.schedules = ScheduleStore(door, folder, name, settings, end, seed) if has_schedules else None
        return self, opened

    def make_schedules(self) -> ScheduleStore:
        """The store of schedules, created if the topic has none."""
        if self.schedules is None:
            self.schedules = ScheduleStore(self.door, self.folder, self.name, self.settings, None, self._seed)
            self.schedules.index.use_flusher(self._flusher)
        return self.schedules

    def use(self, flusher: Worker, make_room: Callable[[], bool]) -> None:
        """Let `flusher` write tables, and let the journals call `make_room` before they refuse an event for a full disk."""
        self._flusher = flusher
        for index in self.indexes:
            index.use_flusher(flusher)
        self.broker.on_disk_full(make_room)

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self.settings = settings
        self.index.configure(settings)
        self.dead_letters.configure(settings)
        if self.schedules is not None:
            self.schedules.configure(settings)
        self.broker.configure(settings)

    @property
    def indexes(self) -> list[Index]:
        """The Index of sleepers, that of dead letters, and that of schedules if there is one."""
        first = [self.index, self.dead_letters.index]
        return first if self.schedules is None else [*first, self.schedules.index]

    @property
    def has_superseded(self) -> bool:
        """Are there documents for `remove_superseded`?"""
        return bool(self.superseded_retries or self.requeued_letters)

    def remove_superseded(self) -> None:
        """End the documents of `superseded_retries` and `requeued_letters`. The journal already says that they are over, so they
        must go before the next handoff, and before a checkpoint that leaves that journal behind."""
        self.broker.write_deferred()
        if self.superseded_retries:
            self.broker.sync()  # a cancel that a power cut takes back in the journal must not end a retry
            self.index.store(tombstones(self.superseded_retries))
            self.superseded_retries = []
        self.remove_requeued_letters()

    def remove_requeued_letters(self) -> None:
        """End the documents of `requeued_letters`."""
        self.broker.write_deferred()
        if self.requeued_letters:
            self.dead_letters.remove(self.requeued_letters)
            self.requeued_letters = []

    def land_replacements(self) -> None:
        """Commit staged batches that replace messages which have come due. Required before such a message can change its state.
        If it fails, the callers that wait for the commit hear of it, and the messages stay."""
        if self.replacing:
            try:
                self.index.commit()
            except (TurtleError, OSError):
                return

    @contextmanager
    def taking_over(self, index: Index) -> Iterator[None]:
        """Move messages from the Broker into an Index, in the body of a `with`. After a failed sync it is unknown whether they
        arrived. Only recovery finds out, so the journals of the Broker accept no more events until then."""
        index.refuse_if_stopped()  # then nothing is written, and the Broker keeps them
        try:
            yield
        except Exhausted:
            raise
        except (TurtleError, OSError) as error:
            self.broker.stop_journals(error)
            raise

    # Called by the Broker

    def _schedule_retries(self, ended: Sequence[EndedDelivery]) -> None:
        """Long back-off: the messages sleep in the Index, each for its group alone, durably."""
        ended_ms = ended[0].attempts[-1].ended_ms if ended and ended[0].attempts else None
        with self.taking_over(self.index):
            first = self.index.next_seq(ended_ms or 0)  # with the time of the failure, which `event_feed` tells
            self.index.store(retry_columns(ended, [e.attempt + 1 for e in ended]), first)

    def _store_dead_letters(self, ended: Sequence[EndedDelivery]) -> int:
        """Returns how many letters were replaced."""
        with self.taking_over(self.dead_letters.index):
            return self.dead_letters.store(ended)

    def _newest_seq(self) -> int:
        return self.index.last_seq

    # State

    def refuse_if_stopped(self) -> None:
        """Raise after a failed sync of a journal or of the dead letters: a message may have moved without an event of it, so
        nothing more is written about any message."""
        self.broker.refuse_if_journals_stopped()
        self.dead_letters.index.refuse_if_stopped()
        if self.schedules is not None:
            self.schedules.index.refuse_if_stopped()

    def damage(self) -> list[Damage]:
        """All damage found so far."""
        found = self.missing + [damage for index in self.indexes for damage in index.damage]
        return found + list(self.broker.damage)

    @property
    def stopped(self) -> BaseException | None:
        """The error that ended all writes to one of the stores, if there was one."""
        stopped = self.index.stopped or self.broker.stopped or self.dead_letters.index.stopped
        return stopped if stopped or self.schedules is None else self.schedules.index.stopped
