"""A topic's settings: nested and in seconds as people write them, flat and in milliseconds as the engine keeps them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from turtlemq.model import Settings

Seconds = Annotated[float, Meta(ge=0, le=1e10)]  # the engine's own limits are narrower; this one keeps sums finite


class Backoff(Struct, forbid_unknown_fields=True, frozen=True):
    """How long a failed message waits: base × factor^n seconds, up to max."""

    base: Seconds | UnsetType = UNSET
    factor: float | UnsetType = UNSET
    max: Seconds | UnsetType = UNSET
    jitter: str | UnsetType = UNSET


class Retention(Struct, forbid_unknown_fields=True, frozen=True):
    """How long, and in how much room, settled messages are kept."""

    history_hours: float | UnsetType = UNSET
    history_bytes: int | UnsetType = UNSET


class Dead(Struct, forbid_unknown_fields=True, frozen=True):
    """How long, and how many, dead letters are kept."""

    ttl_hours: float | UnsetType = UNSET
    max_count: int | UnsetType = UNSET


class Rate(Struct, forbid_unknown_fields=True, frozen=True):
    """Messages a second: taken in (with a burst that was saved up), and given to each group. 0: no limit."""

    produce_per_s: float | UnsetType = UNSET
    burst: int | UnsetType = UNSET
    deliver_per_s: float | UnsetType = UNSET


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of PUT /v1/topics/{topic}: what is left out stays as it is."""

    ttr: Seconds | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    backoff: Backoff = Backoff()
    retention: Retention = Retention()
    dead: Dead = Dead()
    rate: Rate = Rate()
    max_delay: Seconds | UnsetType = UNSET
    segment_bytes: int | UnsetType = UNSET
    compact_live_ratio: float | UnsetType = UNSET
    max_in_flight: int | UnsetType = UNSET
    delivery: str | UnsetType = UNSET
    ack_durability: str | UnsetType = UNSET
    group_expire_hours: float | UnsetType = UNSET
    beat: Seconds | UnsetType = UNSET


def to_flat(asked: Asked) -> dict[str, Any]:
    """The engine's names and units for what was asked.

    >>> to_flat(Asked(ttr=1.5, backoff=Backoff(base=2)))
    {'ttr_ms': 1500, 'backoff_base_ms': 2000}
    """
    flat = {
        "ttr_ms": _ms(asked.ttr),
        "max_attempts": asked.max_attempts,
        "backoff_base_ms": _ms(asked.backoff.base),
        "backoff_factor": asked.backoff.factor,
        "backoff_max_ms": _ms(asked.backoff.max),
        "backoff_jitter": asked.backoff.jitter,
        "history_hours": asked.retention.history_hours,
        "history_bytes": asked.retention.history_bytes,
        "dead_ttl_hours": asked.dead.ttl_hours,
        "dead_max_count": asked.dead.max_count,
        "segment_bytes": asked.segment_bytes,
        "compact_live_ratio": asked.compact_live_ratio,
        "max_in_flight": asked.max_in_flight,
        "delivery": asked.delivery,
        "ack_durability": asked.ack_durability,
        "group_expire_hours": asked.group_expire_hours,
        "max_delay_ms": _ms(asked.max_delay),
        "rate_produce_per_s": asked.rate.produce_per_s,
        "rate_burst": asked.rate.burst,
        "rate_deliver_per_s": asked.rate.deliver_per_s,
        "beat_ms": _ms(asked.beat),
    }
    return {name: value for name, value in flat.items() if value is not UNSET}


def _ms(seconds: float | UnsetType) -> int | UnsetType:
    return UNSET if isinstance(seconds, UnsetType) else round(seconds * 1000)


def to_nested(settings: Settings) -> dict[str, Any]:
    """The settings as people read them."""
    return {
        "ttr": settings.ttr_ms / 1000,
        "max_attempts": settings.max_attempts,
        "backoff": {
            "base": settings.backoff_base_ms / 1000,
            "factor": settings.backoff_factor,
            "max": settings.backoff_max_ms / 1000,
            "jitter": settings.backoff_jitter,
        },
        "max_delay": settings.max_delay_ms / 1000,
        "rate": {
            "produce_per_s": settings.rate_produce_per_s,
            "burst": settings.rate_burst,
            "deliver_per_s": settings.rate_deliver_per_s,
        },
        "retention": {"history_hours": settings.history_hours, "history_bytes": settings.history_bytes},
        "segment_bytes": settings.segment_bytes,
        "compact_live_ratio": settings.compact_live_ratio,
        "max_in_flight": settings.max_in_flight,
        "dead": {"ttl_hours": settings.dead_ttl_hours, "max_count": settings.dead_max_count},
        "delivery": settings.delivery,
        "ack_durability": settings.ack_durability,
        "group_expire_hours": settings.group_expire_hours,
        "beat": settings.beat_ms / 1000,
    }
