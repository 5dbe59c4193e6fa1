"""The shapes of answers that are put together from several things.

Nothing is validated with them at run time: the OpenAPI document is made from them, and tests hold answers against that document.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from turtlemq.message_fields import FIELDS
from turtlemq.server.optional_fields import FOR_CONSUMERS, with_fields
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.topic_settings import TopicSettings
from turtlemq.topic.message_view import Moment
from turtlemq.topic.stats import GroupStats, TopicStats

StateName = Literal["sleep", "ready", "reserve", "history", "dead", "cancelled"]
PriorityName = Literal["high", "normal", "low"]


class Stored(Struct):
    """A batch is durable: ids in the order sent."""

    ids: list[str]
    created: int
    duplicates: int
    durable: Literal["fsync"]


class Messages(Struct):
    """What a fetch brought; nothing is an empty list."""

    messages: list[Delivered]


class Extended(Struct):
    """Leases that got more time."""

    extended: int
    unknown: list[str]


class Body(Struct, kw_only=True):
    """A body: a JSON value, or bytes."""

    body: Any = UNSET
    body_base64: bytes | UnsetType = UNSET


@with_fields(FIELDS, None)
class MessageAnswer(Body, kw_only=True):
    """Everything about one message."""

    id: str
    state: StateName
    due_ms: int
    created_ms: int
    attempt: int
    headers: dict[str, str]
    ttr: float | None
    priority: PriorityName
    expires_ms: int | None
    groups: dict[str, dict[str, Any]]
    timeline: list[Moment]


@with_fields(FIELDS, None)
class Listed(Body, kw_only=True):
    """A line of a listing; one that sleeps before another attempt of a group, or is dead in one, names it."""

    id: str
    state: StateName
    due_ms: int
    created_ms: int
    headers: dict[str, str]
    priority: PriorityName
    expires_ms: int | None
    group: str | UnsetType = UNSET


class Listing(Struct):
    """A page of messages; `cursor` asks for the next one. A page may be short, or empty, though there is a next one."""

    messages: list[Listed]
    cursor: str | None


@with_fields(FOR_CONSUMERS, None)
class Letter(Body, kw_only=True):
    """A dead letter."""

    id: str
    group: str
    headers: dict[str, str]
    due_ms: int
    created_ms: int
    dropped_ms: int
    attempts: int
    error: str


class Letters(Struct):
    """A page of dead letters."""

    messages: list[Letter]
    cursor: str | None


class Causes(Struct):
    """Dead letters by error, the most common first."""

    total: int
    errors: dict[str, int]


class Requeued(Struct):
    """Dead letters that sleep again."""

    requeued: int
    unknown: list[str]


class Deleted(Struct):
    """Dead letters that are gone."""

    deleted: int
    unknown: list[str]


class Cancelled(Struct):
    """Messages that will never come, and the state of each that could not be cancelled."""

    cancelled: int
    missed: dict[str, str]


class Outcome(Struct):
    """What was done."""

    outcome: str


class Changed(Struct):
    """A sleeper was changed."""

    outcome: Literal["rescheduled", "edited"]
    due_ms: int


class TopicAnswer(Struct):
    """A topic."""

    topic: str
    settings: TopicSettings  # type: ignore[valid-type]  # made from the table
    stats: TopicStats
    groups: dict[str, GroupStats]


class Topics(Struct):
    """All topics."""

    topics: list[TopicAnswer]


class GroupAnswer(Struct):
    """A group."""

    topic: str
    group: str
    stats: GroupStats


class Compacted(Struct):
    """What compaction freed; "running": it goes on by itself."""

    outcome: Literal["compacted", "running"]
    bytes_before: int
    bytes: int
    live_ratio: float


class Pinned(Struct):
    """Files that are kept for a backup."""

    name: str
    folder: str
    files: int
    bytes: int


class Alive(Struct):
    """The process lives."""

    status: Literal["alive"]
    state: Literal["starting", "serving", "stopping"]
    version: str
    uptime_s: float


class Ready(Struct):
    """It serves; topics that are not well are counted."""

    status: Literal["ready"]
    was_clean: bool
    topics: int
    damaged: int
    stopped: int
    trouble: int


class Refusal(Struct, kw_only=True):
    """What is wrong and what to do. `index` is the first bad item, `state` the one that a message is in; others may come."""

    code: str
    message: str
    request_id: str
    index: int | UnsetType = UNSET
    state: str | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET


class Error(Struct):
    """Every refusal."""

    error: Refusal
