"""Flow control: buckets by themselves, with any history; and over HTTP, requests that are refused, slowed down and woken."""

from __future__ import annotations

import asyncio
import gzip
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.server_process import Server, running
from turtlemq.errors import InvalidArgument
from turtlemq.server.auth import hash_of, new_token
from turtlemq.server.config import load
from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.incoming.decompress import decompressed
from turtlemq.server.rate_limit import Bucket, BucketTable, ByteBudget, FlowControl
from turtlemq.settings import Settings, check_settings

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=100, database=None)
TOKENS = {name: new_token() for name in ("one", "two")}
Steps = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60)


# Buckets


@steady
@given(st.floats(0.1, 100), st.integers(1, 50), Steps)
def test_over_any_time_no_more_passes_than_burst_and_rate_allow(rate: float, burst: int, steps: list[tuple[float, int]]) -> None:
    bucket, now, passed = Bucket(rate, burst, 0), 0.0, 0
    for pause, count in steps:
        now += pause
        if not bucket.wait(count, now):
            owed = max(0, count - burst)  # the last one may go into debt by the excess over a burst
            bucket.spend(count, now)
            passed += count
            assert passed <= burst + rate * now + owed + 1e-6


@steady
@given(st.floats(0.1, 100), st.integers(1, 50), Steps)
def test_who_waits_as_long_as_it_is_told_passes(rate: float, burst: int, steps: list[tuple[float, int]]) -> None:
    bucket, now = Bucket(rate, burst, 0), 0.0
    for pause, count in steps:
        now += pause
        now += bucket.wait(count, now)
        assert bucket.wait(count, now + 1e-6) == 0, "also if it is more than a burst"
        bucket.spend(count, now)


@steady
@given(st.floats(0.1, 1000), Steps)
def test_deliveries_keep_to_their_rate(rate: float, steps: list[tuple[float, int]]) -> None:
    flow, settings, now, given_out = FlowControl(), Settings(rate_deliver_per_s=rate), 0.0, 0
    for pause, count in steps:
        now += pause
        room = flow.deliverable("t", "g", settings, count, now)
        assert room <= count
        assert bool(room) == (flow.delivery_pause("t", "g", settings, now) == 0)
        flow.delivered("t", "g", settings, room, now)
        given_out += room
        assert given_out <= max(1, rate / 10) + rate * now + 1e-6


def test_a_clock_that_stands_or_goes_back_fills_nothing() -> None:
    bucket = Bucket(10, 1, now=5)
    bucket.spend(1, 5)
    assert bucket.wait(1, 5) == bucket.wait(1, 4) == pytest.approx(0.1)


def test_another_rate_holds_at_once() -> None:
    flow, slow, fast = FlowControl(), Settings(rate_deliver_per_s=0.01), Settings(rate_deliver_per_s=1000)
    flow.delivered("t", "g", slow, flow.deliverable("t", "g", slow, 10, 0), 0)
    assert flow.deliverable("t", "g", slow, 10, 1) == 0
    assert flow.delivery_pause("t", "g", slow, 1) == pytest.approx(99)
    assert flow.delivery_pause("t", "g", fast, 1) < 0.001
    assert flow.deliverable("t", "other", slow, 10, 1) == 1, "each group has its own"


def test_a_refusal_takes_from_no_bucket() -> None:
    flow, settings = FlowControl(client_per_s=1, client_burst=5), Settings(rate_produce_per_s=1, rate_burst=10)
    flow.admit_produced("t", settings, "me", 5, 0)
    with pytest.raises(RateLimited, match="a client may send") as refused:
        flow.admit_produced("t", settings, "me", 5, 0)
    assert refused.value.details == {"retry_after_ms": 5000}
    flow.admit_produced("t", settings, "you", 5, 0)
    with pytest.raises(RateLimited, match="topic 't' takes"):
        flow.admit_produced("t", settings, "she", 1, 0)
    flow.admit_produced("elsewhere", Settings(), "she", 5, 0)


def test_what_is_remembered_of_clients_is_bounded() -> None:
    shelf = BucketTable(3)
    for i in range(10):
        shelf.get(i, 1, 1, 0)
        shelf.get(0, 1, 1, 0)  # in use all the time
    assert len(shelf) == 3
    first = shelf.get(0, 1, 1, 0)
    shelf.get("new", 1, 1, 0)
    assert shelf.get(0, 1, 1, 0) is first


def test_without_a_rate_there_is_no_bucket() -> None:
    flow = FlowControl()
    flow.admit_produced("t", Settings(), "me", 10**9, 0)
    assert flow.deliverable("t", "g", Settings(), 10_000, 0) == 10_000
    assert (len(flow._topics), len(flow._clients), len(flow._groups)) == (0, 0, 0)


@pytest.mark.parametrize(
    "change", [{"rate_produce_per_s": -1}, {"rate_deliver_per_s": 1e-9}, {"rate_burst": 1.5}, {"beat_ms": 1}]
)
def test_rates_have_limits(change: Any) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        check_settings(Settings(**change))
    with pytest.raises(InvalidArgument, match="client_produce_per_s"):
        load({}, {"TURTLEMQ_CLIENT_PRODUCE_PER_S": "0.0001"}, None)


def test_both_refusals_say_when_to_come_again() -> None:
    assert RateLimited(retry_after_ms=5).details == Overloaded(retry_after_ms=5).details == {"retry_after_ms": 5}
    assert (RateLimited.status, Overloaded.status) == (429, 429)


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("flow") / "data", TURTLEMQ_MAX_WAITING="2", TURTLEMQ_MAX_DELAY_DAYS="1") as found:
        yield found
        assert "Traceback" not in found.log


def put(server: Server, topic: str, count: int, **more: Any) -> Any:
    return server.call("POST", f"/v1/topics/{topic}/messages", {"messages": [{"body": i} for i in range(count)]}, **more)


def test_a_topic_takes_its_rate_and_no_more(server: Server) -> None:
    settings = server.ok("PUT", "/v1/topics/slow", {"rate": {"produce_per_s": 0.01, "burst": 3}})["settings"]
    assert settings["rate"] == {"produce_per_s": 0.01, "burst": 3, "deliver_per_s": 0, "deliver_bytes_per_s": 0}
    assert put(server, "slow", 2).status == 201
    refused = put(server, "slow", 2)
    assert (refused.status, refused.code) == (429, "RATE_LIMITED")
    wait_ms = refused.json["error"]["retry_after_ms"]
    assert 90_000 < wait_ms <= 100_000
    assert int(refused.headers["Retry-After"]) == -(-wait_ms // 1000)
    assert put(server, "slow", 1).status == 201
    answer = server.call("POST", "/v1/command", {"command": "add", "topic": "slow", "id": "c", "body": 1}).json
    assert (answer["success"], "RATE_LIMITED" in answer["error"]) == (False, True)
    stats = server.ok("GET", "/v1/topics/slow")["stats"]
    assert stats["ready"] + stats["sleep"] == 3, "nothing of the others is stored"
    server.ok("PUT", "/v1/topics/slow", {"rate": {"produce_per_s": 0}})
    assert put(server, "slow", 10).status == 201, "0 lifts the limit"


def test_more_than_a_burst_passes_on_credit(server: Server) -> None:
    server.ok("PUT", "/v1/topics/credit", {"rate": {"produce_per_s": 1, "burst": 2}})
    assert put(server, "credit", 100).status == 201
    assert put(server, "credit", 1).json["error"]["retry_after_ms"] > 90_000


def test_a_fetch_gives_what_the_rate_allows(server: Server) -> None:
    server.ok("PUT", "/v1/topics/drip", {"rate": {"deliver_per_s": 0.01}})
    put(server, "drip", 5)
    assert len(server.fetch("drip", max=5)) == 1
    assert server.fetch("drip", max=5, wait=0.1) == []
    assert len(server.fetch("drip", "other", max=5)) == 1, "each group has its own"
    server.ok("PUT", "/v1/topics/drip", {"rate": {"deliver_per_s": 0}})
    assert len(server.fetch("drip", max=5, wait=10)) == 4


def test_a_long_poll_is_woken_when_the_next_may_flow(server: Server) -> None:
    server.ok("PUT", "/v1/topics/paced", {"rate": {"deliver_per_s": 8}})
    put(server, "paced", 6)
    found: list[int] = []
    while len(found) < 6:
        some = server.fetch("paced", max=6, wait=20)
        assert len(some) == 1, "one at a time, and never nothing"
        found += [message["body"] for message in some]
    assert found == [0, 1, 2, 3, 4, 5]


def test_a_message_sleeps_no_longer_than_server_and_topic_allow(server: Server) -> None:
    def late(topic: str, method: str, path: str, value: Any) -> tuple[int, str, Any]:
        answer = server.call(method, f"/v1/topics/{topic}{path}", value)
        return (answer.status, answer.code if answer.status >= 300 else "", answer.json.get("error", {}).get("index"))

    server.ok("PUT", "/v1/topics/brief", {"max_delay": 60})
    server.ok("PUT", "/v1/topics/wide", {"max_delay": 864_000})
    server.put("brief", {"body": 1, "id": "a", "delay": 59})
    server.put("wide", {"body": 1, "id": "a", "delay": 86_000})
    many = {"messages": [{"body": 1}, {"body": 1, "delay": 61}]}
    assert late("brief", "POST", "/messages", many) == (400, "EXCEEDS_MAX_DELAY", 1)
    assert late("wide", "POST", "/messages", {"body": 1, "delay": 87_000}) == (400, "EXCEEDS_MAX_DELAY", 0), "the server's limit"
    assert late("never", "POST", "/messages", {"body": 1, "delay": 87_000}) == (400, "EXCEEDS_MAX_DELAY", 0)
    assert late("brief", "PATCH", "/messages/a", {"delay": 61}) == (400, "EXCEEDS_MAX_DELAY", None)
    assert late("brief", "PATCH", "/messages/a", {"due_ms": int(time.time() * 1000) + 90_000})[1] == "EXCEEDS_MAX_DELAY"
    assert late("brief", "PATCH", "/messages/a", {"delay": 30}) == (200, "", None)
    command = {"command": "add", "topic": "brief", "id": "c", "delay": 61, "body": 1}
    assert "EXCEEDS_MAX_DELAY" in server.call("POST", "/v1/command", command).json["error"]
    assert server.ok("GET", "/v1/topics/brief")["stats"]["sleep"] == 1


def test_dead_letters_come_back_at_the_rate_that_was_asked_for(server: Server) -> None:
    server.ok("PUT", "/v1/topics/graves", {"max_attempts": 1})
    ids = server.put("graves", *({"body": i} for i in range(6)))
    assert len(server.fetch("graves", max=6, wait=10)) == 6
    server.ack("graves", *(f"-{id_}" for id_ in ids))
    assert server.ok("POST", "/v1/topics/graves/dead/requeue", {"filter": {}, "delay": 60, "per_s": 4})["requeued"] == 6
    due = [message["due_ms"] for message in server.ok("GET", "/v1/topics/graves/messages")["messages"]]
    assert [at - due[0] for at in due] == [0, 250, 500, 750, 1000, 1250]
    assert server.call("POST", "/v1/topics/graves/dead/requeue", {"filter": {}, "per_s": 0}).code == "INVALID_ARGUMENT"
    late = server.call("POST", "/v1/topics/graves/dead/requeue", {"filter": {}, "delay": 90_000})
    assert late.code == "EXCEEDS_MAX_DELAY"


def test_only_so_many_long_polls_wait(server: Server) -> None:
    polls = [threading.Thread(target=server.fetch, args=("waited",), kwargs={"wait": 20, "max": 1}) for _ in range(2)]
    for poll in polls:
        poll.start()
    end = time.monotonic() + 10
    while server.ok("GET", "/v1/status")["long_polls"] < 2:
        assert time.monotonic() < end
    refused = server.call("POST", "/v1/topics/waited/fetch", {"wait": 0.01})
    assert (refused.status, refused.code) == (429, "OVERLOADED")
    assert refused.headers["Retry-After"] == "1"
    assert server.fetch("waited") == [], "who does not wait is answered"
    server.put("waited", {"body": 1}, {"body": 2})
    for poll in polls:
        poll.join(20)
    assert server.fetch("waited", wait=0.01) == [], "there is room again"


def test_only_so_many_bytes_of_requests_are_held(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of three bodies that never end two have room, whichever comes last has not."""
    env: dict[str, Any] = {"TURTLEMQ_MAX_BODY_BYTES": "524288", "TURTLEMQ_MAX_HELD_BYTES": "1048576"}
    head = "POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500000\r\n\r\n"
    with running(tmp_path_factory.mktemp("held") / "data", **env) as server:
        with ExitStack() as held:
            slow = [held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(3)]
            for one in slow:
                one.sendall(head.encode() + b" " * 499_000)
            answered = _readable(slow, 20)
            assert len(answered) == 1
            refused = answered[0].recv(2_000)
            assert b" 429 " in refused
            assert b"OVERLOADED" in refused
            server.put("t", {"body": "a small one has room"})
        end = time.monotonic() + 10
        while (answer := server.call("POST", "/v1/topics/t/messages", {"body": "x" * 400_000})).status == 429:
            assert time.monotonic() < end, "what is gone still counts"
        assert answer.status == 201


def test_what_is_unpacked_is_held_as_well() -> None:
    held = ByteBudget(1 << 20)
    with pytest.raises(Overloaded):
        asyncio.run(decompressed(gzip.compress(b" " * (2 << 20)), "gzip", 4 << 20, held.take))
    assert held.bytes == 1 << 20, "the first slice was, until the request is answered"


def test_topics_and_groups_are_counted(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("counted") / "data", TURTLEMQ_MAX_TOPICS="2", TURTLEMQ_MAX_GROUPS="2") as server:
        server.put("a", {"body": 1})
        server.ok("PUT", "/v1/topics/b", {})
        for method, path, value in (("PUT", "", {}), ("POST", "/messages", {"body": 1}), ("POST", "/fetch", {})):
            assert server.call(method, f"/v1/topics/c{path}", value).code == "INVALID_ARGUMENT"
        answer = server.call("POST", "/v1/command", {"command": "add", "topic": "c", "id": "x", "body": 1}).json
        assert "max_topics" in answer["error"]
        server.fetch("a", "one")
        server.ok("PUT", "/v1/topics/a/groups/two", {})
        assert server.call("POST", "/v1/topics/a/groups/three/fetch", {}).code == "INVALID_ARGUMENT"
        assert server.call("PUT", "/v1/topics/a/groups/three", {}).code == "INVALID_ARGUMENT"
        server.ok("DELETE", "/v1/topics/a/groups/two")
        server.fetch("a", "three")
        server.ok("DELETE", "/v1/topics/b")
        server.put("c", {"body": 1})


@pytest.mark.parametrize("by", ["address", "token"])
def test_each_client_has_a_rate_of_its_own(tmp_path_factory: pytest.TempPathFactory, by: str) -> None:
    tokens = [{"name": name, "hash": hash_of(token), "rights": ["produce"]} for name, token in TOKENS.items()]
    env: dict[str, Any] = {"TURTLEMQ_CLIENT_PRODUCE_PER_S": "0.01", "TURTLEMQ_CLIENT_BURST": "5"}
    who: list[dict[str, Any]] = [{"source": "127.0.0.1"}, {"source": "127.0.0.2"}]
    if by == "token":
        env["TURTLEMQ_TOKENS"] = json.dumps(tokens)
        who = [{"headers": {"Authorization": f"Bearer {token}"}} for token in TOKENS.values()]
    with running(tmp_path_factory.mktemp(by) / "data", **env) as server:
        assert put(server, "a", 3, **who[0]).status == 201
        assert put(server, "b", 3, **who[0]).code == "RATE_LIMITED", "all topics count together"
        assert put(server, "b", 3, **who[1]).status == 201


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those on which something has come. Unlike `select`, with any number of files open."""
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ, one)
        return [key.data for key, _ in selector.select(seconds)]
