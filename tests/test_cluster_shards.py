"""A cluster of several shards, as real processes: nodes join, drain, leave and die under load; no message is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.server_process import run
from tests.harness.shard_nodes import ShardNodes, call, shard_nodes
from tests.harness.shard_process import topic_in
from turtlemq.cli.cluster_names import signed
from turtlemq.client import AsyncClient, Client, NewMessage
from turtlemq.client.errors import ClientError
from turtlemq.replica.interventions import plan_drain, plan_leave, plan_undrain

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]
SHARDS = 4
TOPICS = [topic_in(shard, SHARDS) for shard in range(SHARDS)]
FAR = 4 * 10**12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardNodes]:
    """Two nodes with all copies in sync. Tests leave them so."""
    with shard_nodes(tmp_path_factory.mktemp("pair"), "ab") as nodes:
        nodes.start()
        nodes.until_whole("a", "b")
        yield nodes


class Load:
    """Programs that put messages into all shards, fetch and acknowledge them. They note each id that was promised something."""

    def __init__(self, urls: list[str]) -> None:
        self.client = Client(urls, timeout=60)
        self.accepted: set[str] = set()
        self.acked: set[str] = set()
        self.again: set[str] = set()  # delivered after their ack was answered
        self.seen: Counter[str] = Counter()
        self.errors: list[ClientError] = []
        self.stop, self.is_over = threading.Event(), False
        self._threads = [threading.Thread(target=self._produce, args=(topic,)) for topic in TOPICS]
        self._threads += [threading.Thread(target=self._consume, args=(topic,)) for topic in TOPICS]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def _produce(self, topic: str) -> None:
        n = 0
        while not self.stop.is_set():
            n += 1
            ids = [f"{topic}-{n}-{m}" for m in range(5)]
            try:
                self.client.put_many(topic, [NewMessage(body=id_, id=id_) for id_ in ids])
                self.accepted.update(ids)
            except ClientError as error:
                self.errors.append(error)
            time.sleep(0.02)

    def _consume(self, topic: str) -> None:
        while not self.is_over:
            try:
                got = self.client.fetch(topic, max=20, wait=0.5, ttr=5)
                self.seen.update(message.id for message in got)
                self.again.update(message.id for message in got if message.id in self.acked)
                if got:
                    told = self.client.ack(topic, [message.id for message in got], lease=[message.lease for message in got])
                    self.acked.update({message.id for message in got}.difference(told.unknown, told.late))
                elif self.stop.is_set() and not self._left(topic):
                    return
            except ClientError as error:
                self.errors.append(error)

    def _left(self, topic: str) -> int:
        stats = self.client.stats(topic)
        return stats.sleep + stats.ready + stats.reserve

    def more(self, count: int = 100) -> None:
        wanted = {topic: sum(id_.startswith(topic) for id_ in tuple(self.accepted)) + count for topic in TOPICS}
        eventually(
            lambda: all(sum(id_.startswith(topic) for id_ in tuple(self.accepted)) >= wanted[topic] for topic in TOPICS), 120
        )

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.is_over = failure is not None
        self.stop.set()
        for thread in self._threads:
            thread.join(120)
        self.client.close()

    def check(self, nodes: ShardNodes) -> None:
        assert self.errors == []
        assert self.accepted <= self.seen.keys()
        assert self.again == set()
        assert len(self.acked) > 0.9 * len(self.accepted)  # the answer to an ack may be lost: a second one knows nothing of it
        with Client(nodes.homes["a"].url) as client:
            for topic in TOPICS:
                stats, stored = client.stats(topic), [id_ for id_ in self.accepted if id_.startswith(topic)]
                assert (stats.ready, stats.sleep, stats.reserve, stats.dead) == (0, 0, 0, 0)
                assert {client.get(topic, id_).state for id_ in stored[::50]} == {"history"}


def test_any_node_answers_for_every_shard(pair: ShardNodes) -> None:
    for name, home in pair.homes.items():
        for topic in TOPICS:
            path = f"{home.url}/v1/topics/{topic}"
            assert call(f"{path}/messages", "POST", {"id": f"any-{name}", "body": 1, "due_ms": FAR})[1]["copies"] == 2
            assert call(f"{path}/messages/any-{name}")[1]["state"] == "sleep"
        status, listed = call(f"{home.url}/v1/topics")
        assert status == 200
        assert {row["topic"] for row in listed["topics"]} >= set(TOPICS)
        assert call(f"{home.url}/v1/find?id=any-{name}")[1]["found"][0]["topic"] in TOPICS
        told = call(f"{home.url}/v1/status")[1]
        assert [shard["state"] for shard in told["shards"]] == ["serving"] * SHARDS
        assert told["topics_total"] >= SHARDS
        assert call(f"{home.url}/v1/tenants") == (200, {"tenants": []})
        assert call(f"{home.url}/v1/status/history")[0] == 200
        for shard in range(SHARDS):
            assert call(f"{home.url}/v1/cluster/shards/{shard}")[1]["shard"] == shard
        assert call(f"{home.url}/v1/cluster/shards/{SHARDS}")[1]["error"]["code"] == "UNKNOWN_SHARD"


def test_commands_find_their_shard(pair: ShardNodes) -> None:
    for number, topic in enumerate(TOPICS):
        url = f"{pair.homes['ab'[number % 2]].url}/v1/command"
        assert call(url, "POST", {"command": "add", "topic": topic, "id": f"c{number}", "body": 1, "delay": 3600})[0] in (
            200,
            201,
        )
        assert call(url, "POST", {"command": "delete", "id": f"c{number}"})[0] == 200
        assert call(f"{pair.homes['a'].url}/v1/topics/{topic}/messages/c{number}")[1].get("state") in ("cancelled", None)


def test_a_replay_stays_in_its_shard(pair: ShardNodes) -> None:
    url = pair.homes["a"].url
    call(f"{url}/v1/topics/{TOPICS[0]}/messages", "POST", {"body": 1, "due_ms": FAR})
    status, told = call(f"{url}/v1/topics/{TOPICS[0]}/replay", "POST", {"from_ms": 0, "to_ms": 1, "into": TOPICS[1]})
    assert (status, told["error"]["code"]) == (400, "INVALID_ARGUMENT")
    assert "same shard" in told["error"]["message"]


def test_a_request_is_passed_on_once(pair: ShardNodes) -> None:
    lead = {number: shard.lead for number, shard in pair.view.shards.items()}
    assert lead[0] is not None
    assert lead[1] is not None
    path = f"/v1/topics/{TOPICS[1]}/messages"
    for header in ("X-Turtlemq-Direct", "X-Turtlemq-Hop"):
        status, told = call(lead[0].url + path, "POST", {"body": 1}, **{header: "1"})
        assert (status, told["error"]["code"], told["error"]["leader_url"]) == (421, "NOT_LEADER", lead[1].url)
    assert call(lead[1].url + path, "POST", {"id": "once", "body": 1, "due_ms": FAR}, **{"X-Turtlemq-Direct": "1"})[0] == 201


def test_metrics_and_the_audit_log_are_those_of_a_node(pair: ShardNodes) -> None:
    for home in pair.homes.values():
        text = call(f"{home.url}/metrics")[1]
        assert re.findall(r'^turtlemq_role{shard="(\d)",role="leader"} ', text, re.MULTILINE) == ["0", "1", "2", "3"]
        assert text.count("# TYPE turtlemq_up ") == 1
    for topic in TOPICS:
        assert call(f"{pair.homes['a'].url}/v1/topics/{topic}", "PUT", {"ttr": 7})[0] in (200, 201)
    noted = [event for home in pair.homes.values() for event in call(f"{home.url}/v1/audit")[1]["events"]]
    assert {event["topic"] for event in noted if event["action"] in ("settings", "topic_created")} >= set(TOPICS)


def test_readiness_is_that_of_the_node(pair: ShardNodes) -> None:
    for home in pair.homes.values():
        assert call(f"{home.url}/readyz")[0] == call(f"{home.url}/readyz?lead=1")[0] == 200


def test_the_client_goes_to_the_leader_of_each_shard(pair: ShardNodes) -> None:
    with Client(pair.homes["a"].url) as client:
        client.topics()
        before = proxied(pair)
        for topic in TOPICS * 3:
            client.put(topic, 1, delay=3600)
        assert proxied(pair) == before

    async def story() -> int:
        async with AsyncClient(pair.homes["b"].url) as client:
            await client.topics()
            before = proxied(pair)
            for topic in TOPICS:
                await client.put(topic, 1, delay=3600)
            return proxied(pair) - before

    assert asyncio.run(story()) == 0


def proxied(nodes: ShardNodes) -> int:
    """Requests about topics that were passed on to another process, so far."""
    texts = [call(f"{home.url}/metrics")[1] for home in nodes.homes.values()]
    pattern = r'^turtlemq_proxied_total{.*outcome="answered"} (\d+)'
    return sum(int(count) for text in texts for count in re.findall(pattern, text, re.MULTILINE))


def test_a_killed_process_is_replaced_and_leaves_the_others(pair: ShardNodes) -> None:
    lead = pair.view.shards[2].lead
    assert lead is not None
    os.kill(pair.pid_of(lead.node, 2), signal.SIGKILL)
    with Client([home.url for home in pair.homes.values()]) as client:
        for topic in TOPICS:
            client.put(topic, 1, delay=3600)
    pair.until_whole("a", "b")


def test_copies_of_all_shards_are_equal(pair: ShardNodes) -> None:
    for shard in range(SHARDS):
        compared = call(f"{pair.homes['b'].url}/v1/cluster/shards/{shard}/verify", "POST")[1]
        assert [copy["state"] for copy in compared["copies"]] == ["equal"]


def test_status_shows_all_shards(pair: ShardNodes) -> None:
    shown = run("cluster", "status", "--check", "--url", pair.homes["a"].url)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "4 shards, 2 replicas" in shown.stdout
    by_names = run("cluster", "status", "--json", "--etcd", pair.endpoint, "--name", "prod")
    assert by_names.returncode == 0
    assert by_names.stdout.count('"role": "leader"') == SHARDS


def test_another_node_leads_after_a_handover(pair: ShardNodes) -> None:
    """The controller evens leaders out again: here it wishes for the same ones as before."""
    before = pair.until_whole("a", "b").shards[3].lead
    assert before is not None
    to = "b" if before.node == "a" else "a"
    done = call(f"{pair.homes['a'].url}/v1/cluster/shards/3/handover", "POST", {"to": to})
    assert done == (200, {"outcome": "handed over", "shard": 3, "node": to})
    pair.until_whole("a", "b")


@pytest.mark.timeout(900)
def test_nodes_join_drain_die_and_leave_under_load(tmp_path: Path) -> None:
    with shard_nodes(tmp_path, "abc", "replace_after_s = 600") as nodes:
        nodes.start("a", "b")
        nodes.until_whole("a", "b")
        with Load([home.url for home in nodes.homes.values()]) as load:
            load.more()
            nodes.start("c")  # joins: it gets its part
            nodes.until_whole("a", "b", "c", seconds=240)
            assert {name for shard in nodes.view.shards.values() for name in shard.wanted} == {"a", "b", "c"}
            load.more()
            nodes.change(lambda view: plan_drain(view, "b", signed("drain", node="b")))
            eventually(lambda: "b" not in leading(nodes), 120)
            load.more()
            nodes.change(lambda view: plan_undrain(view, "b"))
            nodes.until_whole("a", "b", "c", seconds=240)
            nodes.kill("a")  # with everything
            eventually(lambda: len(leading(nodes)) == SHARDS and "a" not in leading(nodes), 120)
            load.more()
            nodes.start("a")
            nodes.until_whole("a", "b", "c", seconds=240)
            nodes.change(lambda view: plan_leave(view, "c", signed("remove", node="c")))  # leaves: others get its part
            nodes.until_whole("a", "b", seconds=240)
            load.more()
        load.check(nodes)
        folder = nodes.homes["c"].home / "data" / "shard"
        eventually(lambda: [name for name in os.listdir(folder) if not name.startswith(".")] == [])
        assert call(f"{nodes.homes['c'].url}/v1/topics")[0] == 200  # it answers all the same
        assert nodes.homes["c"].events("copy_removed")


def leading(nodes: ShardNodes) -> list[str]:
    view = nodes.view
    return [shard.lead.node for shard in view.shards.values() if shard.lead is not None]


@pytest.mark.timeout(600)
def test_a_lost_node_is_replaced_by_another(tmp_path: Path) -> None:
    with shard_nodes(tmp_path, "abc", "replace_after_s = 2") as nodes:
        nodes.start()
        nodes.until_whole("a", "b", "c")
        with Client([nodes.homes[name].url for name in "bc"]) as client:
            for topic in TOPICS:
                client.put_many(topic, [NewMessage(body=n, id=f"{n}", delay=3600) for n in range(50)])
            nodes.kill("a")
            nodes.until_whole("b", "c", seconds=240)
            assert [client.stats(topic).sleep for topic in TOPICS] == [50] * SHARDS


def test_a_wrong_configuration_is_refused(pair: ShardNodes, tmp_path: Path) -> None:
    home = pair.homes["a"].home
    text = (home / "turtle.toml").read_text().replace('node = "a"', 'node = "z"').replace(str(home / "data"), str(tmp_path / "d"))
    (tmp_path / "turtle.toml").write_text(f"grpc_port = 0\n{text}")
    with suppress(FileNotFoundError):
        refused = run("serve", "--config", str(tmp_path / "turtle.toml"), "--grpc-port", "9999")
        assert refused.returncode == 2
        assert "grpc_port works in a cluster of one shard only" in refused.stderr.replace("\n", " ")
