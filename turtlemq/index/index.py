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

from turtlemq.errors import Conflict, InvalidId, TurtleError, UnknownMessage
from turtlemq.index import build, firing, repair
from turtlemq.index.browse import browse, forecast
from turtlemq.index.filters import Filters
from turtlemq.index.parts import Part
from turtlemq.index.segments import Segments
from turtlemq.index.validate import check_batch
from turtlemq.index.writer import Columns, CommitGroup, Writer
from turtlemq.model import (
    DUE_MS_MAX,
    I64,
    U64,
    Batch,
    Due,
    Forecast,
    Message,
    Progress,
    Receipt,
    Settings,
    State,
    Stats,
    StoredMessage,
)
from turtlemq.segment import format as f
from turtlemq.segment.ids import SERVER_ID_BYTES, hash_id, server_id_rows, server_ids, server_seq
from turtlemq.segment.table import Damaged

Held = Callable[[Sequence[bytes], U64], Iterable[int]]  # ids and their hashes in, indexes of those that are known out
P = ParamSpec("P")
R = TypeVar("R")


def repairing_method(method: Callable[Concatenate[Index, P], R]) -> Callable[Concatenate[Index, P], R]:
    """Methods that only read until they stage: on meeting a damaged table they have it built again and begin anew."""

    @wraps(method)
    def mended(self: Index, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return repair.repairing(self.segments, lambda: method(self, *args, **kwargs))

    return mended


class Index:
    """See the module. `shelf` knows what there is, `writer` appends to it."""

    def __init__(self, shelf: Segments, writer: Writer, settings: Settings) -> None:
        self.segments, self.writer, self.settings = shelf, writer, settings
        self.filters = Filters(shelf)
        self.durable = shelf.progress  # handed off and safe with the receiver: what may be dropped from here

    # Producing

    def append(self, batch: Batch, now_ms: int, *, sync: bool = True) -> Receipt:
        """Store a batch: all of it or none of it. Durable when this returns, unless `sync` is given up."""
        receipt = self.stage(batch, now_ms)
        self.writer.commit(sync)
        return receipt

    @repairing_method
    def stage(self, batch: Batch, now_ms: int, held: Held | None = None) -> Receipt:
        """The part of `append` before the commit: check everything, find duplicates, encode. `held` tells which ids are known
        elsewhere."""
        count = len(batch.bodies)
        if count >= f.FEW and isinstance(batch.due_ms, list):
            batch = replace(batch, due_ms=_column(batch.due_ms))
        check_batch(batch)
        seq = self.writer.next_seq(now_ms)
        if batch.ids is None:
            given: Any = server_id_rows(seq, count) if count >= f.FEW else server_ids(seq, count)
            self._stage(batch, given if count >= f.FEW else [id_.encode() for id_ in given], None, seq)
            return Receipt(given, [True] * count)
        self.filters.tend(self.writer.flusher)
        new = self._all_new(batch.ids, held)
        if new is not None:
            self._note(self._stage(batch, *new, seq), new[0])
            return Receipt(cast("list[str]", list(batch.ids)), [True] * count)
        raw, hashes, fresh = self._dedup(batch.ids, seq, held)
        for i, id_ in zip(fresh, server_ids(seq, len(fresh)), strict=True):
            if not hashes[i]:
                raw[i] = id_.encode()
        if fresh:
            self._note(self._stage(batch, raw, hashes, seq, fresh), [raw[i] for i in fresh if hashes[i]])
        stored = set(fresh)
        self.segments.counters.duplicates += count - len(fresh)
        return Receipt([r.decode() for r in raw], [i in stored for i in range(count)])

    def _note(self, group: CommitGroup, own: list[bytes]) -> None:
        """Own ids are taken from when they are staged."""
        group.ids.append(own)
        self.writer.staged_ids.update(own)

    def _all_new(self, given: Sequence[str | None], elsewhere: Held | None) -> tuple[list[bytes], U64] | None:
        """The usual case, without a loop: every id is given, looks like no server's and is new. Ids and hashes, else None."""
        try:
            raw = list(map(str.encode, cast("Sequence[str]", given)))
        except TypeError:  # some are to be given
            return None
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, raw), np.uint64, len(raw))
        if SERVER_ID_BYTES in set(map(len, raw)) or not hashes.all() or _twins(raw, hashes):
            return None
        staged = self.writer.staged_ids
        if (staged and not staged.isdisjoint(raw)) or self.segments.find_many(raw, hashes):
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
            if r in self.writer.staged_ids or first.setdefault(r, i) != i:
                held.add(i)
            elif len(r) == SERVER_ID_BYTES and (seq := server_seq(r.decode())) is not None:
                if seq >= next_seq:
                    raise InvalidId(f"{given[i]!r} is an id that the server is going to give; choose another.", index=i)
                hashes[i] = hash_id(r.decode())
                if self.segments.find(r.decode()) is not None:
                    held.add(i)
        asked = [i for i in first.values() if i not in held]
        texts, numbers = [raw[i] for i in asked], np.array([hashes[i] for i in asked], np.uint64)
        held.update(asked[k] for k in self.segments.find_many(texts, numbers))  # also one whose end is under way: it may fail
        if elsewhere is not None:
            held.update(asked[k] for k in elsewhere(texts, numbers))
        fresh = [i for i in range(len(raw)) if i not in held]
        return raw, hashes, fresh

    def _stage(
        self, batch: Batch, ids: Any, hashes: list[int] | U64 | None, seq: int, fresh: Sequence[int] | None = None
    ) -> CommitGroup:
        """Stage the messages at `fresh`, or all. Many travel as arrays, a few as lists."""
        fresh = range(len(batch.bodies)) if fresh is None else fresh
        count = len(fresh)
        columns: list[Any] = [ids, batch.bodies, batch.due_ms, batch.ttr_ms, hashes]
        if count < len(batch.bodies):
            columns = [None if column is None else [column[i] for i in fresh] for column in columns]
        every, given = f.CONTINUES | (f.SERVER_ID if hashes is None else 0), batch.flags
        if isinstance(given, int):
            every, given = every | given, None
        elif given is not None and count < len(batch.bodies):
            given = [given[i] for i in fresh]
        if count < f.FEW:
            flags: Any = [every] * count if given is None else [flag | every for flag in given]
        else:
            flags = np.full(count, every, np.uint32) if given is None else np.array(given, np.uint32) | np.uint32(every)
        if isinstance(hashes, list) and 0 in hashes:
            flags = [flag if hashes[i] else flag | f.SERVER_ID for flag, i in zip(flags, fresh, strict=True)]
        extras = None
        if _has(batch.expires_ms) or _has(batch.headers):
            flags = [flag | _extra_flags(batch, i) for flag, i in zip(flags, fresh, strict=True)]
            extras = [_extras(batch, i) for i in fresh]
        if count >= f.FEW:
            flags = np.asarray(flags, np.uint32)
        flags[-1] ^= f.CONTINUES
        ids, bodies, due_ms, ttr_ms, hashes = columns
        return self.writer.stage(Columns(ids, bodies, due_ms, 0 if ttr_ms is None else ttr_ms, flags, extras, hashes), seq)

    # Firing

    @repairing_method
    def due(self, now_ms: int, *, count_max: int = 10_000, bytes_max: int = 16 << 20) -> Due | None:
        """What is due and not handed off yet, in order of (due, arrival), or None. It may be empty where all were cancelled.

        Nothing changes before `advance`; until then messages may be appended, but none may be cancelled or changed."""
        return firing.due(self.segments, self.writer.staged_ends, now_ms, count_max, bytes_max)

    def advance(self, due: Due) -> None:
        """`due` is stored elsewhere: it is handed off from now on."""
        firing.advance(self.segments, due)

    def release(self, progress: Progress) -> None:
        """Everything up to `progress` is durable with the receiver, so its documents may go from here."""
        self.durable = progress

    def next_due(self) -> int | None:
        """When `due` may have something again. O(1)."""
        return self.segments.next_due_ms()

    # One message

    @repairing_method
    def find(self, id_: str) -> f.Document | None:
        """The newest document of an id that was not cancelled or replaced, as it is stored."""
        hit = self.segments.find(id_)
        return None if hit is None else hit[2]

    @repairing_method
    def get(self, id_: str) -> StoredMessage | None:
        """A message that sleeps, or that was handed off and is still in a file here."""
        hit = self.segments.find(id_)
        return None if hit is None or hit[2].flags & f.META else stored_message(hit[2], self._state(hit[2]))

    def _state(self, document: f.Document) -> State:
        return State.READY if self.segments.progress.covers_one(document.due_ms, document.seq) else State.SLEEP

    def cancel(self, ids: Sequence[str]) -> dict[str, State]:
        """End sleepers, durably. For each id: CANCELLED, READY if it was handed off before, or UNKNOWN."""
        outcome = self.stage_cancel(ids)
        self.writer.commit()
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
            self.writer.stage(columns, self.writer.next_seq(0))
        return outcome

    def _find_committed(self, id_: str) -> tuple[Part, int, f.Document] | None:
        """The newest version of an id; where one that ends it is under way, that is waited for first."""
        hit = self.segments.find(id_)
        if hit is not None and hit[2].seq in self.writer.staged_ends:
            self.writer.commit()
            hit = self.segments.find(id_)
        return hit

    def reschedule(self, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` (`json` or bytes) or `headers`, durably."""
        found = self.stage_reschedule(id_, now_ms, **changes)
        self.writer.commit()
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
        if self._state(old) is State.READY:
            raise Conflict(f"{id_!r} has come due already; it can no longer be changed.", state=State.READY.value)
        kind = old.flags & f.JSON if json is None else f.JSON * json
        message = Message(
            body=old.body if body is None else body,
            due_ms=old.due_ms if due_ms is None else due_ms,
            id=id_,
            headers=old.headers if headers is None else headers,
        )
        check_batch(as_batch([message]))
        seq = self.writer.next_seq(now_ms)
        columns = Columns([id_.encode()], [message.body], [message.due_ms], old.ttr_ms, [0], None, [hash_id(id_)])
        kept = old.flags & (f.PRIORITY | f.META)
        columns.flags[0] = kept | kind | f.REPLACES | _optional(old.expires_ms, message.headers)
        columns.extras = [
            f.extra_elements((old.seq, old.due_ms), old.arrived, None, old.expires_ms, message.headers, old.meta),
        ]
        columns.purpose = "rescheduled"
        columns.ends, columns.seen = [(old.seq, old.due_ms)], [hit[:2]]  # no read is left that could fail once it is durable
        self._note(self.writer.stage(columns, seq), [id_.encode()])  # or a put of the same id would take it for ended
        headers = message.headers or {}
        return stored_message(
            replace(old, seq=seq, due_ms=message.due_ms, flags=columns.flags[0], body=message.body, headers=headers), State.SLEEP
        )

    # Looking

    @repairing_method
    def browse(
        self, from_ms: int = 0, to_ms: int = DUE_MS_MAX, *, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[StoredMessage], str | None]:
        """Sleepers in order of due time, a page at a time."""
        documents, following = browse(self.segments, from_ms, to_ms, limit, cursor)
        return [stored_message(document, State.SLEEP) for document in documents], following

    @repairing_method
    def forecast(self, now_ms: int, *, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """How many come due when, from the index alone: no document is read. O(buckets × segments)."""
        return forecast(self.segments, now_ms, bucket_ms, buckets)

    def stats(self) -> Stats:
        """Figures. O(segments)."""
        shelf, counters = self.segments, self.segments.counters
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

    def close(self) -> int:
        """Commit what is staged and keep the dead bits. Returns where the active segment ends, for the clean-shutdown mark."""
        try:
            if self.writer.stopped is None:
                self.writer.commit()
                self.writer.sync()
            try:
                self.writer.finish_flush(wait=True)  # also of one that is stopped: nothing may be written here later
            except (TurtleError, OSError, Damaged):
                pass  # opening makes that table
            if self.writer.stopped is None:
                build.write_ended_bits(self.segments, self.segments.parts, all_of_them=True)
        finally:
            self.filters.close()
            self.writer.shut()
        return self.segments.active.size


def _column(values: list[int]) -> list[int] | I64:
    """Numbers as an array, converted once; what cannot be one stays as it is, for `check_batch` to say what is wrong."""
    if set(map(type, values)) != {int}:
        return values
    try:
        column = np.array(values)
    except OverflowError:
        return values
    return column if column.dtype == np.int64 else values


def stored_message(document: f.Document, state: State) -> StoredMessage:
    """A document as callers see it. A retry sleeps for one group under an id of its own."""
    group, _, id_ = document.id.rpartition("/") if document.flags & f.META else ("", "", document.id)
    return StoredMessage(
        id=id_,
        state=state,
        due_ms=document.due_ms,
        created_ms=document.created_ms,
        seq=document.seq,
        ttr_ms=document.ttr_ms,
        flags=document.flags & f.USER_FLAGS,
        body=document.body,
        expires_ms=document.expires_ms,
        headers=document.headers,
        group=group,
    )


def tombstones(ended: Sequence[f.Document]) -> Columns:
    """Documents that end others."""
    flags = [f.TOMBSTONE | f.CONTINUES] * len(ended)
    flags[-1] &= ~f.CONTINUES
    return Columns(
        ids=[document.id.encode() for document in ended],
        bodies=[b""] * len(ended),
        due_ms=[document.due_ms for document in ended],
        ttr_ms=[0] * len(ended),
        flags=flags,
        extras=[f.extra_elements((document.seq, document.due_ms)) for document in ended],
        hashes=None,
        purpose="cancelled",
        ends=[(document.seq, document.due_ms) for document in ended],
    )


def as_batch(messages: Sequence[Message]) -> Batch:
    """Messages as columns."""
    return Batch(
        bodies=[m.body for m in messages],
        due_ms=[m.due_ms for m in messages],
        ids=[m.id for m in messages],
        ttr_ms=[m.ttr_ms for m in messages],
        flags=[m.priority | f.JSON * m.json for m in messages],
        expires_ms=[m.expires_ms for m in messages],
        headers=[m.headers for m in messages],
    )


def _twins(raw: list[bytes], hashes: U64) -> bool:
    """May two of these be the same? Sorting many hashes costs a fifth of a set of their texts."""
    if len(raw) < f.FEW:
        return len(set(raw)) < len(raw)
    ordered = np.sort(hashes)
    return bool((ordered[1:] == ordered[:-1]).any())


def _has(column: Sequence[object] | None) -> bool:
    return column is not None and any(item is not None for item in column)


def _optional(expires_ms: int | None, headers: dict[str, str] | None) -> int:
    return (f.EXPIRES if expires_ms is not None else 0) | (f.HEADERS if headers else 0)


def _extras(batch: Batch, i: int) -> bytes:
    expires = batch.expires_ms[i] if batch.expires_ms is not None else None
    headers = batch.headers[i] if batch.headers is not None else None
    return f.extra_elements(None, None, None, expires, headers)


def _extra_flags(batch: Batch, i: int) -> int:
    return _optional(
        batch.expires_ms[i] if batch.expires_ms is not None else None, batch.headers[i] if batch.headers is not None else None
    )
