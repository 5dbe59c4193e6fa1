"""The golden files of version 1 are opened, or refused with a clear error, by every TurtleMQ there will ever be.

They were made by tests/golden/make.py and are never made again. Everything that is expected of them is written out here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.engine_disk import abandon
from turtlemq.engine import Engine
from turtlemq.errors import NewerFormat, NotOurs, TurtleError, Unavailable
from turtlemq.model import Message, State, StoredMessage

GOLDEN = Path(__file__).resolve().parent / "golden" / "v1"
TABLES = GOLDEN.parent / "tables_2"  # tables of the second version, of the same documents
SEEDED_TABLES = GOLDEN.parent / "tables_3"  # of the third, with a seed
NOW = 1_700_000_000_000
FIRST, SECOND, THIRD = (NOW + 100, b"body of x1"), (NOW + 99, b"body of x2"), (NOW + 99, b"body of x3")
FOURTH, FIFTH = (NOW + 98, b"body of x4"), (NOW + 98, b"body of x5")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(name="engine", scope="module")
def an_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One for all tests that only look."""
    engine = Engine.open(Path(shutil.copytree(GOLDEN / "data", tmp_path_factory.mktemp("golden") / "data")))
    yield engine
    engine.close()


def asleep(engine: Engine, topic: str) -> dict[str, tuple[int, bytes]]:
    return {found.id: (found.due_ms, found.body) for found in engine.browse(topic)[0]}


def test_the_good_one_gives_back_everything(engine: Engine) -> None:
    seq = NOW << 20
    headers = {"kind": "order", "$ref": "x", "empty": ""}
    assert engine.browse("good") == (
        [
            StoredMessage("t1hf7yau010000", State.SLEEP, NOW + 500, NOW + 1, seq + (1 << 20), 0, 1, b"given-1"),
            StoredMessage("t1hf7yau010001", State.SLEEP, NOW + 500, NOW + 1, seq + (1 << 20) + 1, 30_000, 4, b'{"n":2}'),
            StoredMessage("a", State.SLEEP, NOW + 2_000, NOW, seq + (3 << 20), 0, 0, b"changed"),
            StoredMessage(
                "b-é\U0001f422",
                State.SLEEP,
                NOW + 3_000,
                NOW + 2,
                seq + (2 << 20),
                0,
                0,
                b"rich",
                expires_ms=NOW + 9_000,
                headers=headers,
            ),
        ],
        None,
    )
    assert engine.get("good", "c") is None, "it was cancelled"


ASLEEP = {
    "torn_tail": {"x1": FIRST, "x2": SECOND, "x3": THIRD},
    "bad_checksum_at_the_end": {"x1": FIRST, "x2": SECOND, "x3": THIRD},
    "bad_checksum_in_the_middle": {"x1": FIRST, "x3": THIRD, "x4": FOURTH, "x5": FIFTH},
    "zero_tail": {"x1": FIRST, "x2": SECOND, "x3": THIRD, "x4": FOURTH, "x5": FIFTH},
    "damaged_and_torn": {"x1": FIRST, "x3": THIRD},
    "bad_header": {"x1": FIRST, "x2": SECOND, "x3": THIRD, "x4": FOURTH, "x5": FIFTH},
    "sealed": {f"s{i}": (NOW + 1_000 - 10 * i, b"body-%d" % i) for i in (0, 2, 3, 4, 5, 7)},
    "handed_off": {"h3": (NOW + 30, b"body-3"), "h4": (NOW + 40, b"body-4")},
}


@pytest.mark.parametrize("topic", ASLEEP)
def test_what_sleeps_is_found(engine: Engine, topic: str) -> None:
    assert asleep(engine, topic) == ASLEEP[topic]
    for id_, (due_ms, body) in ASLEEP[topic].items():
        found = engine.get(topic, id_)
        assert found is not None
        assert (found.due_ms, found.body) == (due_ms, body)


DAMAGE = {
    "bad_checksum_in_the_middle": ("delay_0000000000.bson", 268, 85),
    "damaged_and_torn": ("delay_0000000000.bson", 258, 85),
    "bad_header": ("delay_0000000000.bson", 0, 167),
}


def test_damage_is_reported_with_file_position_and_remedy(engine: Engine) -> None:
    reports = engine.damage()
    assert {topic: [(d.file, d.position, d.length) for d in found] for topic, found in reports.items()} == {
        topic: [place] for topic, place in DAMAGE.items()
    }
    for found in reports.values():
        assert "left out and the rest is served. Restore the file from a backup" in str(found[0])


SIZES = {"torn_tail": 421, "bad_checksum_at_the_end": 435, "zero_tail": 591, "damaged_and_torn": 428}


@pytest.mark.parametrize("topic", SIZES)
def test_what_is_torn_is_cut_back_to_the_last_whole_batch(engine: Engine, topic: str) -> None:
    path = engine.root / "topic" / topic / "delay_0000000000.bson"
    assert path.stat().st_size == SIZES[topic]
    assert path.read_bytes() == (GOLDEN / "data" / "topic" / topic / path.name).read_bytes()[: SIZES[topic]]


@pytest.mark.parametrize("topic", ["good", "sealed", "handed_off", "bad_checksum_in_the_middle"])
def test_a_segment_that_is_not_torn_is_not_touched(engine: Engine, topic: str) -> None:
    folder = GOLDEN / "data" / "topic" / topic
    for file in folder.glob("*.bson"):
        assert (engine.root / "topic" / topic / file.name).read_bytes() == file.read_bytes()


def test_a_sealed_segment_is_read_through_its_table(tmp_path: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))
    table = data / "topic" / "sealed" / "delay_0000000000.index"
    shutil.copyfile(TABLES / table.name, table)
    there = table.stat().st_ino
    engine = Engine.open(data)
    assert asleep(engine, "sealed") == ASLEEP["sealed"]
    assert (table.stat().st_ino, table.read_bytes()) == (there, (TABLES / table.name).read_bytes()), "taken as it is"
    engine.close()


@pytest.mark.parametrize(("seed", "expected"), [("0" * 16, TABLES), ("5eed" * 4, SEEDED_TABLES)], ids=["0", "seeded"])
def test_a_table_of_the_first_version_is_built_again(tmp_path: Path, seed: str, expected: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))
    (data / "HASH_SEED").write_text(f"{seed}\n")
    engine = Engine.open(data)
    table = data / "topic" / "sealed" / "delay_0000000000.index"
    assert table.read_bytes() == (expected / table.name).read_bytes()
    assert asleep(engine, "sealed") == ASLEEP["sealed"]
    engine.close()


def test_a_sealed_segment_is_read_without_its_table_too(tmp_path: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))
    (data / "topic" / "sealed" / "delay_0000000000.index").unlink()
    engine = Engine.open(data)
    assert asleep(engine, "sealed") == ASLEEP["sealed"]
    engine.close()


def test_only_the_damage_is_wrong_at_every_opening(tmp_path: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))
    first = Engine.open(data)
    state = {topic: asleep(first, topic) for topic in sorted(first.topics)}
    problems = first.check()
    assert all("checksum does not match" in line or "header is damaged" in line for line in problems), problems
    first.close()
    second = Engine.open(data)
    assert {topic: asleep(second, topic) for topic in sorted(second.topics)} == state
    second.close()


def test_handed_off_messages_are_ready_and_others_fire_in_order(tmp_path: Path) -> None:
    engine = Engine.open(Path(shutil.copytree(GOLDEN / "data", tmp_path / "data")))
    assert list(engine.reserve("handed_off", "workers", 10, NOW + 25).ids) == ["h0", "h1", "h2"]
    engine.tick(NOW + 10_000)
    for topic, sleepers in ASLEEP.items():
        if topic != "handed_off":
            reserved = engine.reserve(topic, "workers", 10, NOW + 10_000)
            assert list(reserved.ids) == sorted(sleepers, key=lambda id_: (sleepers[id_][0], id_)), topic
    engine.close()


def test_after_a_clean_stop_bad_bytes_at_the_end_are_damage(tmp_path: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "clean", tmp_path / "data"))
    engine = Engine.open(data)
    assert engine.was_clean
    assert asleep(engine, "t") == {"x1": FIRST, "x2": SECOND}
    ((damage,),) = engine.damage().values()
    assert (damage.file, damage.position, damage.length) == ("delay_0000000000.bson", 328, 85)
    engine.close()
    assert (data / "topic" / "t" / "delay_0000000000.bson").stat().st_size == 413


def test_a_folder_of_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    data = Path(shutil.copytree(GOLDEN / "newer_folder", tmp_path / "data"))
    for _ in range(2):
        with pytest.raises(NewerFormat) as caught:
            Engine.open(data)
        assert "format 2, this program reads up to 1. This data was written by a newer TurtleMQ. Run that" in str(caught.value)
        assert untouched(data, "newer_folder")


def untouched(data: Path, name: str) -> bool:
    left = contents(data)
    left.pop("LOCK")
    left.pop("BALLAST", None)
    left.pop("RESERVE", None)
    left.pop("HASH_SEED", None)
    return left == contents(GOLDEN / name)


REFUSED: dict[str, tuple[type[TurtleError], str]] = {
    "newer_file": (NewerFormat, "t/delay_0000000000.bson: format 2, this program reads up to 1. This data was written by a"),
    "not_ours": (NotOurs, "t/delay_0000000000.bson: This file was not written by TurtleMQ. Move it out of the data folder."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unreadable_topic_is_refused_and_left_untouched(tmp_path: Path, name: str) -> None:
    data = Path(shutil.copytree(GOLDEN / name, tmp_path / "data"))
    error, says = REFUSED[name]
    for _ in range(2):
        engine = Engine.open(data)
        assert isinstance(engine.trouble["t"], error)
        assert says in str(engine.trouble["t"])
        with pytest.raises(Unavailable, match="cannot be opened"):
            engine.submit("t", [Message(b"", 0)], 0)
        assert any(says in line for line in engine.check())
        abandon(engine)
        assert untouched(data, name)
