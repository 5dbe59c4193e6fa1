"""An error that no code foresees, in the tick of one topic: the other topics are woken all the same, and it is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.harness.server_process import ROOT, running
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.topic import maintenance
from turtlemq.topic.checkpoints import Checkpoints
from turtlemq.topic.topic import Topic

BROKEN = """import os
from turtlemq.topic.topic import Topic
real = Topic.tick
def tick(self, *args):
    if self.name == "b" and os.path.exists(os.environ["BROKEN"]):
        raise RuntimeError("an unforeseen error")
    return real(self, *args)
Topic.tick = tick
"""


def test_an_unexpected_error_in_one_topic_loses_no_wake_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real, broken = Engine.open(tmp_path / "data"), Topic.tick, {"b"}

    def tick(topic: Topic, *args: Any) -> int | None:
        if topic.name in broken:
            raise ZeroDivisionError("an unforeseen error")
        return real(topic, *args)

    for name in "abc":
        engine.submit(name, [Message(b"x", 10_000, id="m")], 0)
        engine.move_group(name, "g", "earliest", 0)
    engine.tick(9_000)
    monkeypatch.setattr(Topic, "tick", tick)
    engine.tick(10_000)
    assert [engine.reserve(name, "g", 1, 10_000).ids for name in "abc"] == [["m"], [], ["m"]]
    assert list(engine.trouble) == ["b"]
    assert engine.check() == []
    assert engine.next_wake() is not None, "it is tried again"
    broken.clear()
    engine.tick(11_000)
    assert engine.trouble == {}
    assert engine.reserve("b", "g", 1, 11_000).ids == ["m"]
    engine.close()


def test_an_unexpected_error_is_logged_with_its_trace(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(BROKEN)
    flag = tmp_path / "broken"
    with running(tmp_path / "data", PYTHONPATH=f"{tmp_path / 'code'}:{ROOT}", BROKEN=str(flag)) as server:
        for name in "abc":
            server.ok("PUT", f"/v1/topics/{name}", {})
        flag.touch()
        for name in "abc":
            server.put(name, {"id": "m", "body": 1, "delay": 0.5})
        assert [len(server.fetch(name, wait=5)) for name in "ac"] == [1, 1]
        topics = {topic["topic"]: topic["trouble"] for topic in server.ok("GET", "/v1/status")["topics"]}
        assert topics == {"a": None, "b": "RuntimeError: an unforeseen error", "c": None}
        (line,) = (line for line in server.log.splitlines() if "event=topic_in_trouble" in line)
        assert "topic=b" in line
        assert "Traceback" in line
        flag.unlink()
        assert len(server.fetch("b", wait=10)) == 1, "it goes on by itself"
        end = time.monotonic() + 10
        while "event=topic_recovered topic=b" not in server.log:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_retention_without_old_files_writes_no_large_checkpoint(tmp_path: Path) -> None:
    """The event loop would wait for it: a state with many messages in flight takes long to encode."""
    engine = Engine.open(tmp_path)
    with patch.object(Checkpoints, "write", side_effect=AssertionError), patch.object(maintenance, "IN_FLIGHT_MAX", 0):
        engine.submit("t", [Message(b"x", 10)], 10)
        engine.tick(10)  # the first retention, with a handoff that no checkpoint has
    assert engine.trouble == {}
    engine.close()
