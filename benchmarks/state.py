"""Big states that several benchmarks share: data folders with twelve sealed segments and the longest possible tail.

A process builds a state: it appends at full speed while another one seals the segments. At a few counts it waits for the seals
and measures memory and disk. At the end it is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import child, probe
from benchmarks.load import TOPIC, Load, SimulatedServer
from benchmarks.model import Size

_TICK_BATCHES = 10
_SAMPLES = 5_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Measurements at a number of sleepers."""

    sleepers: int
    anonymous_bytes: int
    worker_peak_bytes: int
    disk_bytes: int
    append_seconds: float  # spent in appends since the checkpoint before
    wall_seconds: float  # since the beginning


@dataclass(frozen=True, slots=True)
class State:
    """A data folder with sleepers, left by a killed process."""

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
    """Both states, with server ids and own ids; each is built at its first use."""

    def __init__(self, size: Size, folder: Callable[[str], str], progress: Callable[[str], child.Progress]) -> None:
        self._size, self._folder, self._progress = size, folder, progress
        self._built: dict[bool, State] = {}

    def get(self, own: bool) -> State:
        if own not in self._built:
            folder = self._folder("own" if own else "server")
            title = f"building {self._size.sleepers:,} sleepers with {'own' if own else 'server-given'} ids"
            built = child.call(build, progress=self._progress(title), folder=folder, own=own, size=asdict(self._size))
            checkpoints = [Checkpoint(**fields) for fields in built["checkpoints"]]
            self._built[own] = State(folder, own, built["idle_bytes"], checkpoints, built["sample_ids"])
        return self._built[own]


def build(folder: str, own: bool, size: dict[str, Any]) -> dict[str, Any]:
    """In a child process: build a state."""
    shape = Size(**size)
    idle_bytes = probe.anonymous_bytes()
    server = SimulatedServer(folder, shape.settings, worker=True)
    load = Load(shape.batch, own)
    began = time.perf_counter()
    checkpoints: list[Checkpoint] = []
    samples: list[str] = []
    every = max(1, shape.sleepers // _SAMPLES)
    for count in shape.checkpoints:
        spent = 0.0
        while load.next_number < count:
            batch = load.batch()
            begin = time.perf_counter()
            receipt = server.append(batch)
            spent += time.perf_counter() - begin
            if load.next_number // every != (load.next_number - shape.batch) // every:
                samples.append(receipt.ids[len(samples) % shape.batch])
            if load.next_number // shape.batch % _TICK_BATCHES == 0:
                server.tick()
                child.report_progress(load.next_number / shape.sleepers)
        server.wait_until_sealed()
        disk = probe.file_bytes(probe.files(Path(folder), "delay_*"))
        sleepers = server.sleepers
        wall = time.perf_counter() - began
        checkpoints.append(Checkpoint(sleepers, probe.anonymous_bytes(), server.worker_peak_bytes, disk, spent, wall))
    return {"idle_bytes": idle_bytes, "checkpoints": [asdict(point) for point in checkpoints], "sample_ids": samples}
