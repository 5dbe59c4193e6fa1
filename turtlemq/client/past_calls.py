"""Calls about the past: one message now or at a past moment, the events of a topic, replays into other topics. Pure.

The examples run as doctests, as those of `calls`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from turtlemq.client.results import EventPage, MessageView, Replay
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, Seconds, Time, json_request, parser_of, path, seconds_of, to_ms, without_none

PAST_S = 60  # a search of journals of some gigabytes


class _Replays(Struct):
    replays: list[Replay]


_parse_view = parser_of(MessageView)
_parse_events = parser_of(EventPage)
_parse_replay = parser_of(Replay)
_parse_replays = parser_of(_Replays)


def get(topic: str, id: str, *, at: Time | None = None) -> Call[MessageView]:  # noqa: A002 - the contract's word
    """One message with its state in every group and its timeline: now, or as it was `at` a past moment. A `NotKept` has the
    moment from which on states are known.

    >>> _ = client.put("jobs", {"work": 1}, id="j1", delay=3600)
    >>> message = client.get("jobs", "j1")
    >>> message.state, message.body
    ('sleep', {'work': 1})
    >>> client.cancel("jobs", "j1")
    >>> client.get("jobs", "j1", at=message.created_ms).state
    'sleep'
    """
    wait_s = 0.0 if at is None else PAST_S
    return Call(Request("GET", path(topic, "messages", id, at_ms=to_ms(at)), wait_s=wait_s, ids=[id]), _parse_view)


def events(
    topic: str,
    *,
    cursor: str | None = None,
    since: Time | None = None,
    group: str | None = None,
    wait: Seconds = 0.0,
    limit: int = 1000,
) -> Call[EventPage]:
    """The events of a topic: puts, deliveries, acks, failures. From `since` or the `cursor` of an earlier answer on; without
    both none yet. Waits up to `wait` seconds for the next event.

    >>> _ = client.put("jobs", b"work", id="j3", delay=60)
    >>> begin = client.events("jobs").cursor
    >>> _ = client.put("jobs", b"work", id="j4", delay=60)
    >>> [(event.event, event.id) for event in client.events("jobs", cursor=begin, wait=5).events]
    [('created', 'j4')]
    """
    wait_s = seconds_of("wait", wait) or 0.0
    asked = path(topic, "events", cursor=cursor, since_ms=to_ms(since), group=group, wait=wait_s, limit=limit)
    return Call(Request("GET", asked, wait_s=wait_s), _parse_events)


def replay(
    topic: str,
    into: str,
    *,
    from_: Time,
    to: Time,
    delay: Seconds | None = None,
    state: str | None = None,
    prefix: str | None = None,
    headers: Mapping[str, str] | None = None,
    per_s: float | None = None,
) -> Call[Replay]:
    """Begin to copy messages into another topic: those that became ready from `from_` on and before `to`, in a `state`, with a
    `prefix` of their ids and with these `headers`, `per_s` a second. Begun again, it copies only the rest.

    >>> _ = client.put("jobs", {"work": 1}, id="j1")
    >>> ready = client.fetch("jobs", wait=5)[0].ready_ms
    >>> job = client.replay("jobs", "again", from_=0, to=ready)
    >>> job.into, client.replays("jobs")[0].id == job.id
    ('again', True)
    """
    wanted = without_none(state=state, prefix=prefix, headers=None if headers is None else dict(headers))
    fields = {"from_ms": to_ms(from_), "to_ms": to_ms(to), "into": into, "filter": wanted}
    fields |= without_none(delay=seconds_of("delay", delay), per_s=per_s)
    return Call(json_request(path(topic, "replay"), fields), _parse_replay)


def replays(topic: str) -> Call[list[Replay]]:
    """The newest replays of a topic, oldest first.

    >>> _ = client.put("jobs", b"work")
    >>> client.replays("jobs")
    []
    """
    return Call(Request("GET", path(topic, "replays")), lambda answer: _parse_replays(answer).replays)


def replay_state(topic: str, id: str) -> Call[Replay]:  # noqa: A002 - the contract's word
    """The progress of a replay.

    >>> _ = client.put("jobs", b"work")
    >>> job = client.replay("jobs", "again", from_=0, to=1)
    >>> client.replay_state("jobs", job.id).into
    'again'
    """
    return Call(Request("GET", path(topic, "replays", id)), _parse_replay)


def cancel_replay(topic: str, id: str) -> Call[Replay]:  # noqa: A002 - the contract's word
    """End a replay. Copies that were made stay.

    >>> _ = client.put("jobs", b"work")
    >>> job = client.replay("jobs", "again", from_=0, to=1)
    >>> client.cancel_replay("jobs", job.id).state == "running"
    False
    """
    return Call(Request("DELETE", path(topic, "replays", id)), _parse_replay)
