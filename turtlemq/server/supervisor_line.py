"""The line of a replica process to its supervisor: a report every heartbeat and at every change, and the supervisor's end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec

from turtlemq.server.supervision import SHARD_COUNT, SUPERVISOR, Report


def shard_count() -> int:
    """How many shards the cluster of this replica process has, as its supervisor says."""
    return int(os.environ.get(SHARD_COUNT, "1"))


class SupervisorLine:
    """Sends reports. Without a supervisor, nothing is sent. All methods run on the event loop."""

    def __init__(self, report: Callable[[], Report], ended: Callable[[], None], beat_s: float) -> None:
        self._report, self._ended, self._beat_s = report, ended, beat_s
        self._told: Report | None = None
        self._socket: socket.socket | None = None
        number = os.environ.get(SUPERVISOR)
        if number:
            self._socket = socket.socket(fileno=os.dup(int(number)))  # the first one stays, for a process that replaces itself
            self._socket.setblocking(False)

    async def run(self) -> None:
        """Report until this is cancelled. Calls `ended` when the supervisor has ended."""
        if self._socket is None:
            return
        reading = asyncio.create_task(self._read(self._socket))
        try:
            while not reading.done():
                self.tell(always=True)
                await asyncio.wait([reading], timeout=self._beat_s)
            self._ended()
        finally:
            reading.cancel()

    async def _read(self, line: socket.socket) -> None:
        """Return when the supervisor's end is closed. It sends nothing."""
        try:
            while await asyncio.get_running_loop().sock_recv(line, 4_096):
                pass
        except OSError:
            return

    def tell(self, *, always: bool = False, state: str = "") -> None:
        """Send a report, if it differs from the last one. `state`: instead of the present one."""
        if self._socket is None:
            return
        report = self._report()
        if state:
            report = msgspec.structs.replace(report, state=state)
        if not always and self._told is not None and _essence(report) == _essence(self._told):
            return
        try:
            self._socket.send(msgspec.json.encode(report) + b"\n")
            self._told = report
        except OSError:  # it has ended, or does not read: it hears the next one
            return


def _essence(report: Report) -> Report:
    """A report without its position, which changes all the time."""
    return msgspec.structs.replace(report, lsn=0)
