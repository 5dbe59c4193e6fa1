"""Types of the results of calls. Times are epoch milliseconds. Unknown fields of a newer server are ignored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from turtlemq.client.lateness_results import Slo

Outcome = Literal["created", "duplicate", "replaced", "rescheduled"]


def _outcome(created: bool | None) -> Outcome | None:
    return None if created is None else "created" if created else "duplicate"


class StoredId(str):
    """The id of a stored message: a text that also tells the outcome of the put.

    created: False if the topic knew the id already; None if the client does not know, because an answer got lost and the message
    was sent again.
    outcome: `created`; `duplicate`, if the stored message was kept; `replaced` or `rescheduled`, if `if_exists` said so; or None,
    as of `created`.

    >>> StoredId("order-17", False), StoredId("order-17", False).outcome
    ('order-17', 'duplicate')
    """

    __slots__ = ("created", "outcome")
    created: bool | None
    outcome: Outcome | None

    def __new__(cls, id_: str, created: bool | None, outcome: Outcome | None = None) -> Self:
        """A text with a flag."""
        out = super().__new__(cls, id_)
        out.created, out.outcome = created, outcome or _outcome(created)
        return out

    def __getnewargs__(self) -> tuple[str, bool | None, Outcome | None]:  # type: ignore[override]
        return str(self), self.created, self.outcome


class StoredIds(list[str]):
    """The ids of stored messages: a list that also tells the outcomes of the put. `created`, `outcomes`: by message, as of
    `StoredId`.

    >>> ids = StoredIds(["a", "b"], [True, False])
    >>> ids, ids.created, ids.duplicates
    (['a', 'b'], [True, False], ['b'])
    """

    def __init__(
        self, ids: Sequence[str] = (), created: Sequence[bool | None] = (), outcomes: Sequence[Outcome | None] | None = None
    ) -> None:
        super().__init__(ids)
        self.created = list(created)
        self.outcomes = list(map(_outcome, created)) if outcomes is None else list(outcomes)

    @property
    def duplicates(self) -> list[str]:
        """The ids that the topic knew already: these messages were not stored."""
        return self._with("duplicate")

    @property
    def replaced(self) -> list[str]:
        """The ids whose message gave way to the new one."""
        return self._with("replaced")

    @property
    def rescheduled(self) -> list[str]:
        """The ids of sleepers that got the new due time, and kept their bodies."""
        return self._with("rescheduled")

    def _with(self, wanted: Outcome) -> list[str]:
        return [id_ for id_, outcome in zip(self, self.outcomes, strict=True) if outcome == wanted]


class Acked(Struct):
    """The outcome of an ack list. `unknown`: ids that the group did not have in reserve, as after a second ack. `late`: ids that
    are held under another lease than the named one; nothing happened to them."""

    acked: int = 0
    failed: int = 0
    dead: int = 0
    unknown: list[str] = []
    late: list[str] = []


class Extended(Struct):
    """The number of extended leases; the ids that the group did not have in reserve; and those that are held under another lease
    than the named one."""

    extended: int = 0
    unknown: list[str] = []
    late: list[str] = []


class Cancelled(Struct):
    """The number of cancelled messages; the state of each other one, or `unknown`."""

    cancelled: int = 0
    missed: dict[str, str] = {}


class MessageEvent(Struct):
    """An event in the timeline of a message."""

    at_ms: int
    event: str
    group: str = ""
    detail: str = ""


class Attempt(Struct, kw_only=True):
    """A delivery of a message to a consumer of a group. `outcome` is acked, failed, expired (the lease ran out), given back, dead
    (the last one), or None while it runs. `next_ms`: when the next one was to come."""

    group: str
    attempt: int
    consumer: str = ""
    reserved_ms: int
    ended_ms: int | None = None
    outcome: str | None = None
    error: str = ""
    next_ms: int | None = None


class MessageView(Struct, kw_only=True):
    """A message as `browse` lists it, or as `get` returns it, with its groups, its last attempts in each and its timeline."""

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
    group: str = ""  # set if the message sleeps as a retry of one group
    groups: dict[str, dict[str, Any]] = {}
    attempts: list[Attempt] = []
    timeline: list[MessageEvent] = []
    at_ms: int | None = None  # the moment that was asked for; None: now
    known_from_ms: int = 0  # of a past moment: states of delivered messages are known from then on
    due_known: bool = True  # False: the due time at that moment is not known, and `due_ms` is a later one

    @property
    def body(self) -> Any:
        """The body: bytes, or the decoded JSON value."""
        return self.value if self.data is None else self.data


class Replay(Struct, kw_only=True):
    """A replay: copies of a topic's delivered messages in another topic. `scanned` of `total` documents were looked at."""

    id: str
    topic: str
    into: str
    state: str  # running, done, cancelled, failed or interrupted
    total: int
    scanned: int
    copied: int
    duplicates: int  # that the other topic knew already
    from_ms: int
    to_ms: int
    started_ms: int
    ended_ms: int | None = None
    error: str = ""


class DeadLetter(Struct, kw_only=True):
    """A message that a group has given up: its attempts are used up, or it expired."""

    id: str
    group: str
    error: str = ""
    attempts: int = 0
    last_attempts: list[Attempt] = []
    due_ms: int = 0
    created_ms: int = 0
    dropped_ms: int = 0
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    headers: dict[str, str] = {}

    @property
    def body(self) -> Any:
        """The body: bytes, or the decoded JSON value."""
        return self.value if self.data is None else self.data


class MessagePage(Struct):
    """A page of messages; `cursor` leads to the next page, None at the end."""

    messages: list[MessageView]
    cursor: str | None = None


class FoundMessage(Struct):
    """Where an id was found. `next_ms`: its next attempt, the earliest of all groups; None where none waits for one."""

    topic: str
    id: str
    state: str
    due_ms: int
    next_ms: int | None = None


class TopicEvent(Struct, kw_only=True):
    """Something that happened to a message, or without an id to a group: see `events`."""

    at_ms: int
    event: str
    id: str = ""
    group: str = ""
    consumer: str = ""
    attempt: int = 0
    due_ms: int | None = None
    next_ms: int | None = None
    error: str = ""


class EventPage(Struct):
    """Events of a topic in the order of time; `cursor` leads to the next ones. `missed`: others before these are gone."""

    events: list[TopicEvent]
    cursor: str
    missed: bool = False


class DeadLetterPage(Struct):
    """A page of dead letters; `cursor` leads to the next page, None at the end."""

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
    schedules: int = 0


class GroupStats(Struct, kw_only=True):
    """Figures of a group."""

    ready: int = 0
    reserve: int = 0
    history: int = 0
    dead: int = 0
    offset: int = 0
    lag: int = 0
    changed_ms: int = 0
    paused: bool = False
    high_weight: float = 0
    preempting: bool = False


class Topic(Struct):
    """A topic with its settings, figures and groups; `slo` if it has a goal for lateness."""

    topic: str
    settings: dict[str, Any] = {}
    stats: Stats = msgspec.field(default_factory=Stats)
    groups: dict[str, GroupStats] = {}
    paused: bool = False
    slo: Slo | None = None


class Group(Struct):
    """A group of a topic."""

    topic: str
    group: str
    stats: GroupStats = msgspec.field(default_factory=GroupStats)


class AuditEvent(Struct):
    """A change that was asked for: when, by which token (its name) from which address, and of how many messages or things.
    `target`: a group, message, node or shard."""

    at_ms: int
    token: str
    client: str
    action: str
    topic: str
    count: int
    request_id: str
    target: str = ""


class TenantFigures(Struct):
    """A tenant of the server: its part of the configuration, and its figures since the start. `refused`: requests, by the limit
    that refused them."""

    name: str
    topics: list[str]
    weight: float
    produce_per_s: float
    bytes_per_s: float
    max_in_flight: int
    max_bytes: int
    in_flight: int
    held_bytes: int
    produced: int
    produced_bytes: int
    delivered: int
    refused: dict[str, int]


class Transacted(Struct):
    """A transaction was done: the ids that were put, and how many messages were cancelled and rescheduled. `duplicates`: indexes
    of ids that the topic knew."""

    ids: list[str]
    cancelled: int = 0
    rescheduled: int = 0
    duplicates: list[int] = []


class Summary(Struct):
    """Dead letters counted by error, the most frequent first."""

    total: int
    errors: dict[str, int] = {}


class Registration(Struct):
    """A client was registered. `secret` signs its callbacks; `beat_s`: how often a heartbeat is due, None: never."""

    client: str
    secret: str
    beat_s: float | None = None
    state: str = ""


class RegisteredClient(Struct, kw_only=True):
    """A client to which the server delivers. `window`: the deliveries without an ack that it may have now. `url` and the fields
    below it are those of a callback."""

    client: str
    name: str = ""
    group: str = ""
    transport: str = ""
    state: str = ""
    capacity: int = 0
    window: int = 0
    unacked: int = 0
    since_ms: int = 0
    beat_ms: int = 0
    url: str = ""
    ttl: int = 0
    timeout: float = 0
    at_most_once: bool = False
    failures: int = 0
    last_error: str = ""


class Compacted(Struct):
    """The result of a compaction. `outcome` is `running` if it goes on in the background."""

    outcome: str
    bytes: int = 0
