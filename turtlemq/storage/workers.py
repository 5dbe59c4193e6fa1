"""Work that may be done elsewhere: what the engine asks of a worker, and the one that does it at once.

>>> Inline().submit(max, 2, 3).result()
3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Job(Protocol):
    """Work under way."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Worker(Protocol):
    """Where it is done: another process (`turtlemq.storage.process_worker`), a thread, or right here."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Job: ...


class Done:
    """A job that has run."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Inline:
    """Does the work at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Job:
        try:
            return Done(work(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            return Done(error=error)
