"""GET /v1/find: an id is found in all topics that a token may read, and in no other. /v1/status sums over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import Server, running
from turtlemq.client import Client
from turtlemq.server.auth import hash_of, new_token

SHOP, WATCHER = new_token(), new_token()
CONFIG = f"""
[[tokens]]
name = "shop"
hash = "{hash_of(SHOP)}"
rights = ["produce"]
topics = ["shop.*"]

[[tokens]]
name = "watcher"
hash = "{hash_of(WATCHER)}"
rights = []
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("find") / "data") as found:
        for topic in ("mails", "orders", "other"):
            found.put(topic, {"id": f"only-{topic}", "body": 1, "delay": 3600})
        found.put("mails", {"id": "order 17+ä", "body": 1, "due_ms": 4_000_000_000_000})
        found.put("orders", {"id": "order 17+ä", "body": 2})
        found.fetch("orders", wait=5)
        yield found


def test_an_id_is_found_in_every_topic_with_its_state(server: Server) -> None:
    found = server.ok("GET", f"/v1/find?id={quote('order 17+ä', safe='')}")["found"]
    assert [(one["topic"], one["id"], one["state"]) for one in found] == [
        ("mails", "order 17+ä", "sleep"),
        ("orders", "order 17+ä", "reserve"),
    ]
    assert found[0]["due_ms"] == 4_000_000_000_000
    with Client(server.url) as client:
        assert [one.topic for one in client.find("order 17+ä")] == ["mails", "orders"]
        assert client.find("nobody") == []


@pytest.mark.parametrize(("query", "code"), [("", "INVALID_ARGUMENT"), ("?id=-a", "INVALID_ID"), ("?id=a/b", "INVALID_ID")])
def test_what_is_no_id_is_refused(server: Server, query: str, code: str) -> None:
    answer = server.call("GET", f"/v1/find{query}")
    assert (answer.status, answer.code) == (400, code)


def test_a_token_finds_only_in_topics_that_it_may_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    with running(tmp_path / "data") as server:
        for topic in ("shop.a", "shop.b", "secret"):
            server.put(topic, {"id": "x", "body": 1, "delay": 3600})
    with running(tmp_path / "data", "--config", str(tmp_path / "c.toml")) as server:
        for token, topics in ((SHOP, ["shop.a", "shop.b"]), (WATCHER, [])):
            headers = {"Authorization": f"Bearer {token}"}
            assert [one["topic"] for one in server.ok("GET", "/v1/find?id=x", headers=headers)["found"]] == topics
            assert server.ok("GET", "/v1/status", headers=headers)["states"]["sleep"] == len(topics)
        assert server.call("GET", "/v1/find?id=x").status == 401


def test_status_sums_over_more_topics_than_it_shows(server: Server) -> None:
    status = server.ok("GET", "/v1/status?limit=1")
    assert len(status["topics"]) == 1
    assert (status["states"]["sleep"], status["states"]["reserve"]) == (4, 1)
    assert status["bytes"] > max(topic["bytes"] for topic in status["topics"])
    assert 0 < status["disk_free_bytes"] <= status["disk_bytes"]
    assert 0 < status["memory_free_bytes"] <= status["memory_total_bytes"]


def test_a_message_that_failed_is_found_with_its_next_attempt(server: Server) -> None:
    server.put("failing", {"id": "f", "body": 1})
    server.fetch("failing", wait=5)
    server.ok("POST", "/v1/topics/failing/ack", {"acks": ["-f"], "retry_delay": 3_000})
    (found,) = server.ok("GET", "/v1/find?id=f")["found"]
    with Client(server.url) as client:
        (again,) = client.find("f")
    assert found["state"] == again.state == "sleep"
    assert found["next_ms"] == again.next_ms == server.ok("GET", "/v1/topics/failing/messages/f")["groups"]["default"]["due_ms"]
    assert found["next_ms"] > found["due_ms"] + 2_000_000
    assert Line(server.url).json("find", "f") == [found]
    assert server.ok("GET", "/v1/find?id=only-mails")["found"][0]["next_ms"] is None
