"""The settings of a topic, as one table: each field of `Settings` carries its default, limits, name over HTTP and description.

Derived from the table: `check_settings`, the keys of topic.toml, the types that validate PUT /v1/topics/{topic} and the answers
(`server.topic_settings`), the limits in the OpenAPI document, and the table in docs/CONFIGURATION.md. Adding a setting means
adding one field here; docs/ARCHITECTURE.md has the recipe. Units stand last in names; milliseconds here are seconds over HTTP.

The server's own settings (ports, tokens, limits of requests) do not live here but in `server.config`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from turtlemq.errors import InvalidArgument
from turtlemq.model import (
    DUE_MS_MAX,
    RUN_MESSAGES,
    SEGMENT_BYTES_DEFAULT,
    SEGMENT_BYTES_MIN,
    SEGMENT_MESSAGES_MAX,
    SPREAD_MS_MAX,
    TTR_MS_MAX,
)
from turtlemq.storage.names import SHARDS_MAX

RATE_MAX = 1e9  # a second: more than any machine does
RATE_MIN = 0.001  # one message in a quarter of an hour; a lower rate would be a queue that stands still
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Limits:
    """The values that a setting may have: numbers from `low` to `high`, or one of `words`."""

    low: float = 0
    high: float = 0
    least: float = 0  # of a number that is not 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: Any
    limits: Limits
    path: tuple[str, ...]  # over HTTP: ("backoff", "base"); () where HTTP does not offer it
    text: str

    @property
    def in_seconds(self) -> bool:
        """Whether it is milliseconds here and seconds over HTTP."""
        return self.name.endswith("_ms") and not self.http_name.endswith(("_ms", ".ms"))

    @property
    def http_name(self) -> str:
        return ".".join(self.path)


def _number(default: Number, low: float, high: float, http: str, text: str, least: float = 0) -> Number:
    return field(default=default, metadata={"limits": Limits(low, high, least), "http": http, "text": text})


def _word(default: str, words: tuple[str, ...], http: str, text: str) -> str:
    return field(default=default, metadata={"limits": Limits(words=words), "http": http, "text": text})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one topic; kept in topic.toml. A name over HTTP with a dot belongs to a section of the request."""

    ttr_ms: int = _number(
        60_000, 1, TTR_MS_MAX, "ttr", "seconds that a consumer may take for a message that does not set its own `ttr`"
    )
    max_attempts: int = _number(16, 1, 1_000_000, "max_attempts", "deliveries before a message becomes a dead letter")
    backoff_base_ms: int = _number(1_000, 0, TTR_MS_MAX, "backoff.base", "seconds before the second attempt")
    backoff_factor: float = _number(2.0, 1, 1_000, "backoff.factor", "each further wait is longer by this factor")
    backoff_max_ms: int = _number(3_600_000, 0, 1 << 40, "backoff.max", "seconds before an attempt at most")
    backoff_jitter: str = _word(
        "equal", ("none", "equal", "full"), "backoff.jitter", "which part of the wait is random: none, one half, all of it"
    )
    history_hours: float = _number(
        168, 0, 1e7, "retention.history_hours", "how long acknowledged messages are kept, and can be replayed"
    )
    history_bytes: int = _number(
        1 << 40, 0, 1 << 60, "retention.history_bytes", "how many bytes the ready, reserve and history files may have together"
    )
    dead_ttl_hours: float = _number(720, 0, 1e7, "dead.ttl_hours", "how long dead letters are kept")
    dead_max_count: int = _number(1_000_000, 0, 1 << 40, "dead.max_count", "how many dead letters are kept")
    rate_produce_per_s: float = _number(
        0, 0, RATE_MAX, "rate.produce_per_s", "messages a second that are taken in; 0: no limit", RATE_MIN
    )
    rate_burst: int = _number(
        0, 0, 1 << 40, "rate.burst", "messages that may come at once after a quiet time; 0: those of one second"
    )
    rate_deliver_per_s: float = _number(
        0, 0, RATE_MAX, "rate.deliver_per_s", "messages a second that are given to each group; 0: no limit", RATE_MIN
    )
    rate_deliver_bytes_per_s: float = _number(
        0, 0, 1e12, "rate.deliver_bytes_per_s", "bytes of messages a second that are given to each group; 0: no limit", 1
    )
    lateness_slo_ms: int = _number(
        0, 0, TTR_MS_MAX, "lateness_slo.ms", "milliseconds from due to the first delivery that are in time; 0: no goal"
    )
    lateness_slo_share: float = _number(0.99, 0.5, 0.99999, "lateness_slo.share", "the share of messages that should be in time")
    max_delay_ms: int = _number(
        0, 0, DUE_MS_MAX, "max_delay", "seconds that a message may sleep; 0: as long as the server allows"
    )
    spread_ms: int = _number(
        0,
        0,
        SPREAD_MS_MAX,
        "spread",
        "seconds over which messages that are due at one time are spread; 0: none",
    )
    priority_high: int = _number(6, 0, 1_000, "priority.high", "share of each fetch for messages of high priority")
    priority_normal: int = _number(3, 0, 1_000, "priority.normal", "share of messages of normal priority")
    priority_low: int = _number(
        1, 0, 1_000, "priority.low", "share of messages of low priority; 0: they get leftovers of the others"
    )
    priority_high_p95_ms: int = _number(
        0,
        0,
        3_600_000,
        "priority.high_p95_ms",
        "milliseconds that messages of high priority wait at most, 95 of 100: their share rises and falls for it; 0: it stays",
    )
    preempt_after_ms: int = _number(
        50,
        0,
        3_600_000,
        "preempt.after_ms",
        "milliseconds that a ready message of high priority waits before the others give way; 0: never",
    )
    preempt_floor: float = _number(
        0.05, 0, 0.5, "preempt.floor", "part of each fetch that low and normal priority keep each when they give way"
    )
    segment_bytes: int = _number(
        SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_MIN, (1 << 32) - 1, "segment_bytes", "size of a segment file"
    )
    segment_messages: int = _number(SEGMENT_MESSAGES_MAX, 1, SEGMENT_MESSAGES_MAX, "", "documents in a segment file")
    run_messages: int = _number(RUN_MESSAGES, 1, SEGMENT_MESSAGES_MAX, "", "documents in a table of the active segment")
    compact_live_ratio: float = _number(
        0.05, 0, 0.9, "compact_live_ratio", "a segment with a smaller share of sleeping messages is compacted"
    )
    max_in_flight: int = _number(100_000, 1, 1_000_000, "max_in_flight", "reserved messages of one group")
    delivery: str = _word(
        "at-least-once",
        ("at-least-once", "at-most-once"),
        "delivery",
        "`at-most-once`: a fetched message counts as acknowledged at once",
    )
    ack_durability: str = _word(
        "beat",
        ("beat", "fsync"),
        "ack_durability",
        "`beat`: a power cut may undo the acks since the last beat; `fsync`: it undoes none",
    )
    group_expire_hours: float = _number(
        0, 0, 1e7, "group_expire_hours", "a group without any request, or a waiting one, for so long is forgotten; 0: never"
    )
    beat_ms: int = _number(5_000, 10, 60_000, "beat", "seconds between two syncs of deliveries and acks")
    partitions: int = _number(
        1, 1, SHARDS_MAX, "partitions", "shards of the server that share the messages; stays as it was when the topic was made"
    )

    @property
    def in_flight_share(self) -> int:
        """`max_in_flight` of one partition."""
        return max(1, self.max_in_flight // self.partitions)


def _rows() -> tuple[Setting, ...]:
    kinds = get_type_hints(Settings)
    return tuple(
        Setting(
            name=one.name,
            kind=kinds[one.name],
            default=one.default,
            limits=one.metadata["limits"],
            path=tuple(filter(None, one.metadata["http"].split("."))),
            text=one.metadata["text"],
        )
        for one in fields(Settings)
    )


TABLE = _rows()
LIMITS = {row.name: row.limits for row in TABLE}


def check_settings(settings: Settings) -> Settings:
    """The settings themselves, if each is within its limits.

    >>> check_settings(Settings(max_attempts=3)).max_attempts
    3
    >>> check_settings(Settings(beat_ms=5))
    Traceback (most recent call last):
    turtlemq.errors.InvalidArgument: beat_ms is a number from 10 to 60,000, not 5 (over HTTP: beat, in seconds)
    >>> check_settings(Settings(backoff_jitter="half"))
    Traceback (most recent call last):
    turtlemq.errors.InvalidArgument: backoff_jitter is one of none, equal, full, not 'half' (over HTTP: backoff.jitter)
    """
    for row in TABLE:
        value = getattr(settings, row.name)
        if row.kind is str:
            _check_word(row, value)
        else:
            _check_number(row, value)
    return settings


def check_partitions(before: Settings, after: Settings) -> None:
    """Raise `InvalidArgument` if these settings of an existing topic change the number of its partitions."""
    if before.partitions != after.partitions:
        raise InvalidArgument(
            f"the topic has {before.partitions} partitions, not {after.partitions}: messages are found by this number, so it "
            "stays as it was when the topic was made. Give another topic."
        )


def _check_word(row: Setting, value: Any) -> None:
    if value not in row.limits.words:
        raise InvalidArgument(f"{row.name} is one of {', '.join(row.limits.words)}, not {value!r}{_name_over_http(row)}")


def _check_number(row: Setting, value: Any) -> None:
    low, high, least = row.limits.low, row.limits.high, row.limits.least
    kinds = int if row.kind is int else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument(f"{row.name} is a number from {low:,} to {high:,}, not {value!r}{_name_over_http(row)}")
    if 0 < value < least:
        raise InvalidArgument(f"{row.name} is at least {least}, or 0 for no limit, not {value!r}{_name_over_http(row)}")


def _name_over_http(row: Setting) -> str:
    """A hint at the name and unit over HTTP and in TOML files, where they differ."""
    if row.http_name in ("", row.name):
        return ""
    return f" (over HTTP: {row.http_name}{', in seconds' if row.in_seconds else ''})"
