"""Everything that exists in TurtleMQ, on one page: limits, what producers hand in, what comes due, what is known of a message.

Units stand last in names: `_ms` are epoch milliseconds or durations in milliseconds, `_bytes` are bytes.
What is on disk is described in docs/FORMAT.md and `turtlemq.segment.format`; nothing here knows a file. The settings of a topic
are in `turtlemq.settings`.
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
DUE_MS_MAX = (1 << 42) - 2  # May 2109: what is left of 64 bits beside the ordinal, less one for an upper bound
TTR_MS_MAX = (1 << 31) - 1  # 24.8 days
ID_BYTES_MAX = 200
BODY_BYTES_MAX = 16 * 1024 * 1024 - 64 * 1024  # a whole document stays under BSON's customary 16 MiB
HEADERS_BYTES_MAX = 32 * 1024
BATCH_MESSAGES_MAX = 100_000
BATCH_BYTES_MAX = 256 * 1024 * 1024
RUN_MESSAGES = 262_144  # the active segment's index reaches disk this often; recovery scans at most this much
SEQ_MAX = (1 << 63) - 1


class Priority(IntEnum):
    """As stored in the low bits of a document's flags."""

    NORMAL = 0
    HIGH = 1
    LOW = 2


class State(StrEnum):
    """Where a message is, as far as the Index can tell. UNKNOWN: no file of the topic's Index holds it."""

    SLEEP = "sleep"
    READY = "ready"  # handed off to the broker
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Message(OptionalFields):
    """One message as a producer gives it. Many of them travel as the columns of a `Batch`."""

    body: bytes
    due_ms: int
    id: str | None = None  # None: the server gives one
    ttr_ms: int = 0  # time to run; 0: the topic's default
    priority: Priority = Priority.NORMAL
    json: bool = False  # the body is JSON text and is given back as that JSON value


@dataclass(slots=True)
class Batch(OptionalColumns):
    """Messages as columns, so that no object exists for each. Columns that are None hold their default everywhere."""

    bodies: Sequence[bytes]
    due_ms: Sequence[int] | I64
    ids: Sequence[str | None] | None = None
    ttr_ms: Sequence[int] | None = None
    flags: Sequence[int] | int | None = None  # priority and JSON bits, see turtlemq.segment.format; one number: for all

    def __len__(self) -> int:
        return len(self.bodies)


@dataclass(slots=True)
class Receipt:
    """The answer to a batch: ids in the order sent; `created` tells for each whether it was stored or was there already."""

    given: list[str] | U8  # ids; a row each where the server gave them to many
    created: list[bool]

    def __len__(self) -> int:
        return len(self.created)

    @property
    def ids(self) -> list[str]:
        """The ids as texts."""
        if isinstance(self.given, list):
            return self.given
        text, width = self.given.tobytes().decode(), self.given.shape[1]
        return [text[at : at + width] for at in range(0, len(text), width)]

    @property
    def duplicates(self) -> int:
        return self.created.count(False)


@dataclass(frozen=True, slots=True)
class Mark:
    """Every message that arrived up to `seq_max` and sorts at or before (due_ms, seq) was handed off."""

    seq_max: int
    due_ms: int
    seq: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What was handed off so far: marks with rising `seq_max` and falling (due_ms, seq). Usually one, see docs/decisions/0002."""

    marks: tuple[Mark, ...] = ()

    def add(self, mark: Mark) -> Progress:
        """Progress after one more handoff. Marks that the new one implies are dropped.

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
        """Which of these were handed off. O(marks) array operations."""
        out = np.zeros(len(due_ms), dtype=np.bool_)
        for m in self.marks:
            out |= (seq <= m.seq_max) & ((due_ms < m.due_ms) | ((due_ms == m.due_ms) & (seq <= m.seq)))
        return out

    def covers_one(self, due_ms: int, seq: int) -> bool:
        """`covers` for a single message."""
        return any(seq <= m.seq_max and (due_ms, seq) <= (m.due_ms, m.seq) for m in self.marks)

    @property
    def seq_max(self) -> int:
        """The newest arrival that any mark speaks of: numbers up to here must never be given out again."""
        return max((m.seq_max for m in self.marks), default=0)


@dataclass(frozen=True, slots=True)
class Due:
    """What came due: the documents as they lie in the segments, checked, in order of (due, arrival)."""

    raw: bytes
    starts: I64  # where each document begins in `raw`
    due_ms: I64
    seq: I64
    progress: Progress  # what is handed off once this batch is
    more: bool  # something else is due at the same `now`
    moves: list[Any] = field(default_factory=list, repr=False)  # how `Index.advance` moves its cursors
    hashes: U64 | None = None  # of the ids, where they need not be computed

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what was written. They are never served; everything around them is."""

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
    """One message, decoded."""

    id: str
    state: State
    due_ms: int
    created_ms: int
    seq: int
    ttr_ms: int
    flags: int
    body: bytes
    group: str = ""  # it sleeps for another attempt of this group alone


@dataclass(frozen=True, slots=True)
class Forecast:
    """How much comes due when: counts[i] are due in [from_ms + i * bucket_ms, from_ms + (i + 1) * bucket_ms)."""

    from_ms: int
    bucket_ms: int
    counts: list[int]
    overdue: int
    beyond: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one topic's Index, kept as it works: reading them costs O(segments)."""

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
    """What the compaction policy looks at: one segment that takes no more writes."""

    base: int
    bytes: int
    documents: int
    live: int
    sealed: bool


@dataclass(slots=True)
class Counters:
    """Totals since the topic was opened; they only rise."""

    appended: int = 0
    duplicates: int = 0
    handed_off: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    moved: int = 0
    retried: int = 0
    seals: int = 0
    segments_dropped: int = 0
    bytes_dropped: int = 0  # of those segments
    damage: list[Damage] = field(default_factory=list)

    def add(self, name: str, count: int) -> None:
        """Raise the counter called `name`."""
        setattr(self, name, getattr(self, name) + count)
