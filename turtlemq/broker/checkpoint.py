"""The checkpoint: the state of a Broker as numbers, so that recovery replays only the last few seconds of the journals.

It is stored in the file `offset`, which is a cache: every file of the reserve journal but the first begins with a checkpoint, too
(event `state`), and without the file the journals are replayed from there. Here are the values and their encoding; `save` writes
the file, `replay` applies the events behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.attempts import Attempts, decode_many, encode_many
from turtlemq.broker.events import pack, unpack
from turtlemq.broker.group import NO_EVENT, Group, Lease
from turtlemq.broker.retry_queue import Retry
from turtlemq.model import Mask
from turtlemq.segment import format as f
from turtlemq.storage import names
from turtlemq.storage.door import Door

FILE = names.OFFSET


@dataclass(slots=True)
class OpenMessage:
    """A message of a group that is leased or waits for a retry."""

    seq: int  # 0 for a retry
    attempt: int
    until_ms: int  # end of the lease or of the back-off
    reserved_ms: int = 0
    consumer: str = ""
    is_retry: bool = False
    error: str = ""
    event: int = NO_EVENT  # number of the event that leased it
    attempts: Attempts = ()  # that ended


@dataclass(slots=True)
class GroupMark:
    """A consumer group in a checkpoint: see the fields of `Group`."""

    epoch: int = 0
    born: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)
    cursors: list[int] = field(default_factory=lambda: [0, 0, 0])  # by priority
    open: dict[int, OpenMessage] = field(default_factory=dict)  # by ready offset
    unfetched: int = 0
    settled: int = 0
    changed_ms: int = 0


@dataclass(slots=True)
class Checkpoint:
    """The state of a Broker."""

    reserve: tuple[int, int] = (0, 0)  # (base, position) in the journal: events before it are included
    history: tuple[int, int] = (0, 0)
    numbers: tuple[int, int] = (0, 0)  # of the next events in the two journals
    ready_offset: int = 0  # documents of the ready log before it are included
    newest_seq: int = 0  # of the Index: retries up to there were journaled as sleeping
    has_priorities: bool = False  # this and the next four: see `Visibility`
    has_restricted: bool = False
    notices: int = 0
    cancelled: set[int] = field(default_factory=set)
    cancelled_retries: set[int] = field(default_factory=set)
    dead_counts: Counter[str] = field(default_factory=Counter)  # letters by group
    groups: dict[str, GroupMark] = field(default_factory=dict)


def capture(checkpoint: Checkpoint, groups: Mapping[str, Group]) -> Callable[[], dict[str, Any]]:
    """Fields of the stored document: those of `checkpoint`, but with the groups in `groups`. This call copies all that can
    change, 20 ms for 100,000 leases; the function that it returns does the rest, some times as long, on any thread."""
    fields = {
        "reserve": [Int64(n) for n in checkpoint.reserve],
        "history": [Int64(n) for n in checkpoint.history],
        "numbers": [Int64(n) for n in checkpoint.numbers],
        "ready_offset": Int64(checkpoint.ready_offset),
        "newest_seq": Int64(checkpoint.newest_seq),
        "levels": checkpoint.has_priorities,
        "specials": checkpoint.has_restricted,
        "notices": Int64(checkpoint.notices),
        "dead": {name: Int64(count) for name, count in checkpoint.dead_counts.items() if count},
    }
    cancelled, retries = list(checkpoint.cancelled), list(checkpoint.cancelled_retries)
    encoders = {name: _capture(group) for name, group in groups.items()}

    def encode() -> dict[str, Any]:
        offsets = {"cancelled": pack(sorted(cancelled)), "again": pack(sorted(retries))}
        return fields | offsets | {"groups": {name: encoder() for name, encoder in encoders.items()}}

    return encode


def _capture(group: Group) -> Callable[[], dict[str, Any]]:
    """A group: columns of its messages in flight, lease after lease, and of its retries."""
    fields = {
        "epoch": Int64(group.epoch),
        "born": Int64(group.born),
        "moves": pack([number for move in group.moves for number in move]),
        "cursors": [Int64(group.cursors[level]) for level in sorted(group.cursors)],
        "unfetched": Int64(group.unfetched),
        "settled": Int64(group.settled),
        "changed_ms": Int64(group.changed_ms),
    }
    cursors, retries, attempts = list(group.cursors.values()), dict(group.retries), dict(group.attempts)
    leases = [lease for lease in group.leases.values() if lease.left]  # their columns never change, but these do:
    until = [lease.until_ms for lease in leases]
    partly = {i: lease.open.copy() for i, lease in enumerate(leases) if lease.left < len(lease.open)}

    def encode() -> dict[str, Any]:
        in_flight = _encode_leases(leases, until, partly)
        committed = min([*cursors, *retries, *unpack(in_flight["offsets"]).tolist()])
        ended = {"ended": encode_many(attempts)} if attempts else {}
        return fields | {"committed": Int64(committed)} | in_flight | _encode_retries(retries) | ended

    return encode


def _encode_leases(leases: Sequence[Lease], until: Sequence[int], partly: Mapping[int, Mask]) -> dict[str, Any]:
    """Columns of leases. `partly`: by position in the list, which messages are open, for leases that have others, too."""
    counts = np.array([len(lease.messages) for lease in leases], np.int64)
    ends, is_open = np.cumsum(counts), np.ones(int(counts.sum()), np.bool_)
    for i, mask in partly.items():
        is_open[ends[i] - len(mask) : ends[i]] = mask
        counts[i] = np.count_nonzero(mask)
    columns = {name: [getattr(lease.messages, name) for lease in leases] for name in ("offsets", "seqs", "attempts")}
    packed = {name: pack(np.concatenate(parts)[is_open]) if parts else b"" for name, parts in columns.items()}
    return packed | {
        "counts": pack(counts),
        "until": pack(list(until)),
        "reserved": pack([lease.reserved_ms for lease in leases]),
        "consumers": [lease.consumer for lease in leases],
        "events": pack([lease.event for lease in leases]),
    }


def _encode_retries(waiting: Mapping[int, Retry]) -> dict[str, Any]:
    """Columns of the retries that wait in memory, by ready offset."""
    retries = list(waiting.values())
    errors = {error: i for i, error in enumerate(dict.fromkeys(retry.error for retry in retries))}
    return {
        "waiting": pack(list(waiting)),
        "waiting_attempts": pack([retry.attempt for retry in retries]),
        "waiting_until": pack([retry.when_ms for retry in retries]),
        "waiting_errors": pack([errors[retry.error] for retry in retries]),
        "errors": list(errors),
    }


def read(door: Door, folder: Path) -> Checkpoint | None:
    """Read the checkpoint file. None: there is none, or it is damaged or of another topic."""
    path = folder / FILE
    if not door.exists(path):
        return None
    try:
        fields = f.decode_checked(door.read_all(path))[0]
        return decode(fields) if fields.get("topic", folder.name) == folder.name else None
    except (KeyError, TypeError, ValueError):
        return None


def decode(fields: dict[str, Any], only: Collection[int] | None = None) -> Checkpoint:
    """The checkpoint that `encode` encoded. `only`: of its messages, those at these ready offsets; of 100,000 leases, all take
    0.3 s."""
    return Checkpoint(
        reserve=_pair(fields["reserve"]),
        history=_pair(fields["history"]),
        numbers=_pair(fields["numbers"]),
        ready_offset=int(fields["ready_offset"]),
        newest_seq=int(fields["newest_seq"]),
        has_priorities=fields["levels"],
        has_restricted=fields["specials"],
        notices=int(fields["notices"]),
        cancelled=_offsets(fields["cancelled"], only),
        cancelled_retries=_offsets(fields["again"], only),
        dead_counts=Counter({name: int(count) for name, count in fields["dead"].items()}),
        groups={name: _decode(entry, only) for name, entry in fields["groups"].items()},
    )


def _pair(values: list[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _offsets(packed: bytes, only: Collection[int] | None) -> set[int]:
    offsets = unpack(packed)
    return set((offsets if only is None else offsets[np.isin(offsets, list(only))]).tolist())


def _decode(entry: dict[str, Any], only: Collection[int] | None) -> GroupMark:
    messages = _decode_leases(entry, only) | _decode_retries(entry)
    for offset, attempts in decode_many(entry["ended"]).items() if "ended" in entry else ():
        if offset in messages:
            messages[offset].attempts = attempts
    return GroupMark(
        epoch=int(entry["epoch"]),
        born=int(entry["born"]),
        moves=[(int(seq), int(first)) for seq, first in unpack(entry["moves"]).reshape(-1, 2)],
        cursors=[int(cursor) for cursor in entry["cursors"]],
        open=messages,
        unfetched=int(entry["unfetched"]),
        settled=int(entry["settled"]),
        changed_ms=int(entry["changed_ms"]),
    )


def _decode_leases(entry: dict[str, Any], only: Collection[int] | None) -> dict[int, OpenMessage]:
    counts, offsets = unpack(entry["counts"]), unpack(entry["offsets"])
    which = np.arange(len(offsets)) if only is None else np.flatnonzero(np.isin(offsets, list(only)))
    lease = np.repeat(np.arange(len(counts)), counts)[which]
    until, reserved = (unpack(entry[name])[lease].tolist() for name in ("until", "reserved"))
    numbers = unpack(entry["events"]) if "events" in entry else np.full(len(counts), NO_EVENT)  # files of older versions
    consumers = [entry["consumers"][i] for i in lease.tolist()]
    columns = [unpack(entry[name])[which].tolist() for name in ("offsets", "seqs", "attempts")]
    rows = zip(*columns, until, reserved, consumers, numbers[lease].tolist(), strict=True)
    return {
        offset: OpenMessage(seq, attempt, until_ms, reserved_ms, consumer, event=event)
        for offset, seq, attempt, until_ms, reserved_ms, consumer, event in rows
    }


def _decode_retries(entry: dict[str, Any]) -> dict[int, OpenMessage]:
    names = ("waiting", "waiting_attempts", "waiting_until", "waiting_errors")
    rows = zip(*(unpack(entry[name]).tolist() for name in names), strict=True)
    return {
        offset: OpenMessage(0, attempt, until, is_retry=True, error=entry["errors"][error])
        for offset, attempt, until, error in rows
    }
