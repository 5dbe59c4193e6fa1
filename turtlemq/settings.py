"""The limits of a topic's settings, and the check of them. Pure."""

from __future__ import annotations

from turtlemq.errors import InvalidArgument
from turtlemq.model import DUE_MS_MAX, SEGMENT_BYTES_MIN, SEGMENT_MESSAGES_MAX, TTR_MS_MAX, Settings

RATE_MAX = 1e9  # a second: more than any machine does
RATE_MIN = 0.001  # one in a quarter of an hour; less is a queue that stands still

_WHOLE: dict[str, tuple[int, int]] = {
    "segment_bytes": (SEGMENT_BYTES_MIN, (1 << 32) - 1),
    "segment_messages": (1, SEGMENT_MESSAGES_MAX),
    "run_messages": (1, SEGMENT_MESSAGES_MAX),
    "ttr_ms": (1, TTR_MS_MAX),
    "max_attempts": (1, 1_000_000),
    "backoff_base_ms": (0, TTR_MS_MAX),
    "backoff_max_ms": (0, 1 << 40),
    "max_in_flight": (1, 1_000_000),
    "history_bytes": (0, 1 << 60),
    "dead_max_count": (0, 1 << 40),
    "max_delay_ms": (0, DUE_MS_MAX),
    "rate_burst": (0, 1 << 40),
    "beat_ms": (10, 60_000),
}
_FRACTIONAL: dict[str, tuple[float, float]] = {
    "compact_live_ratio": (0, 0.9),
    "backoff_factor": (1, 1_000),
    "history_hours": (0, 1e7),
    "dead_ttl_hours": (0, 1e7),
    "group_expire_hours": (0, 1e7),
    "rate_produce_per_s": (0, RATE_MAX),
    "rate_deliver_per_s": (0, RATE_MAX),
}
_WORDS = {
    "backoff_jitter": ("none", "equal", "full"),
    "delivery": ("at-least-once", "at-most-once"),
    "ack_durability": ("beat", "fsync"),
}


def check_settings(settings: Settings) -> Settings:
    """The settings themselves, if each is within its limits.

    >>> check_settings(Settings(max_attempts=3)).max_attempts
    3
    """
    for name, (low, high) in (*_WHOLE.items(), *_FRACTIONAL.items()):
        value = getattr(settings, name)
        kinds = int if name in _WHOLE else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidArgument(f"{name} is a number from {low:,} to {high:,}, not {value!r}{_elsewhere(name)}")
    for name, words in _WORDS.items():
        if getattr(settings, name) not in words:
            raise InvalidArgument(f"{name} is one of {', '.join(words)}, not {getattr(settings, name)!r}")
    for name in ("rate_produce_per_s", "rate_deliver_per_s"):
        if 0 < getattr(settings, name) < RATE_MIN:
            raise InvalidArgument(
                f"{name} is at least {RATE_MIN}, or 0 for no limit, not {getattr(settings, name)!r}{_elsewhere(name)}"
            )
    return settings


def _elsewhere(name: str) -> str:
    """What HTTP and TOML call it, if they call it otherwise.

    >>> _elsewhere("backoff_base_ms"), _elsewhere("dead_max_count"), _elsewhere("max_attempts")
    (' (over HTTP: backoff.base, in seconds)', ' (over HTTP: dead.max_count)', '')
    """
    plain, unit = name.removesuffix("_ms"), ", in seconds" if name.endswith("_ms") else ""
    if plain.startswith("history_"):
        plain = f"retention.{plain}"
    elif plain.startswith(("backoff_", "dead_", "rate_")):
        plain = plain.replace("_", ".", 1)
    return "" if plain == name else f" (over HTTP: {plain}{unit})"


def limits(name: str) -> tuple[float, float] | tuple[str, ...] | None:
    """Between what a setting lies, or which words it may be.

    >>> limits("max_attempts"), limits("delivery"), limits("nothing")
    ((1, 1000000), ('at-least-once', 'at-most-once'), None)
    """
    return _WHOLE.get(name) or _FRACTIONAL.get(name) or _WORDS.get(name)
