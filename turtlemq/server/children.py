"""Processes of a supervisor: it starts them, hears their reports, kills a silent one, and asks them to end.

A child listens on sockets that its supervisor has bound, so that clients wait in the backlog while it restarts. It reports over
a socket pair: one JSON line every heartbeat, and at every change. If the supervisor is killed, the child reads the end of the
socket pair, and ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from turtlemq.errors import describe
from turtlemq.server import logs
from turtlemq.server.supervision import SUPERVISOR, Report, Silence, parse_report

LAST_LINES_S = 0.5  # time for the last reports of a process that has ended
T = TypeVar("T")


class Stop:
    """SIGTERM and SIGINT: the first asks the children to end, the second kills them. `reload`: called on SIGHUP."""

    def __init__(self, reload: Callable[[], None]) -> None:
        self.is_asked, self.is_urgent = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def _signalled(self) -> None:
        (self.is_urgent if self.is_asked.is_set() else self.is_asked).set()

    async def unless(self, work: Coroutine[Any, Any, None], event: asyncio.Event | None = None) -> bool:
        """Do something, unless a signal comes first. Returns whether it is done."""
        task = asyncio.create_task(work)
        waiting = asyncio.create_task((event or self.is_asked).wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            for one in (task, waiting):
                one.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)


class Child:
    """A process of the supervisor, and the last report that came from it. `fields`: of its log lines."""

    def __init__(
        self, process: asyncio.subprocess.Process, line: socket.socket, beat_s: float, fields: Mapping[str, Any]
    ) -> None:
        self.process, self.report, self._fields = process, Report(), fields
        self.started_s = time.monotonic()
        self._beat_s, self._silence = beat_s, Silence(beat_s, self.started_s)
        self._reading = asyncio.create_task(self._read(line))

    @classmethod
    async def start(
        cls, command: Sequence[str], own: Mapping[str, str], fds: Sequence[int], beat_s: float, **fields: Any
    ) -> Child:
        """Start a process that inherits these descriptors, and has these variables beside those of the supervisor. Raises
        `OSError` if the system has no memory or too many processes."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **own, SUPERVISOR: str(theirs.fileno())}
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *fds],
                    env=environment,
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        logs.info("child_started", pid=process.pid, **fields)
        return cls(process, ours, beat_s, fields)

    async def _read(self, line: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=line)
        try:
            while data := await reader.readline():
                report = parse_report(data)
                if report is None:
                    logs.warning("child_report_unreadable", pid=self.process.pid, line=data[:200])
                    continue
                self.report = report
                self._silence.heard(report.state)
        except (OSError, ValueError) as error:  # a line without an end
            logs.warning("child_report_unreadable", pid=self.process.pid, error=describe(error))
        finally:
            writer.close()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def until_end(self, stop: Stop, stop_s: float) -> tuple[int, bool]:
        """Watch the process until it has ended. Once a stop is asked for, it has `stop_s` to end by itself. Returns its exit code
        (minus N: ended by signal N), and whether that is as it should be."""
        watching = asyncio.create_task(self._watch())
        if not await stop.unless(_done(watching)):
            await self._end(watching, stop, stop_s)
        code = await watching
        up_s = round(time.monotonic() - self.started_s, 3)
        how = {"signal": signal.Signals(-code).name} if code < 0 else {"code": code}
        is_good = code in (0, -signal.SIGTERM) and stop.is_asked.is_set()  # a process that starts has no handler yet
        log = logs.info if is_good else logs.warning
        log("child_ended", pid=self.process.pid, **self._fields, **how, state=self.report.state, up_s=up_s)
        await asyncio.wait([self._reading], timeout=LAST_LINES_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        return code, is_good

    async def _watch(self) -> int:
        """Wait for the end of the process, and kill it if it is silent."""
        ending = asyncio.create_task(self.process.wait())
        try:
            while not ending.done():
                await asyncio.wait([ending], timeout=self._beat_s / 2)
                if not ending.done() and self._silence.is_over(time.monotonic()):
                    told: dict[str, Any] = {"state": self.report.state, "epoch": self.report.epoch}
                    logs.error("child_silent_killed", pid=self.process.pid, **self._fields, **told)
                    self.signal(signal.SIGKILL)
                    await ending
            return ending.result()
        finally:
            ending.cancel()

    async def _end(self, watching: asyncio.Task[int], stop: Stop, stop_s: float) -> None:
        """Ask the process to end; kill it if it takes too long, or at the second signal."""
        logs.info("stopping", pid=self.process.pid, **self._fields)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stop_s):
                await stop.unless(_done(watching), stop.is_urgent)
        if not watching.done():
            logs.warning("child_killed", pid=self.process.pid, **self._fields, state=self.report.state)
            self.signal(signal.SIGKILL)


async def _done(task: asyncio.Task[T]) -> None:
    """Wait for a task without ending it."""
    await asyncio.wait([task])
