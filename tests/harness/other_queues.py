"""Real servers of other queues, for tests that read from them: Redis and beanstalkd on free ports, and BullMQ's own client.

A test that needs one that is not installed is skipped, and says which command installs it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.bullmq import HERE, PACKAGE
from benchmarks.peers.common import DIE_WITH_PARENT, HOST, free_port, program

PATIENCE_S = 30


@contextmanager
def _served(name: str, folder: Path, *arguments: str) -> Iterator[int]:
    """A server on a port of its own. `PORT` in its arguments stands for that."""
    path = program(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make bench-setup")
    port = free_port()
    command = [*DIE_WITH_PARENT, path, *(argument.replace("PORT", str(port)) for argument in arguments)]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        end = time.monotonic() + PATIENCE_S
        while not _listens(port):
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The address of an empty Redis, as a URL."""
    with _served("redis-server", folder, "--port", "PORT", "--bind", HOST, "--save", "", "--appendonly", "no") as port:
        yield f"redis://{HOST}:{port}/0"


@contextmanager
def beanstalkd_server(folder: Path) -> Iterator[int]:
    """The port of an empty beanstalkd."""
    with _served("beanstalkd", folder, "-l", HOST, "-p", "PORT") as port:
        yield port


def run_bullmq(redis_url: str, script: str) -> Any:
    """Run a script with BullMQ's `Queue`, `Worker` and a `connection`. Its last expression, awaited, comes back as JSON."""
    node = program("node")
    if node is None or not PACKAGE.exists():
        pytest.skip("BullMQ is not installed: make bench-setup")
    port = redis_url.rpartition(":")[2].removesuffix("/0")
    head = f'const {{ Queue, Worker }} = require("bullmq"); const connection = {{ host: "{HOST}", port: {port} }};'
    tail = "main().then((found) => { console.log(JSON.stringify(found ?? null)); process.exit(0); });"
    code = f"{head}\nasync function main() {{\n{script}\n}}\n{tail}"
    done = subprocess.run([node, "-e", code], cwd=HERE, capture_output=True, text=True, timeout=PATIENCE_S * 2)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
