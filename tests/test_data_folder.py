"""The data folder among others on a disk: symbolic links, leftovers, its lock, and the modes of its files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.harness.server_process import ROOT, Server, run, running
from turtlemq import backup
from turtlemq.engine import Engine
from turtlemq.errors import Locked, LockLost
from turtlemq.model import Message
from turtlemq.storage import lock, names
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
    files = {Path(path).name for path in backup.files_of_stopped(Door(), data)}
    assert {"delay_0000000000.bson", "FORMAT"} <= files
    assert files.isdisjoint({"loop", "notes", "one", "two", "nowhere", "pipe", "stray"})


# The lock


def feed(server: Server, prefix: str) -> tuple[list[str], int]:
    """Put messages one by one until one is refused. Returns the ids of those that were taken, and the status of the other: 0 if
    the server is gone."""
    taken: list[str] = []
    for n in range(5_000):
        try:
            answer = server.call("POST", "/v1/topics/t/messages", {"id": f"{prefix}{n}", "body": n, "delay": 3600})
        except OSError:
            return taken, 0
        if answer.status != 201:
            return taken, answer.status
        taken.append(f"{prefix}{n}")
    raise AssertionError("nothing was refused")


def test_a_server_without_its_lock_takes_no_writes_and_ends(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
        (data / "LOCK").unlink()
        with ThreadPoolExecutor(1) as pool:
            feeding = pool.submit(feed, server, "a")
            with running(data) as second:
                taken, status = feeding.result()
                assert status in (0, 503)
                assert server.process.wait(20) == 1
                assert "event=lock_lost" in server.log
                second.put("t", {"id": "b", "body": 1, "delay": 3600})
                listed = second.ok("GET", "/v1/topics/t/messages?state=sleep&limit=1000")["messages"]
                assert {m["id"] for m in listed} == {"m", "b", *taken}
    assert run("check", "--data", str(data)).returncode == 0


def test_a_server_whose_lock_was_replaced_stops_its_writes_at_once(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"x", 10, id="m")], 1_000)
    (tmp_path / "LOCK").unlink()
    second = Engine.open(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    engine.tick(2_000)
    for write in (
        lambda: engine.submit("t", [Message(b"x", 10, id="n")], 2_000),
        lambda: engine.reserve("t", "g", 1, 2_000),
        lambda: engine.configure("u"),
        lambda: engine.drop_topic("t"),
        lambda: engine.move_group("t", "g", "earliest", 2_000),
    ):
        with pytest.raises(LockLost):
            write()
    engine.tick(20_000)
    engine.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    second.close()


class Replaced(Door):
    """The lock file is replaced, once, between the opening and the lock of it."""

    replaced = False

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        result = action(*args)
        if name == "open" and path is not None and path.name == "LOCK" and not self.replaced:
            self.replaced = True
            path.unlink()
            path.touch()
        return result


def test_a_lock_file_that_was_replaced_meanwhile_is_no_lock(tmp_path: Path) -> None:
    door = Replaced()
    fd = door.lock(tmp_path / "LOCK")
    assert os.fstat(fd).st_ino == (tmp_path / "LOCK").stat().st_ino
    with pytest.raises(Locked):
        Door().lock(tmp_path / "LOCK")
    os.close(fd)


def test_a_lock_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "LOCK").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="LOCK"):
        Door().lock(tmp_path / "LOCK")
    assert (tmp_path / "precious").read_text() == "kept"


HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_the_process_that_really_holds_the_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text("12345\n")
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Locked, match=rf"in use by process {holder.pid}\."):
            Door().lock(path)
        holder.kill()


def test_a_holder_that_the_system_does_not_tell_is_called_unknown(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    path.write_text("12345\n")
    with path.open() as file:
        assert lock.holder(file.fileno(), tmp_path / "no locks") == "another process (the system does not tell which)"
        (tmp_path / "locks").write_text(
            "1: FLOCK  ADVISORY  WRITE 77 00:01:1 0 EOF\n2: POSIX  ADVISORY  WRITE 78 00:01:2 0 EOF\n"
        )
        assert lock.holder(file.fileno(), tmp_path / "locks") == "another process (the system does not tell which)"


# Modes


def modes(folder: Path) -> dict[str, set[int]]:
    """The modes of all folders and files below a folder, itself included. The secret is for the server alone in any case."""
    found: dict[str, set[int]] = {"folders": {folder.stat().st_mode & 0o7777}, "files": set()}
    for path in folder.rglob("*"):
        if path.name == names.HASH_SEED:
            assert path.stat().st_mode & 0o7777 == 0o600
            continue
        found["folders" if path.is_dir() else "files"].add(path.stat().st_mode & 0o7777)
    return found


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def use(server: Server) -> None:
    """Let a server write files of every kind."""
    server.ok("PUT", "/v1/topics/t", {"segment_bytes": 4096, "max_attempts": 1})
    server.put("t", *({"id": f"m{n}", "body": "x" * 100} for n in range(100)))
    ids = [message["id"] for message in server.fetch("t", wait=5, max=100)]
    server.ack("t", *ids[1:], f"-{ids[0]}")
    server.ok("POST", "/v1/topics/t/compact")


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_only_the_servers_user_can_read_its_files(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        with running(tmp_path / "data") as server:
            use(server)
            assert modes(tmp_path / "data") == {"folders": {0o700}, "files": {0o600}}
            made = run("backup", str(tmp_path / "backups"), "--data", str(tmp_path / "data"), "--url", server.url)
            assert made.returncode == 0, made.stderr
        assert modes(tmp_path / "data") == {"folders": {0o700}, "files": {0o600}}
        assert modes(tmp_path / "backups") == {"folders": {0o700}, "files": {0o600}}
        assert run("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "restored")).returncode == 0
        assert modes(tmp_path / "restored") == {"folders": {0o700}, "files": {0o600}}


@pytest.mark.parametrize("mask", [0, 0o077])
def test_a_group_may_read_if_the_setting_says_so(tmp_path: Path, mask: int) -> None:
    with umask(mask), running(tmp_path / "data", TURTLEMQ_DATA_MODE="0750") as server:
        use(server)
        assert modes(tmp_path / "data") == {"folders": {0o750}, "files": {0o640}}
        server.stop()
        assert run("compact", "t", "--data", str(tmp_path / "data")).returncode == 0
        assert modes(tmp_path / "data") == {"folders": {0o750}, "files": {0o640}}, "work offline keeps the mode"


def test_the_folder_of_an_earlier_version_is_closed_at_the_top(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        server.put("t", {"id": "m", "body": 1, "delay": 3600})
    for path in [data, *data.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    with running(data):
        assert data.stat().st_mode & 0o7777 == 0o700
        assert (data / "topic").stat().st_mode & 0o7777 == 0o755, "other users cannot get there"


NO_CHMOD = """import os
def chmod(*_, **__):
    raise PermissionError(1, "made to fail")
os.chmod = chmod
"""


def test_a_folder_of_another_user_keeps_its_mode(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(
        "import os\ndef chmod(*_, **__): raise PermissionError(1, 'made to fail')\nos.chmod = chmod\n"
    )
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data").chmod(0o755)
    with running(tmp_path / "data", PYTHONPATH=f"{code}:{ROOT}") as server:
        assert "event=data_folder_open" in server.log


def test_restore_follows_no_link_of_a_damaged_backup(tmp_path: Path) -> None:
    data, secret = tmp_path / "data", tmp_path / "secret"
    for name in "tuv":
        engine = Engine.open(data)
        engine.submit(name, [Message(b"x", 10_000, id="m")], 0)
        engine.close()
    assert run("backup", str(tmp_path / "backups"), "--data", str(data)).returncode == 0
    (made,) = (path for path in (tmp_path / "backups").iterdir() if path.is_dir())
    secret.mkdir()
    (secret / "key").write_text("private")
    (secret / "delay_0000000000.bson").write_text("private")
    segment = made / "topic" / "t" / "delay_0000000000.bson"
    segment.unlink()
    segment.symlink_to(secret / "key")
    (made / "topic" / "u").rename(tmp_path / "moved")
    (made / "topic" / "u").symlink_to(secret)
    pipe = made / "topic" / "v" / "delay_0000000000.bson"
    pipe.unlink()
    os.mkfifo(pipe)
    refused = run("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "restored"))
    assert refused.returncode == 1
    assert f"{segment.relative_to(made)}: is no regular file" in refused.stderr
    assert f"{pipe.relative_to(made)}: is no regular file" in refused.stderr
    with umask(0):
        saved = run("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "restored"), "--damaged-too")
    assert saved.returncode == 1
    files = [path for path in (tmp_path / "restored").rglob("*") if path.is_file()]
    assert files
    assert not any(b"private" in path.read_bytes() for path in files)
    assert modes(tmp_path / "restored") == {"folders": {0o700}, "files": {0o600}}
