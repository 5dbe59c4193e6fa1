"""Handlers of the virtual clock: its time, and moving it."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from turtlemq.errors import Conflict, InvalidArgument
from turtlemq.server.clock import VirtualClock
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.times import DELAY_S_MAX, Delay, seconds_of
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, EpochMs, engine_of


class Clock(Struct):
    """The time of a virtual clock."""

    now_ms: int
    virtual: bool = True


class Move(Struct, forbid_unknown_fields=True):
    """One of three: by a duration (seconds, or a text such as `3d`), by milliseconds, or to a time."""

    advance: Delay | None = None
    advance_ms: int | None = None
    now_ms: EpochMs | None = None


async def get_clock(request: web.Request) -> web.Response:
    """GET /v1/clock"""
    return answer(Clock(_clock(request).now_ms))


async def move_clock(request: web.Request) -> web.Response:
    """POST /v1/clock"""
    asked, clock = await read_as(request, Move), _clock(request)
    request.app[SERVICE].advance(_target(asked, clock.now_ms))
    return answer(Clock(clock.now_ms))


def _clock(request: web.Request) -> VirtualClock:
    engine_of(request)  # 503 while the server starts or stops
    clock = request.app[SERVICE].clock
    if clock is None:
        raise Conflict("this server runs on the wall clock; for tests: turtlemq serve --virtual-clock")
    return clock


def _target(asked: Move, now_ms: int) -> int:
    """The time to which a clock is to be moved."""
    if sum(one is not None for one in (asked.advance, asked.advance_ms, asked.now_ms)) != 1:
        raise InvalidArgument('give one of advance ("3d", or seconds), advance_ms and now_ms')
    if asked.now_ms is not None:
        return asked.now_ms
    if asked.advance_ms is not None:
        return now_ms + asked.advance_ms
    seconds = seconds_of(asked.advance or 0)
    if not abs(seconds) <= DELAY_S_MAX:
        raise InvalidArgument('advance is a number of seconds, or a text such as "90s", "15m", "36h" or "3d"')
    return now_ms + round(seconds * 1000)
