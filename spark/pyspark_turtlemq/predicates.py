"""Predicates that narrow a read: ranges of numbers and times, sets of texts. From Spark's pushdown, or from the option `where`.

Rules: pushed filters may keep more rows than match, since Spark filters again; `where` is exact, since nothing filters after it.
All predicates of a read hold together (AND). Times are epoch milliseconds under the name without `_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from pyspark_turtlemq.kinds import KINDS, TIMES
from turtlemq.errors import InvalidArgument
from turtlemq.model import I64, Mask

MIN, MAX = -(1 << 63), (1 << 63) - 1
NUMBERS = ("offset", "seq", "number")
TEXTS = ("topic", "id", "state", "group", "event", "outcome")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Predicates:
    """Inclusive ranges of numbers and times, and allowed values of texts, by column. An absent column is not limited."""

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: dict[str, frozenset[str]] = field(default_factory=dict)

    def range(self, name: str) -> tuple[int, int]:
        """The range of a column; from MIN to MAX if it is not limited."""
        return self.ranges.get(name, (MIN, MAX))

    def narrow(self, name: str, low: int, high: int) -> None:
        """Intersect the range of a column with [low, high]."""
        before = self.range(name)
        self.ranges[name] = (max(before[0], low), min(before[1], high))

    def allow_only(self, name: str, values: Iterable[str]) -> None:
        """Intersect the allowed values of a column with these."""
        allowed = frozenset(values)
        self.texts[name] = allowed & self.texts[name] if name in self.texts else allowed

    def allows(self, name: str, value: str) -> bool:
        return name not in self.texts or value in self.texts[name]

    def mask_of(self, name: str, values: I64) -> Mask | None:
        """Which values lie in the range of a column; None if all do."""
        if name not in self.ranges:
            return None
        low, high = self.ranges[name]
        mask: Mask = (values >= low) & (values <= high)
        return None if mask.all() else mask

    @property
    def matches_nothing(self) -> bool:
        """True if two predicates contradict each other."""
        return any(low > high for low, high in self.ranges.values()) or not all(self.texts.values())


def push_filter(predicates: Predicates, kind: str, attribute: tuple[str, ...], value: Any) -> None:
    """Add a filter of Spark; `kind` is the name of its class. A filter that is not understood is ignored: Spark applies it."""
    name = attribute[0] if len(attribute) == 1 else ""
    if name in TEXTS:
        if kind in ("EqualTo", "EqualNullSafe") and isinstance(value, str):
            predicates.allow_only(name, [value])
        elif kind == "In" and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            predicates.allow_only(name, value)
        return
    base = name.removesuffix("_ms")
    if base not in TIMES and base not in NUMBERS:
        return
    values = value if kind == "In" and isinstance(value, (list, tuple)) else [value]
    bounds = [_bounds(item, name == base and base in TIMES) for item in values]
    if not bounds or any(bound is None for bound in bounds):
        return
    low, high = min(bound[0] for bound in bounds if bound), max(bound[1] for bound in bounds if bound)
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        predicates.narrow(base, low, high)
    elif kind in ("GreaterThan", "GreaterThanOrEqual"):
        predicates.narrow(base, low, MAX)
    elif kind in ("LessThan", "LessThanOrEqual"):
        predicates.narrow(base, MIN, high)


def _bounds(value: Any, timestamp: bool) -> tuple[int, int] | None:
    """The nearest integers below and above a value; a timestamp may lie between two milliseconds. None for other types.

    >>> _bounds(datetime(1970, 1, 1, 0, 0, 1, 1, UTC), True), _bounds(7, False), _bounds("x", False)
    ((1000, 1001), (7, 7), None)
    """
    if timestamp and isinstance(value, datetime):
        at = value if value.tzinfo is not None else value.astimezone()
        micros = round((at - _EPOCH).total_seconds() * 1_000_000)
        return micros // 1000, -(-micros // 1000)
    if timestamp or isinstance(value, (bool, date)) or not isinstance(value, (int, np.integer)):
        return None
    return int(value), int(value)


# The option `where`

_CONDITION = re.compile(r"""\s*(\w+)\s*(>=|<=|=|<|>|\bin\b)\s*(\([^)]*\)|'[^']*'|-?\d+)\s*(?:\band\b|$)""", re.IGNORECASE)
_TEXT = re.compile(r"'([^']*)'")


def parse_where(text: str, kind: str) -> Predicates:
    """Conditions joined by `and`, on the columns that `kinds` lists for this kind.

    >>> parse_where("state = 'sleep' and due >= '1970-01-01T00:00:01Z' and due_ms < 3000", "delay").ranges
    {'due': (1000, 2999)}
    """
    predicates, at = Predicates(), 0
    while at < len(text):
        match = _CONDITION.match(text, at)
        if match is None:
            raise InvalidArgument(f"option where: {text[at:]!r} is no condition like due_ms >= 1790000000000 or id in ('a', 'b')")
        _add_condition(predicates, kind, match[1], match[2].lower(), match[3])
        at = match.end()
    return predicates


def _add_condition(predicates: Predicates, kind: str, name: str, sign: str, value: str) -> None:
    base, allowed = name.removesuffix("_ms"), KINDS[kind].where
    if base not in allowed:
        raise InvalidArgument(
            f"option where knows nothing of {name!r} in kind {kind!r}, but of: {', '.join(allowed) or 'nothing'}"
        )
    if base in TEXTS:
        if sign not in ("=", "in"):
            raise InvalidArgument(f"option where: {name} is text, and can be = or in")
        predicates.allow_only(base, _TEXT.findall(value))
        return
    if sign == "in":
        raise InvalidArgument(f"option where: {name} has ranges, not in")
    number = _milliseconds(value)
    low = {">=": number, ">": number + 1, "=": number}.get(sign, MIN)
    high = {"<=": number, "<": number - 1, "=": number}.get(sign, MAX)
    predicates.narrow(base, low, high)


def _milliseconds(value: str) -> int:
    """A number, or epoch milliseconds of a quoted time in ISO 8601, UTC unless it has an offset."""
    if not value.startswith("'"):
        return int(value)
    try:
        at = datetime.fromisoformat(value.strip("'"))
    except ValueError:
        raise InvalidArgument(f"option where: {value} is no time like '2026-11-16T08:00:00Z'") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return round((at - _EPOCH).total_seconds() * 1000)
