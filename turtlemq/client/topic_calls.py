"""Calls of a client about topics and groups: settings, figures, forecasts, positions. Pure.

The examples run as doctests, each with a `client` of an empty server; with an `AsyncClient`, each call has an `await`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from turtlemq.client.calls import GROUP
from turtlemq.client.errors import UnknownGroup, UnknownTopic
from turtlemq.client.lateness_results import Forecast
from turtlemq.client.results import Compacted, Group, Stats, Topic
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, Seconds, Time, json_request, parser_of, path, seconds_of, to_ms


class _Topics(Struct):
    topics: list[Topic]


_parse_topics = parser_of(_Topics)
_parse_topic = parser_of(Topic)
_parse_group = parser_of(Group)
_parse_forecast = parser_of(Forecast)
_parse_compacted = parser_of(Compacted)


def forecast(
    topic: str,
    *,
    bucket: float = 60,
    hours: float = 24,
    from_: Time | None = None,
    what_if_spread: Seconds | None = None,
    capacity: bool | float = False,
) -> Call[Forecast]:
    """Messages by due time, in buckets of `bucket` seconds. `capacity=True`: how late, at the rate of consumers; or at this one.

    >>> _ = client.put("jobs", b"tomorrow", delay=86_400)
    >>> client.forecast("jobs", bucket=3600, hours=2).beyond
    1
    """
    spread = seconds_of("what_if_spread", what_if_spread)
    rate = {"capacity": "true"} if capacity is True else {"capacity_per_s": capacity or None}
    span: dict[str, Any] = {"bucket": bucket, "hours": hours, "from_ms": to_ms(from_), "what_if_spread": spread}
    return Call(Request("GET", path(topic, "forecast", **span, **rate)), _parse_forecast)


def topics() -> Call[list[Topic]]:
    """All topics.

    >>> _ = client.put("jobs", b"work")
    >>> [topic.topic for topic in client.topics()]
    ['jobs']
    """
    return Call(Request("GET", "/v1/topics"), lambda answer: _parse_topics(answer).topics)


def topic(topic: str) -> Call[Topic]:
    """One topic, with its settings, figures and groups.

    >>> _ = client.put("jobs", b"work")
    >>> client.topic("jobs").settings["max_attempts"] > 1
    True
    """
    return Call(Request("GET", path(topic)), _parse_topic)


def stats(topic: str) -> Call[Stats]:
    """The figures of a topic.

    >>> _ = client.put("jobs", b"later", delay=3600)
    >>> client.stats("jobs").sleep
    1
    """
    return Call(Request("GET", path(topic)), lambda answer: _parse_topic(answer).stats)


def configure(topic: str, **settings: Any) -> Call[Topic]:
    """Create a topic, or change the given settings of one; the others stay.

    >>> client.configure("jobs", max_attempts=1, backoff={"base": 0.5}).settings["backoff"]["base"]
    0.5
    """
    return Call(json_request(path(topic), settings, "PUT"), _parse_topic)


def compact(topic: str) -> Call[Compacted]:
    """Free disk space now, instead of in the background.

    >>> _ = client.put("jobs", b"work")
    >>> client.compact("jobs").outcome
    'compacted'
    """
    return Call(Request("POST", path(topic, "compact"), wait_s=30), _parse_compacted)


def place_group(topic: str, group: str, start: Literal["earliest", "latest"] | Time = "earliest") -> Call[Group]:
    """Create a group, or move it (replay): to the oldest message, behind the newest, or to a time of becoming ready.

    >>> _ = client.put("jobs", b"work")
    >>> client.place_group("jobs", "audit", "latest").stats.lag
    0
    """
    position: Any = start if isinstance(start, str) else {"ready_ms": to_ms(start)}
    return Call(json_request(path(topic, "groups", group), {"start": position}, "PUT"), _parse_group)


def group(topic: str, group: str = GROUP) -> Call[Group]:
    """A group with its figures.

    >>> _ = client.place_group("jobs", "audit")
    >>> client.group("jobs", "audit").stats.reserve
    0
    """
    return Call(Request("GET", path(topic, "groups", group)), _parse_group)


def drop_group(topic: str, group: str) -> Call[None]:
    """Delete a group with its position.

    >>> _ = client.place_group("jobs", "audit")
    >>> client.drop_group("jobs", "audit")
    """
    return Call(
        Request("DELETE", path(topic, "groups", group)), lambda answer: None, lambda error: isinstance(error, UnknownGroup)
    )


def drop_topic(topic: str) -> Call[None]:
    """Delete a topic with everything in it.

    >>> _ = client.configure("old")
    >>> client.drop_topic("old")
    """
    return Call(Request("DELETE", path(topic)), lambda answer: None, lambda error: isinstance(error, UnknownTopic))
