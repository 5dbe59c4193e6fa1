"""How the golden files of version 1 were made. They are committed, and no test makes them again: TurtleMQ must open these very
bytes for ever. A new version of the format gets a folder of its own beside `v1`; the files in `v1` stay as they are.

    python tests/golden/make.py some/empty/folder

    data            one data folder as a killed process leaves it, with a topic for each thing that can be wrong with a file
    clean           a data folder after a proper stop, and then a flipped byte where a killed process might have torn something
    newer_folder    a data folder that says it is of version 2
    newer_file      one in which a segment says so
    not_ours        one in which a segment is something else

Beside `v1`: `tables_2` has tables of the second version, and `leases_1` a data folder after a proper stop whose checkpoint has no
numbers of leases: m0 and m1 were fetched by "one", m2 by "two", m1 was extended (commit f352ef5).
"""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import bson
from bson.int64 import Int64

from turtlemq.engine import Engine
from turtlemq.index.recover import open_index
from turtlemq.model import Batch, Message, Priority, Progress
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

NOW = 1_700_000_000_000
SEGMENT = "delay_0000000000.bson"
KEPT = (".bson", ".index")  # files of an engine that are kept; all others are made again


def make(target: Path) -> None:
    """Everything, under `target`, which must not be there yet."""
    target.mkdir(parents=True)
    data = target / "data"
    (data / "topic").mkdir(parents=True)
    (data / "FORMAT").write_text("1\n")
    make_good(data / "topic" / "good")
    make_with_engine(target / "scratch", data)
    for name, damage in DAMAGES.items():
        plain = plain_segment(data / "topic" / name, name)
        plain.write_bytes(damage(plain.read_bytes()))
    make_clean(target / "clean")
    make_refused(target)


def make_good(folder: Path) -> None:
    """Own and given ids, every optional field, a cancelled message and a changed one."""
    index = open_index(Door(), folder, "good", Settings(), Progress())
    index.append(Batch([b"first"], [NOW + 1_000], ["a"]), NOW)
    index.append(Batch([b"given-1", b'{"n":2}'], [NOW + 500] * 2, ttr_ms=[0, 30_000], flags=[Priority.HIGH, f.JSON]), NOW + 1)
    rich = Batch([b"rich", b"gone"], [NOW + 3_000, NOW + 1], ["b-é\U0001f422", "c"], expires_ms=[NOW + 9_000, None])
    rich.headers = [{"kind": "order", "$ref": "x", "empty": ""}, None]
    index.append(rich, NOW + 2)
    index.cancel(["c"])
    index.reschedule("a", NOW + 3, due_ms=NOW + 2_000, body=b"changed")
    index.close()


def make_with_engine(scratch: Path, data: Path) -> None:
    """A sealed segment with its table, a growing one with tombstones for both, and a ready log with two handoffs."""
    engine = Engine.open(scratch)
    engine.configure("sealed", segment_messages=5)
    messages = [Message(b"body-%d" % i, NOW + 1_000 - 10 * i, f"s{i}") for i in range(8)]
    engine.submit("sealed", messages[:5], NOW)
    engine.submit("sealed", messages[5:], NOW + 1)
    engine.topic("sealed").stores.index.cancel(["s1", "s6"])
    engine.compact("sealed")
    engine.submit("handed_off", [Message(b"body-%d" % i, NOW + 10 * i, f"h{i}") for i in range(5)], NOW)
    engine.tick(NOW + 10)
    engine.tick(NOW + 20)
    engine.close()
    for topic in ("sealed", "handed_off"):
        (data / "topic" / topic).mkdir()
        for file in (scratch / "topic" / topic).iterdir():
            if file.suffix in KEPT:
                shutil.copy(file, data / "topic" / topic)
    (data / "topic" / "sealed" / "topic.toml").write_text("segment_messages = 5\n")
    shutil.rmtree(scratch)


def plain_segment(folder: Path, topic: str) -> Path:
    """Three syncs: x1; x2 and x3 in one batch; x4 and x5 in one batch."""
    index = open_index(Door(), folder, topic, Settings(), Progress())
    for k, ids in enumerate((["x1"], ["x2", "x3"], ["x4", "x5"])):
        index.append(Batch([b"body of " + id_.encode() for id_ in ids], [NOW + 100 - k] * len(ids), list(ids)), NOW + k)
    index.close()
    return folder / SEGMENT


def flip(data: bytes, text: bytes) -> bytes:
    """Change the last byte of the one place where `text` stands."""
    at = data.index(text) + len(text) - 1
    return data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :]


def zeroed(data: bytes, text: bytes) -> bytes:
    """Sixty bytes of zeros from where `text` stands, like a page that was not written."""
    at = data.index(text)
    return data[:at] + b"\0" * 60 + data[at + 60 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn_tail": lambda data: data[:-10],
    "bad_checksum_at_the_end": lambda data: flip(data, b"body of x5"),
    "bad_checksum_in_the_middle": lambda data: flip(data, b"body of x2"),
    "zero_tail": lambda data: data + b"\0" * 500,
    "damaged_and_torn": lambda data: zeroed(flip(data, b"body of x2"), b"body of x4"),
    "bad_header": lambda data: flip(data, b"turtlemq"),
}


def make_clean(folder: Path) -> None:
    """After a proper stop nothing can be torn: a flipped byte in the last batch is damage."""
    engine = Engine.open(folder)
    engine.submit("t", [Message(b"body of x1", NOW + 100, "x1")], NOW)
    engine.submit("t", [Message(b"body of x2", NOW + 99, "x2"), Message(b"body of x3", NOW + 99, "x3")], NOW + 1)
    engine.close()
    (folder / "LOCK").unlink()
    for file in (folder / "topic" / "t").iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.suffix not in KEPT:
            file.unlink()
    path = folder / "topic" / "t" / SEGMENT
    path.write_bytes(flip(path.read_bytes(), b"body of x3"))


def make_refused(target: Path) -> None:
    """Folders that no program of version 1 may touch."""
    for name in ("newer_folder", "newer_file", "not_ours"):
        (target / name / "topic" / "t").mkdir(parents=True)
        (target / name / "FORMAT").write_text("2\n" if name == "newer_folder" else "1\n")
    fields = bson.decode(f.encode_header(f.FileHeader("delay", "t", 0)))
    fields["turtlemq"] = 2
    del fields["crc"]
    newer = bson.encode({**fields, "crc": Int64(zlib.crc32(bson.encode(fields)))})
    (target / "newer_folder" / "topic" / "t" / SEGMENT).write_bytes(newer + b"whatever version 2 has here")
    (target / "newer_file" / "topic" / "t" / SEGMENT).write_bytes(newer + b"whatever version 2 has here")
    text = "This is a text that somebody gave the name of a segment.\n" * 5
    (target / "not_ours" / "topic" / "t" / SEGMENT).write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
