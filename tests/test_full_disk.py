"""A disk without a free byte, and without ballast: operations that make room still work, over HTTP, on a real file system."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.engine_disk import Disk, messages, start
from tests.harness.server_process import Server, run, running
from tests.trust.refusals_server import NO_DISK, small_disk
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull
from turtlemq.model import Message
from turtlemq.segment.buffers import Buffer
from turtlemq.storage import ballast, names
from turtlemq.storage.door import Door

LETTERS = 300


def free(disk: Path) -> int:
    stat = os.statvfs(disk)
    return stat.f_bavail * stat.f_frsize


def fill(disk: Path) -> None:
    """Take every free byte, as another program on that disk may."""
    fd = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while True:
            os.write(fd, bytes(min(1 << 20, max(free(disk), 1))))
    except OSError:
        assert free(disk) == 0
    finally:
        os.close(fd)


def until(done: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@contextmanager
def full_server(folder: Path) -> Iterator[tuple[Server, Path]]:
    """A server whose disk is full: topic `old` has history, `dead` has dead letters, `gaps` nearly empty segments."""
    with small_disk(folder / "disk") as disk:
        if disk is None:
            pytest.skip(NO_DISK)
        with running(disk / "data", TURTLEMQ_BEAT_MS="100") as server:
            settings = {"segment_bytes": 1 << 18, "max_attempts": 1}
            for topic in ("old", "dead", "gaps", "acks"):
                server.ok("PUT", f"/v1/topics/{topic}", settings)
            for n in range(10):
                server.put("old", *({"id": f"{n}-{i}", "body": "x" * 1_000} for i in range(100)))
                server.put("gaps", *({"id": f"{n}-{i}", "body": "x" * 1_000, "delay": 3600} for i in range(100)))
            server.put("dead", *({"id": f"d{i}", "body": "x" * 2_000} for i in range(LETTERS)))
            server.put("acks", *({"id": f"a{i}", "body": 1} for i in range(100)))
            for _ in range(10):
                server.ack("old", *(m["id"] for m in server.fetch("old", max=100, wait=5)))
            server.ack("dead", *("-" + m["id"] for m in server.fetch("dead", max=LETTERS, wait=5)))
            until(lambda: server.ok("GET", "/v1/topics/dead")["stats"]["dead"] == LETTERS, "they do not die")
            fill(disk)
            until(lambda: _use_up_ballast(server), "the ballast is never used")
            server.ok("POST", "/v1/topics/gaps/cancel", {"ids": [f"{n}-{i}" for n in range(9) for i in range(100)]})
            fill(disk)
            yield server, disk
        assert run("check", "--data", str(disk / "data")).returncode == 0


def _use_up_ballast(server: Server) -> bool:
    """Acknowledgements of consumers take its room."""
    server.ack("acks", *(m["id"] for m in server.fetch("acks", max=1)))
    return not (server.data / names.BALLAST).exists()


def delete_topic(server: Server) -> None:
    assert server.ok("DELETE", "/v1/topics/gaps") == {"outcome": "deleted"}


def shorten_retention(server: Server) -> None:
    changed = server.ok("PUT", "/v1/topics/old", {"retention": {"history_hours": 0}})
    assert changed["settings"]["retention"]["history_hours"] == 0


def delete_dead_letters(server: Server) -> None:
    assert server.ok("POST", "/v1/topics/dead/dead/delete", {"filter": {}}) == {"deleted": LETTERS, "unknown": []}


def compact(server: Server) -> None:
    answer = server.ok("POST", "/v1/topics/gaps/compact")
    assert answer["bytes"] < answer["bytes_before"]


REMEDIES = [delete_topic, shorten_retention, delete_dead_letters, compact]


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_full_disk_is_freed_from_inside(tmp_path: Path, remedy: Callable[[Server], None]) -> None:
    with full_server(tmp_path) as (server, disk):
        assert server.call("POST", "/v1/topics/old/messages", {"body": 1}).status == 507
        remedy(server)
        until(lambda: free(disk) > 200_000, "no room was made")


def test_without_any_reserve_a_topic_can_be_deleted(tmp_path: Path) -> None:
    with full_server(tmp_path) as (server, disk):
        (disk / "data" / names.RESERVE).unlink()
        fill(disk)
        assert server.call("PUT", "/v1/topics/old", {"retention": {"history_hours": 0}}).status == 507
        delete_topic(server)
        assert free(disk) > 0
        shorten_retention(server)
        delete_dead_letters(server)
        assert (disk / "data" / names.RESERVE).stat().st_size == ballast.RESERVE_BYTES, "it is kept again"


def test_the_reserve_is_for_making_room_alone(tmp_path: Path) -> None:
    door = Disk()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    door.full = True
    with pytest.raises(DiskFull):
        engine.submit("t", messages(1, 1), 1)
    with pytest.raises(DiskFull):
        engine.configure("new")
    assert (tmp_path / "data" / names.RESERVE).stat().st_size == ballast.RESERVE_BYTES
    engine.drop_topic("t")
    assert engine.topics == {}
    door.full = False
    engine.close()


class FullFor(Door):
    """A disk that has no room for files of one kind."""

    kind = ""

    def write(self, fd: int, path: Path, offset: int, buffers: Sequence[Buffer]) -> int:
        if self.kind and path.name.startswith(self.kind):
            raise DiskFull
        return super().write(fd, path, offset, buffers)


def test_a_list_done_in_part_may_be_sent_again(tmp_path: Path) -> None:
    """Sleepers are cancelled before ready messages, and handled messages settled before failures: in two files each."""
    door = FullFor()
    engine = Engine.open(tmp_path, door=door)
    engine.submit("t", [Message(b"x", due, id_) for id_, due in (("asleep", 10_000), ("a", 0), ("b", 0), ("ready", 0))], 0)
    engine.move_group("t", "g", "earliest", 0)
    engine.tick(0)
    assert engine.reserve("t", "g", 2, 1).ids == ["a", "b"]
    door.kind = "history_"
    with pytest.raises(DiskFull):
        engine.cancel("t", ["asleep", "ready"], 2)
    assert engine.get("t", "asleep") is None, "this part was done"
    door.kind = ""
    assert engine.cancel("t", ["asleep", "ready"], 3) == {"asleep": "cancelled before", "ready": "cancelled"}
    door.kind = "reserve_"
    with pytest.raises(DiskFull):
        engine.ack("t", "g", ["a", "-b"], 4)
    door.kind = ""
    again = engine.ack("t", "g", ["a", "-b"], 5)
    assert (again.acked, again.failed, again.unknown) == (0, 1, ["a"])
    assert engine.check() == []
    engine.close()
