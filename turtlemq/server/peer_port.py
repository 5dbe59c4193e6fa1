"""The port on which standbys reach a shard's leader: a replica process binds it before it keeps a copy, and holds it to its end.

A leader without its port would serve clients and no standby, and a member in sync that cannot have its port could not take over.
So a process that cannot bind it is no member: it says so, and tries again. A connection that comes while this process does not
lead is closed at once.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import cast

from turtlemq.server import logs

PAUSE_S = 0.1, 5.0  # before the port is tried again: at first, and at most


class PeerPort:
    """The port of one process. `accepts`: makes the protocol of a connection; a leader sets it. `why`: the reason why the port is
    not bound, as long as that is so."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.host, self.port, self.why = host, port, ""
        self.accepts: Callable[[], asyncio.Protocol] = _Refusal
        self._tls = tls
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Host and port, as the configuration has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def open(self, told: Callable[[str], None] = lambda _: None) -> None:
        """Bind the port, however often it takes. `told`: called with the reason, when that is a new one."""
        pause_s = PAUSE_S[0]
        while (why := await self._bind()) is not None:
            if why != self.why:
                self.why = why
                logs.error("peer_port_unusable", error=why)
                told(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])
        if self.why:
            self.why = ""
            logs.info("peer_port_open", address=self.address)

    async def _bind(self) -> str | None:
        """Bind the port. Returns why that is not possible."""
        try:
            server = await asyncio.get_running_loop().create_server(self._accept, self.host, self.port, ssl=self._tls)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
            return (
                f"standbys cannot be served on {self.address}: {reason}. This node keeps no copy and does not "
                f"lead until it can. End the program that uses port {self.port}, or correct cluster.peer and restart the node."
            )
        self._server, self.port = server, int(server.sockets[0].getsockname()[1])
        return None

    def _accept(self) -> asyncio.Protocol:
        return self.accepts()

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()


class _Refusal(asyncio.Protocol):
    """A connection to a process that does not lead."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).close()
