"""A gRPC client that may misbehave, on h2 and asyncio, and a gRPC site with a service and an engine in this process."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

from tests.harness.server_process import PATIENCE_S
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.server.audit import AuditLog
from turtlemq.server.auth import Auth
from turtlemq.server.clock import now_ms
from turtlemq.server.config import Config
from turtlemq.server.grpc.framing import MessageReader, frame
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.site import GrpcSite
from turtlemq.server.operations import ACCESS
from turtlemq.server.service import Service
from turtlemq.storage.door import Door

CONNECT = "/delay.DelayScheduler/Connect"
ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")


async def soon(check: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - the check is arbitrary
            await asyncio.sleep(0.005)


class Peer(asyncio.Protocol):
    """One connection. `reads`: whether it gives the server room to send more."""

    def __init__(self, reads: bool = True) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.reads, self.messages, self.trailers = reads, defaultdict[int, list[bytes]](list), dict[int, dict[str, str]]()
        self.resets: dict[int, int] = {}
        self.went_away: int | None = None
        self.is_lost = False
        self._readers = defaultdict[int, MessageReader](MessageReader)
        self._unsent: deque[tuple[int, memoryview, bool]] = deque()

    @classmethod
    async def connect(cls, port: int, reads: bool = True) -> Peer:
        """Connect to a server on this machine."""
        _, peer = await asyncio.get_running_loop().create_connection(lambda: cls(reads), "127.0.0.1", port)
        return peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case DataReceived(stream_id=stream, data=received, flow_controlled_length=size):
                    self.messages[stream] += self._readers[stream].feed(received or b"")
                    if self.reads and size:
                        self.h2.acknowledge_received_data(size, stream)
                case ResponseReceived(stream_id=stream, headers=headers) | TrailersReceived(stream_id=stream, headers=headers):
                    self.trailers.setdefault(stream, {}).update({str(name): str(value) for name, value in headers or []})
                case StreamReset(stream_id=stream, error_code=code):
                    self.resets[stream] = int(code or 0)
                case ConnectionTerminated(error_code=code):
                    self.went_away = int(code or 0)
                    self.h2.state_machine.state = ConnectionState.CLIENT_OPEN  # calls go on, which h2 does not know
                case StreamEnded():
                    pass
        self.flush()

    @property
    def unsent(self) -> int:
        """Bytes of calls for which the server gives no room."""
        return sum(len(data) for _, data, _ in self._unsent)

    def flush(self) -> None:
        """Write everything that h2 has to send, and bytes of calls as far as the server gives room for them."""
        while self._unsent:
            stream, data, end = self._unsent[0]
            room = min(16_384, self.h2.local_flow_control_window(stream))
            if data and room <= 0:
                break
            self.h2.send_data(stream, data[:room], end_stream=end and len(data) <= room)
            if len(data) <= room:
                self._unsent.popleft()
            else:
                self._unsent[0] = stream, data[room:], end
        self.transport.write(self.h2.data_to_send())

    # Calls

    def begin(self, path: str = CONNECT, **metadata: str) -> int:
        """Begin a call. Returns its stream."""
        stream = self.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers")]
        named = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        self.h2.send_headers(stream, [*head, ("content-type", "application/grpc"), *named])
        self.flush()
        return stream

    def send_raw(self, stream: int, data: bytes, end: bool = False) -> None:
        """Send bytes of a call, in frames, as soon as there is room for them."""
        self._unsent.append((stream, memoryview(data), end))
        self.flush()

    def send(self, stream: int, *sent: dict[str, Any]) -> None:
        """Send messages of the scheduler's stream."""
        self.send_raw(stream, frame([ClientMessage(**one).SerializeToString() for one in sent]))

    def half_close(self, stream: int) -> None:
        """Send no more on a stream."""
        self.h2.end_stream(stream)
        self.flush()

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        self.h2.reset_stream(stream, ErrorCodes.CANCEL)
        self.flush()

    def received(self, stream: int, kind: str) -> list[Any]:
        """The messages of one kind that came on a scheduler's stream."""
        told = [ServerMessage.FromString(data) for data in self.messages[stream]]
        return [getattr(one, kind) for one in told if one.WhichOneof("message") == kind]

    async def until(self, stream: int, kind: str, count: int = 1) -> list[Any]:
        """Wait for so many messages of one kind."""
        await soon(lambda: len(self.received(stream, kind)) >= count)
        return self.received(stream, kind)

    async def status(self, stream: int) -> int:
        """Wait for the end of a call. Returns its status."""
        await soon(lambda: "grpc-status" in self.trailers.get(stream, {}))
        return int(self.trailers[stream]["grpc-status"])

    async def unary(self, path: str, request: Any, answer: Any, **metadata: str) -> Any:
        """One call with one answer. Returns the answer, or the trailers of a call that was refused."""
        stream = self.begin(path, **metadata)
        self.send_raw(stream, frame([request.SerializeToString()]), end=True)
        if await self.status(stream):
            return self.trailers[stream]
        return answer.FromString(self.messages[stream][0])


class Site:
    """A gRPC site in this process, and its connections."""

    def __init__(self, folder: Path, door: Door | None, settings: dict[str, Any], in_cluster: bool = False) -> None:
        self.config = Config(grpc_port=0, grpc_past_grace_ms=settings.pop("grpc_past_grace_ms", -1), **settings)
        self.service = Service()
        self.engine = Engine.open(folder, door=door, settings=self.config.topic_defaults())
        self.service.start(self.engine)
        auth = Auth(self.config.allowed_hosts, self.config.tokens, ACCESS)
        self.audit = AuditLog(folder)
        self.grpc = GrpcSite(self.service, self.config, auth, self.audit, 1_000, in_cluster)
        self.port = 0
        self._peers: list[Peer] = []

    async def peer(self, reads: bool = True) -> Peer:
        """A new connection."""
        self._peers.append(peer := await Peer.connect(self.port, reads))
        return peer

    async def stream(self, *sent: dict[str, Any], **metadata: str) -> tuple[Peer, int]:
        """A new connection with one stream of the scheduler."""
        peer = await self.peer()
        stream = peer.begin(**metadata)
        if sent:
            peer.send(stream, *sent)
        return peer, stream

    def put(self, ids: Sequence[str], topic: str = "t", due_ms: int | None = None, body: bytes = b"x") -> None:
        """Store messages that are due, unless told otherwise."""
        now = now_ms()
        self.engine.submit(topic, [Message(body, due_ms=due_ms or now, id=id_) for id_ in ids], now)
        self.service.answer_polls_soon()

    def state(self, id_: str, topic: str = "t") -> str:
        """The state of a message."""
        found = self.engine.message(topic, id_)
        return "unknown" if found is None else str(found.state)

    def close(self) -> None:
        """End all connections of clients."""
        for peer in self._peers:
            peer.transport.abort()


@asynccontextmanager
async def site(folder: Path, door: Door | None = None, in_cluster: bool = False, **settings: Any) -> AsyncIterator[Site]:
    """A gRPC site for a while. `in_cluster`: as that of a node which does not lead."""
    made = Site(folder / "data", door, settings, in_cluster)
    made.port = (await made.grpc.start(None))[1]
    try:
        yield made
    finally:
        made.close()
        await made.grpc.stop()
        made.service.drain()
        made.service.close()
        made.engine.close()
        made.audit.close()


def run_site(folder: Path, story: Callable[[Site], Awaitable[None]], door: Door | None = None, **settings: Any) -> None:
    """Run a story against a gRPC site."""

    async def whole() -> None:
        async with asyncio.timeout(120), site(folder, door, **settings) as made:
            await story(made)

    asyncio.run(whole())
