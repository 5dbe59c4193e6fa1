"""The contract over real HTTP: messages come out as they went in, in JSON, NDJSON and BSON; acks, leases, cancels, groups, dead
letters."""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bson
import pytest

from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.server_process import Server, running
from tests.harness.shard_nodes import shard_nodes
from tests.harness.shard_process import AnyProcess, PartitionedServer, own_processes, through_any

NDJSON, BSON = {"Content-Type": "application/x-ndjson"}, {"Content-Type": "application/bson"}
FAR_MS = 4_000_000_000_000


OF_CLUSTERS = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 1, False), id="alone"),
        pytest.param((4, 1, False), id="four-shards"),
        pytest.param((4, 4, False), id="four-partitions"),
        pytest.param((4, 1, True), id="cluster", marks=OF_CLUSTERS),
        pytest.param((4, 4, True), id="cluster-partitions", marks=OF_CLUSTERS),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every part of the contract holds through any process, of a server with several shards or of a cluster's nodes, and for
    topics with partitions, but for the order between messages of different partitions."""
    shards, partitions, is_cluster = request.param
    folder = tmp_path_factory.mktemp("server")
    if is_cluster:
        with shard_nodes(folder, "ab", shards=shards) as nodes:
            nodes.start()
            nodes.until_whole("a", "b")
            yield through_any(nodes.server, nodes.ports, partitions)
        return
    with running(folder / "data", "--shards", str(shards)) as found:
        ports = [found.port, *(own.port for own in own_processes(found))]
        yield found if shards == 1 else through_any(found, ports, partitions)


@pytest.fixture
def topic(request: pytest.FixtureRequest, server: Server) -> str:
    """A topic for each test."""
    name = str(request.node.name).replace("[", "-").replace("]", "").replace(" ", "")[:100]
    if isinstance(server, PartitionedServer):
        server.make(name)
    return name


VALUES: list[Any] = ["text", 17, -0.5, True, None, [1, [2]], {"a": {"b": "ü"}}, "", {}, 12345678901234567890123]


@pytest.mark.parametrize("kind", ["messages", "bare", "ndjson", "gzip"])
def test_json_bodies_come_back_as_the_same_value(server: Server, topic: str, kind: str) -> None:
    messages = [{"body": value} for value in VALUES]
    path = f"/v1/topics/{topic}/messages"
    if kind == "bare":
        ids = [server.ok("POST", path, message)["ids"][0] for message in messages]
    elif kind == "ndjson":
        ids = server.ok("POST", path, data="\n".join(map(json.dumps, messages)).encode(), headers=NDJSON)["ids"]
    elif kind == "gzip":
        data = gzip.compress(json.dumps({"messages": messages}).encode())
        ids = server.ok("POST", path, data=data, headers={"Content-Encoding": "gzip"})["ids"]
    else:
        ids = server.put(topic, *messages)
    found = server.fetch(topic)
    assert [message["body"] for message in found] == VALUES
    assert [message["id"] for message in found] == ids


def test_a_json_text_is_kept_to_the_letter(server: Server, topic: str) -> None:
    server.ok("POST", f"/v1/topics/{topic}/messages", data=b'{"body": {"b" : 1.50, "a":1e2}}')
    assert b'"body":{"b" : 1.50, "a":1e2}' in server.call("POST", f"/v1/topics/{topic}/fetch", {}).data


def test_bytes_come_back_as_base64(server: Server, topic: str) -> None:
    text = base64.b64encode(bytes(range(256))).decode()
    server.put(topic, {"body_base64": text})
    assert server.fetch(topic)[0]["body_base64"] == text


def test_every_field_comes_back(server: Server, topic: str) -> None:
    before = int(time.time() * 1000)
    server.put(topic, {"body": 1, "id": "a", "due_ms": before - 5, "ttr": 7, "priority": "high", "headers": {"k": "v"}})
    (message,) = server.fetch(topic, consumer="me")
    after = int(time.time() * 1000)
    assert message["id"] == "a"
    assert message["headers"] == {"k": "v"}
    assert message["due_ms"] == before - 5
    assert before <= message["created_ms"] <= message["ready_ms"] <= after
    assert message["attempt"] == 1
    assert message["priority"] == "high"
    assert before + 7_000 <= message["lease_until_ms"] <= after + 7_000


def test_bson_in_and_out(server: Server, topic: str) -> None:
    bodies: list[Any] = [b"\0\xff", "text", {"a": [1, 2.5, None]}]
    data = b"".join(bson.encode({"body": body, "id": f"b{i}", "headers": {"n": str(i)}}) for i, body in enumerate(bodies))
    assert server.ok("POST", f"/v1/topics/{topic}/messages", data=data, headers=BSON)["ids"] == ["b0", "b1", "b2"]
    answer = server.call("POST", f"/v1/topics/{topic}/fetch", {}, headers={"Accept": "application/bson"})
    assert answer.headers["Content-Type"] == "application/bson"
    found = sorted(bson.decode_all(answer.data), key=lambda message: message["id"])
    assert [message["body"] for message in found] == bodies
    assert [message["id"] for message in found] == ["b0", "b1", "b2"]
    assert found[2]["headers"] == {"n": "2"}
    assert found[0].keys() >= {"due_ms", "created_ms", "ready_ms", "attempt", "priority", "lease_until_ms"}


def test_bson_answers_hold_what_json_answers_hold(server: Server, topic: str) -> None:
    bodies: list[Any] = [b"", "", "ü\0", {"a": 1}, 17, None, {"k\0": 1}, 10**30]
    messages = [{"body": body, "priority": "high"} for body in bodies[1:]]
    server.put(topic, {"body_base64": "", "priority": "high"}, *messages)
    ours = server.fetch(topic, "json")
    answer = server.call("POST", f"/v1/topics/{topic}/groups/bson/fetch", {}, headers={"Accept": "application/bson"})
    theirs = bson.decode_all(answer.data)
    rank = [message["id"] for message in ours]
    theirs.sort(key=lambda message: rank.index(message["id"]))  # there is no order between partitions
    assert [message["body"] for message in theirs[:-2]] == bodies[:-2]
    assert [json.loads(message["body_json"]) for message in theirs[-2:]] == bodies[-2:]
    for mine, other in zip(ours, theirs, strict=True):
        same = mine.keys() - {"body", "body_base64", "lease_until_ms"}
        assert {name: mine[name] for name in same} == {name: other[name] for name in same}


def test_bson_bodies_are_json_values_to_json_consumers(server: Server, topic: str) -> None:
    data = b"".join(bson.encode({"body": body}) for body in ({"a": 1}, b"raw"))
    server.ok("POST", f"/v1/topics/{topic}/messages", data=data, headers=BSON)
    first, second = server.fetch(topic)
    assert first["body"] == {"a": 1}
    assert second["body_base64"] == base64.b64encode(b"raw").decode()


def test_a_thousand_in_a_batch(server: Server, topic: str) -> None:
    ids = server.put(topic, *({"body": i} for i in range(1000)))
    found = server.fetch(topic, max=1000)
    assert [message["id"] for message in found] == ids
    assert server.ack(topic, *ids) == {"acked": 1000, "failed": 0, "dead": 0, "unknown": []}


def test_an_id_is_stored_once(server: Server, topic: str) -> None:
    put = f"/v1/topics/{topic}/messages"
    assert server.ok("POST", put, {"body": 1, "id": "x"})["created"] == 1
    again = server.ok("POST", put, {"messages": [{"body": 2, "id": "x"}, {"body": 3, "id": "y"}]})
    counts = {"created": 1, "duplicates": 1, "replaced": 0, "rescheduled": 0}
    assert again.pop("partitions", 2) == 2
    assert again.pop("copies", 2) == 2  # in a cluster
    assert again == {"ids": ["x", "y"], **counts, "duplicate_indexes": [0], "durable": "fsync"}
    assert [message["body"] for message in server.fetch(topic)] == [1, 3]
    server.ack(topic, "x")
    assert server.ok("POST", put, {"body": 4, "id": "x"})["duplicates"] == 1


# Acknowledging


def test_a_grouped_ack_list(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"}, {"body": 2, "id": "b"}, {"body": 3, "id": "c"})
    server.fetch(topic)
    out = server.ok("POST", f"/v1/topics/{topic}/ack", ["a", "-b", "zzz"])
    assert out == {"acked": 1, "failed": 1, "dead": 0, "unknown": ["zzz"]}
    assert server.ok("POST", f"/v1/topics/{topic}/ack", ["a"])["unknown"] == ["a"]


def test_a_failed_message_comes_again_and_dies_at_last(server: Server, topic: str) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 2})
    server.put(topic, {"body": 1, "id": "a"})
    assert server.fetch(topic)[0]["attempt"] == 1
    assert server.ack(topic, "-a", retry_delay=0.05, error="first")["failed"] == 1
    assert server.fetch(topic) == []
    assert server.fetch(topic, wait=2)[0]["attempt"] == 2
    assert server.ack(topic, "-a", error="boom")["dead"] == 1
    (letter,) = server.ok("GET", f"/v1/topics/{topic}/dead")["messages"]
    assert (letter["id"], letter["error"], letter["attempts"], letter["body"]) == ("a", "boom", 2, 1)
    assert server.ok("GET", f"/v1/topics/{topic}/dead/summary") == {"total": 1, "errors": {"boom": 1}}
    exported = server.call("GET", f"/v1/topics/{topic}/dead/export").data
    assert [json.loads(line)["id"] for line in exported.splitlines()] == ["a"]
    assert server.ok("GET", f"/v1/topics/{topic}/messages/a")["state"] == "dead"
    assert server.ok("POST", f"/v1/topics/{topic}/dead/requeue", {"ids": ["a", "b"]}) == {"requeued": 1, "unknown": ["b"]}
    assert server.fetch(topic, wait=2)[0]["attempt"] == 1
    assert server.ok("GET", f"/v1/topics/{topic}/dead")["messages"] == []


def test_dead_letters_by_filter(server: Server, topic: str) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    server.put(topic, *({"body": i, "id": f"m{i}"} for i in range(6)))
    server.fetch(topic)
    server.ack(topic, "-m0", "-m1", "-m2", "-m3", error="odd")
    server.ack(topic, "-m4", "-m5", error="even")
    first = server.ok("GET", f"/v1/topics/{topic}/dead?limit=2&error=odd")
    found = [letter["id"] for letter in first["messages"]]
    assert len(found) == 2
    rest = server.ok("GET", f"/v1/topics/{topic}/dead?limit=2&error=odd&cursor={first['cursor']}")
    found += [letter["id"] for letter in rest["messages"]]
    assert (sorted(found) if isinstance(server, PartitionedServer) else found) == ["m0", "m1", "m2", "m3"]
    assert server.ok("POST", f"/v1/topics/{topic}/dead/delete", {"filter": {"error": "even"}})["deleted"] == 2
    assert server.ok("POST", f"/v1/topics/{topic}/dead/requeue", {"filter": {}, "delay": 60})["requeued"] == 4
    assert server.ok("GET", f"/v1/topics/{topic}")["stats"]["sleep"] == 4


def test_letters_with_tracebacks_are_found_by_the_first_line(server: Server, topic: str) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    errors = ["no x", "no x\n  File a.py", "no x\n  File b.py"]
    server.put(topic, *({"body": i, "id": f"m{i}"} for i in range(3)))
    server.fetch(topic)
    for i, error in enumerate(errors):
        server.ack(topic, f"-m{i}", error=error)
    assert server.ok("GET", f"/v1/topics/{topic}/dead/summary")["errors"] == {"no x": 3}
    for error, ids in ((errors[0], ["m0", "m1", "m2"]), (errors[1], ["m1"]), ("  File a.py", [])):
        found = server.ok("GET", f"/v1/topics/{topic}/dead?error={quote(error)}")["messages"]
        assert [letter["id"] for letter in found] == ids


def test_at_most_once(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"})
    assert len(server.fetch(topic, ack="auto")) == 1
    assert server.ok("GET", f"/v1/topics/{topic}")["stats"]["history"] == 1
    assert server.ack(topic, "a")["unknown"] == ["a"]


def test_extend_keeps_a_lease_alive(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"}, {"body": 2, "id": "b"})
    server.fetch(topic, ttr=0.3)
    assert server.ok("POST", f"/v1/topics/{topic}/extend", {"ids": ["a", "z"], "ttr": 60}) == {"extended": 1, "unknown": ["z"]}
    (again,) = server.fetch(topic, wait=3)
    assert (again["id"], again["attempt"]) == ("b", 2)


def test_groups_are_independent_and_can_replay(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"})
    assert len(server.fetch(topic, "one")) == len(server.fetch(topic, "two")) == 1
    assert server.fetch(topic, "one") == []
    server.ok("PUT", f"/v1/topics/{topic}/groups/late", {"start": "latest"})
    assert server.fetch(topic, "late") == []
    server.ok("PUT", f"/v1/topics/{topic}/groups/late", {"start": {"ready_ms": 0}})
    assert len(server.fetch(topic, "late")) == 1
    server.ok("PUT", f"/v1/topics/{topic}/groups/late", {})
    assert server.fetch(topic, "late") == []
    server.ok("DELETE", f"/v1/topics/{topic}/groups/late")
    assert server.call("DELETE", f"/v1/topics/{topic}/groups/late").code == "UNKNOWN_GROUP"
    assert set(server.ok("GET", f"/v1/topics/{topic}")["groups"]) == {"one", "two"}


# One message


def test_the_life_of_a_message(server: Server, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages/m%201"
    server.put(topic, {"body": {"x": 1}, "id": "m 1", "due_ms": FAR_MS})
    assert server.ok("GET", path)["state"] == "sleep"
    assert server.ok("PATCH", path, {"body": [2], "headers": {"h": "1"}}) == {"outcome": "edited", "due_ms": FAR_MS}
    assert server.ok("PATCH", path, {"delay": 0})["outcome"] == "rescheduled"
    (message,) = server.fetch(topic, wait=2)
    assert (message["body"], message["headers"]) == ([2], {"h": "1"})
    found = server.ok("GET", path)
    assert (found["state"], found["groups"]["default"]["state"], found["attempt"]) == ("reserve", "reserve", 1)
    for method, body in (("DELETE", None), ("PATCH", {"delay": 5})):
        refused = server.call(method, path, body)
        assert (refused.status, refused.code, refused.json["error"]["state"]) == (409, "CONFLICT", "reserve")
    server.ack(topic, "m 1")
    found = server.ok("GET", path)
    assert (found["state"], [moment["event"] for moment in found["timeline"]][-1]) == ("history", "acked")


def test_cancelling(server: Server, topic: str) -> None:
    server.put(topic, *({"body": i, "id": f"m{i}", "due_ms": FAR_MS + i} for i in range(10)))
    assert server.ok("DELETE", f"/v1/topics/{topic}/messages/m0") == {"outcome": "cancelled"}
    assert server.call("DELETE", f"/v1/topics/{topic}/messages/m0").json["error"]["state"] == "cancelled"
    assert server.call("DELETE", f"/v1/topics/{topic}/messages/nope").code == "UNKNOWN_MESSAGE"
    out = server.ok("POST", f"/v1/topics/{topic}/cancel", {"ids": ["m1", "m0", "nope"]})
    assert out == {"cancelled": 1, "missed": {"nope": "unknown", "m0": "cancelled"}}
    window = {"due_from_ms": FAR_MS + 5, "due_to_ms": FAR_MS + 7}
    assert server.ok("POST", f"/v1/topics/{topic}/cancel", window) == {"cancelled": 3, "missed": {}}
    left = server.ok("GET", f"/v1/topics/{topic}/messages")
    assert [message["id"] for message in left["messages"]] == ["m2", "m3", "m4", "m8", "m9"]


def test_cancel_of_a_range_passes_over_sleeping_retries(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "again"}, {"body": 2, "id": "new", "due_ms": FAR_MS})
    assert [message["id"] for message in server.fetch(topic, wait=5)] == ["again"]
    assert server.ack(topic, "-again", retry_delay=3600)["failed"] == 1
    assert server.ok("POST", f"/v1/topics/{topic}/cancel", {"due_from_ms": 0}) == {"cancelled": 1, "missed": {}}
    left = server.ok("GET", f"/v1/topics/{topic}/messages?state=sleep")
    assert [message["id"] for message in left["messages"]] == ["again"]


def test_browsing_and_forecast(server: Server, topic: str) -> None:
    server.put(topic, *({"body": i, "id": f"m{i}", "delay": 30 + 60 * i} for i in range(5)))
    first = server.ok("GET", f"/v1/topics/{topic}/messages?state=sleep&limit=2")
    assert [message["body"] for message in first["messages"]] == [0, 1]
    rest = server.ok("GET", f"/v1/topics/{topic}/messages?limit=9&cursor={first['cursor']}")
    assert ([message["body"] for message in rest["messages"]], rest["cursor"]) == ([2, 3, 4], None)
    found = server.ok("GET", f"/v1/topics/{topic}/forecast?bucket=60&hours=0.05")
    assert (found["counts"], found["beyond"], found["overdue"], found["bucket_ms"]) == ([1, 1, 1], 2, 0, 60_000)


# Topics


def test_settings_are_nested_and_kept(server: Server, topic: str) -> None:
    asked = {
        "ttr": 1.5,
        "max_attempts": 3,
        "backoff": {"base": 2, "factor": 3, "max": 10, "jitter": "none"},
        "retention": {"history_hours": 1, "history_bytes": 1000},
        "dead": {"ttl_hours": 2, "max_count": 5},
        "max_in_flight": 10,
        "delivery": "at-most-once",
    }
    assert (
        server.ok("PUT", f"/v1/topics/{topic}", asked)["settings"] | asked == server.ok("GET", f"/v1/topics/{topic}")["settings"]
    )
    changed = server.ok("PUT", f"/v1/topics/{topic}", {"backoff": {"base": 4}})["settings"]
    assert changed == server.ok("GET", f"/v1/topics/{topic}")["settings"]
    assert (changed["backoff"], changed["ttr"]) == ({"base": 4, "factor": 3, "max": 10, "jitter": "none"}, 1.5)


def test_a_topic_comes_and_goes(server: Server, topic: str) -> None:
    topic = f"new-{topic}"
    assert server.call("GET", f"/v1/topics/{topic}").code == "UNKNOWN_TOPIC"
    if isinstance(server, PartitionedServer):
        server.make(topic)
    server.put(topic, {"body": 1, "delay": 60})
    found = server.ok("GET", f"/v1/topics/{topic}")
    wanted = "sleep ready reserve history dead cancelled bytes segments live_ratio oldest_ready_ms next_due_ms"
    assert set(wanted.split()) <= set(found["stats"])
    assert found["stats"]["sleep"] == 1
    assert topic in [one["topic"] for one in server.ok("GET", "/v1/topics")["topics"]]
    assert server.ok("POST", f"/v1/topics/{topic}/compact")["outcome"] == "compacted"
    server.ok("DELETE", f"/v1/topics/{topic}")
    assert server.call("GET", f"/v1/topics/{topic}").status == 404
    assert not list(Path(server.data).glob(f"**/topic/{topic}"))


def test_operating(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "delay": 60})
    assert server.ok("GET", "/healthz")["status"] == "alive"
    assert server.ok("GET", "/readyz")["status"] == "ready"
    pages = [server.call("GET", "/metrics") for _ in range(len(server.ports) if isinstance(server, AnyProcess) else 1)]
    assert all(page.headers["Content-Type"].startswith("text/plain") for page in pages)
    lines = re.sub(r'shard="\d",', "", "".join(page.data.decode() for page in pages)).splitlines()
    assert f'turtlemq_messages{{topic="{topic}",state="sleep"}} 1' in lines
    assert any(line.startswith('turtlemq_requests_total{method="POST",route="/v1/topics/{topic}/messages"') for line in lines)


def test_the_command_protocol(server: Server, topic: str) -> None:
    def command(**fields: Any) -> Any:
        return server.ok("POST", "/v1/command", fields)

    add = {"command": "add", "topic": topic, "delay": 0, "TTR": 30, "body": '{"a":1}'}
    assert command(**add, id="c1") == {"success": True, "error": "", "id": "c1", "value": None}
    command(**add, id="c2")
    popped = command(command="pop", topic=topic)
    first, second = ("c2", "c1") if isinstance(server, PartitionedServer) and popped["id"] == "c2" else ("c1", "c2")
    assert popped == {"success": True, "error": "", "id": first, "value": '{"a":1}'}
    assert command(command="finish", id=first)["success"]
    assert not command(command="finish", id=first)["success"]
    assert command(command="delete", id=second, topic=topic)["success"]
    assert command(command="pop", topic=topic)["id"] == ""
    for wrong in ({"command": "fly"}, {"command": "add", "topic": "-"}, {"command": "pop"}, {"command": "finish"}, {}):
        out = command(**wrong)
        assert not out["success"]
        assert out["error"]
