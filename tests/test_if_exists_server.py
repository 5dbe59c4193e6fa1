"""Ids as timers over HTTP, in the Python client and on the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import bson
import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import Server, running
from turtlemq.client import AsyncClient, Client, NewMessage, Producer, errors

OLD = {"id": "a", "body": "old", "delay": 3_000}
COUNTS = ("created", "duplicates", "replaced", "rescheduled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("timers") / "data") as made:
        yield made


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def put(server: Server, topic: str, payload: Any, query: str = "") -> tuple[int, ...]:
    answer = server.ok("POST", f"/v1/topics/{topic}/messages{query}", payload)
    return tuple(answer[name] for name in COUNTS)


def body_of(server: Server, topic: str, id_: str = "a") -> Any:
    return server.ok("GET", f"/v1/topics/{topic}/messages/{id_}")["body"]


def test_the_mode_of_a_message_beats_the_batch_and_the_query(server: Server, topic: str) -> None:
    assert put(server, topic, OLD) == (1, 0, 0, 0)
    assert put(server, topic, {**OLD, "body": "1", "if_exists": "replace"}) == (0, 0, 1, 0)
    assert body_of(server, topic) == "1"
    messages = [{**OLD, "body": "2"}, {**OLD, "id": "b", "if_exists": "error"}]
    assert put(server, topic, {"messages": messages, "if_exists": "reschedule"}) == (1, 0, 0, 1)
    assert put(server, topic, {"if_exists": "reschedule", "messages": messages[:1]}) == (0, 0, 0, 1)
    assert body_of(server, topic) == "1"
    assert put(server, topic, {**OLD, "body": "3"}, "?if_exists=replace") == (0, 0, 1, 0)
    assert put(server, topic, {**OLD, "body": "4", "if_exists": "keep"}, "?if_exists=replace") == (0, 1, 0, 0)
    assert body_of(server, topic) == "3"


def test_lines_and_bson_take_it_from_message_and_query(server: Server, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    put(server, topic, OLD)
    for query, mode in (("?if_exists=replace", {}), ("", {"if_exists": "replace"})):
        message = {"id": "a", "body": query or "own", "delay": 3_000, **mode}
        bodies = ((json.dumps(message).encode(), "application/x-ndjson"), (bson.encode(message), "application/bson"))
        for data, kind in bodies:
            answer = server.ok("POST", path + query, data=data, headers={"Content-Type": kind})
            assert (answer["replaced"], answer["replaced_indexes"]) == (1, [0])
            assert body_of(server, topic) == message["body"]


def test_a_conflict_names_index_and_state_and_stores_nothing(server: Server, topic: str) -> None:
    put(server, topic, {"id": "a", "body": 1})
    assert [message["id"] for message in server.fetch(topic, wait=60)] == ["a"]
    for mode in ("replace", "reschedule", "error"):
        batch = {"messages": [{"id": "b", "body": 1}, {"id": "a", "body": 2}], "if_exists": mode}
        refused = server.call("POST", f"/v1/topics/{topic}/messages", batch)
        error = refused.json["error"]
        assert (refused.status, error["code"], error["index"], error["state"]) == (409, "CONFLICT", 1, "reserve")
    assert server.call("GET", f"/v1/topics/{topic}/messages/b").status == 404


def test_a_settled_timer_starts_again(server: Server, topic: str) -> None:
    for n in range(3):
        assert put(server, topic, {"id": "a", "body": n, "if_exists": "replace"}) == ((1, 0, 0, 0) if n == 0 else (0, 0, 1, 0))
        assert [message["body"] for message in server.fetch(topic, wait=60)] == [n]
        assert server.ack(topic, "a")["acked"] == 1


def test_an_unknown_mode_is_refused(server: Server, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    assert server.call("POST", path, {**OLD, "if_exists": "wish"}).json["error"]["code"] == "INVALID_MESSAGE"
    assert server.call("POST", f"{path}?if_exists=wish", OLD).json["error"]["code"] == "INVALID_ARGUMENT"


def test_a_cancelled_id_is_free(server: Server, topic: str) -> None:
    put(server, topic, OLD)
    assert server.ok("DELETE", f"/v1/topics/{topic}/messages/a") == {"outcome": "cancelled"}
    assert put(server, topic, {**OLD, "body": "new"}) == (1, 0, 0, 0)
    assert body_of(server, topic) == "new"


def test_the_client_tells_the_outcome(server: Server, topic: str) -> None:
    with Client(server.url) as client, Producer(topic, client) as producer:
        assert client.put(topic, 1, id="a", delay=3_000).outcome == "created"
        again = client.put(topic, b"2", id="a", delay=3_000, if_exists="replace")
        assert (again.created, again.outcome) == (False, "replaced")
        messages = [NewMessage(body=3, id="a", delay=3_000), NewMessage(body=4, id="b", delay=3_000, if_exists="keep")]
        many = client.put_many(topic, messages, if_exists="reschedule")
        assert (many.outcomes, many.rescheduled, many.created) == (["rescheduled", "created"], ["a"], [False, True])
        good, bad = producer.put(5, id="c", delay=3_000), producer.put(6, id="a", if_exists="error")
        producer.flush()
        assert (good.result(), good.outcome) == ("c", "created")
        assert isinstance(bad.exception(), errors.Conflict)
        with pytest.raises(errors.InvalidMessage):
            client.put(topic, 1, if_exists="wish")  # type: ignore[arg-type]


def test_the_asyncio_client_tells_the_outcome(server: Server, topic: str) -> None:
    async def story() -> list[str | None]:
        async with AsyncClient(server.url) as client:
            return [(await client.put(topic, n, id="a", delay=3_000, if_exists="replace")).outcome for n in range(2)]

    assert asyncio.run(story()) == ["created", "replaced"]


def test_the_command_line_replaces(server: Server, topic: str) -> None:
    line = Line(server.url)
    line.json("put", topic, "old", "--id", "a", "--delay", "1h")
    assert line.json("put", topic, "new", "--id", "a", "--delay", "1h", "--if-exists", "replace")[0]["replaced"] == 1
    assert body_of(server, topic) == "new"


def test_put_many_cuts_a_long_list_of_timers(server: Server, topic: str) -> None:
    timers = [NewMessage(body=n, id=str(n), delay=3_000) for n in range(1_001)]
    with Client(server.url) as client:
        assert client.put_many(topic, timers, if_exists="replace").created == [True] * 1_001
        assert len(client.put_many(topic, timers, if_exists="replace").replaced) == 1_001
        with pytest.raises(errors.TooLarge, match="at most 1,000"):
            client.put_many(topic, timers, if_exists="replace", together=True)


def test_a_large_batch_of_a_producer_keeps_the_limit_of_timers(server: Server, topic: str) -> None:
    with Client(server.url) as client, Producer(topic, client, count=5_000, linger=60) as producer:
        puts = [producer.put(n, id=f"{n}", delay=3_000) for n in range(1_200)]
        puts += [producer.put(n, id=f"{n}", delay=3_000, if_exists="replace") for n in range(1_200)]
        producer.flush()
        assert [put.outcome for put in puts] == ["created"] * 1_200 + ["replaced"] * 1_200
