"""Results of calls about lateness: goals of topics, forecasts, and how late messages will be. Pure."""

from __future__ import annotations

from msgspec import Struct


class SloForecast(Struct):
    """Lateness in the next six hours, in the group that will be the latest. Times are None if it will keep the goal."""

    group: str
    per_s: float = 0
    late_from_ms: int | None = None
    worst_ms: int = 0
    worst_at_ms: int | None = None


class Slo(Struct):
    """A topic's goal for lateness: first deliveries in time and late, late messages that still wait, and burn rates by window."""

    ms: int
    share: float
    on_time: int = 0
    late: int = 0
    overdue: int = 0
    burn: dict[str, float] = {}
    forecast: SloForecast | None = None


class WhatIf(Struct):
    """A forecast as it would be if each message had a spread."""

    spread_ms: int
    counts: list[int]
    beyond: int = 0


class Capacity(Struct):
    """Lateness at the end of each bucket of a forecast, if consumers handle `per_s`. Times are None if the goal will be kept."""

    per_s: float
    late_ms: list[int]
    late_from_ms: int | None = None
    worst_ms: int = 0
    worst_at_ms: int | None = None
    group: str | None = None


class Forecast(Struct):
    """The number of messages due in each bucket from `from_ms` on; `overdue` before it, `beyond` after the last."""

    bucket_ms: int
    from_ms: int
    counts: list[int]
    overdue: int = 0
    beyond: int = 0
    what_if: WhatIf | None = None
    capacity: Capacity | None = None
