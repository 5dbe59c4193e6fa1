"""Calls of a client for operators: pause and resume, the audit log, a virtual clock. Pure.

The examples run as doctests, as those of `calls`.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlencode

from msgspec import Struct

from turtlemq.client.results import AuditEvent, TenantFigures
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, Time, json_request, parser_of, path, to_ms, without_none

MOVE_S = 600  # a clock that moves on by months may have much to do


class _Paused(Struct):
    paused: bool


class _Audit(Struct):
    events: list[AuditEvent]


class _Clock(Struct):
    now_ms: int


class _Tenants(Struct):
    tenants: list[TenantFigures]


_parse_clock = parser_of(_Clock)
_parse_paused = parser_of(_Paused)
_parse_audit = parser_of(_Audit)
_parse_tenants = parser_of(_Tenants)


def pause(topic: str, group: str | None = None) -> Call[bool]:
    """Let a topic, or one of its groups, get no messages until it is resumed. Consumers wait meanwhile. Returns True.

    >>> _ = client.put("jobs", b"work")
    >>> client.pause("jobs")
    True
    >>> client.fetch("jobs"), client.topic("jobs").paused
    ([], True)
    """
    return _pause(topic, group, "pause")


def resume(topic: str, group: str | None = None) -> Call[bool]:
    """Let a topic, or one of its groups, get messages again. A group of a paused topic waits for the topic, too. Returns False.

    >>> _ = client.place_group("jobs", "audit")
    >>> client.pause("jobs", "audit"), client.group("jobs", "audit").stats.paused
    (True, True)
    >>> client.resume("jobs", "audit")
    False
    """
    return _pause(topic, group, "resume")


def _pause(topic: str, group: str | None, verb: str) -> Call[bool]:
    target = path(topic, verb) if group is None else path(topic, "groups", group, verb)
    return Call(Request("POST", target), lambda answer: _parse_paused(answer).paused)


def audit(topic: str | None = None, *, since: Time | None = None, limit: int = 100) -> Call[list[AuditEvent]]:
    """Changes that were asked for, the newest last: of one topic, or of all that the token may `read` or `operate`.

    >>> _ = client.configure("jobs")
    >>> [(event.action, event.topic) for event in client.audit("jobs")][-1:]
    [('topic_created', 'jobs')]
    """
    wanted = without_none(topic=topic, from_ms=to_ms(since), limit=limit)
    return Call(Request("GET", f"/v1/audit?{urlencode(wanted)}"), lambda answer: _parse_audit(answer).events)


def tenants() -> Call[list[TenantFigures]]:
    """The tenants of the server's configuration, with their limits and figures.

    >>> client.tenants()
    []
    """
    return Call(Request("GET", "/v1/tenants"), lambda answer: _parse_tenants(answer).tenants)


def clock() -> Call[int]:
    """The time of a server with a virtual clock, in epoch milliseconds. A `Conflict` if it runs on the wall clock.

    >>> client.clock()
    Traceback (most recent call last):
    turtlemq.client.errors.Conflict: this server runs on the wall clock; for tests: turtlemq serve --virtual-clock
    """
    return Call(Request("GET", "/v1/clock"), lambda answer: _parse_clock(answer).now_ms)


def move_clock(to: Time) -> Call[int]:
    """Move a virtual clock to a time, never back. Returns it when all messages that are due by then were handed off.

    >>> client.move_clock(4_000_000_000_000)
    Traceback (most recent call last):
    turtlemq.client.errors.Conflict: this server runs on the wall clock; for tests: turtlemq serve --virtual-clock
    """
    request = replace(json_request("/v1/clock", {"now_ms": to_ms(to)}), wait_s=MOVE_S)
    return Call(request, lambda answer: _parse_clock(answer).now_ms)
