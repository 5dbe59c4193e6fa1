"""The events of a Broker's two journals: their names, their fields, and how each is encoded. Pure.

An event is one BSON document. Columns of numbers are packed int64 (`pack`, `unpack`), ids are one text with NUL between them.
`offsets` are ready offsets and `seqs` the seqs of the documents there: after a power cut another document may have the same
offset, and `replay` tells by its seq that the event is not about that one.

No event is longer than `EVENT_BYTES`: an event about more messages is split into several, each about some of them.
`Journal.append` writes these as one batch, so that a crash leaves all of them or none.

The names are part of the file format (docs/FORMAT.md). Writing and reading files is in `journal`, applying events in `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import bson
import numpy as np
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from turtlemq.attempts import Attempts, decode_many, encode_many
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
STATE_PART = "state_part"  # number `part` of the `parts` of a longer checkpoint, which counts if all of them are there

# History journal
SETTLE = "settle"  # deliveries ended with an outcome, see below
CANCEL = "cancel"  # messages were cancelled while ready; `naps`: ids whose sleeping retries end as well, by group
REMOVE_DEAD = "undead"  # dead letters are about to be removed; `became`: the seqs under which they sleep again, 0 if deleted
KEEP_DEAD = "redead"  # an earlier REMOVE_DEAD is withdrawn: the disk was full

# Outcomes of SETTLE
ACKED = "acked"
DEAD = "dead"  # all attempts failed
EXPIRED = "expired"  # not delivered in time; a dead letter, too

EVENT_BYTES = 4 << 20  # of the fields of one event, nearly; a document has at most 16 MiB
SETTLED_BYTES_MAX = 1_100  # of one settled message in an event, if it has no earlier attempts
_INT64 = np.dtype("<i8")
_NONE = np.empty(0, np.int64)

Fields = dict[str, Any]
T = TypeVar("T")


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


def _size(fields: Fields) -> int:
    """The bytes of an event, nearly: of its texts and columns."""
    size = 0
    for value in fields.values():
        if isinstance(value, dict):
            size += sum(len(name) + (len(entry) if isinstance(entry, bytes) else 8) for name, entry in value.items())
        elif isinstance(value, bytes | str):
            size += len(value)
    return size


def _split(count: int, encode: Callable[[slice], Fields]) -> list[Fields]:
    """An event about `count` messages, encoded by `encode`; if it is too long, several events about some of them each."""
    pieces: list[Fields] = []
    waiting = [slice(0, count)] if count else []
    while waiting:
        rows = waiting.pop()
        fields = encode(rows)
        middle = (rows.start + rows.stop) // 2
        if middle == rows.start or _size(fields) <= EVENT_BYTES:
            pieces.append(fields)
        else:
            waiting += [slice(middle, rows.stop), slice(rows.start, middle)]
    return pieces


def group(epoch: int, offset: int, newest_seq: int) -> Fields:
    return {"event": GROUP, "epoch": Int64(epoch), "offset": Int64(offset), "since": Int64(newest_seq)}


def forget() -> Fields:
    return {"event": FORGET}


def lease(of: Group, messages: MessageColumns, until_ms: I64, consumer: str, cursors: Mapping[int, int], passed: int) -> Fields:
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


def extend(of: Group, offsets: I64, until_ms: int) -> list[Fields]:
    event = {"event": EXTEND, "epoch": Int64(of.epoch), "until": Int64(until_ms)}
    return _split(len(offsets), lambda rows: event | {"offsets": pack(offsets[rows])})


def retry(of: Group, messages: MessageColumns, attempts: I64, when_ms: I64, error: str, outcome: str = "") -> list[Fields]:
    """`attempts`: the number of each message's next delivery. `outcome`: of the delivery that ends, see `turtlemq.attempts`;
    empty if none does."""
    event = {"event": RETRY, "epoch": Int64(of.epoch), "error": error, "outcome": outcome}
    columns = {"offsets": messages.offsets, "seqs": messages.seqs, "attempts": attempts, "when": when_ms}
    return _split(len(messages), lambda rows: event | {name: pack(column[rows]) for name, column in columns.items()})


def moved(of: Group, messages: MessageColumns) -> list[Fields]:
    event, columns = {"event": MOVED, "epoch": Int64(of.epoch)}, {"offsets": messages.offsets, "seqs": messages.seqs}
    return _split(len(messages), lambda rows: event | {name: pack(column[rows]) for name, column in columns.items()})


def settle(
    of: Group,
    messages: MessageColumns,
    reserved_ms: I64,
    outcome: str,
    error: str,
    replaced: int,
    consumers: str | Sequence[str] = "",
) -> list[Fields]:
    """`replaced`: how many of the messages replaced an older dead letter, so that there is no new one to count. `consumers`: of
    the delivery of each message, or of all."""
    columns = {
        "offsets": messages.offsets,
        "seqs": messages.seqs,
        "due": messages.due_ms,
        "ready": messages.ready_ms,
        "reserved": reserved_ms,
        "attempts": messages.attempts,
    }
    event = {"event": SETTLE, "epoch": Int64(of.epoch), "replaced": Int64(replaced), "outcome": outcome, "error": error}
    earlier = of.attempts_of(messages.offsets) if of.attempts else {}
    if 0 < len(messages) * SETTLED_BYTES_MAX <= EVENT_BYTES and not earlier:  # the usual case: nothing to cut
        packed = {name: pack(column) for name, column in columns.items()}
        return [{**event, **packed, "ids": join_ids(messages.ids), **_consumers(consumers)}]

    def encode(rows: slice) -> Fields:
        return {
            **event,
            "replaced": Int64(0 if rows.start else replaced),  # counted in the first event only
            **{name: pack(column[rows]) for name, column in columns.items()},
            "ids": join_ids(messages.ids[rows]),
            **_consumers(consumers if isinstance(consumers, str) else consumers[rows]),
            **_earlier(earlier, rows),
        }

    return _split(len(messages), encode)


def _consumers(consumers: str | Sequence[str]) -> Fields:
    """The consumers of settled messages: the name of one, or all names and, for each message, the index of its own."""
    if isinstance(consumers, str):
        return {"consumers": [consumers]}
    names = {name: i for i, name in enumerate(dict.fromkeys(consumers))}
    return {"consumers": list(names)} | ({"by": pack([names[name] for name in consumers])} if len(names) > 1 else {})


def _earlier(attempts: Mapping[int, Attempts], rows: slice) -> Fields:
    """The attempts of settled messages before their last one, by row of the event; no field if none has any."""
    if not attempts:
        return {}
    own = {i - rows.start: some for i, some in attempts.items() if rows.start <= i < rows.stop}
    return {"earlier": encode_many(own)} if own else {}


def consumer_at(settled: Fields, row: int) -> str:
    """The consumer of the message in a row of a SETTLE event; empty if it is unknown, as in files of older versions."""
    names = settled.get("consumers", [""])
    return str(names[int(unpack(settled["by"])[row]) if "by" in settled else 0])


def earlier_at(settled: Fields, row: int) -> Attempts:
    """The attempts of the message in a row of a SETTLE event, before its last one."""
    return decode_many(settled["earlier"]).get(row, ()) if "earlier" in settled else ()


def cancel(
    offsets: I64,
    seqs: I64,
    retries: set[int],
    unfetched: Mapping[str, int],
    sleeping: Mapping[str, Sequence[str]],
    newest_seq: int,
) -> list[Fields]:
    """`retries`: offsets of retries of one group alone. `unfetched`: by group, how many of them its cursors had not passed.
    `sleeping`: by group, the ids whose retries sleep in the Index, with seqs up to `newest_seq`."""
    event = _cancel(offsets, seqs, retries, unfetched, sleeping, newest_seq)
    if _size(event) <= EVENT_BYTES:
        return [event]
    ahead = list(unfetched.items())
    asleep = [(name, id_) for name, of_group in sleeping.items() for id_ in of_group]

    def encode(rows: slice) -> Fields:
        return _cancel(offsets[rows], seqs[rows], retries.intersection(offsets[rows].tolist()), {}, {}, newest_seq)

    return [
        *_split(len(offsets), encode),
        *_split(len(ahead), lambda rows: _cancel(_NONE, _NONE, set(), dict(ahead[rows]), {}, newest_seq)),
        *_split(len(asleep), lambda rows: _cancel(_NONE, _NONE, set(), {}, _by_group(asleep[rows]), newest_seq)),
    ]


def _cancel(
    offsets: I64,
    seqs: I64,
    retries: set[int],
    unfetched: Mapping[str, int],
    sleeping: Mapping[str, Sequence[str]],
    newest_seq: int,
) -> Fields:
    return {
        "event": CANCEL,
        "offsets": pack(offsets),
        "seqs": pack(seqs),
        "again": pack(sorted(retries)),
        "unfetched": {name: Int64(count) for name, count in unfetched.items()},
        "naps": {name: join_ids(ids) for name, ids in sleeping.items()},
        "since": Int64(newest_seq),
    }


def _by_group(pairs: Sequence[tuple[str, T]]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return groups


def remove_dead(removals: Sequence[DeadRemoval], withdrawn: bool) -> list[Fields]:
    """`withdrawn`: the removals do not take place after all."""

    def encode(rows: slice) -> Fields:
        return {
            "event": KEEP_DEAD if withdrawn else REMOVE_DEAD,
            "ids": join_ids(removal.id for removal in removals[rows]),
            "letters": pack([removal.seq for removal in removals[rows]]),
            "became": pack([removal.requeued_seq for removal in removals[rows]]),
        }

    return _split(len(removals), encode)


# Checkpoints in the journal


def state(checkpoint: Fields) -> list[Fields]:
    """A checkpoint, in parts if it is long: it grows with the messages in flight."""
    data = bson.encode(checkpoint)
    if len(data) <= EVENT_BYTES:
        return [{"event": STATE, "state": RawBSONDocument(data)}]
    cuts = range(0, len(data), EVENT_BYTES)
    return [
        {"event": STATE_PART, "part": i, "parts": len(cuts), "data": data[at : at + EVENT_BYTES]} for i, at in enumerate(cuts)
    ]


def find_states(journal: Sequence[tuple[int, Fields]]) -> list[range]:
    """The whole checkpoints among events, given with their numbers: for each the positions of its events. A checkpoint that lacks
    a part does not count."""
    whole: list[range] = []
    parts = 0  # of the checkpoint that may become whole
    for i, (number, fields) in enumerate(journal):
        if fields["event"] == STATE:
            whole.append(range(i, i + 1))
        if fields["event"] != STATE_PART:
            parts = 0
            continue
        follows = parts > 0 and fields["part"] == parts and number == journal[i - 1][0] + 1
        parts = parts + 1 if follows else int(fields["part"] == 0)
        if parts == fields["parts"]:
            whole.append(range(i + 1 - parts, i + 1))
            parts = 0
    return whole


def join_state(parts: Sequence[Fields]) -> Fields:
    """The checkpoint in these events. Required: they are those of one whole checkpoint."""
    if parts[0]["event"] == STATE:
        return dict(parts[0]["state"])
    checkpoint: Fields = bson.decode(b"".join(part["data"] for part in parts))
    return checkpoint
