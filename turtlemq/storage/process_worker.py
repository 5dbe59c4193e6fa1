"""The worker process that seals segments, so that appends and ticks go on meanwhile. A shell: it may start processes.

Workers that need no process are in `workers`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any


class ProcessWorker:
    """One process, started on first use. If a job kills it, that job fails, and the next one gets a new process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is None or getattr(self._pool, "_broken", False):
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_begin)
        return self._pool.submit(work, *args)

    def close(self, timeout_s: float | None = None) -> None:
        """End the process, and wait for its end: it writes into the data folder. A job under way has so much time; then the
        process is killed."""
        if self._pool is None:
            return
        options = {"wait": True, "cancel_futures": True}
        ending = threading.Thread(target=self._pool.shutdown, kwargs=options, daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            for child in multiprocessing.active_children():
                child.kill()
                child.join()
            ending.join()
        self._pool = None


def _begin() -> None:
    """In the worker: ignore Ctrl-C, which is for the server; the server ends this process in time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_server, daemon=True).start()


def _end_with_the_server() -> None:
    """End this process when the server is killed. The next server may seal the same segment, under the same file names."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    parent.join()
    os._exit(0)
