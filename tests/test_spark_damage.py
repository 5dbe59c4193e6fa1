"""Damaged files in Spark: no wrong id, no id that is no text, and no query that fails for a damaged table."""

from __future__ import annotations

import os
import shutil
import zlib
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.harness.spark_session import need_packages

need_packages()

from pyspark_turtlemq.kinds import KINDS  # noqa: E402 - only where pyarrow is
from tests.harness.spark_data import NOW, messages, rows  # noqa: E402
from tests.harness.standing_walk import TOPIC, Walk  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.errors import Corrupt  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq.segment import format as f  # noqa: E402
from turtlemq.segment.table import BLOCK  # noqa: E402


def covered(root: Path) -> Path:
    """The folder of a stopped engine: sleepers in a sealed segment and under runs, and three dead letters."""
    engine = Engine.open(root)
    engine.configure("t", segment_messages=100, run_messages=20, max_attempts=1)
    engine.submit("t", [Message(b"", NOW, f"d{n}") for n in range(3)], NOW)
    engine.tick(NOW)
    engine.ack("t", "default", [f"-{id_}" for id_ in engine.reserve("t", "default", 9, NOW).ids], NOW)
    for n in range(0, 300, 10):
        engine.submit("t", messages(10, n), NOW)
    engine.compact("t")
    engine.close()
    return root


@pytest.mark.parametrize("id_", ["m105", "m285"])
@pytest.mark.parametrize("kind", ["delay", "messages"])
def test_a_flipped_bit_is_no_other_id(tmp_path: Path, kind: str, id_: str) -> None:
    root = covered(tmp_path / "data")
    before = Counter(row["id"] for row in rows(root, kind=kind, columns="id"))
    assert flipped(root, f"\0{id_}\0".encode(), f"\0{id_[:-1]}4\0".encode()) == 1
    found = Counter(row["id"] for row in rows(root, kind=kind, columns="id"))
    assert (before - found, found - before) == (Counter([id_]), Counter())


@pytest.mark.parametrize("forged", [False, True], ids=["flipped", "with a checksum"])
def test_an_id_that_is_no_text_is_damage(tmp_path: Path, forged: bool) -> None:
    """Of an id of a sleeper, and of the group of a dead letter."""
    root = covered(tmp_path / "data")
    assert flipped(root, b"\0m105\0", b"\0m\xff05\0", sums=forged) == 1
    assert flipped(root / "topic" / "t" / "dead", b"\0default/d1", b"\0def\xffult/d1", sums=forged) == 1
    for kind in ("delay", "dead"):
        (damage,) = [row["damage"] for row in rows(root, kind=kind, columns="id,group,damage") if row["damage"]]
        assert (damage == "its id is no text") == forged
    lives = {row["id"] for row in rows(root, kind="messages") if row["state"] in ("sleep", "dead")}
    assert lives == {f"m{n}" for n in range(300) if n != 105} | {"d0", "d2"}
    unchecked = rows(root, columns="id,damage", verify="never")
    assert [row["damage"] for row in unchecked if row["damage"]] == ["its id is no text"]


def flipped(folder: Path, old: bytes, new: bytes, *, sums: bool = False) -> int:
    """Change bytes in all segments of the delay log; with `sums`, give their documents the checksums of the new bytes. Returns
    the number of changed places."""
    count = 0
    for path in folder.rglob("delay_*.bson"):
        data = bytearray(path.read_bytes())
        at = -1
        while (at := data.find(old, at + 1)) >= 0:
            data[at : at + len(new)] = new
            start, count = at + 1 - f.PREFIX_BYTES, count + 1
            length = int.from_bytes(data[start : start + 4], "little")
            if sums:
                data[start + 9 : start + 13] = zlib.crc32(data[start + 13 : start + length]).to_bytes(4, "little")
        path.write_bytes(data)
    return count


# Logs of different moments, as a copy by other means leaves them


@pytest.mark.parametrize("seed", range(2))
def test_logs_cut_at_any_place_are_read(tmp_path: Path, seed: int) -> None:
    chance, walk = Random(seed), Walk(tmp_path / "data", seed, spark=False)
    walk.run(40)
    for number in range(4):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "data", root)
        (root / "CLEAN").unlink()
        for log in ("delay", "ready", "reserve", "history", "dead/delay"):
            last = max((root / "topic" / TOPIC).glob(f"{log}_*.bson"), default=None)
            if last is not None and chance.random() < 0.6:
                os.truncate(last, max(200, chance.randrange(last.stat().st_size)))
        for kind in KINDS:
            rows(root, kind=kind)


# Tables


def shown(root: Path) -> dict[str, list[str]]:
    """The rows of all kinds that use tables, with and without a range of due times."""
    found = {kind: rows(root, kind=kind) for kind in ("delay", "ready", "messages", "forecast")}
    found["a range"] = rows(root, where=f"due_ms >= {NOW + 1_050} and due_ms < {NOW + 1_250}")
    found["late ones"] = rows(root, kind="ready", where=f"ready_ms > {NOW}")
    return {name: sorted(map(str, table)) for name, table in found.items()}


def with_tables(root: Path) -> list[Path]:
    """A folder with every kind of table. Returns their paths."""
    engine = Engine.open(covered(root))
    engine.cancel("t", ["m150", "m290"], NOW + 1)
    for n in range(50, 60):
        engine.reschedule("t", f"m{n}", NOW + 2, due_ms=NOW + 1_040)
    engine.tick(NOW + 1_040)
    engine.submit("t", messages(50, 400, NOW), NOW + 1_041)
    engine.tick(NOW + 1_050)
    engine.close()
    tables = sorted([*root.rglob("delay_*.index"), *root.rglob("*.run")])
    assert {path.name.split("_")[0] + path.suffix for path in tables} == {"delay.index", "delay.run", "ready.run"}
    return tables


def test_documents_of_a_damaged_table_are_scanned(tmp_path: Path) -> None:
    tables = with_tables(tmp_path / "data")
    sound = shown(tmp_path / "data")
    for path in tables:
        data = path.read_bytes()
        for block in range(BLOCK, len(data) - 4, BLOCK):
            path.write_bytes(data[:block] + bytes([data[block] ^ 1]) + data[block + 1 :])
            assert shown(tmp_path / "data") == sound, f"{path.name}, byte {block}"
        path.write_bytes(data)


def test_damaged_documents_under_a_damaged_table_fail_the_query(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (table, *_) = [path for path in with_tables(root) if path.suffix == ".index"]
    segment = table.with_suffix(".bson")
    for path in (table, segment):
        data = bytearray(path.read_bytes())
        data[BLOCK if path == table else len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(Corrupt, match="Start the server"):
        rows(root, where=f"due_ms >= {NOW + 1_050}")
    Engine.open(root).close()
    assert Counter(row["state"] for row in rows(root))["sleep"] > 100
