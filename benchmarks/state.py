"""The big states that several benchmarks look at: twelve sealed segments full of sleepers and a tail as long as it gets.

Built by a process that appends as fast as it can while segments are sealed in another, and is then killed. On the way it stops
at a few counts, lets the seals catch up, and notes memory and disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import child, probe
from benchmarks.load import TOPIC, Load, Server
from benchmarks.model import Size

_TICK_BATCHES = 10
_SAMPLES = 5_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was seen when so many messages slept."""

    sleepers: int
    anonymous_bytes: int
    worker_peak_bytes: int
    disk_bytes: int
    append_seconds: float  # spent in appends since the checkpoint before
    wall_seconds: float  # since the beginning


@dataclass(frozen=True, slots=True)
class State:
    """A folder with sleepers, left behind by a killed process."""

    folder: str
    own: bool
    idle_bytes: int  # anonymous memory before the engine was opened
    checkpoints: list[Checkpoint]
    sample_ids: list[str]

    @property
    def sleepers(self) -> int:
        return self.checkpoints[-1].sleepers

    @property
    def topic(self) -> Path:
        return Path(self.folder) / "topic" / TOPIC


class States:
    """Both states, each built when it is first asked for."""

    def __init__(self, size: Size, folder: Callable[[str], str], progress: Callable[[str], child.Progress]) -> None:
        self._size, self._folder, self._progress = size, folder, progress
        self._built: dict[bool, State] = {}

    def get(self, own: bool) -> State:
        if own not in self._built:
            folder = self._folder("own" if own else "server")
            title = f"building {self._size.sleepers:,} sleepers with {'own' if own else 'server-given'} ids"
            found = child.call(build, progress=self._progress(title), folder=folder, own=own, size=asdict(self._size))
            checkpoints = [Checkpoint(**fields) for fields in found["checkpoints"]]
            self._built[own] = State(folder, own, found["idle_bytes"], checkpoints, found["sample_ids"])
        return self._built[own]


def build(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """Runs in a process of its own."""
    shape = Size(**size)
    idle_bytes = probe.anonymous_bytes()
    server = Server(folder, shape.settings, worker=True)
    load = Load(shape.batch, own)
    began = time.perf_counter()
    found: list[Checkpoint] = []
    samples: list[str] = []
    every = max(1, shape.sleepers // _SAMPLES)
    for count in shape.checkpoints:
        spent = 0.0
        while load.next < count:
            batch = load.batch()
            begin = time.perf_counter()
            receipt = server.append(batch)
            spent += time.perf_counter() - begin
            if load.next // every != (load.next - shape.batch) // every:
                samples.append(receipt.ids[len(samples) % shape.batch])
            if load.next // shape.batch % _TICK_BATCHES == 0:
                server.tick()
                child.say(load.next / shape.sleepers)
        server.settle()
        disk = probe.file_bytes(probe.files(Path(folder), "delay_*"))
        sleepers = server.sleepers
        wall = time.perf_counter() - began
        found.append(Checkpoint(sleepers, probe.anonymous_bytes(), server.worker_peak_bytes, disk, spent, wall))
    return {"idle_bytes": idle_bytes, "checkpoints": [asdict(point) for point in found], "sample_ids": samples}
