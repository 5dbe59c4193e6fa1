"""Times and durations as text: parsing them on the command line, formatting them for output."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "": 1}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|w|)")
TIME_HELP = "epoch milliseconds, 2030-01-31T08:00 (your zone, or with +02:00 or Z), or from now: +30m, -2h"


def parse_duration(text: str | float) -> float:
    """Parse a duration into seconds: a number, with or without a unit.

    >>> parse_duration("1.5"), parse_duration("30m"), parse_duration("250ms"), parse_duration("3d")
    (1.5, 1800.0, 0.25, 259200.0)
    """
    match = _DURATION.fullmatch(str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration; write seconds, or a number with ms, s, m, h, d or w")
    return float(match[1]) * _UNITS[match[2]]


def parse_time(text: str | int) -> int:
    """Parse a time into epoch milliseconds. The clock is read for relative times such as +30m.

    >>> parse_time("1893456000000"), parse_time("2030-01-01T00:00Z")
    (1893456000000, 1893456000000)
    """
    text = str(text).strip()
    if text.isascii() and text.isdigit():
        return int(text)
    if text[:1] in "+-" and text[1:]:
        offset_ms = parse_duration(text[1:]) * 1000
        return round(time.time() * 1000 + (offset_ms if text[0] == "+" else -offset_ms))
    try:
        return round(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no time; write {TIME_HELP}") from None


def format_time(at_ms: int | None) -> str:
    """A time in the local time zone."""
    return "-" if at_ms is None else datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(" ", "milliseconds")


def format_duration(ms: float) -> str:
    """A duration in the largest unit that fits.

    >>> format_duration(0), format_duration(850), format_duration(2_500), format_duration(5_400_000), format_duration(259_200_000)
    ('0 ms', '850 ms', '2.5 s', '1.5 h', '3 d')
    """
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if abs(ms) >= size:
            return f"{ms / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{ms:.0f} ms"
