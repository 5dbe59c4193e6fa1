"""Backups: of a stopped folder and of one under load, in steps, and damaged ones. Answered requests are in them, always."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.backup_traffic import Traffic, line
from tests.harness.doors import Failing
from tests.harness.server_process import running
from turtlemq import backup as b
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, DiskFull, InvalidArgument, NewerFormat
from turtlemq.model import Message
from turtlemq.storage.door import Door

NOW = 1_794_810_562_123


def fill(root: Path, first: int = 0, topics: tuple[str, ...] = ("a", "b")) -> None:
    """Messages in every state, in segments of every kind."""
    engine = Engine.open(root)
    for topic in topics:
        engine.configure(topic, segment_bytes=8192, max_attempts=1)
        for start in range(first, first + 200, 50):
            ids = range(start, start + 50)
            engine.submit(topic, [Message(b"x" * 60, due_ms=1_000 + i, id=f"m{i}", headers={"n": str(i)}) for i in ids], now_ms=0)
            for _ in range(20):
                engine.topics[topic].maintain()
        engine.cancel(topic, [f"m{first + 150}"], now_ms=0)
        engine.tick(1_000 + first + 100)
        held = engine.reserve(topic, "default", 50, now_ms=2_000).ids
        engine.ack(topic, "default", [*held[:20], *(f"-{id_}" for id_ in held[20:30])], now_ms=2_001, error="broken")
    engine.close()


def story(root: Path) -> dict[str, Any]:
    """All that can be known of the messages in a folder; nothing may be wrong with it."""
    engine = Engine.open(root)
    try:
        assert engine.check() == []
        assert engine.damage() == {}
        told: dict[str, Any] = {}
        for topic in engine.topics:
            views = {f"m{i}": engine.message(topic, f"m{i}") for i in range(400)}
            told[topic] = {
                id_: (v.state, v.due_ms, v.body, v.optional.headers, v.attempt) for id_, v in views.items() if v is not None
            }
        return told
    finally:
        engine.close()


def made(root: Path, into: Path, now_ms: int = NOW, door: Door | None = None) -> b.Manifest:
    door = door or Door()
    return b.make(door, b.files_of_stopped(door, root), into, now_ms)[1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    return tmp_path / "data"


# Of a stopped folder


def test_a_restored_folder_tells_the_same_story(data: Path, tmp_path: Path) -> None:
    assert " of them new" in line("backup", tmp_path / "bk", "--data", data)
    assert "start with" in line("restore", tmp_path / "bk", "--data", tmp_path / "again")
    assert "no problem" in line("check", "--data", tmp_path / "again")
    kept = story(tmp_path / "again")
    assert kept == story(data)
    assert {state for state, *_ in kept["a"].values()} >= {"sleep", "ready", "reserve", "history", "dead", "cancelled"}


def test_a_second_backup_takes_only_what_is_new(data: Path, tmp_path: Path) -> None:
    into = tmp_path / "bk"
    first = made(data, into)
    assert first.copied == first.bytes
    fill(data, 200, topics=("b",))
    second = made(data, into, NOW + 1000)
    assert 0 < second.copied < second.bytes
    one, two = (into / name for name in b.backups_in(Door(), into))
    same = [path for path, entry in second.files.items() if first.files.get(path) == entry]
    assert any(path.startswith("topic/a/") for path in same)
    assert all((one / path).stat().st_ino == (two / path).stat().st_ino for path in same)
    assert b.prune(Door(), into, 1) == [one.name]
    assert b.verify(Door(), two) == []
    b.restore(Door(), two, tmp_path / "again")
    assert story(tmp_path / "again") == story(data)


def test_a_backup_that_nothing_was_added_to_copies_nearly_nothing(data: Path, tmp_path: Path) -> None:
    made(data, tmp_path / "bk")
    (told,) = [json.loads(line("backup", tmp_path / "bk", "--data", data, "--keep", "1", "--json"))]
    assert told["copied"] == 0
    assert told["bytes"] > 10_000
    assert len(told["removed"]) == 1


def test_what_has_rotted_in_an_earlier_backup_is_copied_again(data: Path, tmp_path: Path) -> None:
    into = tmp_path / "bk"
    path = next(path for path in made(data, into).files if path.endswith(".bson"))
    _flip(b.choose(Door(), into) / path)
    second = made(data, into, NOW + 1000)
    assert second.copied == second.files[path].bytes
    assert b.verify(Door(), b.choose(Door(), into)) == []


def test_a_backup_under_a_fast_clock_precedes_the_next(data: Path, tmp_path: Path) -> None:
    into, ahead = tmp_path / "bk", NOW + 10**11
    made(data, into, ahead)
    made(data, into, NOW)
    assert b.backups_in(Door(), into) == [b.name_at(ahead), b.name_at(ahead + 1)]
    assert b.prune(Door(), into, 1) == [b.name_at(ahead)]


def test_a_backup_without_room_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    counting = Failing()
    made(data, tmp_path / "other", door=counting)
    failing = Failing([i for i, name in enumerate(counting.calls) if name == "write"][3], "ENOSPC")
    with pytest.raises(DiskFull):
        made(data, tmp_path / "bk", door=failing)
    assert os.listdir(tmp_path / "bk") == []


def test_an_empty_folder_can_be_kept_too(tmp_path: Path) -> None:
    Engine.open(tmp_path / "data").close()
    line("backup", tmp_path / "bk", "--data", tmp_path / "data")
    line("restore", tmp_path / "bk", "--data", tmp_path / "again")
    assert story(tmp_path / "again") == {}


# Refusals


def test_what_is_refused_changes_nothing(data: Path, tmp_path: Path) -> None:
    into = tmp_path / "bk"
    assert "no data folder" in line("backup", into, "--data", tmp_path / "nowhere", code=1)
    assert "is no backup" in line("backup", data / "topic", "--data", data, code=1)
    assert "there is no backup" in line("restore", tmp_path, "--data", tmp_path / "again", code=1)
    assert "there is no backup" in line("backup", tmp_path, "--verify", code=1)
    line("backup", into, "--data", data)
    assert "is not empty" in line("restore", into, "--data", data, code=1)
    held = Door().lock(into / "LOCK")
    assert "in use by process" in line("backup", into, "--data", data, code=1)
    os.close(held)
    line("backup", code=2)
    line("restore", into, code=2)
    assert not (tmp_path / "again").exists()


def test_newer_ones_are_refused_by_name(data: Path, tmp_path: Path) -> None:
    made(data, tmp_path / "bk")
    folder = b.choose(Door(), tmp_path / "bk")
    manifest = json.loads((folder / b.MANIFEST).read_text())
    (folder / b.MANIFEST).write_text(json.dumps(manifest | {"turtlemq_backup": 2}))
    with pytest.raises(NewerFormat, match="newer TurtleMQ"):
        b.load(Door(), folder)
    (data / "FORMAT").write_text("99\n")
    assert "format 99" in line("backup", tmp_path / "bk", "--data", data, code=1)


def test_no_room(data: Path, tmp_path: Path) -> None:
    class Small(Door):
        def free_bytes(self, path: Path) -> int:
            return 100

    with pytest.raises(InvalidArgument, match="no room"):
        made(data, tmp_path / "bk", door=Small())
    assert not list((tmp_path / "bk").iterdir())
    made(data, tmp_path / "bk")
    with pytest.raises(InvalidArgument, match="no room"):
        b.restore(Small(), b.choose(Door(), tmp_path / "bk"), tmp_path / "again")


# Damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "SHA-256"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "instead of"),
    "gone": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_backup_is_named_and_not_restored(data: Path, tmp_path: Path, how: str) -> None:
    made(data, tmp_path / "bk")
    folder = b.choose(Door(), tmp_path / "bk")
    harm, said = DAMAGE[how]
    for path in ("topic/a/delay_0000000000.bson", "topic/b/offset"):
        harm(folder / path)
    problems = b.verify(Door(), folder)
    assert [problem.split(":")[0] for problem in problems] == ["topic/a/delay_0000000000.bson", "topic/b/offset"]
    assert all(said in problem for problem in problems)
    assert said in line("backup", tmp_path / "bk", "--verify", code=1)
    assert "nothing was written" in line("restore", tmp_path / "bk", "--data", tmp_path / "again", code=1)
    assert not (tmp_path / "again").exists()
    line("restore", tmp_path / "bk", "--data", tmp_path / "again", "--damaged-too", code=1)
    engine = Engine.open(tmp_path / "again")
    assert engine.stats("b").sleep > 0
    engine.close()


def test_a_file_that_the_manifest_does_not_know_is_a_problem(data: Path, tmp_path: Path) -> None:
    made(data, tmp_path / "bk")
    folder = b.choose(Door(), tmp_path / "bk")
    (folder / "topic" / "a" / "notes").write_text("mine")
    assert b.verify(Door(), folder) == ["topic/a/notes: the manifest does not know it"]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "topic/../../x"])
def test_a_backup_writes_nothing_beside_its_target(data: Path, tmp_path: Path, path: str) -> None:
    made(data, tmp_path / "bk")
    folder = b.choose(Door(), tmp_path / "bk")
    manifest = json.loads((folder / b.MANIFEST).read_text())
    manifest["files"][path] = manifest["files"]["FORMAT"]
    (folder / b.MANIFEST).write_text(json.dumps(manifest))
    assert "leads out of the backup" in line("restore", folder, "--data", tmp_path / "again", "--damaged-too", code=1)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"turtlemq_backup": 1, "files": {"a": 1}}', "\0\1", "[" * 99_999, "9" * 5_000])
def test_a_manifest_that_cannot_be_read(data: Path, tmp_path: Path, text: str) -> None:
    made(data, tmp_path / "bk")
    folder = b.choose(Door(), tmp_path / "bk")
    (folder / b.MANIFEST).write_text(text)
    with pytest.raises(Corrupt, match="cannot be read"):
        b.verify(Door(), folder)


def test_damage_in_the_data_folder_is_named_with_its_position(data: Path, tmp_path: Path) -> None:
    file = data / "topic" / "a" / "delay_0000000000.bson"
    content = bytearray(file.read_bytes())
    content[content.index(b"x" * 60)] ^= 1
    file.write_bytes(content)
    told = json.loads(line("backup", tmp_path / "bk", "--data", data, "--json", code=1))
    (said,) = told["damage"]
    assert said.startswith("topic/a/delay_0000000000.bson")
    assert "checksum" in said
    assert b.verify(Door(), Path(told["backup"])) == []


@pytest.mark.slow
def test_an_interrupted_backup_or_restore_leaves_earlier_ones(tmp_path: Path) -> None:
    """A failure at any call: earlier backups are there, nothing half done has a whole one's name, and the next try works."""
    data, into = tmp_path / "data", tmp_path / "bk"
    fill(data, topics=("a",))
    made(data, into)
    fill(data, 200, topics=("a",))
    counting = Failing()
    made(data, tmp_path / "other", door=counting)
    for step, at in enumerate(range(0, len(counting.calls), 7)):
        failing = Failing(at)
        try:
            made(data, into, NOW + step + 1, door=failing)
        except (OSError, DiskFull):
            pass
        finally:
            failing.heal()
            failing.shut()
        assert all(b.verify(Door(), into / name) == [] for name in b.backups_in(Door(), into)[-2:])
        target = tmp_path / f"again{step}"
        failing = Failing(at)
        try:
            b.restore(failing, b.choose(Door(), into), target)
        except (OSError, DiskFull):
            assert not (target / "FORMAT").exists()
        finally:
            failing.heal()
            failing.shut()
    manifest = made(data, into, NOW + 10_000)
    assert not [name for name in os.listdir(into) if name.endswith(".tmp")]
    assert b.load(Door(), b.choose(Door(), into)).files == manifest.files


# Of a folder in use


@pytest.mark.slow
def test_a_backup_under_load_holds_every_earlier_promise(tmp_path: Path) -> None:
    data, into = tmp_path / "data", tmp_path / "bk"
    promised: list[tuple[str, set[str], set[str]]] = []
    with running(data) as server:
        server.ok("PUT", "/v1/topics/busy", {"segment_bytes": 65_536, "compact_live_ratio": 0.9, "beat": 0.02})
        server.put("quiet", {"body": 1, "id": "q", "delay": 3600})
        with Traffic(server) as traffic:
            while len(promised) < 4:
                have = (set(traffic.put), set(traffic.acked))
                rounds = len(promised) + 1
                if len(have[0]) < 1_200 * rounds or len(have[1]) < 200 * rounds:
                    time.sleep(0.01)
                    continue
                told = json.loads(line("backup", into, "--data", data, "--json", url=server.url))
                assert told["live"]
                assert told["damage"] == []
                promised.append((told["backup"], *have))
        assert os.listdir(data / "PINNED") == ["LOCK"]
    for n, (folder, put, acked) in enumerate(promised):
        line("restore", folder, "--data", tmp_path / f"again{n}")
        engine = Engine.open(tmp_path / f"again{n}")
        assert engine.check() == []
        assert engine.damage() == {}
        assert engine.message("quiet", "q") is not None
        now = time.time_ns() // 1_000_000
        engine.tick(now)
        assert not acked.intersection(engine.reserve("busy", "default", 10_000, now_ms=now).ids)
        receipt = engine.submit("busy", [Message(b"", due_ms=now, id=id_) for id_ in put], now_ms=now)
        assert receipt.duplicates == len(put)
        engine.close()


@pytest.mark.slow
def test_pins_of_an_interrupted_backup_go_at_the_next_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        server.put("t", {"body": 1, "delay": 3600})
        pins = server.ok("POST", "/v1/backup")
        assert len(os.listdir(data / "PINNED" / pins["name"])) == pins["files"] + 1
        again = server.ok("POST", "/v1/backup")
        assert sorted(os.listdir(data / "PINNED")) == [again["name"], "LOCK"]
        server.stop(signal.SIGKILL)
    with running(data) as server:
        assert os.listdir(data / "PINNED") == ["LOCK"], "the server's own, also while a backup is made"
        assert server.ok("DELETE", "/v1/backup") == {"outcome": "unpinned"}
        asked = [threading.Thread(target=server.ok, args=(method, "/v1/backup")) for method in ("POST", "DELETE") * 5]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
        assert server.ok("DELETE", "/v1/backup") == {"outcome": "unpinned"}
        assert os.listdir(data / "PINNED") == ["LOCK"], "the server's own, also while a backup is made"
        assert "request_failed" not in server.log


@pytest.mark.slow
def test_a_folder_in_use_needs_its_own_server(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        said = line("backup", tmp_path / "bk", "--data", tmp_path / "data", code=1)
        assert "in use by process" in said
        assert "--url" in said
        (tmp_path / "two").mkdir()
        with running(tmp_path / "two" / "data") as other:
            said = line("backup", tmp_path / "bk", "--data", tmp_path / "data", url=other.url, code=1)
            assert "see --data" in said
        line("backup", tmp_path / "bk", "--data", tmp_path / "data", url=server.url)
