"""Requests about all topics: topics without a change are not written, and the event loop goes on between topics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness.server_process import Server, running
from turtlemq.engine import Engine
from turtlemq.server import fair_turns, listen
from turtlemq.server.app import make_app
from turtlemq.server.config import Config
from turtlemq.server.service import Service

TOPICS = [f"t{i}" for i in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("topics") / "data") as found:
        for topic in TOPICS:
            found.ok("PUT", f"/v1/topics/{topic}", {"beat": 0.05})
            found.put(topic, {"body": 1, "id": "m"})
            assert found.fetch(topic)
        _settled(found)
        yield found


def _checkpoints(server: Server) -> dict[str, int]:
    """The file of each checkpoint: writing one replaces it by another file."""
    paths = [server.data / "topic" / topic / "offset" for topic in TOPICS]
    return {path.parent.name: path.stat().st_ino for path in paths if path.exists()}


def _settled(server: Server) -> dict[str, int]:
    """The checkpoints when none is due any more: a beat lasts 50 ms."""
    before: dict[str, int] = {}
    while len(before) < len(TOPICS) or before != _checkpoints(server):
        before = _checkpoints(server)
        time.sleep(0.5)
    return before


@pytest.mark.parametrize("command", ["finish", "delete"])
def test_command_about_an_unknown_id_writes_no_checkpoint(server: Server, command: str) -> None:
    before = _settled(server)
    assert not server.ok("POST", "/v1/command", {"command": command, "id": "nowhere"})["success"]
    assert _settled(server) == before


@pytest.mark.parametrize("path", ["ack", "extend", "cancel"])
def test_unknown_ids_write_no_checkpoint_of_their_topic(server: Server, path: str) -> None:
    before = _settled(server)
    body: Any = ["x", "-y"] if path == "ack" else {"ids": ["x", "y"]}
    server.ok("POST", f"/v1/topics/t0/{path}", body)
    assert _settled(server) == before


def test_finish_without_a_topic_writes_one_checkpoint(server: Server) -> None:
    before = _settled(server)
    assert server.ok("POST", "/v1/command", {"command": "finish", "id": "m"})["success"]
    after = _settled(server)
    assert [topic for topic in TOPICS if after[topic] != before[topic]] == ["t0"]


# Slices: with a slice that is over at once, the event loop gets control after each step


@asynccontextmanager
async def _serving(engine: Engine) -> AsyncIterator[str]:
    """A server in this process. Yields its address."""
    service, config = Service(), Config(port=0)
    runner = listen.runner_for(make_app(service, config), 1)
    await runner.setup()
    try:
        await listen.Site(runner, config, None).start()
        service.start(engine)
        yield "http://{}:{}".format(*runner.addresses[0][:2])
        service.drain()
    finally:
        await runner.cleanup()
        service.close()


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/topics", None),
        ("GET", "/v1/status", None),
        ("GET", "/v1/find?id=nowhere", None),
        ("GET", "/metrics", None),
        ("GET", "/readyz", None),
        ("POST", "/v1/command", {"command": "finish", "id": "nowhere"}),
        ("POST", "/v1/command", {"command": "delete", "id": "nowhere"}),
    ],
    ids=["topics", "status", "find", "metrics", "readyz", "finish", "delete"],
)
def test_work_over_all_topics_is_interrupted_after_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    monkeypatch.setattr(fair_turns, "SLICE_S", 0.0)
    topics, rounds = 60, 0

    async def story() -> int:
        nonlocal rounds
        engine = Engine.open(tmp_path / "d")
        for i in range(topics):
            engine.topic(f"t{i}", create=True)
        async with _serving(engine) as url, aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.request(method, url + path, json=body))
            while not asked.done():
                rounds += 1
                await asyncio.sleep(0)
            answer = await asked
            assert answer.status == 200
            await answer.read()
        engine.close()
        return rounds

    assert asyncio.run(asyncio.wait_for(story(), 60)) > topics
