"""A world to test the Index in: the Index itself, a receiver that keeps handoffs, a dict of the expected state, and the
operations that drive all three and compare them. Used by the state machine and by stories; no clock, no chance of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from turtlemq.errors import Conflict, UnknownMessage
from turtlemq.index.index import Index
from turtlemq.index.parts import TablePart
from turtlemq.index.recover import open_index
from turtlemq.index.repair import repairing
from turtlemq.index.seal import Sealed, seal
from turtlemq.model import SEQ_COUNTER_BITS, Batch, Due, Progress, Receipt, State, StoredMessage
from turtlemq.segment import format as f
from turtlemq.segment.table import BLOCK
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

TOPIC = "t"
SMALL = Settings(segment_bytes=4096, run_messages=8)


def open_at(folder: Path, progress: Progress = Progress(), settings: Settings = SMALL, door: Door | None = None) -> Index:  # noqa: B008 - frozen
    """An Index in `folder`."""
    return open_index(door or Door(), folder, TOPIC, settings, progress)


def abandon(index: Index) -> None:
    """The state after a crash of the process: nothing is written any more, descriptors are closed by the system."""
    index._filters.close()
    index._writer.close()
    index._segments.door.shut()


def documents(due: Due) -> list[f.Document]:
    """The documents of a handoff, decoded."""
    edges = [*due.starts.tolist(), len(due.raw)]
    return [f.decode(due.raw[a:b]) for a, b in pairwise(edges)]


@dataclass
class Receiver:
    """Where due messages go: handoffs are stored whole, one after the other, and become durable with `sync`."""

    durable: list[list[f.Document]] = field(default_factory=list)
    pending: list[list[f.Document]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    synced: Progress = field(default_factory=Progress)

    def store(self, due: Due) -> None:
        self.pending.append(documents(due))
        self.progress = due.progress

    def sync(self) -> None:
        self.durable += self.pending
        self.pending = []
        self.synced = self.progress

    def crash(self) -> list[f.Document]:
        """Forget the documents that were not durable, and return them."""
        lost = [document for batch in self.pending for document in batch]
        self.pending, self.progress = [], self.synced
        return lost


@dataclass
class Sleeper:
    """The expected state of one message."""

    id: str
    body: bytes
    due_ms: int
    created_ms: int
    order: int  # counts arrivals: decides among equal due times
    ttr_ms: int = 0
    flags: int = 0
    expires_ms: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def same(self, got: StoredMessage | f.Document) -> bool:
        mine = (self.id, self.body, self.due_ms, self.ttr_ms, self.expires_ms, self.headers, self.flags)
        theirs = (got.id, got.body, got.due_ms, got.ttr_ms, got.expires_ms, got.headers, got.flags & f.USER_FLAGS)
        return mine == theirs and got.created_ms == self.created_ms


class Later:
    """A worker whose jobs run when `finish` is called, or when a result is asked for."""

    def __init__(self) -> None:
        self.jobs: list[LaterJob] = []

    def submit(self, work: Callable[..., Any], /, *args: Any) -> LaterJob:
        self.jobs.append(LaterJob(work, args))
        return self.jobs[-1]

    def finish(self) -> None:
        """Do everything that waits."""
        for job in self.jobs:
            job.run()
        self.jobs = []


class LaterJob:
    """Done once its result was asked for."""

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._work, self._args, self._ran = work, args, False
        self._value: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._ran

    @property
    def value(self) -> Any:
        """The result, or None before it ran."""
        return self._value

    def run(self) -> None:
        """Run once. An error is kept, and raised where the result is asked for."""
        if not self._ran:
            self._ran = True
            try:
                self._value = self._work(*self._args)
            except Exception as error:  # noqa: BLE001 - kept, as by any worker
                self._error = error

    def result(self) -> Any:
        self.run()
        if self._error is not None:
            raise self._error
        return self._value


class World:
    """An Index, its receiver, and the model: `asleep` by id, `handed` by id, `cancelled` ids. With a `flusher`, tables are
    written while others go on."""

    def __init__(self, folder: Path, settings: Settings = SMALL, door: Door | None = None, flusher: Later | None = None) -> None:
        self.flusher = flusher
        self.folder, self.settings, self.door = folder, settings, door or Door()
        self.receiver = Receiver()
        self.asleep: dict[str, Sleeper] = {}
        self.handed: dict[str, Sleeper] = {}
        self.cancelled: set[str] = set()
        self.arrivals = 0
        self.staged: list[tuple[Batch, Receipt, int]] = []  # on their way into the log
        self.ending: set[str] = set()  # sleepers whose cancel is on its way
        self.sealed: Sealed | None = None  # written, not adopted yet
        self.open = False  # a table whose file was cut must not be touched: the system would end the process
        self.index = self._open(None)
        self.open = True

    def _open(self, clean_end: int | None) -> Index:
        index = open_index(self.door, self.folder, TOPIC, self.settings, self.receiver.synced, clean_end)
        if self.flusher is not None:
            self.flusher.jobs.clear()
            index._writer.flusher = self.flusher
        return index

    # Producing

    def append(self, batch: Batch, now_ms: int, *, sync: bool = True) -> Receipt:
        """Append, and compare the receipt with the model's expectation for every id."""
        expected, first = self._expected(batch), self.index.next_seq(now_ms)
        receipt = self.index.append(batch, now_ms, sync=sync)
        self._compare_receipt(batch, receipt, expected)
        self.committed()
        self._born(batch, receipt, first)
        return receipt

    def stage(self, batch: Batch, now_ms: int) -> None:
        """The first half of an append. Some later commit is the other half."""
        expected, first = self._expected(batch), self.index.next_seq(now_ms)
        group = self.index._writer._group
        receipt = self.index.stage(batch, now_ms)
        self._compare_receipt(batch, receipt, expected)
        self.committed(rolled=self.index._writer._group is not group)
        if any(receipt.created):
            self.staged.append((batch, receipt, first))

    def committed(self, *, rolled: bool = False) -> None:
        """Take note of a commit, if there was one: batches on their way have arrived. `rolled`: the segment was full, so the
        batches staged before have been committed already."""
        if self.index._writer._group is not None and not rolled:
            return
        for batch, receipt, first in self.staged:
            self._born(batch, receipt, first)
        for id_ in self.ending:
            self.cancelled.add(id_)
            del self.asleep[id_]
        self.staged, self.ending = [], set()

    def _compare_receipt(self, batch: Batch, receipt: Receipt, expected: list[bool]) -> None:
        assert receipt.created == expected, (batch.ids, receipt, expected)
        given = batch.ids or [None] * len(batch)
        assert all(id_ in (None, got) for id_, got in zip(given, receipt.ids, strict=True))

    def _expected(self, batch: Batch) -> list[bool]:
        seen = {id_ for _, receipt, _ in self.staged for id_ in receipt.ids}
        out = []
        for id_ in batch.ids or [None] * len(batch):
            free = id_ not in self.asleep and (id_ is None or self.index.get(id_) is None)  # nor one whose cancel is on its way
            out.append(id_ is None or (id_ not in seen and free))
            if id_ is not None:
                seen.add(id_)
        return out

    def _born(self, batch: Batch, receipt: Receipt, seq: int) -> None:
        for i, (id_, fresh) in enumerate(zip(receipt.ids, receipt.created, strict=True)):
            if not fresh:
                continue
            assert id_ not in self.asleep, id_
            self.arrivals += 1
            self.cancelled.discard(id_)
            self.handed.pop(id_, None)
            self.asleep[id_] = Sleeper(
                id=id_,
                body=batch.bodies[i],
                due_ms=int(batch.due_ms[i]),
                created_ms=seq >> SEQ_COUNTER_BITS,
                order=self.arrivals,
                ttr_ms=0 if batch.ttr_ms is None else batch.ttr_ms[i],
                flags=batch.flags if isinstance(batch.flags, int) else 0 if batch.flags is None else batch.flags[i],
                expires_ms=None if batch.expires_ms is None else batch.expires_ms[i],
                headers=(None if batch.headers is None else batch.headers[i]) or {},
            )
            seq += 1

    # One message

    def cancel(self, ids: Sequence[str], *, commit: bool = True) -> None:
        before = {id_: self.state(id_) for id_ in ids}
        group = self.index._writer._group
        outcome = self.index.cancel(ids) if commit else self.index.stage_cancel(ids)
        assert set(outcome) == set(ids)
        ended = set()
        for id_, state in outcome.items():
            wanted = {State.SLEEP: State.CANCELLED, State.READY: State.READY}.get(before[id_], State.UNKNOWN)
            assert state is (State.UNKNOWN if id_ in self.ending else wanted), (id_, before[id_], state)
            if state is State.CANCELLED:
                ended.add(id_)
        self.committed(rolled=self.index._writer._group is not group)
        self.ending |= ended
        self.committed()

    def reschedule(
        self, id_: str, now_ms: int, due_ms: int | None, body: bytes | None, headers: dict[str, str] | None = None
    ) -> None:
        before = self.state(id_)
        try:
            got = self.index.reschedule(id_, now_ms, due_ms=due_ms, body=body, headers=headers)
        except UnknownMessage:
            assert before is State.UNKNOWN or id_ in self.ending, (id_, before)
        except Conflict:
            assert before is State.READY, (id_, before)
        else:
            assert before is State.SLEEP, (id_, before)
            self.committed()
            self.arrivals += 1
            mine = self.asleep[id_]
            mine.due_ms = mine.due_ms if due_ms is None else due_ms
            mine.body = mine.body if body is None else body
            mine.headers = mine.headers if headers is None else headers
            mine.order = self.arrivals
            assert mine.same(got), (mine, got)

    def state(self, id_: str) -> State:
        """The state of an id as the Index reports it, once it agrees with the model."""
        got = self.index.get(id_)
        if id_ in self.asleep:
            assert got is not None, f"{id_} is lost"
            assert got.state is State.SLEEP, got
            assert self.asleep[id_].same(got), (self.asleep[id_], got)
            return State.SLEEP
        if id_ in self.handed and got is not None:  # a file still holds it
            assert got.state is State.READY, got
            assert self.handed[id_].same(got)
            return State.READY
        assert got is None, f"{id_} came back: {got}"
        return State.UNKNOWN

    # Firing

    def due(self, now_ms: int, *, count_max: int = 10_000, bytes_max: int = 1 << 24, store: bool = True) -> Due | None:
        """One handoff, with the right messages in the right order. `store=False`: the receiver fails, nothing happens."""
        due = self.index.due(now_ms, count_max=count_max, bytes_max=bytes_max)
        if due is None:
            overdue = [s.id for s in self.asleep.values() if s.due_ms <= now_ms]
            assert not overdue or self.ending, f"due but not given: {overdue}"
            return None
        taken = documents(due)
        self._compare(due, taken, now_ms)
        assert len(taken) <= count_max
        assert len(due.raw) <= bytes_max or len(taken) == 1
        if store:
            if taken:  # an empty handoff need not be stored
                self.receiver.store(due)
            self.index.advance(due)
            for document in taken:
                self.handed[document.id] = self.asleep.pop(document.id)
        return due

    def _compare(self, due: Due, taken: list[f.Document], now_ms: int) -> None:
        ids = [document.id for document in taken]
        assert len(set(ids)) == len(ids), "twice in one handoff"
        for document in taken:
            assert document.id in self.asleep, f"{document.id} was {'handed off' if document.id in self.handed else 'ended'}"
            assert document.id not in self.ending, "fired while its cancel is on its way"
            assert document.due_ms <= now_ms, "early"
            assert self.asleep[document.id].same(document), (self.asleep[document.id], document)
        places = [(self.asleep[id_].due_ms, self.asleep[id_].order) for id_ in ids]
        assert places == sorted(places), "out of order"
        assert due.due_ms.tolist() == [d.due_ms for d in taken]
        assert due.seq.tolist() == [d.seq for d in taken]
        left = [s.due_ms for s in self.asleep.values() if s.due_ms <= now_ms and s.id not in set(ids)]
        if not due.more:
            assert not left, "more is due than was said"
        if left and places:
            assert places[-1][0] <= min(left), "something older was left out"

    def drain(self, now_ms: int, count_max: int = 10_000) -> None:
        """Hand off everything that is due."""
        for _ in range(10_000):
            if self.due(now_ms, count_max=count_max) is None:
                break
        else:
            raise AssertionError("firing does not come to an end")
        following = self.index.next_due()
        assert following is None or following > now_ms or self.ending

    def settle(self) -> None:
        """The receiver makes everything durable and says so."""
        self.receiver.sync()
        self.index.release(self.receiver.synced)

    # Housekeeping

    @property
    def closed(self) -> list[int]:
        segments, flushing = self.index._segments, [memtable.base for memtable in self.index._writer.frozen]
        return [base for base in segments.by_base if base not in (segments.active.base, self.busy, *flushing)]

    @property
    def busy(self) -> int | None:
        return None if self.sealed is None else self.sealed.base

    def roll(self) -> None:
        self.index.commit()
        self.committed()
        self.index.maintenance.roll()

    def seal(self, base: int) -> None:
        """Write a sealed segment beside the old one."""
        assert self.sealed is None
        self.sealed = seal(self.door, self.index.maintenance.seal_job(base))

    def adopt(self) -> None:
        assert self.sealed is not None
        sealed, self.sealed = self.sealed, None
        self.index.maintenance.adopt(sealed)

    def step(self, budget: int) -> bool:
        """One step of housekeeping; a segment to seal is sealed at once."""
        job, more = self.index.maintenance.step(budget, self.busy)
        if job is not None:
            self.sealed = seal(self.door, job)
            self.adopt()
        return more

    def keep_house(self, budget: int = 50) -> None:
        """Housekeeping until there is nothing to do."""
        self.settle()
        for _ in range(500):
            if self.flusher is not None:
                self.flusher.finish()
            before = _figures(self.index)
            if not self.step(budget) or (self.busy is not None and before == _figures(self.index)):
                return
        raise AssertionError("housekeeping does not come to an end")

    # Ends and beginnings

    def reopen(self, *, clean: bool = True, mark: bool = True, meanwhile: Callable[[], None] | None = None) -> None:
        """Close or crash, let something happen to the files, open again."""
        end = None
        if clean:
            self.settle()
            end = self.index.close()
            self.committed()
            self.index._segments.door.shut()
        else:
            abandon(self.index)
            self.staged, self.ending = [], set()
            for document in self.receiver.crash():
                self.asleep[document.id] = self.handed.pop(document.id)
        self.sealed = None
        self.open = False
        if meanwhile is not None:
            meanwhile()
        self.index = self._open(end if mark else None)
        self.open = True

    def cut_adoption(self) -> None:
        """A crash between the two renames of an adoption."""
        assert self.sealed is not None
        path = self.folder / names.segment("delay", self.sealed.base)
        self.reopen(clean=False, meanwhile=lambda: os.rename(path.with_name(path.name + ".tmp"), path))

    def caches(self) -> list[Path]:
        """Files that may be damaged or deleted at any time."""
        ends = (".index", ".run", ".dead", ".index.tmp")
        return sorted(p for p in self.folder.iterdir() if p.name.startswith("delay_") and p.name.endswith(ends))

    def damage_unread(self, path: Path, pick: int) -> bool:
        """Spoil a block of a mapped table that was not verified yet. False where there is none."""
        for part in self.index._segments.parts:
            table = getattr(part, "table", None)
            if table is None or table.path != path:
                continue
            unread = [i for i, done in enumerate(table._verified) if not done]
            if not unread:
                return False
            with path.open("r+b") as file:
                file.seek((1 + unread[pick % len(unread)]) * BLOCK)
                file.write(b"\xa5" * 64)
            return True
        return False

    # Everything at once

    def compare(self) -> None:
        """Figures that must hold after every step. Cheap."""
        self.committed()
        stats = self.index.stats()
        assert stats.sleep == len(self.asleep), (stats.sleep, len(self.asleep))
        assert stats.damaged == 0, self.index.damage
        first = min((s.due_ms for s in self.asleep.values()), default=None)
        following = self.index.next_due()
        assert stats.next_due_ms == following
        assert first is None or (following is not None and following <= first), (first, following)

    def compare_all(self, limit: int = 100) -> None:
        """Every message, by every way of asking."""
        self.compare()
        for id_ in (*self.asleep, *self.handed, *self.cancelled):
            self.state(id_)
        listed: list[StoredMessage] = []
        cursor = None
        while True:
            page, cursor = self.index.browse(limit=limit, cursor=cursor)
            listed += page
            if cursor is None:
                break
            assert len(page) == limit
        assert sorted(g.id for g in listed) == sorted(self.asleep)
        assert all(self.asleep[g.id].same(g) for g in listed)
        assert [(g.due_ms, g.seq) for g in listed] == sorted((g.due_ms, g.seq) for g in listed)
        repairing(self.index._segments, self._verify)  # `check` would report damaged blocks that were not read since
        problems = self.index.check()
        assert problems == [], problems

    def _verify(self) -> None:
        for part in self.index._segments.parts:
            if isinstance(part, TablePart):
                part.table.verify()

    def forecast(self, now_ms: int, bucket_ms: int, buckets: int) -> None:
        got = self.index.forecast(now_ms, bucket_ms=bucket_ms, buckets=buckets)
        counts = [0] * buckets
        overdue = beyond = 0
        for s in self.asleep.values():
            place = (s.due_ms - now_ms) // bucket_ms
            if place < 0:
                overdue += 1
            elif place >= buckets:
                beyond += 1
            else:
                counts[place] += 1
        assert (got.counts, got.overdue, got.beyond) == (counts, overdue, beyond)


def _figures(index: Index) -> tuple[object, ...]:
    counters = index.counters
    return index.stats(), counters.moved, counters.seals, counters.segments_dropped


def spoil(path: Path, how: str, at: int = 0) -> None:
    """Damage a file that is not open."""
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return
    if how == "flip" and data:
        data[at % len(data)] ^= 0x40
    elif how == "cut":
        del data[at % (len(data) + 1) :]
    elif how == "zero":
        data = bytearray(len(data))
    elif how == "garbage":
        data = bytearray(b"\x99" * (at % 9000))
    path.write_bytes(data)


def replace_by(path: Path, how: str, at: int = 0) -> None:
    """Damage a file that is mapped: the mapping keeps the old one."""
    copy = path.with_name(path.name + ".copy")
    copy.write_bytes(path.read_bytes())
    if how == "delete":
        copy.unlink()
        path.unlink()
    else:
        spoil(copy, how, at)
        os.rename(copy, path)
