"""`turtlemq tail`: the events of a topic, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

from turtlemq.cli.call import URL, CallFailed, answered, path
from turtlemq.cli.output import fail, print_error, print_json, printable
from turtlemq.cli.parameters import AsJson, OneGroup, Topic, Url, time_option
from turtlemq.cli.times import TIME_HELP, format_duration, format_time

WAIT_S = 20  # of one request
AGAIN_S = 1.0  # before a server that could not be reached is asked again


def tail(
    topic: Topic,
    group: OneGroup = None,
    since: Annotated[int | None, time_option(f"From when on: {TIME_HELP}. Without it, from now on.", "--since")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Show the events of a topic live, a line for each, until Ctrl-C: puts, messages that come due, deliveries, acks,
    failures, deaths, cancels. Nothing is cut. It goes on after a restart of the server.

    turtlemq tail orders

    turtlemq tail orders --since -10m --group billing --json
    """
    try:
        _follow(url, topic, group, since, as_json)
    except KeyboardInterrupt:
        return


def _follow(url: str, topic: str, group: str | None, since: int | None, as_json: bool) -> None:
    place: dict[str, Any] = {"since_ms": since}
    was_reached = is_lost = False
    while True:
        try:
            page = answered(url, "GET", path(topic, "events", group=group, wait=WAIT_S if was_reached else 0, **place))
        except CallFailed as error:
            if error.status not in (0, 503) or not was_reached:
                fail(str(error), error.exit_code)
            if not is_lost:
                print_error(f"{error} Trying again …")
            is_lost = True
            time.sleep(AGAIN_S)
            continue
        if page["missed"]:
            print_error("events are missing here: their files are gone")
        for event in page["events"]:
            print_json(event) if as_json else print(line_of(event))
        sys.stdout.flush()
        place, was_reached, is_lost = {"cursor": page["cursor"]}, True, False


def line_of(event: dict[str, Any]) -> str:
    """An event on one line.

    >>> line_of({"at_ms": 0, "event": "acked", "id": "a", "group": "g", "consumer": "w", "attempt": 2}).partition("  ")[2]
    'acked         a  attempt 2 of g by w'
    """
    at_ms = event["at_ms"]
    words = [format_time(at_ms), f"{event['event']:<12}", *([printable(event["id"])] if "id" in event else [])]
    attempt = f"attempt {event['attempt']} of {event['group']}" if "attempt" in event and "group" in event else ""
    told = attempt or event.get("group", "")
    consumer = event.get("consumer", "")
    words += [f"{told} by {printable(consumer)}" if consumer else told] if told else []
    for name, word in (("due_ms", "due"), ("next_ms", "again")):
        if name in event and event[name] > at_ms:
            words.append(f"{word} in {format_duration(event[name] - at_ms)}, at {format_time(event[name])}")
    words += [printable(event["error"])] if "error" in event else []
    return "  ".join(words)
