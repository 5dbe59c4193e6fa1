"""The supervisor of a server with several shards: one process a shard, all behind the same port.

The supervisor binds all sockets and keeps them. The public port has a socket for each process, and the system deals out the
connections; each process has a port of its own, too, for clients that know where a topic lives, and a Unix socket for the others.
A process that was killed is started again at once, and requests wait in its sockets meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from turtlemq import __version__
from turtlemq.errors import InvalidArgument, TurtleError, describe
from turtlemq.server import logs
from turtlemq.server.accept import LISTENING, bind
from turtlemq.server.children import Child, Stop
from turtlemq.server.config import Config
from turtlemq.server.listen import BACKLOG
from turtlemq.server.shards.part import BEAT_S
from turtlemq.server.shards.siblings import SIBLINGS, Siblings, to_text
from turtlemq.server.supervision import RestartPause
from turtlemq.shard_folders import prepare
from turtlemq.storage import names
from turtlemq.storage.door import Door

STOP_S = 30.0  # for a process to sync and to end; then it is killed
WRONG_USE = 2  # exit code of a process that cannot use its configuration


def run_shards(config: Config, command: Callable[[int], Sequence[str]]) -> int:
    """Run the supervisor until SIGTERM or SIGINT. `command`: of the process of a shard. Returns the exit code."""
    logs.set_up(config.log_format, config.log_level)
    os.umask(0o777 & ~int(config.data_mode, 8))
    door, root = Door(folder_mode=int(config.data_mode, 8)), Path(config.data)
    try:
        door.make_folder(root)
        lock = door.lock(root / names.LOCK)
        try:
            prepare(door, root, config.shards)
            door.make_folder(root / names.SHARDS)
            return asyncio.run(_supervise(config, command))
        finally:
            os.close(lock)
    except InvalidArgument:
        raise
    except (TurtleError, OSError) as error:
        print(f"Cannot open the data folder {config.data}: {error}", file=sys.stderr)
        return 1
    finally:
        logs.drain()


@dataclass(frozen=True, slots=True)
class Sockets:
    """All listening sockets, by shard. `folder`: a descriptor of the folder of the Unix sockets, through which their paths are
    short: the system allows 107 bytes."""

    public: list[list[socket.socket]]
    own: list[list[socket.socket]]
    unix: list[socket.socket]
    paths: tuple[str, ...]
    folder: int

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(sockets[0].getsockname()[1]) for sockets in self.own)

    def close(self) -> None:
        for path in self.paths:
            _unlink(path)
        for listening in chain(*self.public, *self.own, self.unix):
            listening.close()
        os.close(self.folder)


async def _bound(config: Config) -> Sockets:
    """Bind all sockets. Raises `InvalidArgument` if a port is taken."""
    for listening in await _bind(config, config.port):  # alone: a port that another server shares out would be shared with it
        listening.close()
    public = [await _bind(config, config.port, shared=True)]
    port = int(public[0][0].getsockname()[1])
    public += [await _bind(config, port, shared=True) for _ in range(1, config.shards)]
    own = [await _bind(config, config.port and config.port + 1 + shard) for shard in range(config.shards)]
    return _with_unix(config, public, own)


def _with_unix(config: Config, public: list[list[socket.socket]], own: list[list[socket.socket]]) -> Sockets:
    root = Path(config.data) / names.SHARDS
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    short = f"/proc/self/fd/{folder}"
    paths = tuple(f"{short if os.path.exists(short) else root}/socket.{shard:02}" for shard in range(config.shards))
    return Sockets(public, own, [_bound_unix(path) for path in paths], paths, folder)


async def _bind(config: Config, port: int, *, shared: bool = False) -> list[socket.socket]:
    try:
        return await bind(config.host, port, BACKLOG, shared=shared)
    except OSError as error:
        more = "" if port == config.port else f" Each of the {config.shards} shards has a port of its own behind {config.port}."
        raise TurtleError(f"cannot listen on {config.host}:{port}: {error.strerror or error}.{more}") from None


def _bound_unix(path: str) -> socket.socket:
    _unlink(path)  # of a supervisor that was killed
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def _unlink(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


async def _supervise(config: Config, command: Callable[[int], Sequence[str]]) -> int:
    try:
        sockets = await _bound(config)
    except TurtleError as error:
        print(str(error).capitalize(), file=sys.stderr)
        return 1
    supervisor = _Supervisor(config, command, sockets)
    try:
        host, port = sockets.public[0][0].getsockname()[:2]
        url = f"http{'s' if config.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"TurtleMQ listens on {url}, data in {config.data}, {config.shards} shards", flush=True)
        logs.info("shards_started", shards=config.shards, url=url, version=__version__, pid=os.getpid())
        codes = await asyncio.gather(*(supervisor.run(shard) for shard in range(config.shards)))
        return max(codes)
    finally:
        sockets.close()


class _Supervisor:
    """Keeps the processes of all shards running, until it is asked to stop, or one cannot even start."""

    def __init__(self, config: Config, command: Callable[[int], Sequence[str]], sockets: Sockets) -> None:
        self._command, self._sockets = command, sockets
        self._children: dict[int, Child] = {}
        self._stop = Stop(self._reload)

    def _reload(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGHUP)

    async def run(self, shard: int) -> int:
        """Keep the process of a shard running. Returns an exit code."""
        pause, has_served = RestartPause(), False
        while not self._stop.is_asked.is_set():
            try:
                child = self._children[shard] = await self._start(shard)
            except OSError as error:  # no memory, or too many processes
                logs.error("child_not_started", shard=shard, error=describe(error))
                await self._stop.unless(asyncio.sleep(pause.after(0)))
                continue
            code, is_good = await child.until_end(self._stop, STOP_S)
            del self._children[shard]
            if self._stop.is_asked.is_set():
                return 0 if is_good else 1
            has_served |= child.report.state in ("serving", "stopping")
            if code > 0 and not has_served:  # the process has printed the reason
                self._stop.is_asked.set()
                return WRONG_USE if code == WRONG_USE else 1
            await self._stop.unless(asyncio.sleep(pause.after(time.monotonic() - child.started_s)))
        return 0

    async def _start(self, shard: int) -> Child:
        sockets = self._sockets
        listening = [one.fileno() for one in (*sockets.public[shard], *sockets.own[shard])]
        unix = sockets.unix[shard].fileno()
        told = Siblings(shard, sockets.ports, sockets.paths, unix)
        own = {LISTENING: ",".join(map(str, listening)), SIBLINGS: to_text(told)}
        fds = [*listening, unix, sockets.folder]
        return await Child.start(self._command(shard), own, fds, BEAT_S, shard=shard)
