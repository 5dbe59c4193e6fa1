"""Results of calls about recurring schedules. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Schedule(Struct, kw_only=True):
    """A recurring schedule: its timing, the content of its messages, and its place in time. `next_ms` is None if it is paused or
    has ended. `last_ms`: its newest firing, which may sleep up to 3 s ahead."""

    name: str
    cron: str | None = None
    zone: str | None = None
    every: float | None = None
    delays: list[float] | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    count: int | None = None
    jitter: float = 0
    catch_up: str = "one"
    overlap: str = "allow"
    paused: bool = False
    value: Any = msgspec.field(name="body", default=None)
    data: bytes | None = msgspec.field(name="body_base64", default=None)
    headers: dict[str, str] = {}
    priority: str = "normal"
    ttr: float | None = None
    next_ms: int | None = None
    last_ms: int | None = None
    fired: int = 0
    ended_ms: int | None = None
    created_ms: int = 0

    @property
    def body(self) -> Any:
        """The body of its messages: bytes, or the decoded JSON value."""
        return self.value if self.data is None else self.data


class SchedulePage(Struct):
    """A page of schedules. `cursor` asks for the next one, None after the last."""

    schedules: list[Schedule]
    cursor: str | None = None


class SchedulePut(Struct):
    """A schedule was put. `next_ms`: None if it is paused or has ended. `created`: there was none of its name."""

    name: str
    next_ms: int | None = None
    created: bool = False


class Triggered(Struct):
    """The message of a firing that was asked for."""

    id: str
    due_ms: int = 0
