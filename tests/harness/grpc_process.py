"""A real server process with a gRPC port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.server_process import Server, running


@contextmanager
def grpc_running(data: Path, *args: str, **more: Any) -> Iterator[tuple[Server, int]]:
    """A server for a while, and the port on which it speaks gRPC."""
    with running(data, "--grpc-port", "0", *args, **more) as server:
        assert server.process.stdout is not None
        line = server.process.stdout.readline()
        assert line.startswith("gRPC on "), (line, server.log)
        server.grpc_port = int(line.rpartition(":")[2])
        yield server, server.grpc_port
