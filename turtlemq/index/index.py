"""The Index of one topic: append sleeping messages, find due ones, cancel, reschedule, list and count them.

No clock and no threads. A change is durable when its call returns; `stage…` calls are durable after the next commit. `due`
returns due messages as raw documents; the caller stores them and calls `advance`. Opened by `recover.open_index`. Not here:
encoding and commit (`writer`), lookup (`segments`), firing (`firing`), seal and compaction (`maintenance`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from turtlemq import lifecycle, small_batches
from turtlemq.errors import Conflict, TurtleError, UnknownMessage
from turtlemq.index import build, check, duplicates, firing, lookup, repair
from turtlemq.index.arrivals import Arrivals
from turtlemq.index.browse import browse, forecast
from turtlemq.index.columns import CancelledSleeper, Columns, Ended, as_batch, batch_columns, stored_message, tombstones
from turtlemq.index.duplicates import KnownIds, NewIds
from turtlemq.index.filters import Filters
from turtlemq.index.group_lookup import GroupDocument, find_of_groups
from turtlemq.index.maintenance import Maintenance
from turtlemq.index.segments import Segments
from turtlemq.index.staged_ids import StagedIds
from turtlemq.index.validate import check_batch, check_expiry, check_new_due, with_due_column
from turtlemq.index.versions import Beside, Version, cancelled_sleepers, read_kept, rescheduled, superseding_seqs, version_columns
from turtlemq.index.writer import CommitGroup, Writer
from turtlemq.message_fields import optional_of
from turtlemq.model import (
    DUE_MS_MAX,
    Batch,
    CheckedBatch,
    Counters,
    Damage,
    Due,
    Forecast,
    IndexStats,
    Message,
    Progress,
    Receipt,
    State,
    StoredMessage,
)
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_any, server_id_rows, server_ids
from turtlemq.segment.table import Damaged
from turtlemq.settings import Settings
from turtlemq.storage.workers import Worker

P = ParamSpec("P")
R = TypeVar("R")


def repairing_method(method: Callable[Concatenate[Index, P], R]) -> Callable[Concatenate[Index, P], R]:
    """A method that only reads until it stages. If it meets a damaged table, the table is rebuilt and the method runs again."""

    @wraps(method)
    def repaired(self: Index, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return repair.repairing(self._segments, lambda: method(self, *args, **kwargs))

    return repaired


class Index:
    """The sleeping messages of one topic. For one thread. `_segments` and `_writer` are private to the package."""

    def __init__(self, segments: Segments, writer: Writer) -> None:
        self._segments, self._writer = segments, writer
        self._filters, self.arrivals = Filters(segments), Arrivals(segments)
        self.maintenance = Maintenance(segments, writer)

    @property
    def settings(self) -> Settings:
        return self._writer.settings

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._writer.settings = settings

    def use_flusher(self, flusher: Worker) -> None:
        """Let this worker write the tables of full memtables."""
        self._writer.flusher = flusher

    # Writing: staged documents become durable and visible with the next commit

    @property
    def pending(self) -> CommitGroup | None:
        """The newest commit group that has not landed. When it lands, everything staged up to now is durable."""
        return self._writer.pending

    def take(self) -> CommitGroup | None:
        """The staged commit group, to be run and then landed. None while another one is under way, or if nothing is staged."""
        return self._writer.take()

    def land(self, group: CommitGroup) -> None:
        """Publish a group from `take` after its run; after a failed run, drop it and raise the cause."""
        self._writer.land(group)

    def commit(self, sync: bool = True) -> None:
        """Make everything staged durable and visible: one write, one fdatasync. Raises if that failed."""
        self._writer.commit(sync)

    def store(self, columns: Columns, first_seq: int | None = None, *, commit: bool = True) -> None:
        """Append documents without checks, durably if `commit`. `first_seq`: a number from `next_seq`; None: the next one."""
        self._writer.stage(columns, self._writer.next_seq(0) if first_seq is None else first_seq)
        if commit:
            self._writer.commit()

    def next_seq(self, now_ms: int = 0) -> int:
        """The seq that a document staged now would get."""
        return self._writer.next_seq(now_ms)

    @property
    def last_seq(self) -> int:
        """The seq of the last document that was staged."""
        return self._writer.last_seq

    @property
    def stopped(self) -> BaseException | None:
        """The error that ended all writing until the topic is opened again. None: writes are accepted."""
        return self._writer.stopped

    def refuse_if_stopped(self) -> None:
        """Raise `Stopped` if a write has failed with an unknown result."""
        self._writer.refuse_if_stopped()

    @property
    def active_base(self) -> int:
        """The base of the segment that is being written."""
        return self._segments.active.base

    def sync(self) -> None:
        """Make commits with `sync=False` durable."""
        self._writer.sync()

    def rest(self) -> None:
        """Close the segment file if nothing is staged. The next write opens it again."""
        self._writer.rest()

    # Producing

    def append(self, batch: Batch, now_ms: int, *, sync: bool = True) -> Receipt:
        """Store all messages of a batch, or none. Durable when this returns if `sync`."""
        receipt = self.stage(batch, now_ms)
        self._writer.commit(sync)
        return receipt

    @repairing_method
    def stage(self, batch: Batch, now_ms: int, known_elsewhere: KnownIds | None = None) -> Receipt:
        """Check a batch, leave out duplicates, and stage the rest for the next commit. `known_elsewhere`: ids that count as
        duplicates although the Index does not hold them."""
        count = len(batch.bodies)
        if not isinstance(batch, CheckedBatch):
            check_batch(batch := with_due_column(batch))
        check_expiry(batch, now_ms)
        seq = self._writer.next_seq(now_ms)
        if batch.ids is None:
            given: Any = server_id_rows(seq, count) if count >= small_batches.DOCUMENTS else server_ids(seq, count)
            raw_ids: Any = given if count >= small_batches.DOCUMENTS else [id_.encode() for id_ in given]
            self._writer.stage(batch_columns(batch, raw_ids, None), seq)
            return Receipt(given, [True] * count)
        self._filters.step(self._writer.flusher)
        staged = self._writer.staged_ids
        if isinstance(batch, CheckedBatch) and batch.are_new:
            return self._stage_new(batch, seq)
        new = duplicates.all_new(self._segments, staged, batch.ids, known_elsewhere)
        if new is not None:
            self._writer.reserve_ids(self._writer.stage(batch_columns(batch, *new), seq), new[0])
            return Receipt(cast("list[str]", list(batch.ids)), [True] * count)
        raw, hashes, new_indexes = duplicates.leave_out(self._segments, staged, batch.ids, seq, known_elsewhere)
        for i, id_ in zip(new_indexes, server_ids(seq, len(new_indexes)), strict=True):
            if not hashes[i]:
                raw[i] = id_.encode()
        if new_indexes:
            group = self._writer.stage(batch_columns(batch, raw, hashes, new_indexes), seq)
            self._writer.reserve_ids(group, [raw[i] for i in new_indexes if hashes[i]])
        stored = set(new_indexes)
        self._segments.counters.duplicates += count - len(new_indexes)
        return Receipt([r.decode() for r in raw], [i in stored for i in range(count)])

    def _stage_new(self, batch: CheckedBatch, seq: int) -> Receipt:
        """Stage a batch whose ids are new. Messages without an id get one."""
        given, raw, hashes = cast("list[str]", list(batch.ids or ())), batch.raw_ids, batch.hashes
        if batch.lacks_ids:
            given = [id_ or new for id_, new in zip(given, server_ids(seq, len(given)), strict=True)]
            raw = [r or id_.encode() for r, id_ in zip(raw, given, strict=True)]
            hashes = batch.hashes.tolist()
        self._writer.reserve_ids(self._writer.stage(batch_columns(batch, raw, hashes), seq), batch.own_ids)
        return Receipt(given, [True] * len(raw))

    @repairing_method
    def held(self, ids: Sequence[str | None], now_ms: int, known_elsewhere: KnownIds | None = None) -> set[int]:
        """Indexes of the ids that `stage` would leave out as duplicates now. They are counted as such."""
        if duplicates.all_new(self._segments, self._writer.staged_ids, ids, known_elsewhere) is not None:
            return set()
        seq = self._writer.next_seq(now_ms)
        new = duplicates.leave_out(self._segments, self._writer.staged_ids, ids, seq, known_elsewhere)[2]
        self._segments.counters.duplicates += len(ids) - len(new)
        return set(range(len(ids))).difference(new)

    @repairing_method
    def new_ids(self, batch: Batch, known_elsewhere: KnownIds | None) -> NewIds | None:
        """The ids of a checked batch if all its messages are certainly new, looked up as by `stage`; else None."""
        if batch.ids is None:
            return duplicates.GIVEN_BY_SERVER
        self._filters.step(self._writer.flusher)
        return duplicates.all_new(self._segments, self._writer.staged_ids, batch.ids, known_elsewhere)

    @repairing_method
    def sleepers(self, ids: Collection[str], kept: Set[str] = frozenset()) -> dict[str, lookup.Place]:
        """The sleepers of distinct ids. Staged documents of these ids are committed first: requests take effect in turn. `kept`:
        ids whose documents are wanted, see `lookup.find_many`."""
        if not self._writer.staged_ids.isdisjoint([id_.encode() for id_ in ids]):
            self._writer.commit()
        places = self._find_committed(list(ids), kept)
        return {id_: at for id_, at in places.items() if not (at.flags & f.META or self.is_handed_off(at))}

    @repairing_method
    def stage_versions(
        self, batch: Batch, versions: Sequence[Version], beside: Beside, now_ms: int
    ) -> tuple[list[str], list[CancelledSleeper]]:
        """Stage versions of messages, and tombstones, as one batch. Returns the ids of the versions, and notices of the ended."""
        stored, seq = read_kept(self._segments, versions, now_ms), self._writer.next_seq(now_ms)
        columns, raw = version_columns(batch, versions, stored, beside, seq, self._segments.seed)
        noted = cancelled_sleepers(self._segments, beside.cancelled)
        self._writer.reserve_ids(self._writer.stage(columns, seq), raw)
        return [id_.decode() for id_ in raw], noted

    @repairing_method
    def superseding_seqs(self, after_seq: int) -> dict[str, int]:
        """Messages that replaced one which had come due, and were not handed off: by id, the newest seq above `after_seq`."""
        return superseding_seqs(self._segments, after_seq)

    def watch_ids(self, seen: StagedIds) -> None:
        """Add producers' own ids to a set as they are staged."""
        self._writer.watchers.append(seen)

    def unwatch_ids(self, seen: StagedIds) -> None:
        """End `watch_ids`."""
        self._writer.watchers = [watcher for watcher in self._writer.watchers if watcher is not seen]

    # Firing

    @repairing_method
    def due(self, now_ms: int, *, count_max: int = 10_000, bytes_max: int = 16 << 20) -> Due | None:
        """Due messages that were not handed off, in order of (due time, seq). None: nothing is due. The result is empty if all
        due messages were cancelled; it must be advanced all the same. Changes nothing. Until `advance`, messages may be appended,
        but not cancelled or rescheduled."""
        return firing.due(self._segments, self._writer.staged_ends, now_ms, count_max, bytes_max)

    def advance(self, due: Due) -> None:
        """Count these messages as handed off. Requires: the receiver has stored them."""
        firing.advance(self._segments, due)

    @property
    def progress(self) -> Progress:
        """Marks up to which messages were handed off."""
        return self._segments.progress

    def is_handed_off(self, document: Ended) -> bool:
        """Was this document handed off? If not, it sleeps, or was ended."""
        return self._segments.progress.covers_one(document.due_ms, document.seq)

    def release(self, progress: Progress) -> None:
        """Messages up to `progress` are durable with the receiver; maintenance may drop their documents."""
        self._segments.durable = progress

    def next_due(self) -> int | None:
        """The earliest time at which `due` may return messages. O(1)."""
        return self._segments.next_due_ms()

    # One message

    @repairing_method
    def find(self, id_: str) -> f.Document | None:
        """The newest stored document of an id, unless it was cancelled or replaced."""
        return None if (hit := lookup.find(self._segments, id_)) is None else hit.document

    @repairing_method
    def find_many(self, ids: Sequence[str], after_seq: int = -1) -> dict[int, f.Document]:
        """The newest documents of many ids, by index in `ids`. Ids that are not held are left out: 0.2 µs each.
        Requires: ids unlike server-given ones, such as group/id. `after_seq`: parts without a newer document are skipped, so
        older documents may be missing."""
        raw = [id_.encode() for id_ in ids]
        places = lookup.find_many(self._segments, raw, hash_any(raw, self._segments.seed), after_seq)
        return lookup.read_places(self._segments, places)

    @repairing_method
    def find_of_groups(
        self, ids: Sequence[str], names: Collection[str], count_max: int | None = None, bodies: bool = False
    ) -> tuple[list[GroupDocument], int]:
        """The newest documents of one group alone, whose id is group/id, for these ids and all groups, without those that were
        handed off. `names`: the groups that may have such documents; others may be missing from the answer.
        Also returns for how many of the ids, from the first on: fewer than all if there may be more than `count_max`."""
        raw = [id_.encode() if id_.isprintable() else b"\n" for id_ in ids]  # no id has that
        return find_of_groups(self._segments, raw, names, count_max, bodies)

    def get(self, id_: str) -> StoredMessage | None:
        """A message that sleeps, or that was handed off and whose document is not dropped yet."""
        document = self.find(id_)
        return None if document is None or document.flags & f.META else stored_message(document, self._state(document))

    def _state(self, document: f.Document) -> State:
        return State.READY if self.is_handed_off(document) else State.SLEEP

    def cancel(self, ids: Sequence[str]) -> dict[str, State]:
        """End sleepers, durably. For each id: CANCELLED, READY if the message was handed off before, or UNKNOWN."""
        outcome = self.stage_cancel(ids)
        self.commit()
        return outcome

    @repairing_method
    def stage_cancel(self, ids: Sequence[str], noted: list[CancelledSleeper] | None = None) -> dict[str, State]:
        """Stage tombstones for sleepers. For each id: CANCELLED (with the next commit), READY or UNKNOWN. `noted`: the cancelled
        ones are added to this list."""
        outcome: dict[str, State] = {}
        ended: list[lookup.Place] = []
        places = self._find_committed(list(dict.fromkeys(ids)))
        for id_ in ids:
            place = places.get(id_)
            if place is None or place.flags & f.META:  # a sleeping retry belongs to the Broker
                outcome[id_] = State.UNKNOWN
            elif self.is_handed_off(place):
                outcome[id_] = State.READY
            elif id_ not in outcome:
                outcome[id_] = State.CANCELLED
                ended.append(place)
        if ended:
            columns = tombstones(ended)
            columns.seen = [(place.part, place.ordinal) for place in ended]
            if noted is not None:
                noted += cancelled_sleepers(self._segments, ended)
            self._writer.stage(columns, self._writer.next_seq(0))
        return outcome

    def _find_committed(self, ids: list[str], kept: Set[str] = frozenset()) -> dict[str, lookup.Place]:
        """The newest versions of distinct ids, those that are held. If the end of one is staged, that is committed first."""
        places, ends = lookup.find_any(self._segments, ids, kept), self._writer.staged_ends
        if ends and not ends.isdisjoint(place.seq for place in places.values()):
            self._writer.commit()
            places = lookup.find_any(self._segments, ids, kept)
        return places

    def reschedule(self, id_: str, now_ms: int, **changes: Any) -> StoredMessage:
        """Give a sleeper another due time (`due_ms`), `body` (`json` or bytes) or `headers`, durably."""
        message = self.stage_reschedule(id_, now_ms, **changes)
        self.commit()
        return message

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
        """Stage a new version of a sleeper. The same document ends the old version, so a crash leaves one of the two."""
        place = self._find_committed([id_]).get(id_)
        old = None if place is None else self._segments.read_one(place.part, place.ordinal)
        if place is None or old is None or old.flags & f.META:
            raise UnknownMessage(f"{id_!r}: {UnknownMessage.__doc__}")
        if lifecycle.target(self._state(old), "reschedule") is None:
            raise Conflict(f"{id_!r} has come due already; it can no longer be changed.", state=State.READY.value)
        message = Message(
            body=old.body if body is None else body,
            due_ms=old.due_ms if due_ms is None else due_ms,
            id=id_,
            **optional_of(old) | ({} if headers is None else {"headers": headers}),
        )
        check_batch(as_batch([message]))
        check_new_due(message, due_ms, now_ms)
        seq = self._writer.next_seq(now_ms)
        columns = rescheduled(message, old, place, json)
        self._writer.reserve_ids(self._writer.stage(columns, seq), [id_.encode()])  # else a put of this id would find it ended
        changed: dict[str, Any] = {"due_ms": message.due_ms, "body": message.body, "headers": message.headers or {}}
        return stored_message(replace(old, seq=seq, flags=columns.flags[0], **changed), State.SLEEP)

    # Looking

    def browse(
        self, from_ms: int = 0, to_ms: int = DUE_MS_MAX, *, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[StoredMessage], str | None]:
        """A page of sleepers in order of due time, and the cursor of the next page (None: this is the last)."""
        documents, following = self.browse_documents(from_ms, to_ms, limit, cursor)
        return [stored_message(document, State.SLEEP) for document in documents], following

    @repairing_method
    def browse_documents(
        self, from_ms: int, to_ms: int, limit: int, cursor: str | None = None, newest: bool = False
    ) -> tuple[list[f.Document], str | None]:
        """A page of sleepers as stored documents, those due last first if `newest`, and the cursor of the next page (None: this
        is the last)."""
        return browse(self._segments, from_ms, to_ms, limit, cursor, newest)

    @repairing_method
    def forecast(self, now_ms: int, *, bucket_ms: int = 60_000, buckets: int = 1440) -> Forecast:
        """Counts of sleepers by due time. No document is read. O(buckets × segments)."""
        return forecast(self._segments, now_ms, bucket_ms, buckets)

    @property
    def counters(self) -> Counters:
        """Counts of events since the topic was opened."""
        return self._segments.counters

    @property
    def damage(self) -> list[Damage]:
        """Damaged places found so far."""
        return self._segments.counters.damage

    def stats(self) -> IndexStats:
        """Figures of the Index. O(segments)."""
        segments, counters = self._segments.by_base.values(), self.counters
        documents, live = sum(s.documents for s in segments), sum(s.live for s in segments)
        return IndexStats(
            sleep=live,
            handed_off=counters.handed_off,
            cancelled=counters.cancelled,
            bytes=sum(segment.size for segment in segments),
            segments=len(segments),
            live_ratio=live / documents if documents else 1.0,
            next_due_ms=self.next_due(),
            damaged=len(counters.damage),
        )

    def check(self) -> list[str]:
        """Every broken invariant, a line each, after a scan of all files. 0.5 µs a document."""
        return check.check(self._segments)

    def close(self) -> int:
        """Commit, write the ended bits, close the file. Returns the size of the active segment, for the clean mark."""
        try:
            if self._writer.stopped is None:
                self._writer.commit()
                self._writer.sync()
            try:
                self._writer.finish_flush(wait=True)  # even if stopped: nothing may be written after this returns
            except (TurtleError, OSError, Damaged):
                pass  # opening builds that table
            if self._writer.stopped is None:
                build.write_ended_bits(self._segments, self._segments.parts, every=True)
        finally:
            self._filters.close()
            self._writer.close()
        return self._segments.active.size
