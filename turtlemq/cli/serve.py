"""`turtlemq serve`: run the server, configured by flags, environment and a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from turtlemq.cli.start import CONFIG, start

Data = Annotated[Path | None, typer.Option(help="The data folder. (default: data)")]
Host = Annotated[str | None, typer.Option(help="The address to listen on. (default: 127.0.0.1)")]
Port = Annotated[int | None, typer.Option(help="The port; 0 for any that is free. (default: 8878)", min=0, max=65535)]
GrpcPort = Annotated[int | None, typer.Option(help="The port for gRPC; 0: any that is free. (default: none)", min=0, max=65535)]
Shards = Annotated[int | None, typer.Option(help="Processes that share the topics. (default: 1)", min=1, max=64)]
File = Annotated[Path | None, typer.Option("--config", envvar=CONFIG, help="A TOML file with settings.")]
VirtualClock = Annotated[
    bool, typer.Option("--virtual-clock", help="For tests: time stands still until POST /v1/clock moves it, see docs/TESTING.md.")
]
Replica = Annotated[int | None, typer.Option(hidden=True, min=0, max=99)]  # the supervisor of a node gives it
Shard = Annotated[int | None, typer.Option(hidden=True, min=0, max=63)]  # the supervisor of several shards gives it


def flags_of(
    data: Path | None, host: str | None, port: int | None, grpc_port: int | None = None, **others: int | None
) -> dict[str, Any]:
    """The values of the flags by the names of their settings."""
    return {"data": None if data is None else str(data), "host": host, "port": port, "grpc_port": grpc_port, **others}


def serve(
    data: Data = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    shards: Shards = None,
    config: File = None,
    virtual_clock: VirtualClock = False,
    replica: Replica = None,
    shard: Shard = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C; then it drains, syncs and ends.

    Every setting can also be given as TURTLEMQ_NAME in the environment; 'turtlemq config' shows the values in force.
    """
    flags = flags_of(
        data, host, port, grpc_port, shards=shards, replica=replica, shard=shard, virtual_clock=virtual_clock or None
    )
    raise typer.Exit(start(flags, None if config is None else str(config)))
