"""The door: the order of calls, short and failed writes, the lock, and how many descriptors stay open."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turtlemq.errors import DiskFull, Locked
from turtlemq.storage.door import _IOV_MAX, Door

REPOSITORY = Path(__file__).resolve().parent.parent


class Recorder(Door):
    """Notes every call; `faults` maps the number of a call to the action in its place."""

    def __init__(self, faults: dict[int, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.faults = faults or {}

    def _call(self, name: str, path: Path | None, action: Callable[..., Any], *args: Any) -> Any:
        self.calls.append((name, path.name if path else ""))
        fault = self.faults.get(len(self.calls) - 1)
        return action(*args) if fault is None else fault(action, *args)


def failing(number: int) -> Callable[..., Any]:
    def fail(_action: Callable[..., Any], *_args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def first_bytes(count: int) -> Callable[..., Any]:
    """A write that takes only so many bytes, as the kernel may."""

    def short(_action: Callable[..., Any], fd: int, data: Any, offset: int) -> int:
        joined = b"".join(data) if isinstance(data, list) else bytes(data)
        return os.pwrite(fd, joined[:count], offset)

    return short


def half_then_full(_action: Callable[..., Any], fd: int, data: Any, offset: int) -> int:
    joined = b"".join(data) if isinstance(data, list) else bytes(data)
    os.pwrite(fd, joined[: len(joined) // 2], offset)
    raise OSError(errno.ENOSPC, "no space")


# ── replacing a file ─────────────────────────────────────────────────────────────────────────────────────


def test_replacing_a_file_is_write_sync_rename_sync_folder(tmp_path: Path) -> None:
    door = Recorder()
    door.replace(tmp_path / "a", b"new")
    folder = tmp_path.name
    assert door.calls == [
        ("open", folder),
        ("open", "a.tmp"),
        ("write", "a.tmp"),
        ("fdatasync", "a.tmp"),
        ("rename", "a"),
        ("fsync_dir", folder),
    ]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_cache_is_replaced_without_syncs(tmp_path: Path) -> None:
    door = Recorder()
    door.replace(tmp_path / "a", b"new", durable=False)
    assert [name for name, _ in door.calls] == ["open", "write", "rename"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", range(6))
def test_a_failed_replacement_leaves_the_old_or_the_new_file(tmp_path: Path, call: int, number: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    door = Recorder({call: failing(number)})
    with pytest.raises((OSError, DiskFull)):
        door.replace(path, b"new")
    assert path.read_bytes() == (b"old" if call <= 4 else b"new")
    Door().replace(path, b"newest")
    assert path.read_bytes() == b"newest"
    assert os.listdir(tmp_path) == ["a"]


def test_readers_see_replacements_and_removals(tmp_path: Path) -> None:
    door, path = Door(), tmp_path / "a"
    door.replace(path, b"old")
    assert door.read_all(path) == b"old"
    door.replace(path, b"newer")
    assert door.read_all(path) == b"newer"
    door.rename(path, tmp_path / "b")
    assert door.read_all(tmp_path / "b") == b"newer"
    door.remove(tmp_path / "b")
    door.remove(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        door.read(tmp_path / "b", 0, 1)
    door.shut()


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 3, 10, 4_000])
def test_short_writes_are_finished(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    buffers: list[bytes | bytearray | memoryview] = [bytes([i]) * 1_000 for i in range(5)]
    door = Recorder(dict.fromkeys(range(1, 20), first_bytes(size)))
    fd = door.create(path)
    door.write(fd, path, 0, [b"head"])
    assert door.write(fd, path, 4, buffers) == 5_000
    door.close(fd)
    assert path.read_bytes() == b"head" + b"".join(buffers)


def test_any_number_of_buffers_is_written_in_order(tmp_path: Path) -> None:
    path, door = tmp_path / "a", Recorder()
    buffers: list[bytes | bytearray | memoryview] = [b"%5d" % i for i in range(2 * _IOV_MAX + 1)]
    fd = door.create(path)
    assert door.write(fd, path, 0, buffers) == 5 * len(buffers)
    assert door.write(fd, path, 5 * len(buffers), []) == 0
    assert door.write(fd, path, 5 * len(buffers), [b"", memoryview(b"x"), bytearray(b"y")]) == 2
    door.close(fd)
    assert path.read_bytes() == b"".join(buffers) + b"xy"
    assert [name for name, _ in door.calls].count("write") == 3 + 1


@pytest.mark.parametrize("fault", [half_then_full, failing(errno.ENOSPC), failing(errno.EDQUOT)])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_a_write_without_room_cuts_back_and_says_so(tmp_path: Path, fault: Callable[..., Any], call: int) -> None:
    path = tmp_path / "a"
    door = Recorder({call: fault})
    fd = door.create(path)
    door.write(fd, path, 0, [b"kept"])
    with pytest.raises(DiskFull, match=r"^a: no room on the disk\. .*Free some room"):
        door.write(fd, path, 4, [b"0123456789"] * (3 * _IOV_MAX))
    assert door.calls[-1] == ("truncate", "a")
    assert path.read_bytes() == b"kept"
    assert door.write(fd, path, 4, [b"again"]) == 5, "room came back"
    door.close(fd)
    assert path.read_bytes() == b"keptagain"


def test_a_short_write_on_a_full_disk_is_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    door = Recorder({1: first_bytes(3), 2: failing(errno.ENOSPC)})
    fd = door.create(path)
    with pytest.raises(DiskFull):
        door.write(fd, path, 0, [b"0123456789"])
    door.close(fd)
    assert path.read_bytes() == b""


def test_another_error_stays_what_it_is_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    door = Recorder({1: failing(errno.EIO)})
    fd = door.create(path)
    with pytest.raises(OSError, match=r"a'$") as caught:
        door.write(fd, path, 0, [b"x"])
    assert caught.value.errno == errno.EIO
    door.close(fd)


def test_an_unrepaired_write_is_not_called_a_full_disk(tmp_path: Path) -> None:
    """DiskFull promises that nothing has changed."""
    path = tmp_path / "a"
    door = Recorder({1: half_then_full, 2: failing(errno.ENOSPC)})
    fd = door.create(path)
    with pytest.raises(OSError, match="No space left"):
        door.write(fd, path, 0, [b"0123456789"])
    door.close(fd)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_sync_is_never_a_full_disk(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a"
    door = Recorder({1: failing(number)})
    fd = door.create(path)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what counts
        door.sync(fd, path)
    assert caught.value.errno == number
    door.close(fd)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────


def test_reads_end_at_the_end_of_the_file(tmp_path: Path) -> None:
    door, path = Door(), tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert door.read(path, 2, 3) == b"234"
    assert door.read(path, 8, 100) == b"89"
    assert door.read(path, 10, 1) == b""
    assert door.read(path, 99, 1) == b""
    assert bytes(door.map(path)) == b"0123456789"
    (tmp_path / "empty").touch()
    assert bytes(door.map(tmp_path / "empty")) == b""
    door.shut()


def test_short_reads_are_finished(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    door = Recorder(dict.fromkeys(range(1, 9), lambda action, fd, _length, offset: action(fd, 3, offset)))
    assert door.read(path, 0, 10) == b"0123456789"
    door.shut()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_for_reading_stay_bounded(tmp_path: Path) -> None:
    door = Door()
    paths = [tmp_path / f"{i:04d}" for i in range(door.budget.readers + 50)]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = open_descriptors()
    for path in paths * 2:
        assert door.read(path, 0, 10) == path.name.encode()
    assert open_descriptors() <= before + door.budget.readers
    door.shut()
    assert open_descriptors() == before


def test_folders_cost_no_descriptor(tmp_path: Path) -> None:
    door = Door()
    before = open_descriptors()
    door.sync_folder(tmp_path)
    door.make_folder(tmp_path / "b" / "c" / "d")
    assert open_descriptors() == before


def test_a_mapping_keeps_no_descriptor_and_ends_with_its_last_view(tmp_path: Path) -> None:
    door, path = Door(), tmp_path / "a"
    path.write_bytes(b"x" * 10_000)
    before = open_descriptors()
    views = [door.map(path) for _ in range(20)]
    assert open_descriptors() == before
    part = views[0][5_000:]
    views.clear()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1, "the part still needs it"
    assert bytes(part) == b"x" * 5_000
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_folder_is_made_durably_from_the_top(tmp_path: Path) -> None:
    door = Recorder()
    door.make_folder(tmp_path / "b" / "c")
    top = tmp_path.name
    assert door.calls == [
        *[("open", top), ("mkdir", "b"), ("fsync_dir", top)],
        *[("open", "b"), ("mkdir", "c"), ("fsync_dir", "b")],
    ]
    door.make_folder(tmp_path / "b" / "c")
    assert len(door.calls) == 6
    assert door.names(tmp_path / "b") == ["c"]
    assert door.names(tmp_path / "nowhere") == []


# ── the lock ─────────────────────────────────────────────────────────────────────────────────────────────

HOLD = """
import sys
from pathlib import Path
from turtlemq.storage.door import Door
Door().lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Locked, match=rf"is in use by process {holder.pid}\. Stop it, or give another folder\.$"):
            Door().lock(path)
        assert path.read_text() == f"{holder.pid}\n", "being refused changes nothing"
        holder.kill()
        holder.wait(timeout=30)
    fd = Door().lock(path)
    assert path.read_text() == f"{os.getpid()}\n"
    os.close(fd)


def test_the_same_process_cannot_hold_a_folder_twice(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    fd = Door().lock(path)
    before = open_descriptors()
    with pytest.raises(Locked, match=f"process {os.getpid()}"):
        Door().lock(path)
    assert open_descriptors() == before
    os.close(fd)
    os.close(Door().lock(path))


def test_two_threads_may_write_two_files(tmp_path: Path) -> None:
    """A committer writes and syncs beside the thread that reads."""
    door = Door()

    def work(name: str) -> None:
        path = tmp_path / name
        fd = door.create(path)
        for i in range(50):
            door.write(fd, path, 10 * i, [b"0123456789"])
        door.sync(fd, path)
        door.close(fd)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tmp_path / name).read_bytes() == b"0123456789" * 50 for name in "ab")
