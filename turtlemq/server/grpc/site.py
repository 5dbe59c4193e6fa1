"""The gRPC site of a server: its listening sockets, the table of methods, and the middleware around every call.

Started by `run` where `grpc_port` is set. A server that stops, or a leader that hands over, tells its streams to drain, gives
them time for acks, gives back their deliveries and ends them as UNAVAILABLE. A node that does not lead passes connections on.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

from turtlemq.errors import TurtleError, Unavailable
from turtlemq.server import logs, output_commit
from turtlemq.server.accept import LISTENING_GRPC, REFUSE_S, Listener, Policy, bind, inherited
from turtlemq.server.audit import AuditLog
from turtlemq.server.auth import Auth
from turtlemq.server.config import Config
from turtlemq.server.descriptors import Shares
from turtlemq.server.errors import HostNotAllowed, NoLeader
from turtlemq.server.grpc import admin, queue, scheduler, standard
from turtlemq.server.grpc.connection import Call, CallEnded, GrpcConnection
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.deliveries import Pools, stopping
from turtlemq.server.grpc.statuses import Unimplemented
from turtlemq.server.grpc.tunnel import Tunnels, leader_address
from turtlemq.server.listen import BACKLOG, HANDSHAKE_S
from turtlemq.server.service import Service

DRAIN_S, HANDOVER_S = 1.5, 0.3  # time for acks, once the server stops, and before a leader hands over
PROTOCOLS = ["h2"]  # of TLS
Handler = Callable[[Call], Awaitable[None]]


class GrpcSite:
    """Listens for gRPC clients and serves their calls."""

    def __init__(
        self, service: Service, config: Config, auth: Auth, audit: AuditLog, connections: int, in_cluster: bool = False
    ) -> None:
        self._service, self._config, self._auth = service, config, auth
        self._context = Context(service, config, auth, audit, in_cluster=in_cluster)
        self._tunnels = Tunnels(service, self._serve, auth.allows, config.cluster.tls_ca) if in_cluster else None
        self._is_draining = False
        self._pools = Pools(self._context)
        self._handlers, self._open = _methods(self._context, self._pools)
        self._connections: set[GrpcConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[Call] = set()  # under way, without health and reflection
        self._most = connections
        self._listener: Listener | None = None
        service.streams = self._connections.__len__
        service.meter.grpc = self._context.figures
        self._context.figures.gauges = self._pools.gauges
        if self._tunnels is not None:
            self._context.figures.passed_on = lambda tunnels=self._tunnels: tunnels.passed_on
            service.on_drain.append(self._cut)

    async def start(self, tls: ssl.SSLContext | None) -> tuple[str, int]:
        """Listen. Returns address and port. Raises `OSError`."""
        if tls is not None:
            tls.set_alpn_protocols(PROTOCOLS)
        host = self._config.grpc_host or self._config.host
        sockets = inherited(os.environ.get(LISTENING_GRPC, "")) or await bind(host, self._config.grpc_port, BACKLOG)
        serve = self._serve if self._tunnels is None else self._tunnels.enter
        policy = Policy(serve=serve, refuse=_Refused, tls=tls, handshake_s=HANDSHAKE_S, refuse_s=REFUSE_S)
        self._listener = Listener(sockets, policy, Shares(self._most, 1, 0), self._context.figures.sockets)
        address = sockets[0].getsockname()
        return address[0], address[1]

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Use another certificate for connections to come."""
        if tls is not None:
            tls.set_alpn_protocols(PROTOCOLS)
        if self._listener is not None:
            self._listener.use_tls(tls)

    def _serve(self, lost: Callable[[], None]) -> GrpcConnection:
        def ended(connection: GrpcConnection) -> None:
            self._connections.discard(connection)
            lost()

        connection = GrpcConnection(self._service, self._auth.allows, self._begin, ended, self._config.grpc_beat_s)
        self._connections.add(connection)
        return connection

    def _begin(self, call: Call) -> None:
        task = asyncio.create_task(self._answer(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call) -> None:
        """Serve one call, and end it with its status."""
        begun, meter, error = perf_counter(), self._service.meter, None
        service_name = call.path.strip("/").partition("/")[0] if call.path in self._handlers else "other"
        self._context.figures.streams[service_name] += 1
        try:
            handler = self._handler_of(call)
            if call.path not in self._open:
                self._calls.add(call)
            await handler(call)
        except CallEnded:
            pass
        except TurtleError as refused:
            error = await self._confirmed(refused)
        except OSError as failed:
            error = Unavailable(f"the disk has failed: {failed.strerror or failed}. The log says more.")
            logs.error("grpc_call_failed", path=call.path, request_id=call.request_id, error=failed)
        except Exception as failed:  # noqa: BLE001 - it is logged and answered
            error = TurtleError(f"{TurtleError.__doc__} ({type(failed).__name__})")
            logs.error("grpc_call_failed", failed, path=call.path, request_id=call.request_id)
        finally:
            self._calls.discard(call)
            self._context.figures.streams[service_name] -= 1
        call.finish(error)
        if error is not None:
            meter.rejected[error.code] += 1
        route = call.path if call.path in self._handlers else "other"
        if call.is_unary:
            meter.answered("gRPC", route, 200 if error is None else error.status, perf_counter() - begun)

    async def _confirmed(self, refused: TurtleError) -> TurtleError:
        """A refusal, once the copies have all changes that it may tell of."""
        if output_commit.tells(refused.status):
            try:
                await self._context.confirmed()
            except TurtleError as error:
                return error
        return refused

    def _handler_of(self, call: Call) -> Handler:
        """The handler of a call that is allowed. Health and reflection need no token."""
        handler = self._handlers.get(call.path)
        if not self._auth.allows(call.peer) and not call.path.startswith("/grpc.health."):
            raise HostNotAllowed(f"clients of {call.peer or 'no address'} are not served here; allowed_hosts says which are")
        if call.path not in self._open:
            call.token = self._auth.token_of(call.metadata.get("authorization"))
        if self._context.has_other_leader and call.path not in self._open:
            call.leave_connection()
            raise self._not_leading()
        if self._is_draining:
            raise stopping()
        if handler is None:
            raise Unimplemented(f"there is no method {call.path!r:.200} here; reflection lists those that there are")
        return handler

    def _not_leading(self) -> NoLeader:
        """Why this node serves no calls. The next connection is passed on to the leader."""
        if leader := leader_address(self._service):
            return NoLeader(f"this node does not lead; {leader} does. Connect again, here or there", leader=leader)
        return NoLeader("the cluster has no leader now, or it serves no gRPC. Try again in a moment")

    def _cut(self) -> None:
        """Another node leads, or will: its clients may not hear of anything more that this one has."""
        for call in self._calls:
            call.fail(self._not_leading())

    async def stop(self) -> None:
        """Accept no more, drain the streams, and close all connections."""
        if self._listener is not None:
            self._listener.close()
        if self._tunnels is not None:
            self._tunnels.close()
        await self.drain(DRAIN_S)
        for connection in list(self._connections):
            connection.close()

    async def drain(self, seconds: float = HANDOVER_S) -> None:
        """Begin no more calls, give the streams time for acks, end them, and give back their deliveries."""
        self._is_draining = True
        for connection in self._connections:
            connection.go_away()
        for stream in self._pools.streams:
            stream.drain(round(1000 * seconds))
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(stream.unacked for stream in self._pools.streams) and loop.time() < end:  # noqa: ASYNC110 - once in the life of a process
            await asyncio.sleep(0.01)
        for call in self._calls:
            call.fail(stopping())
        while self._calls and loop.time() < end + seconds:  # noqa: ASYNC110 - as before
            await asyncio.sleep(0.002)


class _Refused(asyncio.Protocol):
    """A connection beyond the limit: it is closed at once, and a gRPC client tries again later."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


def _methods(context: Context, pools: Pools) -> tuple[dict[str, Handler], frozenset[str]]:
    """All methods by path, and those that need no token."""
    connect = partial(scheduler.connect, context, pools)
    methods: dict[str, Handler] = {
        "/delay.DelayScheduler/Connect": connect,
        "/delay.DelayScheduler/ConnectStream": connect,
    }
    standard_methods = standard.methods(context)
    return methods | admin.methods(context) | queue.methods(context, pools) | standard_methods, frozenset(standard_methods)
