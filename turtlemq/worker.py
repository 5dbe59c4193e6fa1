"""A shell: the worker process in which segments are sealed, so that appends and ticks go on meanwhile."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any


class ProcessWorker:
    """One process, started on first use. A job that kills it fails that job; the next one gets a new process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is None or getattr(self._pool, "_broken", False):
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
        return self._pool.submit(work, *args)

    def close(self) -> None:
        """Wait for the job under way and end the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
