"""gRPC below its handlers, without sockets: messages and their prefixes, HTTP/2 streams, limits against abuse, windows."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from turtlemq.server.grpc import framing, http2, messages
from turtlemq.server.grpc.framing import BadMessage, MessageReader, Packed, frame, unpacked
from turtlemq.server.grpc.http2 import Began, Ended, Happened, Http2Server, Received
from turtlemq.server.grpc.window import Window

GOLDEN = Path(__file__).parent / "golden" / "grpc_fields.json"
HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "x"),
    ("content-type", "application/grpc+proto"),
    ("te", "trailers"),
]


def client() -> H2Connection:
    found = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    found.initiate_connection()
    return found


def talk(one: H2Connection, server: Http2Server, now: float = 0.0) -> list[Happened]:
    """Everything that the client has to say reaches the server, and the other way round."""
    events = server.receive(one.data_to_send(), now)
    one.receive_data(server.output(1 << 30))
    return events + server.receive(one.data_to_send(), now)


# Messages


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_any_cut_of_the_bytes_gives_equal_messages(sent: list[bytes], data: st.DataObject) -> None:
    raw, reader, got, at = frame(sent), MessageReader(), list[bytes](), 0
    while at < len(raw):
        size = data.draw(st.integers(1, 40))
        got += reader.feed(raw[at : at + size])
        at += size
    assert got == sent
    assert reader.held == 0


@settings(deadline=None)
@given(st.lists(st.binary(max_size=400), min_size=1, max_size=15), st.data())
def test_any_cut_of_a_connection_gives_equal_messages(sent: list[bytes], data: st.DataObject) -> None:
    one, whole = client(), frame(sent)
    one.send_headers(1, HEAD)
    at = 0
    while at < len(whole):
        size = data.draw(st.integers(1, 700))
        one.send_data(1, whole[at : at + size])
        at += size
    one.end_stream(1)
    raw, server, events = one.data_to_send(), Http2Server(), list[Happened]()
    at = 0
    while at < len(raw):
        size = data.draw(st.integers(1, 900))
        events += server.receive(raw[at : at + size], 0.0)
        at += size
    assert [event.path for event in events if isinstance(event, Began)] == ["/a.B/C"]
    assert [got for event in events if isinstance(event, Received) for got in event.messages] == sent
    assert events[-1] == Ended(1, "half_close")


@pytest.mark.parametrize("raw", [b"\0\xff\xff\xff\xff", b"\0\x01\0\0\x01" + b"x" * 100])
def test_a_length_beyond_the_limit_is_refused_at_its_prefix(raw: bytes) -> None:
    with pytest.raises(BadMessage) as refused:
        MessageReader().feed(raw)
    assert refused.value.too_large


def test_compressed_messages_wait_for_their_handler() -> None:
    packed = gzip.compress(b"hello")
    (got,) = MessageReader(packed=True).feed(b"\1" + len(packed).to_bytes(4, "big") + packed)
    assert isinstance(got, Packed)
    assert unpacked(got) == b"hello"


@pytest.mark.parametrize(
    ("packed", "is_large"),
    [(gzip.compress(bytes(framing.MESSAGE_BYTES_MAX + 1)), True), (gzip.compress(b"abc")[:-9], False), (b"nonsense", False)],
    ids=["bomb", "cut off", "no gzip"],
)
def test_a_bad_compressed_message_is_refused(packed: bytes, is_large: bool) -> None:
    with pytest.raises(BadMessage) as refused:
        unpacked(Packed(packed))
    assert refused.value.too_large == is_large


# Streams


def test_answers_keep_to_the_windows_of_the_client() -> None:
    one, server = client(), Http2Server()
    one.send_headers(1, HEAD, end_stream=True)
    talk(one, server)
    server.send(1, frame([b"x" * 100_000]))
    server.finish(1, [("grpc-status", "0")])
    events = one.receive_data(server.output(1 << 30))
    got = sum(len(event.data or b"") for event in events if isinstance(event, DataReceived))
    assert got == 65_535, "the first window of HTTP/2"
    assert server.progress == {1: got}
    one.acknowledge_received_data(got, 1)
    server.receive(one.data_to_send(), 0.0)
    server.resume()
    events = one.receive_data(server.output(1 << 30))
    assert sum(len(event.data or b"") for event in events if isinstance(event, DataReceived)) == 100_005 - got
    assert any(isinstance(event, TrailersReceived) for event in events)
    assert any(isinstance(event, StreamEnded) for event in events)


def test_a_client_may_send_more_only_when_its_messages_were_taken() -> None:
    one, server = client(), Http2Server()
    one.send_headers(1, HEAD)
    talk(one, server)
    sent, size = 0, 10_005
    while one.local_flow_control_window(1) >= size:
        one.send_data(1, frame([b"y" * 10_000]))
        sent += size
        talk(one, server)
    assert http2.STREAM_WINDOW - size < sent <= http2.STREAM_WINDOW
    server.taken(1, sent)
    talk(one, server)
    assert one.local_flow_control_window(1) > http2.STREAM_WINDOW // 2


def test_a_message_larger_than_the_window_gets_through() -> None:
    one, server, events = client(), Http2Server(), list[Happened]()
    one.send_headers(1, HEAD)
    talk(one, server)
    raw = memoryview(frame([bytes(5 << 20)]))
    while raw:
        room = min(16_384, one.local_flow_control_window(1), len(raw))
        assert room, "the server gives room for the rest of a message"
        one.send_data(1, raw[:room])
        raw = raw[room:]
        events += talk(one, server)
    assert [len(event.messages[0]) for event in events if isinstance(event, Received)] == [5 << 20]


# Abuse


def is_refused(one: H2Connection, server: Http2Server) -> bool:
    """Whether the server has ended the connection for abuse."""
    events = one.receive_data(server.output(0))
    codes = [event.error_code for event in events if isinstance(event, ConnectionTerminated)]
    return bool(server.closed) and codes in ([ErrorCodes.ENHANCE_YOUR_CALM], [ErrorCodes.PROTOCOL_ERROR])


def test_rapid_resets_end_the_connection() -> None:
    one, server = client(), Http2Server()
    talk(one, server)
    for n in range(http2.RESETS_MAX + 1):
        one.send_headers(2 * n + 1, HEAD)
        one.reset_stream(2 * n + 1)
        assert not server.closed
        server.receive(one.data_to_send(), n / 1000)
    assert is_refused(one, server)


def test_slow_resets_are_fine() -> None:
    one, server = client(), Http2Server()
    talk(one, server)
    for n in range(3 * http2.RESETS_MAX):
        one.send_headers(2 * n + 1, HEAD)
        one.reset_stream(2 * n + 1)
        server.receive(one.data_to_send(), n * 0.2)
        server.output(0)
    assert not server.closed


def test_a_flood_of_pings_ends_the_connection() -> None:
    one, server = client(), Http2Server()
    talk(one, server)
    for _ in range(http2.PINGS_MAX + 1):
        one.ping(b"12345678")
    server.receive(one.data_to_send(), 0.0)
    assert is_refused(one, server)


def test_pings_between_answers_are_measurements() -> None:
    one, server = client(), Http2Server()
    one.send_headers(1, HEAD)
    talk(one, server)
    for n in range(5 * http2.PINGS_MAX):
        one.ping(b"12345678")
        server.receive(one.data_to_send(), n / 1000)
        server.send(1, frame([b"x"]))
        one.receive_data(server.output(1 << 20))
    assert not server.closed


def test_a_flood_of_settings_or_empty_frames_ends_the_connection() -> None:
    for flood in ("settings", "empty"):
        one, server = client(), Http2Server()
        one.send_headers(1, HEAD)
        talk(one, server)
        for n in range(http2.CONTROL_MAX + 1):
            if flood == "settings":
                one.update_settings({SettingCodes.MAX_FRAME_SIZE: 16_384 + n})
            else:
                one.send_data(1, b"")
        server.receive(one.data_to_send(), 0.0)
        assert is_refused(one, server), flood


def test_endless_headers_end_the_connection() -> None:
    one, server = client(), Http2Server()
    server.receive(one.data_to_send(), 0.0)
    server.output(0)
    length, kind, no_flags = (10).to_bytes(3, "big"), {"headers": 1, "continuation": 9}, b"\0"
    server.receive(length + bytes([kind["headers"]]) + no_flags + (1).to_bytes(4, "big") + bytes(10), 0.0)
    for _ in range(1_000):
        server.receive(length + bytes([kind["continuation"]]) + no_flags + (1).to_bytes(4, "big") + bytes(10), 0.0)
    assert server.closed


def test_large_headers_end_the_connection() -> None:
    one, server = client(), Http2Server()
    talk(one, server)
    one.send_headers(1, [*HEAD, *((f"x-{n}", "y" * 1_000) for n in range(20))])
    server.receive(one.data_to_send(), 0.0)
    assert server.closed


def test_too_many_streams_end_the_connection() -> None:
    one, server = client(), Http2Server()
    server.receive(one.data_to_send(), 0.0)  # the client has not heard of the limit
    for n in range(http2.STREAMS_MAX + 1):
        one.send_headers(2 * n + 1, HEAD)
    server.receive(one.data_to_send(), 0.0)
    assert server.closed


@settings(deadline=None)
@given(st.binary(max_size=500))
def test_no_bytes_make_the_machine_raise(raw: bytes) -> None:
    one, server = client(), Http2Server()
    server.receive(one.data_to_send(), 0.0)
    server.receive(raw, 0.0)
    server.output(1 << 20)


def test_another_kind_of_content_is_refused() -> None:
    one, server = client(), Http2Server()
    one.send_headers(1, [*HEAD[:4], ("content-type", "text/html")], end_stream=True)
    assert talk(one, server) == []


# Windows


def test_a_window_stays_within_its_bounds() -> None:
    window, now = Window(100), 0.0
    for _ in range(10):
        window.fill(window.size, now)
        window.acknowledge(window.size, now + 0.5)
        now += 1
    assert window.size == 100
    small = Window(1_000)
    small.fill(16, 0.0)
    small.acknowledge(16, 0.001)
    assert small.size == 128, "eightfold at most"
    for n in range(20):
        window.review(6.0, now + 5.0 * (n + 1))
    assert window.size == 1
    window.fill(1, 1_000.0)
    window.acknowledge(1, 1_001.5)
    assert window.size == 1, "that was slow"


# The stored descriptors


def fields() -> dict[str, dict[str, int]]:
    """The number of every field and value, by message and enum."""
    out: dict[str, dict[str, int]] = {}
    for file in messages.DESCRIPTORS.file:
        for kind in file.message_type:
            out[f"{file.package}.{kind.name}"] = {field.name: field.number for field in kind.field}
        for enum in file.enum_type:
            out[f"{file.package}.{enum.name}"] = {value.name: value.number for value in enum.value}
        for service in file.service:
            out[f"{file.package}.{service.name}"] = {method.name: 0 for method in service.method}
    return out


def test_field_numbers_never_change() -> None:
    assert fields() == json.loads(GOLDEN.read_text("utf-8"))


def test_the_stored_descriptors_are_those_of_the_protos() -> None:
    if shutil.which("protoc") is None:
        pytest.skip("there is no protoc here: `make tools` installs it where that is allowed")
    assert messages.compiled() == (messages.FOLDER / "protos.bin").read_bytes()
