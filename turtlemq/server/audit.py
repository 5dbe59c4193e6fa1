"""The audit log: one event for each change that a person or a program has asked for, in the log and in a file of the data folder.

Puts, fetches, acks and extends are no such changes: metrics count them. Which HTTP operation is noted, and as what, stands in the
table of operations; a handler may say how many messages it has changed (`COUNT`), which one (`TARGET`), or a better name
(`ACTION`). A change over gRPC is noted by its handler, under the same names (`Action`).

Events are written by a thread, so that no request waits for the disk: those of 50 ms with one write and one sync, and their lines
of the log together. A kill or a power cut may lose the events of the last moments. The file is set aside when it is full, and the
one before that is removed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from turtlemq.server import logs
from turtlemq.server.auth import TOKEN_KEY, Token, remote_of
from turtlemq.server.clock import now_ms
from turtlemq.server.trace import REQUEST_ID
from turtlemq.storage import names

Action = Literal[
    "backup",
    "cancel",
    "client_deleted",
    "client_registered",
    "client_secret_changed",
    "clock",
    "compact",
    "dead_deleted",
    "drain",
    "group_created",
    "group_deleted",
    "group_moved",
    "handover",
    "pause",
    "replay",
    "replay_cancelled",
    "requeue",
    "reschedule",
    "resume",
    "retry",
    "schedule_changed",
    "schedule_created",
    "schedule_deleted",
    "schedule_triggered",
    "settings",
    "topic_created",
    "topic_deleted",
    "transaction",
    "undrain",
]
COUNT, ACTION, TARGET = "audit_count", "audit_action", "audit_target"  # of a request, set by its handler
FILE_BYTES_MAX = 4 << 20  # about 20,000 events; there are two files
GATHER_S = 0.05  # events of so long are written together: a write and a sync for each would cost more than the changes
WAITING_MAX = 10_000  # events that wait for a slow disk; more are in the log alone
_NEWLINE = b"\n"


class AuditEvent(Struct):
    """One change. `token`: its name, empty where no token is needed. `target`: a group, message, schedule, node or shard of the
    path, or the only id of the body."""

    at_ms: int
    token: str
    client: str
    action: str
    topic: str
    count: int
    request_id: str
    target: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AuditEvent).decode


class AuditLog:
    """The audit log of a process. Files are touched by one thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._path, self._before = folder / names.AUDIT, folder / names.AUDIT_BEFORE
        self._thread = ThreadPoolExecutor(1, "audit")
        self._waiting: deque[AuditEvent] = deque()
        self._limiter = logs.LogLimiter()
        self._is_closed = False  # later events are in the log alone
        self._hurry = threading.Event()  # set to write the events that wait at once

    def note(self, event: AuditEvent) -> None:
        """Note a change. An event of no messages has changed nothing, and is not noted."""
        if not event.count:
            return
        if not self._is_closed and len(self._waiting) < WAITING_MAX:
            self._waiting.append(event)
            if len(self._waiting) == 1:
                self._thread.submit(self._append)
            return
        _log(event)
        if not self._is_closed and self._limiter.allow("audit_not_written", monotonic()) is not None:
            logs.error("audit_not_written", file=str(self._path), error="the disk is too slow")

    def read(self, from_ms: int, limit: int, wanted: Callable[[str], bool]) -> Future[list[AuditEvent]]:
        """The newest events since a time, the newest last, those noted up to now included. `wanted`: of which topics."""
        self._hurry.set()
        return self._thread.submit(self._read, from_ms, limit, wanted)

    def close(self) -> None:
        """Wait until everything noted is written."""
        self._is_closed = True
        self._hurry.set()
        self._thread.shutdown()

    # On the thread

    def _append(self) -> None:
        self._hurry.wait(GATHER_S)
        events = self._take()
        for event in events:
            _log(event)
        try:
            if events:
                self._write(b"".join([_encode(event) + _NEWLINE for event in events]))
        except OSError as error:
            if self._limiter.allow("audit_not_written", monotonic()) is not None:
                logs.error("audit_not_written", file=str(self._path), error=error.strerror or error)

    def _take(self) -> list[AuditEvent]:
        """All events that wait. The loop submits another job for the first one behind them."""
        events = []
        while self._waiting:
            events.append(self._waiting.popleft())
        return events

    def _write(self, lines: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(lines) >= FILE_BYTES_MAX:
            self._path.replace(self._before)
        with self._path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != _NEWLINE:  # the last process ended in the middle of a line
                    lines = _NEWLINE + lines
            file.write(lines)
            file.flush()
            os.fdatasync(file.fileno())

    def _read(self, from_ms: int, limit: int, wanted: Callable[[str], bool]) -> list[AuditEvent]:
        if not self._is_closed:
            self._hurry.clear()
        events = (event for path in (self._before, self._path) for event in _events(path))
        return list(deque((event for event in events if event.at_ms >= from_ms and wanted(event.topic)), limit))


def _log(event: AuditEvent) -> None:
    fields = msgspec.structs.asdict(event)
    logs.info("audit", **{name: value for name, value in fields.items() if name != "at_ms" and value != ""})


def _events(path: Path) -> Iterator[AuditEvent]:
    """The events of a file. Lines that are cut off or damaged are left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield _decode(line)
        except msgspec.DecodeError:
            continue


AUDIT = web.AppKey("audit", AuditLog)


def name_target(request: web.Request, ids: Sequence[str] | None) -> None:
    """Let the event of a request name its message, if it is about one alone."""
    if ids is not None and len(ids) == 1:
        request[TARGET] = ids[0]


def note(request: web.Request, action: Action, topic: str | None = None) -> None:
    """Note that an HTTP request has changed something. A handler that set `COUNT` to 0 has changed nothing."""
    token: Token | None = request.get(TOKEN_KEY)
    place = request.match_info
    event = AuditEvent(
        at_ms=now_ms(),
        token="" if token is None else token.name,
        client=remote_of(request),
        action=request.get(ACTION, action),
        topic=place.get("topic", "") if topic is None else topic,
        count=int(request.get(COUNT, 1)),
        request_id=request[REQUEST_ID],
        target=request.get(TARGET)
        or next((place[name] for name in ("group", "id", "name", "node", "shard") if name in place), ""),
    )
    request.app[AUDIT].note(event)
