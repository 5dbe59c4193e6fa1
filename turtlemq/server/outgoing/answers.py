"""Types of answers, for the OpenAPI document.

Handlers build most answers as dicts or bytes; these types describe them. They validate nothing at run time: tests compare the
answers of a real server with the document.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from turtlemq.message_fields import FIELDS
from turtlemq.server.optional_fields import FOR_CONSUMERS, with_fields
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.outgoing.slo import SloAnswer
from turtlemq.server.topic_settings import TopicSettings
from turtlemq.topic.message_view import Moment
from turtlemq.topic.stats import GroupStats, TopicStats

StateName = Literal["sleep", "ready", "reserve", "history", "dead", "cancelled"]
PriorityName = Literal["high", "normal", "low"]


class Stored(Struct):
    """A stored batch: its ids in the order sent."""

    ids: list[str]
    created: int
    duplicates: int
    replaced: int
    rescheduled: int
    durable: Literal["fsync"]
    duplicate_indexes: list[int] | UnsetType = UNSET
    replaced_indexes: list[int] | UnsetType = UNSET
    rescheduled_indexes: list[int] | UnsetType = UNSET
    copies: int | UnsetType = UNSET
    partitions: int | UnsetType = UNSET


class Messages(Struct):
    """Fetched messages; an empty list if there were none. `paused`: there are none because the group or its topic is paused."""

    messages: list[Delivered]
    lease: str | UnsetType = UNSET
    paused: bool | UnsetType = UNSET


class Acked(Struct):
    """The answer to an ack list. `late`: only if the request named leases."""

    acked: int
    failed: int
    dead: int
    unknown: list[str]
    late: list[str] | UnsetType = UNSET


class Extended(Struct):
    """Leases that got more time. `late`: only if the request named leases."""

    extended: int
    unknown: list[str]
    late: list[str] | UnsetType = UNSET


class Body(Struct, kw_only=True):
    """A body: a JSON value, or bytes."""

    body: Any = UNSET
    body_base64: bytes | UnsetType = UNSET


class AttemptAnswer(Struct):
    """A delivery to a consumer of a group. `ended_ms` and `outcome` are null while it runs, `next_ms` if none was to follow."""

    group: str
    attempt: int
    consumer: str
    reserved_ms: int
    ended_ms: int | None
    outcome: Literal["acked", "failed", "expired", "given back", "dead"] | None
    error: str
    next_ms: int | None


@with_fields(FIELDS, None)
class MessageAnswer(Body, kw_only=True):
    """One message, with its groups, its last attempts in each and its timeline."""

    id: str
    state: StateName
    due_ms: int
    created_ms: int | UnsetType = UNSET  # unknown of a sleeper that an older version cancelled
    attempt: int
    headers: dict[str, str]
    ttr: float | None
    priority: PriorityName
    expires_ms: int | None
    groups: dict[str, dict[str, Any]]
    attempts: list[AttemptAnswer]
    timeline: list[Moment]
    at_ms: int | UnsetType = UNSET  # these three: only of a past moment
    known_from_ms: int | UnsetType = UNSET
    due_known: bool | UnsetType = UNSET


@with_fields(FIELDS, None)
class Listed(Body, kw_only=True):
    """A line of a listing. A sleeping retry, or a message that is dead, names its group."""

    id: str
    state: StateName
    due_ms: int
    created_ms: int | UnsetType = UNSET  # unknown of a sleeper that an older version cancelled
    headers: dict[str, str]
    priority: PriorityName
    expires_ms: int | None
    group: str | UnsetType = UNSET


class Listing(Struct):
    """A page of messages. `cursor` leads to the next one; a page may be short, or empty, and still have a cursor."""

    messages: list[Listed]
    cursor: str | None


class FoundMessage(Struct):
    """A message of some topic. `next_ms`: its next attempt, the earliest of all groups; null where none waits for one."""

    topic: str
    id: str
    state: str
    due_ms: int
    next_ms: int | None


class Found(Struct):
    """The messages with one id, in the order of their topics."""

    found: list[FoundMessage]


class TopicEvent(Struct, kw_only=True, omit_defaults=True):
    """Something that happened to a message, or without an id to a group. Only fields that the event has."""

    at_ms: int
    event: str
    id: str | UnsetType = UNSET
    group: str | UnsetType = UNSET
    consumer: str | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    due_ms: int | UnsetType = UNSET
    next_ms: int | UnsetType = UNSET
    error: str | UnsetType = UNSET


class Events(Struct):
    """Events in the order of time. `cursor` asks for the next ones. `missed`: there were more before these, in no file now."""

    events: list[TopicEvent]
    cursor: str
    missed: bool


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
    last_attempts: list[AttemptAnswer]


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
    """The number of cancelled messages, and the state of each that could not be cancelled."""

    cancelled: int
    missed: dict[str, str]


class Registered(Struct):
    """A client was registered. `beat_s`: how often its heartbeat is due; null: never."""

    client: str
    secret: str
    beat_s: float | None
    state: str


class Rotated(Struct):
    """A client has another secret. The old one signs as well until `old_until_ms`."""

    client: str
    secret: str
    old_until_ms: int


class ClientAnswer(Struct):
    """A registered client. `window`: the deliveries without an ack that it may have now. Fields behind `beat_ms`: of a URL."""

    client: str
    name: str
    group: str
    transport: Literal["grpc", "http"]
    state: Literal["pending", "active", "paused", "failing", "leaving"]
    capacity: int
    window: int
    unacked: int
    since_ms: int
    beat_ms: int
    url: str | UnsetType = UNSET
    ttl: int | UnsetType = UNSET
    timeout: float | UnsetType = UNSET
    at_most_once: bool | UnsetType = UNSET
    failures: int | UnsetType = UNSET
    last_error: str | UnsetType = UNSET


class ClientList(Struct):
    """Registered clients."""

    clients: list[ClientAnswer]


class Outcome(Struct):
    """The outcome of an operation, in a word."""

    outcome: str


class Changed(Struct):
    """A sleeper was changed."""

    outcome: Literal["rescheduled", "edited"]
    due_ms: int


class Paused(Struct):
    """Whether this topic, or this group itself, is paused now."""

    paused: bool


class TopicAnswer(Struct):
    """A topic."""

    topic: str
    settings: TopicSettings  # type: ignore[valid-type]  # made from the table
    stats: TopicStats
    groups: dict[str, GroupStats]
    paused: bool
    slo: SloAnswer | UnsetType = UNSET


class Topics(Struct):
    """All topics."""

    topics: list[TopicAnswer]


class GroupAnswer(Struct):
    """A group."""

    topic: str
    group: str
    stats: GroupStats


class Compacted(Struct):
    """The result of a compaction; "running": it goes on by itself."""

    outcome: Literal["compacted", "running"]
    bytes_before: int
    bytes: int
    live_ratio: float


class PinnedShard(Struct):
    """Files of a shard that are pinned for a backup."""

    name: str
    folder: str
    files: int
    bytes: int


class Pinned(Struct):
    """Files that are pinned for a backup. `shards`: of a server with several."""

    name: str
    folder: str
    files: int
    bytes: int
    shards: list[PinnedShard] = []


class Alive(Struct):
    """The process lives."""

    status: Literal["alive"]
    state: Literal["starting", "serving", "stopping"]
    version: str
    uptime_s: float


class Ready(Struct):
    """The server serves. Counts of topics, and of those with problems."""

    status: Literal["ready"]
    was_clean: bool = True
    topics: int = 0
    damaged: int = 0
    stopped: int = 0
    trouble: int = 0
    shards: int = 1
    role: str = ""  # of a node that forwards
    leader_url: str = ""


class ClusterNode(Struct):
    """A node of a cluster: `NodePlace` of the replica package, which a single node does not load."""

    url: str
    peer: str = ""
    grpc: str = ""
    zone: str = ""
    version: str = ""
    drain: bool = False
    format: int = 0
    free_bytes: int = 0
    clock_ms: int = 0


class ClusterShard(Struct):
    """A shard of a cluster: `ShardPlace` of the replica package."""

    shard: int
    epoch: int = 0
    node: str | None = None
    url: str | None = None
    isr: list[str] = []
    want: list[str] = []


class ClusterAnswer(Struct):
    """The nodes of a cluster, and the leaders of its shards: `Topology` of the replica package."""

    cluster: str
    revision: int
    shards: int
    replicas: int
    min_isr: int
    hash: str
    nodes: dict[str, ClusterNode]
    leaders: list[ClusterShard]
    topics: dict[str, int]
    problems: list[str]


class Refusal(Struct, kw_only=True):
    """The reason of a refusal, and advice. `index` is the first bad item, `state` that of the message; others may follow."""

    code: str
    message: str
    request_id: str
    index: int | UnsetType = UNSET
    state: str | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET


class Error(Struct):
    """The body of every refusal."""

    error: Refusal


class HandedOver(Struct):
    """Another node leads a shard."""

    outcome: str
    shard: int
    node: str


class Drained(Struct):
    """A node is drained, or no longer is. `leads`: shards that it led when this was noted."""

    outcome: str
    node: str
    leads: list[int]
