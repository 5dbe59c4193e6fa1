"""Pipes that take little, for tests of writers that nothing reads from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

_F_SETPIPE_SZ = 1031


@contextmanager
def small_pipe() -> Iterator[tuple[int, int]]:
    """Reader and writer of a pipe that takes 4 KiB."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _F_SETPIPE_SZ, 4096)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
