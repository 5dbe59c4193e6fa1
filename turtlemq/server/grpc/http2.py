"""The HTTP/2 side of a gRPC connection, without sockets or clocks: bytes in, events and bytes out; time is an argument.

h2 keeps the rules of the protocol. This module adds gRPC's messages, a queue of unsent bytes for each stream, and limits against
abuse: a connection that breaks one gets a GOAWAY frame and is `closed`. h2 refuses to send anything once it has seen a GOAWAY, so
a received one counts as a client that leaves, and the server's own is written as a raw frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from turtlemq.server.grpc.framing import BadMessage, MessageReader

STREAM_WINDOW, CONNECTION_WINDOW = 1 << 20, 4 << 20  # bytes that a client may send before a handler has taken them
STREAMS_MAX = 100
HEADERS_BYTES_MAX = 16 << 10
RESETS_MAX, RESETS_S = 100, 10.0  # of streams, by the client
PINGS_MAX, PINGS_S = 10, 1.0  # between which nothing was sent: libraries measure a connection with pings while data flows
CONTROL_MAX, CONTROL_S = 100, 1.0  # settings, priorities and empty frames
FRAME_BYTES = 16 << 10  # of a DATA frame
HEAD_BYTES = 9  # of any frame
GRPC = "application/grpc"


@dataclass(frozen=True, slots=True)
class Began:
    """A call began. Header names are in lower case; of several values of a name the last counts."""

    stream: int
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class Received:
    """Messages of a call. The client may send `size` more bytes once `Http2Server.taken` was called with it."""

    stream: int
    messages: list[bytes]
    size: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A client sends no more on a stream (`half_close`), has reset it (`reset`), or has sent no gRPC (`error`)."""

    stream: int
    why: str
    error: BadMessage | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """The client has announced that it leaves the connection."""


Happened = Began | Received | Ended | Left


@dataclass(slots=True)
class _Stream:
    reader: MessageReader
    chunks: deque[memoryview] = field(default_factory=deque)  # unsent
    has_headers: bool = False
    trailers: list[tuple[str, str]] | None = None  # sent behind the last chunk
    is_half_closed: bool = False  # the client sends no more


class _Limit:
    """More than `most` events within some seconds are too many."""

    def __init__(self, most: int, seconds: float) -> None:
        self._seconds, self._times = seconds, deque[float](maxlen=most)

    def is_broken(self, now: float) -> bool:
        """Count an event. Returns whether it is one too many."""
        times = self._times
        broken = len(times) == times.maxlen and now - times[0] < self._seconds
        times.append(now)
        return broken

    def clear(self) -> None:
        self._times.clear()


class Http2Server:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8", validate_outbound_headers=False))
        self._h2.decoder.max_header_list_size = HEADERS_BYTES_MAX
        self._h2.initiate_connection()
        # After `initiate_connection`: an earlier change of the window is not sent.
        self._h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
                SettingCodes.MAX_HEADER_LIST_SIZE: HEADERS_BYTES_MAX,
            }
        )
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        self._streams: dict[int, _Stream] = {}
        self._waiting: deque[int] = deque()  # streams with unsent bytes or trailers
        self._raw = b""  # a GOAWAY frame
        self._last_stream = 0
        self._resets, self._pings = _Limit(RESETS_MAX, RESETS_S), _Limit(PINGS_MAX, PINGS_S)
        self._control = _Limit(CONTROL_MAX, CONTROL_S)
        self._read: dict[int, Received] = {}  # messages of the present read, by stream
        self.progress: dict[int, int] = {}  # bytes of messages handed out by `output`, by stream; a caller clears it
        self.closed = ""  # why the connection must end once the output was sent; "": it goes on

    # Input

    def receive(self, data: bytes, now: float) -> list[Happened]:
        """The events of these bytes. Afterwards `output` may have something, and the connection may be `closed`."""
        if self.closed:
            return []
        try:
            events = self._h2.receive_data(data)
        except (H2Error, UnicodeDecodeError, ValueError) as error:
            self.closed = f"protocol error: {error}"
            return []
        out: list[Happened] = []
        self._read.clear()
        for event in events:
            if not self._take(event, now, out):
                break
        self._refuse_large_frame()
        return out

    def _refuse_large_frame(self) -> None:
        """End the connection if more than a frame waits: h2 checks the length of a frame when it has all of it, up to 16 MiB."""
        waiting = len(self._h2.incoming_buffer._data)
        if not self.closed and waiting > self._h2.max_inbound_frame_size + HEAD_BYTES:
            self._refuse("a frame is too large", ErrorCodes.FRAME_SIZE_ERROR)

    def _take(self, event: Event, now: float, out: list[Happened]) -> bool:
        """Handle one event of h2. Returns whether the connection goes on."""
        match event:
            case DataReceived():
                self._data(event, now, out)
            case RequestReceived():
                self._begin(event, out)
            case StreamEnded() if event.stream_id in self._streams:
                stream = self._streams[event.stream_id]
                stream.is_half_closed = True
                cut = BadMessage("the last message is cut off") if stream.reader.held else None
                out.append(Ended(event.stream_id, "error" if cut else "half_close", cut))
            case StreamReset():
                if event.remote_reset and self._resets.is_broken(now):
                    self._refuse("too many streams were reset")
                if self._forget(event.stream_id):
                    out.append(Ended(event.stream_id, "reset"))
            case PingReceived():
                if self._pings.is_broken(now):
                    self._refuse("too many pings")
            case ConnectionTerminated():
                out.append(Left())
                self.closed = "the client leaves"
            case RemoteSettingsChanged() | PriorityUpdated():
                if self._control.is_broken(now):
                    self._refuse("too many control frames")
            case WindowUpdated():
                pass  # `output` looks at all windows
        return not self.closed

    def _begin(self, event: RequestReceived, out: list[Happened]) -> None:
        headers = {str(name): str(value) for name, value in event.headers}
        self._last_stream = stream = event.stream_id
        self._streams[stream] = _Stream(MessageReader(headers.get("grpc-encoding") == "gzip"))
        if headers.get(":method") == "POST" and headers.get("content-type", "").startswith(GRPC):
            out.append(Began(stream, headers.get(":path", ""), headers))
        else:
            self._h2.send_headers(stream, [(":status", "415")], end_stream=True)
            self._forget(stream)

    def _data(self, event: DataReceived, now: float, out: list[Happened]) -> None:
        stream, size = self._streams.get(event.stream_id), event.flow_controlled_length or 0
        if not event.data and event.stream_ended is None and self._control.is_broken(now):
            self._refuse("too many empty frames")
        if stream is None:
            self.taken(event.stream_id, size)
            return
        try:
            messages = stream.reader.feed(event.data or b"")
        except BadMessage as error:
            self.taken(event.stream_id, size)
            out.append(Ended(event.stream_id, "error", error))
            return
        if messages and (before := self._read.get(event.stream_id)) is not None:
            before.messages += messages
            before.size += size
        elif messages:
            self._read[event.stream_id] = received = Received(event.stream_id, messages, size)
            out.append(received)
        else:  # part of a message: without more room, one that is larger than the window would never be complete
            self.taken(event.stream_id, size)

    def taken(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes: a handler has taken as many."""
        if size and not self.closed:
            try:
                self._h2.acknowledge_received_data(size, stream)
            except H2Error:
                pass  # the stream is gone

    def held(self, stream: int) -> int:
        """Bytes of a message of this stream that is not complete."""
        return self._streams[stream].reader.held if stream in self._streams else 0

    # Output

    def send(self, stream: int, data: bytes) -> None:
        """Queue bytes of messages on a stream. Does nothing if the stream is gone."""
        if (out := self._streams.get(stream)) is not None and data:
            out.chunks.append(memoryview(data))
            self._waiting.append(stream)

    def finish(self, stream: int, trailers: list[tuple[str, str]]) -> None:
        """End a stream with its trailers, behind all queued bytes."""
        if (out := self._streams.get(stream)) is not None:
            out.trailers = trailers
            self._waiting.append(stream)

    def reset(self, stream: int, code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """End a stream at once; its unsent bytes are dropped."""
        if self._forget(stream) and not self.closed:
            try:
                self._h2.reset_stream(stream, code)
            except H2Error:
                pass

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        if not self.closed:
            self._h2.ping(b"turtlemq")

    def go_away(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Announce that the server leaves the connection; calls under way go on. As a raw frame: h2 would refuse to send more."""
        frame = GoAwayFrame(0, last_stream_id=self._last_stream, error_code=int(code))
        self._raw += frame.serialize()

    def output(self, most: int) -> bytes:
        """Bytes for the socket: all control frames, and of messages up to about `most` bytes, the streams in turn."""
        sent = 0
        while self._waiting and sent < most and not self.closed:
            stream = self._waiting.popleft()
            if (out := self._streams.get(stream)) is None:
                continue
            try:
                count = self._write(stream, out)
            except H2Error:
                self._forget(stream)
                continue
            sent += count
            if count and (out.chunks or out.trailers is not None) and stream in self._streams:
                self._waiting.append(stream)
        if sent:
            self._pings.clear()
        raw, self._raw = self._raw, b""
        return self._h2.data_to_send() + raw

    def resume(self) -> None:
        """Look at the windows of all streams again: the client may have opened some."""
        self._waiting.extend(stream for stream, out in self._streams.items() if out.chunks or out.trailers is not None)

    def _write(self, stream: int, out: _Stream) -> int:
        """Give the next frame of a stream to h2. Returns its bytes; 0: its window is closed, or it has ended."""
        if not out.has_headers:
            out.has_headers = True
            head = [(":status", "200"), ("content-type", GRPC)]
            if out.trailers is not None and not out.chunks:
                self._h2.send_headers(stream, head + out.trailers, end_stream=True)
                self._end(stream, out)
                return 0
            self._h2.send_headers(stream, [*head, ("grpc-accept-encoding", "identity,gzip")])
        room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size, FRAME_BYTES)
        data = _cut(out.chunks, room)
        if data:
            self._h2.send_data(stream, data)
            self.progress[stream] = self.progress.get(stream, 0) + len(data)
        if not out.chunks and out.trailers is not None:
            self._h2.send_headers(stream, out.trailers, end_stream=True)
            self._end(stream, out)
        return len(data)

    def _end(self, stream: int, out: _Stream) -> None:
        """Forget a stream whose trailers were sent. A client that still sends is told to stop."""
        self._forget(stream)
        if not out.is_half_closed:
            self._h2.reset_stream(stream, ErrorCodes.NO_ERROR)

    def _forget(self, stream: int) -> bool:
        return self._streams.pop(stream, None) is not None

    def _refuse(self, why: str, code: ErrorCodes = ErrorCodes.ENHANCE_YOUR_CALM) -> None:
        """End the connection of a client that breaks a limit."""
        self.go_away(code)
        self.closed = why


def _cut(chunks: deque[memoryview], room: int) -> bytes:
    """Up to `room` bytes from the front of a queue."""
    out, size = list[memoryview](), 0
    while chunks and size < room:
        chunk = chunks.popleft()
        if size + len(chunk) > room:
            chunks.appendleft(chunk[room - size :])
            chunk = chunk[: room - size]
        out.append(chunk)
        size += len(chunk)
    return b"".join(out)
