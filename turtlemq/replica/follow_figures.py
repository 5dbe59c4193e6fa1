"""Histograms of a standby's work: how long it takes to apply the records that came together, and to sync a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from time import perf_counter
from typing import Any

from turtlemq.histogram import FINE_SECONDS, Histogram


class FollowFigures:
    """Seconds, counted since the start of the process."""

    def __init__(self) -> None:
        self.batches = Histogram(FINE_SECONDS)  # of records that came together, with the wait for their syncs
        self.syncs = Histogram(FINE_SECONDS)  # of one file or folder


class TimedSyncs:
    """A worker that runs syncs on the threads of `executor`, and counts how long each took."""

    def __init__(self, executor: Executor, taken: Histogram) -> None:
        self._executor, self._taken = executor, taken
        self._adding = threading.Lock()

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Begin a sync."""
        return self._executor.submit(self._run, work, args)

    def shutdown(self) -> None:
        """Wait for syncs under way, and end the threads."""
        self._executor.shutdown()

    def _run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        began = perf_counter()
        done = work(*args)
        with self._adding:
            self._taken.add(perf_counter() - began)
        return done
