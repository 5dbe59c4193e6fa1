"""Workers: run a function elsewhere and return a job. The interface, and `Inline`, which runs it at once. Pure.

>>> Inline().submit(max, 2, 3).result()
3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Job(Protocol):
    """A function call under way. `result` waits for it, and raises its error."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Worker(Protocol):
    """Runs functions in another process (`turtlemq.storage.process_worker`), in a thread, or inline."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Job: ...


class Done:
    """A job that has ended."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Inline:
    """Runs each function at once, in the calling thread."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Job:
        try:
            return Done(work(*args))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            return Done(error=error)
