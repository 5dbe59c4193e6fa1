"""Topics with partitions: any process answers any request about them, each message lies where its id says, and none is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.harness.server_process import Server, run, running
from tests.harness.shard_process import children, kill, own_processes, topic_in, until_replaced
from turtlemq.client import AsyncClient, AsyncProducer, Client, NewMessage, Producer
from turtlemq.client import partitions as client_partitions
from turtlemq.client.errors import BadAnswer, InvalidMessage
from turtlemq.client.outgoing import OutgoingMessage
from turtlemq.client.sending import RetryPolicy, store_all
from turtlemq.client.wire import Answer
from turtlemq.server.operations import OPERATIONS
from turtlemq.server.shards.fan_out import WAYS
from turtlemq.shards import partition_of, partitions_of, shard_of, shards_of

SHARDS = 3
IDS = [f"m{n}" for n in range(24)]
FAR_MS = 4_000_000_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("partitions") / "data", "--shards", str(SHARDS)) as found:
        yield found


@pytest.fixture(scope="module")
def processes(server: Server) -> list[Server]:
    return own_processes(server)


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    """A topic with partitions for each test."""
    name = topic_in(1, SHARDS, request.node.name.partition("[")[0])
    server.ok("PUT", f"/v1/topics/{name}", {"partitions": SHARDS, "max_attempts": 1})
    return name


def put_all(server: Server, topic: str, **more: Any) -> None:
    server.put(topic, *({"id": id_, "body": id_} | more for id_ in IDS))


def stored_in(server: Server, topic: str) -> dict[str, set[int]]:
    """The shards with each message, by id, as each process tells about its own partition."""
    found: dict[str, set[int]] = {}
    for number, (process, shard) in enumerate(zip(own_processes(server), range(SHARDS), strict=True)):
        named = {"X-Turtlemq-Partition": f"{(shard - shards_of(topic, 1, SHARDS)[0]) % SHARDS}/{SHARDS}"}
        listed = process.ok("GET", f"/v1/topics/{topic}/messages?limit=1000", headers=named)["messages"]
        for message in listed:
            found.setdefault(message["id"], set()).add(number)
    return found


# Places


def test_every_operation_on_a_topic_has_a_way_to_its_partitions() -> None:
    routes = {operation.route for operation in OPERATIONS if "{topic}" in operation.path}
    assert routes - {"PUT /v1/topics/{topic}", "DELETE /v1/topics/{topic}"} <= WAYS.keys()


def test_messages_lie_where_their_ids_say(server: Server, processes: list[Server], topic: str) -> None:
    for n, process in enumerate(processes):
        process.put(topic, *({"id": id_, "body": 1, "due_ms": FAR_MS} for id_ in IDS[n::SHARDS]))
    places = shards_of(topic, SHARDS, SHARDS)
    assert stored_in(server, topic) == {id_: {places[partition_of(id_, SHARDS)]} for id_ in IDS}


def test_an_id_is_stored_once_through_any_process(processes: list[Server], topic: str) -> None:
    for n, process in enumerate(processes):
        done = process.ok("POST", f"/v1/topics/{topic}/messages", {"messages": [{"id": id_, "body": n} for id_ in IDS]})
        assert done["ids"] == IDS
        assert (done["created"], done["duplicates"]) == ((len(IDS), 0) if n == 0 else (0, len(IDS)))
        assert done["partitions"] == SHARDS
        assert done.get("duplicate_indexes", []) == ([] if n == 0 else list(range(len(IDS))))


def test_messages_without_an_id_get_one_that_tells_their_partition(server: Server, topic: str) -> None:
    bodies: list[dict[str, Any]] = [{"body": 1, "due_ms": FAR_MS}, {"id": None, "body": 2, "due_ms": FAR_MS}] * 10
    ids = server.put(topic, *bodies)
    assert len(set(ids)) == len(ids)
    places = shards_of(topic, SHARDS, SHARDS)
    assert stored_in(server, topic) == {id_: {places[partition_of(id_, SHARDS)]} for id_ in ids}


def test_a_bad_message_refuses_the_whole_batch(server: Server, topic: str) -> None:
    messages = [{"id": id_, "body": 1, "due_ms": FAR_MS} for id_ in IDS]
    for row, bad in ((7, {"id": "-x", "body": 1}), (9, {"id": "x"}), (3, {"id": "x", "body": 1, "ttr": -1})):
        sent = [*messages[:row], bad, *messages[row:]]
        refused = server.call("POST", f"/v1/topics/{topic}/messages", {"messages": sent})
        assert (refused.status, refused.json["error"]["index"]) == (400, row)
    assert stored_in(server, topic) == {}


def test_a_refusal_of_one_partition_tells_what_the_others_did(server: Server, topic: str) -> None:
    put_all(server, topic, due_ms=FAR_MS)
    fresh: list[dict[str, Any]] = [{"id": id_, "body": 1} for id_ in ("n1", "n2", "n3", "n4", "n5", "n6")]
    known = next(id_ for id_ in IDS if partition_of(id_, SHARDS) == partition_of("n3", SHARDS))
    sent = [*fresh[:3], {"id": known, "body": 1}, *fresh[3:]]
    refused = server.call("POST", f"/v1/topics/{topic}/messages?if_exists=error", {"messages": sent})
    error = refused.json["error"]
    assert (refused.status, error["index"], error["state"]) == (409, 3, "sleep")
    others = {partition_of(message["id"], SHARDS) for message in fresh} - {partition_of(known, SHARDS)}
    assert error["partitions_done"] == len(others)
    for message in fresh:
        status = server.call("GET", f"/v1/topics/{topic}/messages/{message['id']}").status
        assert status == (200 if partition_of(message["id"], SHARDS) in others else 404)


# Making and deleting


def test_the_number_of_partitions_has_limits_and_stays(server: Server, processes: list[Server], topic: str) -> None:
    for process in processes:
        assert process.ok("PUT", f"/v1/topics/{topic}", {"ttr": 7})["settings"]["partitions"] == SHARDS
        assert process.ok("GET", f"/v1/topics/{topic}")["settings"]["ttr"] == 7
        for wrong, why in (
            (SHARDS + 1, "number of shards"),
            (1, "stays as"),
            (2, "stays as"),
            (0, "partitions"),
            ("x", "partitions"),
        ):
            refused = process.call("PUT", f"/v1/topics/{topic}", {"partitions": wrong})
            assert (refused.status, refused.code, why in refused.json["error"]["message"]) == (400, "INVALID_ARGUMENT", True), (
                wrong
            )
    assert server.ok("PUT", f"/v1/topics/{topic}-whole", {})["settings"]["partitions"] == 1
    assert server.call("PUT", f"/v1/topics/{topic}-whole", {"partitions": 2}).status == 400


def test_a_server_without_shards_has_no_partitions(tmp_path: Path) -> None:
    with running(tmp_path / "data") as alone:
        refused = alone.call("PUT", "/v1/topics/t", {"partitions": 2})
        assert (refused.status, "--shards" in refused.json["error"]["message"]) == (400, True)
        assert alone.call("GET", "/v1/topics/t").status == 404
    refused_start = run("serve", "--data", str(tmp_path / "d"), "--config", _config(tmp_path, "[defaults]\npartitions = 2\n"))
    assert (refused_start.returncode, "partitions" in refused_start.stderr) == (2, True)


def _config(folder: Path, text: str) -> str:
    (folder / "turtlemq.toml").write_text(text)
    return str(folder / "turtlemq.toml")


def test_a_deleted_topic_is_gone_from_all_shards(server: Server, processes: list[Server], topic: str) -> None:
    put_all(server, topic)
    for process in processes:
        process.put(topic, {"body": 1})  # now each of them knows the partitions
    assert len(list(server.data.glob(f"shard/*/topic/{topic}"))) == SHARDS
    processes[2].ok("DELETE", f"/v1/topics/{topic}")
    assert not list(server.data.glob(f"shard/*/topic/{topic}"))
    assert {process.call("GET", f"/v1/topics/{topic}").status for process in processes} == {404}
    for n, process in enumerate(processes):
        process.put(topic, {"id": f"again{n}", "body": 1})  # a new topic, in one shard
    assert len(list(server.data.glob(f"shard/*/topic/{topic}"))) == 1
    assert {message["id"] for message in server.fetch(topic)} == {f"again{n}" for n in range(SHARDS)}


@pytest.mark.parametrize("lost", [1, 2])
def test_missing_partitions_are_made_by_the_first_request_that_meets_one(tmp_path: Path, lost: int) -> None:
    with running(tmp_path / "data", "--shards", "3") as server:
        topic = topic_in(0, 3, "healed")
        server.ok("PUT", f"/v1/topics/{topic}", {"partitions": 3, "ttr": 7})
        assert server.stop() == 0
    for shard in shards_of(topic, 3, 3)[-lost:]:  # the process was killed before these were made
        folder = server.data / f"shard/{shard:02}/topic/{topic}"
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()
        (folder.parents[1] / "CLEAN").unlink()
    with running(tmp_path / "data", "--shards", "3") as again:
        put_all(own_processes(again)[2], topic)
        assert len(again.fetch(topic, max=100)) == len(IDS)
        settings = [file.read_text() for file in again.data.glob(f"shard/*/topic/{topic}/topic.toml")]
        assert len(settings) == 3
        assert all("ttr_ms = 7000" in text for text in settings)


def test_a_topic_that_cannot_be_opened_is_deleted_from_all_shards(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--shards", "3") as server:
        server.ok("PUT", "/v1/topics/broken", {"partitions": 3})
        assert server.stop() == 0
    home = server.data / f"shard/{shards_of('broken', 3, 3)[0]:02}"
    next((home / "topic/broken").glob("delay_*.bson")).write_bytes(b"x" * 4096)
    with running(tmp_path / "data", "--shards", "3") as again:
        assert again.call("POST", "/v1/topics/broken/fetch", {}).status == 503
        for process in own_processes(again):
            assert process.call("DELETE", "/v1/topics/broken").status in (200, 404)
        assert not list(again.data.glob("shard/*/topic/broken"))


def test_a_partition_refuses_requests_for_another_one(processes: list[Server], topic: str) -> None:
    places = shards_of(topic, SHARDS, SHARDS)
    for named in (f"1/{SHARDS}", "0/2", "0/1"):
        sent: dict[str, Any] = {"headers": {"X-Turtlemq-Partition": named}}
        refused = processes[places[0]].call("POST", f"/v1/topics/{topic}/messages", {"id": "x", "body": 1}, **sent)
        assert (refused.status, refused.code) == (421, "NOT_LEADER"), named
    for named in ("x", "3/3", "1/", "-1/3", "1/1000"):
        sent = {"headers": {"X-Turtlemq-Partition": named}}
        assert processes[0].call("POST", f"/v1/topics/{topic}/fetch", {}, **sent).status == 400


def test_a_direct_message_in_the_wrong_partition_is_refused(processes: list[Server], topic: str) -> None:
    """A client that hashes in another way stores nothing twice."""
    place = shards_of(topic, SHARDS, SHARDS)[0]
    headers = {"X-Turtlemq-Partition": f"0/{SHARDS}", "X-Turtlemq-Direct": "1"}
    right = next(id_ for id_ in IDS if partition_of(id_, SHARDS) == 0)
    wrong = next(id_ for id_ in IDS if partition_of(id_, SHARDS) != 0)
    path = f"/v1/topics/{topic}/messages"
    assert processes[place].call("POST", path, {"id": right, "body": 1}, headers=headers).status == 201
    for body in ({"id": wrong, "body": 1}, {"body": 1}, {"messages": [{"id": right, "body": 1}, {"id": wrong, "body": 1}]}):
        refused = processes[place].call("POST", path, body, headers=headers)
        assert (refused.status, refused.code) == (421, "NOT_LEADER"), body
    assert processes[place].ok("GET", f"/v1/topics/{topic}")["stats"]["ready"] == 1


# Consumers


def test_fetches_get_all_messages_of_all_partitions(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    found = [message["id"] for process in processes for message in process.fetch(topic, max=10)]
    assert sorted(found) == sorted(IDS)
    assert len(server.fetch(topic)) == 0


def test_a_lease_of_several_partitions_is_good_for_acks(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    fetched = server.ok("POST", f"/v1/topics/{topic}/fetch", {"max": 100})
    ids, lease = [message["id"] for message in fetched["messages"]], fetched["lease"]
    extended = processes[0].ok("POST", f"/v1/topics/{topic}/extend", {"ids": [*ids, "x"], "lease": lease, "ttr": 9})
    assert extended == {"extended": len(IDS), "unknown": ["x"], "late": []}
    mixed = [ids[0], "x1", f"-{ids[1]}", *ids[2:12], "x2", "x3"]
    acked = processes[1].ok("POST", f"/v1/topics/{topic}/ack", {"acks": mixed, "lease": lease})
    assert acked == {"acked": 11, "failed": 0, "dead": 1, "unknown": ["x1", "x2", "x3"], "late": []}
    stale = processes[2].ok("POST", f"/v1/topics/{topic}/ack", {"acks": ids[12:], "lease": "1c-1a0d3e2b400"})
    assert (stale["acked"], stale["late"]) == (0, ids[12:])
    listed = {"acks": ids[12:], "lease": [lease] * len(ids[12:])}
    assert processes[2].ok("POST", f"/v1/topics/{topic}/ack", listed)["acked"] == len(ids[12:])


@pytest.mark.parametrize("ack", ["manual", "auto"])
def test_a_long_poll_waits_at_all_partitions(processes: list[Server], topic: str, ack: str) -> None:
    for n, id_ in enumerate(IDS[:6]):
        found: list[Any] = []
        process = processes[n % SHARDS]
        polling = threading.Thread(
            target=lambda process=process, found=found: found.extend(process.fetch(topic, wait=30, ack=ack))
        )
        polling.start()
        processes[(n + 1) % SHARDS].put(topic, {"id": f"{ack}-{id_}", "body": 1})
        polling.join()
        assert [message["id"] for message in found] == [f"{ack}-{id_}"]


def test_messages_that_reach_two_polls_of_one_fetch_are_given_back(server: Server, processes: list[Server], topic: str) -> None:
    """All partitions answer a long poll at the same moment: one wins, and the others' messages come at once, as never sent."""
    for n in range(10):
        found: list[Any] = []
        polling = threading.Thread(target=lambda found=found: found.extend(processes[0].fetch(topic, wait=30)))
        polling.start()
        put_all(server, f"{topic}") if n == 0 else server.put(topic, *({"id": f"{n}-{id_}", "body": 1} for id_ in IDS))
        polling.join()
        while len(found) < len(IDS):
            found += server.fetch(topic, wait=30, max=100)
        assert len({message["id"] for message in found}) == len(found) == len(IDS)
        assert {message["attempt"] for message in found} == {1}
        server.ack(topic, *(message["id"] for message in found))
    stats = server.ok("GET", f"/v1/topics/{topic}")["stats"]
    assert (stats["history"], stats["dead"], stats["reserve"]) == (10 * len(IDS), 0, 0)


def test_a_consumer_that_goes_away_loses_nothing(server: Server, topic: str) -> None:
    for _ in range(5):
        body = json.dumps({"wait": 30}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /v1/topics/{topic}/fetch HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.replace("Host: x", f"Host: 127.0.0.1:{server.port}").encode() + body)
        (id_,) = server.put(topic, {"body": 1})
        (message,) = server.fetch(topic, wait=30)
        assert (message["id"], message["attempt"]) == (id_, 1)
        server.ack(topic, id_)


def test_a_paused_topic_or_group_gives_nothing_in_any_partition(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    first = server.fetch(topic, "g", max=1)
    server.ack(topic, *(message["id"] for message in first))
    for base in (f"/v1/topics/{topic}", f"/v1/topics/{topic}/groups/g"):
        assert processes[0].ok("POST", f"{base}/pause") == {"paused": True}
        for process in processes:
            fetched = process.ok("POST", f"/v1/topics/{topic}/groups/g/fetch", {})
            assert fetched == {"messages": [], "paused": True}
        assert processes[1].ok("POST", f"{base}/resume") == {"paused": False}
    paused = [event for event in server.ok("GET", f"/v1/audit?topic={topic}")["events"] if event["action"] == "pause"]
    assert [event.get("target", "") for event in paused] == ["", "g"]  # one for all partitions
    assert server.call("POST", f"/v1/topics/{topic}/groups/unknown/pause").status == 404
    assert len(server.fetch(topic, "g", max=100)) == len(IDS) - 1


# One message


def test_one_message_is_found_through_any_process(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic, delay=3600)
    for n, id_ in enumerate(IDS[:6]):
        process, path = processes[n % SHARDS], f"/v1/topics/{topic}/messages/{id_}"
        assert process.ok("GET", path)["state"] == "sleep"
        assert process.ok("PATCH", path, {"delay": 7200, "body": "new"})["outcome"] == "rescheduled"
        assert server.ok("GET", path)["body"] == "new"
        assert process.ok("DELETE", path) == {"outcome": "cancelled"}
        assert process.call("DELETE", f"{path}x").status == 404
        assert [row["topic"] for row in process.ok("GET", f"/v1/find?id={id_}")["found"]].count(topic) == 1
    left: dict[str, Any] = {"cancelled": 4, "missed": {"nope": "unknown", IDS[0]: "cancelled", "never": "unknown"}}
    asked = {"ids": ["nope", IDS[6], IDS[0], IDS[7], "never", IDS[8], IDS[9]]}
    answer = processes[0].call("POST", f"/v1/topics/{topic}/cancel", asked)
    assert json.loads(answer.data) == left
    assert list(answer.json["missed"]) == list(left["missed"])
    assert processes[1].ok("POST", f"/v1/topics/{topic}/cancel", {"due_from_ms": 0})["cancelled"] == len(IDS) - 10


def test_a_dead_message_is_retried_in_its_partition(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    server.fetch(topic, max=100)
    assert server.ack(topic, *(f"-{id_}" for id_ in IDS))["dead"] == len(IDS)
    for n, id_ in enumerate(IDS[:3]):
        assert processes[n].ok("POST", f"/v1/topics/{topic}/messages/{id_}/retry", {}) == {"outcome": "ready"}
    assert {message["id"] for message in server.fetch(topic, max=100)} == set(IDS[:3])


def test_a_transaction_is_about_one_partition(processes: list[Server], topic: str) -> None:
    path, here = f"/v1/topics/{topic}/transaction", [id_ for id_ in IDS if partition_of(id_, SHARDS) == 1]
    there = next(id_ for id_ in IDS if partition_of(id_, SHARDS) == 2)
    for n, process in enumerate(processes):
        puts = [{"id": here[n], "body": 1, "delay": 60}, {"body": 2, "delay": 60}]
        done = process.ok("POST", path, {"put": puts, "if": [{"id": here[n], "state": "unknown"}]})
        assert (done["put"]["created"], partition_of(done["put"]["ids"][1], SHARDS)) == (2, 1)
        refused = process.call("POST", path, {"cancel": [here[n], there]})
        assert (refused.status, refused.code) == (400, "INVALID_ARGUMENT")
        assert "partitions 1, 2" in refused.json["error"]["message"]
        assert process.ok("POST", path, {"cancel": [here[n]]})["cancelled"] == 1
        assert process.call("POST", path, {"cancel": 7}).status == 400


def test_messages_are_copied_into_partitions_and_not_out_of_them(processes: list[Server], server: Server, topic: str) -> None:
    for shard in range(SHARDS):
        source = topic_in(shard, SHARDS, f"source-of-{topic}")
        server.put(source, *({"id": f"s{shard}-{n}", "body": n} for n in range(9)))
        server.ack(source, *(message["id"] for message in server.fetch(source, max=100)))
        asked = {"from_ms": 0, "to_ms": int(time.time() * 1000), "into": topic}
        job = processes[shard].ok("POST", f"/v1/topics/{source}/replay", asked)
        while (found := server.ok("GET", f"/v1/topics/{source}/replays/{job['id']}"))["state"] == "running":
            time.sleep(0.02)
        assert (found["state"], found["copied"]) == ("done", 9), found
    ids = {message["id"] for message in server.fetch(topic, max=100)}
    assert len(ids) == 9 * SHARDS
    for id_ in ids:  # each lies where its id says
        assert server.ok("GET", f"/v1/topics/{topic}/messages/{id_}")["state"] == "reserve"
    refused = server.call("POST", f"/v1/topics/{topic}/replay", {"from_ms": 0, "to_ms": 1, "into": "x"})
    assert (refused.status, "partitions" in refused.json["error"]["message"]) == (400, True)
    assert server.ok("GET", f"/v1/topics/{topic}/replays") == {"replays": []}


def test_schedules_fire_in_the_partition_of_their_name(processes: list[Server], server: Server, topic: str) -> None:
    for n, name in enumerate(("a", "b", "c")):
        path = f"/v1/topics/{topic}/schedules/{name}"
        processes[n].ok("PUT", path, {"every": 3600, "body": 1})
        assert processes[(n + 1) % SHARDS].ok("GET", path)["name"] == name
        processes[(n + 2) % SHARDS].ok("POST", f"{path}/trigger")
    listed = server.ok("GET", f"/v1/topics/{topic}/schedules")["schedules"]
    assert sorted(row["name"] for row in listed) == ["a", "b", "c"]
    found = list[Any]()
    while len(found) < 3:
        found += server.fetch(topic, wait=30, max=10)
    assert {message["id"].partition("@")[0] for message in found} == {"a", "b", "c"}
    assert server.ack(topic, *(message["id"] for message in found))["acked"] == 3


def test_callbacks_are_refused(server: Server, topic: str) -> None:
    refused = server.call("POST", f"/v1/topics/{topic}/groups/g/clients", {"name": "w", "url": "https://x.example/"})
    assert (refused.status, "partitions" in refused.json["error"]["message"]) == (400, True)
    assert server.ok("GET", f"/v1/topics/{topic}/clients") == {"clients": []}


# Listings


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("limit", [1, 5, 7, 100])
def test_pages_of_a_listing_hold_every_message_once_in_order(
    processes: list[Server], server: Server, topic: str, limit: int, newest: bool
) -> None:
    server.put(topic, *({"id": id_, "body": 1, "due_ms": FAR_MS + n} for n, id_ in enumerate(IDS)))
    found, pages = list[str](), 0
    cursor: str | None = ""
    while cursor is not None:
        query = f"limit={limit}&cursor={cursor}&newest={str(newest).lower()}"
        page = processes[pages % SHARDS].ok("GET", f"/v1/topics/{topic}/messages?{query}")
        assert len(page["messages"]) <= limit
        found += [message["id"] for message in page["messages"]]
        cursor, pages = page["cursor"], pages + 1
    assert found == (IDS[::-1] if newest else IDS)
    for wrong in ("x", "pAAAA", "p" + "A" * 50):
        assert server.call("GET", f"/v1/topics/{topic}/messages?cursor={wrong}").status == 400
    assert server.call("GET", f"/v1/topics/{topic}/messages?limit=x").status == 400


def test_dead_letters_of_all_partitions(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    server.fetch(topic, max=100)
    server.ack(topic, *(f"-{id_}" for id_ in IDS[:16]), error="odd")
    server.ack(topic, *(f"-{id_}" for id_ in IDS[16:]), error="even")
    base, found = f"/v1/topics/{topic}/dead", list[Any]()
    cursor: str | None = ""
    while cursor is not None:
        page = processes[len(found) % SHARDS].ok("GET", f"{base}?limit=5&cursor={cursor}")
        found, cursor = found + page["messages"], page["cursor"]
    assert sorted(letter["id"] for letter in found) == sorted(IDS)
    assert [letter["dropped_ms"] for letter in found] == sorted(letter["dropped_ms"] for letter in found)
    assert server.ok("GET", f"{base}/summary") == {"total": 24, "errors": {"odd": 16, "even": 8}}
    exported = server.call("GET", f"{base}/export").data.splitlines()
    assert sorted(json.loads(line)["id"] for line in exported) == sorted(IDS)
    for path in (base, f"{base}/export", f"{base}/summary", f"/v1/topics/{topic}"):
        headed = server.call("HEAD", path)
        assert (headed.status, headed.data) == (200, b"")
    assert server.ok("POST", f"{base}/requeue", {"ids": [IDS[0], "x", IDS[1]]}) == {"requeued": 2, "unknown": ["x"]}
    assert server.ok("POST", f"{base}/requeue", {"filter": {"error": "odd"}, "delay": 60, "per_s": 10})["requeued"] == 14
    assert server.ok("POST", f"{base}/delete", {"filter": {}}) == {"deleted": 8, "unknown": []}


def test_events_of_all_partitions_come_once_and_in_order(processes: list[Server], server: Server, topic: str) -> None:
    path, found = f"/v1/topics/{topic}/events", list[Any]()
    cursor = server.ok("GET", path)["cursor"]
    put_all(server, topic)
    while len(found) < 2 * len(IDS):
        page = processes[len(found) % SHARDS].ok("GET", f"{path}?limit=5&wait=10&cursor={cursor}")
        assert len(page["events"]) <= 5
        found, cursor = found + page["events"], page["cursor"]
    for event in ("created", "ready"):
        assert sorted(one["id"] for one in found if one["event"] == event) == sorted(IDS)
    since, again = found[0]["at_ms"], list[Any]()
    page = server.ok("GET", f"{path}?limit=5&since_ms={since}")
    while page["events"]:
        again += page["events"]
        page = server.ok("GET", f"{path}?limit=5&cursor={page['cursor']}")
    assert len(again) == len(found)
    assert server.call("GET", f"{path}?wait=x").status == 400


# Figures


def test_figures_are_those_of_all_partitions(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic, delay=90)
    server.put(topic, *({"id": f"r{n}", "body": 1} for n in range(6)))
    server.fetch(topic, max=3)
    for process in processes:
        shown = process.ok("GET", f"/v1/topics/{topic}")
        assert (shown["stats"]["sleep"], shown["stats"]["ready"], shown["stats"]["reserve"]) == (24, 3, 3)
        assert [row for row in process.ok("GET", "/v1/topics")["topics"] if row["topic"] == topic] == [shown]
        (row,) = [row for row in process.ok("GET", f"/v1/status?q={topic}")["topics"] if row["topic"] == topic]
        assert (row["states"]["sleep"], row["totals"]["produced"], row["groups"]["default"]["reserve"]) == (24, 30, 3)
        assert process.ok("GET", f"/v1/status?q={topic}")["topics_total"] == 1
        told = process.ok("GET", f"/v1/topics/{topic}/forecast?bucket=60&hours=1")
        assert (sum(told["counts"]), len(told["counts"])) == (24, 60)
        assert process.ok("GET", f"/v1/topics/{topic}/groups/default")["stats"]["reserve"] == 3
    assert server.ok("POST", f"/v1/topics/{topic}/compact")["outcome"] == "compacted"
    assert server.ok("GET", f"/v1/topics/{topic}/history").keys() >= {"at_ms", "sleep", "produced"}


def test_a_group_is_moved_and_deleted_in_all_partitions(processes: list[Server], server: Server, topic: str) -> None:
    put_all(server, topic)
    server.ack(topic, *(message["id"] for message in server.fetch(topic, max=100)))
    assert processes[0].ok("PUT", f"/v1/topics/{topic}/groups/default", {"start": "earliest"})["stats"]["lag"] == len(IDS)
    assert len(processes[1].fetch(topic, max=100)) == len(IDS)
    assert processes[2].ok("DELETE", f"/v1/topics/{topic}/groups/default") == {"outcome": "deleted"}
    assert server.ok("GET", f"/v1/topics/{topic}")["groups"] == {}
    assert server.call("GET", f"/v1/topics/{topic}/groups/default").status == 404


def test_the_first_command_through_a_process_finds_its_partition(server: Server, processes: list[Server]) -> None:
    name = topic_in(1, SHARDS, "commanded")  # the process of shard 0 has no partition of it
    processes[1].ok("PUT", f"/v1/topics/{name}", {"partitions": 2})
    id_ = next(id_ for id_ in IDS if partition_of(id_, 2) == 1)
    add = {"command": "add", "topic": name, "id": id_, "body": 1, "delay": 3600, "TTR": 30}
    assert processes[0].ok("POST", "/v1/command", add)["success"]
    listed = processes[2].ok("GET", f"/v1/topics/{name}/messages", headers={"X-Turtlemq-Partition": "1/2"})["messages"]
    assert [message["id"] for message in listed] == [id_]


def test_commands_about_a_topic_with_partitions(processes: list[Server], topic: str) -> None:
    def command(number: int, **asked: Any) -> Any:
        return processes[number].ok("POST", "/v1/command", asked)

    for n in range(SHARDS):
        assert command(n, command="add", topic=topic, id=f"c{n}", delay=0, TTR=30, body=n)["id"] == f"c{n}"
    made = command(0, command="add", topic=topic, delay=0, TTR=30, body=9)["id"]
    popped = {command(n % SHARDS, command="pop", topic=topic)["id"] for n in range(4)}
    assert popped == {"c0", "c1", "c2", made}
    assert command(1, command="pop", topic=topic)["id"] == ""
    assert command(2, command="finish", topic=topic, id=made)["success"]
    assert command(0, command="finish", id="c1")["success"]
    assert not command(0, command="delete", topic=topic, id="never")["success"]


# Processes


class Traffic:
    """A producer and a consumer of one topic, which go on while processes are killed."""

    def __init__(self, server: Server, topic: str) -> None:
        self.server, self.topic = server, topic
        self.stored, self.delivered, self.acked, self.after_ack = set[str](), set[str](), set[str](), list[str]()
        self.ends = threading.Event()
        self.threads = [threading.Thread(target=self.produce), threading.Thread(target=self.consume)]

    def produce(self) -> None:
        number = 0
        while not self.ends.is_set():
            ids = [f"{number + n}" for n in range(20)]
            if self._sent("messages", {"messages": [{"id": id_, "body": id_} for id_ in ids]}) is not None:
                self.stored |= set(ids)
                number += 20  # else the same ids are sent again

    def consume(self) -> None:
        while not (self.ends.is_set() and self.is_drained()):
            fetched = self._sent("fetch", {"max": 50, "wait": 1, "ttr": 3})
            ids = [message["id"] for message in fetched["messages"]] if fetched else []
            self.delivered |= set(ids)
            self.after_ack += [id_ for id_ in ids if id_ in self.acked]
            if ids and (done := self._sent("ack", {"acks": ids, "lease": fetched["lease"]})) is not None:
                self.acked |= set(ids) - {*done["unknown"], *done["late"]}

    def is_drained(self) -> bool:
        """Whether nothing is left to fetch or to acknowledge: an ack whose answer was lost may have been done."""
        stats = self.server.ok("GET", f"/v1/topics/{self.topic}")["stats"]
        return not self.threads[0].is_alive() and not any(stats[state] for state in ("sleep", "ready", "reserve"))

    def _sent(self, verb: str, body: Any) -> Any:
        """The answer to a request; None if it has failed, or its connection was lost."""
        try:
            answer = self.server.call("POST", f"/v1/topics/{self.topic}/{verb}", body)
        except OSError:
            return None
        assert answer.status in (200, 201, 503), answer.data
        return answer.json if answer.status < 300 else None

    def until_more(self, count: int) -> None:
        """Wait until so many more messages were stored and acknowledged."""
        stored, acked = len(self.stored) + count, len(self.acked) + count
        while len(self.stored) < stored or len(self.acked) < acked:
            assert all(thread.is_alive() for thread in self.threads)
            time.sleep(0.02)


def test_killed_processes_lose_nothing_and_forget_no_ack(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--shards", "3") as server:
        server.ok("PUT", "/v1/topics/load", {"partitions": 3, "max_attempts": 1_000})
        traffic = Traffic(server, "load")
        for thread in traffic.threads:
            thread.start()
        for shard in (0, 1, 2, 0):
            traffic.until_more(40)
            before = children(server.process.pid)[shard]
            kill(before, signal.SIGKILL)
            until_replaced(server, shard, before)
        traffic.until_more(40)
        traffic.ends.set()
        for thread in traffic.threads:
            thread.join()
        stats = server.ok("GET", "/v1/topics/load")["stats"]
        assert traffic.after_ack == []
        assert traffic.stored <= traffic.delivered
        assert (stats["history"], stats["dead"]) == (len(traffic.delivered), 0)  # each id is stored once


# The client


def proxied(server: Server, outcome: str) -> int:
    """Requests that any process has passed on or split, so far."""
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("turtlemq_proxied_total") and f'"{outcome}"' in line)


def test_client_and_server_find_the_same_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    for shards in range(2, 9):
        assert [client_partitions.shard_of(id_, shards) for id_ in IDS] == [shard_of(id_, shards) for id_ in IDS]
    monkeypatch.setattr(client_partitions, "_hash", lambda: None)
    assert client_partitions.shard_of("orders", 4) is None


def test_client_and_server_find_the_same_partition() -> None:
    ids = [*IDS, "", "ü", "a@b", "a@1770000000000", "report@177000000000", "x" * 200, "\U0001f422"]
    for count in range(1, 9):
        assert (
            client_partitions.partitions_of(ids, count) == [partition_of(id_, count) for id_ in ids] == partitions_of(ids, count)
        )


def test_the_client_goes_to_the_processes_of_partitions(server: Server, topic: str) -> None:
    with Client(server.url) as client:
        client.put(topic, 0, id="first")  # learns the addresses
        client.put(topic, 0, id="first")
        before = proxied(server, "split")
        ids = client.put_many(topic, [NewMessage(body=n, id=id_) for n, id_ in enumerate(IDS)])
        assert (list(ids), ids.created) == (IDS, [True] * len(IDS))
        again = client.put_many(topic, [NewMessage(body=n, id=id_) for n, id_ in enumerate(["n1", *IDS, "n2"])])
        assert again.created == [True, *[False] * len(IDS), True]
        assert client.get(topic, "m3").body == 3
        client.cancel(topic, "m3")
        with pytest.raises(InvalidMessage) as error:
            client.put_many(topic, [NewMessage(body=1, id="ok"), NewMessage(body=1, id="bad", ttr=1e12)])
        assert error.value.index == 1
        found = list[Any]()
        while len(found) < len(IDS) + 2:
            fetched = client.fetch(topic, max=4, wait=10)
            assert client.ack(topic, [m.id for m in fetched], lease=fetched[0].lease).acked == len(fetched)
            found += [m.id for m in fetched if m.id != "ok"]
        assert sorted(found) == sorted({"first", "n1", "n2", *IDS} - {"m3"})
        assert proxied(server, "split") - before < len(found) // 4  # most fetches, and all puts, are direct


def test_producers_split_their_batches(server: Server, topic: str) -> None:
    async def put_all() -> None:
        async with AsyncClient(server.url) as client, AsyncProducer(topic, client, linger=0.05) as producer:
            await client.put(topic, 0, id="first")
            puts = [await producer.put(n, id=f"a{n}") for n in range(50)]
            assert [await put for put in puts] == [f"a{n}" for n in range(50)]

    asyncio.run(put_all())
    with Client(server.url) as client, Producer(topic, client) as producer:
        client.put(topic, 0, id="first")
        puts = [producer.put(n, id=f"b{n}") for n in range(50)]
        producer.flush(60)
        assert {put.created for put in puts} == {True}
    places = shards_of(topic, SHARDS, SHARDS)
    assert len(server.ok("GET", f"/v1/topics/{topic}/messages?state=ready&limit=1000")["messages"]) == 101
    for shard in places:
        assert list((server.data / f"shard/{shard:02}/topic/{topic}").glob("ready_*.bson"))


def test_a_client_with_another_hash_stores_nothing_twice(server: Server, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses messages in the wrong partition, and the client goes on through any process."""

    def other(ids: Sequence[str], partitions: int) -> list[int]:
        return [(partition + 1) % partitions for partition in partitions_of(ids, partitions)]

    with Client(server.url) as client:
        client.put(topic, 0, id="first")
        monkeypatch.setattr(client_partitions, "partitions_of", other)
        for id_ in IDS:
            client.put(topic, id_, id=id_)
        client.put_many(topic, [NewMessage(body=id_, id=id_) for id_ in IDS])
    assert server.ok("GET", f"/v1/topics/{topic}")["stats"]["ready"] == len(IDS) + 1
    assert {len(shards) for shards in stored_in(server, topic).values()} <= {1}


def test_a_client_without_the_hash_sends_to_any_process(server: Server, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_partitions, "_hash", lambda: None)
    with Client(server.url) as client:
        for id_ in IDS:
            client.put(topic, id_, id=id_)
        assert client.chooser(topic) is None
    assert len(server.fetch(topic, max=100)) == len(IDS)


def test_the_client_does_not_notice_that_a_topic_was_made_anew(server: Server, topic: str) -> None:
    with Client(server.url) as client:
        client.put(topic, 0, id="first")
        client.put(topic, 1, id="m1")
        server.ok("DELETE", f"/v1/topics/{topic}")
        server.ok("PUT", f"/v1/topics/{topic}", {})
        for id_ in IDS:
            client.put(topic, id_, id=id_)
    assert len(server.fetch(topic, max=100)) == len(IDS)


@pytest.mark.parametrize("ids", [[], ["a", "b"]])
def test_a_partition_that_answers_with_another_number_of_ids_is_refused(ids: list[str]) -> None:
    policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0)
    batch = [OutgoingMessage(id_, b"1") for id_ in ("a", "b")]
    flow = store_all("t", batch, policy, together=False, choose=lambda given: list(range(len(given))))
    next(flow)
    with pytest.raises(BadAnswer, match=f"1 messages were answered with {len(ids)} ids"):
        flow.send(Answer(201, {}, msgspec.json.encode({"ids": ids, "created": len(ids), "duplicates": 0})))
