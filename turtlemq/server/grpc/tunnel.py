"""Connections to a node of a cluster that does not lead: their bytes go to the leader and back, and are not read here.

A node decides once for each connection, when its first bytes come: it serves the connection if it leads, and else passes it on to
the leader, for which it waits up to WAIT_S. Without a leader it serves the connection all the same: calls are refused as
UNAVAILABLE, and the client is told to connect anew. A connection is passed on once: its first bytes are a mark then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from turtlemq.errors import describe
from turtlemq.server import logs
from turtlemq.server.forward import leads
from turtlemq.server.service import Service

MARK = b"TURTLEMQ-FORWARDED\r\n"
FIRST_S = 10.0  # for the first bytes of a connection
WAIT_S = 5.0  # for a leader
LOOK_S = 0.05  # between two looks for it
CONNECT_S = 2.0
GRACE_S = 2.0  # for the last words of a leader that was replaced
Serve = Callable[[Callable[[], None]], asyncio.Protocol]


def leader_address(service: Service) -> str:
    """Where the leader listens for gRPC, as host:port; empty if there is none, if it does not say, or if it is this node."""
    cluster = service.cluster
    place = None if cluster is None else cluster.topology().leader(cluster.shard)
    if cluster is None or place is None or place.node is None or place.node == cluster.options.node:
        return ""
    node = cluster.topology().nodes.get(place.node)
    return "" if node is None else node.grpc


class Tunnels:
    """All connections of a node that wait for a decision, or are passed on."""

    def __init__(self, service: Service, serve: Serve, allows: Callable[[str], bool], cafile: str) -> None:
        self.service, self.serve, self.allows = service, serve, allows
        self.passed_on = 0  # open connections that the leader serves
        self._cafile = cafile
        self._open: set[asyncio.Transport] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, lost: Callable[[], None]) -> asyncio.Protocol:
        """The protocol of a connection that was accepted."""
        return _Entrance(self, lost)

    def begin(self, entrance: _Entrance) -> None:
        task = asyncio.create_task(self._decide(entrance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(entrance.transport)

    async def _decide(self, entrance: _Entrance) -> None:
        loop, service = asyncio.get_running_loop(), self.service
        end, is_marked, told = loop.time() + WAIT_S, entrance.first.startswith(MARK), ""
        if is_marked:
            del entrance.first[: len(MARK)]
        while not entrance.is_lost and not leads(service) and loop.time() < end:
            address = "" if is_marked else leader_address(service)
            if address:
                try:
                    await self._pass_on(entrance, address)
                    return
                except (OSError, TimeoutError) as error:
                    told = f"{address}: {describe(error) or 'no connection in time'}"
            await asyncio.sleep(LOOK_S)
        self._open.discard(entrance.transport)
        if told and not leads(service):
            logs.warning("grpc_leader_unreachable", why=told)
        entrance.serve()

    async def _pass_on(self, entrance: _Entrance, address: str) -> None:
        loop, (host, _, port) = asyncio.get_running_loop(), address.rpartition(":")
        far = _End()
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: far, host.strip("[]"), int(port), ssl=self._tls())
        near = entrance.transport
        if entrance.is_lost:
            far.transport.close()
            return
        far.to, back = near, _End(near, far.transport, entrance.lost)
        far.transport.write(MARK + entrance.first)
        near.set_protocol(back)
        near.resume_reading()
        self.passed_on += 1
        try:
            await self._until_closed(address, back, far)
        finally:
            self.passed_on -= 1
            self._open.discard(near)
            near.close()
            far.transport.close()

    async def _until_closed(self, address: str, near: _End, far: _End) -> None:
        """Return when one of the ends has closed, or another node has become the leader."""
        closed = [near.closed, far.closed]
        while leader_address(self.service) in ("", address) and not leads(self.service):
            done, _ = await asyncio.wait(closed, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
        await asyncio.wait(closed, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)

    def _tls(self) -> ssl.SSLContext | None:
        cluster = self.service.cluster
        place = None if cluster is None else cluster.topology().leader(cluster.shard)
        if place is None or place.url is None or not place.url.startswith("https:"):
            return None
        tls = ssl.create_default_context(cafile=self._cafile or None)
        tls.set_alpn_protocols(["h2"])
        return tls

    def close(self) -> None:
        """End all of them."""
        for transport in list(self._open):
            transport.close()
        for task in self._tasks:
            task.cancel()


class _Entrance(asyncio.Protocol):
    """A connection until it is decided which node serves it."""

    def __init__(self, tunnels: Tunnels, lost: Callable[[], None]) -> None:
        self.first, self.lost, self.is_lost = bytearray(), lost, False
        self._tunnels, self._has_begun = tunnels, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self.transport.close)
        if not self._tunnels.allows((transport.get_extra_info("peername") or ("",))[0]):
            self.serve()  # which refuses

    def data_received(self, data: bytes) -> None:
        self.first += data
        if self._has_begun or (MARK.startswith(self.first) and len(self.first) < len(MARK)):
            return
        self._has_begun = True
        self._timer.cancel()
        self.transport.pause_reading()
        self._tunnels.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.is_lost = True
        self.lost()

    def serve(self) -> None:
        """Serve the connection here."""
        self._timer.cancel()
        if self.is_lost:
            return
        connection = self._tunnels.serve(self.lost)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        if self._has_begun:
            self.transport.resume_reading()
            connection.data_received(bytes(self.first))


class _End(asyncio.Protocol):
    """One end of a connection that is passed on. `to`: the other end."""

    def __init__(
        self, transport: asyncio.Transport | None = None, to: asyncio.Transport | None = None, lost: Callable[[], object] = int
    ) -> None:
        self.to, self.closed = to, asyncio.get_running_loop().create_future()
        self._lost = lost
        if transport is not None:
            self.transport = transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.to is not None and not self.to.is_closing():
            self.to.write(data)

    def pause_writing(self) -> None:
        if self.to is not None:
            self.to.pause_reading()

    def resume_writing(self) -> None:
        if self.to is not None and not self.to.is_closing():
            self.to.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._lost()
