"""Where every group of a topic is, from files alone: the checkpoint and the journal events after it, as recovery replays them.

A mark has a group's cursors, its leases and retries by ready offset, and its moves. Nothing is decided here: `message_states`
turns marks into facts. Not here: reading the journals as rows (`journals`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np

from pyspark_turtlemq.journals import packed_column
from pyspark_turtlemq.parts import TopicLogs
from turtlemq.broker import events as kinds
from turtlemq.broker.checkpoint import Checkpoint, GroupMark, OpenMessage, decode
from turtlemq.broker.replay import ended_attempts
from turtlemq.model import I64, Mask
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan
from turtlemq.standing import add_move

UNKNOWN_SEQ = -1  # of a damaged document
_OF_MESSAGES = (kinds.LEASE, kinds.RETRY, kinds.MOVED, kinds.SETTLE)  # events that change the open messages of a group


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a journal, and the position that a checkpoint names it by."""

    number: int
    position: tuple[int, int]  # base of the file, byte
    group: str
    at_ms: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReadySeqs:
    """Seqs of the documents in the ready log, by offset less the first. Events name seqs as well, because after a power cut
    another document may have an offset."""

    first: int
    seqs: I64

    def same(self, offsets: I64, seqs: I64) -> Mask:
        """Which offsets still hold the documents that an event is about."""
        at = offsets - self.first
        inside = (at >= 0) & (at < len(self.seqs))
        if not inside.any():
            return inside
        present = self.seqs[np.where(inside, at, 0)]
        same: Mask = inside & ((present == seqs) | (present == UNKNOWN_SEQ))
        return same


def events(logs: TopicLogs, kind: str) -> Iterator[Event]:
    """All events of a journal, in order."""
    bases = {file.path: base for base, file in logs.files.segments(kind)}
    for file, start, end in logs.journal(kind):
        view = file.map()
        documents = scan(view, start, end, sealed=True)
        for at, length in zip(documents.positions.tolist(), documents.lengths.tolist(), strict=True):
            document = f.decode(view[at : at + length])
            yield Event(document.seq, (bases[file.path], at), document.id, document.due_ms, bson.decode(document.body))


def replay(logs: TopicLogs, ready: ReadySeqs, as_of: int | None = None) -> Checkpoint:
    """The marks of all groups, and the cancelled offsets, without documents that retention has removed. `as_of`: at that moment;
    None: now."""
    saved = (_checkpoint(logs) if as_of is None else None) or _last_state(logs, as_of) or Checkpoint()
    for kind, begin in (("reserve", saved.reserve), ("history", saved.history)):
        for event in events(logs, kind):
            if event.position >= begin and (as_of is None or event.at_ms <= as_of):
                _apply(saved, event, ready)
    saved.cancelled = {offset for offset in saved.cancelled if offset >= ready.first}
    for mark in saved.groups.values():
        mark.open = {at: entry for at, entry in mark.open.items() if at >= ready.first and at not in saved.cancelled}
    return saved


def _checkpoint(logs: TopicLogs) -> Checkpoint | None:
    if logs.files.offset is None:
        return None
    try:
        return decode(f.decode_checked(bytes(logs.files.offset.map()))[0])
    except (KeyError, TypeError, ValueError):
        return None


def _last_state(logs: TopicLogs, as_of: int | None = None) -> Checkpoint | None:
    """The newest state in the reserve journal, for a topic without a checkpoint: older files of the journals may be removed.
    `as_of`: the newest up to a moment."""
    states, before_ms = list[Event](), 0
    for event in events(logs, "reserve"):
        before_ms = max(before_ms, event.at_ms)  # some states are written without a time: after all events before
        if event.fields["event"] in (kinds.STATE, kinds.STATE_PART) and (as_of is None or before_ms <= as_of):
            states.append(event)
    whole = kinds.find_states([(event.number, event.fields) for event in states])
    if not whole:
        return None
    last = decode(kinds.join_state([states[i].fields for i in whole[-1]]))
    last.reserve = states[whole[-1][-1]].position
    return last


def _apply(saved: Checkpoint, event: Event, ready: ReadySeqs) -> None:
    """One event, as `turtlemq.broker.replay` applies it."""
    fields, kind = event.fields, event.fields["event"]
    if kind == kinds.FORGET:
        saved.groups.pop(event.group, None)
    elif kind == kinds.GROUP:
        _move(saved, event, ready)
    elif kind == kinds.CANCEL:
        offsets = packed_column(fields, "offsets")
        saved.cancelled |= set(offsets[ready.same(offsets, packed_column(fields, "seqs"))].tolist())
    mark = saved.groups.get(event.group)
    if mark is None or kind not in _OF_MESSAGES or mark.epoch != int(fields["epoch"]):
        return
    offsets = packed_column(fields, "offsets")
    same = np.flatnonzero(ready.same(offsets, packed_column(fields, "seqs")))
    if kind in (kinds.MOVED, kinds.SETTLE):
        for offset in offsets[same].tolist():
            mark.open.pop(offset, None)
        return
    if kind == kinds.LEASE:
        mark.cursors = [int(cursor) for cursor in fields["cursors"]]
    names = ("offsets", "attempts", "until" if kind == kinds.LEASE else "when")
    for offset, attempt, until in zip(*(packed_column(fields, name)[same].tolist() for name in names), strict=True):
        if kind == kinds.LEASE:
            ended = mark.open[offset].attempts if offset in mark.open else ()
            mark.open[offset] = OpenMessage(0, attempt, until, event.at_ms, fields["consumer"], attempts=ended)
        else:
            ended = ended_attempts(fields, event.at_ms, mark.open.get(offset), attempt, until)
            mark.open[offset] = OpenMessage(0, attempt, until, is_retry=True, error=fields["error"], attempts=ended)


def _move(saved: Checkpoint, event: Event, ready: ReadySeqs) -> None:
    epoch = int(event.fields["epoch"])
    offset = min(int(event.fields["offset"]), ready.first + len(ready.seqs))
    mark = saved.groups.setdefault(event.group, GroupMark(born=epoch))
    mark.epoch, mark.moves = epoch, add_move(mark.moves, int(event.fields["since"]), offset)
    mark.cursors, mark.open = [offset] * len(mark.cursors), {}
