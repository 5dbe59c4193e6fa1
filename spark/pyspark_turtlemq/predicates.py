"""Filters that Spark pushes down, as ranges and sets. They may let through more than was asked for: Spark filters once more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from turtlemq.errors import InvalidArgument
from turtlemq.model import I64, Mask

MIN, MAX = -(1 << 63), (1 << 63) - 1
TIMES = ("due", "ready", "dropped", "at", "created", "expires", "until", "reserved", "settled")
NUMBERS = ("offset", "seq", "number")
TEXTS = ("topic", "id", "state", "group", "event", "outcome")


@dataclass(slots=True)
class Predicates:
    """Which rows. Times are in milliseconds, under their names without `_ms`; ranges include their ends."""

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: dict[str, frozenset[str]] = field(default_factory=dict)

    def range(self, name: str) -> tuple[int, int]:
        return self.ranges.get(name, (MIN, MAX))

    def narrow(self, name: str, low: int, high: int) -> None:
        before = self.range(name)
        self.ranges[name] = (max(before[0], low), min(before[1], high))

    def allow_only(self, name: str, values: Iterable[str]) -> None:
        chosen = frozenset(values)
        self.texts[name] = chosen & self.texts[name] if name in self.texts else chosen

    def allows(self, name: str, value: str) -> bool:
        return name not in self.texts or value in self.texts[name]

    def mask_of(self, name: str, values: I64) -> Mask | None:
        """Which of these values are wanted; None: all."""
        if name not in self.ranges:
            return None
        low, high = self.ranges[name]
        found: Mask = (values >= low) & (values <= high)
        return None if found.all() else found

    @property
    def matches_nothing(self) -> bool:
        return any(low > high for low, high in self.ranges.values()) or not all(self.texts.values())


def push_filter(wanted: Predicates, kind: str, attribute: tuple[str, ...], value: Any) -> None:
    """Take one filter in: `kind` is the name of Spark's class. What is not understood is left to Spark."""
    name = attribute[0] if len(attribute) == 1 else ""
    if name in TEXTS:
        if kind in ("EqualTo", "EqualNullSafe") and isinstance(value, str):
            wanted.allow_only(name, [value])
        elif kind == "In" and isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
            wanted.allow_only(name, value)
        return
    base = name.removesuffix("_ms")
    if base not in (*TIMES, *NUMBERS):
        return
    values = value if kind == "In" and isinstance(value, (list, tuple)) else [value]
    ends = [_ends(one, name == base and base in TIMES) for one in values]
    if not ends or any(one is None for one in ends):
        return
    low, high = min(one[0] for one in ends if one), max(one[1] for one in ends if one)
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        wanted.narrow(base, low, high)
    elif kind in ("GreaterThan", "GreaterThanOrEqual"):
        wanted.narrow(base, low, MAX)
    elif kind in ("LessThan", "LessThanOrEqual"):
        wanted.narrow(base, MIN, high)


def _ends(value: Any, timestamp: bool) -> tuple[int, int] | None:
    """The whole numbers around a value: a timestamp between two milliseconds has one on each side.

    >>> _ends(datetime(1970, 1, 1, 0, 0, 1, 1, UTC), True), _ends(7, False), _ends("x", False)
    ((1000, 1001), (7, 7), None)
    """
    if timestamp and isinstance(value, datetime):
        at = value if value.tzinfo is not None else value.astimezone()
        micros = round((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
        return micros // 1000, -(-micros // 1000)
    if timestamp or isinstance(value, (bool, date)) or not isinstance(value, (int, np.integer)):
        return None
    return int(value), int(value)


# The option `where`: conditions joined by AND, kept to exactly

_EXACT = {
    "delay": ("topic", "id", "group", "state", "due", "seq"),
    "ready": ("topic", "id", "group", "state", "due", "seq", "offset", "ready"),
    "dead": ("topic", "id", "group", "state", "dropped", "seq"),
}
_CONDITION = re.compile(r"""\s*(\w+)\s*(>=|<=|=|<|>|\bin\b)\s*(\([^)]*\)|'[^']*'|-?\d+)\s*(?:\band\b|$)""", re.IGNORECASE)
_TEXT = re.compile(r"'([^']*)'")


def parse_where(text: str, kind: str) -> Predicates:
    """Conditions as a person writes them.

    >>> parse_where("state = 'sleep' and due >= '1970-01-01T00:00:01Z' and due_ms < 3000", "delay").ranges
    {'due': (1000, 2999)}
    """
    found, at = Predicates(), 0
    while at < len(text):
        match = _CONDITION.match(text, at)
        if match is None:
            raise InvalidArgument(f"option where: {text[at:]!r} is no condition like due_ms >= 1790000000000 or id in ('a', 'b')")
        _narrow(found, kind, match[1], match[2].lower(), match[3])
        at = match.end()
    return found


def _narrow(found: Predicates, kind: str, name: str, sign: str, value: str) -> None:
    base = name.removesuffix("_ms")
    if base not in _EXACT.get(kind, ()):
        there = ", ".join(_EXACT.get(kind, ())) or "nothing"
        raise InvalidArgument(f"option where knows nothing of {name!r} in kind {kind!r}, but of: {there}")
    if base in TEXTS:
        if sign not in ("=", "in"):
            raise InvalidArgument(f"option where: {name} is text, and can be = or in")
        found.allow_only(base, _TEXT.findall(value))
        return
    if sign == "in":
        raise InvalidArgument(f"option where: {name} has ranges, not in")
    number = _milliseconds(value)
    low = {">=": number, ">": number + 1, "=": number}.get(sign, MIN)
    high = {"<=": number, "<": number - 1, "=": number}.get(sign, MAX)
    found.narrow(base, low, high)


def _milliseconds(value: str) -> int:
    """A number, or a time as ISO 8601 has it, in UTC unless it says otherwise."""
    if not value.startswith("'"):
        return int(value)
    try:
        at = datetime.fromisoformat(value.strip("'"))
    except ValueError:
        raise InvalidArgument(f"option where: {value} is no time like '2026-11-16T08:00:00Z'") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return round((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
