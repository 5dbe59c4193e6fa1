"""The limit on the nesting of bodies: it is the same for every way in, and any program can decode an accepted body."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.server_process import Server, running
from turtlemq.client import Client
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.segment import format as f
from turtlemq.server.errors import InvalidBson, InvalidJson
from turtlemq.server.incoming import depth
from turtlemq.server.incoming.depth import LEVELS_MAX, check_depth, levels_so_far

FRAMES = 700  # of a program with a deep stack, as frameworks make it; Python allows 1,000


def nested(depth: int) -> Any:
    value: Any = "[[[{{{"
    for n in range(depth):
        value = [value] if n % 2 else {"a": value}
    return value


def puts(server: Server, body: Any) -> dict[str, int]:
    """The status of every way in."""
    text = b'{"body":%b}' % json.dumps(body).encode()
    small, big = b'{"id":"%d","body":1}', b'{"body":"%b"}' % (b"x" * 300_000)
    batch = b'{"messages":[%b]}' % b",".join([small % n for n in range(100)] + [text])
    sliced = b'{"messages":[%b]}' % b",".join([big, big, text])

    def status(method: str, path: str, data: bytes, kind: str = "application/json") -> int:
        return server.call(method, path, data=data, headers={"Content-Type": kind}).status

    messages = "/v1/topics/t/messages"
    server.put("t", {"id": "changed", "body": 1, "delay": 3600})
    command = b'{"command":"add","topic":"t","id":"c","delay":3600,"body":%b}' % json.dumps(body).encode()
    return {
        "one": status("POST", messages, text),
        "many": status("POST", messages, batch),
        "in slices": status("POST", messages, sliced),
        "lines": status("POST", messages, small % 1 + b"\n" + text, "application/x-ndjson"),
        "bson": status("POST", messages, bson.encode({"body": body}), "application/bson"),
        "change": status("PATCH", f"{messages}/changed", text),
        "command": 201 if server.call("POST", "/v1/command", data=command).json["success"] else 400,
    }


def test_every_way_in_has_the_same_limit(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        taken = puts(server, nested(LEVELS_MAX))
        assert {way for way, status in taken.items() if status not in (200, 201)} == set()
        refused = puts(server, nested(LEVELS_MAX + 1))
        assert set(refused.values()) == {400}
        answer = server.call("POST", "/v1/topics/t/messages", {"messages": [{"body": 1}, {"body": nested(LEVELS_MAX + 1)}]})
        assert (answer.code, answer.json["error"]["index"]) == ("INVALID_JSON", 1)


def deep_down(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else deep_down(frames - 1, call)


@pytest.mark.parametrize("wire", ["json", "bson"])
def test_a_consumer_with_a_deep_stack_decodes_every_body(tmp_path: Path, wire: Any) -> None:
    with running(tmp_path / "data") as server:
        server.put("t", {"id": "m", "body": nested(LEVELS_MAX)})
        with Client(server.url) as client:
            (message,) = deep_down(FRAMES, lambda: list(client.fetch("t", wait=10, wire=wire)))
        assert message.body == nested(LEVELS_MAX)


def test_deeper_messages_of_an_earlier_version_are_served(tmp_path: Path) -> None:
    body = json.dumps(nested(900)).encode()
    now = time.time_ns() // 1_000_000
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(body, now, id="old", json=True), Message(body, now + 3_600_000, id="asleep", json=True)], now)
    engine.close()
    with running(tmp_path / "data") as server:
        assert body in server.call("POST", "/v1/topics/t/fetch", {"wait": 10}).data
        assert body in server.call("GET", "/v1/topics/t/messages/asleep").data
        server.ok("PATCH", "/v1/topics/t/messages/asleep", {"delay": 7_200})
        assert body in server.call("GET", "/v1/topics/t/messages/asleep").data


def measured(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(measured, inner), default=0) if isinstance(value, dict | list) else 0


values = st.recursive(
    st.text('[]{}"\\ a', max_size=8) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[]{}"\\', max_size=4), inner, max_size=4),
    max_leaves=30,
)


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth, "_CHUNK_BYTES", size)
        yield


@given(values, st.sampled_from([None, 2]))
def test_levels_are_those_of_the_decoded_value(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()
    assert max(levels_so_far(text)) == measured(value)
    with chunks_of(5):
        assert max(levels_so_far(text)) == measured(value), "wherever a chunk ends"


def test_bodies_that_are_no_json_have_no_levels() -> None:
    deep = b"[" * 500
    assert list(check_depth([deep, deep], 0, InvalidBson)) == []
    assert list(check_depth([deep, b"1"], [0, f.JSON], InvalidBson)) == []
    with pytest.raises(InvalidBson, match="message 8: its body has more than 100 levels"):
        list(check_depth([deep, deep], [0, f.JSON], InvalidBson, 7))


def test_a_long_body_is_looked_at_in_steps() -> None:
    texts = b",".join([json.dumps("[{" * n + "\\" * (n % 7) + '"').encode() for n in range(3_000)])
    body = b"[" * 60 + texts + b"," + b"[" * 40 + texts + b"]" * 100
    assert max(levels_so_far(body)) == LEVELS_MAX
    assert len(list(check_depth([body], f.JSON, InvalidJson))) > 10
    with pytest.raises(InvalidJson):
        list(check_depth([b"[" + body + b"]"], f.JSON, InvalidJson))
