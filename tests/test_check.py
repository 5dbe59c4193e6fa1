"""`turtlemq check`: every fault of a data folder is named, by file; the folder stays as it is, byte for byte. And a server's
reaction to the same folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harness.engine_disk import abandon
from tests.harness.server_process import running
from turtlemq.cli.verbs import command_line
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, Locked, Unavailable
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage.copy_on_write import CopyOnWriteDoor


def check(data: Path, *more: str, code: int = 0) -> dict[str, Any]:
    """Its answer, as JSON."""
    found = CliRunner().invoke(command_line("check"), ["check", "--data", str(data), "--json", *more])
    assert found.exit_code == code, (found.exit_code, found.output, found.exception)
    return dict(json.loads(found.output.splitlines()[-1])) if found.output.startswith("{") else {"said": found.output}


def fill(root: Path, *, close: bool) -> None:
    """Two topics with something in every file: sleepers, ready, reserved, settled and dead ones."""
    engine = Engine.open(root)
    for topic in ("t", "u"):
        engine.configure(topic, max_attempts=1, segment_bytes=8192)
        engine.submit(topic, [Message(f"body {i}".encode(), due_ms=i, id=f"m{i}") for i in range(40)], now_ms=0)
        engine.tick(30)
        for at in range(3):
            held = engine.reserve(topic, "default", 6, now_ms=31 + at).ids
            engine.ack(topic, "default", [held[0], f"-{held[1]}", held[2]], now_ms=31 + at, error="no")
            engine.topic(topic).checkpoint()
    if close:
        engine.close()
    else:
        abandon(engine)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    fill(tmp_path / "data", close=True)
    return tmp_path / "data"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    fill(tmp_path / "killed", close=False)
    return tmp_path / "killed"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Nothing is changed


@pytest.mark.parametrize("how", ["stopped", "killed", "torn", "never locked", "damaged"])
def test_a_folder_stays_as_it_is(data: Path, killed: Path, how: str) -> None:
    folder = killed if how in ("killed", "torn") else data
    log = folder / "topic" / "t" / "delay_0000000000.bson"
    if how == "torn":
        with log.open("ab") as file:
            file.write(b"half a document")
    if how == "never locked":
        (folder / "LOCK").unlink()
    if how == "damaged":
        flip(log, log.read_bytes().rindex(b"body 37"))
    log.with_name(log.name + ".tmp").write_bytes(b"unfinished")
    before = everything(folder)
    said = check(folder, code=how == "damaged")
    assert everything(folder) == before
    assert [line.split(": ")[1] for line in said["notes"]] == (
        ["15 bytes at its end belong to no whole batch; a start cuts them"] if how == "torn" else []
    )


def test_a_served_folder_is_left_alone_and_two_checks_may_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = Engine.open(data)
    assert "in use by process" in check(data, code=1)["said"]
    engine.close()
    door = CopyOnWriteDoor(data, tmp_path_factory.mktemp("shadow"))
    looking = Engine.open(door.root, door=door)
    assert check(data)["problems"] == []
    with pytest.raises(Locked):
        Engine.open(data)
    looking.close()


def test_a_scratch_folder_that_is_not_there_is_a_clear_error(data: Path) -> None:
    assert "--scratch" in check(data, "--scratch", str(data / "nowhere"), code=1)["said"]


# Every fault is named


def test_a_flipped_bit_of_a_message(data: Path) -> None:
    path = data / "topic" / "t" / "delay_0000000000.bson"
    flip(path, path.read_bytes().rindex(b"body 37"))
    assert any("t/delay_0000000000.bson" in line for line in check(data, code=1)["problems"])


def test_a_cache_that_a_start_would_not_take(data: Path) -> None:
    flip(data / "topic" / "t" / "offset", 40)
    assert check(data, code=1)["problems"] == [
        "topic/t/offset: it is not as it was left at the last stop; a start makes it again"
    ]


@pytest.mark.parametrize("kind", ["reserve", "history"])
def test_a_flipped_bit_of_an_event_before_the_checkpoint(data: Path, kind: str) -> None:
    path = data / "topic" / "t" / f"{kind}_0000000000.bson"
    flip(path, 400)
    assert any(f"t/{path.name}" in line for line in check(data, code=1)["problems"])


@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_dead_letters_that_are_gone_after_a_kill(killed: Path, how: str) -> None:
    path = killed / "topic" / "t" / "dead" / "delay_0000000000.bson"
    if how == "removed":
        path.unlink()
    elif how == "cut":
        os.truncate(path, 200)
    else:
        flip(path, path.read_bytes().rindex(b"body"))
    problems = check(killed, code=1)["problems"]
    assert any("dead letters were noted" in line for line in problems), problems


def test_settings_that_are_gone(data: Path) -> None:
    (data / "topic" / "t" / "topic.toml").unlink()
    assert any("topic.toml" in line for line in check(data, code=1)["problems"])


def test_a_topic_that_is_gone_is_named_until_it_is_deleted(data: Path) -> None:
    shutil.rmtree(data / "topic" / "t")
    assert any(line.startswith("t: its folder is gone") for line in check(data, code=1)["problems"])
    with running(data) as server:
        assert server.call("POST", "/v1/topics/t/messages", {"body": 1}).status == 503
        assert len(server.fetch("u", max=100)) > 0
        server.ok("DELETE", "/v1/topics/t")
        server.put("t", {"body": 1})
        server.stop()
    assert check(data)["problems"] == []


# One file in the wrong place


def test_a_clean_mark_that_is_another_file_counts_as_none(data: Path) -> None:
    shutil.copy(data / "topic" / "t" / "offset", data / "CLEAN")
    engine = Engine.open(data)
    assert not engine.was_clean
    assert engine.check() == []
    engine.close()


def test_sleepers_among_dead_letters_close_their_topic_only(killed: Path) -> None:
    folder = killed / "topic" / "t"
    shutil.copy(folder / "delay_0000000000.bson", folder / "dead" / "delay_0000000000.bson")
    assert any("is no dead letter" in line for line in check(killed, code=1)["problems"])
    engine = Engine.open(killed)
    assert list(engine.topics) == ["u"]
    with pytest.raises(Unavailable, match="is no dead letter"):
        engine.submit("t", [Message(b"", 0)], 0)
    engine.drop_topic("t")
    engine.submit("t", [Message(b"", 0)], 0)
    engine.close()


def test_a_folder_instead_of_a_file_closes_its_topic_only(data: Path) -> None:
    offset = data / "topic" / "t" / "offset"
    offset.unlink()
    offset.mkdir()
    engine = Engine.open(data)
    assert list(engine.topics) == ["u"]
    engine.close()


def test_an_interrupted_restore_is_not_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "topic.tmp").mkdir(parents=True)
    with pytest.raises(Corrupt, match="did not come to its end"):
        Engine.open(tmp_path / "data")


def test_settlements_that_retention_removed_are_not_missed(tmp_path: Path) -> None:
    """The history loses files that are older than leases of the reserve journal, which tell of the same messages."""
    settings = Settings(segment_bytes=4096, history_hours=0.01)
    engine = Engine.open(tmp_path, settings=settings)
    engine.move_group("t", "idle", "earliest", 0)
    engine.submit("t", [Message(b"", 0, id=f"m{i}") for i in range(32)], 0)
    engine.tick(0)
    ids = engine.reserve("t", "g", 31, 1_000).ids
    for id_ in ids:
        engine.ack("t", "g", [id_], 1_000)
    assert engine.reserve("t", "g", 1, 40_000).ids == ["m31"]
    before = len(list((tmp_path / "topic" / "t").glob("history_*.bson")))
    engine.tick(61_000)
    assert len(list((tmp_path / "topic" / "t").glob("history_*.bson"))) < before
    assert engine.check() == []
    abandon(engine)
    (tmp_path / "topic" / "t" / "offset").unlink()
    engine = Engine.open(tmp_path, settings=settings)
    assert engine.check() == []
    assert engine.ack("t", "g", [*ids, "m31"], 62_000).acked == 1
    engine.close()
