"""Virtual clocks: a server whose time stands still until it is moved, and `turtlemq.testing` in tests of applications."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.harness.command_line import Line
from tests.harness.doc_pages import blocks
from tests.harness.server_process import ROOT, environment, run, running
from turtlemq.client import AsyncClient, Consumer, NewMessage
from turtlemq.client.errors import ClientError
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, Corrupt, DiskFull, InvalidArgument
from turtlemq.server.clock import VirtualClock, now_ms
from turtlemq.server.service import Service
from turtlemq.storage.door import Door
from turtlemq.testing import Turtle

DAY_MS = 86_400_000
BEGIN = datetime(2030, 1, 31, 8, tzinfo=UTC)
pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")


@pytest.fixture
def turtle(tmp_path: Path) -> Iterator[Turtle]:
    with Turtle(tmp_path / "turtle", now=BEGIN) as one:
        yield one


def ids(turtle: Turtle, topic: str = "t") -> list[str]:
    return [message.id for message in turtle.client.fetch(topic)]


# Time


def test_time_stands_still_until_it_is_moved(turtle: Turtle) -> None:
    assert turtle.now == BEGIN
    turtle.client.put("t", b"x", id="a", delay=0.001)
    assert ids(turtle) == []
    assert turtle.advance(milliseconds=1) == turtle.now == BEGIN + timedelta(milliseconds=1)
    assert ids(turtle) == ["a"]


def test_each_message_is_handed_off_at_its_own_time(turtle: Turtle) -> None:
    days = [3, 1, 2, 9]
    turtle.client.put_many("t", [NewMessage(body=b"x", id=str(day), delay=day * 86_400) for day in days])
    turtle.advance(days=5)
    fetched = turtle.client.fetch("t")
    assert [message.id for message in fetched] == ["1", "2", "3"]
    assert all(message.ready_ms == message.due_ms for message in fetched)
    assert {message.lease_until_ms for message in fetched} == {turtle.now_ms + 60_000}


def test_a_burst_at_one_time_is_ready_as_a_whole(turtle: Turtle) -> None:
    turtle.client.put_many("t", [NewMessage(body=b"x", delay=3600) for _ in range(9_000)], together=True)
    turtle.advance(hours=1)
    assert turtle.client.stats("t").ready == 9_000


def test_leases_end_at_their_own_time(turtle: Turtle) -> None:
    turtle.client.put("t", b"x", id="a")
    assert ids(turtle) == ["a"]
    turtle.advance(seconds=59, milliseconds=999)
    assert ids(turtle) == []
    turtle.advance(days=1)
    assert turtle.client.fetch("t")[0].attempt == 2
    first, _ = turtle.client.get("t", "a").attempts
    assert (first.outcome, first.ended_ms) == ("expired", first.reserved_ms + 60_000)


@pytest.mark.parametrize("back_off_s", [10, 3600])  # in memory, and asleep
def test_back_offs_are_over_at_their_own_time(turtle: Turtle, back_off_s: int) -> None:
    turtle.client.put("t", b"x", id="a")
    turtle.client.fetch("t")
    turtle.client.fail("t", ["a"], retry_delay=back_off_s)
    turtle.advance(seconds=back_off_s, milliseconds=-1)
    assert ids(turtle) == []
    turtle.advance(milliseconds=1)
    assert turtle.client.fetch("t")[0].attempt == 2


def test_retention_follows_the_clock(turtle: Turtle) -> None:
    turtle.client.configure("t", dead={"ttl_hours": 24}, max_attempts=1)
    turtle.client.put("t", b"x", id="a")
    turtle.client.fetch("t")
    turtle.client.fail("t", ["a"])
    turtle.advance(hours=23)
    assert turtle.client.stats("t").dead == 1
    turtle.advance(hours=2)
    turtle.advance(minutes=2)
    assert turtle.client.stats("t").dead == 0


def test_waiting_consumers_get_their_messages_at_the_end(turtle: Turtle) -> None:
    turtle.client.put("t", b"x", id="a", delay=86_400, ttr=1)
    handled, done = list[str](), threading.Event()

    def handle(message: object) -> None:
        handled.append(f"{message.id}:{message.attempt}")  # type: ignore[attr-defined]
        done.set()

    consumer = Consumer("t", handle, turtle.client, concurrency=1)
    consumer.start()
    turtle.advance(days=3)  # with the lease of 1 s, a message that is delivered on the way would be lost on the way
    assert done.wait(60)
    consumer.stop()
    assert handled == ["a:1"]
    assert turtle.client.stats("t").history == 1


def test_no_clock_goes_back(turtle: Turtle) -> None:
    with pytest.raises(ClientError, match="never goes back"):
        turtle.advance(milliseconds=-1)
    with pytest.raises(ClientError, match="never goes back"):
        turtle.move_to(turtle.now_ms - 1)
    with pytest.raises(ClientError, match="now_ms"):
        turtle.move_to(1 << 42)
    assert turtle.move_to(turtle.now_ms) == BEGIN


def test_a_topic_in_trouble_does_not_hold_the_clock(turtle: Turtle, monkeypatch: pytest.MonkeyPatch) -> None:
    from turtlemq.topic.topic import Topic

    turtle.client.put("bad", b"x", delay=1)
    turtle.client.put("good", b"x", id="a", delay=2)
    tick = Topic.tick

    def failing(self: Topic, *args: object) -> int | None:
        if self.name == "bad":
            raise DiskFull
        return tick(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Topic, "tick", failing)
    assert turtle.advance(days=1) == BEGIN + timedelta(days=1)
    assert ids(turtle, "good") == ["a"]


# The reached time


def test_a_restart_goes_on_from_the_reached_time(tmp_path: Path) -> None:
    with Turtle(tmp_path, now=BEGIN) as turtle:
        turtle.client.put("t", b"x", id="a", delay=2 * 86_400)
        turtle.advance(days=1)
    with Turtle(tmp_path, now=BEGIN + timedelta(days=30)) as turtle:
        assert turtle.now == BEGIN + timedelta(days=1)
        assert ids(turtle) == []
        turtle.advance(days=1)
        assert ids(turtle) == ["a"]


def test_servers_of_one_process_have_their_own_clocks(turtle: Turtle) -> None:
    with Turtle() as other:
        other.advance(days=1)
        assert turtle.now == BEGIN
        assert abs(other.now_ms - DAY_MS - now_ms()) < DAY_MS // 2, "a new folder begins at the present"
    assert abs(now_ms() - VirtualClock(Door(), turtle_folder(turtle)).now_ms) > DAY_MS, "the wall clock is as it was"


def turtle_folder(turtle: Turtle) -> Path:
    return Path(turtle._server._config.data)


def test_a_move_that_cannot_be_kept_does_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(Door(), tmp_path, 1_000)

    def full(*_: object, **__: object) -> None:
        raise DiskFull

    with monkeypatch.context() as patch:
        patch.setattr(Door, "replace", full)
        with pytest.raises(DiskFull):
            clock.move(2_000)
    assert clock.now_ms == VirtualClock(Door(), tmp_path).now_ms == 1_000
    clock.move(3_000)
    assert VirtualClock(Door(), tmp_path).now_ms == 3_000


@pytest.mark.parametrize("text", ["", "soon", "9" * 400, "-5"])
def test_a_broken_clock_file_says_how_to_go_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "CLOCK").write_text(text)
    with pytest.raises(Corrupt, match="Remove it"):
        VirtualClock(Door(), tmp_path)


def test_a_start_that_fails_raises_its_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no setting"):
        Turtle(tmp_path, wrong=1)
    engine = Engine.open(tmp_path / "data")
    with pytest.raises(Exception, match="in use by process"):
        Turtle(tmp_path)
    engine.close()
    Turtle(tmp_path).close()


# Server and command line


def test_a_killed_server_has_reached_the_time_that_it_answered(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--virtual-clock") as server:
        line = Line(server.url)
        server.put("t", {"id": "a", "body": 1, "delay": "3d"})
        before = server.ok("GET", "/v1/clock")
        (moved,) = line.json("clock", "--advance", "3d")
        assert moved == {"now_ms": before["now_ms"] + 3 * DAY_MS, "virtual": True}
        metric = f"turtlemq_virtual_clock_timestamp_seconds {moved['now_ms'] / 1000}"
        assert metric in server.call("GET", "/metrics").data.decode()
        server.process.kill()
        server.process.wait()
    with running(tmp_path / "data", TURTLEMQ_VIRTUAL_CLOCK="true") as server:
        assert server.ok("GET", "/v1/clock") == moved
        assert [message["id"] for message in server.fetch("t")] == ["a"]
        for body in (
            {},
            {"advance": "3d", "now_ms": 1},
            {"advance": "soon"},
            {"advance": "40000d"},
            {"advance_ms": -1},
            {"now_ms": 10**11},
        ):
            assert server.call("POST", "/v1/clock", body).status == 400, body
        later = server.ok("POST", "/v1/clock", {"advance": 1.5})["now_ms"]
        assert later == moved["now_ms"] + 1_500
        assert Line(server.url)("clock").startswith(datetime.fromtimestamp(later / 1000).astimezone().isoformat(" ")[:19])
        assert server.stop() == 0
        assert (tmp_path / "data" / "CLOCK").read_text() == f"{later}\n"


def test_a_server_on_the_wall_clock_has_no_clock_to_move() -> None:
    with pytest.raises(Conflict, match="wall clock"):
        Service().advance(1)


def test_a_cluster_has_no_virtual_clock() -> None:
    found = run("serve", "--virtual-clock", TURTLEMQ_CLUSTER='{"name": "c", "etcd": ["http://127.0.0.1:1"], "node": "a"}')
    assert (found.returncode, "virtual_clock" in found.stderr) == (2, True), found.stderr


def test_the_async_client_has_the_same_calls(turtle: Turtle) -> None:
    async def story() -> tuple[int, int]:
        async with AsyncClient(turtle.url) as client:
            return await client.clock(), await client.move_clock(BEGIN + timedelta(days=1))

    before, after = asyncio.run(story())
    assert after - before == DAY_MS


# Tests of applications


def examples(heading: str) -> list[str]:
    page = (ROOT / "docs/TESTING.md").read_text("utf-8")
    part = page[page.index(f"\n## {heading}") :]
    return [block.text for block in blocks(part[: part.find("\n## ", 4)]) if block.language == "python"]


def passed(folder: Path, *args: str) -> str:
    """Run pytest there, as a project of its own that turns warnings into errors."""
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "turtlemq.testing.plugin", *args]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_examples_of_the_page_pass(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("".join(examples("With pytest")))
    (tmp_path / "test_fastapi.py").write_text("".join(examples("FastAPI")))
    conftest, tests = "".join(examples("Django")).split("# test_orders.py\n")
    (tmp_path / "django").mkdir()
    (tmp_path / "django/conftest.py").write_text(
        "from django.conf import settings\n"
        "settings.configure(DATABASES={'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}})\n" + conftest
    )
    (tmp_path / "django/test_orders.py").write_text(tests)
    assert "4 passed" in passed(tmp_path)


def test_loading_the_plugin_loads_no_server() -> None:
    program = "import sys, turtlemq.testing.plugin; print(*sorted({'aiohttp', 'numpy', 'turtlemq.engine'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
