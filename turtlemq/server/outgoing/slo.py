"""Types of answers about goals for lateness, made by `server.slo_watch`."""

from __future__ import annotations

from msgspec import Struct


class SloForecast(Struct):
    """The lateness to come in the group that will be the latest. Times are None if it will keep the goal."""

    group: str
    per_s: float
    late_from_ms: int | None
    worst_ms: int
    worst_at_ms: int | None


class SloAnswer(Struct):
    """A goal for lateness, first deliveries since the start, burn rates by window, and the forecast of the next six hours."""

    ms: int
    share: float
    on_time: int
    late: int
    overdue: int
    burn: dict[str, float]
    forecast: SloForecast | None
