"""Topics with partitions in a cluster: any process of any node answers, and no message is lost when leaders change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.server_process import Server
from tests.harness.shard_nodes import ShardNodes, shard_nodes
from tests.harness.shard_process import header_names, through_any, topic_in
from turtlemq.client import Client, NewMessage
from turtlemq.client.errors import ClientError
from turtlemq.server.cluster_router import proof_of
from turtlemq.shards import partition_of, shards_of

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
SHARDS = 4
IDS = [f"m{n}" for n in range(40)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardNodes]:
    """Two nodes with all copies in sync. Tests leave them so."""
    with shard_nodes(tmp_path_factory.mktemp("pair"), "ab") as nodes:
        nodes.start()
        nodes.until_whole("a", "b")
        yield nodes


@pytest.fixture
def server(pair: ShardNodes) -> Server:
    return through_any(pair.server, pair.ports)


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    """A topic with partitions for each test."""
    name = topic_in(1, SHARDS, request.node.name)
    server.ok("PUT", f"/v1/topics/{name}", {"partitions": SHARDS})
    return name


def test_each_message_lies_where_its_id_says(pair: ShardNodes, server: Server, topic: str) -> None:
    told = server.ok("POST", f"/v1/topics/{topic}/messages", {"messages": [{"id": id_, "body": 1, "delay": 3600} for id_ in IDS]})
    assert told["partitions"] == len({partition_of(id_, SHARDS) for id_ in IDS})
    leads = pair.view.shards
    for number, shard in enumerate(shards_of(topic, SHARDS, SHARDS)):
        lead = leads[shard].lead
        assert lead is not None
        process = Server(pair.server.process, int(lead.url.rpartition(":")[2]), pair.root)
        listed = process.ok(
            "GET", f"/v1/topics/{topic}/messages?limit=1000", headers={"X-Turtlemq-Partition": f"{number}/{SHARDS}"}
        )
        assert {message["id"] for message in listed["messages"]} == {id_ for id_ in IDS if partition_of(id_, SHARDS) == number}
    row = next(row for row in server.ok("GET", "/v1/topics")["topics"] if row["topic"] == topic)
    assert row["stats"]["sleep"] == len(IDS)
    assert len(server.ok("GET", f"/v1/topics/{topic}/messages?limit=1000")["messages"]) == len(IDS)


def test_a_partition_that_is_elsewhere_is_passed_on_or_refused(pair: ShardNodes, topic: str) -> None:
    ids = [id_ for id_ in IDS if partition_of(id_, SHARDS) == 2]
    named = {"X-Turtlemq-Partition": f"2/{SHARDS}"}
    messages = {"messages": [{"id": ids[0], "body": 1}]}
    answers = [
        Server(pair.server.process, port, pair.root).call(
            "POST", f"/v1/topics/{topic}/messages", messages, headers=named | {"X-Turtlemq-Direct": direct}
        )
        for port in pair.ports
        for direct in ("0", "1")
    ]
    assert {answer.status for answer in answers} == {201, 421}
    assert all(answer.json["error"]["code"] == "NOT_LEADER" for answer in answers if answer.status == 421)
    wrong = Server(pair.server.process, pair.ports[0], pair.root).call(
        "POST", f"/v1/topics/{topic}/messages", messages, headers={"X-Turtlemq-Partition": "2/3"}
    )
    assert (wrong.status, wrong.json["error"]["partitions"]) == (421, SHARDS)


def test_a_passed_on_answer_has_each_header_once(pair: ShardNodes, server: Server, topic: str) -> None:
    whole = topic_in(1, SHARDS, "whole")
    server.put(whole, {"body": 1})
    for port in pair.ports:
        for name in (whole, topic):
            names = header_names(Server(server.process, port, pair.root), f"/v1/topics/{name}/messages", '{"body": 1}')
            assert sorted(set(names)) == names
            assert {"content-type", "date", "x-request-id", "x-turtlemq-cluster"} <= set(names)


def test_the_number_of_partitions_is_at_most_that_of_shards(server: Server) -> None:
    refused = server.call("PUT", "/v1/topics/too-many", {"partitions": SHARDS + 1})
    assert (refused.status, refused.json["error"]["code"]) == (400, "INVALID_ARGUMENT")


def test_only_nodes_of_the_cluster_are_believed(pair: ShardNodes) -> None:
    name = topic_in(0, SHARDS, "forged")  # partition 1 would be made without partition 0
    asked = {"X-Turtlemq-Partition": "1/2", "X-Turtlemq-Internal": "1", "X-Turtlemq-Hop": "1"}
    lead = pair.view.shards[1].lead
    assert lead is not None
    leader = Server(pair.server.process, int(lead.url.rpartition(":")[2]), pair.root)
    for proof in ("", "1", proof_of(b"another secret than this", "prod")):
        refused = leader.call("PUT", f"/v1/topics/{name}", {"partitions": 2}, headers=asked | {"X-Turtlemq-Proof": proof})
        assert refused.status == 421, refused.data
    known = proof_of(b"a secret of this cluster", "prod")
    assert leader.call("PUT", f"/v1/topics/{name}", {"partitions": 2}, headers=asked | {"X-Turtlemq-Proof": known}).status == 200
    leader.ok("DELETE", f"/v1/topics/{name}", headers=asked | {"X-Turtlemq-Proof": known})


def test_a_long_poll_waits_at_all_leaders(server: Server, topic: str) -> None:
    found: list[str] = []
    server.fetch(topic)
    polling = threading.Thread(target=lambda: found.extend(message["id"] for message in server.fetch(topic, wait=20)))
    polling.start()
    time.sleep(0.3)
    Server(server.process, server.port, server.data).put(topic, {"id": "late", "body": 1})
    polling.join()
    assert found == ["late"]


def test_a_deleted_topic_is_gone_from_all_shards(pair: ShardNodes, server: Server, topic: str) -> None:
    server.put(topic, *({"id": id_, "body": 1} for id_ in IDS))
    server.ok("DELETE", f"/v1/topics/{topic}")
    assert server.call("GET", f"/v1/topics/{topic}").status == 404
    eventually(lambda: not list(pair.root.glob(f"*/data/shard/*/topic/{topic}")))


def test_the_client_goes_to_the_leaders_of_partitions(pair: ShardNodes, server: Server, topic: str) -> None:
    with Client(pair.homes["a"].url) as client:
        for n in range(3):
            client.put_many(topic, [NewMessage(body=1, id=f"{n}-{id_}") for id_ in IDS])
        got: list[str] = []
        while len(got) < 3 * len(IDS):
            messages = client.fetch(topic, max=1_000, wait=5)
            got += [message.id for message in messages]
            client.ack(topic, [message.id for message in messages], lease=[message.lease for message in messages])
        assert sorted(got) == sorted(f"{n}-{id_}" for n in range(3) for id_ in IDS)


def has_grown(found: set[str], wanted: int) -> bool:
    return len(found) > wanted


@pytest.mark.timeout(300)
def test_killed_leaders_lose_no_message_of_a_partition(pair: ShardNodes, topic: str) -> None:
    accepted: set[str] = set()
    errors: list[ClientError] = []
    stop = threading.Event()

    def produce(number: int) -> None:
        with Client([home.url for home in pair.homes.values()], timeout=60) as client:
            n = 0
            while not stop.is_set():
                ids = [f"{number}-{n}-{m}" for m in range(8)]
                n += 1
                try:
                    client.put_many(topic, [NewMessage(body=id_, id=id_) for id_ in ids])
                    accepted.update(ids)
                except ClientError as error:
                    errors.append(error)

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for shard in (1, 2):
            eventually(partial(has_grown, accepted, len(accepted) + 40), 120)
            lead = pair.view.shards[shard].lead
            assert lead is not None
            pair.kill_process(lead.node, shard)
            pair.until_whole("a", "b", seconds=240)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert errors == []
    seen: set[str] = set()
    with Client(pair.homes["b"].url, timeout=60) as client:
        while seen < accepted and (got := client.fetch(topic, max=1_000, wait=5)):
            seen.update(message.id for message in got)
            client.ack(topic, [message.id for message in got], lease=[message.lease for message in got])
        assert accepted <= seen
        assert (client.stats(topic).ready, client.stats(topic).dead) == (0, 0)
