"""The log is written by a thread: standard error that takes no lines stops nothing, and dropped lines are counted."""

from __future__ import annotations

import os
import threading

from tests.harness.pipes import small_pipe
from turtlemq.server.log_writer import WAITING_BYTES_MAX, LogWriter


def read_all(fd: int, lines: list[str]) -> None:
    with os.fdopen(os.dup(fd)) as text:
        lines.extend(line.rstrip("\n") for line in text)


def test_lines_are_written_in_order() -> None:
    with small_pipe() as (reader, writer):
        lines: list[str] = []
        thread = threading.Thread(target=read_all, args=(reader, lines))
        thread.start()
        log = LogWriter(os.dup(writer), str)
        for i in range(2_000):
            log.write(f"line {i}")
        assert log.drain(20)
        os.close(log._fd)
        os.close(writer)
        thread.join()
        writer = os.dup(reader)
    assert lines == [f"line {i}" for i in range(2_000)]
    assert log.dropped == 0


def test_five_megabytes_without_a_reader_are_dropped_and_counted() -> None:
    with small_pipe() as (reader, writer):
        log = LogWriter(os.dup(writer), lambda count: f"dropped {count}")
        line = "x" * 999
        for _ in range(5_000):
            log.write(line)
        assert not log.drain(0.05)
        kept = 5_000 - log.dropped
        assert WAITING_BYTES_MAX // 1_000 - 1 <= kept <= WAITING_BYTES_MAX // 1_000 + 70, "what waits, and what the pipe took"
        lines: list[str] = []
        thread = threading.Thread(target=read_all, args=(reader, lines))
        thread.start()
        assert log.drain(20)
        log.write("again")
        assert log.drain(20)
        os.close(log._fd)
        os.close(writer)
        thread.join()
        writer = os.dup(reader)
    assert lines.count(line) == kept
    assert [other for other in lines if other != line] == [f"dropped {5_000 - kept}", "again"]


def test_a_reader_that_is_gone_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log = LogWriter(writer, str)
    log.write("lost")
    assert log.drain(20)
    assert log.dropped == 1
    os.close(writer)
