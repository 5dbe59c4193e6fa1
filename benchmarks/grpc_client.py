"""A gRPC client on h2 that costs little, and one with grpcio, for the benchmarks of streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived

from turtlemq.server.grpc.framing import MessageReader, frame
from turtlemq.server.grpc.messages import message

PATH = "/delay.DelayScheduler/Connect"
ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")
HEAD = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "x"), ("te", "trailers")]
FRAME_BYTES, WINDOW = 16_384, 8 << 20


class Streams(asyncio.Protocol):
    """One connection with streams of the scheduler. `received`: gets the number of a stream and its messages."""

    def __init__(self, received: Callable[[int, list[bytes]], object]) -> None:
        self._received = received
        self._h2 = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))
        self._readers: dict[int, MessageReader] = {}
        self._unsent: dict[int, memoryview] = {}
        self.came_ms = 0.0  # when the last bytes came, in epoch milliseconds

    @classmethod
    async def open(cls, port: int, received: Callable[[int, list[bytes]], object]) -> Streams:
        _, made = await asyncio.get_running_loop().create_connection(lambda: cls(received), "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: Any = transport
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self._flush()

    def begin(self, *first: dict[str, Any]) -> int:
        """Begin a stream with its first messages. Returns its number."""
        stream = self._h2.get_next_available_stream_id()
        self._readers[stream] = MessageReader()
        self._h2.send_headers(stream, [*HEAD, ("content-type", "application/grpc")])
        self.send(stream, frame([ClientMessage(**one).SerializeToString() for one in first]))
        return stream

    def send(self, stream: int, data: bytes) -> None:
        """Send messages with their prefixes, as the server's windows allow."""
        self._unsent[stream] = memoryview(bytes(self._unsent.get(stream, b"")) + data)
        self._flush()

    def _flush(self) -> None:
        for stream, data in list(self._unsent.items()):
            while data and (room := min(FRAME_BYTES, self._h2.local_flow_control_window(stream))) > 0:
                self._h2.send_data(stream, data[:room].tobytes())
                data = data[room:]
            self._unsent[stream] = data
        self._transport.write(self._h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        self.came_ms = time.time_ns() / 1e6
        for event in self._h2.receive_data(data):
            if isinstance(event, DataReceived) and event.stream_id is not None:
                self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                if messages := self._readers[event.stream_id].feed(event.data or b""):
                    self._received(event.stream_id, messages)
        self._flush()

    def close(self) -> None:
        """Cut the connection."""
        self._transport.abort()


def schedule(count: int, body: bytes, topic: str) -> list[bytes]:
    """Messages that are due in an hour, encoded."""
    due = time.time_ns() // 1_000_000 + 3_600_000
    fields = {"fire_at_epoch_ms": due, "payload": body, "route_key": topic}
    one: bytes = ClientMessage(schedule=fields).SerializeToString()
    return [one] * count


def with_grpcio(port: int, sent: list[bytes]) -> float:
    """Schedule messages over one stream with grpcio. Returns the seconds until all are acknowledged."""
    import grpc

    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    for one in sent:
        outgoing.put(one)

    def messages() -> Iterator[bytes]:
        while (one := outgoing.get()) is not None:
            yield one

    begin = time.perf_counter()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answers = channel.stream_stream(PATH)(messages(), wait_for_ready=True)
        for _ in range(len(sent)):
            next(answers)
        taken = time.perf_counter() - begin
        outgoing.put(None)
        answers.cancel()
    return taken
