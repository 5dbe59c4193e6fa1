"""A server with several shards: any process answers any request, and none is lost when a process is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.certificates import certificate
from tests.harness.server_process import Server, run, running
from tests.harness.shard_process import children, header_names, kill, own_processes, topic_in, until_gone, until_replaced
from turtlemq.client import AsyncClient, Client
from turtlemq.server.auth import hash_of, new_token
from turtlemq.server.operations import OPERATIONS
from turtlemq.server.shards.gather import GATHERED, OWN
from turtlemq.server.shards.router import COMMAND
from turtlemq.shards import shard_of

SHARDS = 3
SPARE = topic_in(0, SHARDS, "spare")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("shards") / "data", "--shards", str(SHARDS)) as found:
        yield found


@pytest.fixture(scope="module")
def topics(server: Server) -> list[str]:
    """A topic in each shard, with one sleeper and one ready message."""
    names = [topic_in(shard, SHARDS, "filled") for shard in range(SHARDS)]
    for name in names:
        server.put(name, {"id": "late", "body": 1, "delay": 3600}, {"id": "now", "body": 2})
    return names


# Any process answers any request


def test_every_operation_has_a_way_to_its_shards() -> None:
    routes = {operation.route for operation in OPERATIONS if "{topic}" not in operation.path}
    of_clusters = {route for route in routes if "/v1/cluster/" in route and "replica" not in route}  # refused without a cluster
    assert routes - of_clusters == OWN | GATHERED.keys() | {f"POST {COMMAND}"}


def test_every_process_serves_topics_of_every_shard(server: Server) -> None:
    processes = own_processes(server)
    assert len(processes) == SHARDS
    for shard in range(SHARDS):
        topic = topic_in(shard, SHARDS, "served")
        for number, process in enumerate(processes):
            process.put(topic, {"id": f"m{number}", "body": number})
        found = [process.fetch(topic, max=1)[0] for process in processes]
        assert sorted(message["body"] for message in found) == list(range(SHARDS))
        assert processes[0].ack(topic, *(message["id"] for message in found))["acked"] == SHARDS
        folders = [path.parent.parent.name for path in server.data.glob(f"shard/*/topic/{topic}")]
        assert folders == [f"{shard:02}"]


def test_a_direct_request_to_the_wrong_process_names_the_right_one(server: Server) -> None:
    processes, topic = own_processes(server), topic_in(1, SHARDS, "direct")
    sent: dict[str, Any] = {"value": {"body": 1}, "headers": {"X-Turtlemq-Direct": "1"}}
    refused = processes[0].call("POST", f"/v1/topics/{topic}/messages", **sent)
    assert (refused.status, refused.code) == (421, "NOT_LEADER")
    assert refused.json["error"]["leader_url"] == processes[1].url
    assert processes[1].call("POST", f"/v1/topics/{topic}/messages", **sent).status == 201


def test_a_large_body_reaches_another_process_whole(server: Server) -> None:
    topic, body = topic_in(2, SHARDS, "large"), "x" * 3_000_000
    for process in own_processes(server):
        process.put(topic, {"body": body})
    assert [len(message["body"]) for message in server.fetch(topic)] == [len(body)] * SHARDS


@pytest.mark.parametrize("path", ["messages", "fetch", "ack"])
def test_an_answer_that_was_passed_on_has_each_header_once(server: Server, path: str) -> None:
    topic, body = topic_in(1, SHARDS, "headers"), {"messages": '{"body": 1}', "fetch": "{}", "ack": '{"acks": ["m"]}'}[path]
    for process in own_processes(server):
        process.put(topic, {"body": 1})
        names = header_names(process, f"/v1/topics/{topic}/{path}", body)
        assert sorted(set(names)) == names
        assert {"content-type", "date", "x-request-id"} <= set(names)


def test_a_long_poll_is_answered_by_the_process_of_its_topic(server: Server) -> None:
    topic, processes = topic_in(1, SHARDS, "polled"), own_processes(server)
    found: list[Any] = []
    polling = threading.Thread(target=lambda: found.extend(processes[0].fetch(topic, wait=30)))
    polling.start()
    processes[2].put(topic, {"id": "a", "body": 1})
    polling.join()
    assert [message["id"] for message in found] == ["a"]


def test_a_spent_budget_is_refused_before_it_is_passed_on(server: Server) -> None:
    for process in own_processes(server):
        refused = process.call("POST", f"/v1/topics/{SPARE}/fetch", {}, headers={"X-Turtlemq-Budget-Ms": "0"})
        assert (refused.status, refused.code) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("path", ["no topic!", "a%2Fb", ".hidden"])
def test_a_bad_topic_is_refused_by_any_process(server: Server, path: str) -> None:
    for process in own_processes(server):
        refused = process.call("POST", f"/v1/topics/{path.replace(' ', '%20')}/messages", {"body": 1})
        assert (refused.status, refused.code) == (400, "INVALID_TOPIC")


def passed_on(server: Server) -> int:
    """Requests that any process has passed on so far."""
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("turtlemq_proxied_total") and '"answered"' in line)


def test_the_client_goes_to_the_process_of_a_topic(server: Server) -> None:
    topics = [topic_in(shard, SHARDS, "direct-client") for shard in range(SHARDS)]
    with Client(server.url) as client:
        for topic in topics:
            client.put(topic, 1)
        before = passed_on(server)
        for topic in topics:
            for number in range(5):
                client.put(topic, number)
            assert len(client.fetch(topic)) == 6
        # A topic whose process was met by chance is known when another process has passed on a request about it.
        assert passed_on(server) - before <= SHARDS


def test_the_async_client_goes_to_the_process_of_a_topic(server: Server) -> None:
    topic = topic_in(2, SHARDS, "direct-async")

    async def put(count: int) -> None:
        async with AsyncClient(own_processes(server)[0].url) as client:
            for number in range(count):
                await client.put(topic, number)

    before = passed_on(server)
    asyncio.run(put(6))
    assert passed_on(server) - before <= 1


# Answers about all topics


def test_listings_hold_the_topics_of_all_shards(server: Server, topics: list[str]) -> None:
    for process in own_processes(server):
        names = [row["topic"] for row in process.ok("GET", "/v1/topics")["topics"]]
        assert names == sorted(names)
        assert set(topics) <= set(names)
        found = process.ok("GET", "/v1/find?id=late")["found"]
        assert [row["topic"] for row in found] == sorted(topics)


def test_status_is_the_sum_of_all_shards(server: Server, topics: list[str]) -> None:
    status = server.ok("GET", "/v1/status?q=filled&limit=2")
    assert status["topics_total"] == SHARDS
    assert (status["states"]["sleep"], status["totals"]["produced"]) == (SHARDS, 2 * SHARDS)
    assert len(status["topics"]) == 2
    assert status["shards"] == [{"shard": shard, "state": "serving"} for shard in range(SHARDS)]
    assert server.ok("GET", "/readyz")["shards"] == SHARDS
    history = server.ok("GET", "/v1/status/history")
    assert history["sleep"][-1] >= SHARDS
    assert {len(column) for column in history.values()} == {len(history["at_ms"])}


def test_metrics_name_the_shard_of_every_sample(server: Server, topics: list[str]) -> None:
    text = server.call("GET", "/metrics").data.decode()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('shard="' in line for line in samples)
    for shard, topic in enumerate(topics):
        assert f'turtlemq_produced_total{{shard="{shard}",topic="{topic}"}} 2' in samples
        assert f'turtlemq_up{{shard="{shard}"}} 1' in samples
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    opened = server.call("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert opened.data.decode().splitlines().count("# EOF") == 1
    assert opened.data.endswith(b"# EOF\n")


def test_bad_queries_of_gathered_answers_are_refused_once(server: Server) -> None:
    refused = server.call("GET", "/v1/status?limit=many")
    assert (refused.status, refused.code) == (400, "INVALID_ARGUMENT")


def test_the_audit_log_has_the_client_of_a_passed_on_request(server: Server) -> None:
    for shard, process in enumerate(own_processes(server)):
        process.ok("PUT", f"/v1/topics/{topic_in(1, SHARDS, 'audited')}-{shard}", {}, source="127.0.0.9")
    spoofed = {"X-Turtlemq-Client": "10.1.1.1", "X-Turtlemq-Hop": "1"}
    own = topic_in(0, SHARDS, "spoofed")
    own_processes(server)[0].ok("PUT", f"/v1/topics/{own}", {}, headers=spoofed)
    events = server.ok("GET", "/v1/audit?limit=1000")["events"]
    assert [event["at_ms"] for event in events] == sorted(event["at_ms"] for event in events)
    clients = {event["topic"]: event["client"] for event in events}
    assert [clients[topic] for topic in clients if topic.startswith("audited")] == ["127.0.0.9"] * SHARDS
    assert clients[own] == "127.0.0.1"
    assert len(server.ok("GET", "/v1/audit?limit=2")["events"]) == 2


def test_commands_find_a_message_in_any_shard(server: Server) -> None:
    def command(**asked: Any) -> Any:
        return server.ok("POST", "/v1/command", asked)

    for shard in range(SHARDS):
        topic = topic_in(shard, SHARDS, "commanded")
        assert command(command="add", topic=topic, id=f"c{shard}", delay=0, TTR=30, body=shard)["success"]
        assert command(command="pop", topic=topic)["value"] == shard
        assert command(command="finish", id=f"c{shard}")["success"]
        again = command(command="finish", id=f"c{shard}")
        assert not again["success"]
        assert again["error"].startswith("UNKNOWN_MESSAGE")
    assert "needs a topic" in command(command="pop")["error"]
    assert not server.call("POST", "/v1/command", data=b"{broken").json["success"]


# Tokens


def test_tokens_are_checked_before_and_behind_the_way(tmp_path: Path) -> None:
    token = new_token()
    mine, others = topic_in(1, 2, "mine"), topic_in(1, 2, "others")
    entry = {"name": "some", "hash": hash_of(token), "rights": ["produce", "read"], "topics": ["mine*"]}
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key)}
    with running(tmp_path / "data", "--shards", "2", tls=trust, TURTLEMQ_TOKENS=json.dumps([entry]), **files) as server:
        held = {"Authorization": f"Bearer {token}"}
        ports = json.loads(server.call("GET", "/v1/cluster", headers=held).data)["leaders"]
        assert all(place["url"].startswith("https://") for place in ports)
        for place in ports:
            process = Server(server.process, int(place["url"].rpartition(":")[2]), server.data, trust)
            assert process.call("POST", f"/v1/topics/{mine}/messages", {"body": 1}).status == 401
            assert process.call("POST", f"/v1/topics/{mine}/messages", {"body": 1}, headers=held).status == 201
            assert process.call("POST", f"/v1/topics/{others}/messages", {"body": 1}, headers=held).status == 403
            listed = process.call("GET", "/v1/topics", headers=held).json["topics"]
            assert [row["topic"] for row in listed] == [mine]
            assert process.call("GET", "/metrics", headers=held).status == 403


# Processes


def test_nothing_is_lost_when_processes_are_killed_under_load(tmp_path: Path) -> None:
    answered: dict[str, list[str]] = {}
    with running(tmp_path / "data", "--shards", "2") as server:
        names, stop = [topic_in(shard, 2, "load") for shard in range(2)], threading.Event()

        def load(topic: str) -> None:
            stored = answered[topic] = []
            number = 0
            while not stop.is_set():
                ids = [f"{topic}-{number + n}" for n in range(20)]
                try:
                    sent = [{"id": id_, "body": id_} for id_ in ids]
                    done = server.call("POST", f"/v1/topics/{topic}/messages", {"messages": sent}).status == 201
                except OSError:  # the process was killed that had accepted the connection
                    done = False
                if done:  # else the same ids are sent again
                    stored += ids
                    number += 20

        loads = [threading.Thread(target=load, args=(name,)) for name in names]
        for one in loads:
            one.start()
        for shard in (0, 1, 0):
            before = children(server.process.pid)[shard]
            kill(before, signal.SIGKILL)
            until_replaced(server, shard, before)
            count = len(answered[names[shard]])
            while len(answered[names[shard]]) < count + 40:
                assert one.is_alive()
        stop.set()
        for one in loads:
            one.join()
        for name in names:
            found = {message["id"] for _ in range(1_000) for message in server.fetch(name, max=10_000)}
            assert set(answered[name]) <= found
    assert "child_ended" in server.log


def test_a_client_does_not_notice_that_a_process_is_killed(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--shards", "2") as server, Client(server.url) as client:
        topics = [topic_in(shard, 2, "unnoticed") for shard in range(2)]
        for number in range(3):
            for topic in topics:
                client.put(topic, number, id=f"m{number}")
            kill(children(server.process.pid)[1], signal.SIGKILL)
        for topic in topics:
            assert {message.id for _ in range(3) for message in client.fetch(topic, max=10)} == {"m0", "m1", "m2"}


def test_sigterm_ends_all_processes_properly(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--shards", "2") as server:
        server.put("t", {"body": 1})
        pids = list(children(server.process.pid).values())
        assert len(pids) == 2
        assert server.stop() == 0
        until_gone(pids)
    assert sorted(path.parent.name for path in server.data.glob("shard/*/CLEAN")) == ["00", "01"]
    assert not list(server.data.glob("shard/socket.*"))


def test_no_process_outlives_its_supervisor(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--shards", "2") as server:
        ids = server.put("t", {"body": 1})
        pids = list(children(server.process.pid).values())
        server.process.kill()
        until_gone(pids)
        server.process.wait()
    with running(tmp_path / "data", "--shards", "2") as again:
        assert [message["id"] for message in again.fetch("t")] == ids


# Folders and configuration


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, "--shards", "2"):
        taken = run("serve", "--data", str(data), "--shards", "2", "--port", "0")
        assert (taken.returncode, "in use by process" in taken.stderr) == (1, True)
    for asked in (["--shards", "3"], []):
        refused = run("serve", "--data", str(data), "--port", "0", *asked)
        assert (refused.returncode, "--shards 2" in refused.stderr) == (2, True), refused.stderr


def test_a_folder_without_shards_is_not_taken_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        server.put("t", {"body": 1})
    refused = run("serve", "--data", str(data), "--port", "0", "--shards", "2")
    assert (refused.returncode, "turtlemq shards split" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"TURTLEMQ_SHARDS": "0"}, "shards"),
        ({"TURTLEMQ_SHARDS": "65"}, "shards"),
        ({"TURTLEMQ_SHARDS": "2", "TURTLEMQ_GRPC_PORT": "0"}, "grpc_port works with shards = 1 only"),
        ({"TURTLEMQ_SHARDS": "4", "TURTLEMQ_PORT": "65533"}, "a port of its own"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    refused = run("serve", "--data", str(tmp_path / "data"), **settings)
    assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "data").exists()


def test_a_taken_port_is_never_shared_with_another_server(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        refused = run("serve", "--data", str(tmp_path / "data"), "--shards", "2", "--port", str(other.getsockname()[1]))
    assert (refused.returncode, "annot listen on" in refused.stderr) == (1, True), refused.stderr


def test_topics_are_spread_over_shards_by_their_names() -> None:
    assert {shard_of(f"t{n}", 4) for n in range(50)} == {0, 1, 2, 3}
