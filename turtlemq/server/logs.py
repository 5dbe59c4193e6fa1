"""The log: one line for each event, as `event=name key=value …` or as a JSON object, on standard error (`log_writer`).

Lines hold names, counts, times and reasons; never a message's body, never a token. Values from outside are quoted and cut, so
that a client cannot forge a line. docs/OBSERVE.md lists the events.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

from turtlemq.server.log_writer import LogWriter

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
VALUE_CHARS_MAX = 4_000
LINES_PER_S_MAX = 10  # of one event, for events that a client can cause
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,*()\[\]{}<>#?&;~^|$!-]+")
_EVENT = re.compile(r"event=\w")
_PAIR = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)", re.DOTALL)
_log = logging.getLogger("turtlemq")


_always: dict[str, Any] = {}  # fields of every line


def name_shard(number: int) -> None:
    """Let every line name the shard of this process: several processes write to the same log."""
    _always["shard"] = number


def info(event: str, **fields: Any) -> None:
    """Log an event of normal operation."""
    _emit(logging.INFO, event, fields)


def warning(event: str, **fields: Any) -> None:
    """Log an event that an operator should look at."""
    _emit(logging.WARNING, event, fields)


def error(event: str, trace: BaseException | None = None, **fields: Any) -> None:
    """Log a failure, with the traceback of `trace`."""
    _emit(logging.ERROR, event, fields, trace)


def _emit(level: int, event: str, fields: dict[str, Any], trace: BaseException | None = None) -> None:
    if _log.isEnabledFor(level):
        info_ = None if trace is None else (type(trace), trace, trace.__traceback__)
        _log.log(level, event, exc_info=info_, extra={"fields": fields})


class LogLimiter:
    """Limits the lines of each event to LINES_PER_S_MAX a second, and counts the rest.

    >>> limiter = LogLimiter(); [limiter.allow("slow_request", 5.0) for _ in range(12)][8:]
    [0, 0, None, None]
    >>> limiter.allow("slow_request", 6.1)
    2
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}  # for each event: begin of its second, lines logged, lines left out

    def allow(self, event: str, now_s: float) -> int | None:
        """The number of lines left out since the last one that was logged; None: leave this one out, too."""
        seen = self._seen.setdefault(event, [now_s, 0, 0])
        if now_s - seen[0] >= 1:
            left_out = int(seen[2])
            self._seen[event] = [now_s, 1, 0]
            return left_out
        if seen[1] < LINES_PER_S_MAX:
            seen[1] += 1
            return 0
        seen[2] += 1
        return None


# Lines


def quoted(value: Any) -> str:
    r"""A value in logfmt.

    >>> print(quoted("orders"), quoted(True), quoted(None), quoted('no "room"\nleft'), quoted(""))
    orders true null "no \"room\"\nleft" ""
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"
    return json.dumps(_cut(text), ensure_ascii=False)


def _cut(text: str) -> str:
    if len(text) > VALUE_CHARS_MAX:
        text = text[:VALUE_CHARS_MAX] + "…"
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)


class Formatter(logging.Formatter):
    """Writes records in both shapes. Records of libraries have no fields; their event is `log`."""

    def __init__(self, shape: str = "text") -> None:
        super().__init__()
        self._shape = shape

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        if self._shape == "json":
            return json.dumps({k: _json(v) for k, v in fields.items()}, ensure_ascii=False)
        return " ".join([f"{name}={quoted(value)}" for name, value in fields.items()])

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        out: dict[str, Any] = {"ts": f"{whole}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        message = record.getMessage()
        if isinstance(fields, dict):
            out |= {"event": message, **fields}
        elif _EVENT.match(message):  # a message with its fields already written out
            out |= dict(_PAIR.findall(message))
        else:
            out |= {"event": "log", "logger": record.name, "message": message}
        out |= _always
        if record.exc_info and record.exc_info[0] is not None:
            out.setdefault("error", f"{record.exc_info[0].__name__}: {record.exc_info[1]}")
            out["trace"] = self.formatException(record.exc_info)
        return out


def _json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"


# Output


def set_up(shape: str = "text", level: str = "info") -> None:
    """Send all log records of the process to standard error, by a thread."""
    formatter = Formatter(shape)

    def note_dropped(count: int) -> str:
        return formatter.format(
            _log.makeRecord(_log.name, logging.WARNING, "", 0, f"event=log_lines_dropped count={count}", (), None)
        )

    handler = LogWriter(sys.stderr.fileno(), note_dropped)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])


def _writer() -> LogWriter | None:
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, LogWriter)), None)


def plain(text: str) -> None:
    """Write text for people to standard error, among the lines of the log."""
    writer = _writer()
    if writer is None:
        print(text, file=sys.stderr, flush=True)
    else:
        writer.write(text)


def dropped() -> int:
    """Lines that were dropped since the start, because standard error took no more."""
    writer = _writer()
    return 0 if writer is None else writer.dropped


def drain(timeout_s: float = 1.0) -> None:
    """Wait until the lines so far are written, no longer than `timeout_s`."""
    if (writer := _writer()) is not None:
        writer.drain(timeout_s)
