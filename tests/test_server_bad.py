"""Bad requests: each is refused with the contract's code and the index of the bad item, changes nothing, and none is a 5xx."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import bson
import pytest

from tests.harness.server_process import Answer, Server, running

BSON = {"Content-Type": "application/bson"}
NDJSON = {"Content-Type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("bad") / "data", TURTLEMQ_MAX_BODY_BYTES=str(1 << 20)) as found:
        found.put("there", {"body": 1, "id": "asleep", "delay": 3600})
        yield found
        assert "Traceback" not in found.log, found.log


def refused(answer: Answer, status: int, code: str, index: int | None = None) -> None:
    error = answer.json["error"]
    assert (answer.status, error["code"], error.get("index")) == (status, code, index), answer.data
    assert len(error["message"]) > 10


MESSAGES = [
    ({"body": 1, "delay": "x"}, "INVALID_FIRE_AT"),
    ({"body": 1, "delay": -1}, "INVALID_FIRE_AT"),
    ({"body": 1, "delay": 1e12}, "INVALID_FIRE_AT"),
    ({"body": 1, "due_ms": -1}, "INVALID_FIRE_AT"),
    ({"body": 1, "due_ms": 1 << 42}, "INVALID_FIRE_AT"),
    ({"body": 1, "due_ms": 10**30}, "INVALID_FIRE_AT"),
    ({"body": 1, "due_ms": 1.5}, "INVALID_FIRE_AT"),
    ({"body": 1, "due_ms": 1, "delay": 1}, "INVALID_FIRE_AT"),
    ({"body": 1, "id": ""}, "INVALID_ID"),
    ({"body": 1, "id": "-x"}, "INVALID_ID"),
    ({"body": 1, "id": "a/b"}, "INVALID_ID"),
    ({"body": 1, "id": "a\nb"}, "INVALID_ID"),
    ({"body": 1, "id": "x" * 201}, "INVALID_ID"),
    ({"body": 1, "id": 17}, "INVALID_ID"),
    ({}, "INVALID_MESSAGE"),
    ({"id": "a"}, "INVALID_MESSAGE"),
    ({"body": 1, "body_base64": "aGk="}, "INVALID_MESSAGE"),
    ({"body_base64": "?"}, "INVALID_MESSAGE"),
    ({"body": 1, "ttr": 0}, "INVALID_MESSAGE"),
    ({"body": 1, "ttr": 1e9}, "INVALID_MESSAGE"),
    ({"body": 1, "priority": "urgent"}, "INVALID_MESSAGE"),
    ({"body": 1, "headers": {"a": 1}}, "INVALID_MESSAGE"),
    ({"body": 1, "headers": {"": "a"}}, "INVALID_MESSAGE"),
    ({"body": 1, "expires_ms": -5}, "INVALID_MESSAGE"),
    ({"body": 1, "dely": 5}, "INVALID_MESSAGE"),
    (17, "INVALID_MESSAGE"),
]


@pytest.mark.parametrize(("message", "code"), MESSAGES)
def test_a_bad_message_refuses_the_whole_batch_by_its_index(server: Server, message: Any, code: str) -> None:
    batch = [{"body": 0, "id": "fine"}, {"body": 0}, message, {"body": 0}]
    refused(server.call("POST", "/v1/topics/never/messages", {"messages": batch}), 400, code, 2)
    lines = "\n".join(map(json.dumps, batch)).encode()
    refused(server.call("POST", "/v1/topics/never/messages", data=lines, headers=NDJSON), 400, code, 2)
    assert server.call("GET", "/v1/topics/never").status == 404, "a refused batch makes no topic"


def test_there_is_one_message_a_line(server: Server) -> None:
    line = b'{"body":1}'
    for lines in ([line, line + line, line], [line, line + b" " + line], [line, b"{", b'"body":1}', line]):
        for end in (b"\n", b"\r\n"):
            for many in (1, 30_000):  # the latter are read in slices
                data = end.join([line] * (many - 1) + lines)
                refused(server.call("POST", "/v1/topics/never/messages", data=data, headers=NDJSON), 400, "INVALID_JSON", many)
    blank = b"\n\r\n".join([b"", line, b" ", line, b"\t", b""])
    assert len(server.call("POST", "/v1/topics/lines/messages", data=blank, headers=NDJSON).json["ids"]) == 2


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1", b"\xff", b'{"body": "\xff"}', b'{"body": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"body":1}x']
)
def test_what_is_no_json(server: Server, data: bytes) -> None:
    refused(server.call("POST", "/v1/topics/t/messages", data=data), 400, "INVALID_JSON")


@pytest.mark.parametrize("value", [[], 1, "x", None, {"messages": 1}])
def test_json_that_is_no_message(server: Server, value: Any) -> None:
    refused(server.call("POST", "/v1/topics/t/messages", data=json.dumps(value).encode()), 400, "INVALID_MESSAGE")


def test_bad_bson(server: Server) -> None:
    good = bson.encode({"body": b"x"})
    for bad in (b"\x01", good[:-1], b"\x05\0\0\0\x01", good[:4] + b"\xff" + good[5:], b"\xff\xff\xff\xff" + good[4:]):
        refused(server.call("POST", "/v1/topics/never/messages", data=good + bad, headers=BSON), 400, "INVALID_BSON", 1)
    for fields, code in (
        ({"id": "a"}, "INVALID_MESSAGE"),
        ({"body": bson.ObjectId()}, "INVALID_MESSAGE"),
        ({"body": {"a": b"bytes"}}, "INVALID_MESSAGE"),
        ({"body": float("nan")}, "INVALID_MESSAGE"),
        ({"body": b"", "due_ms": "x"}, "INVALID_FIRE_AT"),
        ({"body": b"", "id": 5}, "INVALID_ID"),
    ):
        answer = server.call("POST", "/v1/topics/never/messages", data=good + bson.encode(fields), headers=BSON)
        refused(answer, 400, code, 1)


def test_media_types_encodings_and_sizes(server: Server) -> None:
    path = "/v1/topics/t/messages"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        refused(server.call("POST", path, data=b'{"body":1}', headers={"Content-Type": kind}), 415, "UNSUPPORTED_MEDIA_TYPE")
    packed = {"Content-Encoding": "pigeon"}
    refused(server.call("POST", path, {"body": 1}, headers=packed), 415, "UNSUPPORTED_MEDIA_TYPE")
    refused(server.call("POST", path, data=b"not gzip", headers={"Content-Encoding": "gzip"}), 400, "INVALID_ARGUMENT")
    refused(server.call("POST", path, {"body": "x" * (1 << 20)}), 413, "TOO_LARGE")
    bomb = gzip.compress(b" " * (50 << 20))
    refused(server.call("POST", path, data=bomb, headers={"Content-Encoding": "gzip"}), 413, "TOO_LARGE")
    many = b'{"body":1}\n' * 90_000
    assert server.call("POST", path, data=many, headers=NDJSON).status == 201
    headers = {"body": 1, "headers": {"h": "x" * 40_000}}
    refused(server.call("POST", path, headers), 413, "TOO_LARGE", 0)


@pytest.mark.parametrize("name", ["-a", ".a", "a%20b", "a%2Fb", "%2e%2e", "x" * 201, "%C3%BC", "a%00", "..%2f..%2fetc"])
def test_bad_topic_names(server: Server, name: str) -> None:
    for method, rest, value in (("POST", "/messages", {"body": 1}), ("POST", "/fetch", {}), ("GET", "", None), ("PUT", "", {})):
        refused(server.call(method, f"/v1/topics/{name}{rest}", value), 400, "INVALID_TOPIC")


BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/fetch", {"max": 0}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", {"max": 10_001}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", {"wait": 61}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", {"ttr": 0}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", {"ack": "maybe"}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", {"wiat": 5}, 400, "INVALID_ARGUMENT"),
    ("POST", "/fetch", [], 400, "INVALID_ARGUMENT"),
    ("POST", "/groups/-bad/fetch", {}, 400, "INVALID_ARGUMENT"),
    ("POST", "/ack", "x", 400, "INVALID_ACK_LIST"),
    ("POST", "/ack", {"acks": "x"}, 400, "INVALID_ACK_LIST"),
    ("POST", "/ack", {}, 400, "INVALID_ACK_LIST"),
    ("POST", "/extend", {}, 400, "INVALID_ARGUMENT"),
    ("POST", "/extend", {"ids": ["a"], "ttr": -1}, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages/nope", None, 404, "UNKNOWN_MESSAGE"),
    ("GET", "/messages/default%2Fasleep", None, 400, "INVALID_ID"),
    ("DELETE", "/messages/nope", None, 404, "UNKNOWN_MESSAGE"),
    ("PATCH", "/messages/nope", {"delay": 1}, 404, "UNKNOWN_MESSAGE"),
    ("PATCH", "/messages/asleep", {}, 400, "INVALID_ARGUMENT"),
    ("PATCH", "/messages/asleep", {"delay": -1}, 400, "INVALID_FIRE_AT"),
    ("PATCH", "/messages/asleep", {"due_ms": 1 << 50}, 400, "INVALID_FIRE_AT"),
    ("POST", "/cancel", {}, 400, "INVALID_ARGUMENT"),
    ("POST", "/cancel", {"ids": [], "due_from_ms": 1}, 400, "INVALID_ARGUMENT"),
    ("POST", "/cancel", {"due_from_ms": 5, "due_to_ms": 4}, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages?state=gone", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages?limit=0", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages?limit=x", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages?cursor=x", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/messages?from_ms=9&to_ms=1", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/forecast?bucket=0", None, 400, "INVALID_ARGUMENT"),
    ("GET", "/forecast?hours=100000&bucket=0.001", None, 400, "INVALID_ARGUMENT"),
    ("PUT", "", {"ttr": 0}, 400, "INVALID_ARGUMENT"),
    ("PUT", "", {"rate": {"produce_per_s": -1}}, 400, "INVALID_ARGUMENT"),
    ("PUT", "", {"max_delay": -5}, 400, "INVALID_ARGUMENT"),
    ("PUT", "", {"colour": "red"}, 400, "INVALID_ARGUMENT"),
    ("PUT", "", {"ttr": 1e300}, 400, "INVALID_ARGUMENT"),
    ("PUT", "/groups/g", {"start": "middle"}, 400, "INVALID_ARGUMENT"),
    ("DELETE", "/groups/g", None, 404, "UNKNOWN_GROUP"),
    ("GET", "/dead?cursor=x", None, 400, "INVALID_ARGUMENT"),
    ("POST", "/dead/requeue", {}, 400, "INVALID_ARGUMENT"),
    ("POST", "/dead/requeue", {"ids": ["a"], "per_s": 0}, 400, "INVALID_ARGUMENT"),
    ("POST", "/dead/requeue", {"ids": ["a/b"]}, 400, "INVALID_ID"),
    ("GET", "/nowhere", None, 404, "NOT_FOUND"),
    ("PUT", "/messages", {}, 405, "METHOD_NOT_ALLOWED"),
]


@pytest.mark.parametrize(("method", "rest", "value", "status", "code"), BAD)
def test_bad_arguments(server: Server, method: str, rest: str, value: Any, status: int, code: str) -> None:
    answer = server.call(method, f"/v1/topics/there{rest}", value)
    assert (answer.status, answer.code) == (status, code), answer.data


@pytest.mark.parametrize("acks", [["a", ""], ["a", "-"], ["a", 5]])
def test_a_bad_ack_is_named(server: Server, acks: list[Any]) -> None:
    refused(server.call("POST", "/v1/topics/there/ack", acks), 400, "INVALID_ACK_LIST", 1)


def test_a_page_of_another_site_is_refused(server: Server) -> None:
    for origin in ("http://example.org", "null", f"http://localhost:{server.port}"):
        refused(server.call("POST", "/v1/topics/site/messages", {"body": 1}, headers={"Origin": origin}), 403, "FORBIDDEN")
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.call("POST", "/v1/topics/site/messages", {"body": 1}, headers=own).status == 201


def test_unknown_topics(server: Server) -> None:
    for method, rest, value in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/ack", ["a"]),
        ("POST", "/extend", {"ids": ["a"], "ttr": 1}),
        ("POST", "/cancel", {"ids": ["a"]}),
        ("GET", "/messages", None),
        ("GET", "/messages/a", None),
        ("GET", "/forecast", None),
        ("GET", "/dead", None),
        ("POST", "/compact", None),
    ):
        refused(server.call(method, f"/v1/topics/nobody{rest}", value), 404, "UNKNOWN_TOPIC")


def test_random_bodies_meet_no_error_of_ours(server: Server) -> None:
    dice = random.Random(7)
    paths = ["/messages", "/fetch", "/ack", "/extend", "/cancel", "/dead/requeue", "/dead/delete"]
    names = [
        "body",
        "id",
        "ids",
        "delay",
        "due_ms",
        "ttr",
        "max",
        "acks",
        "filter",
        "headers",
        "messages",
        "due_from_ms",
        "retry_delay",
    ]
    values: list[Any] = [
        0,
        -1,
        1.5,
        1e308,
        2**63,
        2**64,
        "",
        "a",
        "-a",
        "\u0000",
        "\U0001f422",
        None,
        True,
        [],
        {},
        ["a"],
        [None],
        [[]],
        {"a": 1},
    ]
    for _ in range(400):
        value = {name: dice.choice(values) for name in dice.sample(names, dice.randint(0, 3))}
        answer = server.call("POST", "/v1/topics/fuzz" + dice.choice(paths), value)
        assert answer.status < 500, (value, answer.data)
    for kind in ("application/json", "application/x-ndjson", "application/bson"):
        for _ in range(100):
            data = bytearray(
                bson.encode({"body": {"a": [1, "x"]}, "id": "b", "delay": 3}) if "bson" in kind else b'{"body":[1,"x"],"id":"b"}'
            )
            for _ in range(dice.randint(1, 3)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            answer = server.call("POST", "/v1/topics/fuzz/messages", data=bytes(data), headers={"Content-Type": kind})
            assert answer.status < 500, (data, answer.data)


def test_half_requests_do_not_hold_others_up(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.call("GET", "/healthz").status == 200
    with socket.create_connection(("127.0.0.1", server.port)) as rude:
        rude.sendall(b"\x00\x01\x02 what\r\n\r\n")
        assert rude.recv(100).startswith(b"HTTP/1.")
    assert server.call("GET", "/readyz").status == 200


def test_times_may_be_texts_in_every_request(server: Server) -> None:
    path = "/v1/topics/texts"
    server.ok("PUT", path, {"max_attempts": 1})
    server.put("texts", {"body": 1, "id": "a", "due": "2040-01-01T00:00:00Z"}, {"body": 1, "id": "b"})
    assert server.ok("GET", f"{path}/messages/a")["due_ms"] == 2_208_988_800_000
    assert server.ok("PATCH", f"{path}/messages/a", {"due": "2041-01-01T00:00:00+01:00"})["due_ms"] == 2_240_607_600_000
    later = server.ok("PATCH", f"{path}/messages/a", {"delay": "3650d"})["due_ms"]
    assert later > 2_000_000_000_000
    assert server.ok("POST", f"{path}/fetch", {"wait": 10})["messages"]
    assert server.ok("POST", f"{path}/ack", ["-b"])["dead"] == 1
    server.ok("POST", f"{path}/dead/requeue", {"ids": ["b"], "due": "2040-01-01T00:00:00Z"})
    assert ("b", 2_208_988_800_000) in [(one["id"], one["due_ms"]) for one in server.ok("GET", f"{path}/messages")["messages"]]


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("POST", "/fetch", {"wait": 61}, "wait: Expected `float` <= 60.0"),
        ("POST", "/fetch", {"ack": "never"}, "ack: Invalid enum value 'never'; allowed are 'manual', 'auto'"),
        ("POST", "/messages", {"body": 1, "priority": "urgent"}, "priority: Invalid enum value 'urgent'; allowed are 'high', "),
        ("POST", "/messages", {"body": 1, "dely": 5}, "unknown field `dely`; did you mean `delay`?"),
        ("PUT", "", {"max_attemps": 5}, "unknown field `max_attemps`; did you mean `max_attempts`?"),
        ("PUT", "", {"backoff": {"facter": 5}}, "backoff: Object contains unknown field `facter`; did you mean `factor`?"),
        ("GET", "/messages?limit=0", None, "query: limit: Expected `int` >= 1"),
        ("PATCH", "/messages/asleep", {"due_ms": 1_794_909_038}, "due_ms 1794909038 looks like seconds"),
    ],
)
def test_a_refusal_names_the_option_and_its_values(server: Server, method: str, path: str, body: Any, told: str) -> None:
    server.put("told", {"body": 1, "id": "asleep", "delay": 3600})
    answer = server.call(method, f"/v1/topics/told{path}", body)
    assert answer.status == 400
    assert told in answer.json["error"]["message"]
