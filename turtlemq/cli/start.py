"""Start of the server, with a fast path for `turtlemq serve`: after a crash, all clients wait for this process.

Simple flags are parsed here, without typer: loading it takes longer than opening the data folder. `serve` is the verb for all
other command lines.
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
    """Settings and configuration file from a command line of `serve` with plain `--flag value` pairs.

    Returns None for every other command line, which is left to typer.

    >>> parse_plain_flags(["serve", "--data", "there", "--port", "0"])
    ({'data': 'there', 'port': 0}, None)
    >>> [parse_plain_flags(words.split()) for words in ("put", "serve --help", "serve --port", "serve --port high")]
    [None, None, None, None]
    """
    if words[:1] != ["serve"] or len(words) % 2 == 0:
        return None
    flags: dict[str, Any] = dict(zip(words[1::2], words[2::2], strict=True))
    if not _FLAGS.issuperset(flags) or not all(value and value[0] != "-" for value in flags.values()):
        return None
    if (port := flags.get("--port")) is not None:
        if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
            return None
        flags["--port"] = int(port)
    file = flags.pop("--config", None) or os.environ.get(CONFIG) or None
    return {flag.removeprefix("--"): value for flag, value in flags.items()}, file


def start(flags: dict[str, Any], file: str | None) -> int:
    """Run the server until it is stopped. Returns the exit code of the process."""
    gc.disable()  # collections during the imports would take a tenth of the start
    with _no_certificates():
        from turtlemq.server.run import serve
    from pathlib import Path

    from turtlemq.errors import InvalidArgument
    from turtlemq.server.config import load

    gc.freeze()  # imported modules live as long as the process
    gc.enable()
    try:
        return serve(load(flags, os.environ, None if file is None else Path(file)))
    except InvalidArgument as error:
        from turtlemq.cli.output import print_error  # not at the top: loads typer

        print_error(str(error))
        return 2


@contextmanager
def _no_certificates() -> Iterator[None]:
    """Let aiohttp be imported without the certificates of the system.

    Its client module makes a TLS context at import, which reads them all: 0.05 s of every start, for a context that a server
    never uses.
    """
    before = os.environ.get(_CERTIFICATES)
    os.environ[_CERTIFICATES] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CERTIFICATES]
        else:
            os.environ[_CERTIFICATES] = before
