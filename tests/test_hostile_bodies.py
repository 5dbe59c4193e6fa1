"""Hostile JSON and BSON: bodies that are none, messages that are none, and odd ones that must come back as they were."""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Iterable
from typing import Any

import bson
import pytest

from tests.harness.hostile_client import BODY, after_each, decent, server
from tests.harness.server_process import Server

__all__ = ["after_each", "server"]


# JSON


LEVELS_MAX = 100  # docs/HTTP.md


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b'{"body":' + opening * depth + b"1" + closing * depth + b"}"


BAD_JSON: dict[str, bytes] = {
    "no UTF-8": b'{"body":"\xff"}',
    "overlong UTF-8": b'{"body":"\xc0\xaf"}',
    "half a pair, as bytes": b'{"body":"\xed\xa0\x80"}',
    "half a pair": b'{"body":"\\ud800"}',
    "half a pair in a name": b'{"body":{"\\udc00":1}}',
    "half a pair in an id": b'{"body":1,"id":"\\ud800"}',
    "half a pair in a header": b'{"body":1,"headers":{"x":"\\ud800"}}',
    "UTF-16": '{"body":1}'.encode("utf-16"),
    "a mark of the byte order": b"\xef\xbb\xbf" + BODY,
    "NaN": b'{"body":NaN}',
    "infinity": b'{"body":[-Infinity]}',
    "a leading zero": b'{"body":01}',
    "a control character": b'{"body":"a\x01"}',
    "an escape that is none": b'{"body":"\\q"}',
    "a comment": b'{"body":1/*x*/}',
    "NUL behind": BODY + b"\0",
    "lists that are a level too deep": nested(b"[", b"]", LEVELS_MAX + 1),
    "objects that are a level too deep": nested(b'{"a":', b"}", LEVELS_MAX + 1),
    "900 levels": nested(b"[", b"]", 900),
    "deep lists": nested(b"[", b"]", 100_000),
    "deep objects": nested(b'{"a":', b"}", 100_000),
    "deep and open": b'{"body":' + b"[" * 500_000,
}
BAD_MESSAGES: dict[str, tuple[bytes, str]] = {
    "a huge due time": (b'{"body":1,"due_ms":' + b"9" * 5_000 + b"}", "INVALID_FIRE_AT"),
    "a huge delay": (b'{"body":1,"delay":1e400}', "INVALID_FIRE_AT"),
    "a huge exponent": (b'{"body":1,"delay":1e' + b"9" * 5_000 + b"}", "INVALID_FIRE_AT"),
    "NUL in an id": (b'{"body":1,"id":"a\\u0000"}', "INVALID_ID"),
    "DEL in an id": (b'{"body":1,"id":"a\\u007f"}', "INVALID_ID"),
    "a right-to-left mark in an id": ('{"body":1,"id":"\u202ea"}'.encode(), "INVALID_ID"),
    "an id of 202 bytes": (json.dumps({"body": 1, "id": "é" * 101}).encode(), "INVALID_ID"),
    "NUL in a header's name": (b'{"body":1,"headers":{"a\\u0000":"b"}}', "INVALID_MESSAGE"),
    "many unknown names": (b"{" + b",".join(b'"k%d":1' % i for i in range(50_000)) + b"}", "INVALID_MESSAGE"),
    "deep headers": (b'{"headers":' + b'{"a":' * 900 + b"1" + b"}" * 901, "INVALID_MESSAGE"),
    "lists of lists": (b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", "INVALID_MESSAGE"),
    "too many headers": (json.dumps({"body": 1, "headers": {str(i): "" for i in range(20_000)}}).encode(), "TOO_LARGE"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none(server: Server, name: str) -> None:
    for kind in ("application/json", "application/x-ndjson"):
        answer = server.call("POST", "/v1/topics/evil/messages", data=BAD_JSON[name], headers={"Content-Type": kind})
        decent(answer)
        assert (answer.status, answer.code) == (400, "INVALID_JSON"), answer
    for path in ("/v1/topics/there/ack", "/v1/topics/there/fetch", "/v1/topics/there/cancel", "/v1/topics/there/dead/requeue"):
        answer = server.call("POST", path, data=BAD_JSON[name])
        decent(answer)
        assert answer.status == 400, answer


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_messages_that_are_none(server: Server, name: str) -> None:
    data, code = BAD_MESSAGES[name]
    answer = server.call("POST", "/v1/topics/evil/messages", data=data)
    decent(answer)
    assert answer.code == code, answer


ODD_BODIES: dict[str, bytes] = {
    "a number beyond all": b"1e999",
    "a number of 100,000 digits": b"9" * 100_000,
    "a number of 2^64": b"[18446744073709551616]",
    "names that come twice": b'{"a":1,"a":2}',
    "NUL in a name": b'{"a\\u0000b":1}',
    "names of operators": b'{"$oid":"x","$date":1,"a.b":{"$":1}}',
    "an empty name": b'{"":{"":[{}]}}',
    "depth": b"[" * LEVELS_MAX + b"]" * LEVELS_MAX,
    "deep objects": b'{"a":' * LEVELS_MAX + b"1" + b"}" * LEVELS_MAX,
    "width": b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(20_000)) + b"}",
}


@pytest.mark.parametrize("name", ODD_BODIES)
def test_odd_bodies_come_back_everywhere_as_they_were(server: Server, name: str) -> None:
    """Or in BSON as near as can be; and nowhere do they break the answer that they are in."""
    body, topic = ODD_BODIES[name], "/v1/topics/odd"
    try:
        server.ok("PUT", topic, {"max_attempts": 1})
        server.ok("POST", f"{topic}/messages", data=b'{"id":"odd","body":%b}' % body)
        assert body in server.call("POST", f"{topic}/groups/a/fetch", {"wait": 10}).data
        packed = server.call("POST", f"{topic}/groups/b/fetch", {"wait": 10}, headers={"Accept": "application/bson"})
        assert [document["id"] for document in bson.decode_all(packed.data)] == ["odd"]
        assert body in server.call("GET", f"{topic}/messages/odd").data
        server.ok("POST", f"{topic}/groups/a/ack", {"acks": ["-odd"], "error": "\0 \U0001f422"})
        assert body in server.call("GET", f"{topic}/dead").data
        assert body in server.call("GET", f"{topic}/dead/export").data
        assert server.ok("GET", f"{topic}/dead/summary")["total"] == 1
        assert server.ok("POST", f"{topic}/dead/requeue", {"filter": {}, "delay": 1_000})["requeued"] == 1
        assert body in server.call("GET", f"{topic}/messages").data
        assert body in server.call("POST", "/v1/command", {"command": "pop", "topic": "odd"}).data
    finally:
        server.ok("DELETE", topic)


# BSON


def element(kind: int, name: bytes, value: bytes) -> bytes:
    return bytes([kind]) + name + b"\0" + value


def document(*elements: bytes) -> bytes:
    body = b"".join(elements) + b"\0"
    return struct.pack("<i", len(body) + 4) + body


def text(data: bytes) -> bytes:
    return struct.pack("<i", len(data) + 1) + data + b"\0"


def nest(depth: int, kind: int) -> bytes:
    out = document()
    for _ in range(depth):
        out = document(element(kind, b"0", out))
    return document(element(kind, b"body", out))


def of(**fields: Any) -> bytes:
    return bytes(bson.encode({"body": 1, **fields}))


GOOD_BSON = bytes(bson.encode({"body": b"x"}))
BAD_BSON: dict[str, bytes] = {
    "4 bytes": b"\x04\0\0\0",
    "zeros": b"\0\0\0\0\0",
    "2^31-1 bytes": b"\xff\xff\xff\x7f" + b"x" * 100,
    "-1 bytes": b"\xff\xff\xff\xff\0",
    "-2^31 bytes": b"\0\0\0\x80\0",
    "no name": struct.pack("<i", 9) + b"\x0aabc\0",
    "a type that is none": document(element(0x20, b"body", b"")),
    "rubbish before the end": struct.pack("<i", 16) + element(10, b"body", b"") + b"\0" * 5,
    "a binary that is too long": document(element(5, b"body", struct.pack("<i", 1_000) + b"\0abc")),
    "a binary of -1 bytes": document(element(5, b"body", struct.pack("<i", -1) + b"\0abc")),
    "a binary of -2^31 bytes": document(element(5, b"body", struct.pack("<i", -(2**31)) + b"\0abc")),
    "an old binary that lies": document(element(5, b"body", struct.pack("<i", 8) + b"\x02" + struct.pack("<i", 100) + b"abcd")),
    "a text that is too long": document(element(2, b"body", struct.pack("<i", 1_000) + b"abc\0")),
    "a text of 0 bytes": document(element(2, b"body", struct.pack("<i", 0) + b"\0")),
    "a text of -5 bytes": document(element(2, b"body", struct.pack("<i", -5) + b"abc\0")),
    "a text without end": document(element(2, b"body", struct.pack("<i", 3) + b"abc")),
    "a text that is no UTF-8": document(element(2, b"body", text(b"\xff\xfe"))),
    "half a pair": document(element(2, b"body", text(b"\xed\xa0\x80"))),
    "an id that is no UTF-8": document(element(2, b"id", text(b"\xff")), element(10, b"body", b"")),
    "a name that is no UTF-8": document(element(3, b"body", document(element(10, b"\xff", b"")))),
    "an inner document that is too long": document(element(3, b"body", struct.pack("<i", 1_000) + b"\0")),
    "an inner document of 4 bytes": document(element(3, b"body", struct.pack("<i", 4))),
    "a truth of 2": document(element(8, b"body", b"\2")),
    "code with a scope that lies": document(element(0x0F, b"body", struct.pack("<i", 100) + text(b"x") + document())),
    "documents that are a level too deep": nest(LEVELS_MAX, 3),
    "lists that are a level too deep": nest(LEVELS_MAX, 4),
    "20,000 documents in each other": nest(20_000, 3),
    "20,000 lists in each other": nest(20_000, 4),
}
BAD_BSON_MESSAGES: dict[str, tuple[bytes, str]] = {
    "nothing": (document(), "INVALID_MESSAGE"),
    "no body": (bson.encode({"id": "a"}), "INVALID_MESSAGE"),
    "decimal128": (of(body={"a": bson.Decimal128("1.5")}), "INVALID_MESSAGE"),
    "code": (of(body=bson.Code("x")), "INVALID_MESSAGE"),
    "code with a scope": (of(body=[bson.Code("x", {"a": 1})]), "INVALID_MESSAGE"),
    "a date beyond all": (document(element(9, b"body", struct.pack("<q", 2**63 - 1))), "INVALID_MESSAGE"),
    "an object id": (of(body=bson.ObjectId()), "INVALID_MESSAGE"),
    "a regular expression that is none": (of(body=bson.Regex("(")), "INVALID_MESSAGE"),
    "the least of all": (of(body=bson.MinKey()), "INVALID_MESSAGE"),
    "not a number": (of(body=[float("nan")]), "INVALID_MESSAGE"),
    "an unknown name": (of(evil=1), "INVALID_MESSAGE"),
    "an id of bytes": (of(id=b"a"), "INVALID_ID"),
    "an id with NUL": (document(element(2, b"id", text(b"a\0b")), element(10, b"body", b"")), "INVALID_ID"),
    "a delay that is no number": (of(delay=float("nan")), "INVALID_FIRE_AT"),
    "a delay without end": (of(delay=float("inf")), "INVALID_FIRE_AT"),
    "a delay of 2^62": (of(delay=bson.Int64(2**62)), "INVALID_FIRE_AT"),
    "a due time of -2^63": (of(due_ms=bson.Int64(-(2**63))), "INVALID_FIRE_AT"),
    "a due time as a date": (of(due_ms=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)), "INVALID_FIRE_AT"),
    "a due time as a truth": (of(due_ms=True), "INVALID_FIRE_AT"),
    "ttr without end": (of(ttr=float("inf")), "INVALID_MESSAGE"),
    "ttr as decimal": (of(ttr=bson.Decimal128("1")), "INVALID_MESSAGE"),
    "headers of bytes": (of(headers={"a": b"x"}), "INVALID_MESSAGE"),
    "headers as a list": (of(headers=["a"]), "INVALID_MESSAGE"),
    "a priority as a document": (of(priority={}), "INVALID_MESSAGE"),
    "an end of -2^63": (of(expires_ms=bson.Int64(-(2**63))), "INVALID_MESSAGE"),
}


def in_a_crowd(bad: bytes) -> Iterable[tuple[bytes, int]]:
    """A document alone, and among many good ones that arrays read."""
    return (bad, 0), (GOOD_BSON * 60 + bad + GOOD_BSON * 60, 60)


@pytest.mark.parametrize("name", BAD_BSON)
def test_bson_that_is_none(server: Server, name: str) -> None:
    for data, index in in_a_crowd(BAD_BSON[name]):
        answer = server.call("POST", "/v1/topics/evil/messages", data=data, headers={"Content-Type": "application/bson"})
        decent(answer)
        assert (answer.status, answer.code, answer.json["error"]["index"]) == (400, "INVALID_BSON", index), answer


@pytest.mark.parametrize("name", BAD_BSON_MESSAGES)
def test_bson_that_is_no_message(server: Server, name: str) -> None:
    bad, code = BAD_BSON_MESSAGES[name]
    for data, index in in_a_crowd(bad):
        answer = server.call("POST", "/v1/topics/evil/messages", data=data, headers={"Content-Type": "application/bson"})
        decent(answer)
        assert (answer.status, answer.code, answer.json["error"]["index"]) == (400, code, index), answer
        assert "np." not in answer.json["error"]["message"]


def test_bson_of_some_depth_is_a_message(server: Server) -> None:
    for kind in (3, 4):
        data = nest(LEVELS_MAX - 1, kind)  # the innermost one is a level, too
        answer = server.call("POST", "/v1/topics/taken/messages", data=data, headers={"Content-Type": "application/bson"})
        assert answer.status == 201, answer
