"""The server process: listen at once, open the engine, serve until a signal, then drain, sync and exit.

Here are the settings of the whole process: event loop, garbage collector, malloc, thread switching.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from turtlemq import __version__, backup
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError
from turtlemq.server import logs
from turtlemq.server.aiohttp_internals import HttpProcessingError
from turtlemq.server.app import make_app
from turtlemq.server.config import Config
from turtlemq.server.listen import Site, runner_for, tls_of, warn_if_open
from turtlemq.server.service import Service
from turtlemq.storage.door import Door
from turtlemq.storage.file_budget import FileBudget
from turtlemq.storage.process_worker import ProcessWorker

GC_THRESHOLDS = 20_000, 50, 50  # a batch makes thousands of objects, none of them in reference cycles
SWITCH_S = 0.001  # of the interpreter: a committer thread that has synced must soon get its turn to report it
DRAIN_S = 1.5  # time for requests under way, once the server stops
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
KEPT_BYTES, LARGE_BYTES = 16 << 20, 4 << 20  # free memory that malloc keeps; buffers from this size on are mapped instead
STOP_THREADS = 16  # that sync the topics, once the server stops: a sync mostly waits for the disk
WORKER_S = 1.5  # time for a seal under way, once the server stops; an interrupted one is repeated at the next start


def serve(config: Config) -> int:
    """Run the server. Returns the process's exit code."""
    logs.set_up(config.log_format, config.log_level)
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    _keep_memory()
    os.umask(0o777 & ~int(config.data_mode, 8))  # that of the shell would forbid what `data_mode` allows
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    try:
        with runner:
            return runner.run(_measured(config))
    finally:
        logs.drain()


def _keep_memory() -> None:
    """Let glibc's malloc keep the memory of a request for the next one.

    By default it returns the pages to the system and asks for them again: a fifth of the time of a request with a megabyte.
    Other C libraries have no such option.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def _is_ours(record: logging.LogRecord) -> bool:
    """A log filter: leaves out tracebacks of broken requests, which were answered, and of clients that are gone."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, web.RequestPayloadError | HttpProcessingError | ConnectionError)


async def _measured(config: Config) -> int:
    """Serve, and measure the event loop from the start to the end of the stop."""
    service = Service(config.tick_ms)
    async with service.meter.loop.measured():
        code = await _serve(config, service)
    if service.stopping:
        logs.info("stopped", loop_stalls=service.meter.loop.stalls)
    return code


async def _serve(config: Config, service: Service) -> int:
    tls, loop, stop, worker = tls_of(config), asyncio.get_running_loop(), asyncio.Event(), ProcessWorker()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.on_failure = stop.set
    runner = runner_for(make_app(service, config), DRAIN_S)
    await runner.setup()
    try:
        site = Site(runner, config, tls)
        try:
            await site.start()
        except OSError as error:
            print(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
            return 1
        host, port = runner.addresses[0][:2]
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        print(f"TurtleMQ listens on {url}, data in {config.data}", flush=True)
        warn_if_open(config, host)
        return await _until_stopped(config, service, runner, worker, stop, site.shares.files)
    finally:
        await runner.cleanup()


async def _until_stopped(
    config: Config, service: Service, runner: web.AppRunner, worker: ProcessWorker, stop: asyncio.Event, files: int
) -> int:
    """Serve until `stop` is set. `files`: how many descriptors are for files."""
    flusher = ThreadPoolExecutor(1, "flush")

    def opened() -> Engine:
        door = Door(folder_mode=int(config.data_mode, 8), budget=FileBudget.of(files))
        engine = Engine.open(Path(config.data), door=door, worker=worker, flusher=flusher, settings=config.topic_defaults())
        if not door.set_mode(engine.root):
            hint = f"it belongs to another user, and its mode is not {config.data_mode}"
            logs.warning("data_folder_open", folder=config.data, hint=hint)
        engine.folder.leftovers |= backup.prepare_pins(engine.door, engine.root)
        return engine

    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()  # opening makes no garbage that has reference cycles; with 10,000 topics each collection would last a second
    try:
        engine = await loop.run_in_executor(None, opened)
    except (TurtleError, OSError) as error:
        print(f"Cannot open the data folder {config.data}: {error}", file=sys.stderr)
        return 1
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
    await stop.wait()
    logs.info("stopping")
    service.drain()
    await runner.cleanup()
    service.close()
    await loop.run_in_executor(None, _close, engine, flusher, worker)
    return 0 if service.failed is None else 1


def _close(engine: Engine, flusher: ThreadPoolExecutor, worker: ProcessWorker) -> None:
    """Close all topics, then end the threads and the worker process. Not on the event loop: thousands of topics take seconds."""
    with ThreadPoolExecutor(STOP_THREADS, "stop") as stopper:
        engine.close(stopper)
    flusher.shutdown()
    _end(worker)


def _end(worker: ProcessWorker) -> None:
    """End the worker process; terminate it if a seal takes too long."""
    ending = threading.Thread(target=worker.close, daemon=True)
    ending.start()
    ending.join(WORKER_S)
    if ending.is_alive():
        for child in multiprocessing.active_children():
            child.terminate()
        ending.join(WORKER_S)
