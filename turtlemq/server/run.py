"""The server process: listen at once, open the engine, serve until a signal, then drain, sync and exit.

Here are the settings of the whole process: event loop, malloc.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import structs

from turtlemq.errors import InvalidArgument, TurtleError
from turtlemq.server import logs
from turtlemq.server.app import make_app
from turtlemq.server.audit import AUDIT
from turtlemq.server.auth import AUTH
from turtlemq.server.clock import now_ms
from turtlemq.server.config import Config
from turtlemq.server.engine_life import EngineLife
from turtlemq.server.listen import Site, runner_for, tls_of, warn_if_open
from turtlemq.server.reload import Reloader, Source
from turtlemq.server.service import Service
from turtlemq.server.supervisor_line import shard_count

if TYPE_CHECKING:
    from turtlemq.replica.link import Identity
    from turtlemq.server.grpc.site import GrpcSite

DRAIN_S = 1.5  # time for requests under way, once the server stops
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
KEPT_BYTES, LARGE_BYTES = 16 << 20, 4 << 20  # free memory that malloc keeps; buffers from this size on are mapped instead


def serve(config: Config, source: Source, shard: int | None = None, local: int | None = None) -> int:
    """Run the server. `source`: of the configuration, which is read again when its tokens change. `shard`: as a replica of this
    shard, in a cluster with a name server. `local`: as one of several processes of a server, with this shard. Returns the
    process's exit code."""
    if local is not None:
        logs.name_shard(local)
    if shard is not None and (count := shard_count()) > 1:
        logs.name_shard(shard)
        held = max(2 * config.max_body_bytes, config.max_held_bytes // count)
        config = structs.replace(config, max_held_bytes=held)
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
            return runner.run(_measured(config, source, shard, local))
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
    if kind is None or kind.__module__.startswith("aiohttp.http"):  # its parser's
        return kind is None
    return not issubclass(kind, web.RequestPayloadError | ConnectionError)


async def _measured(config: Config, source: Source, shard: int | None, local: int | None) -> int:
    """Serve, and measure the event loop from the start to the end of the stop."""
    service = Service(config.tick_ms)
    async with service.meter.loop.measured():
        code = await _serve(config, source, service, shard, local)
    if service.stopping:
        logs.info("stopped", loop_stalls=service.meter.loop.stalls)
    return code


async def _serve(config: Config, source: Source, service: Service, shard: int | None, local: int | None) -> int:
    tls, loop, stop = tls_of(config), asyncio.get_running_loop(), asyncio.Event()
    me = _identity(config, shard)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.on_failure = stop.set
    runner = runner_for(make_app(service, config, _audit_folder(config, shard)), DRAIN_S)
    service.stop_listening = runner.cleanup
    await runner.setup()
    site = Site(runner, config, tls)
    reloader = Reloader(source, config, runner.app[AUTH].use, site.use_tls)
    loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    reloading = asyncio.create_task(reloader.run())
    try:
        try:
            await site.start()
        except OSError as error:
            print(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
            return 1
        host, port = runner.addresses[0][:2]
        service.ports = frozenset(address[1] for address in runner.addresses)
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        if not local:  # the first of several processes
            warn_if_open(config, host)
        if local is not None:
            return await _serve_shard(config, service, runner, stop, site)
        print(f"TurtleMQ listens on {url}, data in {config.data}", flush=True)
        try:
            grpc = await _start_grpc(config, service, runner, site.shares.connections, me is not None)
        except OSError as error:
            print(f"Cannot listen on grpc_port {config.grpc_port}: {error.strerror or error}", file=sys.stderr)
            return 1
        if grpc is not None:
            reloader.use_tls.append(grpc.use_tls)
            service.end_streams = grpc.drain
            service.stop_listening = lambda: _both(runner.cleanup(), grpc.stop())
        if me is None:
            return await _until_stopped(config, service, runner, stop, site.shares.files, grpc)
        from turtlemq.server.replica_start import run_replica

        return await run_replica(config, me, url, service, stop, site.shares.files)
    finally:
        reloading.cancel()
        await service.stop_listening()


def _audit_folder(config: Config, shard: int | None) -> Path:
    """The folder of the audit log. The processes of a node with several shards have one each."""
    if shard is None or shard_count() == 1:
        return Path(config.data)
    folder = Path(config.data) / "audit" / f"{shard:02}"
    folder.mkdir(mode=int(config.data_mode, 8), parents=True, exist_ok=True)
    return folder


async def _both(one: Awaitable[None], other: Awaitable[None]) -> None:
    await asyncio.gather(one, other)


async def _serve_shard(config: Config, service: Service, runner: web.AppRunner, stop: asyncio.Event, site: Site) -> int:
    """Serve as one of several processes, until `stop` is set."""
    from turtlemq.server.shards.part import beside

    async with beside(service, site, stop.set):
        return await _until_stopped(config, service, runner, stop, site.shares.files, None)


def _identity(config: Config, shard: int | None) -> Identity | None:
    """The name of this node in its cluster; None for a single node, which loads nothing of replication."""
    if shard is None:
        return None
    from turtlemq.server.replication import identity_of

    return identity_of(config, shard)


async def _start_grpc(
    config: Config, service: Service, runner: web.AppRunner, connections: int, in_cluster: bool
) -> GrpcSite | None:
    """Listen for gRPC clients, if that is configured; otherwise nothing of it is loaded."""
    if config.grpc_port < 0:
        return None
    try:
        from turtlemq.server.grpc.site import GrpcSite
    except ImportError as error:
        raise InvalidArgument(f"grpc_port needs h2 and protobuf: pip install 'turtlemq[grpc]' ({error})") from None
    grpc = GrpcSite(service, config, runner.app[AUTH], runner.app[AUDIT], max(1, connections // 2), in_cluster)
    host, port = await grpc.start(tls_of(config))
    service.ports |= {port}
    print(f"gRPC on {f'[{host}]' if ':' in host else host}:{port}", flush=True)
    return grpc


async def _until_stopped(
    config: Config, service: Service, runner: web.AppRunner, stop: asyncio.Event, files: int, grpc: GrpcSite | None
) -> int:
    """Serve until `stop` is set. `files`: how many descriptors are for files."""
    life = EngineLife(config, files)
    try:
        engine = await life.open()
    except (TurtleError, OSError) as error:
        print(f"Cannot open the data folder {config.data}: {error}", file=sys.stderr)
        return 1
    if config.virtual_clock:
        try:
            service.use_virtual_clock(engine)
        except (TurtleError, OSError) as error:
            print(f"Cannot use a virtual clock in {config.data}: {error}", file=sys.stderr)
            await life.close()
            return 1
        logs.warning("virtual_clock", now_ms=now_ms(), hint="time stands still until POST /v1/clock moves it")
    life.serve(service)
    await stop.wait()
    logs.info("stopping")
    if grpc is not None:
        await grpc.stop()
    service.drain()
    await runner.cleanup()
    service.close()
    await life.close()
    return 0 if service.failed is None else 1
