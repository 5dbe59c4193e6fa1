"""The log is written by a thread: standard error that takes no lines stops nothing, and dropped lines are counted."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.server_process import PROGRAM, Server, environment, until_ready
from turtlemq.server.log_writer import WAITING_BYTES_MAX, LogWriter

F_SETPIPE_SZ = 1031


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes 4 KiB."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def read_all(fd: int, lines: list[str]) -> None:
    with os.fdopen(os.dup(fd)) as text:
        lines.extend(line.rstrip("\n") for line in text)


def test_lines_are_written_in_order() -> None:
    with pipe() as (reader, writer):
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
    with pipe() as (reader, writer):
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


def test_a_server_whose_standard_error_nothing_reads_goes_on(tmp_path: Path) -> None:
    with pipe() as (_, writer):
        program = [*PROGRAM, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=writer, text=True, env=environment(), cwd=tmp_path)
        server = Server(process, 0, tmp_path / "data")
        try:
            until_ready(server)
            for i in range(60):  # each is a line of 300 bytes, written within two seconds
                server.put(f"{i:0200}", {"body": "x"})
            for _ in range(60):
                assert server.call("GET", "/readyz").status == 200
                threading.Event().wait(0.05)
            assert json.loads(server.call("GET", f"/v1/topics/{0:0200}").data)["topic"] == f"{0:0200}"
            assert server.stop() == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
