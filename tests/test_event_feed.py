"""Events of a topic: `GET …/events` and `turtlemq tail` tell everything that happens, from the files, and cost nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import PATIENCE_S, PROGRAM, Server, environment, running
from turtlemq.client import Client
from turtlemq.client.errors import Refused
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.topic.event_feed import Feed, FeedEvent

SETTINGS = Settings(backoff_jitter="none", backoff_base_ms=60_000, max_attempts=2, ack_durability="fsync")


def told(feed: Feed, limit: int = 10**9) -> list[FeedEvent]:
    """The next events of a feed, no more than `limit`."""
    found: list[FeedEvent] = []
    for event in feed:
        found += [] if event is None else [event]
        if len(found) == limit:
            break
    return found


def words(events: list[FeedEvent]) -> list[tuple[str, str]]:
    return [(one.event, one.id) for one in events]


def busy(engine: Engine) -> None:
    """Every kind of event, at rising times."""
    engine.submit("t", [Message(b"x", due_ms=1_000, id=id_) for id_ in ("a", "b")], now_ms=10)
    engine.submit("t", [Message(b"x", due_ms=90_000, id="c")], now_ms=20)
    engine.reschedule("t", "c", 30, due_ms=95_000)
    engine.reschedule("t", "c", 40, body=b"y")
    engine.cancel("t", ["c"], 50)
    engine.move_group("t", "g", "earliest", 60)
    engine.tick(1_000)
    engine.reserve("t", "g", 2, 1_010, consumer="w1")
    engine.ack("t", "g", ["a", "-b"], 1_020, error="no\nframe")
    engine.tick(70_000)
    engine.reserve("t", "g", 1, 70_010, consumer="w2")
    engine.ack("t", "g", ["-b"], 70_020, error="again")
    topic = engine.topic("t")
    engine.requeue("t", topic.view.letters_of(["b"])["b"], 70_030)
    engine.tick(70_040)
    engine.reserve("t", "g", 1, 70_050)
    engine.give_back("t", "g", ["b"], 70_060)
    engine.cancel("t", ["b"], 70_070)


EVERYTHING = [
    *[("created", id_) for id_ in ("a", "b", "c")],
    ("rescheduled", "c"),
    ("edited", "c"),
    ("cancelled", "c"),
    ("group placed", ""),
    *[("ready", id_) for id_ in ("a", "b")],
    *[("reserved", id_) for id_ in ("a", "b")],
    ("failed", "b"),
    ("acked", "a"),
    ("ready", "b"),
    ("reserved", "b"),
    ("dead", "b"),
    ("requeued", "b"),
    ("ready", "b"),
    ("reserved", "b"),
    ("given back", "b"),
    ("cancelled", "b"),
]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data", settings=SETTINGS)
    one.topic("t", create=True)
    yield one
    one.close()


def test_the_feed_tells_everything_in_the_order_of_time(engine: Engine) -> None:
    feed = engine.topic("t").view.events(since_ms=0)
    busy(engine)
    events = told(engine.topic("t").view.events(since_ms=0))
    assert told(feed) == [], "a feed ends where the files ended when it was made"
    assert words(events) == EVERYTHING
    assert [one.at_ms for one in events] == sorted(one.at_ms for one in events)
    failed = next(one for one in events if one.event == "failed")
    assert failed[3:] == ("g", "w1", 1, None, 61_020, "no\nframe")
    dead = next(one for one in events if one.event == "dead")
    assert (dead.consumer, dead.attempt, dead.error) == ("w2", 2, "again")


def test_a_cursor_goes_on_event_by_event_and_after_a_restart(engine: Engine, tmp_path: Path) -> None:
    view = engine.topic("t").view
    cursor = view.events().cursor
    busy(engine)
    engine.close()
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    found: list[FeedEvent] = []
    while True:
        feed = engine.topic("t").view.events(cursor)
        page = told(feed, 1)
        assert not feed.missed
        if not page:
            break
        found, cursor = found + page, feed.cursor
    assert words(found) == EVERYTHING
    engine.close()


def test_since_begins_at_its_time_in_every_log(engine: Engine) -> None:
    busy(engine)
    late = [one for one in told(engine.topic("t").view.events(since_ms=70_000)) if one.at_ms >= 70_000]
    assert words(late) == EVERYTHING[13:]
    assert told(engine.topic("t").view.events(since_ms=99_000)) == []


def test_files_that_retention_took_are_missed_not_an_error(tmp_path: Path) -> None:
    settings = Settings(segment_bytes=4096, history_hours=0.0003, beat_ms=10)
    engine = Engine.open(tmp_path / "data", settings=settings)
    engine.topic("t", create=True)
    cursor = engine.topic("t").view.events().cursor
    for n in range(120):
        now = 1_000 * n
        engine.submit("t", [Message(b"x" * 200, due_ms=now, id=f"m{n}")], now)
        engine.tick(now)
        engine.ack("t", "g", engine.reserve("t", "g", 9, now).ids, now)
        for _ in range(3):
            engine.topic("t").maintain()
        engine.tick(now + 500)
    feed = engine.topic("t").view.events(cursor)
    assert feed.missed
    events = told(feed)
    assert events[-1][:3] == (119_000, "acked", "m119")
    assert len(events) < 400
    again = engine.topic("t").view.events(feed.cursor)
    assert (again.missed, told(again)) == (False, [])
    engine.close()


def test_a_cursor_of_another_topic_of_that_name_is_missed(engine: Engine) -> None:
    busy(engine)
    cursor = engine.topic("t").view.events(since_ms=0).cursor
    told(feed := engine.topic("t").view.events(cursor))
    engine.drop_topic("t")
    engine.topic("t", create=True)
    again = engine.topic("t").view.events(feed.cursor)
    assert (again.missed, told(again)) == (True, [])
    for bad in ("", "1-2-3", "a-b-c-d", "1-2-3-4.5.6", "-1-2-3-4", f"{10**30}-0-0-0"):
        with pytest.raises(InvalidArgument, match="no cursor"):
            engine.topic("t").view.events(bad)


def test_a_long_event_is_read_in_steps(engine: Engine) -> None:
    engine.submit("t", [Message(b"x" * 500, due_ms=0, id=f"m{n}") for n in range(3_000)], 0)
    engine.move_group("t", "g", "earliest", 0)
    engine.tick(1)
    cursor = engine.topic("t").view.events().cursor
    engine.ack("t", "g", engine.reserve("t", "g", 3_000, 2).ids, 3)
    steps = found = 0
    for event in engine.topic("t").view.events(cursor):
        steps += 1
        found += event is not None
    assert found == 6_000
    assert steps >= found + 30, "no more than 100 documents are read between two steps"
    part = engine.topic("t").view.events(cursor)
    first = told(part, 1_234)
    assert words(first) + words(told(engine.topic("t").view.events(part.cursor))) == words(
        told(engine.topic("t").view.events(cursor))
    ), "a cursor may stand within an event"


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("events") / "data") as found:
        yield found


def test_a_long_poll_ends_with_the_next_event(server: Server) -> None:
    with Client(server.url) as client, ThreadPoolExecutor(1) as pool:
        client.put("poll", b"x", id="before")
        cursor = client.events("poll").cursor
        assert client.events("poll", cursor=cursor, wait=0.3).events == []
        waiting = pool.submit(client.events, "poll", cursor=cursor, wait=30)
        time.sleep(0.1)
        client.put("poll", b"x", id="after", delay=60)
        page = waiting.result(PATIENCE_S)
        assert [(one.event, one.id) for one in page.events] == [("created", "after")]
        assert [one.id for one in client.events("poll", since=0, limit=1).events] == ["before"]
        with pytest.raises(Refused, match="no cursor"):
            client.events("poll", cursor="x")


def test_a_group_is_told_without_what_others_do(server: Server) -> None:
    with Client(server.url) as client:
        client.put("two", b"x", id="m")
        for group in ("g", "h"):
            client.fetch("two", group=group, wait=5)
        events = client.events("two", since=0, group="g").events
        assert [(one.event, one.group) for one in events if one.event != "group placed"] == [
            ("created", ""),
            ("ready", ""),
            ("reserved", "g"),
        ]


# The command line


def test_tail_prints_whole_lines_until_ctrl_c(server: Server, tmp_path: Path) -> None:
    long_id, error = "order-" + "1" * 190, "KeyError: " + "x" * 300 + "\n  line 2"
    with Client(server.url) as client, (tmp_path / "out").open("w") as out:
        client.put("tailed", b"x", id="early")
        command = [*PROGRAM, "tail", "tailed", "--since", "-1h", "--url", server.url]
        tail = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=environment() | {"COLUMNS": "80"})
        try:
            client.put("tailed", b"x", id=long_id)
            ids = [message.id for message in client.fetch("tailed", max=2, wait=5, consumer="w\x1b[2J")]
            client.fail("tailed", [long_id], error=error)
            end = time.monotonic() + PATIENCE_S
            while "line 2" not in (tmp_path / "out").read_text() and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            tail.send_signal(signal.SIGINT)
            _, trouble = tail.communicate(timeout=PATIENCE_S)
    assert (tail.returncode, trouble, len(ids)) == (0, b"", 2)
    lines = (tmp_path / "out").read_text().splitlines()
    assert "created       early" in lines[0]
    assert any(f"created       {long_id}" in line for line in lines)
    failed = next(line for line in lines if "failed" in line)
    assert long_id in failed
    assert repr(error)[1:-1] in failed
    assert "\x1b" not in "".join(lines)


def test_tail_knows_unknown_topics_and_json(server: Server) -> None:
    assert "UNKNOWN_TOPIC" in Line(server.url)("tail", "nothing", code=1)
    with Client(server.url) as client:
        client.put("lines", b"x", id="m", delay=60)
    command = [*PROGRAM, "tail", "lines", "--since", "-1h", "--json", "--url", server.url]
    tail = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
    assert tail.stdout is not None
    line = tail.stdout.readline()
    os.kill(tail.pid, signal.SIGINT)
    tail.communicate(timeout=PATIENCE_S)
    assert tail.returncode == 0
    assert '"event": "created", "id": "m"' in line


def test_tail_goes_on_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "data") as first, Client(first.url) as client:
        client.put("t", b"x", id="one", delay=60)
        port = first.url.rpartition(":")[2]
        command = [*PROGRAM, "tail", "t", "--since", "-1h", "--url", first.url]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        assert tail.stdout is not None
        assert "one" in tail.stdout.readline()
    try:
        with running(tmp_path / "data", "--port", port) as again, Client(again.url) as client:
            client.put("t", b"x", id="two", delay=60)
            assert "two" in tail.stdout.readline()
    finally:
        tail.send_signal(signal.SIGINT)
        _, trouble = tail.communicate(timeout=PATIENCE_S)
    assert "Trying again" in trouble
