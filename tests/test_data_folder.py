"""The data folder among others on a disk: symbolic links, leftovers, its lock, and the modes of its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.server_process import Server, run, running
from turtlemq import backup
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.storage.ballast import Ballast
from turtlemq.storage.door import Door

T = TypeVar("T")


def foreign(folder: Path) -> Path:
    """A folder with files that are not the server's."""
    (folder / "inner").mkdir(parents=True)
    (folder / "one").write_text("1")
    (folder / "inner" / "two").write_text("2")
    return folder


def untouched(folder: Path) -> bool:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"one", "inner", "inner/two"}


def was_clean(server: Server) -> bool:
    return bool(server.ok("GET", "/readyz")["was_clean"])


# Links and leftovers


def test_deleting_a_topic_follows_no_link(tmp_path: Path) -> None:
    data, outside = tmp_path / "data", foreign(tmp_path / "outside")
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
        (data / "topic" / "t" / "notes").symlink_to(outside)
        (data / "topic" / "t" / "note").symlink_to(outside / "one")
        (data / "topic" / "t" / "nowhere").symlink_to(tmp_path / "nowhere")
        assert server.ok("DELETE", "/v1/topics/t") == {"outcome": "deleted"}
        assert untouched(outside)
        assert os.listdir(data / "topic") == []
        server.put("t", {"id": "n", "body": 1})
        assert [m["id"] for m in server.fetch("t", wait=5)] == ["n"]
    with running(data) as server:
        assert was_clean(server)


def test_deleting_a_topic_behind_a_link_removes_the_link(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "disk2" / "t"
    elsewhere.parent.mkdir()
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
    (data / "topic" / "t").rename(elsewhere)
    (data / "topic" / "t").symlink_to(elsewhere)
    assert run("check", "--data", str(data)).returncode == 0
    before = sorted(os.listdir(elsewhere))
    with running(data) as server:
        assert was_clean(server)
        server.put("t", {"id": "n", "body": 1})
        assert [m["id"] for m in server.fetch("t", wait=5)] == ["n"]
        assert server.ok("DELETE", "/v1/topics/t") == {"outcome": "deleted"}
        assert server.call("GET", "/v1/topics/t").status == 404
        assert os.listdir(data / "topic") == []
        assert set(before) <= set(os.listdir(elsewhere))
        server.put("t", {"id": "m", "body": 1})
        assert not (data / "topic" / "t").is_symlink()
    assert f"event=leftover path={elsewhere}" in server.log, "its files are still on the other disk"


def test_leftovers_go_at_the_start_without_following_links(tmp_path: Path) -> None:
    data, outside = tmp_path / "data", foreign(tmp_path / "outside")
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
    topics = data / "topic"
    (topics / ".a.deleted").mkdir()
    (topics / ".a.deleted" / "notes").symlink_to(outside)
    (topics / ".b.deleted").symlink_to(outside)
    (topics / ".c.deleted").write_text("a stray file")
    (data / "PINNED" / "1").symlink_to(outside)
    (data / "PINNED" / "2").mkdir()
    (data / "PINNED" / "2" / "x").symlink_to(outside)
    (data / "PINNED" / "stray").write_text("x")
    checked = run("check", "--data", str(data))
    assert checked.returncode == 0, checked.stdout
    assert all(f"topic/.{name}.deleted" in checked.stderr for name in "abc")
    with running(data) as server:
        assert was_clean(server)
        assert os.listdir(topics) == ["t"]
        assert os.listdir(data / "PINNED") == ["LOCK"]
        assert untouched(outside)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_pins_that_are_no_folder_close_nothing(tmp_path: Path, kind: str) -> None:
    data, outside = tmp_path / "data", foreign(tmp_path / "outside")
    data.mkdir()
    if kind == "link":
        (data / "PINNED").symlink_to(outside)
    else:
        (data / "PINNED").write_text("a stray file")
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
    assert untouched(outside)


class Sticky(Door):
    """A file named `stuck` can be neither removed nor renamed; its folder can."""

    def fresh(self) -> Door:
        return Sticky()

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "unlink" and path is not None and path.name == "stuck":
            raise PermissionError(errno.EPERM, "made to fail", str(path))
        return action(*args)


def test_leftovers_that_cannot_be_removed_close_nothing(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, door=Sticky())
    engine.submit("t", [Message(b"x", 10, id="m")], 0)
    (tmp_path / "topic" / "t" / "stuck").touch()
    engine.drop_topic("t")
    assert list(engine.folder.leftovers) == [str(tmp_path / "topic" / ".t.deleted")]
    assert os.listdir(tmp_path / "topic" / ".t.deleted") == ["stuck"], "all others are gone"
    engine.submit("t", [Message(b"x", 10, id="m")], 0)
    engine.close()
    engine = Engine.open(tmp_path, door=Sticky())
    assert engine.was_clean
    assert list(engine.topics) == ["t"]
    assert list(engine.folder.leftovers) == [str(tmp_path / "topic" / ".t.deleted")]
    engine.drop_topic("t")
    assert os.listdir(tmp_path / "topic") == [".t.deleted"], "another name was taken for the folder that goes"
    engine.close()
    engine = Engine.open(tmp_path)
    assert engine.folder.leftovers == {}
    assert os.listdir(tmp_path / "topic") == []
    engine.close()


@pytest.mark.parametrize("when", ["before the topics", "after the topics"])
def test_a_failed_start_does_not_use_up_the_clean_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"x", 10_000, id="m")], 0)
    engine.close()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "made to fail")

    with monkeypatch.context() as patch:
        if when == "before the topics":
            patch.setattr(Engine, "_try_topic", fail)
        else:
            patch.setattr(Ballast, "load", fail)
        with pytest.raises(OSError, match="made to fail"):
            Engine.open(tmp_path)
    engine = Engine.open(tmp_path)
    assert engine.was_clean
    assert engine.check() == []
    assert engine.get("t", "m") is not None
    engine.close()


def test_a_backup_enters_no_linked_folder_and_skips_stray_files(tmp_path: Path) -> None:
    data, outside = tmp_path / "data", foreign(tmp_path / "outside")
    engine = Engine.open(data)
    engine.submit("t", [Message(b"x", 10, id="m")], 0)
    engine.close()
    (data / "topic" / "t" / "loop").symlink_to(data / "topic")
    (data / "topic" / "t" / "notes").symlink_to(outside)
    (data / "topic" / "t" / "nowhere").symlink_to(tmp_path / "nowhere")
    (data / "topic" / "stray").write_text("named like a topic")
    os.mkfifo(data / "topic" / "t" / "pipe")
    names = {Path(path).name for path in backup.files_of_stopped(Door(), data)}
    assert {"delay_0000000000.bson", "FORMAT"} <= names
    assert names.isdisjoint({"loop", "notes", "one", "two", "nowhere", "pipe", "stray"})
