"""Snapshots beside a writing engine: two threads that take turns at system calls, in an order that a seed decides.

One thread does random operations of an engine (`standing_walk`), the other pins snapshots, as Spark does. The files are noted
after every system call of the engine that changes one. A snapshot must be one of these moments, to the last byte, and where the
moment lies between two operations, its rows must be those that a read shows while the engine rests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from pyspark_turtlemq import moments, pins
from pyspark_turtlemq.snapshot_files import LOGS, TopicFiles
from tests.harness.spark_data import rows
from tests.harness.standing_walk import EVENTS, TOPIC, WEIGHTS, Observed, Walk, must
from turtlemq.engine import Engine
from turtlemq.storage.door import Door

T = TypeVar("T")
Files = dict[str, tuple[int, int]]  # inode and length by path in the topic's folder
Rows = dict[str, list[str]]  # by kind

_CHANGES = ("open", "write", "truncate", "rename", "unlink")
_COLUMNS = {
    "messages": "",
    "delay": "id,group,state,due_ms,seq,body_bytes",
    "ready": "id,group,state,offset",
    "dead": "id,group,state,seq",
    "history": "event,outcome,group,number,offset,id",
}
_OPERATIONS_MAX = 6  # beside one snapshot


class Turns:
    """Which of the two threads goes on. Without a snapshot under way, the engine does."""

    def __init__(self, chance: Random) -> None:
        self._chance, self._condition = chance, threading.Condition()
        self._reader_goes = self.reading = self.free = False
        self._reader: threading.Thread | None = None
        self.given = 0  # turns
        self.changed: Callable[[], None] = lambda: None

    def begin(self, read: Callable[[], None]) -> threading.Thread:
        """Let a thread read beside the engine. It begins with its first turn."""

        def run() -> None:
            self._wait(reader=True)
            try:
                read()
            finally:
                with self._condition:
                    self.reading = self._reader_goes = False
                    self._condition.notify_all()

        self.reading, self.free = True, False
        self._reader = threading.Thread(target=run, daemon=True)
        self._reader.start()
        return self._reader

    def engine_calls(self) -> None:
        """The engine is about to make a system call, or has made one."""
        if self.reading and self._chance.random() < 0.5:
            self.give(reader=True)

    def reader_calls(self) -> None:
        """A thread that pins is about to make a system call. The engine's thread pins, too, while the other one waits."""
        if threading.current_thread() is self._reader and not self.free and self._chance.random() < 0.2:
            self.give(reader=False)

    def give(self, *, reader: bool) -> None:
        """Let the other thread go on, and wait for the next turn of this one."""
        with self._condition:
            self._reader_goes = reader
            self.given += 1
            self._condition.notify_all()
        self._wait(reader=not reader)

    def _wait(self, *, reader: bool) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._reader_goes == reader, 60), "a thread hangs"


class TurningDoor(Door):
    """A Door that lets the reader go on before and after its calls, and between the two halves of a write."""

    def __init__(self, turns: Turns, chance: Random) -> None:
        super().__init__()
        self._turns, self._chance = turns, chance

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name in ("fdatasync", "fsync_dir"):
            return None  # type: ignore[return-value]
        if name not in _CHANGES or not self._turns.reading:
            return action(*args)
        self._turns.engine_calls()
        if name == "write" and self._chance.random() < 0.3:
            data = b"".join(args[1]) if isinstance(args[1], list | tuple) else bytes(args[1])
            result: Any = os.pwrite(args[0], data[: self._chance.randint(1, len(data))], args[2])
        else:
            result = action(*args)
        self._turns.changed()
        self._turns.engine_calls()
        return result  # type: ignore[no-any-return]


class Beside(Walk):
    """One walk with snapshots beside it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.turns = Turns(Random(seed + 1))
        self.turns.changed = self._note_files
        super().__init__(root, seed, spark=False, door=TurningDoor(self.turns, self.turns._chance))
        self.noted: list[Files] = []  # since the snapshot under way began
        self.rows_of: list[tuple[Files, Rows]] = []  # moments between operations
        self.observe()

    def run_snapshots(self, count: int, rows_every: int) -> None:
        """Pin snapshots one after the other while operations go on. Of every so many, the rows are compared, too."""
        names = [name for name in EVENTS if name not in ("restart", "crash")]
        weights = [WEIGHTS.get(name, 1.0) for name in names]
        for number in range(count):
            with_rows = number % rows_every == 0
            self.noted, self.rows_of = [], []
            self._note_moment(with_rows)
            taken: list[pins.Snapshot | BaseException] = []
            thread = self.turns.begin(lambda taken=taken: taken.append(self._pin()))  # type: ignore[misc]
            for _ in range(self.chance.randint(1, _OPERATIONS_MAX)):
                operation = self.chance.choices(names, weights)[0]
                self.steps.append(operation)
                getattr(self, f"_{operation}")()
                self.seen["operations"] += 1
                reading, self.turns.reading = self.turns.reading, False
                self.observe()
                self._note_moment(with_rows)
                self.turns.reading = reading
                if not reading:
                    break
            if self.turns.reading:
                self.turns.free = True
                self.turns.give(reader=True)
            thread.join(60)
            self._check(taken[0], with_rows)
            if self.chance.random() < 0.05:
                self._restart()
        self.engine.close()

    def _pin(self) -> pins.Snapshot | BaseException:
        def turning(call: Callable[..., Any]) -> Callable[..., Any]:
            def made(*args: Any) -> Any:
                self.turns.reader_calls()
                return call(*args)

            return made

        calls = {name: turning(getattr(os, name)) for name in ("link", "scandir", "open", "fstat", "stat", "unlink", "close")}
        moments.os = SimpleNamespace(O_RDONLY=os.O_RDONLY, O_CLOEXEC=os.O_CLOEXEC, **calls)  # type: ignore[assignment, attr-defined]
        try:
            return pins.take_snapshot(self.root, [TOPIC], LOGS)
        except BaseException as error:  # noqa: BLE001 - raised by the other thread
            return error
        finally:
            moments.os = os  # type: ignore[attr-defined]

    def observe(self) -> None:
        """Gather the states of messages on which the operations decide."""
        observed = Observed({id_: self.engine.message(TOPIC, id_) for id_ in self._ids()})
        observed.letters = {(letter.group, letter.id): letter.document.seq for letter in self._letters()}
        observed.born = {name: group.born for name, group in self.engine.topic(TOPIC).stores.broker.groups.items()}
        self.before = observed

    def _restart(self) -> None:
        self.engine.close()
        self.engine = Engine.open(self.root, settings=self.settings, door=self.door)

    # Moments

    def _note_files(self) -> None:
        self.noted.append(files_of(self.root / "topic" / TOPIC))

    def _note_moment(self, with_rows: bool) -> None:
        self._note_files()
        if with_rows and (not self.rows_of or self.rows_of[-1][0] != self.noted[-1]):
            self.rows_of.append((self.noted[-1], self._rows()))

    def _rows(self, **options: Any) -> Rows:
        found = {}
        for kind, columns in _COLUMNS.items():
            more = {"columns": columns} if columns else {}
            found[kind] = sorted(map(str, rows(self.root, topic=TOPIC, kind=kind, **more, **options)))
        return found

    def _check(self, snapshot: pins.Snapshot | BaseException, with_rows: bool) -> None:
        if isinstance(snapshot, BaseException):
            raise snapshot
        with snapshot:
            pinned = files_pinned(snapshot.topics[TOPIC])
            must(pinned in self.noted, "no moment of the files", len(self.noted), _nearest(pinned, self.noted))
            self.seen["snapshots"] += 1
            self.seen["moments to choose from"] += len({str(files) for files in self.noted})
            self.seen["of a later moment than their beginning"] += self.noted.index(pinned) > 0
            if with_rows:
                found = self._rows(snapshot=snapshot.name)
                self.seen["snapshots read"] += 1
                for files, expected in self.rows_of:
                    if files == pinned:
                        must(found == expected, "rows of another moment", _difference(found, expected))
                        self.seen["rows compared"] += sum(map(len, found.values()))


def files_of(folder: Path) -> Files:
    """Segments and checkpoint of a topic, as they are now."""
    found = {}
    for inside in ("", "dead"):
        for name in os.listdir(folder / inside) if (folder / inside).is_dir() else ():
            if name.endswith(".bson") or (name == "offset" and not inside):
                stat = os.stat(folder / inside / name)
                found[os.path.join(inside, name)] = (stat.st_ino, stat.st_size)
    return found


def files_pinned(pinned: TopicFiles) -> Files:
    """Segments and checkpoint of a topic in a snapshot."""
    found = {}
    for log, files in pinned.files.items():
        for name, file in files.items():
            if name.endswith(".bson"):
                found[os.path.join("dead" if log == "dead" else "", name)] = (os.stat(file.path).st_ino, file.size)
    if pinned.offset is not None:
        found["offset"] = (os.stat(pinned.offset.path).st_ino, pinned.offset.size)
    return found


def _nearest(pinned: Files, noted: list[Files]) -> Any:
    """The fewest differences from a moment, for the message."""
    return min((sorted(set(pinned.items()) ^ set(files.items())) for files in noted), key=len)


def _difference(found: Rows, expected: Rows) -> Any:
    return {kind: sorted(set(found[kind]) ^ set(expected[kind]))[:4] for kind in found if found[kind] != expected[kind]}
