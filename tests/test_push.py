"""Callbacks of a real server to real receivers on loopback: signed, retried, settled; nothing is lost when receivers die."""

from __future__ import annotations

import json
import stat
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.command_line import Line
from tests.harness.receiver import Receiver, Reply, Request, receiving
from tests.harness.server_process import Server, running
from turtlemq import __version__
from turtlemq.server.auth import hash_of, new_token

LOOPBACK: dict[str, Any] = {"TURTLEMQ_PUSH_HOSTS": "127.0.0.0/8:*"}
CLIENTS = "/v1/topics/t/groups/default/clients"


def register(server: Server, receiver: Receiver, **asked: Any) -> dict[str, Any]:
    """Register a receiver, and wait until it is verified."""
    made: dict[str, Any] = server.ok("POST", CLIENTS, {"url": receiver.url, "ttl": 3_600, **asked})
    eventually(lambda: client(server, made["client"])["state"] == "active")
    return made


def client(server: Server, name: str) -> dict[str, Any]:
    out: dict[str, Any] = server.ok("GET", f"{CLIENTS}/{name}")
    return out


def stats(server: Server, state: str) -> int:
    return int(server.ok("GET", "/v1/topics/t/groups/default")["stats"][state])


def settled(server: Server, count: int) -> bool:
    return stats(server, "history") == count and stats(server, "reserve") == 0


def metric(server: Server, sample: str) -> float:
    lines = server.call("GET", "/metrics").data.decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")]
    return float(value)


def test_messages_are_sent_signed_and_acknowledged(tmp_path: Path) -> None:
    with running(tmp_path / "data", **LOOPBACK) as server, receiving() as receiver:
        made = register(server, receiver, name="one")
        receiver.secrets.append(made["secret"])
        assert made["beat_s"] == 1_200
        headers = {"trace": "7", "compression": "lz4"}
        server.put("t", {"id": "a.1", "body": {"x": 1}, "headers": headers}, {"id": "b", "body_base64": "/w=="})
        eventually(lambda: settled(server, 2))
        one, two = sorted(receiver.requests, key=lambda request: request.id)
        assert (one.id, one.body, two.body) == ("a%2E1", b'{"x": 1}', b"\xff")
        assert one.headers["content-type"] == "application/json"
        assert two.headers["content-type"] == "application/octet-stream"
        fields = {name: one.headers[f"turtlemq-{name}"] for name in ("topic", "group", "attempt", "header-trace", "compression")}
        assert fields == {"topic": "t", "group": "default", "attempt": "1", "header-trace": "7", "compression": "lz4"}
        assert one.headers["turtlemq-budget-ms"] == "30000"
        assert (one.headers["user-agent"], one.headers["accept-encoding"]) == (f"TurtleMQ/{__version__}", "identity")
        assert len(receiver.challenges) == 1
        assert [error[:18] for error in receiver.broken] == ["UnicodeDecodeError"], "this verifier takes text alone"
        # a secret is changed: both signatures are there
        new = server.ok("PUT", f"{CLIENTS}/one/secret", {"overlap": 600})["secret"]
        receiver.secrets, receiver.broken = [made["secret"], new], []
        server.put("t", {"id": "c", "body": 3})
        eventually(lambda: settled(server, 3))
        server.ok("PUT", f"{CLIENTS}/one/secret", {"overlap": 0, "secret": made["secret"]})
        receiver.secrets = [made["secret"]]
        server.put("t", {"id": "d", "body": 4})
        eventually(lambda: settled(server, 4))
        assert receiver.broken == []
        assert metric(server, 'turtlemq_push_total{outcome="acked"}') == 4
        assert metric(server, 'turtlemq_clients{transport="http"}') == 1
        assert metric(server, "turtlemq_push_breaker_open") == 0
        listed = server.ok("GET", "/v1/topics/t/clients")["clients"]
        assert listed == server.ok("GET", CLIENTS)["clients"] == [client(server, "one")]
        assert "secret" not in json.dumps(listed)
        server.ok("DELETE", f"{CLIENTS}/one")
        assert server.call("PUT", f"{CLIENTS}/one", {}).code == "UNKNOWN_CLIENT"


def test_answers_decide_what_becomes_of_a_message(tmp_path: Path) -> None:
    def respond(request: Request) -> Reply:
        first = request.headers["turtlemq-attempt"] == "1"
        match request.id:
            case "again" if first:
                return Reply(500, b"no database\n" + b"x" * 5_000)
            case "later":
                return Reply(503, b"", {"Retry-After": "7200"})
            case "never":
                return Reply(422, b"no such order", {"turtlemq-retry": "no"})
            case "moved" if first:
                return Reply(302, b"", {"Location": f"http://127.0.0.1:{other.port}/"})
        return Reply(204)

    with running(tmp_path / "data", **LOOPBACK) as server, receiving(respond) as receiver, receiving() as other:
        server.ok("PUT", "/v1/topics/t", {"backoff": {"base": 0.01, "jitter": "none"}})
        register(server, receiver)
        server.put("t", *({"id": id_, "body": 0} for id_ in ("again", "later", "never", "moved", "plain")))
        eventually(lambda: stats(server, "history") == 3)
        eventually(lambda: stats(server, "dead") == 1)
        (letter,) = server.ok("GET", "/v1/topics/t/dead")["messages"]
        assert (letter["id"], letter["error"]) == ("never", "REFUSED_BY_CLIENT: HTTP 422: no such order")
        assert sorted(receiver.ids) == ["again", "again", "later", "moved", "moved", "never", "plain"]
        assert other.requests == [], "a redirect is not followed"
        later = server.ok("GET", "/v1/topics/t/messages/later")
        assert 3_500_000 < later["groups"]["default"]["due_ms"] - later["due_ms"] <= 3_700_000, "an hour at most"


def test_a_pause_of_the_group_holds_callbacks_back(tmp_path: Path) -> None:
    with running(tmp_path / "data", **LOOPBACK) as server, receiving() as receiver:
        register(server, receiver)
        server.ok("POST", "/v1/topics/t/groups/default/pause")
        server.put("t", {"id": "a", "body": 0})
        eventually(lambda: stats(server, "ready") == 1)
        assert receiver.requests == []
        server.ok("POST", "/v1/topics/t/groups/default/resume")
        eventually(lambda: settled(server, 1))


def test_an_endpoint_that_is_gone_is_paused(tmp_path: Path) -> None:
    with running(tmp_path / "data", **LOOPBACK) as server, receiving(lambda _: Reply(410)) as receiver:
        server.ok("PUT", "/v1/topics/t", {"backoff": {"base": 0.01, "jitter": "none"}})
        name = register(server, receiver)["client"]
        server.put("t", {"id": "a", "body": 0})
        eventually(lambda: client(server, name)["state"] == "paused")
        assert len(receiver.requests) == 1
        receiver.respond = lambda _: Reply()
        server.ok("PUT", f"{CLIENTS}/{name}", {"paused": False})
        eventually(lambda: settled(server, 1))
        assert receiver.ids == ["a", "a"]


def test_slow_and_endless_answers_hold_nothing_up(tmp_path: Path) -> None:
    ended = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        while not ended.is_set():
            handler.wfile.write(b"x" * 65_536)

    def slow(handler: BaseHTTPRequestHandler) -> None:
        while not ended.wait(0.05):
            handler.wfile.write(b"y")

    def respond(request: Request) -> Reply:
        if request.id == "silent" and request.headers["turtlemq-attempt"] == "1":
            ended.wait(60)
        write = {"endless": endless, "slow": slow, "failed": slow}.get(request.id)
        status = 500 if request.id == "failed" else 200
        return Reply(status, write=write) if request.headers["turtlemq-attempt"] == "1" else Reply()

    with running(tmp_path / "data", **LOOPBACK) as server, receiving(respond) as receiver:
        try:
            server.ok("PUT", "/v1/topics/t", {"backoff": {"base": 0.01, "jitter": "none"}})
            register(server, receiver, timeout=3)
            server.put("t", *({"id": id_, "body": 0} for id_ in ("endless", "slow", "failed", "silent")))
            eventually(lambda: settled(server, 4))
            assert sorted(receiver.ids) == ["endless", "failed", "failed", "silent", "silent", "slow"]
            assert metric(server, 'turtlemq_push_total{outcome="timeout"}') == 1
        finally:
            ended.set()


def test_one_of_three_receivers_dies_under_load(tmp_path: Path) -> None:
    count = 1_500
    with running(tmp_path / "data", **LOOPBACK) as server, receiving() as one, receiving() as two:
        three = Receiver()
        names = [register(server, receiver)["client"] for receiver in (one, two, three)]
        server.put("t", *({"id": f"m{i}", "body": i} for i in range(count)))
        eventually(lambda: len(three.requests) > 50)
        three.stop()
        eventually(lambda: settled(server, count))
        got = one.ids + two.ids + three.ids
        assert set(got) == {f"m{i}" for i in range(count)}, "nothing is lost"
        assert stats(server, "dead") == 0
        assert min(len(one.ids), len(two.ids)) > count / 10, "the work is shared"
        assert client(server, names[2])["failures"] > 0


def test_an_outage_burns_hardly_any_attempts(tmp_path: Path) -> None:
    down = threading.Event()
    down.set()
    with running(tmp_path / "data", **LOOPBACK) as server, receiving(lambda _: Reply(500 if down.is_set() else 200)) as receiver:
        server.ok("PUT", "/v1/topics/t", {"backoff": {"base": 0.01, "jitter": "none", "max": 0.01}, "max_attempts": 1000})
        name = register(server, receiver)["client"]
        server.put("t", *({"id": f"m{i}", "body": i} for i in range(3)))
        eventually(lambda: client(server, name)["state"] == "failing")
        eventually(lambda: stats(server, "reserve") == 0)
        sent = len(receiver.requests)
        assert 10 <= sent <= 13
        server.put("t", *({"id": f"n{i}", "body": i} for i in range(50)))
        eventually(lambda: stats(server, "ready") == 53)
        assert len(receiver.requests) == sent, "nothing is reserved while the breaker is open"
        assert metric(server, "turtlemq_push_breaker_open") == 1


def test_a_client_without_heartbeats_is_replaced(tmp_path: Path) -> None:
    release = threading.Event()

    def hold(_: Request) -> Reply:
        release.wait(60)
        return Reply()

    with running(tmp_path / "data", **LOOPBACK) as server, receiving(hold) as silent, receiving() as other:
        try:
            server.ok("PUT", "/v1/topics/t", {"backoff": {"base": 600}})
            name = server.ok("POST", CLIENTS, {"url": silent.url, "ttl": 5, "name": "silent"})["client"]
            eventually(lambda: client(server, name)["state"] == "active")
            server.put("t", {"id": "a", "body": 0})
            eventually(lambda: silent.ids == ["a"])
            register(server, other)
            eventually(lambda: server.call("GET", f"{CLIENTS}/{name}").status == 404)
            eventually(lambda: settled(server, 1))
            assert other.requests[0].headers["turtlemq-attempt"] == "2"
            assert metric(server, "turtlemq_beats_missed_total") == 1
            assert server.call("PUT", f"{CLIENTS}/{name}", {"free": 3}).code == "UNKNOWN_CLIENT"
        finally:
            release.set()


def test_endpoints_stay_over_a_restart_and_clients_do_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with receiving() as receiver:
        with running(data, **LOOPBACK) as server:
            made = register(server, receiver, name="kept", ttl=0)
            assert made["beat_s"] is None
            register(server, receiver, name="passing")
            assert server.call("POST", CLIENTS, {"url": receiver.url, "ttl": 0, "name": "kept"}).code == "CONFLICT"
            file = data / "topic" / "t" / "endpoints.json"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            server.stop()
        challenges = len(receiver.challenges)
        receiver.secrets.append(made["secret"])
        with running(data, **LOOPBACK) as server:
            assert [one["client"] for one in server.ok("GET", CLIENTS)["clients"]] == ["kept"]
            server.put("t", {"id": "a", "body": 0})
            eventually(lambda: settled(server, 1))
            assert receiver.broken == []
            assert len(receiver.challenges) == challenges, "it was verified before"
            server.ok("DELETE", "/v1/topics/t")
            server.put("t", {"id": "a", "body": 0})
            assert server.ok("GET", CLIENTS)["clients"] == [], "endpoints end with their topic"


def test_a_stop_waits_for_answers_and_gives_the_rest_back(tmp_path: Path) -> None:
    data, release = tmp_path / "data", threading.Event()

    def hold(request: Request) -> Reply:
        if request.id == "long":
            release.wait(60)
        return Reply()

    with receiving(hold) as receiver:
        try:
            with running(data, **LOOPBACK) as server:
                register(server, receiver, ttl=0, name="kept")
                server.put("t", {"id": "long", "body": 0})
                eventually(lambda: receiver.ids == ["long"])
                server.stop()
            release.set()
            with running(data, **LOOPBACK) as server:
                eventually(lambda: settled(server, 1))
            assert [request.headers["turtlemq-attempt"] for request in receiver.requests] == ["1", "1"]
        finally:
            release.set()


def test_at_most_once_is_settled_before_it_is_sent(tmp_path: Path) -> None:
    with running(tmp_path / "data", **LOOPBACK) as server, receiving(lambda _: Reply(500)) as receiver:
        name = register(server, receiver, at_most_once=True)["client"]
        server.put("t", *({"id": f"m{i}", "body": i} for i in range(5)))
        eventually(lambda: settled(server, 5))
        eventually(lambda: client(server, name)["unacked"] == 0 and len(receiver.ids) == 5)
        assert sorted(receiver.ids) == [f"m{i}" for i in range(5)]


def test_nothing_is_sent_before_the_challenge_is_answered(tmp_path: Path) -> None:
    with running(tmp_path / "data", **LOOPBACK) as server, receiving() as receiver:
        receiver.is_willing = False
        server.put("t", {"id": "a", "body": 0})
        made = server.ok("POST", CLIENTS, {"url": receiver.url})
        eventually(lambda: len(receiver.challenges) >= 2)
        assert receiver.requests == []
        shown = client(server, made["client"])
        assert (shown["state"], shown["last_error"][:8]) == ("pending", "HTTP 404")
        receiver.is_willing = True
        eventually(lambda: settled(server, 1))


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://user:secret@127.0.0.1/",
        "http://2130706433/",
        "http://[::ffff:169.254.169.254]/",
        "ftp://127.0.0.1/",
        "http://localhost:1/@127.0.0.1\\",
    ],
)
def test_urls_that_are_refused(shared_server: Server, url: str) -> None:
    assert shared_server.call("POST", CLIENTS, {"url": url}).code == "INVALID_ARGUMENT"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(tmp_path_factory.mktemp("push") / "data", **LOOPBACK) as server:
        yield server


def test_the_server_never_calls_itself(shared_server: Server) -> None:
    refused = shared_server.call("POST", CLIENTS, {"url": f"http://127.0.0.1:{shared_server.port}/v1/topics/t/messages"})
    assert (refused.code, "this server itself" in refused.json["error"]["message"]) == ("INVALID_ARGUMENT", True)


def test_rights_on_clients_and_on_what_they_answered(tmp_path: Path) -> None:
    tokens = {right: new_token() for right in ("produce", "consume", "admin")}
    given = [{"name": right, "hash": hash_of(token), "rights": [right], "topics": ["*"]} for right, token in tokens.items()]
    heads: dict[str, dict[str, Any]] = {
        right: {"headers": {"Authorization": f"Bearer {token}"}} for right, token in tokens.items()
    }
    with (
        running(tmp_path / "data", TURTLEMQ_TOKENS=json.dumps(given), **LOOPBACK) as server,
        receiving(lambda _: Reply(418, b"secret of a host")) as receiver,
    ):
        asked = {"url": receiver.url, "ttl": 0, "name": "kept"}
        assert server.call("POST", CLIENTS, asked, **heads["produce"]).code == "FORBIDDEN"
        assert server.call("POST", CLIENTS, asked, **heads["consume"]).code == "FORBIDDEN"
        server.ok("POST", CLIENTS, asked, **heads["admin"])
        server.ok("POST", CLIENTS, {**asked, "name": "passing", "ttl": 60}, **heads["consume"])
        for name, status in (("kept", 403), ("passing", 200)):
            client = f"{CLIENTS}/{name}"
            assert server.call("PUT", client, {"paused": name == "passing"}, **heads["consume"]).status == status
            assert server.call("PUT", f"{client}/secret", {}, **heads["consume"]).status == status
        assert server.call("DELETE", f"{CLIENTS}/kept", **heads["consume"]).code == "FORBIDDEN"
        assert server.call("PUT", f"{CLIENTS}/kept", {"free": 3}, **heads["consume"]).status == 200
        server.ok("POST", "/v1/topics/t/messages", {"id": "a", "body": 0}, **heads["produce"])

        def view(right: str) -> str:
            return json.dumps(server.ok("GET", "/v1/topics/t/messages/a", **heads[right]))

        eventually(lambda: "secret of a host" in view("consume"))
        assert "secret of a host" not in view("produce")


def test_clients_on_the_command_line(shared_server: Server) -> None:
    line = Line(shared_server.url)
    with receiving() as receiver:
        name, secret = line("clients", "register", "cli", receiver.url, "--name", "shop").split()
        assert (name, secret[:6]) == ("shop", "whsec_")
        eventually(lambda: "active" in line("clients", "list", "cli"))
        receiver.respond = lambda _: Reply(418, b"no coffee")
        line("put", "cli", "{}")
        eventually(lambda: "HTTP 418: no coffee" in line("clients", "list", "cli"))
        assert line("clients", "pause", "cli", "shop").split() == ["shop", "paused"]
        assert line("clients", "resume", "cli", "shop").split() == ["shop", "active"]
        ((found,),) = line.json("clients", "list", "cli")
        assert (found["client"], found["url"], found["ttl"]) == ("shop", receiver.url, 0)
        assert line("clients", "delete", "cli", "shop").split() == ["shop", "deleted"]
        assert "UNKNOWN_CLIENT" in line("clients", "pause", "cli", "shop", code=1)


def test_without_push_hosts_nothing_is_registered(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        refused = server.call("POST", CLIENTS, {"url": "https://hooks.shop.example/"})
        assert (refused.code, "push_hosts" in refused.json["error"]["message"]) == ("INVALID_ARGUMENT", True)
        server.put("t", {"id": "a", "body": 0})
        assert server.ok("GET", CLIENTS)["clients"] == []
