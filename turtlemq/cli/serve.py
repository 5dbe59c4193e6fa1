"""`turtlemq serve`: the server, with its configuration from flags, environment and file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from turtlemq.cli.call import fail


def serve(
    data: Annotated[Path | None, typer.Option(help="The data folder. [default: data]")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="The port; 0 for any that is free. [default: 8878]", min=0, max=65535)] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C; then it drains, syncs and ends.

    Every setting can also be given as TURTLEMQ_NAME in the environment.
    """
    from turtlemq.errors import InvalidArgument
    from turtlemq.server.config import load
    from turtlemq.server.run import serve as run

    flags = {"data": None if data is None else str(data), "host": host, "port": port}
    try:
        told = load(flags, os.environ, config)
    except InvalidArgument as error:
        fail(str(error), 2)
    raise typer.Exit(run(told))
