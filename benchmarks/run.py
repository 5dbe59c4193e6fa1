"""`Benchmark`: a family of figures, and `Run`: its surroundings (sizes, limits of the machine, folders, child processes)."""

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
    """One run of all chosen benchmarks."""

    size: Size
    limits: Limits
    states: States
    folder: Callable[[str], str]  # a new empty folder on the disk under test
    progress: Callable[[str], child.Progress]  # for long work: a title in, a function for shares from 0 to 1 out

    def child(self, title: str, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a function in its own process, which is killed after its result. Returns that result."""
        return child.call(function, progress=self.progress(title), **arguments)

    def state(self, own: bool = False) -> State:
        return self.states.get(own)

    @property
    def size_fields(self) -> dict[str, Any]:
        """The size as an argument of a child process."""
        return asdict(self.size)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A family of figures: name, description, goals by figure, and the function that measures. `needs`: a program without which
    it does not run."""

    name: str
    about: str
    goals: dict[str, Goal]
    run: Callable[[Run], Iterator[Figure]]
    needs: str = ""
