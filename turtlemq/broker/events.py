"""The events of a Broker's two journals: their names, their fields, and how each is encoded. Pure.

An event is one BSON document, however many messages it is about. Columns of numbers are packed int64 (`pack`, `unpack`), ids are
one text with NUL between them. `offsets` are ready offsets and `seqs` the seqs of the documents there: after a power cut another
document may have the same offset, and `replay` tells by its seq that the event is not about that one.

The names are part of the file format (docs/FORMAT.md). Writing and reading files is in `journal`, applying events in `replay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bson.int64 import Int64

from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.results import DeadRemoval
from turtlemq.model import I64

# Reserve journal
GROUP = "group"  # a group was created, or moved to `offset`; `since`: the newest seq of the Index at that moment
FORGET = "forget"  # a group was deleted
LEASE = "lease"  # messages were handed out; the cursors stand at `cursors` and passed `passed` messages of the group
EXTEND = "extend"  # leases last longer
RETRY = "retry"  # deliveries failed or were given back; the messages wait in memory until `when`
MOVED = "moved"  # deliveries failed; the messages sleep in the Index, as retries of their group
STATE = "state"  # a checkpoint: nothing before it need be replayed

# History journal
SETTLE = "settle"  # deliveries ended with an outcome, see below
CANCEL = "cancel"  # messages were cancelled while ready; `naps`: ids whose sleeping retries end as well, by group
REMOVE_DEAD = "undead"  # dead letters are about to be removed; `became`: the seqs under which they sleep again, 0 if deleted
KEEP_DEAD = "redead"  # an earlier REMOVE_DEAD is withdrawn: the disk was full

# Outcomes of SETTLE
ACKED = "acked"
DEAD = "dead"  # all attempts failed
EXPIRED = "expired"  # not delivered in time; a dead letter, too

_INT64 = np.dtype("<i8")


def pack(values: I64 | list[int]) -> bytes:
    """A column of numbers as bytes."""
    return np.asarray(values, _INT64).tobytes()


def unpack(data: bytes) -> I64:
    """The column of numbers that `pack` encoded."""
    return np.frombuffer(data, _INT64).astype(np.int64)


def join_ids(ids: Iterable[str]) -> bytes:
    """Ids as one text."""
    return "\0".join(ids).encode()


def split_ids(data: bytes) -> list[str]:
    """The ids that `join_ids` joined; at least one."""
    return data.decode().split("\0")


def group(epoch: int, offset: int, newest_seq: int) -> dict[str, Any]:
    return {"event": GROUP, "epoch": Int64(epoch), "offset": Int64(offset), "since": Int64(newest_seq)}


def forget() -> dict[str, Any]:
    return {"event": FORGET}


def lease(
    of: Group, messages: MessageColumns, until_ms: I64, consumer: str, cursors: Mapping[int, int], passed: int
) -> dict[str, Any]:
    return {
        "event": LEASE,
        "epoch": Int64(of.epoch),
        "consumer": consumer,
        "cursors": [Int64(cursors[level]) for level in sorted(cursors)],
        "passed": Int64(passed),
        "offsets": pack(messages.offsets),
        "seqs": pack(messages.seqs),
        "attempts": pack(messages.attempts),
        "until": pack(until_ms),
    }


def extend(of: Group, offsets: I64, until_ms: int) -> dict[str, Any]:
    return {"event": EXTEND, "epoch": Int64(of.epoch), "offsets": pack(offsets), "until": Int64(until_ms)}


def retry(of: Group, messages: MessageColumns, attempts: I64, when_ms: I64, error: str) -> dict[str, Any]:
    """`attempts`: the number of each message's next delivery."""
    return {
        "event": RETRY,
        "epoch": Int64(of.epoch),
        "offsets": pack(messages.offsets),
        "seqs": pack(messages.seqs),
        "attempts": pack(attempts),
        "when": pack(when_ms),
        "error": error,
    }


def moved(of: Group, messages: MessageColumns) -> dict[str, Any]:
    return {"event": MOVED, "epoch": Int64(of.epoch), "offsets": pack(messages.offsets), "seqs": pack(messages.seqs)}


def settle(of: Group, messages: MessageColumns, reserved_ms: I64, outcome: str, error: str, replaced: int) -> dict[str, Any]:
    """`replaced`: how many of the messages replaced an older dead letter, so that there is no new one to count."""
    return {
        "event": SETTLE,
        "epoch": Int64(of.epoch),
        "replaced": Int64(replaced),
        "outcome": outcome,
        "offsets": pack(messages.offsets),
        "seqs": pack(messages.seqs),
        "due": pack(messages.due_ms),
        "ready": pack(messages.ready_ms),
        "reserved": pack(reserved_ms),
        "attempts": pack(messages.attempts),
        "ids": join_ids(messages.ids),
        "error": error,
    }


def cancel(
    offsets: I64, seqs: I64, retries: set[int], unfetched: Mapping[str, list[int]], sleeping: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """`retries`: offsets of retries of one group alone. `unfetched`: by group, the offsets that its cursors had not passed.
    `sleeping`: by group, the ids whose retries sleep in the Index."""
    return {
        "event": CANCEL,
        "offsets": pack(offsets),
        "seqs": pack(seqs),
        "again": pack(sorted(retries)),
        "unfetched": {name: pack(offsets) for name, offsets in unfetched.items()},
        "naps": {name: join_ids(ids) for name, ids in sleeping.items()},
    }


def remove_dead(removals: Sequence[DeadRemoval], withdrawn: bool) -> dict[str, Any]:
    """`withdrawn`: the removals do not take place after all."""
    return {
        "event": KEEP_DEAD if withdrawn else REMOVE_DEAD,
        "ids": join_ids(removal.id for removal in removals),
        "letters": pack([removal.seq for removal in removals]),
        "became": pack([removal.requeued_seq for removal in removals]),
    }


def state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {"event": STATE, "state": checkpoint}
