"""What a report keeps in its folder for the next run: how far each log was read, and what was counted so far.

    report.html, {answer}.parquet     for people, and for whoever goes on with the figures
    state/STATE.json                  places, and which folder of tables belongs to them; replaced as a whole
    state/{number}/{table}.parquet    partials, and leases that are under way
    state/LOCK                        held while a report is being made

A run that is killed leaves the state of the run before it.
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
    """Everything that the next run must know."""

    data: str
    number: int = 0
    positions: dict[str, Any] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    tables: dict[str, pa.Table] = field(default_factory=dict)

    def drop(self, topics: list[str]) -> None:
        """Forget all about these topics."""
        for topic in topics:
            self.positions.pop(topic, None)
        gone = pa.array(topics, pa.string())
        for name, table in self.tables.items():
            self.tables[name] = table.filter(pc.invert(pc.is_in(table["topic"], gone)))
        for kept in (self.damage, self.missed):
            kept[:] = [line for line in kept if not line.startswith(tuple(f"{topic}{sign}" for topic in topics for sign in "/:"))]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Only one report at a time is written to a folder."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{out}: {Busy.__doc__}") from None
        yield
    finally:
        os.close(fd)


def load(out: Path, data: Path) -> ReportState:
    """The state of the last run; a new one where there is none, or none that can be used."""
    fresh = ReportState(str(data))
    try:
        told = json.loads((out / FOLDER / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return fresh
    if told.get("version") != VERSION:
        return fresh
    if told["data"] != str(data):
        raise OtherData(f"{out} is about {told['data']}. {OtherData.__doc__}")
    try:
        tables = {name: pq.read_table(out / FOLDER / str(told["number"]) / f"{name}.parquet") for name in told["tables"]}
    except (OSError, pa.ArrowInvalid):
        return ReportState(str(data), told["number"])
    return ReportState(str(data), told["number"], told["places"], told["damage"], told["missed"], tables)


def save(out: Path, state: ReportState) -> None:
    """Replace the state by a newer one."""
    folder, before = out / FOLDER, state.number
    state.number += 1
    for name, table in state.tables.items():
        write(folder / str(state.number) / f"{name}.parquet", table)
    told = {
        "version": VERSION,
        "data": state.data,
        "number": state.number,
        "places": state.positions,
        "damage": state.damage,
        "missed": state.missed,
        "tables": sorted(state.tables),
    }
    replace(folder / NAME, json.dumps(told, indent=1).encode())
    shutil.rmtree(folder / str(before), ignore_errors=True)


def write(path: Path, table: pa.Table) -> None:
    """A table as Parquet, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.tmp")
    pq.write_table(table, fresh, compression="zstd")
    fresh.replace(path)


def replace(path: Path, data: bytes) -> None:
    """A file with new content, whole or not at all."""
    fresh = path.with_name(f"{path.name}.tmp")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
