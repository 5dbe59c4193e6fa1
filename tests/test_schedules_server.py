"""Recurring schedules over HTTP, the client and the command line, on a virtual clock, and with several shards."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import running
from turtlemq.client import AsyncClient, Client, errors
from turtlemq.schedules import LEAD_MS
from turtlemq.shards import shard_of
from turtlemq.testing import Turtle

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
HOUR = 3_600_000


@pytest.fixture(scope="module")
def turtle() -> Iterator[Turtle]:
    with Turtle(now=datetime(2030, 1, 31, 8, 30, tzinfo=UTC)) as one:
        yield one


@pytest.fixture
def client(turtle: Turtle) -> Client:
    for topic in turtle.client.topics():
        turtle.client.drop_topic(topic.topic)
    return turtle.client


def fired(client: Client, topic: str = "t") -> list[str]:
    """Fetch and acknowledge everything that is ready."""
    ids: list[str] = []
    while batch := client.fetch(topic, max=1_000):
        ids += [message.id for message in batch]
        client.ack(topic, [message.id for message in batch])
    return ids


def call(turtle: Turtle, method: str, path: str, body: Any = None) -> Any:
    """The decoded answer of a request; of a refusal its error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(turtle.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return json.load(refused)["error"]


# Time


def test_a_moved_clock_fires_each_schedule_at_its_own_time(turtle: Turtle, client: Client) -> None:
    start = turtle.now_ms
    client.put_schedule("t", "hourly", {"n": 1}, every=timedelta(hours=1), headers={"kind": "tick"}, priority="high", ttr=7)
    client.put_schedule("t", "poll", b"\x00", delays=[60, timedelta(minutes=5)])
    client.put_schedule("t", "nine", "good morning", cron="0 9 * * *", zone="Europe/Berlin")
    turtle.advance(hours=3)
    got = client.fetch("t", max=100)
    due = {message.id: message.due_ms - start for message in got}
    expected = {f"hourly@{start + n * HOUR}": n * HOUR for n in (1, 2, 3)}
    expected |= {f"poll@{start + 60_000}": 60_000, f"poll@{start + 360_000}": 360_000}
    assert due == expected
    assert [message.ready_ms - message.due_ms for message in got] == [0] * 5, "each was handed off at its own time"
    (hourly, *_) = [message for message in got if message.id.startswith("hourly")]
    assert (hourly.body, hourly.headers, hourly.priority) == ({"n": 1}, {"kind": "tick"}, "high")
    assert [message.body for message in got if message.id.startswith("poll")] == [b"\x00"] * 2
    turtle.move_to(datetime(2030, 2, 1, 8, tzinfo=UTC))
    (nine,) = [message for message in client.fetch("t", max=100) if message.id.startswith("nine")]
    assert (nine.body, nine.due_ms) == ("good morning", turtle.now_ms)
    poll = client.get_schedule("t", "poll")
    assert (poll.fired, poll.next_ms, poll.ended_ms is None, poll.last_ms) == (2, None, False, start + 360_000)


def test_the_night_of_daylight_saving_has_each_day_once(turtle: Turtle, client: Client) -> None:
    turtle.move_to(datetime(2030, 3, 30, 0, 0, tzinfo=UTC))
    client.put_schedule("t", "night", "", cron="30 2 * * *", zone="Europe/Berlin")
    utc = [datetime.fromtimestamp(at / 1000, UTC).strftime("%d %H:%M") for at in client.next_times("t", "night", 3)]
    assert utc == ["30 01:30", "31 01:00", "01 00:30"], "2:30 of the 31st does not exist: it fires at the end of the gap"
    turtle.move_to(datetime(2030, 4, 2, tzinfo=UTC))
    assert len(fired(client)) == 3


# One schedule after the other


def test_a_schedule_lives_through_all_calls(turtle: Turtle, client: Client) -> None:
    start = turtle.now_ms
    put = client.put_schedule("t", "s", {"n": 1}, every=3600, count=5, jitter=0, catch_up="all", overlap="skip")
    assert (put.name, put.next_ms, put.created) == ("s", start + HOUR, True)
    assert client.next_times("t", "s", 3) == [start + n * HOUR for n in (1, 2, 3)]
    assert len(client.next_times("t", "s", 1_000)) == 5, "count ends it"
    turtle.advance(minutes=30)
    again = client.put_schedule("t", "s", {"n": 2}, every=3600, count=5)
    assert (again.created, again.next_ms) == (False, start + HOUR), "put again, it goes on where it was"
    found = client.get_schedule("t", "s")
    assert (found.body, found.every, found.count, found.catch_up, found.created_ms) == ({"n": 2}, 3600, 5, "one", start)
    assert client.pause_schedule("t", "s") is True
    assert client.put_schedule("t", "s", {"n": 3}, every=3600, count=5).next_ms is None, "a put leaves it paused"
    turtle.advance(hours=2)
    assert client.resume_schedule("t", "s") is False
    assert client.get_schedule("t", "s").next_ms == start + 3 * HOUR, "times in the pause are left out"
    turtle.advance(hours=1)
    assert [message.body for message in client.fetch("t")] == [{"n": 3}]
    client.drop_schedule("t", "s")
    with pytest.raises(errors.UnknownSchedule):
        client.get_schedule("t", "s")
    turtle.advance(hours=9)
    assert client.stats("t").ready == 1, "deleted, it fires no more"


def test_triggers_fire_at_once_and_each_alone(turtle: Turtle, client: Client) -> None:
    client.put_schedule("t", "s", "go", every=3600, paused=True)
    now = turtle.now_ms
    ids = [client.trigger_schedule("t", "s").id for _ in range(3)]
    assert ids == [f"s@{now}", f"s@{now - 1}", f"s@{now - 2}"], "the clock stands still, and no firing is lost"
    assert sorted(fired(client)) == sorted(ids)
    assert client.get_schedule("t", "s").fired == 0


def test_a_firing_ahead_is_taken_back_with_its_schedule(turtle: Turtle, client: Client) -> None:
    client.put_schedule("t", "s", "", every=3600)
    turtle.advance(milliseconds=HOUR - LEAD_MS + 1)
    assert client.stats("t").sleep == 1
    client.drop_schedule("t", "s")
    assert client.stats("t").sleep == 0
    turtle.advance(hours=2)
    assert fired(client) == []


def test_pages_hold_every_schedule_once(turtle: Turtle, client: Client) -> None:
    for n in range(25):
        client.put_schedule("t", f"s{n:02}", n, every=3600 + n)
    client.put_schedule("t", "held", 0, every=60, paused=True)
    names = [schedule.name for schedule in client.schedules("t", limit=10)]
    assert names == [*[f"s{n:02}" for n in range(25)], "held"], "those that fire next come first, paused ones last"
    assert client.stats("t").schedules == 26
    assert len(client.schedule_page("t", limit=10).schedules) == 10
    client.configure("empty")
    assert client.schedule_page("empty").schedules == []
    with pytest.raises(errors.UnknownTopic):
        client.schedule_page("nowhere")


# Refusals


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ({}, "INVALID_SCHEDULE", "give one of cron, every and delays"),
        ({"cron": "@daily", "every": 5}, "INVALID_SCHEDULE", "give one of cron, every and delays, not cron and every"),
        ({"cron": ""}, "INVALID_SCHEDULE", "cron: '' makes no times"),
        ({"cron": "61 * * * *"}, "INVALID_SCHEDULE", "cron '61 * * * *': '61' is no minute (0 to 59)"),
        ({"cron": "0 0 30 2 *"}, "INVALID_SCHEDULE", "cron '0 0 30 2 *': there is no such day"),
        ({"cron": "* * *"}, "INVALID_SCHEDULE", "it has 3 fields; give 5"),
        ({"cron": "@daily", "zone": "Mars/Phobos"}, "INVALID_SCHEDULE", "'Mars/Phobos' is no time zone"),
        ({"every": 60, "zone": "UTC"}, "INVALID_SCHEDULE", "zone goes with cron"),
        ({"every": 0}, "INVALID_SCHEDULE", "every: 0.0 makes no times"),
        ({"every": 0.01}, "INVALID_SCHEDULE", "every: give 0.1 to"),
        ({"every": 1e-9}, "INVALID_SCHEDULE", "every: give 0.1 to"),
        ({"cron": "@daily", "zone": ""}, "INVALID_SCHEDULE", "'' is no time zone"),
        ({"cron": "@daily", "zone": "localtime"}, "INVALID_SCHEDULE", "'localtime' is no time zone"),
        ({"every": -5}, "INVALID_SCHEDULE", "every: give seconds"),
        ({"every": "soon"}, "INVALID_SCHEDULE", "every: "),
        ({"every": 1e18}, "INVALID_SCHEDULE", "every: 1e+18 seconds are too many"),
        ({"delays": []}, "INVALID_SCHEDULE", "delays: [] makes no times"),
        ({"delays": [5, 0]}, "INVALID_SCHEDULE", "delays: give 0.001 to"),
        ({"every": 5, "start_ms": 1_900_000_000}, "INVALID_SCHEDULE", "It looks like seconds."),
        ({"every": 5, "end_ms": 1_600_000_000_000}, "INVALID_SCHEDULE", "the schedule has no time to come"),
        ({"every": 5, "count": 0}, "INVALID_SCHEDULE", "count is 1 to"),
        ({"every": 5, "catch_up": "some"}, "INVALID_SCHEDULE", "allowed are 'skip', 'one', 'all'"),
        ({"every": 5, "zones": 1}, "INVALID_SCHEDULE", "did you mean `zone`?"),
        ({"every": 5, "body": None, "ttr": -1}, "INVALID_MESSAGE", "ttr is a number"),
        ({"every": 5, "headers": {"a": "x" * 40_000}, "body": 1}, "TOO_LARGE", "headers"),
    ],
    ids=str,
)
def test_a_refusal_says_why_and_creates_no_topic(
    turtle: Turtle, client: Client, body: dict[str, Any], code: str, text: str
) -> None:
    error = call(turtle, "PUT", "/v1/topics/new/schedules/s", {"body": 1} | body)
    assert error["code"] == code, error
    assert text in error["message"]
    assert client.topics() == []


def test_names_and_unknown_schedules_are_refused(turtle: Turtle, client: Client) -> None:
    given = {"every": 60, "body": 1}
    for name in ("-a", "%2E%2E", "a%2Fb", "x" * 187, "a%0Ab"):
        assert call(turtle, "PUT", f"/v1/topics/t/schedules/{name}", given)["code"] == "INVALID_ID", name
    assert call(turtle, "PUT", "/v1/topics/t/schedules/none", {"every": 60})["code"] == "INVALID_MESSAGE"
    call(turtle, "PUT", "/v1/topics/t/schedules/a%20%C3%BC@", given)
    assert [schedule.name for schedule in client.schedules("t")] == ["a ü@"]
    one = "/v1/topics/t/schedules/other"
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/next"),
        ("POST", "/trigger"),
        ("POST", "/pause"),
        ("POST", "/resume"),
    ):
        assert call(turtle, method, one + path)["code"] == "UNKNOWN_SCHEDULE", path
    for query in ("limit=0", "limit=20000", "cursor=x", "state=sleep"):
        assert call(turtle, "GET", f"/v1/topics/t/schedules?{query}")["code"] == "INVALID_ARGUMENT", query
    for query in ("count=0", "count=1001"):
        assert call(turtle, "GET", f"/v1/topics/t/schedules/a%20%C3%BC@/next?{query}")["code"] == "INVALID_ARGUMENT", query


def test_changes_are_in_the_audit_log(turtle: Turtle, client: Client) -> None:
    since = turtle.now
    client.put_schedule("audited", "s", 1, every=60)
    client.put_schedule("audited", "s", 2, every=60)
    client.pause_schedule("audited", "s")
    client.resume_schedule("audited", "s")
    client.trigger_schedule("audited", "s")
    client.drop_schedule("audited", "s")
    actions = [(event.action, event.target) for event in client.audit("audited", since=since)]
    names = ["schedule_created", "schedule_changed", "pause", "resume", "schedule_triggered", "schedule_deleted"]
    assert actions == [(name, "s") for name in names]


# Other doors


def test_the_async_client_does_the_same(turtle: Turtle, client: Client) -> None:
    async def story() -> tuple[list[str], bool, str]:
        async with AsyncClient(turtle.url) as other:
            many = [other.put_schedule("t", f"s{n}", n, every=60 + n) for n in range(5)]
            assert [put.created for put in await asyncio.gather(*many)] == [True] * 5
            names = [schedule.name async for schedule in other.schedules("t", limit=2)]
            await other.drop_schedule("t", "s0")
            return names, await other.pause_schedule("t", "s1"), (await other.trigger_schedule("t", "s2")).id

    assert asyncio.run(story()) == ([f"s{n}" for n in range(5)], True, f"s2@{turtle.now_ms}")
    assert client.stats("t").schedules == 4


def test_the_command_line_keeps_schedules(turtle: Turtle, client: Client) -> None:
    line = Line(turtle.url)
    put = ("schedules", "put", "t", "report")
    assert line(*put, '{"a": 1}', "--cron", "0 9 * * *", "--zone", "Europe/Berlin", "--header", "k=v").startswith("next: 20")
    assert (
        line("schedules", "put", "t", "poll", "17", "--delays", "1m,5m", "--text", "--paused")
        == "paused or ended: it has no next time\n"
    )
    listed = line("schedules", "list", "t")
    assert "0 9 * * * Europe/Berlin" in listed
    assert "after 1 min, 5 min" in listed
    assert "paused" in listed
    assert [one["name"] for one in line.json("schedules", "list", "t")] == ["report", "poll"]
    assert "more than these 1" in line("schedules", "list", "t", "--limit", "1")
    (got,) = line.json("schedules", "get", "t", "report")
    assert (got["body"], got["headers"], got["zone"]) == ({"a": 1}, {"k": "v"}, "Europe/Berlin")
    assert '{"a": 1}' in line("schedules", "get", "t", "report")
    assert len(line("schedules", "next", "t", "report", "--count", "3").splitlines()) == 3
    assert line("schedules", "pause", "t", "report") == "paused\n"
    assert line("schedules", "resume", "t", "report") == "resumed\n"
    assert line("schedules", "trigger", "t", "report") == f"report@{turtle.now_ms}\n"
    assert "Say --yes if so" in line("schedules", "delete", "t", "report", code=2)
    assert line("schedules", "delete", "t", "report", "--yes") == "deleted\n"
    assert "INVALID_SCHEDULE: 'X' is no time zone" in line(*put, "1", "--cron", "@daily", "--zone", "X", code=2)
    assert "UNKNOWN_SCHEDULE" in line("schedules", "get", "t", "report", code=1)


def test_any_process_answers_for_the_owner_of_the_topic(tmp_path: Path) -> None:
    topics = [next(f"t{n}" for n in range(99) if shard_of(f"t{n}", 2) == shard) for shard in (0, 1)]
    with running(tmp_path / "data", "--shards", "2") as server, Client(server.url) as client:
        for topic in topics:
            client.put_schedule(topic, "s", topic, every=3600)
            assert client.next_times(topic, "s", 2)[1] - client.get_schedule(topic, "s").next_ms == HOUR  # type: ignore[operator]
            assert client.trigger_schedule(topic, "s").id == client.fetch(topic, wait=10)[0].id
            assert [schedule.body for schedule in client.schedules(topic)] == [topic]
            client.drop_schedule(topic, "s")
        assert [client.stats(topic).schedules for topic in topics] == [0, 0]
