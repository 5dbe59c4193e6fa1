"""Rights over real connections: addresses, tokens, TLS, and clients that hold the door open."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.harness.certificates import certificate
from tests.harness.server_process import Answer, Server, run, running
from turtlemq.errors import InvalidArgument
from turtlemq.server import auth as guarding
from turtlemq.server import listen, passed
from turtlemq.server.auth import Auth, Token, client_network, hash_of, new_token, pattern_of
from turtlemq.server.config import Config, load
from turtlemq.server.errors import Unauthenticated
from turtlemq.server.listen import tls_of
from turtlemq.server.openapi import document
from turtlemq.server.request import SERVICE
from turtlemq.server.service import Service

PEOPLE: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "producer": (("produce",), ("orders*", "mail.*")),
    "consumer": (("consume",), ("orders",)),
    "owner": (("admin",), ("orders",)),
    "reader": (("read",), ("orders",)),
    "operator": (("operate",), ("orders",)),
    "support": (("read", "operate"), ("*",)),
    "watcher": ((), ("*",)),
    "root": (("admin",), ("*",)),
}
SECRETS = {name: new_token() for name in PEOPLE}
TOKENS = {name: Token(name, hash_of(SECRETS[name]), rights, topics) for name, (rights, topics) in PEOPLE.items()}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Server]:
    """A server that wants tokens, and serves only two addresses."""
    entries = [
        f"[[tokens]]\nname = {json.dumps(token.name)}\nhash = {json.dumps(token.hash)}\n"
        f"rights = {json.dumps(token.rights)}\ntopics = {json.dumps(token.topics)}\n"
        for token in TOKENS.values()
    ]
    (folder / "t.toml").write_text('allowed_hosts = ["127.0.0.1", "127.0.0.4/31"]\n' + "".join(entries))
    with running(folder / "data", "--config", str(folder / "t.toml")) as found:
        yield found
        for secret in SECRETS.values():
            assert secret not in found.log
            assert hash_of(secret).rpartition(":")[2] not in found.log


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with guarded(tmp_path_factory.mktemp("security")) as found:
        yield found


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One whose topics no other test needs."""
    with guarded(tmp_path) as found:
        yield found


def as_(server: Server, name: str, method: str, path: str, value: Any = None) -> Answer:
    return server.call(method, path, value, headers=bearer(name))


# Addresses


def test_only_allowed_hosts_are_served(server: Server) -> None:
    for source, status in (("127.0.0.1", 200), ("127.0.0.5", 200), ("127.0.0.2", 403)):
        assert server.call("GET", "/docs", source=source).status == status
        assert server.call("GET", "/v1/topics", headers=bearer("root"), source=source).status == status
    refused = server.call("POST", "/v1/topics/orders/messages", {"body": 1}, headers=bearer("root"), source="127.0.0.2")
    assert (refused.status, refused.code) == (403, "HOST_NOT_ALLOWED")
    assert "127.0.0.2" in refused.json["error"]["message"]


def test_health_checks_are_answered_to_every_address(server: Server) -> None:
    for path in ("/healthz", "/readyz"):
        assert server.call("GET", path, source="127.0.0.2").status == 200
    for method, path in (("POST", "/readyz"), ("GET", "/healthz/x"), ("GET", "/readyz%2F..%2Fv1/topics"), ("GET", "/")):
        assert server.call(method, path, source="127.0.0.2").status in (403, 405), path


def test_the_machine_itself_is_always_served(tmp_path: Path) -> None:
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="172.16.0.0/12") as server:
        assert server.call("GET", "/v1/topics", source="127.0.0.1").status == 200
        assert server.call("GET", "/v1/topics", source="127.0.0.2").status == 403


@pytest.mark.parametrize(
    ("hosts", "yes", "no"),
    [
        (None, ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"], ["10.0.0.1", "::2", "::ffff:10.0.0.1", "", "x"]),
        ("10.0.0.0/8,fe80::/10", ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0"], ["127.0.0.2", "11.0.0.1", "fec0::1"]),
        ("*", ["1.2.3.4", "2001:db8::1", "127.0.0.1"], ["", "nobody"]),
        ("192.0.2.7, 2001:db8::/32", ["192.0.2.7", "2001:db8:1::1", "127.0.0.1", "::1"], ["192.0.2.8", "::2"]),
    ],
)
def test_hosts_from_the_environment(hosts: str | None, yes: list[str], no: list[str]) -> None:
    found = Auth(load({}, {} if hosts is None else {"TURTLEMQ_ALLOWED_HOSTS": hosts}, None).allowed_hosts)
    assert [host for host in yes if not found.allows(host)] == []
    assert [host for host in no if found.allows(host)] == []


@pytest.mark.parametrize("hosts", ["localhost", "10.0.0.1/8", "", "1.2.3", "10.0.0.0/33", "**"])
def test_hosts_that_are_none(hosts: str) -> None:
    with pytest.raises(InvalidArgument, match="TURTLEMQ_ALLOWED_HOSTS: allowed_hosts"):
        load({}, {"TURTLEMQ_ALLOWED_HOSTS": hosts}, None)


def test_who_is_not_allowed_in_cannot_hold_the_door_open(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20, ("127.0.0.2", 0)) as idle:
        assert idle.recv(1) == b"", "closed, without a word from either side"


def test_a_page_of_a_foreign_domain_reads_nothing(narrow: Server) -> None:
    for host, status in (("evil.example", 403), (f"evil.example:{narrow.port}", 403), ("localhost", 200), ("127.0.0.1", 200)):
        answer = narrow.call("GET", "/v1/topics", headers={"Host": host})
        assert (answer.status, answer.status == 403 and answer.code) == (status, status == 403 and "FORBIDDEN")


def hosts_served(server: Server, source: str | None) -> list[str]:
    """Which of these names in the Host header, as a browser sends it, are answered."""
    hosts = ("evil.example", f"evil.example:{server.port}", "mq.shop.example", "10.0.0.7", "[fd00::7]:80", "queue", "a.localhost")
    return [host for host in hosts if server.call("GET", "/v1/topics", headers={"Host": host}, source=source).status == 200]


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_a_browser_of_an_allowed_host_is_no_way_in(tmp_path: Path, source: str) -> None:
    own = ["10.0.0.7", "[fd00::7]:80", "queue", "a.localhost"]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*") as server:
        assert hosts_served(server, source) == own
        page = {"Host": "evil.example", "Origin": "http://evil.example"}
        refused = server.call("POST", "/v1/topics/t/messages", {"body": 1}, headers=page, source=source)
        assert (refused.status, refused.code) == (403, "FORBIDDEN")
        assert "host_names" in refused.json["error"]["message"]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_HOST_NAMES="MQ.shop.example") as server:
        assert hosts_served(server, source) == ["mq.shop.example", *own]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_HOST_NAMES="*") as server:
        assert "evil.example" in hosts_served(server, source)


def test_host_names_do_not_matter_with_tokens_or_tls() -> None:
    """A page of another site knows no token, and its name is not in the certificate."""
    for auth, allowed in ((Auth(("*",)), False), (Auth(("*",), tls=True), True), (Auth(("*",), TOKENS.values()), True)):
        assert auth.answers_to("evil.example") is allowed
    assert Auth(("*",)).answers_to(""), "HTTP/1.0, which no browser speaks"


def test_one_client_is_an_address_or_a_network_of_ipv6() -> None:
    assert client_network("10.0.0.1") == client_network("::ffff:10.0.0.1") != client_network("10.0.0.2")
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") != client_network("2001:db8:0:1::1")


# Tokens


# Rights by role, written down from docs/HTTP.md and docs/CONFIGURATION.md, not from the code: for a token on the topic that
# is asked for, by the roles above. `all` are requests about all topics: they need the right on every one.
EVERYBODY = ("nobody", *PEOPLE)
OPERATORS = ("operator", "support", "owner", "root")
READERS = ("reader", *OPERATORS)
TOPIC, GROUP, CLUSTER = "/v1/topics/{topic}", "/v1/topics/{topic}/groups/{group}", "/v1/cluster"
CLIENT = f"{GROUP}/clients/{{client}}"
TABLE: dict[tuple[str, ...], tuple[str, ...]] = {
    EVERYBODY: ("GET /healthz", "GET /readyz", "GET /", "GET /cluster", "GET /docs", "GET /pages/{file}", "GET /openapi.json"),
    ("watcher", "support", "root"): ("GET /metrics", "GET /v1/status/history"),
    ("support", "root"): (f"GET {CLUSTER}/shards/{{shard}}/verify",),
    ("root",): (
        "POST /v1/backup",
        "DELETE /v1/backup",
        *(f"{method} {CLUSTER}/nodes/{{node}}/drain" for method in ("POST", "DELETE")),
        f"POST {CLUSTER}/shards/{{shard}}/verify",
        f"POST {CLUSTER}/shards/{{shard}}/handover",
        "POST /v1/clock",
    ),
    tuple(PEOPLE): (
        "GET /v1/clock",
        "GET /v1/topics",
        "GET /v1/status",
        "GET /v1/find",
        "GET /v1/audit",
        "POST /v1/command",
        f"GET {CLUSTER}",
        f"GET {CLUSTER}/replica",
        f"GET {CLUSTER}/shards/{{shard}}",
    ),
    ("producer", "consumer", *READERS): (
        f"GET {TOPIC}",
        f"GET {TOPIC}/forecast",
        f"GET {TOPIC}/history",
        f"GET {TOPIC}/messages/{{id}}",
        f"GET {GROUP}",
    ),
    ("producer", "owner", "root"): (f"POST {TOPIC}/messages", f"POST {TOPIC}/transaction"),
    ("producer", *OPERATORS): (
        f"PATCH {TOPIC}/messages/{{id}}",
        f"DELETE {TOPIC}/messages/{{id}}",
        f"POST {TOPIC}/cancel",
    ),
    ("consumer", "owner", "root"): (
        *(f"POST {place}/{verb}" for place in (TOPIC, GROUP) for verb in ("fetch", "ack", "extend")),
        f"POST {GROUP}/clients",
        f"DELETE {CLIENT}",
        f"PUT {CLIENT}/secret",
    ),
    ("consumer", *READERS): (
        *(f"GET {TOPIC}/{what}" for what in ("messages", "events", "dead", "dead/summary", "dead/export", "clients")),
        f"GET {GROUP}/clients",
        f"GET {CLIENT}",
    ),
    ("consumer", *OPERATORS): (f"PUT {GROUP}", f"PUT {CLIENT}"),
    OPERATORS: (
        f"DELETE {GROUP}",
        f"POST {TOPIC}/messages/{{id}}/retry",
        *(f"POST {TOPIC}/{verb}" for verb in ("compact", "dead/requeue", "dead/delete")),
        *(f"POST {place}/{verb}" for place in (TOPIC, GROUP) for verb in ("pause", "resume")),
    ),
    ("owner", "root"): (f"PUT {TOPIC}", f"DELETE {TOPIC}"),
}
MAY = {route: people for people, routes_ in TABLE.items() for route in routes_}


def test_every_openapi_operation_is_in_the_hand_written_table() -> None:
    paths = document()["paths"]
    described = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert described | {"GET /", "GET /docs", "GET /cluster", "GET /pages/{file}"} == set(MAY), "pages are for browsers"


DONE = {  # requests without a body happen, to a topic, a group and a message that were made for it: the answer with the right
    f"DELETE {TOPIC}": {"outcome": "deleted"},
    f"DELETE {GROUP}": {"outcome": "deleted"},
    f"DELETE {TOPIC}/messages/{{id}}": {"outcome": "cancelled"},
    "DELETE /v1/backup": {"outcome": "unpinned"},
    "POST /v1/backup": {"bytes", "files", "folder", "name"},
}


def prepare(server: Server, topic: str) -> None:
    """Something to delete: all anew, for an id that was cancelled stays known."""
    base = f"/v1/topics/{topic}"
    as_(server, "root", "DELETE", base)
    assert as_(server, "root", "PUT", base, {}).status == 200
    assert as_(server, "root", "PUT", f"{base}/groups/g", {}).status == 200
    assert as_(server, "root", "POST", f"{base}/messages", {"id": "a", "body": 1, "delay": 900}).json["created"] == 1


def test_everybody_may_do_what_the_table_says_and_no_more(own_server: Server) -> None:
    """With bodies that are no JSON, so that nothing happens where there is a body; all of these roles have `orders` among their
    topics, and of them only those with `*` have `elsewhere`."""
    server, done = own_server, set[str]()
    for route, people in MAY.items():
        method, _, path = route.partition(" ")
        data = None if method in ("GET", "DELETE") or route in DONE else b"{"
        for topic in ("orders", "elsewhere") if "{topic}" in path else ("orders",):
            place = path.format(topic=topic, group="g", id="a", file="x", shard=0, node="a", client="c")
            for header in (None, f"Bearer {new_token()}"):
                without = server.call(method, place, data=data, headers={} if header is None else {"Authorization": header})
                assert (without.status == 401) == ("nobody" not in people), (route, header, without.status)
            for name in PEOPLE:
                may = name in people and (topic == "orders" or "*" in PEOPLE[name][1])
                if route in DONE:
                    prepare(server, topic)
                answer = server.call(method, place, data=data, headers=bearer(name))
                assert (answer.status == 403) == (not may), (route, topic, name, answer.status, answer.data)
                assert answer.status != 401
                if may and route in DONE:
                    assert answer.status < 300, (route, topic, name, answer.data)
                    expected = DONE[route]
                    assert (answer.json if isinstance(expected, dict) else answer.json.keys()) == expected
                    done.add(route)
    deletes = {route for route in MAY if route.startswith("DELETE ") and CLUSTER not in route and route != f"DELETE {CLIENT}"}
    assert done == set(DONE) == deletes | {"POST /v1/backup"}


def test_what_is_about_all_topics_needs_a_right_on_all(server: Server) -> None:
    assert as_(server, "owner", "POST", "/v1/backup").code == "FORBIDDEN"
    assert as_(server, "owner", "DELETE", "/v1/backup").code == "FORBIDDEN"
    assert as_(server, "owner", "GET", "/metrics").code == "FORBIDDEN"
    assert as_(server, "watcher", "GET", "/metrics").status == 200


def test_rights_end_where_the_topics_end(server: Server) -> None:
    message = {"body": 1}
    for topic, status in (
        ("orders", 201),
        ("orders.eu", 201),
        ("mail.de", 201),
        ("mail", 403),
        ("order", 403),
        ("x.orders", 403),
    ):
        assert as_(server, "producer", "POST", f"/v1/topics/{topic}/messages", message).status == status, topic
    assert as_(server, "consumer", "POST", "/v1/topics/orders.eu/fetch", {}).code == "FORBIDDEN"
    assert as_(server, "producer", "POST", "/v1/topics/orders/fetch", {}).code == "FORBIDDEN"
    assert as_(server, "root", "GET", "/v1/topics/order").code == "UNKNOWN_TOPIC", "a refused request makes no topic"
    assert as_(server, "producer", "GET", "/v1/topics/secret").code == "FORBIDDEN", "and does not tell whether there is one"


def test_only_topics_that_one_has_a_right_to_are_listed(server: Server) -> None:
    for topic in ("orders", "orders.us", "mail.fr", "payroll"):
        assert as_(server, "root", "PUT", f"/v1/topics/{topic}", {}).status == 200

    def listed(name: str) -> set[str]:
        return {one["topic"] for one in as_(server, name, "GET", "/v1/topics").json["topics"]}

    assert listed("consumer") == listed("owner") == {"orders"}
    assert {"orders", "orders.us", "mail.fr"} <= listed("producer")
    assert "payroll" not in listed("producer")
    assert listed("watcher") == set(), "it has no right at all"
    assert "payroll" in listed("root")


COMMANDS = {  # of the command protocol: the operation that does the same
    "add": "POST /v1/topics/{topic}/messages",
    "pop": "POST /v1/topics/{topic}/fetch",
    "finish": "POST /v1/topics/{topic}/ack",
    "delete": "DELETE /v1/topics/{topic}/messages/{id}",
    "delete held": "POST /v1/topics/{topic}/ack",
}


@pytest.mark.parametrize("told", ["topic", "no topic"])
@pytest.mark.parametrize("topic", ["orders", "elsewhere"])
def test_a_command_needs_the_right_of_its_operation(own_server: Server, topic: str, told: str) -> None:
    """`delete` ends a message that a consumer holds only with the right to acknowledge it beside its own."""
    server, number = own_server, 0
    for command, route in COMMANDS.items():
        verb, _, held = command.partition(" ")
        if told == "no topic" and verb in ("add", "pop"):
            continue
        for name in PEOPLE:
            number += 1
            fields = {"id": f"m{number}", "body": 1, "delay": 900 if command == "delete" else 0}
            if verb != "add":
                as_(server, "root", "POST", f"/v1/topics/{topic}/messages", fields)
            if verb == "finish" or held:
                taken = as_(server, "root", "POST", f"/v1/topics/{topic}/fetch", {"wait": 10, "max": 10_000}).json["messages"]
                assert fields["id"] in {message["id"] for message in taken}
            asked = {"command": verb, "id": fields["id"], "body": 1, "topic": topic} | ({"delay": 900} if verb == "add" else {})
            if told == "no topic":
                del asked["topic"]
            answer = as_(server, name, "POST", "/v1/command", asked).json
            there = topic == "orders" or "*" in PEOPLE[name][1]
            may = there and all(name in MAY[needed] for needed in {route, COMMANDS[verb]})
            assert answer["success"] is may, (command, name, answer)
            if not may:
                expected = "UNKNOWN_MESSAGE" if told == "no topic" else "FORBIDDEN"
                assert answer["error"].startswith(expected), (command, name, answer)
            if held and not may:
                kept = as_(server, "root", "GET", f"/v1/topics/{topic}/messages/{fields['id']}").json
                assert kept["state"] == "reserve", (name, kept)


def test_the_command_protocol_obeys(server: Server) -> None:
    def said(name: str, **command: Any) -> Any:
        return as_(server, name, "POST", "/v1/command", command).json

    assert server.call("POST", "/v1/command", {"command": "pop", "topic": "orders"}).status == 401
    assert said("consumer", command="add", topic="orders", id="c1", body=1)["error"].startswith("FORBIDDEN")
    assert said("producer", command="add", topic="orders", id="c1", body=1)["success"]
    assert said("producer", command="pop", topic="orders")["error"].startswith("FORBIDDEN")
    popped = said("consumer", command="pop", topic="orders")
    while popped["id"] != "c1":
        popped = said("consumer", command="pop", topic="orders")
    assert not said("producer", command="finish", id="c1")["success"], "looks only where it has the right"
    assert said("consumer", command="finish", id="c1")["success"]
    assert said("root", command="add", topic="payroll", id="p1", body=1, delay=60)["success"]
    assert "UNKNOWN_MESSAGE" in said("producer", command="delete", id="p1")["error"], "and does not find what is elsewhere"
    assert said("consumer", command="finish", id="p1", topic="payroll")["error"].startswith("FORBIDDEN")
    assert said("root", command="delete", id="p1")["success"]


WRONG: list[str | None] = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer tmq_",
    f"Basic {SECRETS['root']}",
    SECRETS["root"],
    f"Bearer {SECRETS['root'][:-1]}",
    f"Bearer {SECRETS['root']}x",
    f"Bearer {new_token()}",
    f"Bearer {SECRETS['root'][:21]}{SECRETS['owner'][21:]}",
    f"Bearer {TOKENS['root'].hash}",
    f"Bearer {TOKENS['root'].hash.rpartition(':')[2]}",
    "Bearer " + "x" * 5_000,
]


def test_what_is_no_token_here(server: Server) -> None:
    for header in WRONG:
        refused = server.call("GET", "/v1/topics", headers={} if header is None else {"Authorization": header})
        assert (refused.status, refused.code) == (401, "UNAUTHENTICATED"), header
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        assert SECRETS["root"] not in refused.data.decode()


def test_the_scheme_may_be_written_in_any_case(server: Server) -> None:
    assert server.call("GET", "/v1/topics", headers={"Authorization": f"bearer  {SECRETS['root']}"}).status == 200


def test_a_token_is_compared_once_in_constant_time_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    class Module:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(guarding, "hmac", Module)
    found = Auth(tokens=TOKENS.values())
    assert found.identify(f"Bearer {SECRETS['root']}").name == "root"
    for wrong in (new_token(), SECRETS["root"][:21] + "x" * 43, "tmq_0000000000000000_" + "0" * 43):
        with pytest.raises(Unauthenticated):
            found.identify(f"Bearer {wrong}")
    assert compared == [(64, 64)] * 4


def test_tokens_are_never_alike_and_their_hashes_do_not_hold_them() -> None:
    some = [new_token() for _ in range(100)]
    assert len(set(some)) == 100
    assert all(token[21:] not in hash_of(token) for token in some)
    with pytest.raises(InvalidArgument):
        hash_of("secret")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hash": "sha256:1:2"}, "its hash"),
        ({"hash": SECRETS["root"]}, "its hash"),
        ({"rights": ["fetch"]}, "rights"),
        ({"topics": ["a/b"]}, "topics"),
        ({"topics": []}, "topics"),
        ({"name": ""}, "name"),
        ({"right": ["admin"]}, "unknown field"),
    ],
)
def test_a_token_that_could_not_work_is_refused_at_the_start(change: dict[str, Any], said: str) -> None:
    entry = {"name": "a", "hash": hash_of(SECRETS["root"]), "rights": ["admin"]} | change
    with pytest.raises(InvalidArgument, match=said) as error:
        load({}, {"TURTLEMQ_TOKENS": json.dumps([entry])}, None)
    assert SECRETS["root"] not in str(error.value)
    twice = [entry | {"hash": hash_of(SECRETS["root"]), "rights": [], "topics": ["*"], "name": "a"}] * 2
    with pytest.raises(InvalidArgument):
        load({}, {"TURTLEMQ_TOKENS": json.dumps(twice)}, None)


def test_patterns_are_not_regular_expressions() -> None:
    assert not pattern_of(["a.c"])("abc")
    assert pattern_of(["a*b*c"])("a.b.c")
    assert not pattern_of(["*"])("a\nb")


# TLS


@pytest.mark.slow
def test_tls_and_the_command_line_over_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    token = Token("me", hash_of(SECRETS["root"]), ("produce", "consume"))
    tokens = json.dumps([{"name": "me", "hash": token.hash, "rights": token.rights}])
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key), "TURTLEMQ_TOKENS": tokens}
    with running(tmp_path / "data", tls=trust, **files) as server:
        assert server.call("POST", "/v1/topics/t/messages", {"body": 1}, headers=bearer("root")).status == 201
        old = ssl.create_default_context(cafile=str(cert))
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        for context in (old, ssl.create_default_context()):  # too old, and not trusting it
            with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", server.port), 10) as plain:
                context.wrap_socket(plain, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", server.port), 10) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)
        given = {"TURTLEMQ_URL": server.url, "TURTLEMQ_CACERT": str(cert), "TURTLEMQ_TOKEN": SECRETS["root"]}
        assert run("put", "t", "2", **given).returncode == 0
        options = ("--cacert", str(cert), "--token", SECRETS["root"], "--url", server.url)
        fetched = run("fetch", "t", "--json", *options)
        assert [json.loads(line)["body"] for line in fetched.stdout.splitlines()] == [1, 2]
        refused = run("put", "t", "3", TURTLEMQ_URL=server.url, TURTLEMQ_CACERT=str(cert))
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
        untrusted = run("put", "t", "3", TURTLEMQ_URL=server.url)
        assert untrusted.returncode == 1
        assert "certificate" in untrusted.stderr
        assert "event=tokens_in_the_clear" not in server.log


def test_tls_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other")
    for first, second, said in (
        (cert, tmp_path / "nothing.pem", "nothing.pem cannot be read"),
        (tmp_path, key, "cannot be read"),
        (cert, other, "no certificate and its key"),
        (key, key, "no certificate and its key"),
        (cert, tmp_path / "locked.pem", "password"),
        (cert, "", "go together"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            tls_of(load({}, {"TURTLEMQ_TLS_CERT": str(first), "TURTLEMQ_TLS_KEY": str(second)}, None))
    done = run("serve", "--data", str(tmp_path / "data"), TURTLEMQ_TLS_CERT=str(cert), TURTLEMQ_TLS_KEY=str(other))
    assert (done.returncode, "no certificate and its key" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


# Open doors


def test_an_open_server_without_tokens_warns(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--host", "0.0.0.0", TURTLEMQ_ALLOWED_HOSTS="127.0.0.0/8,10.0.0.0/8") as server:
        assert server.log.count("!!  ") >= 4
        assert "asks for no token" in server.log
        assert "10.0.0.0/8" in server.log
        assert "event=open_to_all" in server.log


def test_with_tokens_it_warns_of_plain_text_only(tmp_path: Path) -> None:
    tokens = json.dumps([{"name": "me", "hash": TOKENS["root"].hash, "rights": ["admin"]}])
    with running(tmp_path / "data", "--host", "0.0.0.0", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_TOKENS=tokens) as server:
        assert "!!" not in server.log
        assert "event=tokens_in_the_clear" in server.log


# Clients that hold the door


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("narrow")
    with running(folder / "data", TURTLEMQ_MAX_CONNECTIONS="4", TURTLEMQ_BODY_TIMEOUT_S="0.3") as found:
        yield found
        assert "Traceback" not in found.log


def answer_to(server: Server, data: bytes) -> bytes:
    """All that comes back on a connection until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(data)
        out = b""
        while chunk := connection.recv(65_536):
            out += chunk
        return out


def test_a_connection_too_many_is_told_so(narrow: Server) -> None:
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(socket.create_connection(("127.0.0.1", narrow.port), 20))
        refused = narrow.call("GET", "/healthz")
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "OVERLOADED", "1")
        assert refused.json["error"]["retry_after_ms"] == 1000
    end = time.monotonic() + 10
    while narrow.call("GET", "/healthz").status != 200:
        assert time.monotonic() < end, "connections that were closed still count"


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_comes_too_slowly_is_not_waited_for(narrow: Server, head: str) -> None:
    start = "POST /v1/topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = "5\r\n{'bod\r\n" if "chunked" in head else '{"bod'
    out = answer_to(narrow, f"{start}{head}\r\n\r\n{body}".encode())
    assert out.startswith(b"HTTP/1.1 408 ")
    assert b"REQUEST_TIMEOUT" in out
    assert narrow.call("GET", "/v1/topics/slow").status == 404


@pytest.mark.parametrize("body", ["5\r\n{'bod\r\nZZ\r\n", "5\r\ntoo long for five\r\n", "-1\r\n"])
def test_chunks_that_are_none(narrow: Server, body: str) -> None:
    head = "POST /v1/topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    out = answer_to(narrow, f"{head}\r\n\r\n{body}".encode())
    assert out.split(maxsplit=2)[1] == b"400", out
    assert b"INVALID_" in out


def test_a_body_in_pieces_is_read_whole(narrow: Server) -> None:
    pieces = [b'{"body": "', *[b"x" * 10_000 for _ in range(30)], b'"}']
    head = "POST /v1/topics/pieces/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", narrow.port), 20) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 201 ")
    assert len(narrow.fetch("pieces")[0]["body"]) == 300_000


@pytest.mark.parametrize(
    "head",
    [
        "GET /" + "x" * 9_000 + " HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + "x" * 9_000 + "\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: x\r\n" + "".join(f"X{i}: 1\r\n" for i in range(200)) + "\r\n",
    ],
)
def test_heads_are_bounded(narrow: Server, head: str) -> None:
    out = answer_to(narrow, head.encode())
    assert out.split(maxsplit=2)[1] == b"400"
    assert json.loads(out.partition(b"\r\n\r\n")[2])["error"]["code"] == "INVALID_ARGUMENT"


def test_a_client_that_does_not_take_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fetched messages go back then: sending them is cancelled, as if it had gone away."""
    monkeypatch.setattr(passed, "ANSWER_S", 0.2)
    monkeypatch.setattr(passed, "SLOWEST", 1 << 40)
    cancelled = asyncio.Event()

    class Large(web.Response):
        async def write_eof(self, data: bytes = b"") -> None:
            try:
                await super().write_eof(data)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def large(_: web.Request) -> web.Response:
        return Large(body=b"x" * (64 << 20))

    async def story() -> int:
        app = web.Application()
        app[guarding.AUTH], app[SERVICE] = Auth(), Service()
        app.router.add_get("/", large)
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await cancelled.wait()
        size = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 20):
                size += len(chunk)
        writer.close()
        await runner.cleanup()
        return size

    assert asyncio.run(asyncio.wait_for(story(), 30)) < 64 << 20


def test_a_head_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(listen._LIMITS, "keepalive_timeout", 0.3)

    async def story() -> bytes:
        app = web.Application()
        app[guarding.AUTH], app[SERVICE] = Auth(), Service()
        runner = listen.runner_for(app, 1)
        await runner.setup()
        await listen.Site(runner, Config(port=0), None).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():  # a little more of it all the time
            writer.write(b"X: y\r\n")
            await asyncio.wait([answer], timeout=0.05)
        writer.close()
        await runner.cleanup()
        return answer.result() if answer.exception() is None else b""

    assert asyncio.run(asyncio.wait_for(story(), 30)) == b""
