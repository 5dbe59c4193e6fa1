"""All types of the engine on one page: limits, messages and batches, handoffs, stored messages, figures, damage.

Units stand last in names: `_ms` are epoch milliseconds or durations in milliseconds, `_bytes` are bytes. Nothing here knows a
file: the bytes on disk are described in docs/FORMAT.md and `turtlemq.segment.format`. The optional fields of a message are in
`turtlemq.message_fields`, the settings of a topic in `turtlemq.settings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from turtlemq.message_fields import OptionalColumns, OptionalFields, StoredFields

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Limits. Each is refused with an error that names it, never cut silently.
ORDINAL_BITS = 22  # a packed key is due_ms << 22 | ordinal, so a segment holds at most 4,194,304 documents
SEGMENT_MESSAGES_MAX = 1 << ORDINAL_BITS
SEQ_COUNTER_BITS = 20  # a seq is wall-clock ms << 20 | counter: 43 bits of time last longer than any due time
SEGMENT_BYTES_DEFAULT = 1 << 30
SEGMENT_BYTES_MIN = 4096
DUE_MS_MAX = (1 << 42) - 2  # May 2109: 64 bits less those of the ordinal, less one for an upper bound
SPREAD_MS_MAX = 31 * 86_400_000  # below 2^32: see turtlemq.topic.spread
TTR_MS_MAX = (1 << 31) - 1  # 24.8 days
ID_BYTES_MAX = 200
BODY_BYTES_MAX = 16 * 1024 * 1024 - 64 * 1024  # a whole document stays under BSON's customary 16 MiB
HEADERS_BYTES_MAX = 32 * 1024
BATCH_MESSAGES_MAX = 100_000
BATCH_BYTES_MAX = 256 * 1024 * 1024
VERSIONS_MAX = 1_000  # messages of a batch with `if_exists`: staged at once, 20 to 40 ms
KEPT_BYTES_MAX = 16 * 1024 * 1024  # stored bodies that such a batch copies: of the messages that it reschedules
RUN_MESSAGES = 262_144  # the active segment's index reaches disk this often; recovery scans at most this much
SEQ_MAX = (1 << 63) - 1


class Priority(IntEnum):
    """As stored in the low bits of a document's flags."""

    NORMAL = 0
    HIGH = 1
    LOW = 2


class State(StrEnum):
    """The state of a message, as far as the Index can tell. UNKNOWN: no file of the topic's Index holds it."""

    SLEEP = "sleep"
    READY = "ready"  # handed off to the Broker
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Message(OptionalFields):
    """One message as a producer gives it. Many of them travel as the columns of a `Batch`."""

    body: bytes
    due_ms: int
    id: str | None = None  # None: the server gives one
    ttr_ms: int = 0  # length of a lease; 0: the topic's default
    priority: Priority = Priority.NORMAL
    json: bool = False  # the body is JSON text, and consumers get it as a JSON value


@dataclass(slots=True)
class Batch(OptionalColumns):
    """Messages as columns, without an object for each. A column that is None holds the default in every row."""

    bodies: Sequence[bytes]
    due_ms: Sequence[int] | I64
    ids: Sequence[str | None] | None = None
    ttr_ms: Sequence[int] | None = None
    flags: Sequence[int] | int | None = None  # priority and JSON bits, see turtlemq.segment.format; one number: for all
    if_exists: Sequence[int] | int | None = None  # see turtlemq.if_exists; one number: for all; None: keep
    spread_ms: Sequence[int | None] | None = None  # see turtlemq.topic.spread; None: as the topic's setting says

    def __len__(self) -> int:
        return len(self.bodies)


@dataclass(slots=True)
class CheckedBatch(Batch):
    """A batch within all limits, with ids and optional fields encoded: see `turtlemq.index.validate.checked`."""

    raw_ids: list[bytes] = field(default_factory=list)  # empty for a message without an id
    own_ids: frozenset[bytes] = frozenset()  # all but the empty ones
    hashes: U64 = field(default_factory=lambda: np.empty(0, np.uint64))  # of the ids; 0 for a message without
    lacks_ids: bool = False  # of some of its messages
    are_new: bool = False  # no id in it is held, nor stands in it twice
    elements: tuple[list[int], list[bytes]] | None = None  # flags and elements of each message; None: no optional fields


@dataclass(slots=True)
class Receipt:
    """The answer to a batch, in the order of its messages."""

    given: list[str] | U8  # ids; in a large batch to which the server gave ids, one row of bytes for each
    created: list[bool]  # False: it replaced or rescheduled a message of its id, or is a duplicate of it
    replaced: Sequence[int] = ()  # indexes of messages that replaced another
    rescheduled: Sequence[int] = ()  # indexes of messages whose due time another one got

    def __len__(self) -> int:
        return len(self.created)

    @property
    def ids(self) -> list[str]:
        """The ids as texts."""
        return self.ids_of(0, len(self))

    def ids_of(self, first: int, last: int) -> list[str]:
        """The ids of some messages, from `first` up to but not including `last`."""
        given = self.given[first:last]
        if isinstance(given, list):
            return given
        text, width = given.tobytes().decode(), given.shape[1]
        return [text[at : at + width] for at in range(0, len(text), width)]

    @property
    def duplicates(self) -> int:
        return self.created.count(False) - len(self.replaced) - len(self.rescheduled)


@dataclass(frozen=True, slots=True)
class Mark:
    """Every message that arrived up to `seq_max` and sorts at or before (due_ms, seq) was handed off."""

    seq_max: int
    due_ms: int
    seq: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The handoffs so far: marks with rising `seq_max` and falling (due_ms, seq). Usually one mark; see docs/decisions/0002."""

    marks: tuple[Mark, ...] = ()

    def add(self, mark: Mark) -> Progress:
        """The progress after one more handoff. Marks that the new one implies are dropped.

        >>> Progress().add(Mark(5, 10, 5)).add(Mark(9, 20, 7)).marks
        (Mark(seq_max=9, due_ms=20, seq=7),)
        >>> len(Progress().add(Mark(5, 20, 5)).add(Mark(9, 10, 7)).marks)
        2
        """
        kept = [m for m in self.marks if m.seq_max > mark.seq_max or (m.due_ms, m.seq) > (mark.due_ms, mark.seq)]
        if any(m.seq_max >= mark.seq_max and (m.due_ms, m.seq) >= (mark.due_ms, mark.seq) for m in kept):
            return Progress(tuple(kept))
        return Progress((*kept, mark))

    def covers(self, due_ms: I64, seq: I64) -> Mask:
        """Which of many messages were handed off. O(marks) array operations."""
        out = np.zeros(len(due_ms), dtype=np.bool_)
        for m in self.marks:
            out |= (seq <= m.seq_max) & ((due_ms < m.due_ms) | ((due_ms == m.due_ms) & (seq <= m.seq)))
        return out

    def covers_one(self, due_ms: int, seq: int) -> bool:
        """Was one message handed off?"""
        return any(seq <= m.seq_max and (due_ms, seq) <= (m.due_ms, m.seq) for m in self.marks)

    @property
    def seq_max(self) -> int:
        """The newest seq that a mark names. Seqs up to it must never be given out again."""
        return max((m.seq_max for m in self.marks), default=0)


@dataclass(frozen=True, slots=True)
class Due:
    """Due messages: their documents with the bytes of the segments, checked, in order of (due, arrival)."""

    raw: bytes
    starts: I64  # where each document begins in `raw`
    due_ms: I64
    seq: I64
    progress: Progress  # after this handoff
    more: bool  # more messages are due at the same `now`
    flags: int  # that any of the documents has
    moves: list[Any] = field(default_factory=list, repr=False)  # the new positions of cursors, for `Index.advance`
    hashes: U64 | None = None  # of the ids, if the Index has them at hand

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that differ from those that were written, or are lost. They are never served; everything around them is."""

    file: str
    position: int
    length: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.length} bytes at position {self.position}: {self.reason}; they are left out and the rest "
            "is served. Restore the file from a backup or a replica if the messages are needed."
        )


@dataclass(frozen=True, slots=True)
class StoredMessage(StoredFields):
    """A message that the Index holds, decoded."""

    id: str
    state: State
    due_ms: int
    created_ms: int
    seq: int
    ttr_ms: int
    flags: int
    body: bytes
    group: str = ""  # a sleeping retry of this group


@dataclass(frozen=True, slots=True)
class Forecast:
    """Numbers of sleepers by due time: counts[i] are due in [from_ms + i * bucket_ms, from_ms + (i + 1) * bucket_ms)."""

    from_ms: int
    bucket_ms: int
    counts: list[int]
    overdue: int
    beyond: int


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Figures of an Index, from counters: reading them costs O(segments)."""

    sleep: int
    handed_off: int
    cancelled: int
    bytes: int
    segments: int
    live_ratio: float
    next_due_ms: int | None
    damaged: int


@dataclass(frozen=True, slots=True)
class SegmentLoad:
    """The figures of one segment, for the policy of maintenance."""

    base: int
    bytes: int
    documents: int
    live: int  # sleepers, and tombstones that may be needed
    sealed: bool


@dataclass(slots=True)
class Counters:
    """Counters of an Index since the topic was opened. They only rise."""

    appended: int = 0
    duplicates: int = 0
    replaced: int = 0  # put anew under an id that was known
    handed_off: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    moved: int = 0  # copied by compaction
    retried: int = 0  # sleeping retries
    seals: int = 0
    segments_dropped: int = 0
    bytes_dropped: int = 0  # of those segments
    damage: list[Damage] = field(default_factory=list)

    def add(self, name: str, count: int) -> None:
        """Raise the counter called `name`."""
        setattr(self, name, getattr(self, name) + count)
