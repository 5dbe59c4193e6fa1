"""Hostile frames against a gRPC port: the connection ends, and another client of the server does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from h2.settings import SettingCodes

from tests.harness.grpc_peer import Peer, Site, run_site, soon
from turtlemq.server.grpc import http2, statuses

HEADERS, CONTINUATION, END_HEADERS = 1, 9, 4


def raw_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def resets(peer: Peer) -> None:
    for _ in range(http2.RESETS_MAX + 1):
        peer.reset(peer.begin())


def pings(peer: Peer) -> None:
    for _ in range(10 * http2.PINGS_MAX):
        peer.h2.ping(b"12345678")
    peer.flush()


def settings(peer: Peer) -> None:
    for n in range(2 * http2.CONTROL_MAX):
        peer.h2.update_settings({SettingCodes.MAX_FRAME_SIZE: 16_384 + n})
    peer.flush()


def continuations(peer: Peer) -> None:
    peer.transport.write(raw_frame(HEADERS, 0, 1, bytes(10)) + raw_frame(CONTINUATION, 0, 1, b"") * 10_000)


def packed_headers(peer: Peer) -> None:
    """A table entry of 4,000 bytes, named 15,000 times by one byte each: 60 MB of headers."""
    entry = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4_000
    peer.transport.write(raw_frame(HEADERS, END_HEADERS, 1, entry + b"\xbe" * 12_000))


def no_http2(peer: Peer) -> None:
    peer.transport.write(b"\xff" * 100_000)


ATTACKS: list[Callable[[Peer], None]] = [resets, pings, settings, continuations, packed_headers, no_http2]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_ends_its_connection_and_disturbs_no_other(attack: Callable[[Peer], None], tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        other, stream = await made.stream({"beat": {"number": 0}})
        await other.until(stream, "beat")
        attacker = await made.peer()
        await soon(lambda: attacker.h2.remote_settings.max_concurrent_streams == http2.STREAMS_MAX)
        attack(attacker)
        await soon(lambda: attacker.is_lost)
        other.send(stream, {"beat": {"number": 1}})
        assert [beat.number for beat in await other.until(stream, "beat", 2)] == [0, 1]
        assert not other.is_lost
        assert made.service.flow.request_bytes.bytes == 0

    run_site(tmp_path, story)


@pytest.mark.parametrize(
    "path", ["/delay.DelayScheduler/Connect", "/turtlemq.v1.Queue/PublishStream", "/turtlemq.v1.Queue/Publish"]
)
def test_a_length_of_four_gigabytes_ends_its_call_alone(path: str, tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream({"beat": {"number": 0}})
        bad = peer.begin(path)
        peer.send_raw(bad, b"\0\xff\xff\xff\xff" + b"x" * 100)
        assert await peer.status(bad) == statuses.RESOURCE_EXHAUSTED
        await peer.until(stream, "beat")
        assert made.service.flow.request_bytes.bytes == 0

    run_site(tmp_path, story)


def test_half_messages_are_counted_and_released(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        half = [peer.begin("/turtlemq.v1.Queue/PublishStream") for _ in range(3)]
        for stream in half:
            peer.send_raw(stream, b"\0" + (1 << 20).to_bytes(4, "big") + b"x" * 10_000)
        await soon(lambda: made.service.flow.request_bytes.bytes >= 30_000)
        peer.transport.abort()
        await soon(lambda: made.service.flow.request_bytes.bytes == 0)
        await asyncio.sleep(0)

    run_site(tmp_path, story)
