"""Calls of a client for operators: pause and resume. Pure. The examples run as doctests, as those of `calls`."""

from __future__ import annotations

from msgspec import Struct

from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, parser_of, path


class _Paused(Struct):
    paused: bool


_parse_paused = parser_of(_Paused)


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
