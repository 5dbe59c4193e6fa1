"""The byte layout of documents, ids and file headers, and that arrays and loops write the same bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import bson
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turtlemq import small_batches
from turtlemq.errors import Corrupt, NewerFormat, NotOurs, TooLarge
from turtlemq.model import DUE_MS_MAX, ID_BYTES_MAX, ORDINAL_BITS, SEQ_COUNTER_BITS, SEQ_MAX, TTR_MS_MAX, Receipt
from turtlemq.segment import format as f
from turtlemq.segment.ids import SERVER_ID_BYTES, hash_id, hash_seqs, server_id_rows, server_ids, server_seq
from turtlemq.segment.scan import Verdict, scan

steady = settings(derandomize=True, deadline=None, max_examples=100, database=None)

# ── one document, byte by byte ───────────────────────────────────────────────────────────────────────────


def test_a_document_is_these_bytes() -> None:
    data, lengths = f.encode([b"a"], [b"hi"], [1_700_000_000_000], 5, 60_000, [f.JSON | f.BARRIER])
    behind_the_checksum = (
        (b"\x09due\0" + struct.pack("<q", 1_700_000_000_000) + b"\x12seq\0" + struct.pack("<q", 5))
        + b"\x12opt\0\x60\xea\x00\x00\x14\x00\x00\x00"
        + (b"\x02id\0\x02\0\0\0a\0" + b"\x05body\0\x02\0\0\0\0hi" + b"\0")
    )
    checksum = struct.pack("<I", zlib.crc32(behind_the_checksum))
    expected = struct.pack("<i", 76) + b"\x10crc\0" + checksum + behind_the_checksum
    assert bytes(data) == expected
    assert list(lengths) == [76] == [len(expected)]


def test_the_fixed_fields_stand_at_these_offsets() -> None:
    offsets = (f.AT_LEN, f.AT_CRC, f.AT_DUE, f.AT_SEQ, f.AT_TTR, f.AT_FLAGS, f.AT_IDLEN, f.PREFIX_BYTES)
    assert offsets == (0, 9, 18, 31, 44, 48, 56, 60)
    assert f.CHECKED_FROM == 13


def test_no_two_flags_share_a_bit() -> None:
    single = [f.JSON, f.CONTINUES, f.BARRIER, f.TOMBSTONE, f.REPLACES, f.SERVER_ID, f.EXPIRES, f.HEADERS, f.MOVED, f.HANDOFF]
    assert sum(single) | f.PRIORITY == f.PRIORITY + sum(single)
    assert all(flag & (flag - 1) == 0 for flag in single)


# ── fields are read as written ───────────────────────────────────────────────────────────────────────────

printable = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=50)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
header_names = st.one_of(
    st.sampled_from(["$ref", "$id", "$db", "_id", "a.b", "id", "body"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=10),
)
seqs = st.integers(0, SEQ_MAX - 1000)
dues = st.integers(0, DUE_MS_MAX)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    kills = draw(st.sampled_from([0, f.TOMBSTONE, f.REPLACES]))
    headers = draw(st.dictionaries(header_names, texts, max_size=4))
    expires = draw(st.none() | dues)
    fields: dict[str, Any] = {
        "id": draw(printable),
        "body": draw(st.binary(max_size=300)),
        "due_ms": draw(dues),
        "ttr_ms": draw(st.sampled_from([0, 1, TTR_MS_MAX]) | st.integers(0, TTR_MS_MAX)),
        "of": (draw(seqs), draw(dues)) if kills else None,
        "arrived": draw(st.none() | seqs),
        "order": draw(st.none() | seqs),
        "expires_ms": expires,
        "headers": headers,
    }
    moved = f.MOVED if fields["order"] is not None else 0
    optional = (f.HEADERS if headers else 0) | (f.EXPIRES if expires is not None else 0) | moved
    fields["flags"] = draw(st.integers(0, f.USER_FLAGS)) | kills | optional
    return fields


def extras_of(message: dict[str, Any]) -> bytes:
    return f.extra_elements(**{name: message[name] for name in ("of", "arrived", "order", "expires_ms", "headers")})


@given(st.lists(messages(), min_size=1, max_size=4), seqs)
@settings(steady, max_examples=60)
def test_encoded_documents_are_scanned_and_decode_to_themselves(given_: list[dict[str, Any]], first_seq: int) -> None:
    column = {name: [message[name] for message in given_] for name in given_[0]}
    ids = [id_.encode() for id_ in column["id"]]
    extras = [extras_of(message) for message in given_]
    data, lengths = f.encode(ids, column["body"], column["due_ms"], first_seq, column["ttr_ms"], column["flags"], extras)
    found = scan(bytes(data), 0, len(data))
    assert found.verdict is Verdict.END
    assert found.lengths.tolist() == list(lengths)
    for i, message in enumerate(given_):
        raw = bytes(data)[int(found.positions[i]) : int(found.positions[i] + found.lengths[i])]
        document = f.decode(raw)
        assert document.seq == first_seq + i == found.seq[i]
        assert (found.due_ms[i], found.ttr_ms[i], found.flags[i]) == (message["due_ms"], message["ttr_ms"], message["flags"])
        assert found.id_bytes[i] == len(ids[i])
        for name in ("id", "body", "due_ms", "ttr_ms", "flags", "of", "expires_ms", "headers"):
            assert getattr(document, name) == message[name], name
        assert document.arrived == (document.seq if message["arrived"] is None else message["arrived"])
        assert document.order == (document.seq if message["order"] is None else message["order"])
        assert document.created_ms == document.arrived >> SEQ_COUNTER_BITS


@given(st.lists(messages(), min_size=1, max_size=2), seqs)
@settings(steady, max_examples=60)
def test_any_bson_tool_reads_every_document(given_: list[dict[str, Any]], first_seq: int) -> None:
    for i, message in enumerate(given_):
        id_, body = message["id"].encode(), message["body"]
        data, _ = f.encode([id_], [body], [message["due_ms"]], first_seq + i, 0, [message["flags"]], [extras_of(message)])
        fields = bson.decode(bytes(data))
        assert (fields["id"], fields["seq"], fields["body"]) == (message["id"], first_seq + i, message["body"])
        assert fields["opt"] == message["flags"] << 32
        assert fields["crc"] & 0xFFFFFFFF == zlib.crc32(data[f.CHECKED_FROM :])


def test_ids_and_times_at_their_limits_fit() -> None:
    for count in (1, small_batches.DOCUMENTS):
        ids = [("\U0001f422" * (ID_BYTES_MAX // 4)).encode()] * count
        data, _ = f.encode(ids, [b""] * count, [DUE_MS_MAX] * count, SEQ_MAX - count, TTR_MS_MAX, [f.USER_FLAGS] * count)
        found = scan(bytes(data), 0, len(data))
        assert found.verdict is Verdict.END
        assert set(found.due_ms.tolist()) == {DUE_MS_MAX}
        assert set(found.ttr_ms.tolist()) == {TTR_MS_MAX}
        assert f.decode(bytes(data)[: int(found.lengths[0])]).id == ids[0].decode()


@pytest.mark.parametrize("headers", [{"$ref": "a", "$id": "b"}, {"$ref": "a", "$id": "b", "$db": "c", "d": "e"}])
def test_headers_that_look_like_a_reference_stay_headers(headers: dict[str, str]) -> None:
    data, _ = f.encode([b"a"], [b""], [1], 1, 0, [f.HEADERS], [f.extra_elements(headers=headers)])
    assert f.decode(bytes(data)).headers == headers


@pytest.mark.parametrize("count", [1, small_batches.DOCUMENTS])
def test_a_document_that_no_scan_would_accept_is_not_written(count: int) -> None:
    bodies = [b""] * (count - 1) + [bytes(f.DOCUMENT_BYTES_MAX)]
    with pytest.raises(TooLarge, match="at most 16,777,216 bytes with all its fields, this one 16,777,290"):
        f.encode([b"a"] * count, bodies, [1] * count, 1, 0, [0] * count)


# ── arrays and loops write the same ──────────────────────────────────────────────────────────────────────


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[bytes], list[bytes], list[int], list[int], list[int]]:
    count = draw(st.integers(small_batches.DOCUMENTS, 3 * small_batches.DOCUMENTS))
    width = draw(st.integers(1, 12))
    ids = st.binary(min_size=width, max_size=width) if draw(st.booleans()) else st.binary(min_size=1, max_size=20)

    def many(items: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(items, min_size=count, max_size=count))

    ttr = many(st.integers(0, TTR_MS_MAX))
    return many(ids), many(st.binary(max_size=40)), many(dues), ttr, many(st.integers(0, (1 << 32) - 1))


@given(columns(), seqs, st.integers(1, small_batches.DOCUMENTS - 1))
@settings(steady, max_examples=40)
def test_many_encoded_at_once_are_few_encoded_one_after_the_other(
    given_: tuple[list[bytes], list[bytes], list[int], list[int], list[int]], first_seq: int, step: int
) -> None:
    ids, bodies, due, ttr, flags = given_
    many, lengths = f.encode(ids, bodies, due, first_seq, ttr, flags)
    few = b""
    few_lengths: list[int] = []
    for i in range(0, len(ids), step):
        part = slice(i, i + step)
        data, some = f.encode(ids[part], bodies[part], due[part], first_seq + i, ttr[part], flags[part])
        few += data
        few_lengths += list(some)
    assert bytes(many) == few
    assert list(lengths) == few_lengths


@pytest.mark.parametrize("count", [1, small_batches.DOCUMENTS - 1, small_batches.DOCUMENTS, 100])
def test_a_matrix_of_ids_is_a_list_of_ids(count: int) -> None:
    rows = server_id_rows(7, count)
    listed = [bytes(row) for row in rows]
    arguments: tuple[Any, ...] = ([b"x"] * count, np.arange(count), 7, 9, np.zeros(count, np.uint32))
    assert bytes(f.encode(rows, *arguments)[0]) == bytes(f.encode(listed, *arguments)[0])


# ── ids that the server gives ────────────────────────────────────────────────────────────────────────────


@given(seqs, st.integers(1, 3 * small_batches.DOCUMENTS))
@steady
def test_server_ids_name_their_seqs_and_sort_like_them(first: int, count: int) -> None:
    ids, rows = server_ids(first, count), server_id_rows(first, count)
    assert [server_seq(id_) for id_ in ids] == list(range(first, first + count))
    assert ids == sorted(ids)
    assert [bytes(row).decode() for row in rows] == ids
    assert Receipt(rows, [True] * count).ids == ids
    assert all(len(id_) == SERVER_ID_BYTES for id_ in ids)


@given(seqs, seqs)
@steady
def test_server_ids_of_any_two_seqs_sort_like_them(a: int, b: int) -> None:
    assert (server_ids(a, 1) < server_ids(b, 1)) == (a < b)


@given(st.lists(seqs, min_size=1, max_size=50))
@steady
def test_the_hash_of_a_server_id_is_that_of_its_seq(given_: list[int]) -> None:
    ids = [server_ids(seq, 1)[0] for seq in given_]
    assert [hash_id(id_, 5) for id_ in ids] == hash_seqs(np.array(given_, np.int64), 5).tolist()


def test_no_id_hashes_to_zero_which_means_no_hash() -> None:
    seq = 0x61C8864680B583EB  # what splitmix64 turns into 0
    assert hash_id(server_ids(seq, 1)[0], 0) == 1 == hash_seqs(np.array([seq]), 0)[0]


@pytest.mark.parametrize(
    "id_", ["", "t", "t000000000000", "t00000000000000", "T0000000000000", "t000000000000i", "tz000000000000", "t00000000000٠0"]
)
def test_other_ids_name_no_seq(id_: str) -> None:
    assert server_seq(id_) is None


@given(st.text(max_size=16))
@steady
def test_only_text_that_a_server_would_give_names_a_seq(id_: str) -> None:
    seq = server_seq(id_)
    assert seq is None or server_ids(seq, 1) == [id_]


# ── packed keys ──────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(dues, st.integers(0, (1 << ORDINAL_BITS) - 1)), min_size=1, max_size=50))
@steady
def test_keys_sort_by_due_time_then_ordinal(pairs: list[tuple[int, int]]) -> None:
    due, ordinals = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    keys = f.packed_keys(due, ordinals)
    assert f.key_dues(keys).tolist() == due.tolist()
    assert f.key_ordinals(keys).tolist() == ordinals.tolist()
    assert [pairs[i] for i in np.argsort(keys, kind="stable")] == sorted(pairs)


# ── the file header ──────────────────────────────────────────────────────────────────────────────────────

HEADER = f.FileHeader("delay", "orders", 1 << 40, 3, True, 12, 3456, 789)


def test_a_header_comes_back_and_says_where_documents_begin() -> None:
    data = f.encode_header(HEADER)
    assert f.decode_header(data + b"documents", "x") == (HEADER, len(data))
    assert bson.decode(data)["turtlemq"] == f.VERSION


@given(st.integers(0, SEQ_MAX), st.integers(0, SEQ_MAX), st.booleans())
@steady
def test_a_header_is_as_long_whatever_its_numbers(a: int, b: int, sealed: bool) -> None:
    header = f.FileHeader("delay", "orders", a, b, sealed, b, a, b)
    assert len(f.encode_header(header)) == len(f.encode_header(f.FileHeader("delay", "orders", 0)))
    assert f.decode_header(f.encode_header(header), "x")[0] == header


def test_every_flipped_byte_of_a_header_is_found() -> None:
    data = f.encode_header(HEADER)
    for i in range(len(data)):
        for mask in (0x01, 0x02, 0x10, 0x80, 0xFF):
            bad = bytearray(data)
            bad[i] ^= mask
            with pytest.raises(Corrupt):
                f.decode_header(bytes(bad) + b"documents", "x")


def test_every_prefix_of_a_header_is_refused() -> None:
    data = f.encode_header(HEADER)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            f.decode_header(data[:size], "x")


def newer_header(version: int) -> bytes:
    fields = bson.decode(f.encode_header(HEADER))
    fields.pop("crc")
    fields["turtlemq"] = version
    fields["something_new"] = "that this program knows nothing of"
    return bson.encode({**fields, "crc": bson.Int64(zlib.crc32(bson.encode(fields)))})


@pytest.mark.parametrize("version", [2, 3, 1 << 20])
def test_a_newer_header_is_refused_by_its_version(version: int) -> None:
    with pytest.raises(NewerFormat, match=rf"^delay_1.bson: format {version}, this program reads up to 1\. .*newer TurtleMQ"):
        f.decode_header(newer_header(version), "delay_1.bson")


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_damage(version: int) -> None:
    with pytest.raises(Corrupt, match="its header is damaged"):
        f.decode_header(newer_header(version), "x")


FOREIGN: Sequence[bytes] = (b"", b"\0" * 100, b"hello, world", bson.encode({"a": 1}), b"PK\x03\x04" * 20)


@pytest.mark.parametrize("data", FOREIGN)
def test_a_file_of_something_else_is_not_ours(data: bytes) -> None:
    with pytest.raises(NotOurs, match=r"^notes.bson: This file was not written by TurtleMQ\. Move it out"):
        f.decode_header(data, "notes.bson")
