"""The report's folder: results for users, and the state that the next run continues from.

    report.html, {result}.parquet     the page, and the result tables
    state/STATE.json                  read positions of all logs, and the folder of the tables that belong to them
    state/{number}/{table}.parquet    partial aggregates, and leases that have not ended
    state/LOCK                        locked while a report is being made

STATE.json is replaced atomically, after the tables that it names: a run that is killed leaves the state of the run before it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turtlemq.errors import TurtleError

VERSION = 1
FOLDER, NAME = "state", "STATE.json"


class OtherData(TurtleError):
    """This folder holds the report of another data folder. Name another one with --out, or remove it."""


class Busy(TurtleError):
    """Another report is being written to this folder. Wait for it, or name another one with --out."""


@dataclass(slots=True)
class ReportState:
    """The state between two runs."""

    data: str
    number: int = 0  # of the run, and of its folder
    positions: dict[str, Any] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    tables: dict[str, pa.Table] = field(default_factory=dict)

    def drop(self, topics: list[str]) -> None:
        """Forget these topics."""
        for topic in topics:
            self.positions.pop(topic, None)
        dropped = pa.array(topics, pa.string())
        for name, table in self.tables.items():
            self.tables[name] = table.filter(pc.invert(pc.is_in(table["topic"], dropped)))
        prefixes = tuple(f"{topic}{sign}" for topic in topics for sign in "/:")
        for lines in (self.damage, self.missed):
            lines[:] = [line for line in lines if not line.startswith(prefixes)]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder within a block. Raises `Busy` if another run holds the lock."""
    folder = out / FOLDER
    folder.mkdir(0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{out}: {Busy.__doc__}") from None
        yield
    finally:
        os.close(fd)


def load(out: Path, data: Path) -> ReportState:
    """The state of the last run; an empty one if there is none, or if it is of another version or damaged."""
    fresh = ReportState(str(data))
    try:
        saved = json.loads((out / FOLDER / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return fresh
    if saved.get("version") != VERSION:
        return fresh
    if saved["data"] != str(data):
        raise OtherData(f"{out} is about {saved['data']}. {OtherData.__doc__}")
    try:
        tables = {name: pq.read_table(out / FOLDER / str(saved["number"]) / f"{name}.parquet") for name in saved["tables"]}
    except (OSError, pa.ArrowInvalid):
        return ReportState(str(data), saved["number"])
    return ReportState(str(data), saved["number"], saved["places"], saved["damage"], saved["missed"], tables)


def save(out: Path, state: ReportState) -> None:
    """Save the state of this run, then remove the tables of the run before it."""
    folder, before = out / FOLDER, state.number
    state.number += 1
    for name, table in state.tables.items():
        write(folder / str(state.number) / f"{name}.parquet", table)
    saved = {
        "version": VERSION,
        "data": state.data,
        "number": state.number,
        "places": state.positions,
        "damage": state.damage,
        "missed": state.missed,
        "tables": sorted(state.tables),
    }
    replace(folder / NAME, json.dumps(saved, indent=1).encode())
    shutil.rmtree(folder / str(before), ignore_errors=True)


def write(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.tmp")
    pq.write_table(table, fresh, compression="zstd")
    fresh.replace(path)


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically and durably."""
    fresh = path.with_name(f"{path.name}.tmp")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
