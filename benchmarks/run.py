"""What a benchmark is, and what it is given when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import child
from benchmarks.machine import Limits
from benchmarks.model import Figure, Goal, Size
from benchmarks.state import State, States


@dataclass(slots=True)
class Run:
    """One run of all benchmarks that were asked for."""

    size: Size
    limits: Limits
    states: States
    folder: Callable[[str], str]  # a new empty folder on the disk under test
    progress: Callable[[str], child.Progress]  # for work of many seconds: a title in, something to tell shares to out

    def child(self, title: str, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a function in a process of its own, which is killed as soon as it has answered."""
        return child.call(function, progress=self.progress(title), **arguments)

    def state(self, own: bool = False) -> State:
        return self.states.get(own)

    @property
    def shape(self) -> dict[str, Any]:
        """The size, as a child takes it."""
        return asdict(self.size)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One family of figures: its name, what it measures, the goal of each figure that has one, and how."""

    name: str
    about: str
    goals: dict[str, Goal]
    run: Callable[[Run], Iterator[Figure]]
