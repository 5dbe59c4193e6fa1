"""Rights over real connections: each operation with each kind of token, on its own topics and others."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest

from tests.harness.guarded_server import PEOPLE, SECRETS, TOKENS, as_, bearer, own_server, server
from tests.harness.server_process import Server
from turtlemq.errors import InvalidArgument
from turtlemq.server import auth as guarding
from turtlemq.server.auth import Auth, hash_of, new_token
from turtlemq.server.config import load
from turtlemq.server.errors import Unauthenticated
from turtlemq.server.openapi import document
from turtlemq.server.topic_patterns import pattern_of

__all__ = ["own_server", "server"]


# Rights by role, written down from docs/HTTP.md and docs/CONFIGURATION.md, not from the code: for a token on the topic that
# is asked for, by the roles of `guarded_server`. `all` are requests about all topics: they need the right on every one.
EVERYBODY = ("nobody", *PEOPLE)
OPERATORS = ("operator", "support", "owner", "root")
READERS = ("reader", *OPERATORS)
TOPIC, GROUP, CLUSTER = "/v1/topics/{topic}", "/v1/topics/{topic}/groups/{group}", "/v1/cluster"
CLIENT = f"{GROUP}/clients/{{client}}"
TABLE: dict[tuple[str, ...], tuple[str, ...]] = {
    EVERYBODY: ("GET /healthz", "GET /readyz", "GET /", "GET /cluster", "GET /docs", "GET /pages/{file}", "GET /openapi.json"),
    ("watcher", "support", "root"): ("GET /metrics", "GET /v1/status/history", "GET /v1/tenants"),
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
        *(f"GET {TOPIC}/schedules{what}" for what in ("", "/{name}", "/{name}/next")),
        *(f"GET {TOPIC}/{what}" for what in ("messages", "events", "dead", "dead/summary", "dead/export", "clients", "replays")),
        f"POST {TOPIC}/replay",  # which also needs the right to produce into the other topic
        *(f"{method} {TOPIC}/replays/{{replay}}" for method in ("GET", "DELETE")),
        f"GET {GROUP}/clients",
        f"GET {CLIENT}",
    ),
    ("consumer", *OPERATORS): (f"PUT {GROUP}", f"PUT {CLIENT}"),
    OPERATORS: (
        f"DELETE {GROUP}",
        f"POST {TOPIC}/messages/{{id}}/retry",
        *(f"POST {TOPIC}/{verb}" for verb in ("compact", "dead/requeue", "dead/delete")),
        *(f"{method} {TOPIC}/schedules/{{name}}" for method in ("PUT", "DELETE")),
        *(f"POST {TOPIC}/schedules/{{name}}/{verb}" for verb in ("trigger", "pause", "resume")),
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
    f"DELETE {TOPIC}/schedules/{{name}}": {"outcome": "deleted"},
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
    assert as_(server, "root", "PUT", f"{base}/schedules/s", {"every": 900, "body": 1}).status == 200


def test_everybody_may_do_what_the_table_says_and_no_more(own_server: Server) -> None:
    """With bodies that are no JSON, so that nothing happens where there is a body; all of these roles have `orders` among their
    topics, and of them only those with `*` have `elsewhere`."""
    server, done = own_server, set[str]()
    for route, people in MAY.items():
        method, _, path = route.partition(" ")
        data = None if method in ("GET", "DELETE") or route in DONE else b"{"
        for topic in ("orders", "elsewhere") if "{topic}" in path else ("orders",):
            place = path.format(topic=topic, group="g", id="a", file="x", shard=0, node="a", client="c", name="s", replay="r")
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
    elsewhere = (f"DELETE {CLIENT}", f"DELETE {TOPIC}/replays/{{replay}}")  # tested elsewhere
    deletes = {route for route in MAY if route.startswith("DELETE ") and CLUSTER not in route and route not in elsewhere}
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
