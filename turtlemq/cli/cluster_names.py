"""The name server of a cluster, for verbs that work on its keys: `--config FILE`, or `--etcd URL` with `--name NAME`."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from turtlemq.cli.output import console, fail, printable
from turtlemq.cli.start import CONFIG

if TYPE_CHECKING:
    from turtlemq.replica.cluster_state import Audit, Keys
    from turtlemq.replica.etcd import Etcd
    from turtlemq.server.config import Config

T = TypeVar("T")

File = Annotated[
    Path | None,
    typer.Option("--config", envvar=CONFIG, help="The TOML file of a node: its table `cluster` names cluster and etcd."),
]
Endpoints = Annotated[
    list[str] | None, typer.Option("--etcd", metavar="URL", help="Instead of --config: an address of etcd; may be repeated.")
]
Name = Annotated[str, typer.Option("--name", help="Instead of --config: the name of the cluster.", show_default=False)]


class Names:
    """A cluster's name server, as the command line tells it. Ends the program if it does not."""

    def __init__(self, file: Path | None, endpoints: list[str] | None, name: str) -> None:
        from turtlemq.errors import InvalidArgument
        from turtlemq.replica.cluster_state import Keys
        from turtlemq.server.cluster_config import Cluster

        self.config: Config | None = None
        try:
            if endpoints or name:
                self.options = _given(Cluster(name=name, etcd=tuple(endpoints or ())))
            else:
                self.config = _load(file)
                self.options = self.config.cluster
            self.keys: Keys = Keys(self.options.name)
        except InvalidArgument as error:
            fail(str(error), 2)

    def run(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        """Do something with a connection to etcd. Ends the program if it fails."""
        from turtlemq.errors import TurtleError
        from turtlemq.server.cluster_part import connect

        async def connected() -> T:
            async with connect(self.options) as etcd:
                return await work(etcd)

        try:
            return asyncio.run(connected())
        except TurtleError as error:
            fail(str(error))


def _given(options: Any) -> Any:
    if not options.name or not options.etcd:
        fail("--etcd and --name go together; or give --config FILE", 2)
    for url in options.etcd:
        if not url.startswith(("http://", "https://")):
            fail(f"--etcd: {url!r} is no address; it looks like http://127.0.0.1:2379", 2)
    return options


def _load(file: Path | None) -> Config:
    from turtlemq.server.config import load

    config = load({}, os.environ, file)
    if not config.cluster.name:
        where = (
            f"{file} has no table [cluster] with a name" if file else "which cluster? Give --config FILE, or --etcd and --name"
        )
        fail(where, 2)
    if not config.cluster.etcd:
        fail(f"{file or 'the configuration'} has no cluster.etcd, the addresses of the name server", 2)
    return config


def signed(action: str, at_ms: int | None = None, **details: str) -> Audit:
    """A note about an intervention, with user, machine and time; `at_ms`: by default the present."""
    from turtlemq.replica.cluster_state import Audit

    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    at_ms = time.time_ns() // 1_000_000 if at_ms is None else at_ms
    return Audit(at_ms=at_ms, node=socket.gethostname(), user=user, action=action, details=details)


def time_of_note(names: Names) -> int:
    """The present, but behind the newest note: notes are listed by time, and the machine that wrote it may have another clock."""
    from turtlemq.logical_clock import LogicalClock, PeerAhead, number_at, time_of

    found = names.run(lambda server: server.get(names.keys.audits, prefix=True)).keys
    noted = [one.key.removeprefix(names.keys.audits).partition("-")[0] for one in found]
    newest_ms = max(map(int, filter(str.isdecimal, noted)), default=-1)
    now_ms = time.time_ns() // 1_000_000
    try:
        return time_of(LogicalClock().merge(number_at(newest_ms + 1) - 1, now_ms))
    except PeerAhead as error:
        text = f"the newest note about an intervention was not written by the clock of this machine: {error}"
        console(stderr=True).print(printable(text), style="yellow")
        return now_ms
