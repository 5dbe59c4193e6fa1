"""A real process is killed again and again, at any moment, while it appends, cancels, changes, fires and keeps house. It writes
its next operation and each answer to a pipe that outlives it. After each death the Index holds all that was answered.

Run as a program, this file is that process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.index.seal import seal
from turtlemq.model import Batch, Due, Mark, Progress, State
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Settings(segment_bytes=16_384, run_messages=24, compact_live_ratio=0.2)
CYCLES = int(os.environ.get("TURTLEMQ_KILLS", "20"))


class Received:
    """Messages handed off: a line each, whole when it ends in a newline."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: list[str] = []
        self.progress = Progress()
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            path.write_bytes(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.ids += entry["ids"]
            self.progress = Progress(tuple(Mark(*mark) for mark in entry["marks"]))

    def store(self, due: Due) -> None:
        edges = [*due.starts.tolist(), len(due.raw)]
        ids = [f.decode(due.raw[a:b]).id for a, b in pairwise(edges)]
        marks = [[m.seq_max, m.due_ms, m.seq] for m in due.progress.marks]
        with self.path.open("ab") as file:
            file.write(json.dumps({"ids": ids, "marks": marks}).encode() + b"\n")


# The process that dies


def work(folder: Path, seed: int) -> None:
    """Do this and that until killed."""
    chance = random.Random(seed)
    received = Received(folder / "received")
    door = Door()
    index = open_index(door, folder / "t", "t", SETTINGS, received.progress)
    index.release(received.progress)
    now = 1_000_000 * seed
    for number in range(1_000_000):
        now += chance.randrange(50)
        sleeping = [found.id for found in index.browse(limit=30, from_ms=now)[0]]
        deed = chance.choice(["append", "append", "append", "cancel", "change", "fire", "fire", "house", "house"])
        if deed == "append":
            n = chance.choice([1, 3, 40])
            ids = [f"{seed}-{number}-{i}" for i in range(n)]
            dues = [now + chance.randrange(4000) for _ in ids]
            tell(do="append", ids=ids, dues=dues)
            assert all(index.append(Batch([b"x" * chance.randrange(200)] * n, dues, ids=ids), now).created)
        elif deed == "cancel" and sleeping:
            ids = chance.sample(sleeping, min(len(sleeping), 12))
            tell(do="cancel", ids=ids)
            assert set(index.cancel(ids).values()) == {State.CANCELLED}
        elif deed == "change" and sleeping:
            due = now + chance.randrange(4000)
            tell(do="change", ids=sleeping[:1], dues=[due])
            index.reschedule(sleeping[0], now, due_ms=due)
        elif deed == "fire" and (handed := index.due(now, count_max=25)) is not None:
            received.store(handed)
            index.advance(handed)
            index.release(handed.progress)
            continue
        elif deed == "house":
            order, _ = index.maintenance.step(10, None)
            if order is not None:
                index.maintenance.adopt(seal(door, order))
            continue
        else:
            continue
        tell(do="answered")


def tell(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


# The killer


class Ledger:
    """The answers, and the one deed that may or may not have happened."""

    def __init__(self) -> None:
        self.asleep: dict[str, int] = {}
        self.open: dict[str, Any] | None = None

    def read(self, line: dict[str, Any]) -> None:
        if line["do"] == "answered":
            assert self.open is not None
            self.asleep = self.after()
            self.open = None
        else:
            self.open = line

    def after(self) -> dict[str, int]:
        """The sleepers once the open deed is done."""
        deed = self.open or {"do": "nothing"}
        if deed["do"] == "cancel":
            return {id_: due for id_, due in self.asleep.items() if id_ not in deed["ids"]}
        return self.asleep | dict(zip(deed.get("ids", ()), deed.get("dues", ()), strict=True))

    def take(self, index: Index, received: list[str]) -> None:
        """Compare with the real state, and go on from that."""
        assert len(set(received)) == len(received), "handed off twice"
        found = sleepers(index)
        gone = set(received)
        assert not gone & found.keys(), "handed off, and sleeping"
        choices = [{i: d for i, d in state.items() if i not in gone} for state in (self.asleep, self.after())]
        assert found in choices, f"lost or come back: {[found.keys() ^ choice.keys() for choice in choices]}"
        self.asleep, self.open = found, None


def sleepers(index: Index) -> dict[str, int]:
    out: dict[str, int] = {}
    cursor: str | None = None
    while True:
        page, cursor = index.browse(limit=1000, cursor=cursor)
        out |= {found.id: found.due_ms for found in page}
        if cursor is None:
            return out


def live_and_die(folder: Path, seed: int, lines: int, ledger: Ledger) -> None:
    """Start the process, listen for a while, kill it, and read the rest of the pipe."""
    command = [sys.executable, str(Path(__file__)), str(folder), str(seed)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(lines):
            heard = child.stdout.readline()
            if not heard:
                raise AssertionError(child.stderr.read().decode())
            ledger.read(json.loads(heard))
        child.send_signal(signal.SIGKILL)
        for heard in child.stdout:
            ledger.read(json.loads(heard))
        assert child.wait() == -signal.SIGKILL, child.stderr.read().decode()


@pytest.mark.slow
def test_a_process_killed_at_any_moment_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    chance = random.Random(7)
    ledger = Ledger()
    segments = sealed = 0
    received = Received(tmp_path / "received")
    for cycle in range(1, CYCLES + 1):
        live_and_die(tmp_path, cycle, chance.randrange(1, 120), ledger)
        received = Received(tmp_path / "received")
        door = Door()
        index = open_index(door, tmp_path / "t", "t", SETTINGS, received.progress)
        ledger.take(index, received.ids)
        assert index.check() == []
        assert index.damage == []
        segments = max(segments, len(index._segments.by_base))
        sealed += sum(segment.sealed for segment in index._segments.by_base.values())
        index._writer.close()  # as if this process were killed, too
        door.shut()
    assert segments > 2
    assert sealed > 0
    assert received.ids


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
