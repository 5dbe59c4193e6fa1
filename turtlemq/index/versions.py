"""New versions of messages: documents of one batch of which some end an older message of the same id.

A version has the content of a message of the batch, or keeps that of the stored one and changes its due time. All documents are
one batch in the log: a crash leaves all of them or none, and each ends its predecessor in the moment in which it counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from turtlemq import small_batches
from turtlemq.errors import InvalidFireAt, InvalidMessage, TooLarge, TurtleError, UnknownMessage
from turtlemq.index.columns import UNHASHED, CancelledSleeper, Columns, Ended, batch_columns
from turtlemq.index.duplicates import GIVEN_BY_SERVER, NewIds
from turtlemq.index.lookup import Place
from turtlemq.index.segments import Segments
from turtlemq.index.validate import check_new_due
from turtlemq.message_fields import flags_of, optional_of
from turtlemq.model import KEPT_BYTES_MAX, Batch, Message
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.fields import Content, content_of
from turtlemq.segment.ids import hash_any, server_ids

KEPT = -1  # as `Version.content`: that of the stored message
NO_DOCUMENT = (0, 0)  # as `Version.awake`: only retries or dead letters of the message are left


@dataclass(slots=True)
class Version:
    """One document to be stored."""

    id: str | None  # None: the server gives one
    content: int  # index of the message in the batch that it is made of, or KEPT
    due_ms: int
    asked: int  # index of the message that gave the due time
    sleeper: Place | None = None  # the sleeping document that it ends
    awake: tuple[int, int] | None = None  # seq and due time of the document that it ends, if that has come due


@dataclass(frozen=True, slots=True)
class Beside:
    """Everything beside the versions: tombstones for sleeping retries and for cancelled sleepers, and counts of all documents for
    the counters of the Index. `new`: no version is made of the batch, since all of its messages are new."""

    retries: Sequence[Ended]
    counts: Mapping[str, int]
    cancelled: Sequence[Place] = ()
    new: NewIds | None = None


def check_expiry_of(version: Version, expires_ms: int | None, now_ms: int) -> None:
    """Refuse a due time that a message got from another one, if the message has expired by then."""
    try:
        check_new_due(Message(b"", version.due_ms, version.id, expires_ms=expires_ms), version.due_ms, now_ms)
    except InvalidFireAt as error:
        kind: type[TurtleError] = InvalidFireAt if version.content == KEPT else InvalidMessage
        raise kind(f"message {version.asked}: {error}", index=version.asked) from None


def read_kept(segments: Segments, versions: Sequence[Version], now_ms: int) -> dict[int, Content]:
    """The stored content of versions that keep it, by seq of the stored document. Refuses a new due time after their expiry, and
    more than `KEPT_BYTES_MAX` of bodies, unless it is one document."""
    stored: dict[int, Content] = {}
    size = 0
    kept = [version for version in versions if version.content == KEPT and version.sleeper is not None]
    for version, old in zip(kept, _contents(segments, [cast("Place", version.sleeper) for version in kept]), strict=True):
        if old is None:
            raise UnknownMessage(f"message {version.asked}: the stored {version.id!r} is damaged", index=version.asked)
        if old.expires_ms is not None:
            check_expiry_of(version, old.expires_ms, now_ms)
        stored[cast("Place", version.sleeper).seq] = old
        size += len(old.body)
        if size > KEPT_BYTES_MAX and len(stored) > 1:
            limit = f"a batch reschedules at most {KEPT_BYTES_MAX:,} bytes of stored bodies, or one message"
            raise TooLarge(f"message {version.asked}: {limit}: put it in parts", index=version.asked)
    return stored


def _contents(segments: Segments, places: Sequence[Place]) -> Iterator[Content | None]:
    """The stored content of documents, in this order; those that no lookup has kept are read in slices of bounded size. None, and
    a report, for damaged ones."""
    read = segments.read_raw([(place.part, place.ordinal) for place in places if place.raw is None])
    for place in places:
        raw = next(read) if place.raw is None else place.raw
        yield None if raw is None else content_of(raw)


def cancelled_sleepers(segments: Segments, ended: Sequence[Place]) -> list[CancelledSleeper]:
    """Sleepers that are about to end, as their notices tell them. Later versions are read: only they know their first seq."""
    later = [place for place in ended if place.flags & (f.REPLACES | f.MOVED)]
    read = zip(later, _contents(segments, later), strict=True) if later else ()
    first = {place.seq: old.arrived for place, old in read if old is not None}
    return [CancelledSleeper(place.id, place.due_ms, first.get(place.seq, place.seq)) for place in ended]


def superseding_seqs(segments: Segments, after_seq: int) -> dict[str, int]:
    """Documents with SUPERSEDES that are newer than `after_seq` and were not handed off: by id, the newest seq. 0.5 µs for each
    document that ends another in a part that has newer ones."""
    seqs: dict[str, int] = {}
    for part in segments.parts:
        if part.last_seq <= after_seq:
            continue
        ordinals = part.ending_ordinals()
        heads = log.read_prefixes(segments.door, part.path, part.spans_of(ordinals)[0])
        newer = ordinals[(heads["seq"] > after_seq) & ((heads["flags"] & f.SUPERSEDES) != 0)]
        for document in segments.read_many(part, newer):
            if document is not None and not segments.progress.covers_one(document.due_ms, document.seq):
                seqs[document.id] = max(document.seq, seqs.get(document.id, 0))
    return seqs


def version_columns(
    batch: Batch, versions: Sequence[Version], stored: Mapping[int, Content], beside: Beside, seq: int, seed: int
) -> tuple[Columns, list[bytes]]:
    """The columns of all versions and of tombstones, and the ids of the versions, those with a content of the batch first.
    `stored`: by seq, the documents of messages that keep their content. `seq`: of the first one."""
    fresh = [version for version in versions if version.content != KEPT]
    kept = [version for version in versions if version.content == KEPT]
    if beside.new is not None:
        columns = _new_columns(batch, beside.new, seq)
    else:
        columns = _fresh_columns(batch, fresh, seq, seed) if fresh else Columns([], [], [], [], [], [], [])
    rows = [_kept_row(version, cast("Place", version.sleeper), stored) for version in kept]
    raw = [*columns.ids, *(row[0] for row in rows)]
    columns = _joined(columns, rows, [*beside.cancelled, *beside.retries], seed)
    columns.purpose = beside.counts
    ended = [version.sleeper for version in (*fresh, *kept) if version.sleeper is not None]
    ended += beside.cancelled
    columns.ends = [(document.seq, document.due_ms) for document in (*ended, *beside.retries)]
    columns.seen = [(place.part, place.ordinal) for place in ended]
    columns.handed_off = [version.awake for version in fresh if version.awake not in (None, NO_DOCUMENT)]
    return columns, raw


def _new_columns(batch: Batch, new: NewIds, seq: int) -> Columns:
    """The columns of a batch in which all messages are new."""
    if new is GIVEN_BY_SERVER:
        return batch_columns(batch, [id_.encode() for id_ in server_ids(seq, len(batch))], None)
    return batch_columns(batch, new.raw, new.hashes)


def _fresh_columns(batch: Batch, fresh: Sequence[Version], seq: int, seed: int) -> Columns:
    """The columns of versions with a content of the batch, in lists. Requires: in the order of the batch."""
    count, rows = len(batch.bodies), [version.content for version in fresh]
    raw, hashes = [b""] * count, [0] * count
    own = [version for version in fresh if version.id is not None]
    for version, hash_ in zip(own, _hashes([str(version.id).encode() for version in own], seed), strict=True):
        raw[version.content], hashes[version.content] = str(version.id).encode(), hash_
    for version, given in zip(fresh, server_ids(seq, len(fresh)), strict=True):
        if version.id is None:
            raw[version.content] = given.encode()
    columns = batch_columns(batch, raw, hashes, rows)
    extras = list(columns.extras) if columns.extras is not None else [b""] * len(fresh)
    flags = [int(flag) | f.CONTINUES for flag in columns.flags]
    for k, version in enumerate(fresh):
        of = version.awake if version.sleeper is None else (version.sleeper.seq, version.sleeper.due_ms)
        if of is not None:
            flags[k] |= f.REPLACES if version.awake is None else f.REPLACES | f.SUPERSEDES
            extras[k] = f.extra_elements(of) + extras[k]
    ttr_ms = [columns.ttr_ms] * len(fresh) if isinstance(columns.ttr_ms, int) else list(columns.ttr_ms)
    due_ms = [version.due_ms for version in fresh]
    return Columns(columns.ids, columns.bodies, due_ms, ttr_ms, flags, extras, [hashes[i] for i in rows])


def _hashes(ids: Sequence[bytes], seed: int) -> list[int]:
    numbers: list[int] = hash_any(ids, seed).tolist() if ids else []
    return numbers


def rescheduled(message: Message, old: f.Document, place: Place, json: bool | None) -> Columns:
    """The document of a new version of a sleeper, which ends the old one. `json`: whether its body is; None: as it was."""
    optional, kind = optional_of(message), old.flags & f.JSON if json is None else f.JSON * json
    flags = old.flags & (f.PRIORITY | f.META) | kind | f.REPLACES | flags_of(optional)
    return Columns(
        ids=[old.id.encode()],
        bodies=[message.body],
        due_ms=[message.due_ms],
        ttr_ms=old.ttr_ms,
        flags=[flags],
        extras=[f.extra_elements((old.seq, old.due_ms), old.arrived, meta=old.meta, **optional)],
        hashes=UNHASHED,
        ends=[(old.seq, old.due_ms)],
        seen=[(place.part, place.ordinal)],  # no read can fail after the commit
        purpose="rescheduled",
    )


_Row = tuple[bytes, bytes, int, int, int, bytes]  # id, body, due time, ttr, flags and elements of a document


def _kept_row(version: Version, old: Place, stored: Mapping[int, Content]) -> _Row:
    """A stored message with another due time."""
    content = stored[old.seq]
    flags = content.flags & (f.PRIORITY | f.JSON | f.OPTIONAL) | f.REPLACES | f.CONTINUES
    elements = f.extra_elements((old.seq, old.due_ms), content.arrived) + content.optional
    return old.raw_id, content.body, version.due_ms, content.ttr_ms, flags, elements


def _tombstone_row(ended: Ended) -> _Row:
    """A tombstone for a sleeper or a sleeping retry."""
    elements = f.extra_elements((ended.seq, ended.due_ms))
    return ended.id.encode(), b"", ended.due_ms, 0, f.TOMBSTONE | f.CONTINUES, elements


def _joined(columns: Columns, rows: Sequence[_Row], ended: Sequence[Ended], seed: int) -> Columns:
    """Columns with these rows and tombstones behind them, in lists. The last document ends the batch."""
    kept, first = len(rows), len(columns.bodies)
    rows = [*rows, *map(_tombstone_row, ended)]
    ids, bodies, due_ms, ttr_ms, flags, extras = ([*column] for column in zip(*rows, strict=True)) if rows else ([],) * 6
    before = columns.flags if isinstance(columns.flags, list) else columns.flags.tolist()
    every: list[int] = [*(flag | f.CONTINUES for flag in before), *flags]
    every[-1] &= ~f.CONTINUES
    hashes = np.zeros(first + len(rows), np.uint64)
    if first and columns.hashes is not None:
        hashes[:first] = columns.hashes
    if kept:
        hashes[first : first + kept] = hash_any(ids[:kept], seed)
    return Columns(
        [*columns.ids, *ids],
        [*columns.bodies, *bodies],
        [*_as_list(columns.due_ms, first), *due_ms],
        [*_as_list(columns.ttr_ms, first), *ttr_ms],
        np.array(every, np.uint32) if len(every) >= small_batches.DOCUMENTS else every,
        [*(columns.extras or [b""] * first), *extras],
        hashes,
    )


def _as_list(column: Any, count: int) -> list[int]:
    if isinstance(column, int):
        return [column] * count
    values: list[int] = column.tolist() if isinstance(column, np.ndarray) else list(column)
    return values
