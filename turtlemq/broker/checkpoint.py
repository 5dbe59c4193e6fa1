"""The file `offset`: where every group stands, so that recovery replays only the last few seconds of the journals.

Written atomically, after everything that it speaks of was synced. A cache: every file of the reserve journal begins with the
same (event `state`), so without it the journals are replayed from there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bson
import numpy as np
from bson.int64 import Int64
from zlib_ng.zlib_ng import crc32

from turtlemq.broker.group import Group
from turtlemq.broker.journal import pack
from turtlemq.door import Door
from turtlemq.model import I64

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
    levels: bool = False
    specials: bool = False
    notices: int = 0
    cancelled: set[int] = field(default_factory=set)
    dead: Counter[str] = field(default_factory=Counter)  # letters by group
    groups: dict[str, GroupMark] = field(default_factory=dict)


def mark_of(group: Group) -> GroupMark:
    """A group's numbers."""
    mark = GroupMark(
        group.epoch,
        group.born,
        list(group.moves),
        [group.cursors[level] for level in sorted(group.cursors)],
        {},
        group.unfetched,
        group.settled,
        group.changed_ms,
    )
    for lease in group.leases.values():
        held = lease.held
        for i in np.flatnonzero(lease.open).tolist():
            entry = Open(int(held.seqs[i]), int(held.attempts[i]), lease.until_ms, lease.reserved_ms, lease.consumer)
            mark.open[int(held.offsets[i])] = entry
    for offset, waiting in group.waiting.items():
        mark.open[offset] = Open(0, waiting.attempt, waiting.when_ms, waits=True, error=waiting.error)
    return mark


def write(door: Door, folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the file."""
    fields = encode(checkpoint)
    door.replace(folder / FILE, bson.encode({**fields, "crc": Int64(crc32(bson.encode(fields)))}))


def encode(checkpoint: Checkpoint) -> dict[str, Any]:
    """As it is stored."""
    return {
        "reserve": [Int64(n) for n in checkpoint.reserve],
        "history": [Int64(n) for n in checkpoint.history],
        "numbers": [Int64(n) for n in checkpoint.numbers],
        "ready_offset": Int64(checkpoint.ready_offset),
        "levels": checkpoint.levels,
        "specials": checkpoint.specials,
        "notices": Int64(checkpoint.notices),
        "cancelled": pack(sorted(checkpoint.cancelled)),
        "dead": {name: Int64(count) for name, count in checkpoint.dead.items() if count},
        "groups": {name: _encode(mark) for name, mark in checkpoint.groups.items()},
    }


def _encode(mark: GroupMark) -> dict[str, Any]:
    entries = list(mark.open.values())
    return {
        "epoch": Int64(mark.epoch),
        "born": Int64(mark.born),
        "moves": pack([number for move in mark.moves for number in move]),
        "cursors": [Int64(cursor) for cursor in mark.cursors],
        "committed": Int64(min([*mark.cursors, *mark.open])),
        "unfetched": Int64(mark.unfetched),
        "settled": Int64(mark.settled),
        "changed_ms": Int64(mark.changed_ms),
        "offsets": pack(list(mark.open)),
        "seqs": pack([e.seq for e in entries]),
        "attempts": pack([e.attempt for e in entries]),
        "until": pack([e.until_ms for e in entries]),
        "reserved": pack([e.reserved_ms for e in entries]),
        "waits": pack([int(e.waits) for e in entries]),
        "consumers": [e.consumer for e in entries],
        "errors": [e.error for e in entries],
    }


def read(door: Door, folder: Path) -> Checkpoint | None:
    """The checkpoint, or None where there is none that can be trusted."""
    path = folder / FILE
    if not door.exists(path):
        return None
    try:
        fields: dict[str, Any] = bson.decode(door.read_all(path))
        check = fields.pop("crc")
        if crc32(bson.encode(fields)) != check:
            return None
        return decode(fields)
    except (bson.errors.InvalidBSON, KeyError, TypeError, ValueError):
        return None


def decode(fields: dict[str, Any]) -> Checkpoint:
    """What `encode` made."""
    return Checkpoint(
        reserve=_pair(fields["reserve"]),
        history=_pair(fields["history"]),
        numbers=_pair(fields["numbers"]),
        ready_offset=int(fields["ready_offset"]),
        levels=fields["levels"],
        specials=fields["specials"],
        notices=int(fields["notices"]),
        cancelled=set(_unpack(fields["cancelled"]).tolist()),
        dead=Counter({name: int(count) for name, count in fields["dead"].items()}),
        groups={name: _decode(entry) for name, entry in fields["groups"].items()},
    )


def _pair(values: list[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _unpack(data: bytes) -> I64:
    return np.frombuffer(data, "<i8").astype(np.int64)


def _decode(entry: dict[str, Any]) -> GroupMark:
    columns = [_unpack(entry[name]).tolist() for name in ("offsets", "seqs", "attempts", "until", "reserved", "waits")]
    rows = zip(*columns, entry["consumers"], entry["errors"], strict=True)
    return GroupMark(
        epoch=int(entry["epoch"]),
        born=int(entry["born"]),
        moves=[(int(seq), int(first)) for seq, first in _unpack(entry["moves"]).reshape(-1, 2)],
        cursors=[int(cursor) for cursor in entry["cursors"]],
        open={
            offset: Open(seq, attempt, until, reserved, consumer, bool(waits), error)
            for offset, seq, attempt, until, reserved, waits, consumer, error in rows
        },
        unfetched=int(entry["unfetched"]),
        settled=int(entry["settled"]),
        changed_ms=int(entry["changed_ms"]),
    )
