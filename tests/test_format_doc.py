"""docs/FORMAT.md agrees with the code: its tables are compared with the constants, its programs are run on real files."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import bson
import numpy as np
import pytest
import xxhash

from turtlemq import model
from turtlemq.index.build import read_ended_bits
from turtlemq.message_fields import FIELDS, Kind
from turtlemq.segment import format as f
from turtlemq.segment import table
from turtlemq.segment.ids import SERVER_ID_BYTES, server_ids
from turtlemq.storage import names

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "v1" / "data" / "topic"
TABLES = ROOT / "tests" / "golden" / "tables_2"
NOW = 1_700_000_000_000


def section(title: str) -> str:
    """The text between this heading and the next one."""
    return re.split(r"^#+ ", TEXT.split(f"{title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str, columns: str, which: int = 0) -> list[list[str]]:
    """The cells of a table below a heading, without backticks; its first line must be these columns."""
    found = re.findall(r"(?:^\|.*\|\n)+", section(title), flags=re.MULTILINE)[which].splitlines()
    lines = [[cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]
    assert lines[0] == columns.split(", ")
    return lines[2:]


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def run(program: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(program, "FORMAT.md", "exec"), namespace)
    return namespace


# ── the byte table ───────────────────────────────────────────────────────────────────────────────────────


def test_the_byte_table_is_the_prefix() -> None:
    listed = rows("## A document", "offset, bytes, field, type, meaning")
    fields = f.PREFIX.fields
    assert fields is not None
    stated = {field: (int(offset), int(size)) for offset, size, field, _, _ in listed if size}
    assert stated == {name: (fields[name][1], fields[name][0].itemsize) for name in f.PREFIX.names or ()}
    assert (listed[-1][0], listed[-1][2]) == (str(f.PREFIX_BYTES), "id")
    assert stated["crc"][0] + 4 == f.CHECKED_FROM
    assert f"from offset {f.CHECKED_FROM} to the end" in section("## A document")


def test_types_and_names_stand_where_the_text_says() -> None:
    data, _ = f.encode([b"x"], [b""], [5], 6, 7, [8])
    for name in (b"\x10crc\0", b"\x09due\0", b"\x12seq\0", b"\x12opt\0", b"\x02id\0"):
        assert name in data
        assert f"\\x{name[0]:02x}{name[1:-1].decode()}\\0" in section("## A document")
    overhead = 4 + 1 + 4 + 1 + 4 + 1 + 4 + 1 + 3 + 1
    assert f"{overhead} of its first {f.PREFIX_BYTES} bytes" in TEXT


def test_optional_fields_are_written_in_the_order_of_the_table() -> None:
    stated = [name for name, *_ in rows("## A document", "field, type, there if, meaning", 1)]
    optional = {row.name: {"a": "b"} if row.kind is Kind.TEXTS else 5 for row in FIELDS}
    everything = f.extra_elements((1, 2), 3, 4, {"c": 1}, **optional)
    data, _ = f.encode([b"x"], [b"body"], [5], 6, 7, [8], [everything])
    assert list(bson.decode(bytes(data)))[5:] == stated == [*f.ELEMENTS, "body"]


def test_the_sizes_in_the_text_are_the_constants() -> None:
    text = section("## A document")
    assert f"smallest document has {f.DOCUMENT_BYTES_MIN} bytes" in text
    assert f"the largest {f.DOCUMENT_BYTES_MAX:,}" in text


def test_the_checksum_is_that_of_zlib() -> None:
    data, _ = f.encode([b"x"], [b"body"], [5], 6, 7, [8])
    assert int.from_bytes(data[9:13], "little") == zlib.crc32(data[13:])


# ── flags, head, limits ──────────────────────────────────────────────────────────────────────────────────

COMBINED = {"ENDS", "USER_FLAGS", "OPTIONAL"}


def test_the_flags_table_is_complete() -> None:
    source = (ROOT / "turtlemq" / "segment" / "format.py").read_text(encoding="utf-8")
    block = source.split("# Flags.\n", 1)[1].split("\n\n", 1)[0]
    defined = {name: getattr(f, name) for name in re.findall(r"^([A-Z_]+) = ", block, flags=re.MULTILINE)}
    defined |= {row.element.upper(): row.flag for row in FIELDS}
    listed = rows("### Flags", "bit, value, name, meaning")
    assert {name: int(value, 16) for _, value, name, _ in listed} == {k: v for k, v in defined.items() if k not in COMBINED}
    for bit, value, _, _ in listed:
        assert int(value, 16) == sum(1 << n for n in range(int(bit[0] if "–" in bit else bit), int(bit.split("–")[-1]) + 1))


def test_the_head_of_a_file_has_these_fields() -> None:
    head = f.encode_header(f.FileHeader("delay", "t", 1, 2, True, 3, 4, 5))
    kinds = {int: "int32", bson.Int64: "int64", str: "string", bool: "bool"}
    listed = [(name, kind) for name, kind, _ in rows("## The head of a file", "field, type, meaning")]
    assert listed == [(name, kinds[type(value)]) for name, value in bson.decode(head).items()]
    (stated,) = re.findall(r"at (\d+) plus the lengths of kind and topic", section("## The head of a file"))
    assert len(head) == int(stated) + len("delay") + len("t")


def test_every_limit_is_listed_with_its_number() -> None:
    limits = {name: value for name, value in vars(model).items() if name.isupper() and type(value) is int}
    assert {name: int(value) for name, value, _ in rows("## Limits", "name, value, meaning")} == limits


def test_a_seq_is_as_the_text_says() -> None:
    text = section("### seq: a hybrid logical clock")
    assert f"shifted left by {model.SEQ_COUNTER_BITS} bits" in text
    assert f"{63 - model.SEQ_COUNTER_BITS} bits of milliseconds" in text
    assert f"({1 << model.SEQ_COUNTER_BITS:,} in a millisecond)" in text
    assert (1 << 63 - model.SEQ_COUNTER_BITS) - 1 > model.DUE_MS_MAX
    data, _ = f.encode([b"x"], [b""], [0], NOW << model.SEQ_COUNTER_BITS, 0, [0])
    assert f.decode(bytes(data)).created_ms == NOW


def test_given_ids_are_made_of_these_digits() -> None:
    text = section("### Ids that the server gives")
    (digits,) = re.findall(r"The digits are `(\w+)`", text)
    assert server_ids(sum(i << 5 * (12 - i) for i in range(13)) + (1 << 40), 1)[0][1:5] == digits[:4]
    assert [server_ids(i, 1)[0][-1] for i in range(32)] == list(digits)
    assert f"`t` and {SERVER_ID_BYTES - 1} digits" in text


def test_file_names_are_those_of_the_table() -> None:
    text = section("## A data folder")
    for name in (names.LOCK, names.CLEAN, names.FORMAT, names.SETTINGS, names.PAUSED):
        assert f"{name}`" in text
    pairs = {names.segment("delay", 0): "delay_{base}.bson", names.table("delay", 0, None): "delay_{base}.index"}
    pairs |= {names.table("delay", 0, 7): "delay_{base}.{first}.run", names.ended_bits("delay", 0, None): "delay_{base}.dead"}
    for name, template in pairs.items():
        assert template in text
        assert name == template.format(base="0000000000", first="0000000007")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_has_these_sections_and_fields() -> None:
    data = (TABLES / "delay_0000000000.index").read_bytes()
    fields = bson.decode(data[: int.from_bytes(data[:4], "little")])
    text = section("## Tables: `.index` and `.run`")
    listed = [name for name, _, _ in rows("## Tables: `.index` and `.run`", "section, items, meaning")]
    assert list(fields["sections"]) == [name for name in listed if not name.startswith("inner")]
    assert all(f"`{name}`" in text for name in fields)
    assert f"Blocks of {table.BLOCK:,} bytes" in text
    assert f"{table.FANOUT} keys each" in text
    at, count, check = fields["checksums"]
    sums = np.frombuffer(data[at : at + 4 * count], "<u4").tolist()
    assert zlib.crc32(data[at:]) == check
    assert sums == [zlib.crc32(data[i : i + table.BLOCK]) for i in range(table.BLOCK, at, table.BLOCK)]


def test_ids_are_kept_as_the_text_says() -> None:
    data = (TABLES / "delay_0000000000.index").read_bytes()
    fields = bson.decode(data[: int.from_bytes(data[:4], "little")])
    kinds = {"buckets": "<u4", "prints": "<u2", "ordinals": "<u4"}
    buckets, prints, ordinals = (np.frombuffer(data, kinds[name], *fields["sections"][name][::-1]).tolist() for name in kinds)
    b, o = (len(prints) // 32).bit_length(), (fields["documents"] - 1).bit_length()
    assert (b, o, len(buckets)) == (0, 2, 2)
    found = {}
    for id_ in ("s0", "s2", "s3", "s4"):
        h = xxhash.xxh3_64_intdigest(id_.encode()) >> 22 << 22
        places = [i for i in range(buckets[0], buckets[1]) if prints[i] == h >> 64 - b - 16]
        (found[id_],) = (ordinals[i] % (1 << o) for i in places if ordinals[i] >> o == h % (1 << 64 - b - 16) >> 16 - b + o)
    assert found == {"s4": 0, "s3": 1, "s2": 2, "s0": 3}, "in due order"
    assert prints == sorted(prints)


def test_dead_files_have_these_fields() -> None:
    text = section("## Tables: `.index` and `.run`")
    source = Path(read_ended_bits.__code__.co_filename).read_text(encoding="utf-8")
    (stated,) = re.findall(r"^# Ended bits, .*?: \{(.*?)\}", source, flags=re.MULTILINE)
    assert all(f"`{name}`" in text for name in stated.split(", "))


# ── the programs ─────────────────────────────────────────────────────────────────────────────────────────

SEGMENT = "delay_0000000000.bson"


def test_the_program_that_needs_nothing_reads_a_file() -> None:
    program = programs()[0]
    assert re.findall(r"^(?:import|from) (\w+)", program, flags=re.MULTILINE) == ["struct", "zlib", "pathlib"]
    found = list(run(program)["read"](GOLDEN / "good" / SEGMENT))
    assert [(d["id"], d["due"] - NOW, d["body"]) for d in found] == [
        ("a", 1_000, b"first"),
        ("t1hf7yau010000", 500, b"given-1"),
        ("t1hf7yau010001", 500, b'{"n":2}'),
        ("b-é\U0001f422", 3_000, b"rich"),
        ("c", 1, b"gone"),
        ("c", 1, b""),
        ("a", 2_000, b"changed"),
    ]
    assert found[3]["headers"] == {"kind": "order", "$ref": "x", "empty": ""}
    assert found[3]["expires"] == NOW + 9_000
    assert [d["ttr_ms"] for d in found] == [0, 0, 30_000, 0, 0, 0, 0]
    assert found[5]["flags"] & f.TOMBSTONE
    assert (found[5]["of"], found[5]["was"]) == (found[4]["seq"], found[4]["due"])
    assert found[6]["arrived"] == found[0]["seq"]


@pytest.mark.parametrize(("topic", "count"), [("torn_tail", 4), ("bad_checksum_in_the_middle", 1), ("zero_tail", 5)])
def test_the_plain_reader_stops_at_the_first_non_document(topic: str, count: int) -> None:
    assert len(list(run(programs()[0])["read"](GOLDEN / topic / SEGMENT))) == count


@pytest.mark.parametrize("file", [f"good/{SEGMENT}", f"sealed/{SEGMENT}", "handed_off/ready_0000000000.bson"])
def test_any_bson_library_reads_a_file(file: str) -> None:
    head, *documents = run(programs()[1])["dump"](GOLDEN / file)
    assert head["turtlemq"] == 1
    assert all(isinstance(document["id"], str) for document in documents)
    assert head["documents"] == (len(documents) if head["sealed"] else 0)


def test_the_scan_reads_what_the_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    recover = run(programs()[2])["recover"]
    assert [d.id for d in recover(GOLDEN / "bad_checksum_in_the_middle" / SEGMENT)] == ["x1", "x3", "x4", "x5"]
    assert [d.id for d in recover(GOLDEN / "torn_tail" / SEGMENT)] == ["x1", "x2", "x3"]
    assert capsys.readouterr().out.splitlines() == [
        "delay_0000000000.bson: corrupt, whole batches up to 608 of 608 bytes",
        "  85 bytes at 268: checksum does not match",
        "delay_0000000000.bson: torn, whole batches up to 421 of 581 bytes",
    ]


def test_the_ready_log_is_as_the_text_says() -> None:
    documents = run(programs()[1])["dump"](GOLDEN / "handed_off" / "ready_0000000000.bson")[1:]
    heads = [document for document in documents if document["opt"] >> 32 & f.HANDOFF]
    assert [head["id"] for head in heads] == ["handoff"] * 2
    assert [head["seq"] for head in heads] == [0, 2]
    stated = [name for name, _ in rows("## The ready log", "field, meaning")]
    assert stated == ["due", "seq", "flags", "id", "body"]
    for head in heads:
        body = bson.decode(head["body"])
        assert list(body) == ["count", "bytes", "marks"]
        assert all(len(mark) == 3 for mark in body["marks"])


def test_the_version_is_the_one_described() -> None:
    assert f"This is version **{f.VERSION}**" in TEXT
    assert TEXT.startswith(f"# The files of TurtleMQ, version {f.VERSION}\n")
