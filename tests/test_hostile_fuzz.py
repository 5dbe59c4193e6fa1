"""Any bytes, JSON and BSON on any endpoint, and topics that are deleted while clients use them: the server serves on."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import bson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import server_process
from tests.harness.hostile_client import BODY, CHUNKED, GET, LAST, POST, after_each, decent, heard, server, unharmed
from tests.harness.server_process import Server, running
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.storage import names

__all__ = ["after_each", "server"]


# Fuzzing

ENDPOINTS = [
    *(("POST", f"/v1/topics/fuzz/{verb}") for verb in "messages fetch ack extend cancel dead/requeue dead/delete".split()),
    *(("POST", f"/v1/topics/fuzz/groups/g/{verb}") for verb in "fetch ack extend".split()),
    ("PUT", "/v1/topics/fuzz/groups/g"),
    ("PATCH", "/v1/topics/fuzz/messages/m"),
    ("POST", "/v1/command"),
]
NAMES = (
    "messages body body_base64 id ids delay due_ms ttr priority expires_ms headers max wait consumer ack acks retry_delay error "
    "due_from_ms due_to_ms filter group from_ms to_ms reset_attempts per_s start ready_ms command topic TTR limit cursor"
).split()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 2**42, 2**53, 2**63, -(2**63), 1.5, 1e308, -0.0, 5e-324])
    | st.sampled_from(["", "-", "--", "-m", "m", "/", "a/b", "\0", "fuzz", "add", "pop", "finish", "delete", "earliest", "auto"])
    | st.text(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
PIECES = [GET, POST, CHUNKED, BODY, LAST, b"\r\n", b"\r\n\r\n", b"Content-Length: 10\r\n", b"a\r\n", b"\0", b"Host: y\r\n"]
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def no_wait(value: Any) -> Any:
    """Long polls would take their time."""
    return {**value, "wait": 0} if isinstance(value, dict) and "wait" in value else value


def fits_bson(value: Any) -> bool:
    return not isinstance(value, int) or -(2**63) <= value < 2**63


@FEW
@given(endpoint=st.sampled_from(ENDPOINTS), value=OBJECTS | VALUES)
def test_any_json_on_any_endpoint(server: Server, endpoint: tuple[str, str], value: Any) -> None:
    decent(server.call(*endpoint, data=json.dumps(no_wait(value)).encode()))


@FEW
@given(
    endpoint=st.sampled_from(ENDPOINTS),
    data=st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "application/x-ndjson", "application/bson"]),
    packed=st.sampled_from(["identity", "gzip", "deflate", "zstd"]),
)
def test_any_bytes_on_any_endpoint(server: Server, endpoint: tuple[str, str], data: bytes, kind: str, packed: str) -> None:
    decent(server.call(*endpoint, data=data, headers={"Content-Type": kind, "Content-Encoding": packed}))


@FEW
@given(
    fields=st.dictionaries(st.sampled_from(NAMES[:11]), LEAVES.filter(fits_bson), max_size=5),
    body=st.binary(max_size=10) | st.text(max_size=10),
    copies=st.sampled_from([1, 60]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3),
)
def test_any_bson(server: Server, fields: Any, body: Any, copies: int, changes: list[tuple[int, int]]) -> None:
    data = bytearray(bson.encode(fields | {"body": body}) * copies)
    for place, byte in changes:
        data[place % len(data)] = byte
    answer = server.call("POST", "/v1/topics/fuzz/messages", data=bytes(data), headers={"Content-Type": "application/bson"})
    decent(answer)
    found = server.call("POST", "/v1/topics/fuzz/fetch", {"ack": "auto"}, headers={"Accept": "application/bson"})
    decent(found)
    bson.decode_all(found.data)


@FEW
@given(
    parts=st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), max_size=6),
)
def test_any_bytes_on_a_connection(server: Server, parts: list[bytes]) -> None:
    """The rest of an ordinary request follows, so that there is an answer, after any beginning."""
    data = b"".join(parts).replace(b"evil", b"fuzz")
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as connection:
        connection.sendall(data + b"\r\n\r\n")
        connection.sendall(GET + b"\r\n")
        out = b""
        try:
            while piece := connection.recv(1 << 16):
                out += piece
        except ConnectionError:
            pass
    heard(out)


# Topics that vanish while clients use them


def deeds(dice: random.Random) -> Iterator[tuple[str, str, Any]]:
    """All permitted requests, in any order."""
    while True:
        topic, group, id_ = f"/v1/topics/{dice.choice('ab')}", f"/groups/{dice.choice('gh')}", f"m{dice.randrange(50)}"
        name = topic[-1]
        messages = [{"id": f"m{dice.randrange(50)}", "body": "x" * 99, "delay": dice.choice([0, 0.01, 99])} for _ in range(50)]
        tuned = {"max_attempts": 1, "segment_bytes": dice.choice([4_096, 1 << 20]), "backoff": {"base": 0.01, "max": 0.01}}
        often: list[tuple[str, str, Any]] = [
            ("POST", f"{topic}/messages", {"messages": messages}),
            ("POST", f"{topic}{group}/fetch", {"max": 50, "wait": dice.choice([0, 0.1]), "ttr": 0.1, "ack": "manual"}),
            ("POST", f"{topic}{group}/ack", [dice.choice(["", "-"]) + f"m{dice.randrange(50)}" for _ in range(20)]),
            ("POST", f"{topic}/cancel", dice.choice([{"ids": [id_, "m1"]}, {"due_from_ms": 0}])),
            ("PATCH", f"{topic}/messages/{id_}", {"delay": dice.choice([0, 50]), "body": 2}),
            ("DELETE", f"{topic}/messages/{id_}", None),
        ]
        seldom: list[tuple[str, str, Any]] = [
            ("POST", f"{topic}{group}/extend", {"ids": [id_], "ttr": 1}),
            *(
                ("GET", topic + rest, None)
                for rest in ("", "/messages", f"/messages/{id_}", "/forecast", "/dead", "/dead/export")
            ),
            *(("GET", path, None) for path in ("/v1/topics", "/v1/status", "/metrics", f"{topic}/dead/summary")),
            *(("POST", f"{topic}/dead/{verb}", {"filter": {}}) for verb in ("requeue", "delete")),
            ("POST", f"{topic}/compact", None),
            ("PUT", topic, tuned),
            ("PUT", topic + group, {"start": dice.choice(["earliest", "latest", {"ready_ms": 0}])}),
            ("DELETE", topic + group, None),
            *(("DELETE", topic, None) for _ in range(3)),
            *((method, "/v1/backup", None) for method in ("POST", "DELETE")),
            (
                "POST",
                "/v1/command",
                {"command": dice.choice("add pop finish delete".split()), "topic": name, "id": id_, "body": 1},
            ),
        ]
        yield dice.choice(often if dice.random() < 0.6 else seldom)


@pytest.mark.slow
def test_whatever_is_deleted_while_others_use_it_nothing_breaks(tmp_path: Path) -> None:
    def work(server: Server, seed: int) -> None:
        for method, path, value in islice(deeds(random.Random(seed)), 100):
            answer = server.call(method, path, value)
            assert answer.status < 500, (method, path, value, answer)

    with running(tmp_path / "data") as server:
        with ThreadPoolExecutor(6) as pool:
            working = [pool.submit(work, server, seed) for seed in range(6)]
            for one in working:
                one.result()
        unharmed(server)
    found = server_process.run("check", "--data", str(tmp_path / "data"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_recreated_topic_knows_nothing_of_the_old_one(server: Server) -> None:
    for body in ("old", "new"):
        assert server.ok("POST", "/v1/topics/again/messages", {"id": "a", "body": body})["created"] == 1
        assert server.ok("GET", "/v1/topics/again/messages/a")["body"] == body
        assert [message["body"] for message in server.fetch("again", wait=10)] == [body]
        assert server.ok("DELETE", "/v1/topics/again") == {"outcome": "deleted"}


def test_a_topic_whose_removal_was_cut_off_does_not_come_back(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    for topic in ("gone", "kept"):
        engine.submit(topic, [Message(b"x", due_ms=0)], now_ms=0)
    engine.close()
    (tmp_path / "topic" / "gone").rename(tmp_path / "topic" / names.dropped("gone"))
    engine = Engine.open(tmp_path)
    assert list(engine.topics) == ["kept"]
    engine.drop_topic("kept")
    assert list((tmp_path / "topic").iterdir()) == []
    engine.close()
