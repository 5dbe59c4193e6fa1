"""The Index of one topic: sleeping messages are appended, found when they come due, cancelled, rescheduled, looked at.

No clock, no threads: time is an argument, and whatever changes something returns when it is durable. `due` hands out what is
due as raw documents; the caller stores them and calls `advance`. Made by `recover.open_index`; housekeeping is `care`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import xxhash

from turtlemq import lifecycle, small_batches
from turtlemq.errors import Conflict, InvalidId, TurtleError, UnknownMessage
from turtlemq.index import build, check, firing, repair
from turtlemq.index.browse import browse, forecast
from turtlemq.index.columns import (
    Columns,
    as_batch,
    batch_columns,
    may_repeat,
    number_column,
    stored_message,
    tombstones,
)
from turtlemq.index.filters import Filters
from turtlemq.index.maintenance import Maintenance
from turtlemq.index.parts import Part
from turtlemq.index.segments import Segments
from turtlemq.index.validate import check_batch
from turtlemq.index.writer import CommitGroup, Writer
from turtlemq.message_fields import flags_of, optional_of
from turtlemq.model import (
    DUE_MS_MAX,
    U64,
    Batch,
    Counters,
    Damage,
    Due,
    Forecast,
    Message,
    Progress,
    Receipt,
    State,
    Stats,
    StoredMessage,
)
from turtlemq.segment import format as f
from turtlemq.segment.ids import SERVER_ID_BYTES, hash_id, hash_texts, server_id_rows, server_ids, server_seq
from turtlemq.segment.table import Damaged
from turtlemq.settings import Settings
from turtlemq.storage.workers import Worker

Held = Callable[[Sequence[bytes], U64], Iterable[int]]  # ids and their hashes in, indexes of those that are known out
P = ParamSpec("P")
R = TypeVar("R")


def repairing_method(method: Callable[Concatenate[Index, P], R]) -> Callable[Concatenate[Index, P], R]:
    """Methods that only read until they stage: on meeting a damaged table they have it built again and begin anew."""

    @wraps(method)
    def mended(self: Index, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return repair.repairing(self._segments, lambda: method(self, *args, **kwargs))

    return mended


class Index:
    """The sleeping messages of one topic. One thread; see the module.

    Private to this package: `_segments` (which documents there are) and `_writer` (appends to them). Tests may look at both."""

    def __init__(self, segments: Segments, writer: Writer) -> None:
        self._segments, self._writer = segments, writer
        self._filters = Filters(segments)
        self.maintenance = Maintenance(segments, writer)

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._writer.settings

    def configure(self, settings: Settings) -> None:
        """Settings for what comes from now on."""
        self._writer.settings = settings

    def use_flusher(self, flusher: Worker) -> None:
        """Let this worker write the tables of full memtables."""
        self._writer.flusher = flusher

    # Writing: what is staged becomes durable and visible with the next commit

    @property
    def pending(self) -> CommitGroup | None:
        """The last group that is not durable yet: when it has landed, so has everything staged up to now."""
        return self._writer.pending

    def take(self) -> CommitGroup | None:
        """The staged group, to be run by a committer and then landed; None while another one is under way."""
        return self._writer.take()

    def land(self, group: CommitGroup) -> None:
        """Publish a group that was taken and has run, or drop it and raise the cause."""
        self._writer.land(group)

    def commit(self, sync: bool = True) -> None:
        """Make everything staged durable and visible: one write, one fdatasync. Raises if that failed."""
        self._writer.commit(sync)

    def store(self, columns: Columns, first_seq: int | None = None) -> None:
        """Append documents as they are, durably. `first_seq` is one that `next_seq` returned, if not the next."""
        self._writer.stage(columns, self._writer.next_seq(0) if first_seq is None else first_seq)
        self._writer.commit()

    def next_seq(self, now_ms: int = 0) -> int:
        """The seq of the next document if it is staged now."""
        return self._writer.next_seq(now_ms)

    @property
    def last_seq(self) -> int:
        """The seq of the last document that was staged."""
        return self._writer.last_seq

    @property
    def stopped(self) -> BaseException | None:
        """Why nothing more is written until the topic is opened again; None: writes are accepted."""
        return self._writer.stopped

    def refuse_if_stopped(self) -> None:
        """Raise `Stopped` after a failed write with unknown result."""
        self._writer.refuse_if_stopped()

    @property
    def active_base(self) -> int:
        """The base of the segment that is being written."""
        return self._segments.active.base

    def sync(self) -> None:
        """Make durable what was committed with `sync=False`."""
        self._writer.sync()

    def rest(self) -> None:
        """Hold no file open while there is nothing to write."""
        self._writer.rest()

    # Producing

    def append(self, batch: Batch, now_ms: int, *, sync: bool = True) -> Receipt:
        """Store a batch: all of it or none of it. Durable when this returns, unless `sync` is given up."""
        receipt = self.stage(batch, now_ms)
        self._writer.commit(sync)
        return receipt

    @repairing_method
    def stage(self, batch: Batch, now_ms: int, held: Held | None = None) -> Receipt:
        """The part of `append` before the commit: check everything, find duplicates, encode. `held` tells which ids are known
        elsewhere."""
        count = len(batch.bodies)
        if count >= small_batches.DOCUMENTS and isinstance(batch.due_ms, list):
            batch = replace(batch, due_ms=number_column(batch.due_ms))
        check_batch(batch)
        seq = self._writer.next_seq(now_ms)
        if batch.ids is None:
            given: Any = server_id_rows(seq, count) if count >= small_batches.DOCUMENTS else server_ids(seq, count)
            raw_ids: Any = given if count >= small_batches.DOCUMENTS else [id_.encode() for id_ in given]
            self._writer.stage(batch_columns(batch, raw_ids, None), seq)
            return Receipt(given, [True] * count)
        self._filters.tend(self._writer.flusher)
        new = self._all_new(batch.ids, held)
        if new is not None:
            self._note(self._writer.stage(batch_columns(batch, *new), seq), new[0])
            return Receipt(cast("list[str]", list(batch.ids)), [True] * count)
        raw, hashes, fresh = self._dedup(batch.ids, seq, held)
        for i, id_ in zip(fresh, server_ids(seq, len(fresh)), strict=True):
            if not hashes[i]:
                raw[i] = id_.encode()
        if fresh:
            group = self._writer.stage(batch_columns(batch, raw, hashes, fresh), seq)
            self._note(group, [raw[i] for i in fresh if hashes[i]])
        stored = set(fresh)
        self._segments.counters.duplicates += count - len(fresh)
        return Receipt([r.decode() for r in raw], [i in stored for i in range(count)])

    def _note(self, group: CommitGroup, own: list[bytes]) -> None:
        """Own ids are taken from when they are staged."""
        group.ids.append(own)
        self._writer.staged_ids.update(own)

    def _all_new(self, given: Sequence[str | None], elsewhere: Held | None) -> tuple[list[bytes], U64] | None:
        """The usual case, without a loop: every id is given, looks like no server's and is new. Ids and hashes, else None."""
        try:
            raw = list(map(str.encode, cast("Sequence[str]", given)))
        except TypeError:  # some are to be given
            return None
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, raw), np.uint64, len(raw))
        if SERVER_ID_BYTES in set(map(len, raw)) or not hashes.all() or may_repeat(raw, hashes):
            return None
        staged = self._writer.staged_ids
        if (staged and not staged.isdisjoint(raw)) or self._segments.find_many(raw, hashes):
            return None
        if elsewhere is not None and len(list(elsewhere(raw, hashes))):
            return None
        return raw, hashes

    def _dedup(
        self, given: Sequence[str | None], next_seq: int, elsewhere: Held | None
    ) -> tuple[list[bytes], list[int], list[int]]:
        """Ids as bytes, their hashes (0 for ids still to be given), and the indexes of messages that are not there yet."""
        raw = [b"" if id_ is None else id_.encode() for id_ in given]
        hashes = [xxhash.xxh3_64_intdigest(r) or 1 if r else 0 for r in raw]
        first: dict[bytes, int] = {}
        held: set[int] = set()
        for i, r in enumerate(raw):
            if not r:
                continue
            if r in self._writer.staged_ids or first.setdefault(r, i) != i:
                held.add(i)
            elif len(r) == SERVER_ID_BYTES and (seq := server_seq(r.decode())) is not None:
                if seq >= next_seq:
                    raise InvalidId(f"{given[i]!r} is an id that the server is going to give; choose another.", index=i)
                hashes[i] = hash_id(r.decode())
                if self._segments.find(r.decode()) is not None:
                    held.add(i)
        asked = [i for i in first.values() if i not in held]
        texts, numbers = [raw[i] for i in asked], np.array([hashes[i] for i in asked], np.uint64)
        held.update(asked[k] for k in self._segments.find_many(texts, numbers))  # also one whose end is under way: it may fail
        if elsewhere is not None:
            held.update(asked[k] for k in elsewhere(texts, numbers))
        fresh = [i for i in range(len(raw)) if i not in held]
        return raw, hashes, fresh

    # Firing

    @repairing_method
    def due(self, now_ms: int, *, count_max: int = 10_000, bytes_max: int = 16 << 20) -> Due | None:
        """What is due and not handed off yet, in order of (due, arrival), or None. It may be empty where all were cancelled.

        Nothing changes before `advance`; until then messages may be appended, but none may be cancelled or changed."""
        return firing.due(self._segments, self._writer.staged_ends, now_ms, count_max, bytes_max)

    def advance(self, due: Due) -> None:
        """`due` is stored elsewhere: it is handed off from now on."""
        firing.advance(self._segments, due)

    @property
    def progress(self) -> Progress:
        """The marks up to which messages were handed off."""
        return self._segments.progress

    def is_handed_off(self, document: f.Document) -> bool:
        """Was this document handed off? False: it sleeps, unless it was ended."""
        return self._segments.progress.covers_one(document.due_ms, document.seq)

    def release(self, progress: Progress) -> None:
        """Everything up to `progress` is durable with the receiver, so its documents may go from here."""
        self._segments.durable = progress

    def next_due(self) -> int | None:
        """When `due` may have something again. O(1)."""
        return self._segments.next_due_ms()

    # One message

    @repairing_method
    def find(self, id_: str) -> f.Document | None:
        """The newest document of an id that was not cancelled or replaced, as it is stored."""
        hit = self._segments.find(id_)
        return None if hit is None else hit[2]

    def find_many(self, ids: Sequence[str], after_seq: int = -1) -> dict[int, f.Document]:
        """The newest documents of many ids, by index in `ids`; ids that are not held are left out. 0.2 µs for each of them.

        `after_seq`: parts without a newer document are skipped, so older documents may be missing from the answer."""
        raw = [id_.encode() for id_ in ids]
        hashes = hash_texts(raw)
        held = repair.repairing(self._segments, lambda: self._segments.find_many(raw, hashes, after_seq))
        documents = {i: self.find(ids[i]) for i in held}
        return {i: document for i, document in documents.items() if document is not None}

    @repairing_method
    def get(self, id_: str) -> StoredMessage | None:
        """A message that sleeps, or that was handed off and is still in a file here."""
        hit = self._segments.find(id_)
        return None if hit is None or hit[2].flags & f.META else stored_message(hit[2], self._state(hit[2]))

    def _state(self, document: f.Document) -> State:
        return State.READY if self.is_handed_off(document) else State.SLEEP

    def cancel(self, ids: Sequence[str]) -> dict[str, State]:
        """End sleepers, durably. For each id: CANCELLED, READY if it was handed off before, or UNKNOWN."""
        outcome = self.stage_cancel(ids)
        self._writer.commit()
        return outcome

    @repairing_method
    def stage_cancel(self, ids: Sequence[str]) -> dict[str, State]:
        """The part of `cancel` before the commit."""
        outcome: dict[str, State] = {}
        ended: list[f.Document] = []
        seen: list[tuple[Part, int]] = []
        for id_ in ids:
            if id_ in outcome:
                continue
            hit = self._find_committed(id_)
            if hit is None or hit[2].flags & f.META:  # a retry is the broker's own
                outcome[id_] = State.UNKNOWN
            elif self._state(hit[2]) is State.READY:
                outcome[id_] = State.READY
            else:
                outcome[id_] = State.CANCELLED
                ended.append(hit[2])
                seen.append(hit[:2])
        if ended:
            columns = tombstones(ended)
            columns.seen = seen
            self._writer.stage(columns, self._writer.next_seq(0))
        return outcome

    def _find_committed(self, id_: str) -> tuple[Part, int, f.Document] | None:
        """The newest version of an id; where one that ends it is under way, that is waited for first."""
        hit = self._segments.find(id_)
        if hit is not None and hit[2].seq in self._writer.staged_ends:
            self._writer.commit()
            hit = self._segments.find(id_)
        return hit

    def reschedule(self, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` (`json` or bytes) or `headers`, durably."""
        found = self.stage_reschedule(id_, now_ms, **changes)
        self._writer.commit()
        return found

    @repairing_method
    def stage_reschedule(
        self,
        id_: str,
        now_ms: int,
        *,
        due_ms: int | None = None,
        body: bytes | None = None,
        json: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> StoredMessage:
        """The part of `reschedule` before the commit: a new version that ends the old one in the same write."""
        hit = self._find_committed(id_)
        if hit is None or hit[2].flags & f.META:
            raise UnknownMessage(f"{id_!r}: {UnknownMessage.__doc__}")
        old = hit[2]
        if lifecycle.target(self._state(old), "reschedule") is None:
            raise Conflict(f"{id_!r} has come due already; it can no longer be changed.", state=State.READY.value)
        kind = old.flags & f.JSON if json is None else f.JSON * json
        message = Message(
            body=old.body if body is None else body,
            due_ms=old.due_ms if due_ms is None else due_ms,
            id=id_,
            **optional_of(old) | ({} if headers is None else {"headers": headers}),
        )
        check_batch(as_batch([message]))
        seq = self._writer.next_seq(now_ms)
        columns = Columns([id_.encode()], [message.body], [message.due_ms], old.ttr_ms, [0], None, [hash_id(id_)])
        kept, optional = old.flags & (f.PRIORITY | f.META), optional_of(message)
        columns.flags[0] = kept | kind | f.REPLACES | flags_of(optional)
        columns.extras = [f.extra_elements((old.seq, old.due_ms), old.arrived, meta=old.meta, **optional)]
        columns.purpose = "rescheduled"
        columns.ends, columns.seen = [(old.seq, old.due_ms)], [hit[:2]]  # no read is left that could fail once it is durable
        self._note(self._writer.stage(columns, seq), [id_.encode()])  # or a put of the same id would take it for ended
        headers = message.headers or {}
        return stored_message(
            replace(old, seq=seq, due_ms=message.due_ms, flags=columns.flags[0], body=message.body, headers=headers), State.SLEEP
        )

    # Looking

    def browse(
        self, from_ms: int = 0, to_ms: int = DUE_MS_MAX, *, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[StoredMessage], str | None]:
        """Sleepers in order of due time, a page at a time."""
        documents, following = self.browse_documents(from_ms, to_ms, limit, cursor)
        return [stored_message(document, State.SLEEP) for document in documents], following

    @repairing_method
    def browse_documents(
        self, from_ms: int, to_ms: int, limit: int, cursor: str | None = None
    ) -> tuple[list[f.Document], str | None]:
        """Sleepers in order of due time as stored documents, and the cursor of the next page (None: this is the last)."""
        return browse(self._segments, from_ms, to_ms, limit, cursor)

    @repairing_method
    def forecast(self, now_ms: int, *, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """How many come due when, from the index alone: no document is read. O(buckets × segments)."""
        return forecast(self._segments, now_ms, bucket_ms, buckets)

    @property
    def counters(self) -> Counters:
        """Counts of events since the topic was opened."""
        return self._segments.counters

    @property
    def damage(self) -> list[Damage]:
        """Damaged places found so far."""
        return self._segments.counters.damage

    def stats(self) -> Stats:
        """Figures. O(segments)."""
        shelf, counters = self._segments, self._segments.counters
        segments = shelf.by_base.values()
        documents, live = sum(s.documents for s in segments), sum(s.live for s in segments)
        return Stats(
            sleep=live,
            handed_off=counters.handed_off,
            cancelled=counters.cancelled,
            bytes=sum(segment.size for segment in segments),
            segments=len(segments),
            live_ratio=live / documents if documents else 1.0,
            next_due_ms=shelf.next_due_ms(),
            damaged=len(counters.damage),
        )

    def check(self) -> list[str]:
        """Read everything again and return every broken invariant, a line each; empty: all is well. 0.5 µs a document."""
        return check.check(self._segments)

    def close(self) -> int:
        """Commit what is staged and keep the dead bits. Returns where the active segment ends, for the clean-shutdown mark."""
        try:
            if self._writer.stopped is None:
                self._writer.commit()
                self._writer.sync()
            try:
                self._writer.finish_flush(wait=True)  # also of one that is stopped: nothing may be written here later
            except (TurtleError, OSError, Damaged):
                pass  # opening makes that table
            if self._writer.stopped is None:
                build.write_ended_bits(self._segments, self._segments.parts, all_of_them=True)
        finally:
            self._filters.close()
            self._writer.shut()
        return self._segments.active.size
