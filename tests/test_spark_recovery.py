"""Spark and the engine open damaged and torn files alike: one shows the messages that the other serves, no more and no fewer.

Both use the decisions of `turtlemq.segment.readonly` and `turtlemq.broker.ready_readonly`; here they are held against each other.
These need pyarrow. Where it is not installed they are named as not run, with the command that brings it.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.spark_session import need_packages

need_packages()

from pyspark_turtlemq import moments, pins  # noqa: E402 - only where pyarrow is
from pyspark_turtlemq.snapshot_files import TopicFiles  # noqa: E402
from tests.harness.broker_insides import logs_of  # noqa: E402
from tests.harness.spark_data import NOW, rows, sleepers  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq.segment import format as f  # noqa: E402
from turtlemq.segment.readonly import data_start  # noqa: E402
from turtlemq.segment.scan import scan  # noqa: E402
from turtlemq.storage import names  # noqa: E402

State = tuple[dict[str, tuple[int, bytes]], dict[int, str]]  # sleepers by id, ids of the ready log by offset


def rolled(root: Path) -> Engine:
    """An open engine with a topic `t`: sealed and growing delay segments, several ready segments, tombstones."""
    engine, chance, count = Engine.open(root), random.Random(3), 0
    engine.configure("t", segment_messages=150, run_messages=40, segment_bytes=1 << 16)
    for at in range(NOW, NOW + 30_000, 1_000):
        fresh = range(count, count + chance.randrange(20, 80))
        batch = [Message(b"%d" % n + b"x" * chance.randrange(400), at + chance.randrange(25_000), f"m{n}") for n in fresh]
        engine.submit("t", batch, at)
        count += len(batch)
        engine.cancel("t", [f"m{chance.randrange(count)}" for _ in range(3)], at + 1)
        engine.tick(at + 2)
    return engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data folders as a kill and as a proper stop leave them."""
    root = tmp_path_factory.mktemp("recovery")
    engine = rolled(root / "clean")
    shutil.copytree(root / "clean", root / "killed")
    engine.close()
    return {name: root / name for name in ("clean", "killed")}


def by_engine(root: Path) -> State:
    """Opens the folder for good: the engine cuts and repairs."""
    engine = Engine.open(root)
    ready = logs_of(engine, "t").ready
    offsets = np.arange(ready.first_offset, ready.next_offset)
    read, _ = ready.read(offsets)
    documents = {
        offset: f.decode(bytes(read.buffer[start : start + int(head["len"])])).id
        for offset, start, head, good in zip(offsets.tolist(), read.starts.tolist(), read.heads, read.good, strict=True)
        if good
    }
    asleep = sleepers(engine, "t")
    engine.close()
    return asleep, documents


def by_spark(root: Path) -> State:
    found = [row for row in rows(root, topic="t", columns="id,state,due_ms,body") if row["state"] == "sleep"]
    assert max(Counter(row["id"] for row in found).values(), default=1) == 1
    ready = rows(root, topic="t", kind="ready", columns="offset,id,body,damage")
    documents = {row["offset"]: row["id"] for row in ready if row["damage"] is None}
    return {row["id"]: (row["due_ms"], row["body"]) for row in found}, documents


def spoil(path: Path, how: str, chance: random.Random) -> None:
    """Damage one file: flip a bit, zero some bytes, cut the end, append a copy of a document or zeros."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif how == "zero":
        data[at : at + 300] = bytes(len(data[at : at + 300]))
    elif how == "cut":
        del data[chance.choice((at, len(data) - chance.randrange(1, 400))) :]
    elif how == "copy":
        name = names.parse(path.name)
        assert name is not None
        documents = scan(bytes(data), data_start(name.kind, "t", name.base), len(data), sealed=True, rising=False)
        ends = np.flatnonzero((documents.flags & f.CONTINUES) == 0)  # the end of a batch, or the copy would be torn
        i = int(ends[chance.randrange(min(len(ends), 3))])
        data += data[int(documents.positions[i]) : int(documents.positions[i] + documents.lengths[i])]
    else:
        data += bytes(chance.randrange(1, 200))
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "zero", "cut", "copy", "grow"])
@pytest.mark.parametrize("stop", ["clean", "killed"])
@pytest.mark.parametrize("seed", range(6))
def test_spark_shows_the_messages_that_the_engine_serves(
    folders: dict[str, Path], tmp_path: Path, stop: str, how: str, seed: int
) -> None:
    chance = random.Random(f"{stop} {how} {seed}")
    shutil.copytree(folders[stop], tmp_path / "spark")
    files = sorted((tmp_path / "spark" / "topic" / "t").iterdir())
    for cache in (path for path in files if path.suffix in (".index", ".run", ".dead")):
        if cache.suffix == ".dead" or (seed > 3 and chance.random() < 0.5):  # Spark reads tombstones, not the bits made of them
            cache.unlink()
    delay, ready = (
        [path for path in files if path.suffix == ".bson" and path.name.startswith(log)] for log in ("delay", "ready")
    )
    newest = ([delay[-1]], [ready[-1]])
    for path in newest[seed % 2] if seed < 4 else chance.sample([*delay, *ready], 2):
        spoil(path, how, chance)
    shutil.copytree(tmp_path / "spark", tmp_path / "engine")
    assert by_spark(tmp_path / "spark") == by_engine(tmp_path / "engine")


def test_a_snapshot_keeps_the_mark_of_a_proper_stop(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["clean"], tmp_path / "data")
    with pins.take_snapshot(tmp_path / "data", ["t"], ("delay", "ready")) as snapshot:
        mark = snapshot.topics["t"].clean_mark
        assert mark is not None
        Engine.open(tmp_path / "data").close()
        assert pins.load_snapshot(tmp_path / "data", snapshot.name).topics["t"].clean_mark == mark
    with pins.take_snapshot(folders["killed"], ["t"], ("delay",)) as snapshot:
        assert snapshot.topics["t"].clean_mark is None


def test_a_mark_does_not_count_if_a_server_starts_meanwhile(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders["clean"], tmp_path / "data")
    pin = moments.pin_topic

    def pinned(*args: Any) -> TopicFiles:
        (tmp_path / "data" / names.CLEAN).unlink(missing_ok=True)  # a server removes it before it writes
        return pin(*args)

    monkeypatch.setattr(pins, "pin_topic", pinned)
    with pins.take_snapshot(tmp_path / "data", ["t"], ("delay", "ready")) as snapshot:
        assert snapshot.topics["t"].clean_mark is None
