"""The limits of a topic's settings, and the check of them. Pure."""

from __future__ import annotations

from turtlemq.errors import InvalidArgument
from turtlemq.model import SEGMENT_BYTES_MIN, SEGMENT_MESSAGES_MAX, TTR_MS_MAX, Settings

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
}
_FRACTIONAL: dict[str, tuple[float, float]] = {
    "compact_live_ratio": (0, 0.9),
    "backoff_factor": (1, 1_000),
    "history_hours": (0, 1e7),
    "dead_ttl_hours": (0, 1e7),
    "group_expire_hours": (0, 1e7),
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
            raise InvalidArgument(f"{name} is a number from {low} to {high}, not {value!r}")
    for name, words in _WORDS.items():
        if getattr(settings, name) not in words:
            raise InvalidArgument(f"{name} is one of {', '.join(words)}, not {getattr(settings, name)!r}")
    return settings
