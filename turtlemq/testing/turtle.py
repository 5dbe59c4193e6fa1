"""A server in the process of a test: on a thread of its own, with a folder of its own and a virtual clock."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import warnings
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from turtlemq.client import Client
from turtlemq.client.wire import Time, to_ms
from turtlemq.engine import Engine
from turtlemq.errors import InvalidArgument
from turtlemq.server.app import make_app
from turtlemq.server.config import Config, load
from turtlemq.server.listen import Site, runner_for
from turtlemq.server.service import Service

KEYS_WARNING = "It is recommended to use web.RequestKey"  # of aiohttp, about the server's keys of requests: they are texts
DRAIN_S = 0.5  # time for requests under way, once the server stops
_EPOCH = datetime.fromtimestamp(0, UTC)


class Turtle:
    """A server whose time stands still until `advance`.

    >>> with Turtle(now=datetime(2030, 1, 31, 8, tzinfo=UTC)) as turtle:
    ...     id = turtle.client.put("mails", {"to": "ann"}, id="m1", delay=timedelta(days=3))
    ...     early = turtle.advance(days=3, milliseconds=-1).isoformat(), turtle.client.fetch("mails")
    ...     turtle.advance(milliseconds=1).isoformat(), turtle.client.fetch("mails")[0].body
    ('2030-02-03T08:00:00+00:00', {'to': 'ann'})
    >>> early
    ('2030-02-03T07:59:59.999000+00:00', [])

    folder: for its data; by default a temporary one, which is removed at the end. now: the time at which a new folder begins, by
    default the present. settings: those of docs/CONFIGURATION.md, such as `defaults={"max_attempts": 3}`.
    """

    def __init__(self, folder: Path | str | None = None, *, now: Time | None = None, **settings: Any) -> None:
        warnings.filterwarnings("ignore", KEYS_WARNING)
        if unknown := settings.keys() - {*Config.__struct_fields__}:
            raise InvalidArgument(f"there is no setting {', '.join(sorted(unknown))}")
        self._temporary = tempfile.TemporaryDirectory(prefix="turtle-") if folder is None else None
        data = Path(self._temporary.name if self._temporary is not None else folder or "") / "data"
        self._server = _Server(load({"port": 0, **settings, "data": str(data), "virtual_clock": True}, {}, None), to_ms(now))
        self.url = self._server.start()
        self.client = Client(self.url, token="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server. In a folder that was given, another one goes on from its time."""
        self.client.close()
        self._server.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def now(self) -> datetime:
        """The time of the server."""
        return _EPOCH + timedelta(milliseconds=self.now_ms)

    @property
    def now_ms(self) -> int:
        """The time of the server, in epoch milliseconds."""
        return self.client.clock()

    def advance(self, by: timedelta | None = None, **parts: float) -> datetime:
        """Move the clock on by a timedelta, or by its parts: `days=3`, `hours=1`, `seconds=0.5`. Returns the new time, when every
        message that is due by then is ready."""
        step_ms = ((by or timedelta()) + timedelta(**parts)) / timedelta(milliseconds=1)
        return self.move_to(self.now_ms + round(step_ms))

    def move_to(self, to: Time) -> datetime:
        """Move the clock on to a time: an aware datetime, or epoch milliseconds."""
        return _EPOCH + timedelta(milliseconds=self.client.move_clock(to))


class _Server:
    """The server and its thread."""

    def __init__(self, config: Config, begin_ms: int | None) -> None:
        self._config, self._begin_ms = config, begin_ms
        self._started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="turtlemq", daemon=True)

    def start(self) -> str:
        """Return the address when it serves. Raises the error of a start that fails."""
        self._thread.start()
        url, self._loop, self._stop = self._started.result()
        return url

    def stop(self) -> None:
        """Wait until all files are closed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        config, service, stop = self._config, Service(), asyncio.Event()
        if config.tls_cert or config.grpc_port >= 0:
            raise InvalidArgument("a server inside a test has neither TLS nor gRPC; turtlemq serve --virtual-clock has both")
        engine = Engine.open(Path(config.data), settings=config.topic_defaults())
        runner = runner_for(make_app(service, config), DRAIN_S)
        try:
            service.use_virtual_clock(engine, self._begin_ms)
            service.start(engine)
            await runner.setup()
            await Site(runner, config, None).start()
            host, port = runner.addresses[0][:2]
            self._started.set_result((f"http://{host}:{port}", asyncio.get_running_loop(), stop))
            await stop.wait()
        finally:
            service.drain()
            await runner.cleanup()
            service.close()
            engine.close()
