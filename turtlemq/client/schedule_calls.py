"""Calls of a client for recurring schedules. Pure.

The examples run as doctests, as those of `calls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Raw, Struct

from turtlemq.client.errors import InvalidArgument, UnknownSchedule
from turtlemq.client.outgoing import Priority, outgoing_message
from turtlemq.client.schedule_results import Schedule, SchedulePage, SchedulePut, Triggered
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, Seconds, Time, json_request, parser_of, path, seconds_of, to_ms, without_none


class _Paused(Struct):
    paused: bool


class _Upcoming(Struct):
    next_ms: list[int]


_parse_put, _parse_one, _parse_page = parser_of(SchedulePut), parser_of(Schedule), parser_of(SchedulePage)
_parse_paused, _parse_upcoming, _parse_triggered = parser_of(_Paused), parser_of(_Upcoming), parser_of(Triggered)


def put_schedule(
    topic: str,
    name: str,
    body: Any,
    *,
    cron: str | None = None,
    zone: str | None = None,
    every: Seconds | None = None,
    delays: Sequence[Seconds] | None = None,
    start: Time | None = None,
    end: Time | None = None,
    count: int | None = None,
    jitter: Seconds | None = None,
    catch_up: Literal["skip", "one", "all"] | None = None,
    overlap: Literal["allow", "skip"] | None = None,
    paused: bool | None = None,
    headers: Mapping[str, str] | None = None,
    priority: Priority | None = None,
    ttr: Seconds | None = None,
) -> Call[SchedulePut]:
    """Create a recurring schedule, or replace the one of its name. Its messages have ids like `name@due_ms`. Returns its next
    time.

    One of `cron` (in a `zone`, by default UTC), `every` and `delays`. start, end: no firing before, or after. count: of firings.
    catch_up: times that passed while the server did not run are left out (`skip`), made up for by `one`, or `all` fired. overlap:
    with `skip`, a time is left out until the message before is done with. paused: None leaves it as it is.

    >>> client.put_schedule("mails", "report", {"report": "daily"}, cron="0 9 * * MON-FRI", zone="Europe/Berlin").created
    True
    >>> client.put_schedule("mails", "report", {"report": "daily"}, cron="0 9 * * MON-FRI", zone="Europe/Atlantis")
    Traceback (most recent call last):
    turtlemq.client.errors.InvalidSchedule: 'Europe/Atlantis' is no time zone; give a name of the IANA database, such as \
Europe/Berlin or UTC
    """
    out = outgoing_message(body, "body", ttr=ttr, priority=priority, headers=headers)
    if isinstance(delays, str | bytes):
        raise InvalidArgument("delays are a list of seconds or timedeltas")
    fields = without_none(
        cron=cron,
        zone=zone,
        every=seconds_of("every", every),
        delays=None if delays is None else [seconds_of("delays", delay) for delay in delays],
        start_ms=to_ms(start),
        end_ms=to_ms(end),
        count=count,
        jitter=seconds_of("jitter", jitter),
        catch_up=catch_up,
        overlap=overlap,
        paused=paused,
        headers=out.headers,
        priority=out.priority,
        ttr=out.ttr,
    )
    fields |= {"body": Raw(out.body)} if out.is_json else {"body_base64": out.body}
    return Call(json_request(path(topic, "schedules", name), fields, "PUT"), _parse_put)


def get_schedule(topic: str, name: str) -> Call[Schedule]:
    """A schedule: its timing, its message, its next time and its last one. Raises `UnknownSchedule`.

    >>> _ = client.put_schedule("mails", "poll", b"", delays=[60, 300, 3600])
    >>> client.get_schedule("mails", "poll").delays
    [60.0, 300.0, 3600.0]
    """
    return Call(Request("GET", path(topic, "schedules", name)), _parse_one)


def schedule_page(topic: str, *, limit: int = 1000, cursor: str | None = None) -> Call[SchedulePage]:
    """One page of schedules, those that fire next first; `schedules` goes through all pages.

    >>> _ = client.put_schedule("mails", "hourly", b"", every=3600)
    >>> [schedule.name for schedule in client.schedule_page("mails").schedules]
    ['hourly']
    """
    return Call(Request("GET", path(topic, "schedules", limit=limit, cursor=cursor)), _parse_page)


def next_times(topic: str, name: str, count: int = 10) -> Call[list[int]]:
    """The next times of a schedule, in epoch milliseconds; of a paused one, as if it was resumed now.

    >>> _ = client.put_schedule("mails", "hourly", b"", every=3600, start=4_000_000_000_000)
    >>> client.next_times("mails", "hourly", 2)
    [4000000000000, 4000003600000]
    """
    return Call(
        Request("GET", path(topic, "schedules", name, "next", count=count)), lambda answer: _parse_upcoming(answer).next_ms
    )


def trigger_schedule(topic: str, name: str) -> Call[Triggered]:
    """Put the message of a schedule now; its times stay as they are. Returns its id and due time. A try whose answer was lost may
    have put one, too.

    >>> _ = client.put_schedule("mails", "hourly", b"work", every=3600)
    >>> client.trigger_schedule("mails", "hourly").id == client.fetch("mails", wait=5)[0].id
    True
    """
    return Call(Request("POST", path(topic, "schedules", name, "trigger")), _parse_triggered)


def pause_schedule(topic: str, name: str) -> Call[bool]:
    """Let a schedule fire no more until it is resumed. Returns True.

    >>> _ = client.put_schedule("mails", "hourly", b"", every=3600)
    >>> client.pause_schedule("mails", "hourly"), client.get_schedule("mails", "hourly").next_ms
    (True, None)
    """
    return _set_paused(topic, name, "pause")


def resume_schedule(topic: str, name: str) -> Call[bool]:
    """Let a schedule fire again; times that passed in the pause are left out. Returns False.

    >>> _ = client.put_schedule("mails", "hourly", b"", every=3600, paused=True)
    >>> client.resume_schedule("mails", "hourly")
    False
    """
    return _set_paused(topic, name, "resume")


def _set_paused(topic: str, name: str, verb: str) -> Call[bool]:
    return Call(Request("POST", path(topic, "schedules", name, verb)), lambda answer: _parse_paused(answer).paused)


def drop_schedule(topic: str, name: str) -> Call[None]:
    """Delete a schedule; messages that have come due stay. Raises `UnknownSchedule`.

    >>> _ = client.put_schedule("mails", "hourly", b"", every=3600)
    >>> client.drop_schedule("mails", "hourly")
    >>> client.drop_schedule("mails", "hourly")
    Traceback (most recent call last):
    turtlemq.client.errors.UnknownSchedule: there is no schedule 'hourly'
    """
    request = Request("DELETE", path(topic, "schedules", name))
    return Call(request, lambda answer: None, lambda error: isinstance(error, UnknownSchedule))
