"""Pause and resume of topics and groups: nothing is delivered meanwhile, everything else goes on, and it outlives the process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.command_line import Line
from tests.harness.server_process import PATIENCE_S, Server, running
from turtlemq import backup
from turtlemq.broker.results import Reserved
from turtlemq.client import Client, Consumer
from turtlemq.engine import Engine
from turtlemq.errors import Unavailable, UnknownGroup
from turtlemq.model import Message
from turtlemq.server.fetches import Fetches
from turtlemq.server.long_polls import FetchRequest, LongPoll
from turtlemq.server.rate_limit import FlowControl
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

SETTINGS = Settings(backoff_jitter="none", backoff_base_ms=100, group_expire_hours=0.02, beat_ms=1_000)
MINUTE_MS = 60_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data", settings=SETTINGS)
    one.submit("t", [Message(b"x", due_ms=10, id=id_) for id_ in ("a", "b")], now_ms=0)
    for group in ("g", "h"):
        one.move_group("t", group, "earliest", 0)
    one.tick(10)
    yield one
    one.close()


def reserve(engine: Engine, group: str, now_ms: int, count: int = 9) -> list[str]:
    return engine.reserve("t", group, count, now_ms).ids


# The engine


def test_a_paused_group_gets_nothing_and_the_other_goes_on(engine: Engine) -> None:
    engine.topic("t").set_paused("g", True)
    assert (reserve(engine, "g", 11), reserve(engine, "h", 11)) == ([], ["a", "b"])
    assert [stats.paused for _, stats in sorted(engine.groups("t").items())] == [True, False]
    engine.topic("t").set_paused("g", False)
    assert reserve(engine, "g", 12) == ["a", "b"]


def test_a_paused_topic_gives_nothing_to_old_and_new_groups(engine: Engine) -> None:
    engine.topic("t").set_paused(None, True)
    assert [reserve(engine, group, 11) for group in ("g", "h", "new")] == [[], [], []]
    engine.topic("t").set_paused("g", False)
    assert reserve(engine, "g", 12) == [], "the topic is paused still"
    engine.topic("t").set_paused(None, False)
    assert [reserve(engine, group, 13) for group in ("g", "h", "new")] == [["a", "b"]] * 3


def test_messages_come_due_and_leases_and_retries_go_on_meanwhile(engine: Engine) -> None:
    engine.submit("t", [Message(b"x", due_ms=500, id="later")], now_ms=10)
    assert engine.reserve("t", "g", 2, 11, ttr_ms=1_000).ids == ["a", "b"]
    engine.topic("t").set_paused("g", True)
    assert engine.extend("t", "g", ["b"], 200, 12).extended == 1
    assert engine.ack("t", "g", ["-a"], 13).failed == 1
    assert engine.tick(600) is not None
    assert engine.stats("t").sleep == 0, "what was to sleep is ready"
    figures = engine.groups("t")["g"]
    assert (figures.ready, figures.reserve) == (3, 0), "the lease of b is over, and a waits for its next attempt"
    engine.topic("t").set_paused("g", False)
    assert sorted(reserve(engine, "g", 700)) == ["a", "b", "later"]
    assert engine.check() == []


def test_pauses_survive_a_restart_a_kill_and_a_backup(engine: Engine, tmp_path: Path) -> None:
    topic = engine.topic("t")
    topic.set_paused("g", True)
    engine.close()
    again = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert (reserve(again, "g", 20), reserve(again, "h", 20)) == ([], ["a", "b"])
    again.topic("t").set_paused(None, True)
    again.folder.unlock()  # as if the process were killed: nothing more is written
    killed = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert killed.topic("t").view.is_paused()
    assert killed.damage() == {}
    killed.close()
    door = Door()
    backup.make(door, backup.files_of_stopped(door, tmp_path / "data"), tmp_path / "backups", 50)
    backup.restore(door, backup.choose(door, tmp_path / "backups"), tmp_path / "restored")
    restored = Engine.open(tmp_path / "restored", settings=SETTINGS)
    assert [restored.topic("t").view.is_paused(name) for name in (None, "g", "h")] == [True, True, True]
    restored.topic("t").set_paused(None, False)
    assert [restored.topic("t").view.is_paused(name) for name in (None, "g", "h")] == [False, True, False]
    restored.close()


def test_a_deleted_group_leaves_no_pause_behind(engine: Engine) -> None:
    engine.topic("t").set_paused("g", True)
    engine.drop_group("t", "g", 11)
    assert reserve(engine, "g", 12) == ["a", "b"]
    with pytest.raises(UnknownGroup):
        engine.topic("t").set_paused("typo", True)


def test_a_paused_group_does_not_expire(engine: Engine) -> None:
    for group in ("g", "h"):
        engine.ack("t", group, reserve(engine, group, 11), 11)
    engine.topic("t").set_paused("g", True)
    for minute in range(1, 9):
        engine.tick(minute * MINUTE_MS)
    assert set(engine.groups("t")) == {"g"}


@pytest.mark.parametrize("text", ["", "topic = 1\ngroups = []\n", 'topic = true\ngroups = "g"\n', "topic = true", "\x00"])
def test_an_unreadable_file_stops_the_topic_and_is_named(engine: Engine, tmp_path: Path, text: str) -> None:
    engine.topic("t").set_paused(None, True)
    engine.close()
    (tmp_path / "data" / "topic" / "t" / "paused.toml").write_text(text)
    again = Engine.open(tmp_path / "data")
    with pytest.raises(Unavailable, match=r"paused\.toml"):
        again.topic("t")
    again.close()


def test_a_long_poll_is_not_answered_before_the_resume(engine: Engine) -> None:
    fetches, future = Fetches(engine, FlowControl()), Future[Reserved]()
    engine.topic("t").set_paused("g", True)
    fetches.wait(LongPoll(FetchRequest("t", "g", 9), future))
    for now in (11, 12):
        fetches.look_after("t")
        fetches.tick(now, lambda: True)
        fetches.answer_polls(now, 0.0, lambda: True)
        assert not future.done()
    engine.topic("t").set_paused("g", False)
    fetches.look_after("t")
    fetches.answer_polls(13, 0.0, lambda: True)
    assert future.result(0).ids == ["a", "b"]


# The server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("pause") / "data") as one:
        yield one


def pause(server: Server, place: str, verb: str = "pause") -> Any:
    return server.ok("POST", f"/v1/topics/{place}/{verb}")


def test_a_fetch_says_that_it_is_paused(server: Server) -> None:
    server.put("say", {"id": "m", "body": 1})
    assert pause(server, "say") == {"paused": True}
    fetch = "/v1/topics/say/fetch"
    assert server.ok("POST", fetch, {}) == {"messages": [], "paused": True}
    assert server.ok("POST", fetch, {"wait": 0.05}) == {"messages": [], "paused": True}
    answer = server.call("POST", fetch, {}, headers={"Accept": "application/bson"})
    assert (answer.status, answer.data, answer.headers["X-Turtlemq-Paused"]) == (200, b"", "true")
    popped = server.ok("POST", "/v1/command", {"command": "pop", "topic": "say"})
    assert popped == {"success": True, "error": "", "id": "", "value": None}
    assert server.ok("GET", "/v1/topics/say")["paused"] is True
    assert [one["paused"] for one in server.ok("GET", "/v1/topics")["topics"] if one["topic"] == "say"] == [True]
    assert pause(server, "say", "resume") == {"paused": False}
    assert [message["id"] for message in server.fetch("say", wait=PATIENCE_S)] == ["m"]
    assert server.ok("POST", fetch, {}) == {"messages": []}


def test_unknown_topics_and_groups_are_refused(server: Server) -> None:
    server.put("known", {"body": 1})
    for place, code in (("nothing", "UNKNOWN_TOPIC"), ("known/groups/typo", "UNKNOWN_GROUP")):
        for verb in ("pause", "resume"):
            answer = server.call("POST", f"/v1/topics/{place}/{verb}")
            assert (answer.status, answer.code) == (404, code)


def test_a_long_poll_waits_until_the_resume(server: Server) -> None:
    server.ok("PUT", "/v1/topics/poll/groups/g", {})
    pause(server, "poll/groups/g")
    before = server.ok("GET", "/v1/status")["long_polls"]
    with ThreadPoolExecutor(1) as threads:
        poll = threads.submit(server.fetch, "poll", "g", wait=PATIENCE_S)
        eventually(lambda: server.ok("GET", "/v1/status")["long_polls"] == before + 1)
        server.put("poll", {"id": "m", "body": 1})
        eventually(lambda: server.ok("GET", "/v1/topics/poll")["stats"]["ready"] == 1)
        assert not poll.done()
        pause(server, "poll/groups/g", "resume")
        assert [message["id"] for message in poll.result(PATIENCE_S)] == ["m"]


def test_command_line_client_and_metrics_know_pauses(server: Server) -> None:
    line = Line(server.url)
    server.put("cli", {"id": "m", "body": 1})
    server.ok("PUT", "/v1/topics/cli/groups/mails", {})
    assert line("pause", "cli", "--group", "mails") == "cli mails is paused\n"
    assert line.json("pause", "cli") == [{"paused": True}]
    assert "paused" in line("groups", "list", "cli")
    assert "paused" in line("topics")
    metrics = server.call("GET", "/metrics").data.decode().splitlines()
    assert 'turtlemq_paused{topic="cli"} 1' in metrics
    assert 'turtlemq_paused{topic="cli",group="mails"} 1' in metrics
    assert line("resume", "cli", "--group", "mails") == "cli mails is resumed\nits topic is paused, though: turtlemq resume cli\n"
    assert line("resume", "cli") == "cli is resumed\n"
    assert "no group" in line("pause", "cli", "--group", "typo", code=1)
    assert 'turtlemq_paused{topic="cli"} 0' in server.call("GET", "/metrics").data.decode()


def test_a_python_consumer_waits_while_its_group_is_paused(server: Server) -> None:
    handled: list[str] = []
    with Client(server.url) as client:
        client.place_group("python", "g")
        assert client.pause("python", "g") is True
        with Consumer("python", lambda message: handled.append(message.id), client, group="g", wait=0.1):
            client.put("python", 1, id="m")
            eventually(lambda: client.group("python", "g").stats.ready == 1)
            eventually(lambda: server.ok("GET", "/v1/status")["long_polls"] > 0)
            assert handled == []
            assert client.resume("python", "g") is False
            eventually(lambda: handled == ["m"])
