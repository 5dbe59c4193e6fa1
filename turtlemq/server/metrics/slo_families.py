"""Metric families of goals for lateness. They are there only for topics that have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turtlemq.server.metrics import exposition
from turtlemq.server.outgoing.slo import SloAnswer


def slo_families(goals: Mapping[str, SloAnswer]) -> Iterator[str]:
    """All families of goals, by topic."""
    if not goals:
        return
    family, rows = exposition.family, list(goals.items())
    burn = [({"topic": name, "window": window}, rate) for name, goal in rows for window, rate in goal.burn.items()]
    yield from family("turtlemq_slo_burn_rate", "gauge", "How fast late messages use up the error budget; 1: exactly.", burn)
    counted = [({"topic": name, "outcome": key}, getattr(goal, key)) for name, goal in rows for key in ("on_time", "late")]
    yield from family("turtlemq_slo_deliveries_total", "counter", "First deliveries, by the goal of the topic.", counted)
    overdue = [({"topic": name}, goal.overdue) for name, goal in rows]
    yield from family("turtlemq_slo_overdue", "gauge", "Messages that wait for a consumer and are late already.", overdue)
    found = [({"topic": name, "group": goal.forecast.group}, goal.forecast) for name, goal in rows if goal.forecast is not None]
    text = "Messages a second that the consumers of the group which will be the latest have shown to handle."
    rates = [(labels, one.per_s) for labels, one in found]
    yield from family("turtlemq_consumer_capacity_per_second", "gauge", text, rates)
    text = "The worst lateness of the next six hours, if it is above the goal; else 0."
    late = [(labels, 0 if one.worst_at_ms is None else one.worst_ms / 1000) for labels, one in found]
    yield from family("turtlemq_forecast_late_seconds", "gauge", text, late)
    text = "When messages will be later than the goal for the first time; only if they will."
    begins = [(labels, one.late_from_ms and one.late_from_ms / 1000) for labels, one in found]
    yield from family("turtlemq_forecast_late_timestamp_seconds", "gauge", text, begins)
