"""Many messages at once, in and out, are read and written as one by one: same columns, same refusals, same answers.

One by one is the simple way (the libraries); at once is the fast one (arrays). Nothing here asks how fast.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bson
import msgspec
import numpy as np
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.int64 import Int64
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.harness.codec import decode_batch
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError
from turtlemq.index.validate import check_batch
from turtlemq.model import BATCH_MESSAGES_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.segment.buffers import Buffer
from turtlemq.server.errors import InvalidBson
from turtlemq.server.incoming import bson_messages, json_messages
from turtlemq.server.incoming.batches import DueRules, decode_slices
from turtlemq.server.incoming.columns import Columns
from turtlemq.server.media_types import BSON, JSON, NDJSON
from turtlemq.server.outgoing import fetch, messages

NOW = 1_790_000_000_000
QUICKLY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain(value: Any) -> Any:
    """A column as a list. All NaN are equal in it."""
    found = value.tolist() if isinstance(value, np.ndarray) else value
    return ["nan" if isinstance(item, float) and item != item else item for item in found] if isinstance(found, list) else found


def columns_of(found: Columns | Batch) -> dict[str, Any]:
    columns = {field.name: plain(getattr(found, field.name)) for field in fields(found)}
    flags = columns["flags"]
    return columns | {"flags": [flags] * len(found) if isinstance(flags, int) else flags}


def outcome(function: Callable[[], Any]) -> Any:
    """The result, or the refusal."""
    try:
        return columns_of(function())
    except TurtleError as error:
        return type(error), str(error), error.details


# BSON in

numbers = st.one_of(
    st.floats(0, 1e6),
    st.sampled_from([0, 5, Int64(7), 1 << 40, -1, 1e12, float("nan"), float("inf"), 0.0005, 2.0005, True, None, "x"]),
)
times = st.one_of(
    st.integers(0, 1 << 42).map(Int64), st.sampled_from([5, -1, (1 << 63) - 1, 1.0, 2.5, True, None, bson.Decimal128("1"), "x"])
)
texts = st.one_of(st.text(max_size=8), st.sampled_from(["a", "order-1", "é", "a\0b", '"\\\n', ""]))
bodies = st.one_of(
    st.binary(max_size=20),
    texts,
    st.sampled_from(
        [b"x" * 30, None, 1, 1.5, True, {"a": [1, {"b": None}]}, [], Int64(1 << 60), float("nan"), bson.ObjectId(b"x" * 12)]
        + [bson.Binary(b"x" * 16, subtype) for subtype in (2, 3, 4, 5, 128)]
        + [bson.Code("x"), bson.Regex("x"), bson.MinKey()]
    ),
)
anything: dict[str, st.SearchStrategy[Any]] = {
    "id": st.one_of(texts, st.sampled_from([None, 5, b"x", bson.Code("x")])),
    "delay": numbers,
    "due_ms": times,
    "ttr": numbers,
    "priority": st.sampled_from(["high", "normal", "low", "urgent", None, 1]),
    "expires_ms": times,
    "headers": st.sampled_from([{}, {"a": "b"}, None, {"a": 1}, {"$ref": "a", "$id": "b"}, "x"]),
    "body": bodies,
    "more": st.just(1),
}
GOOD: dict[str, Callable[[random.Random], Any]] = {
    "id": lambda r: "".join(r.choices("abcé", k=r.randint(1, 6))),
    "delay": lambda r: r.choice([1.5, 3, Int64(4)]),
    "due_ms": lambda r: r.choice([5, Int64(NOW)]),
    "ttr": lambda r: r.choice([0.0001, 60, Int64(4)]),
    "priority": lambda r: r.choice(["high", "normal", "low"]),
    "expires_ms": lambda r: Int64(NOW),
    "headers": lambda r: r.choice([None, {"a": "b"}]),
    "body": lambda r: r.choice([r.randbytes(5), r.randbytes(r.randint(0, 40)), "text", 'ü"\\\n']),
}


def good_documents(seed: int, names: list[list[str]], count: int) -> list[bytes]:
    """Many messages of a few layouts, in any order, with nothing wrong."""
    r = random.Random(seed)
    return [bson.encode({name: GOOD[name](r) for name in r.choice(names)}) for _ in range(count)]


layouts = st.lists(
    st.permutations(list(GOOD)).flatmap(
        lambda names: st.integers(0, len(names)).map(lambda n: [*(x for x in names[:n] if x != "body"), "body"])
    ),
    min_size=1,
    max_size=3,
)


def agree(data: bytes) -> Any:
    """Arrays and library say the same of these bytes. Returns that result."""

    def read(layouts: int) -> Columns:
        return bson_messages.columns(data, bson_messages.documents(data), layouts=layouts)

    fast, slow = outcome(lambda: read(bson_messages.LAYOUTS_MAX)), outcome(lambda: read(0))
    assert fast == slow
    assert (isinstance(fast, tuple) and fast[0] is InvalidBson) == (not is_bson(data))
    return fast


def is_bson(data: bytes) -> bool:
    """Are these documents, one behind the other, to the end?"""
    try:
        bson.decode_all(data, CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS))
    except (bson.errors.BSONError, ValueError, OverflowError):
        return False
    return True


@QUICKLY
@given(seed=st.integers(), names=layouts, count=st.integers(1, 200))
def test_good_documents_are_read_at_once_as_one_by_one(seed: int, names: list[list[str]], count: int) -> None:
    found = agree(b"".join(good_documents(seed, names, count)))
    assert isinstance(found, dict)
    assert len(found["bodies"]) == count


@QUICKLY
@given(
    seed=st.integers(),
    names=layouts,
    odd=st.lists(st.tuples(st.integers(0, 80), st.fixed_dictionaries({}, optional=anything)), max_size=3),
)
def test_odd_documents_are_refused_at_once_as_one_by_one(
    seed: int, names: list[list[str]], odd: list[tuple[int, dict[str, Any]]]
) -> None:
    documents = good_documents(seed, names, 80)
    for at, message in odd:
        documents.insert(at, bson.encode(message))
    agree(b"".join(documents))


@QUICKLY
@given(
    seed=st.integers(),
    names=layouts,
    hits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 2, 5, 0x10, 0x7F, 0x80, 0xFF])),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(0, 12),
)
def test_damaged_bytes_are_refused_at_once_as_one_by_one(
    seed: int, names: list[list[str]], hits: list[tuple[float, int]], cut: int
) -> None:
    data = bytearray(b"".join(good_documents(seed, names, 60)))
    for share, value in hits:
        data[int(share * len(data))] = value
    agree(bytes(data[: len(data) - cut]))


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_of_a_document_among_many_may_be_wrong(seed: int) -> None:
    """Each byte in turn takes values that mean something elsewhere."""
    names = [["id", "delay", "body"], ["due_ms", "body", "priority"], ["body", "ttr", "id", "expires_ms"]][seed % 3]
    documents = good_documents(seed, [names], 60)
    at = sum(map(len, documents[:30]))
    data = b"".join(documents)
    for i in range(at, at + len(documents[30])):
        for value in {0, 1, 2, 5, 0x0A, 0x10, 0x12, 0xFF, data[i] ^ 1}:
            agree(data[:i] + bytes([value]) + data[i + 1 :])


def crafted(id_size: int, id_: bytes, body_size: int, body: bytes, end: bytes = b"\0", longer: int = 0) -> bytes:
    """A document whose parts say anything of themselves."""
    sizes = [size.to_bytes(4, "little", signed=True) for size in (id_size, body_size)]
    rest = b"\x02id\0" + sizes[0] + id_ + b"\x05body\0" + sizes[1] + body + end
    return (len(rest) + 4 + longer).to_bytes(4, "little") + rest


@pytest.mark.parametrize(
    ("document", "good"),
    [
        (crafted(3, b"ab\0", 2, b"\0xy"), True),
        (crafted(1, b"\0", 0, b"\0"), True),
        (crafted(3, b"\0\0\0", 0, b"\0"), True),
        (crafted(0, b"", 2, b"\0xy"), False),  # a text has a NUL at least
        (crafted(-1, b"ab\0", 2, b"\0xy"), False),
        (crafted(3, b"abc", 2, b"\0xy"), False),
        (crafted(2, b"ab\0", 2, b"\0xy"), False),
        (crafted(1 << 30, b"ab\0", 2, b"\0xy"), False),
        (crafted(3, b"ab\0", -1, b"\0xy"), False),
        (crafted(3, b"ab\0", 3, b"\0xy"), False),
        (crafted(3, b"ab\0", 1, b"\0xy"), False),
        (crafted(3, b"ab\0", 2, b"\0xy", b""), False),
        (crafted(3, b"ab\0", 2, b"\0xy", b"\0\0"), False),
        (crafted(3, b"ab\0", 2, b"\0xy", b"\x01"), False),
        (crafted(3, b"ab\0", 2, b"\x80xy"), True),
        (crafted(3, b"ab\0", 6, b"\2\2\0\0\0xy"), True),
        (crafted(3, b"a\xff\0", 2, b"\0xy"), False),
        (crafted(3, b"ab\0", 2, b"\0xy", longer=1), False),
        (crafted(3, b"ab\0", 2, b"\0xy", longer=-1), False),
        (b"\0\0\0\0\0", False),
        (b"\4\0\0\0", False),
        (b"\xff\xff\xff\xff\0", False),
        (b"\x7f\0\0", False),
    ],
)
@pytest.mark.parametrize("at", [0, 30, 60])
def test_sizes_are_checked_at_once_as_one_by_one(document: bytes, good: bool, at: int) -> None:
    others = [crafted(3, b"cd\0", 2, b"\0uv")] * 60
    found = agree(b"".join((*others[:at], document, *others[at:])))
    assert isinstance(found, dict) == good


def test_arrays_read_what_they_are_made_for() -> None:
    """Otherwise all of the above compares the library with itself."""

    def never(*_: Any) -> Any:
        raise AssertionError("this was for arrays")

    for names in (
        ["body"],
        ["id", "body"],
        ["id", "delay", "body"],
        ["body", "due_ms"],
        ["priority", "ttr", "expires_ms", "body"],
    ):
        data = b"".join(
            bson.encode(
                {
                    name: 7
                    if name == "due_ms"
                    else {"id": "é", "body": b"x" * (i % 9), "delay": 1.5, "ttr": 3, "priority": "low", "expires_ms": Int64(9)}[
                        name
                    ]
                    for name in names
                }
            )
            for i in range(100)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bson_messages, "_by_library", never)
            bson_messages.columns(data, bson_messages.documents(data))


# Both ways in

BAD: list[tuple[dict[str, Any], str]] = [
    ({"body": "x", "delay": -1}, "INVALID_FIRE_AT"),
    ({"body": "x", "delay": 1e12}, "INVALID_FIRE_AT"),
    ({"body": "x", "delay": True}, "INVALID_FIRE_AT"),
    ({"body": "x", "delay": "1"}, "INVALID_FIRE_AT"),
    ({"body": "x", "delay": 1, "due_ms": 1}, "INVALID_FIRE_AT"),
    ({"body": "x", "due_ms": 1.5}, "INVALID_FIRE_AT"),
    ({"body": "x", "due_ms": True}, "INVALID_FIRE_AT"),
    ({"body": "x", "id": 5}, "INVALID_ID"),
    ({"body": "x", "ttr": 0}, "INVALID_MESSAGE"),
    ({"body": "x", "ttr": 1e9}, "INVALID_MESSAGE"),
    ({"body": "x", "priority": "urgent"}, "INVALID_MESSAGE"),
    ({"body": "x", "headers": {"a": 1}}, "INVALID_MESSAGE"),
    ({"body": "x", "more": 1}, "INVALID_MESSAGE"),
    ({"id": "x"}, "INVALID_MESSAGE"),
]


def encoded(batch: list[dict[str, Any]], kind: str) -> bytes:
    if kind == BSON:
        return b"".join(map(bson.encode, batch))
    if kind == NDJSON:
        return b"\n".join(map(msgspec.json.encode, batch))
    return msgspec.json.encode({"messages": batch})


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
@pytest.mark.parametrize(("bad", "code"), BAD, ids=str)
def test_the_first_bad_message_is_named_wherever_it_stands(bad: dict[str, Any], code: str, kind: str) -> None:
    for count in (1, 100):
        for at in {0, count // 2, count - 1}:
            batch: list[dict[str, Any]] = [{"id": f"a{i}", "delay": 1.5, "body": "x"} for i in range(count)]
            batch[at:] = [bad] * (count - at)
            with pytest.raises(TurtleError) as caught:
                decode_batch(encoded(batch, kind), kind, NOW, DueRules())
            assert (caught.value.code, caught.value.details) == (code, {"index": at})


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
@pytest.mark.parametrize("count", [1, 30, 100])
def test_due_times_are_those_of_the_clock_and_of_the_rules(kind: str, count: int) -> None:
    delays = [0, 0.0004, 0.0005, 0.0015, 1.0005, 3, 1e6][:count]
    batch: list[dict[str, Any]] = [{"delay": delays[i % len(delays)], "body": "x"} for i in range(count)]
    found = decode_batch(encoded(batch, kind), kind, NOW, DueRules())
    assert plain(found.due_ms) == [NOW + round(m["delay"] * 1000) for m in batch]
    assert plain(decode_batch(encoded([{"body": "x"}] * count, kind), kind, NOW, DueRules()).due_ms) == [NOW] * count
    ways: list[dict[str, Any]] = [{"body": "x"}, {"body": "x", "delay": 1}, {"body": "x", "due_ms": 10**11}]
    mixed = [ways[i % 3] for i in range(count)]
    assert plain(decode_batch(encoded(mixed, kind), kind, NOW, DueRules()).due_ms) == [
        [NOW, NOW + 1000, 10**11][i % 3] for i in range(count)
    ]
    late = [{"body": "x", "due_ms": NOW}] * (count - 1) + [{"body": "x", "due_ms": NOW - 1}]
    for batch, rules, code in (
        (late, DueRules(reject_past=True), "INVALID_FIRE_AT"),
        ([*late[:-1], {"body": "x", "due_ms": NOW + 1001}], DueRules(max_delay_ms=1000), "EXCEEDS_MAX_DELAY"),
    ):
        with pytest.raises(TurtleError) as caught:
            decode_batch(encoded(batch, kind), kind, NOW, rules)
        assert (caught.value.code, caught.value.details) == (code, {"index": count - 1})


@pytest.mark.parametrize("kind", [JSON, NDJSON])
@pytest.mark.parametrize("count", [1, 100])
def test_times_beyond_all_numbers_are_left_to_be_refused(kind: str, count: int) -> None:
    for name, due_ms in (("due_ms", 10**30), ("due_ms", -(10**30)), ("expires_ms", 10**30), ("due_ms", 1 << 63)):
        batch: list[dict[str, Any]] = [{"body": 1, name: NOW}] * (count - 1) + [{"body": 1, name: due_ms}]
        text = json.dumps({"messages": batch}) if kind == JSON else "\n".join(map(json.dumps, batch))
        with pytest.raises(TurtleError) as caught:
            check_batch(decode_batch(text.encode(), kind, NOW, DueRules()))
        assert caught.value.code == ("INVALID_FIRE_AT" if name == "due_ms" else "INVALID_MESSAGE")
        assert caught.value.details == {"index": count - 1}


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
@pytest.mark.parametrize("count", [1, 2, 30, 100])
def test_due_times_may_be_texts(kind: str, count: int) -> None:
    ways: list[dict[str, Any]] = [{"delay": "90s"}, {"delay": "1.5h"}, {"due": "2030-01-01T02:00:00.0005+02:00"}, {"delay": "3d"}]
    batch = [{"body": "x"} | ways[i % 4] for i in range(count)]
    wanted = [(NOW + 90_000, NOW + 5_400_000, 1_893_456_000_001, NOW + 259_200_000)[i % 4] for i in range(count)]
    for _ in range(2):  # the second time, a shape may be cached
        assert plain(decode_batch(encoded(batch, kind), kind, NOW, DueRules()).due_ms) == wanted
    same = [{"body": "x", "delay": "15m"}] * count
    assert plain(decode_batch(encoded(same, kind), kind, NOW, DueRules()).due_ms) == [NOW + 900_000] * count


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
@pytest.mark.parametrize("count", [1, 30, 100])
@pytest.mark.parametrize(
    ("when", "told"),
    [
        ({"due_ms": 1_794_909_038}, "due_ms 1794909038 looks like seconds; it is in milliseconds: 1794909038000"),
        ({"due_ms": 10**11 - 1}, "looks like seconds"),
        ({"due": "2030-01-01T00:00:00"}, "due is a time with its zone"),
        ({"due": "tomorrow"}, "due is a time with its zone"),
        ({"due": "2030-01-01T00:00:00Z", "delay": 1}, "one of delay, due and due_ms, not several"),
        ({"due": "2030-01-01T00:00:00Z", "due_ms": NOW}, "one of delay, due and due_ms, not several"),
        ({"delay": "5 minutes"}, 'delay is a number of seconds, 0 or more, or a text such as "90s"'),
        ({"delay": "5"}, 'delay is a number of seconds, 0 or more, or a text such as "90s"'),
        ({"delay": "999999999999w"}, 'delay is a number of seconds, 0 or more, or a text such as "90s"'),
    ],
)
def test_a_due_time_that_is_none_is_refused(kind: str, count: int, when: dict[str, Any], told: str) -> None:
    batch = [{"body": "x", "due_ms": NOW}] * (count - 1) + [{"body": "x"} | when]
    with pytest.raises(TurtleError) as caught:
        decode_batch(encoded(batch, kind), kind, NOW, DueRules())
    assert caught.value.code == "INVALID_FIRE_AT"
    assert told in str(caught.value)
    assert caught.value.details in ({"index": count - 1}, {})


# By shape


def values() -> st.SearchStrategy[Any]:
    awkward = st.sampled_from(['},{"id":', '},{"body":', "}\n{", "]}", "\\", '"', '}, {"b', "\n"])
    leaves = st.one_of(st.none(), st.integers(), awkward, st.text(max_size=5))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "body"]), inner), max_leaves=6
    )


@QUICKLY
@given(
    names=st.permutations(["id", "delay", "due_ms", "body"]).flatmap(lambda each: st.integers(1, 4).map(lambda n: each[:n])),
    odd=st.none() | st.tuples(st.integers(0, 30), st.sampled_from(["id", "delay", "due_ms", "body", "ttr", "more"]), values()),
    kind=st.sampled_from([JSON, NDJSON]),
    count=st.integers(0, 30),
    hit=st.none() | st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(list(b'{}[],"\n\\ a\xff'))),
)
def test_messages_of_a_known_shape_are_read_as_any_others(
    names: list[str], odd: tuple[int, str, Any] | None, kind: str, count: int, hit: tuple[float, int] | None
) -> None:
    values = {"id": "a", "delay": 1.5, "due_ms": NOW, "body": {"x": [1, "y"]}}
    batch: list[dict[str, Any]] = [{name: values[name] for name in names} for _ in range(count)]
    if odd is not None and odd[0] < count:
        batch[odd[0]][odd[1]] = odd[2]
    data = bytearray(encoded(batch, kind))
    if hit is not None and data:
        data[int(hit[0] * len(data))] = hit[1]

    def read() -> Any:
        return outcome(lambda: decode_batch(bytes(data), kind, NOW, DueRules()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_messages, "_shapes_seen", {})
        unknown, known = read(), read()
        assert known == unknown
        for shape in json_messages._SHAPES.values():
            patch.setattr(json_messages, "_shapes_seen", {name.encode(): shape for name in values})
            assert read() == unknown


@pytest.mark.parametrize(
    "data", [b'[{"body":1}]', b'{"body":1}\n{"body":2}', '{"body":"é"}'.encode(), b'[[{"body":1}]]', b'{"messages":[]}']
)
@pytest.mark.parametrize("kind", [JSON, NDJSON])
def test_a_known_shape_makes_no_request_of_what_is_none(data: bytes, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_messages, "_shapes_seen", {})
    unknown = outcome(lambda: decode_batch(data, kind, NOW, DueRules()))
    monkeypatch.setattr(json_messages, "_shapes_seen", {b"body": json_messages._SHAPES[()]})
    assert outcome(lambda: decode_batch(data, kind, NOW, DueRules())) == unknown


def test_the_shape_of_what_comes_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_messages, "_shapes_seen", {})
    decode_batch(encoded([{"id": "a", "due_ms": NOW, "body": 1}] * 3, JSON), JSON, NOW, DueRules())
    decode_batch(encoded([{"body": 1, "delay": 2}] * 3, NDJSON), NDJSON, NOW, DueRules())
    assert {name: shape.names for name, shape in json_messages._shapes_seen.items()} == {
        b"id": ("id", "due_ms"),
        b"body": ("delay",),
    }
    monkeypatch.setattr(json_messages, "columns_of", None)  # the long way is not gone again
    for kind in (JSON, NDJSON):
        assert len(decode_batch(encoded([{"id": "b", "due_ms": NOW, "body": {}}] * 30, kind), kind, NOW, DueRules())) == 30


# In slices


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_messages, "_SLICE_BYTES_MIN", 40)
    monkeypatch.setattr(json_messages, "_SLICE_BYTES_MAX", 100)
    monkeypatch.setattr(json_messages, "_SLICED_BYTES", 50)
    monkeypatch.setattr(json_messages, "SLICE_MESSAGES", 3)


def whole(data: bytes, kind: str) -> Any:
    """One by one, without slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_messages, "_SLICED_BYTES", 1 << 40)
        patch.setattr(json_messages, "SLICE_MESSAGES", 1 << 40)
        return outcome(lambda: decode_batch(data, kind, NOW, DueRules()))


@QUICKLY
@given(
    batch=st.lists(st.fixed_dictionaries({}, optional={"id": st.sampled_from(["a", "b"]), "body": values()}), max_size=30),
    layout=st.sampled_from([(None, (",", ":")), (None, (", ", ": ")), (1, (" ,", " : "))]),
    kind=st.sampled_from([JSON, NDJSON]),
    hit=st.none() | st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(list(b'{}[],"\n\\ a\xff'))),
)
@example(batch=[{"body": '},{"body":1'}] * 20, layout=(None, (",", ":")), kind=JSON, hit=None)
@example(batch=[{"body": [{"body": 1}, {"body": 2}] * 9}] * 5, layout=(None, (",", ":")), kind=JSON, hit=None)
def test_slices_of_json_make_the_same_batch(
    small_slices: None, batch: list[dict[str, Any]], layout: Any, kind: str, hit: tuple[float, int] | None
) -> None:
    indent, separators = layout
    if kind == JSON:
        text = json.dumps({"messages": batch}, indent=indent, separators=separators)
    else:
        text = "\n".join(json.dumps(message, separators=separators) for message in batch) + "\n"
    data = bytearray(text.encode())
    if hit is not None and data:
        data[int(hit[0] * len(data))] = hit[1]
    cut = outcome(lambda: decode_batch(bytes(data), kind, NOW, DueRules()))
    at_once = whole(bytes(data), kind)
    if isinstance(at_once, dict) or isinstance(cut, dict):
        assert cut == at_once
    else:  # a slice's refusal may stand before that of the whole text
        assert cut[2].get("index", -1) <= at_once[2].get("index", 1 << 40)


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
def test_a_big_batch_is_read_in_steps_and_is_one_batch(kind: str) -> None:
    batch: list[dict[str, Any]] = [{"id": f"order-{i}", "delay": i % 9, "body": "x" * 100} for i in range(11_000)]
    data, steps = encoded(batch, kind), 0
    reading = decode_slices(data, kind, NOW, DueRules())
    found: Batch | None = None
    while found is None:
        try:
            next(reading)
            steps += 1
        except StopIteration as done:
            found = done.value
    assert steps >= 4
    assert found.ids == [m["id"] for m in batch]
    assert found.bodies == [b'"%b"' % (b"x" * 100)] * len(batch)
    assert plain(found.due_ms) == [NOW + m["delay"] * 1000 for m in batch]
    batch[-1]["delay"] = -1
    with pytest.raises(TurtleError) as caught:
        decode_batch(encoded(batch, kind), kind, NOW, DueRules())
    assert caught.value.details == {"index": len(batch) - 1}


@pytest.mark.parametrize("kind", [JSON, NDJSON, BSON])
def test_a_batch_that_is_too_long_is_refused(kind: str) -> None:
    for message in ({"body": 1}, {"body": "x" * 20}):
        with pytest.raises(TurtleError) as caught:
            decode_batch(encoded([message] * (BATCH_MESSAGES_MAX + 1), kind), kind, NOW, DueRules())
        assert caught.value.code == "TOO_LARGE"


def test_text_that_is_no_utf8_is_refused() -> None:
    for data in (b'{"body":"\xff"}', b'{"messages":[{"body":"\xc3"}]}', b'{"body":{"\xed\xa0\x80":1}}'):
        for kind in (JSON, NDJSON):
            with pytest.raises(TurtleError) as caught:
                decode_batch(data, kind, NOW, DueRules())
            assert caught.value.code == "INVALID_JSON"


# Out

JSON_BODIES = [
    "1",
    "-0.5",
    "null",
    '"text"',
    '"q\\"\\n\\u00e9é"',
    '{"a": [1, {"b": null}]}',
    "[]",
    "1e999",
    str(1 << 70),
    '{"\\u0000":1}',
    '""',
]


def stored(engine: Engine, r: random.Random, count: int, mixed: str) -> Reserved:
    """Ready messages of all kinds, some failed before, in a consumer's hands."""
    engine.move_group("t", "g", "earliest", NOW)
    spread = r.choice([3, 60, 5000])
    is_json = [("j" in mixed) and ("b" not in mixed or r.random() < 0.5) for _ in range(count)]
    batch = Batch(
        bodies=[
            (r.choice(JSON_BODIES).encode() if r.random() < 0.5 else b'{"k":"%b"}' % (b"x" * r.randrange(spread)))
            if js
            else r.randbytes(r.randrange(spread))
            for js in is_json
        ],
        due_ms=[r.choice([0, 7, 12345, NOW, NOW + 2]) if "d" in mixed else NOW for _ in range(count)],
        ids=None
        if "s" in mixed
        else [f"{r.choice(['', 'é', chr(34), chr(92)]) if 'q' in mixed else ''}order-{i}" for i in range(count)],
        flags=[(f.JSON if js else 0) | (r.randrange(3) if "p" in mixed else 0) for js in is_json],
        expires_ms=[r.choice([None, NOW + 10**9]) for _ in range(count)] if "e" in mixed else None,
        headers=[r.choice([None, {"a": "b"}, {"é": '"'}]) for _ in range(count)] if "h" in mixed else None,
    )
    engine.topic("t", create=True).stores.index.append(batch, NOW)
    engine.tick(NOW + 5)
    if "r" in mixed:
        ids = engine.reserve("t", "g", count // 2, NOW + 5).ids
        engine.ack("t", "g", [f"-{id_}" for id_ in ids], NOW + 6, retry_delay_ms=r.choice([1, 10**7]))
        engine.tick(NOW + 10**7 + 100)
    return engine.reserve("t", "g", count, NOW + 10**7 + 200, ttr_ms=r.choice([1, 10**6]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(),
    count=st.sampled_from([1, 63, 64, 100, 300]),
    mixed=st.sets(st.sampled_from("jbdsqpehr")).map(lambda letters: "".join(sorted(letters))),
    piece=st.sampled_from([1, 1_000, 10_000, fetch.PIECE_BYTES]),
)
@example(seed=1, count=300, mixed="", piece=fetch.PIECE_BYTES)
@example(seed=2, count=300, mixed="j", piece=fetch.PIECE_BYTES)
@example(seed=3, count=300, mixed="bj", piece=10_000)
@example(seed=4, count=300, mixed="bdehjpqr", piece=10_000)
def test_messages_are_written_at_once_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, mixed: str, piece: int
) -> None:
    engine = Engine.open(tmp_path_factory.mktemp("out"))
    try:
        with patch.object(fetch, "PIECE_BYTES", piece):
            _assert_written_alike(engine, seed, count, mixed)
    finally:
        engine.close()


def _assert_written_alike(engine: Engine, seed: int, count: int, mixed: str) -> None:
    out = stored(engine, random.Random(seed), count, mixed)
    assert len(out)
    one_by_one = messages.delivered(out)
    at_once = b"".join(fetch.fetched_json(out))
    assert at_once.decode()
    numbers = {"parse_int": str, "parse_float": str}
    expected = msgspec.json.encode({"messages": one_by_one, "lease": out.lease})
    assert json.loads(at_once, **numbers) == json.loads(expected, **numbers)  # type: ignore[arg-type]
    assert bson.decode_all(b"".join(fetch.fetched_bson(out))) == bson.decode_all(messages.as_bson(one_by_one))


@pytest.mark.parametrize("encode", [fetch.fetched_json, fetch.fetched_bson])
def test_no_step_of_a_large_answer_is_long(tmp_path: Path, encode: Callable[[Reserved], list[Buffer]]) -> None:
    """A single copy of all of it, on whichever thread, would hold the event loop."""
    engine = Engine.open(tmp_path)
    engine.submit("t", Batch([b'"%b"' % (b"x" * 3_000)] * 5_000, [NOW] * 5_000, flags=f.JSON), NOW)
    while not engine.groups("t") or engine.stats("t").sleep:
        engine.move_group("t", "g", "earliest", NOW)
        engine.tick(NOW)
    out = engine.reserve("t", "g", 5_000, NOW)
    assert len(out) == 5_000
    pieces = encode(out)
    assert sum(map(len, pieces)) > 15_000_000
    assert max(map(len, pieces)) < 2 * fetch.PIECE_BYTES
    engine.close()


def test_nothing_is_written_as_nothing() -> None:
    assert (b"".join(fetch.fetched_json(Reserved())), b"".join(fetch.fetched_bson(Reserved()))) == (b'{"messages":[]}', b"")


@pytest.mark.parametrize("kind", [JSON, BSON])
def test_what_goes_in_comes_out(kind: str, tmp_path: Path) -> None:
    """Through the files, with duplicates among new ones, as bytes and as values."""
    values: list[Any] = ["text", 'é"\\\n', {"a": [1, None, {"b": 2.5}]}, 7, None, True, [], ""]
    sent: list[dict[str, Any]] = [{"id": f"m{i}", "body": values[i % len(values)], "delay": 0} for i in range(200)]
    if kind == BSON:
        sent += [{"id": f"b{i}", "body": bytes([i]) * i, "due_ms": Int64(NOW)} for i in range(100)]
    engine = Engine.open(tmp_path)
    engine.move_group("t", "g", "earliest", NOW)
    for part in (sent[:90], sent[:95], sent):
        engine.submit("t", decode_batch(encoded(part, kind), kind, NOW, DueRules()), NOW)
    engine.tick(NOW)
    out = engine.reserve("t", "g", len(sent), NOW)
    got = {m["id"]: m["body"] for m in bson.decode_all(b"".join(fetch.fetched_bson(out)))}
    assert got == {m["id"]: m["body"] for m in sent}
    texts = {m["id"]: m.get("body") for m in json.loads(b"".join(fetch.fetched_json(out)))["messages"]}
    assert {id_: body for id_, body in texts.items() if id_[0] == "m"} == {m["id"]: m["body"] for m in sent if m["id"][0] == "m"}
    engine.close()
