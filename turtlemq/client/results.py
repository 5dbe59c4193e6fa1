"""What calls bring back, as types. Times are epoch milliseconds. Fields that a newer server adds are passed over. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Acked(Struct):
    """What became of an ack list. `unknown`: ids that the group did not hold in reserve, as after a second ack."""

    acked: int = 0
    failed: int = 0
    dead: int = 0
    unknown: list[str] = []


class Extended(Struct):
    """How many leases were extended, and ids that the group does not hold any more."""

    extended: int = 0
    unknown: list[str] = []


class Cancelled(Struct):
    """How many were cancelled; of the others, the state they are in, or `unknown`."""

    cancelled: int = 0
    missed: dict[str, str] = {}


class Moment(Struct):
    """Something that happened to a message."""

    at_ms: int
    event: str
    group: str = ""
    detail: str = ""


class Look(Struct, kw_only=True):
    """A message that is looked at: a sleeper of a listing, or one with its whole story."""

    id: str
    state: str
    due_ms: int
    created_ms: int = 0
    attempt: int = 0
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    headers: dict[str, str] = {}
    ttr: float | None = None
    priority: str = "normal"
    expires_ms: int | None = None
    group: str = ""  # of a sleeper that one group is to try again
    groups: dict[str, dict[str, Any]] = {}
    timeline: list[Moment] = []

    @property
    def body(self) -> Any:
        """Bytes as bytes, a JSON value as what it stands for."""
        return self.value if self.data is None else self.data


class DeadLetter(Struct, kw_only=True):
    """A message that one group could not handle."""

    id: str
    group: str
    error: str = ""
    attempts: int = 0
    due_ms: int = 0
    created_ms: int = 0
    dropped_ms: int = 0
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    headers: dict[str, str] = {}

    @property
    def body(self) -> Any:
        """Bytes as bytes, a JSON value as what it stands for."""
        return self.value if self.data is None else self.data


class Looks(Struct):
    """A page of messages; `cursor` asks for the next one."""

    messages: list[Look]
    cursor: str | None = None


class DeadLetters(Struct):
    """A page of dead letters; `cursor` asks for the next one."""

    messages: list[DeadLetter]
    cursor: str | None = None


class Stats(Struct, kw_only=True):
    """Figures of a topic."""

    sleep: int = 0
    ready: int = 0
    reserve: int = 0
    history: int = 0
    dead: int = 0
    cancelled: int = 0
    bytes: int = 0
    segments: int = 0
    live_ratio: float = 1.0
    oldest_ready_ms: int | None = None
    next_due_ms: int | None = None


class GroupStats(Struct, kw_only=True):
    """Figures of a group."""

    ready: int = 0
    reserve: int = 0
    history: int = 0
    dead: int = 0
    offset: int = 0
    lag: int = 0
    changed_ms: int = 0


class Topic(Struct):
    """A topic: what is set, and what is in it."""

    topic: str
    settings: dict[str, Any] = {}
    stats: Stats = msgspec.field(default_factory=Stats)
    groups: dict[str, GroupStats] = {}


class Group(Struct):
    """A group of a topic."""

    topic: str
    group: str
    stats: GroupStats = msgspec.field(default_factory=GroupStats)


class Forecast(Struct):
    """How many messages come due in each bucket from `from_ms` on, before it, and after the last."""

    bucket_ms: int
    from_ms: int
    counts: list[int]
    overdue: int = 0
    beyond: int = 0


class Summary(Struct):
    """Dead letters counted by error, the most frequent first."""

    total: int
    errors: dict[str, int] = {}


class Compacted(Struct):
    """What compaction did. `outcome` is `running` where it goes on by itself."""

    outcome: str
    bytes: int = 0
