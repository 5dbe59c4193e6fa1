"""Data folders that are damaged by tests, and engines that are opened on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.engine_disk import SETTINGS, Quick, _fields, abandon, messages
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.segment import format as f
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings


class Bare(Quick):
    """Syncs nothing, and keeps no ballast."""

    keeps_room = False


def reopen(root: Path, **changes: Any) -> Engine:
    return Engine.open(root / "data", door=Bare(), settings=Settings(**{**_fields(SETTINGS), **changes}))


def folder(root: Path) -> Path:
    return root / "data" / "topic" / "t"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


def lived(root: Path) -> list[str]:
    """A topic with something in every file, stopped properly. Returns the ids that are still to come."""
    engine = reopen(root)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(9), 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 5, 10, ttr_ms=100).ids
    engine.ack("t", "g", [*ids[:2], f"-{ids[2]}"], 11, error="no")
    again = engine.reserve("t", "g", 9, 50, ttr_ms=100).ids
    assert again[0] == "m2"
    engine.ack("t", "g", ["-m2"], 51, error="no")
    assert engine.stats("t").dead == 1
    engine.submit("t", messages(3, 20, due=500_000), 60)
    engine.close()
    return [*ids[3:], *again[1:], "m20", "m21", "m22"]


def drain(engine: Engine) -> list[str]:
    got: list[str] = []
    for now in (600_000, 700_000, 800_000):
        engine.tick(now)
        out = engine.reserve("t", "g", 100, now).ids
        engine.ack("t", "g", out, now)
        got += out
    return got


def heads(path: Path) -> list[int]:
    data = path.read_bytes()
    found = scan(data, f.decode_header(data, path.name)[1], len(data), sealed=True)
    return [int(at) for at, flags in zip(found.positions, found.flags, strict=True) if flags & f.HANDOFF]


def several(root: Path) -> list[Path]:
    """Eighty messages handed off, four at a time, and a proper stop. Returns the files of the ready log."""
    engine = reopen(root, segment_bytes=4096)
    engine.move_group("t", "g", "earliest", 0)
    for n in range(0, 80, 4):
        engine.submit("t", messages(4, n, due=10 + n), n)
        engine.tick(10 + n)
    engine.close()
    return sorted(folder(root).glob("ready_*.bson"))


def handed_off(root: Path) -> Path:
    """Six batches of eight in the ready log, each with a table but for the last; none is fetched. Returns its file."""
    engine = reopen(root)
    engine.move_group("t", "g", "earliest", 0)
    for k in range(6):
        engine.submit("t", [Message(b"x" * 200, 10 + k, f"m{n}") for n in range(8 * k, 8 * k + 8)], 0)
        engine.tick(10 + k)
    engine.topic("t").checkpoint()
    abandon(engine)
    return folder(root) / "ready_0000000000.bson"


def positions(path: Path) -> list[int]:
    """Where the documents of a segment begin, the heads of batches among them."""
    data = path.read_bytes()
    _, start = f.decode_header(data, path.name)
    return [int(at) for at in scan(memoryview(data), start, len(data), sealed=True).positions]
