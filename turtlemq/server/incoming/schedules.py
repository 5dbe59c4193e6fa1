"""Schedules as requests give them: the timing in seconds and texts, and the content of the messages to come. Pure."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.errors import InvalidSchedule
from turtlemq.index.validate import check_batch
from turtlemq.schedules import CatchUp, Overlap, Schedule, Timing, check_name, firing_id
from turtlemq.server.incoming.batches import DueRules, batch_of
from turtlemq.server.incoming.json_messages import JsonMessage
from turtlemq.server.incoming.times import DELAY_S_MAX, Delay, seconds_of
from turtlemq.topic.schedule_store import StoredSchedule

_KINDS = ("cron", "every", "delays")
_CONTENT = ("body", "body_base64", "headers", "priority", "ttr")  # fields that are those of a message


class NewSchedule(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schedule to put: one of `cron`, `every` and `delays`, and the message. `paused`: None leaves it as it is."""

    cron: str | None = None
    zone: str | None = None
    every: Delay | None = None
    delays: list[Delay] | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    count: int | None = None
    jitter: Delay | None = None
    catch_up: CatchUp = "one"
    overlap: Overlap = "allow"
    paused: bool | None = None
    body: Raw | UnsetType = UNSET
    body_base64: bytes | None = None
    headers: dict[str, str] | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    ttr: float | None = None


def schedule_of(name: str, asked: NewSchedule, was_paused: bool, now_ms: int) -> StoredSchedule:
    """The schedule that is asked for, not begun yet. Raises for one that cannot be. `was_paused`: the one of its name."""
    check_name(name)
    timing = _timing(asked)
    timing.check()
    content: dict[str, Any] = {field: getattr(asked, field) for field in _CONTENT}
    message = JsonMessage(id=firing_id(name, now_ms), **content)
    batch = batch_of([message], now_ms, DueRules())
    check_batch(batch)
    paused = was_paused if asked.paused is None else asked.paused
    return StoredSchedule(
        schedule=Schedule(name, timing, asked.catch_up, asked.overlap, paused),
        body=batch.bodies[0],
        flags=_first(batch.flags),
        ttr_ms=_first(batch.ttr_ms),
        headers=asked.headers,
    )


def _first(column: object) -> int:
    """The number of a batch of one; 0 where it has no such column."""
    return int(column[0]) if isinstance(column, list) else column if isinstance(column, int) else 0


def _timing(asked: NewSchedule) -> Timing:
    given = [name for name in _KINDS if getattr(asked, name) is not None]
    if len(given) != 1:
        raise InvalidSchedule("give one of cron, every and delays" + (f", not {' and '.join(given)}" if given else ""))
    value = getattr(asked, given[0])
    if value in ("", 0, []):
        raise InvalidSchedule(f"{given[0]}: {value!r} makes no times")
    if asked.zone is not None and asked.cron is None:
        raise InvalidSchedule(f"zone goes with cron; {given[0]} is counted in seconds, whatever the clocks show")
    return Timing(
        cron=asked.cron or "",
        zone="UTC" if asked.zone is None else asked.zone,
        every_ms=0 if asked.every is None else max(1, _ms("every", asked.every)),  # 0 would be none
        delays_ms=tuple(_ms("delays", delay) for delay in asked.delays or ()),
        start_ms=asked.start_ms,
        end_ms=asked.end_ms,
        count=asked.count,
        jitter_ms=_ms("jitter", asked.jitter or 0),
    )


def _ms(name: str, given: float | str) -> int:
    seconds = seconds_of(given)
    if isinstance(given, int | float) and seconds > DELAY_S_MAX:
        raise InvalidSchedule(f"{name}: {given:g} seconds are too many")
    if not 0 <= seconds <= DELAY_S_MAX:
        raise InvalidSchedule(f'{name}: give seconds, or a text such as "90s", "15m", "36h" or "3d", not {given!r:.80}')
    return round(seconds * 1000)
