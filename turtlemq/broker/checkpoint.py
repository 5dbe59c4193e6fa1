"""The file `offset`: where every group stands, so that recovery replays only the last few seconds of the journals.

Written atomically, after everything that it speaks of was synced. A cache: every file of the reserve journal begins with the
same (event `state`), so without it the journals are replayed from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.broker.group import Group
from turtlemq.broker.journal import pack
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.storage.door import Door

FILE = "offset"


@dataclass(slots=True)
class Open:
    """A message of a group that is reserved or waits to be tried again, as the journals tell it."""

    seq: int
    attempt: int
    until_ms: int  # end of the lease, or when it comes again
    reserved_ms: int = 0
    consumer: str = ""
    waits: bool = False
    error: str = ""


@dataclass(slots=True)
class GroupMark:
    """A group as a checkpoint or a replay knows it: numbers only, no documents."""

    epoch: int = 0
    born: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)
    cursors: list[int] = field(default_factory=lambda: [0, 0, 0])
    open: dict[int, Open] = field(default_factory=dict)  # by offset
    unfetched: int = 0
    settled: int = 0
    changed_ms: int = 0


@dataclass(slots=True)
class Checkpoint:
    """Everything in the file."""

    reserve: tuple[int, int] = (0, 0)  # positions in the journals up to which it speaks
    history: tuple[int, int] = (0, 0)
    numbers: tuple[int, int] = (0, 0)  # of the next events there
    ready_offset: int = 0  # documents of the ready log that are counted in
    sure_offset: int = 0  # documents that were there when it was written; for replay only
    newest_seq: int = 0  # of the Index: what came to sleep up to there was noted
    levels: bool = False
    specials: bool = False
    notices: int = 0
    cancelled: set[int] = field(default_factory=set)
    cancelled_retries: set[int] = field(default_factory=set)
    dead_counts: Counter[str] = field(default_factory=Counter)  # letters by group
    groups: dict[str, GroupMark] = field(default_factory=dict)


def encode(checkpoint: Checkpoint, groups: Mapping[str, Group]) -> dict[str, Any]:
    """As it is stored: 10 ms for 100,000 messages in flight. Of `checkpoint`, everything but the groups."""
    return {
        "reserve": [Int64(n) for n in checkpoint.reserve],
        "history": [Int64(n) for n in checkpoint.history],
        "numbers": [Int64(n) for n in checkpoint.numbers],
        "ready_offset": Int64(checkpoint.ready_offset),
        "newest_seq": Int64(checkpoint.newest_seq),
        "levels": checkpoint.levels,
        "specials": checkpoint.specials,
        "notices": Int64(checkpoint.notices),
        "cancelled": pack(sorted(checkpoint.cancelled)),
        "again": pack(sorted(checkpoint.cancelled_retries)),
        "dead": {name: Int64(count) for name, count in checkpoint.dead_counts.items() if count},
        "groups": {name: _encode(group) for name, group in groups.items()},
    }


def _encode(group: Group) -> dict[str, Any]:
    """Columns of what is in hand, one lease behind the other, and of what waits."""
    leases = [lease for lease in group.leases.values() if lease.left]
    rows = [np.flatnonzero(lease.open) for lease in leases]
    waiting = list(group.waiting.values())
    errors = {error: i for i, error in enumerate(dict.fromkeys(w.error for w in waiting))}
    return {
        "epoch": Int64(group.epoch),
        "born": Int64(group.born),
        "moves": pack([number for move in group.moves for number in move]),
        "cursors": [Int64(group.cursors[level]) for level in sorted(group.cursors)],
        "committed": Int64(group.committed),
        "unfetched": Int64(group.unfetched),
        "settled": Int64(group.settled),
        "changed_ms": Int64(group.changed_ms),
        "offsets": b"".join(pack(lease.messages.offsets[open_]) for lease, open_ in zip(leases, rows, strict=True)),
        "seqs": b"".join(pack(lease.messages.seqs[open_]) for lease, open_ in zip(leases, rows, strict=True)),
        "attempts": b"".join(pack(lease.messages.attempts[open_]) for lease, open_ in zip(leases, rows, strict=True)),
        "counts": pack([len(open_) for open_ in rows]),
        "until": pack([lease.until_ms for lease in leases]),
        "reserved": pack([lease.reserved_ms for lease in leases]),
        "consumers": [lease.consumer for lease in leases],
        "waiting": pack(list(group.waiting)),
        "waiting_attempts": pack([w.attempt for w in waiting]),
        "waiting_until": pack([w.when_ms for w in waiting]),
        "waiting_errors": pack([errors[w.error] for w in waiting]),
        "errors": list(errors),
    }


def read(door: Door, folder: Path) -> Checkpoint | None:
    """The checkpoint, or None where there is none that can be trusted."""
    path = folder / FILE
    if not door.exists(path):
        return None
    try:
        fields = f.decode_checked(door.read_all(path))[0]
        return decode(fields) if fields.get("topic", folder.name) == folder.name else None  # else it is another topic's
    except (KeyError, TypeError, ValueError):
        return None


def decode(fields: dict[str, Any]) -> Checkpoint:
    """What `encode` made."""
    return Checkpoint(
        reserve=_pair(fields["reserve"]),
        history=_pair(fields["history"]),
        numbers=_pair(fields["numbers"]),
        ready_offset=int(fields["ready_offset"]),
        newest_seq=int(fields["newest_seq"]),
        levels=fields["levels"],
        specials=fields["specials"],
        notices=int(fields["notices"]),
        cancelled=set(_unpack(fields["cancelled"]).tolist()),
        cancelled_retries=set(_unpack(fields["again"]).tolist()),
        dead_counts=Counter({name: int(count) for name, count in fields["dead"].items()}),
        groups={name: _decode(entry) for name, entry in fields["groups"].items()},
    )


def _pair(values: list[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _unpack(data: bytes) -> I64:
    return np.frombuffer(data, "<i8").astype(np.int64)


def _decode(entry: dict[str, Any]) -> GroupMark:
    return GroupMark(
        epoch=int(entry["epoch"]),
        born=int(entry["born"]),
        moves=[(int(seq), int(first)) for seq, first in _unpack(entry["moves"]).reshape(-1, 2)],
        cursors=[int(cursor) for cursor in entry["cursors"]],
        open=_decode_leases(entry) | _decode_waiting(entry),
        unfetched=int(entry["unfetched"]),
        settled=int(entry["settled"]),
        changed_ms=int(entry["changed_ms"]),
    )


def _decode_leases(entry: dict[str, Any]) -> dict[int, Open]:
    counts = _unpack(entry["counts"])
    each = [np.repeat(_unpack(entry[name]), counts).tolist() for name in ("until", "reserved")]
    consumers = [entry["consumers"][i] for i in np.repeat(np.arange(len(counts)), counts).tolist()]
    columns = [_unpack(entry[name]).tolist() for name in ("offsets", "seqs", "attempts")]
    rows = zip(*columns, *each, consumers, strict=True)
    return {offset: Open(seq, attempt, until, reserved, consumer) for offset, seq, attempt, until, reserved, consumer in rows}


def _decode_waiting(entry: dict[str, Any]) -> dict[int, Open]:
    names = ("waiting", "waiting_attempts", "waiting_until", "waiting_errors")
    rows = zip(*(_unpack(entry[name]).tolist() for name in names), strict=True)
    return {offset: Open(0, attempt, until, waits=True, error=entry["errors"][error]) for offset, attempt, until, error in rows}
