"""Start of the server, with a fast path for `turtlemq serve`: after a crash, all clients wait for this process.

Simple flags are parsed here, without typer: loading it takes longer than opening the data folder. `serve` is the verb for all
other command lines.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turtlemq.server.config import Config

CONFIG = "TURTLEMQ_CONFIG"
_FLAGS = {"--data", "--host", "--port", "--grpc-port", "--shards", "--config", "--replica", "--shard"}
_NUMBERS_MAX = {"--port": 65_535, "--grpc-port": 65_535, "--shards": 64, "--replica": 99, "--shard": 63}
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
    for flag in _NUMBERS_MAX.keys() & flags:
        text = flags[flag]
        if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > _NUMBERS_MAX[flag]:
            return None
        flags[flag] = int(text)
    file = flags.pop("--config", None) or os.environ.get(CONFIG) or None
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}, file


def start(flags: dict[str, Any], file: str | None) -> int:
    """Run the server until it is stopped. In a cluster: the supervisor of this node, or with the flag `replica` the process of a
    shard's replica. With several shards: their supervisor, or with the flag `shard` the process of one. Returns the exit code."""
    gc.disable()  # collections during the imports would take a tenth of the start
    with _no_certificates():
        from turtlemq.server.config import load
    from pathlib import Path

    from turtlemq.errors import InvalidArgument

    settings = {name: value for name, value in flags.items() if name not in ("replica", "shard")}
    try:
        path = None if file is None else Path(file)
        read = partial(load, settings, os.environ, path)
        config = read()
        if not config.cluster.name and any(Path(config.data, name).exists() for name in ("NODE", "REPLICA")):
            from turtlemq.server.node_folder import refuse_cluster_folder

            refuse_cluster_folder(Path(config.data))
        if config.shards == 1 and Path(config.data, "SHARDS").exists():
            from turtlemq.shard_folders import refuse_shards

            refuse_shards(Path(config.data))
        with _no_certificates():
            if config.shards > 1:
                run = _with_shards(config, read, settings, file, flags.get("shard"))
            elif config.cluster.etcd and flags.get("replica") is None:
                from turtlemq.server.node import run_node

                run = partial(run_node, config, lambda shard: _command(settings, file, replica=shard))
            else:
                from turtlemq.server.reload import Source
                from turtlemq.server.run import serve

                run = partial(serve, config, Source(read, path), flags.get("replica"))
        gc.freeze()  # imported modules live as long as the process
        gc.enable()
        return run()
    except InvalidArgument as error:
        from turtlemq.cli.output import print_error  # not at the top: loads typer

        print_error(str(error))
        return 2


def _with_shards(
    config: Config, read: Callable[[], Config], settings: Mapping[str, Any], file: str | None, shard: int | None
) -> Callable[[], int]:
    """The supervisor of several shards, or the process of one."""
    if shard is None:
        from turtlemq.server.shards.supervisor import run_shards

        return partial(run_shards, config, lambda number: _command(settings, file, shard=number))
    from pathlib import Path

    from turtlemq.server.reload import Source
    from turtlemq.server.run import serve
    from turtlemq.server.shards.part import own_config

    source = Source(lambda: own_config(read(), shard), None if file is None else Path(file))
    return partial(serve, own_config(config, shard), source, None, shard)


def _command(settings: Mapping[str, Any], file: str | None, **more: int) -> list[str]:
    """The command line of a process: this program is found as the supervisor's own was, and gets the same flags."""
    flags = {**settings, "config": file, **more}
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items() if value is not None]
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return [sys.executable, *program, "serve", *(word for pair in given for word in pair)]


@contextmanager
def _no_certificates() -> Iterator[None]:
    """Let aiohttp be imported without the certificates of the system.

    Its client module makes a TLS context at import, which reads them all: 0.05 s of every start. That context trusts no
    certificate then: parts of the server that call others over https make contexts of their own.
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
