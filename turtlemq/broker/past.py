"""The past of one message: where it was in every group at a moment, from the journals that retention still holds.

The newest checkpoint of the reserve journal before the moment is read, then the events up to the moment that name the message or
place a group. Events that name neither are never decoded: a search for the bytes of seqs and of the id finds the others. Events
become facts, from which `turtlemq.standing` decides; here is no decision about states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from typing import Any, NamedTuple

from turtlemq import standing
from turtlemq.attempts import Attempt, latest
from turtlemq.broker import checkpoint as c
from turtlemq.broker import events as e
from turtlemq.broker.journal import Event, Journal
from turtlemq.broker.replay import ended_attempts
from turtlemq.errors import TooLarge
from turtlemq.model import SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.segment.forward import File, documents_with

SEARCH_BYTES_MAX = 4 << 30  # of both journals: some 30 s in steps of a millisecond
_PLACING = tuple(b"\x02event\0%s%s\0" % ((len(kind) + 1).to_bytes(4, "little"), kind.encode()) for kind in (e.GROUP, e.FORGET))


class Retry(NamedTuple):
    """A retry of the message for one group, in the ready log."""

    group: str
    offset: int
    ready_ms: int
    document: f.Document


class Letter(NamedTuple):
    """A dead letter of the message, as the event tells it that made it."""

    at_ms: int
    attempt: int
    error: str
    offset: int


@dataclass(slots=True)
class GroupThen:
    """One group at the moment, as far as one message is concerned. Offsets are ready offsets."""

    epoch: int
    born: int
    moves: list[tuple[int, int]] = field(default_factory=list)
    cursors: Sequence[int] = (0, 0, 0)  # where it was placed, or stood at the checkpoint
    open: dict[int, c.OpenMessage] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)  # offsets that events named since
    left: int | None = None  # the message sleeps for another attempt since it left this offset


class Past:
    """One message at one moment. `own`: its offset in the ready log and its seq; `level`: of its priority. `retries`: all that
    became ready up to the moment."""

    def __init__(self, id_: str, own: tuple[int, int], level: int, retries: Sequence[Retry], at_ms: int) -> None:
        self.id, self.at_ms, self._own, self._level, self.retries = id_, at_ms, own[0], level, retries
        self._seqs = {own[0]: own[1]} | {one.offset: one.document.seq for one in retries}
        self.groups: dict[str, GroupThen] = {}
        self.letters: dict[str, Letter] = {}
        self.settled: dict[str, Attempt] = {}  # by group: the delivery that ended the message
        self._ended: dict[tuple[str, int, int], Attempt] = {}  # by group, number and beginning
        self.cancelled_ms: int | None = None
        self.cancelled = self.cancelled_later = False

    # Reading

    def read(self, reserve: Journal, history: Journal, since_ms: int) -> Iterator[None]:
        """Read both journals. `since_ms`: when the message became ready. Yields between steps."""
        saved, position = checkpoint_before(reserve, self.at_ms, self._seqs)
        for name, mark in saved.groups.items():
            kept = {offset: entry for offset, entry in mark.open.items() if offset in self._seqs}
            self.groups[name] = GroupThen(mark.epoch, mark.born, list(mark.moves), list(mark.cursors), kept)
            for entry in kept.values():
                self.note(name, entry.attempts)
        seqs = [e.pack([seq]) for seq in self._seqs.values()]
        searches = [(reserve, position, [*seqs, *_PLACING])]
        searches.append((history, history.position_at(since_ms), [*seqs, b"\0" + self.id.encode()]))
        ends = [_end_of(journal, self.at_ms) for journal, _, _ in searches]
        size = sum(end - begin for (_, begin, _), end in zip(searches, ends, strict=True))
        if size > SEARCH_BYTES_MAX:
            text = f"{size:,} bytes of journals lie before that moment, and at most {SEARCH_BYTES_MAX:,} are searched"
            raise TooLarge(f"{text}: ask for an earlier one")
        found: list[list[Event]] = [[], []]
        for events, (journal, begin, parts), end in zip(found, searches, ends, strict=True):
            yield from _search(journal, begin, end, parts, events)
        for event in merge(*found, key=lambda one: one.at_ms):
            if event.at_ms <= self.at_ms:
                self._apply(event)
        if history.bases and history.bases[0] and _first_ms(history) > since_ms:
            yield from self._read_later(history, ends[1], searches[1][2])

    def _read_later(self, history: Journal, begin: int, parts: Sequence[bytes]) -> Iterator[None]:
        """Events of before the moment are gone: those behind it tell of dead letters that were there, and whether a cancelled
        message was not cancelled yet."""
        events, died = list[Event](), set[str]()
        yield from _search(history, begin, history.end, parts, events)
        for event in events:
            kind, fields = event.fields["event"], event.fields
            if kind == e.CANCEL and any(offset == self._own for _, offset in self._rows(event)):
                self.cancelled_later = True
            elif kind == e.SETTLE and fields["outcome"] != e.ACKED and self._rows(event):
                died.add(event.group)
            elif kind == e.REMOVE_DEAD and self.id in (ids := e.split_ids(fields["ids"])) and event.group not in died:
                made_ms = int(event.array("letters")[ids.index(self.id)]) >> SEQ_COUNTER_BITS
                if made_ms <= self.at_ms:
                    self.letters.setdefault(event.group, Letter(made_ms, 0, "", self._own))

    # Events

    def _apply(self, event: Event) -> None:
        kind, fields = str(event.fields["event"]), event.fields
        if kind == e.GROUP:
            self._place(event)
        elif kind == e.FORGET:
            self.groups.pop(event.group, None)
        elif kind == e.CANCEL:
            self._cancel(event)
        elif kind in (e.REMOVE_DEAD, e.KEEP_DEAD):
            self._remove_letter(event)
        elif kind in (e.LEASE, e.RETRY, e.MOVED, e.SETTLE):
            then = self.groups.get(event.group)
            same = then is not None and then.epoch == int(fields["epoch"])
            for row, offset in self._rows(event):
                if kind == e.SETTLE:
                    self._settle(event, row, offset)
                if then is not None and same:
                    then.passed.add(offset)
                    self._deliver(then, event, row, offset)

    def _rows(self, event: Event) -> list[tuple[int, int]]:
        """The rows of an event that are about this message, with their offsets."""
        rows = zip(event.array("offsets").tolist(), event.array("seqs").tolist(), strict=True)
        return [(i, offset) for i, (offset, seq) in enumerate(rows) if self._seqs.get(offset) == seq]

    def _place(self, event: Event) -> None:
        epoch, offset = int(event.fields["epoch"]), int(event.fields["offset"])
        then = self.groups.setdefault(event.group, GroupThen(epoch, epoch))
        then.epoch, then.moves = epoch, standing.add_move(then.moves, int(event.fields["since"]), offset)
        then.cursors, then.open, then.passed = [offset] * len(then.cursors), {}, set()
        if then.left is not None and offset <= then.left:
            then.left = None

    def _deliver(self, then: GroupThen, event: Event, row: int, offset: int) -> None:
        """A row of an event about deliveries, in the epoch of its group."""
        kind, before = event.fields["event"], then.open.pop(offset, None)
        if kind == e.LEASE:
            ended, attempt, until = (
                () if before is None else before.attempts,
                event.array("attempts")[row],
                event.array("until")[row],
            )
            then.open[offset] = c.OpenMessage(
                0, int(attempt), int(until), event.at_ms, event.fields["consumer"], event=event.number, attempts=ended
            )
        elif kind == e.RETRY:
            following = int(event.array("attempts")[row]), int(event.array("when")[row])
            ended = ended_attempts(event.fields, event.at_ms, before, *following)
            then.open[offset] = c.OpenMessage(0, *following, is_retry=True, error=event.fields["error"], attempts=ended)
            self.note(event.group, ended)
        elif kind == e.MOVED:
            then.left = offset
            if before is not None and not before.is_retry:
                failed = Attempt(before.attempt, before.consumer, before.reserved_ms, event.at_ms, "failed", "", None)
                self.note(event.group, (*before.attempts, failed))

    def _settle(self, event: Event, row: int, offset: int) -> None:
        fields, outcome, error = event.fields, str(event.fields["outcome"]), str(event.fields["error"])
        attempt, reserved_ms = int(event.array("attempts")[row]), int(event.array("reserved")[row])
        last = Attempt(attempt, e.consumer_at(fields, row), reserved_ms, event.at_ms, outcome, error, None)
        self.settled[event.group] = last
        self.note(event.group, (*e.earlier_at(fields, row), *(() if outcome == e.EXPIRED else (last,))))
        if outcome != e.ACKED:
            self.letters[event.group] = Letter(event.at_ms, attempt, error, offset)

    def _cancel(self, event: Event) -> None:
        again = set(event.array("again").tolist())
        for _, offset in self._rows(event):
            if offset == self._own and offset not in again:
                self.cancelled, self.cancelled_ms = True, event.at_ms
            for then in self.groups.values():
                then.open.pop(offset, None)
                then.passed.add(offset)
        for name, ids in event.fields["naps"].items():
            if name in self.groups and self.id in e.split_ids(ids):
                self.groups[name].left = None

    def _remove_letter(self, event: Event) -> None:
        for id_, became in zip(e.split_ids(event.fields["ids"]), event.array("became").tolist(), strict=True):
            if id_ != self.id:
                continue
            if event.fields["event"] == e.KEEP_DEAD:
                self.letters.setdefault(event.group, Letter(event.at_ms, 0, "", self._own))
                continue
            letter = self.letters.pop(event.group, None)
            if became and event.group in self.groups:
                self.groups[event.group].left = self._own if letter is None else letter.offset

    def note(self, group: str, attempts: Sequence[Attempt]) -> None:
        """Note attempts that had ended; later notes replace earlier ones."""
        for one in attempts:
            if one.ended_ms is not None and one.ended_ms <= self.at_ms:
                self._ended[group, one.attempt, one.reserved_ms] = one

    @property
    def attempts(self) -> list[tuple[str, Attempt]]:
        """The last attempts in each group, oldest first; of a running one the end is not known."""
        found = dict(self._ended)
        for name, then in self.groups.items():
            for one in then.open.values() if not self.cancelled else ():
                if not one.is_retry:
                    running = Attempt(one.attempt, one.consumer, one.reserved_ms, None, None, "", None)
                    found[name, one.attempt, one.reserved_ms] = running
        own = dict[str, list[Attempt]]()
        for (name, _, _), attempt in sorted(found.items(), key=lambda row: (row[1].reserved_ms, row[1].attempt)):
            own.setdefault(name, []).append(attempt)
        rows = ([(name, one) for one in latest(kept)] for name, kept in own.items())
        return list(merge(*rows, key=lambda row: row[1].reserved_ms))

    # Facts

    def facts(self, name: str) -> int:
        """The facts of the message and a group, as bits of `standing`."""
        if self.cancelled:
            return standing.CANCELLED
        then, facts = self.groups.get(name), standing.LETTER if name in self.letters else 0
        if then is None:
            return facts
        for entry in then.open.values():
            facts |= standing.WAITING if entry.is_retry else standing.LEASED
        if then.left is not None and not any(one.group == name and one.offset > then.left for one in self.retries):
            facts |= standing.ASLEEP
        if self._own < standing.first_had(then.moves):
            facts |= standing.PREDATES
        ahead = {self._own, *(one.offset for one in self.valid_retries(name))} - then.passed
        return facts | (standing.UNFETCHED if any(offset >= then.cursors[self._level] for offset in ahead) else 0)

    def valid_retries(self, name: str) -> list[Retry]:
        """The retries for a group that no move of it had made void, oldest first."""
        return [one for one in self.retries if one.group == name and not self.is_void(name, one.document)]

    def is_void(self, name: str, retry: Any) -> bool:
        """Whether a retry was void at the moment."""
        then, meta = self.groups[name], retry.meta
        return standing.is_void(then.born, then.moves, int(meta["epoch"]), retry.order, int(meta["offset"]))


def known_from(reserve: Journal, history: Journal) -> int:
    """The earliest moment that the journals still tell of; 0 if that is the beginning of the topic."""
    begins = [_begin_of(reserve, reserve.bases[0]) if reserve.bases and reserve.bases[0] else 0]
    if history.bases and history.bases[0]:
        begins.append(_first_ms(history))
    return max(begins)


def checkpoint_before(reserve: Journal, at_ms: int, only: Collection[int]) -> tuple[c.Checkpoint, int]:
    """The newest checkpoint at the beginning of a file that was made up to a moment, and the position of that file; without one,
    that of the beginning of the topic. `only`: the messages at these ready offsets."""
    for base in reversed(reserve.bases):
        if base and _begin_of(reserve, base) <= at_ms and (saved := _state_of(reserve, base, only)) is not None:
            return saved, base
    return c.Checkpoint(), 0


def _state_of(reserve: Journal, base: int, only: Collection[int]) -> c.Checkpoint | None:
    """The checkpoint at the beginning of a file; None if it has none."""
    pieces = list[dict[str, Any]]()
    for _, raw in reserve.documents_from(base):
        event = reserve.event(raw)
        if event is None or event.fields["event"] not in (e.STATE, e.STATE_PART):
            break
        pieces.append(event.fields)
        if event.fields["event"] == e.STATE or event.fields["part"] + 1 == event.fields["parts"]:
            return c.decode(e.join_state(pieces), only)
    return None


def _begin_of(reserve: Journal, base: int) -> int:
    """The time at which a file with a checkpoint was begun. A checkpoint that was written without a time tells that of the last
    arrival or delivery before it."""
    first = next((event for _, raw in reserve.documents_from(base) if (event := reserve.event(raw))), None)
    if first is None or first.at_ms:
        return 0 if first is None else first.at_ms
    saved = _state_of(reserve, base, ()) or c.Checkpoint()
    return max([saved.newest_seq >> SEQ_COUNTER_BITS, *(mark.changed_ms for mark in saved.groups.values())])


def _end_of(journal: Journal, at_ms: int) -> int:
    """The position behind the events up to a moment."""
    position = journal.position_at(at_ms + 1)
    for behind, raw in journal.documents_from(position):
        if (event := journal.event(raw)) is None or event.at_ms > at_ms:
            break
        position = behind
    return position


def _first_ms(journal: Journal) -> int:
    """The time of the oldest event that is kept."""
    return next((event.at_ms for _, raw in journal.documents_from(0) if (event := journal.event(raw)) and event.at_ms), 0)


def _search(journal: Journal, begin: int, end: int, parts: Sequence[bytes], events: list[Event]) -> Iterator[None]:
    """Add the events in [begin, end) that contain one of `parts`, checkpoints left out. Yields between steps."""
    views = [(file, file.open()) for file in journal.files()]  # opened now: a file may be removed meanwhile
    opened = [File(file.base, file.start, file.end, partial(_same, view)) for file, view in views]
    for one in documents_with(opened, begin, end, parts):
        event = None if one is None else journal.event(one[1])
        if event is not None and event.fields["event"] not in (e.STATE, e.STATE_PART):
            events.append(event)
        yield None


def _same(view: memoryview) -> memoryview:
    return view
