"""The process: listen at once, open the engine, serve until a signal, then drain, sync and end."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import multiprocessing
import signal
import sys
import threading
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from turtlemq.engine import Engine
from turtlemq.errors import TurtleError
from turtlemq.server.app import make_app
from turtlemq.server.config import Config
from turtlemq.server.loop import Service
from turtlemq.worker import ProcessWorker

log = logging.getLogger("turtlemq")

DRAIN_S = 1.5  # how long requests under way may take once a stop was asked for
WORKER_S = 1.5  # how long a seal under way may take then; one that is cut off is done again


def serve(config: Config) -> int:
    """Run the server. Returns the process's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_serve(config))


def _is_ours(record: logging.LogRecord) -> bool:
    """Broken requests were answered, or nobody is there any more: no page of traceback for them."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, web.RequestPayloadError | HttpProcessingError | ConnectionError)


async def _serve(config: Config) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service, worker = Service(config.tick_ms), ProcessWorker()
    runner = web.AppRunner(
        make_app(service, config), access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_S, keepalive_timeout=75
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            print(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
            return 1
        host, port = runner.addresses[0][:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"TurtleMQ listens on {url}, data in {config.data}", flush=True)
        _warn_if_open(host)
        return await _until_stopped(config, service, runner, worker, stop)
    finally:
        await runner.cleanup()


def _warn_if_open(host: str) -> None:
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        log.warning("event=open_to_all host=%s: anybody who reaches this address can read and write every message", host)


async def _until_stopped(
    config: Config, service: Service, runner: web.AppRunner, worker: ProcessWorker, stop: asyncio.Event
) -> int:
    def opened() -> Engine:
        return Engine.open(Path(config.data), worker=worker, settings=config.topic_defaults())

    try:
        engine = await asyncio.get_running_loop().run_in_executor(None, opened)
    except (TurtleError, OSError) as error:
        print(f"Cannot open the data folder {config.data}: {error}", file=sys.stderr)
        return 1
    service.start(engine)
    gc.collect()
    gc.freeze()
    log.info("event=ready topics=%d was_clean=%s", len(engine.topics), engine.was_clean)
    for topic, damage in engine.damage().items():
        for one in damage:
            log.error("event=damage topic=%s %s", topic, one)
    await stop.wait()
    log.info("event=stopping")
    service.drain()
    await runner.cleanup()
    engine.close()
    await asyncio.get_running_loop().run_in_executor(None, _end, worker)
    log.info("event=stopped")
    return 0


def _end(worker: ProcessWorker) -> None:
    """End the worker process, by force if a seal takes too long."""
    ending = threading.Thread(target=worker.close, daemon=True)
    ending.start()
    ending.join(WORKER_S)
    if ending.is_alive():
        for child in multiprocessing.active_children():
            child.terminate()
        ending.join(WORKER_S)
