"""The way of `turtlemq serve` into the server, and a short cut to it: after a crash everybody waits for this process to answer.

Flags that are plainly right need no parser: typer, with all it loads, takes longer than opening the data folder.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CONFIG = "TURTLEMQ_CONFIG"
_FLAGS = {"--data", "--host", "--port", "--config"}
_CERTIFICATES = "SSL_CERT_FILE"


def parse_plain_flags(words: Sequence[str]) -> tuple[dict[str, Any], str | None] | None:
    """Settings and the file of others, from `serve` and nothing but flags with values; of all else None: typer knows more.

    >>> parse_plain_flags(["serve", "--data", "there", "--port", "0"])
    ({'data': 'there', 'port': 0}, None)
    >>> [parse_plain_flags(words.split()) for words in ("put", "serve --help", "serve --port", "serve --port high")]
    [None, None, None, None]
    """
    if words[:1] != ["serve"] or len(words) % 2 == 0:
        return None
    told: dict[str, Any] = dict(zip(words[1::2], words[2::2], strict=True))
    if not _FLAGS.issuperset(told) or not all(value and value[0] != "-" for value in told.values()):
        return None
    if (port := told.get("--port")) is not None:
        if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
            return None
        told["--port"] = int(port)
    file = told.pop("--config", None) or os.environ.get(CONFIG) or None
    return {flag.removeprefix("--"): value for flag, value in told.items()}, file


def start(flags: dict[str, Any], file: str | None) -> int:
    """Run the server until it is stopped. Returns the process's exit code."""
    gc.disable()  # it would look at all that is imported again and again, a tenth of the time
    with _no_certificates():
        from turtlemq.server.run import serve
    from pathlib import Path

    from turtlemq.errors import InvalidArgument
    from turtlemq.server.config import load

    gc.freeze()  # nothing of this will go
    gc.enable()
    try:
        return serve(load(flags, os.environ, None if file is None else Path(file)))
    except InvalidArgument as error:
        from turtlemq.cli.output import print_error  # and typer with it

        print_error(str(error))
        return 2


@contextmanager
def _no_certificates() -> Iterator[None]:
    """aiohttp's client reads all certificates of the system while it is imported: 0.05 s, and a server is no such client."""
    before = os.environ.get(_CERTIFICATES)
    os.environ[_CERTIFICATES] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CERTIFICATES]
        else:
            os.environ[_CERTIFICATES] = before
