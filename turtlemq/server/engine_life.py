"""The engine in a server process: opened on a thread, served by a `Service`, closed on a thread.

A single node and the leader of a cluster share it.

Settings of the process that depend on it are here: garbage collector, thread switching.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from turtlemq import __version__, backup
from turtlemq.engine import Engine
from turtlemq.server import logs
from turtlemq.server.config import Config
from turtlemq.server.service import Service
from turtlemq.storage.door import Door
from turtlemq.storage.file_budget import FileBudget
from turtlemq.storage.process_worker import ProcessWorker

if TYPE_CHECKING:
    from turtlemq.replica.ferry import Ferry

GC_THRESHOLDS = 20_000, 50, 50  # a batch makes thousands of objects, none of them in reference cycles
SWITCH_S = 0.001  # of the interpreter: a committer thread that has synced must soon get its turn to report it
STOP_THREADS = 16  # that sync the topics, once the server stops: a sync mostly waits for the disk
WORKER_S = 1.5  # time for a seal under way, once the server stops; an interrupted one is repeated at the next start


class EngineLife:
    """One engine, from its opening to its end. `files`: how many descriptors are for files."""

    def __init__(
        self,
        config: Config,
        files: int,
        *,
        worker: ProcessWorker | Ferry | None = None,
        door: Callable[[FileBudget], Door] | None = None,
        lock: int | None = None,
    ) -> None:
        """`door` and `lock`: of a leader, whose changes are shipped and whose folder is locked already."""
        self.worker = worker or ProcessWorker()
        self._config, self._files, self._door, self._lock = config, files, door, lock
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._engine: Engine | None = None

    async def open(self) -> Engine:
        """Open the engine. Raises `TurtleError` or `OSError`."""
        gc.collect()
        gc.disable()  # opening makes no garbage that has reference cycles; with 10,000 topics each collection would last a second
        self._engine = await asyncio.get_running_loop().run_in_executor(None, self._open)
        return self._engine

    def _open(self) -> Engine:
        config, budget = self._config, FileBudget.of(self._files)
        door = Door(folder_mode=int(config.data_mode, 8), budget=budget) if self._door is None else self._door(budget)
        workers = {"worker": self.worker, "flusher": self._flusher}
        engine = Engine.open(Path(config.data), door=door, settings=config.topic_defaults(), lock=self._lock, **workers)
        if not door.set_mode(engine.root):
            hint = f"it belongs to another user, and its mode is not {config.data_mode}"
            logs.warning("data_folder_open", folder=config.data, hint=hint)
        engine.folder.leftovers |= backup.prepare_pins(engine.door, engine.root)
        return engine

    def serve(self, service: Service) -> None:
        """Serve with the open engine."""
        engine = self._engine
        assert engine is not None, "it is open"
        try:
            service.start(engine)
        except BaseException:
            engine.close()  # a start that fails must not look like a crash to the next one
            raise
        gc.freeze()  # these objects live as long as the process
        gc.set_threshold(*GC_THRESHOLDS)
        gc.enable()
        sys.setswitchinterval(SWITCH_S)
        logs.info("ready", topics=len(engine.topics), was_clean=engine.was_clean, version=__version__)

    async def close(self) -> None:
        """Close all topics, then end the threads and the worker process. Requires: the service is closed."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        """Not on the event loop: thousands of topics take seconds."""
        if self._engine is not None:
            with ThreadPoolExecutor(STOP_THREADS, "stop") as stopper:
                self._engine.close(stopper)
        self._flusher.shutdown()
        self.worker.close(WORKER_S)
