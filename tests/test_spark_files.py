"""The Spark source on files that the engine wrote, without Spark: its rows agree with the engine, to the last state.

These need pyarrow. Where it is not installed they are named as not run, with the command that brings it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOT_RUN = "not run: Spark's packages are not installed; `make test` installs them, then runs this"
pa = pytest.importorskip("pyarrow", reason=NOT_RUN)
pytest.importorskip("pyspark", reason=NOT_RUN)

from pyspark_turtlemq import pin_owners, pins  # noqa: E402 - only where pyarrow is
from pyspark_turtlemq import plan as plans  # noqa: E402
from pyspark_turtlemq.documents import DocumentSplit  # noqa: E402
from pyspark_turtlemq.kinds import KINDS  # noqa: E402
from pyspark_turtlemq.options import OPTION_NAMES, parse_options  # noqa: E402
from pyspark_turtlemq.predicates import Predicates, push_filter  # noqa: E402
from pyspark_turtlemq.snapshot import turtlemq_snapshot  # noqa: E402
from pyspark_turtlemq.snapshot_files import Vanished  # noqa: E402
from pyspark_turtlemq.table import read_table  # noqa: E402
from tests.harness.server_process import running  # noqa: E402
from tests.harness.spark_data import NOW, lived, messages, rows, sleepers  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.errors import Corrupt, InvalidArgument, NewerFormat  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq.topic.dead_letters import Filter  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "v1"


def asleep(root: Path, topic: str) -> dict[str, tuple[int, bytes]]:
    found = rows(root, topic=topic, columns="id,group,state,due_ms,body")
    named = {f"{row['group']}/{row['id']}" if row["group"] else row["id"]: row for row in found if row["state"] == "sleep"}
    return {id_: (row["due_ms"], row["body"]) for id_, row in named.items()}


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    root = tmp_path_factory.mktemp("life") / "data"
    return lived(root), root


def copied(life: tuple[Engine, Path], into: Path) -> Path:
    """The files as they lie, while the engine is open: as a kill would leave them."""
    shutil.copytree(life[1], into, ignore=shutil.ignore_patterns(pin_owners.FOLDER))
    return into


# The engine's answers


def test_sleepers_are_those_of_the_engine(life: tuple[Engine, Path]) -> None:
    engine, root = life
    assert asleep(root, "life") == sleepers(engine, "life")
    assert asleep(root, "empty") == {}


def test_every_state_is_the_engines_in_every_group(life: tuple[Engine, Path]) -> None:
    engine, root = life
    found = rows(root, topic="life", kind="messages")
    for row in found:
        view = engine.message("life", row["id"])
        assert view is not None, row
        whole = row["group"] is None or view.state == "cancelled"
        assert row["state"] == (view.state if whole else view.groups[row["group"]]["state"]), row
        if row["due_ms"] is not None and row["state"] != "cancelled":
            assert row["due_ms"] == view.due_ms, row
    assert {row["id"] for row in found} == {*(f"m{n}" for n in (*range(1000), *range(2000, 2030))), *asleep(root, "life")}
    stats, counts = engine.stats("life"), Counter(row["state"] for row in found)
    assert [counts[name] for name in ("sleep", "reserve", "history", "dead")] == [
        stats.sleep,
        stats.reserve,
        stats.history,
        stats.dead,
    ]


def test_the_ready_log_has_every_offset_once(life: tuple[Engine, Path]) -> None:
    engine, root = life
    found = rows(root, topic="life", kind="ready", body="binary")
    assert [row["offset"] for row in found] == list(range(engine.topic("life").stores.broker.ready.next_offset))
    assert Counter(row["state"] for row in found) == {"notice": 30, "ready": 970}
    row = next(row for row in found if row["id"] == "m17")
    assert (row["due_ms"], row["ready_ms"], row["created_ms"], row["body"]) == (NOW + 1_017, NOW + 1_100, NOW, b"body 17")


def test_journals_have_a_row_for_each_message(life: tuple[Engine, Path]) -> None:
    engine, root = life
    taken = Counter(row["event"] for row in rows(root, topic="life", kind="reserve"))
    assert taken["group"] == 2
    assert taken["lease"] == 60 + 5 + 920  # all that was ready, but for the forty that were settled
    settled = rows(root, topic="life", kind="history")
    assert Counter(row["outcome"] for row in settled) == {"acked": 740, "dead": 10}
    assert engine.groups("life")["default"].history == 740
    one = next(row for row in settled if row["id"] == "m3")
    assert (one["ready_ms"], one["reserved_ms"], one["at_ms"], one["attempt"]) == (NOW + 1_100, NOW + 1_110, NOW + 1_120, 1)


def test_dead_letters_tell_why(life: tuple[Engine, Path]) -> None:
    engine, root = life
    found = rows(root, topic="life", kind="dead", body="binary")
    letters = {letter.id: letter for letter in engine.topic("life").view.dead_letters.page(Filter())[0]}
    assert {row["id"] for row in found} == letters.keys() == {f"m{n}" for n in range(40, 50)}
    for row in found:
        letter = letters[row["id"]]
        told = (row["group"], row["error"], row["attempt"], row["due_ms"], row["dropped_ms"], row["created_ms"], row["body"])
        assert told == (
            letter.group,
            letter.error,
            letter.attempts,
            letter.due_ms,
            letter.dropped_ms,
            letter.created_ms,
            letter.body,
        )


def test_the_forecast_is_the_engines(life: tuple[Engine, Path]) -> None:
    engine, root = life
    found = {row["due_ms"]: row["messages"] for row in rows(root, topic="life", kind="forecast", bucket=60)}
    first = NOW - NOW % 60_000
    told = engine.forecast("life", first, 60_000, 1440)
    assert found == {first + i * 60_000: count for i, count in enumerate(told.counts) if count}


def test_optional_fields_come_as_they_were_given(life: tuple[Engine, Path]) -> None:
    row = next(row for row in rows(life[1], topic="life", body="string") if row["id"] == "rich")
    assert (row["priority"], row["json"], row["ttr_ms"], row["expires_ms"]) == ("high", True, 30_000, NOW + 999_000)
    assert (dict(row["headers"]), row["body"], row["body_bytes"]) == ({"kind": "order"}, '{"rich": true}', 14)
    assert row["due"].timestamp() * 1000 == row["due_ms"] == NOW + 900_000


def test_the_same_without_any_table(life: tuple[Engine, Path], tmp_path: Path) -> None:
    root = copied(life, tmp_path / "data")
    for path in [*root.rglob("*.run"), *root.rglob("*.index"), *root.rglob("*.dead")]:
        path.unlink()
    for kind in ("delay", "ready", "messages", "forecast"):
        assert read_table(root, topic="life", kind=kind) == read_table(life[1], topic="life", kind=kind)


def test_states_of_documents_that_have_ended(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", messages(6), NOW)
    engine.cancel("t", ["m1"], NOW)
    engine.reschedule("t", "m2", NOW, due_ms=NOW + 99_000)
    engine.tick(NOW + 1_000)
    found = {(row["id"], row["due_ms"]): row["state"] for row in rows(tmp_path / "data")}
    assert found == {
        ("m0", NOW + 1_000): "handed_off",
        ("m1", NOW + 1_001): "cancelled",
        ("m2", NOW + 1_002): "replaced",
        ("m2", NOW + 99_000): "sleep",
        **{(f"m{n}", NOW + 1_000 + n): "sleep" for n in (3, 4, 5)},
    }
    engine.close()


# Torn or damaged files


@pytest.mark.parametrize(
    ("topic", "ids", "holes"),
    [
        ("torn_tail", "x1 x2 x3", 0),
        ("zero_tail", "x1 x2 x3 x4 x5", 0),
        ("bad_checksum_at_the_end", "x1 x2 x3", 0),
        ("bad_checksum_in_the_middle", "x1 x3 x4 x5", 1),
        ("damaged_and_torn", "x1 x3", 1),
        ("bad_header", "x1 x2 x3 x4 x5", 0),
    ],
)
def test_what_is_torn_is_cut_and_what_is_damaged_is_told(tmp_path: Path, topic: str, ids: str, holes: int) -> None:
    shutil.copytree(GOLDEN / "data", tmp_path / "data")
    found = rows(tmp_path / "data", topic=topic, columns="id,damage,position")
    assert [row["id"] for row in found if row["damage"] is None] == ids.split()
    assert len([row for row in found if row["damage"]]) == holes
    assert [row["id"] for row in rows(tmp_path / "data", topic=topic, mode="DROPMALFORMED")] == ids.split()
    if topic in ("bad_checksum_in_the_middle", "damaged_and_torn", "bad_header"):
        with pytest.raises(Corrupt, match="PERMISSIVE"):
            rows(tmp_path / "data", topic=topic, mode="FAILFAST")


def test_after_a_proper_stop_nothing_is_torn(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "clean", tmp_path / "data")
    found = rows(tmp_path / "data", columns="id,damage")
    assert len([row for row in found if row["damage"]]) == 1
    assert {row["id"] for row in found if row["id"]} < {"x1", "x2", "x3"}


def test_a_flipped_byte_under_a_table_is_found(life: tuple[Engine, Path], tmp_path: Path) -> None:
    root = copied(life, tmp_path / "data")
    for path in (root / "topic" / "life").glob("delay_*.bson"):
        path.write_bytes(path.read_bytes().replace(b'"rich": true', b'"rich": trux'))
    found = rows(root, topic="life", columns="id,damage,body")
    assert [row["damage"] for row in found if row["damage"]] == ["checksum does not match"]
    assert "rich" not in {row["id"] for row in found}
    assert "rich" not in {row["id"] for row in rows(root, topic="life", columns="id")}
    assert "rich" in {row["id"] for row in rows(root, topic="life", columns="id", verify="never")}


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "newer_folder", tmp_path / "data")
    with pytest.raises(NewerFormat):
        rows(tmp_path / "data")


# Filters


FILTERS: list[tuple[str, str, Any]] = [
    ("due_ms", "GreaterThan", NOW + 700_535),
    ("due_ms", "LessThanOrEqual", NOW + 800_000),
    ("state", "EqualTo", "sleep"),
    ("id", "In", ["m2001", "rich", "m41"]),
    ("topic", "EqualTo", "life"),
    ("seq", "GreaterThanOrEqual", (NOW + 1_000) << 20),
]


@pytest.mark.parametrize(("column", "kind", "value"), FILTERS)
def test_a_filter_lets_the_same_rows_through(life: tuple[Engine, Path], column: str, kind: str, value: Any) -> None:
    checks: dict[str, Callable[[Any], bool]] = {
        "GreaterThan": lambda x: x > value,
        "GreaterThanOrEqual": lambda x: x >= value,
        "LessThanOrEqual": lambda x: x <= value,
        "EqualTo": lambda x: x == value,
        "In": lambda x: x in value,
    }
    wanted = Predicates()
    push_filter(wanted, kind, (column,), value)
    expected = [row for row in rows(life[1]) if checks[kind](row[column])]
    found = rows(life[1], wanted)
    assert [row for row in found if checks[kind](row[column])] == expected != []
    assert len(found) <= len(expected) + 1  # an end of a range may come along: Spark filters once more


def test_conditions_in_words_are_kept_to_exactly(life: tuple[Engine, Path]) -> None:
    cases: dict[str, Callable[[dict[str, Any]], bool]] = {
        f"due_ms > {NOW + 700_535} and due_ms <= {NOW + 800_000}": lambda row: NOW + 700_535 < row["due_ms"] <= NOW + 800_000,
        "state = 'sleep' AND id in ('rich', 'm41')": lambda row: row["state"] == "sleep" and row["id"] in ("rich", "m41"),
        "group = 'default'": lambda row: row["group"] == "default",
    }
    for text, check in cases.items():
        expected = [row for row in rows(life[1]) if check(row)]
        assert rows(life[1], where=text) == expected != []
    for text, says in (("due ~ 3", "no condition"), ("error = 'x'", "knows nothing of 'error'"), ("id > 'a'", "can be = or in")):
        with pytest.raises(InvalidArgument, match=says):
            rows(life[1], where=text)


def test_slices_for_any_number_of_tasks_hold_every_document_once(life: tuple[Engine, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(plans, "_SPLIT_BYTES_MIN", 1)
    for kind in ("delay", "ready", "dead", "history"):
        whole = read_table(life[1], kind=kind)
        for tasks in (2, 7, 50):
            assert read_table(life[1], kind=kind, numPartitions=tasks) == whole


# One moment


def test_a_snapshot_stands_still_while_everything_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "data"
    engine = Engine.open(root)
    engine.configure("t", segment_messages=100, run_messages=20, compact_live_ratio=0.5)
    for n in range(0, 500, 10):
        engine.submit("t", messages(10, n), NOW)
    with turtlemq_snapshot(root) as moment:
        before = {kind: read_table(root, kind=kind, snapshot=moment.name) for kind in ("delay", "ready", "messages")}
        engine.cancel("t", [f"m{n}" for n in range(0, 500, 3)], NOW)
        engine.submit("t", messages(200, 1_000), NOW)
        engine.tick(NOW + 1_400)
        engine.compact("t")
        engine.compact("t")
        files = {path.name for path in (root / "topic" / "t").iterdir()}
        assert "delay_0000000000.bson" not in files or engine.stats("t").segments > 1
        for kind, table in before.items():
            assert read_table(root, kind=kind, snapshot=moment.name) == table
    assert not (root / pin_owners.FOLDER).exists()
    assert asleep(root, "t") == sleepers(engine, "t")
    engine.close()


def test_a_live_server_may_do_what_it_likes_meanwhile(tmp_path: Path) -> None:
    """While producers, seals and compaction go on, every read is one moment: nothing that was stored before is missing, nothing
    is there twice."""
    root = tmp_path / "data"
    with running(root) as server:
        server.ok("PUT", "/v1/topics/t", {"segment_bytes": 16_384, "compact_live_ratio": 0.9})
        stored: set[str] = set()
        for round_ in range(12):
            ids = [f"r{round_}-{n}" for n in range(100)]
            server.put("t", *({"id": id_, "body": id_, "delay": 3600} for id_ in ids))
            stored |= set(ids)
            gone = sorted(stored)[:30]
            assert server.ok("POST", "/v1/topics/t/cancel", {"ids": gone})["cancelled"] == 30
            stored -= set(gone)
            if round_ % 3 == 2:
                server.ok("POST", "/v1/topics/t/compact")
            found = [row["id"] for row in rows(root, columns="id,state") if row["state"] == "sleep"]
            assert len(found) == len(set(found))
            assert set(found) == stored
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert set(asleep(root, "t")) == stored


def test_a_torn_batch_of_a_killed_writer_is_not_there(life: tuple[Engine, Path], tmp_path: Path) -> None:
    root = copied(life, tmp_path / "data")
    newest = max((root / "topic" / "life").glob("delay_*.bson"))
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-7])
    found = asleep(root, "life")
    assert len(found) == len(asleep(life[1], "life")) - 30  # the batch was written as one
    engine = Engine.open(root)
    assert found == sleepers(engine, "life")
    engine.close()


def test_without_links_a_read_names_the_vanished_file(tmp_path: Path) -> None:
    root = tmp_path / "data"
    engine = Engine.open(root)
    engine.submit("t", messages(10), NOW)
    told = parse_options({"path": str(root), "pin": "false"})
    made = plans.make_plan(told, Predicates())
    assert not (root / pin_owners.FOLDER).exists()
    path = root / "topic" / "t" / "delay_0000000000.bson"
    os.replace(shutil.copy(path, tmp_path / "copy"), path)
    piece = made.partitions[0][0]
    assert isinstance(piece, DocumentSplit)
    with pytest.raises(Vanished, match="Run the query again"):
        piece.part.file.map()


def test_pins_of_sessions_that_are_over_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "data"
    Engine.open(root).close()
    mine = pins.take_snapshot(root, [], ())
    assert mine.folder is not None
    other = pins.take_snapshot(root, [], ())
    assert other.folder is not None
    (other.folder / pin_owners.OWNER).write_text(f"{os.uname().nodename} 1 1")  # a number that another process has by now
    assert pin_owners.remove_stale(root) == 1
    assert mine.folder.exists()
    mine.release()


# Wrong use


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "sleep"}, "kind is one of delay, ready"),
        ({"columns": "id,when"}, "no column 'when'"),
        ({"topic": "nobody"}, "there is no topic 'nobody'"),
        ({"colums": "id"}, "there is no option 'colums'"),
        ({"mode": "loud"}, "mode is one of PERMISSIVE"),
        ({"numPartitions": "-1"}, "whole number"),
        ({"snapshot": "yesterday"}, "no snapshot 'yesterday'"),
    ],
)
def test_wrong_options_say_what_is_right(life: tuple[Engine, Path], options: dict[str, str], says: str) -> None:
    with pytest.raises((InvalidArgument, Vanished), match=says):
        read_table(life[1], None, **options)


def test_topics_by_list_and_glob(life: tuple[Engine, Path]) -> None:
    for topic, names in (("life,empty", {"life"}), ("l*", {"life"}), (json.dumps(["empty"]), set()), ("nothing*", set())):
        assert set(read_table(life[1], topic=topic, columns="topic,state")["topic"].to_pylist()) - {"empty"} == names


def test_ids_that_hold_documents_split_nothing(tmp_path: Path) -> None:
    """Bodies that are segments themselves: documents are found by lengths, never by searching."""
    engine = Engine.open(tmp_path / "data")
    engine.submit("a", messages(50), NOW)
    inner = (tmp_path / "data" / "topic" / "a" / "delay_0000000000.bson").read_bytes()
    engine.submit("b", [Message(inner, NOW + n, f"b{n}") for n in range(20)], NOW - 1)
    found = rows(tmp_path / "data", topic="b", columns="id,body", numPartitions=5)
    assert [(row["id"], row["body"] == inner) for row in found] == [(f"b{n}", True) for n in range(20)]
    engine.close()


# Documentation


def test_the_page_names_every_column_and_every_option() -> None:
    page = (Path(__file__).parent.parent / "docs" / "SPARK.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    for name, kind in KINDS.items():
        first, second = [row for row in cells if row[0].split()[0] == f"`{name}`" and len(row) in (2, 3)][:2]
        assert re.findall(r"`(\w+)`", first[2]) == list(kind.states), name
        assert second[1] == " ".join(f"`{column}`" for column in kind.columns)
    assert {name for name, kind in KINDS.items() if kind.streams} == set(re.findall(r"`(\w+)`", page.split("Of kind ")[1][:30]))
    for name in OPTION_NAMES:
        assert f"`{name}`" in page, name
