"""Data that the Spark source need not look at: other due times, other documents, other keys; and bodies as text. Without Spark.

These need pyarrow. Where it is not installed they are named as not run, with the command that brings it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.spark_session import need_packages

need_packages()

from pyspark_turtlemq import pin_owners  # noqa: E402 - only where pyarrow is
from pyspark_turtlemq import plan as plans  # noqa: E402
from pyspark_turtlemq.documents import Chunk, DocumentSplit  # noqa: E402
from pyspark_turtlemq.options import parse_options  # noqa: E402
from pyspark_turtlemq.predicates import Predicates  # noqa: E402
from tests.harness.spark_data import NOW, messages, rows  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.model import Message  # noqa: E402


def test_a_due_range_of_a_sealed_segment_is_one_slice(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.configure("t", segment_messages=1_000)
    engine.submit("t", messages(1_000, due_ms=NOW + 50_000), NOW)
    engine.submit("t", messages(1, 9_999), NOW)
    engine.compact("t")
    engine.close()
    wanted = Predicates()
    wanted.narrow("due", NOW + 50_100, NOW + 50_109)
    told = parse_options({"path": str(tmp_path / "data"), "columns": "id,body"})
    whole, part = plans.make_plan(told, Predicates()), plans.make_plan(told, wanted)
    pieces = [piece for task in part.partitions for piece in task if isinstance(piece, DocumentSplit) and piece.part.sealed]
    assert [(piece.first, piece.last) for piece in pieces] == [(100, 110)]
    assert part.bytes * 10 < whole.bytes
    assert [row["id"] for row in rows(tmp_path / "data", wanted, columns="id,body")] == [f"m{n}" for n in range(100, 110)]
    pin_owners.release_session(pin_owners.session_label())
    assert not (tmp_path / "data" / pin_owners.FOLDER).exists()


def test_a_due_range_of_a_growing_segment_reads_only_itself(tmp_path: Path, monkeypatch: Any) -> None:
    """Its runs are in the order of arrival, but their tables know when each document is due. One that had ended when its table
    was made has no key there: it comes all the same."""
    engine = Engine.open(tmp_path / "data")
    engine.configure("t", run_messages=200)
    due = [NOW + 1_000 + (n * 37) % 1_000 for n in range(1_000)]
    for n in range(0, 1_000, 50):
        engine.submit("t", [Message(b"x" * (m % 5), due[m], f"m{m}") for m in range(n, n + 50)], NOW)
        engine.cancel("t", [f"m{n}", f"m{n + 1}"], NOW)
    engine.close()
    wanted = [(f"m{n}", due[n]) for n in range(1_000) if NOW + 1_100 <= due[n] < NOW + 1_200]
    where = f"due_ms >= {NOW + 1_100} and due_ms < {NOW + 1_200}"
    looked: list[int] = []
    judge = Chunk._read_prefixes

    def counted(self: Chunk, starts: Any, *more: Any) -> Any:
        looked.append(len(starts))
        return judge(self, starts, *more)

    monkeypatch.setattr(Chunk, "_read_prefixes", counted)
    monkeypatch.setattr(plans, "_SPLIT_BYTES_MIN", 1)
    for tasks in (1, 4):
        looked.clear()
        found = rows(tmp_path / "data", columns="id,due_ms,state", where=where, numPartitions=tasks)
        assert [(row["id"], row["due_ms"]) for row in found] == wanted
        assert {row["state"] for row in found} == {"sleep", "cancelled"}
        assert len(wanted) <= sum(looked) <= len(wanted) + 4 * 20  # two tombstones a batch, and their messages, have no key
    assert rows(tmp_path / "data", where=f"due_ms > {1 << 62}") == []


@pytest.mark.parametrize("bucket", [1, 60, 3600])
def test_a_forecast_of_many_is_the_engines_whatever_the_bucket(tmp_path: Path, bucket: int) -> None:
    """Sealed segments, one with ended documents, and one that grows; more in a bucket than a leaf of a table holds, and less."""
    engine = Engine.open(tmp_path / "data")
    engine.configure("t", segment_messages=3_000, run_messages=1_000)
    for n in range(0, 8_000, 500):
        engine.submit("t", [Message(b"x", NOW + (m * 7_919) % 1_000_000, f"m{m}") for m in range(n, n + 500)], NOW - 1_000)
    engine.compact("t")
    engine.cancel("t", [f"m{n}" for n in range(100, 1_000, 7)], NOW - 500)
    engine.tick(NOW + 123_456)
    first = NOW - NOW % (bucket * 1_000)
    told = engine.forecast("t", first, bucket * 1_000, 2_000)
    found = {row["due_ms"]: row["messages"] for row in rows(tmp_path / "data", kind="forecast", bucket=bucket)}
    assert found == {first + i * bucket * 1_000: count for i, count in enumerate(told.counts) if count}
    engine.close()


@pytest.mark.parametrize(("body", "text"), [(b"plain", "plain"), ("grün".encode(), "grün"), (b"\xff!", "\ufffd!"), (b"", "")])
def test_bodies_as_text(tmp_path: Path, body: bytes, text: str) -> None:
    """All plain, or one among them that is not, or that is no text at all; of one length and of many."""
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [*messages(5), Message(body, NOW + 9_000, "odd")], NOW)
    engine.submit("alone", [Message(body, NOW + 9_000, f"odd{n}") for n in range(3)], NOW)
    engine.close()
    found = {row["id"]: row["body"] for row in rows(tmp_path / "data", columns="id,body", body="string")}
    assert found == {f"m{n}": f"body {n}" for n in range(5)} | dict.fromkeys(("odd", "odd0", "odd1", "odd2"), text)
