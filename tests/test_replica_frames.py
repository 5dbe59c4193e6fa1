"""Frames between replicas: parsing whatever arrives in whatever pieces, and the proof of the secret."""

from __future__ import annotations

import random
from typing import Any

import pytest

from turtlemq.replica.frames import (
    STRANGER_BYTES_MAX,
    Ack,
    BadPeer,
    Beat,
    Broken,
    Challenge,
    Done,
    Frame,
    Full,
    Hello,
    Manifest,
    Parser,
    Piece,
    Proof,
    Pull,
    Refused,
    Sync,
    Welcome,
    encode,
    is_proof,
    proof,
)
from turtlemq.replica.manifest import FileState, UnitState
from turtlemq.replica.records import Kind, Record
from turtlemq.replica.stream import Stream

FRAMES: list[Frame] = [
    Challenge(1, "prod", "nonce"),
    Proof("ff"),
    Hello(0, "b", "uuid", 3, None, None, False, 3, "0.1"),
    Hello(0, "b", "uuid", 3, (1 << 64) - 1, (1 << 64) - 1, True, 3, "0.1"),
    Welcome(4, "resume", 10, 600),
    Refused("no", 4, "host:1", True),
    Ack(7, 8, 9),
    Beat(1, 2, 3, 4, 5),
    Full("no room", "FORMAT"),
    Broken("a bit", "FORMAT"),
    Welcome(4, "sync", 0, 600),
    Sync(2),
    Manifest(7, 8, [FileState("FORMAT", 2, [(1 << 64) - 1])], [UnitState("", 7)], ["topic"], True),
    Pull(1, 1 << 40, 1 << 20),
    Piece(3, 1 << 40, b"\x00\xff" * 300),
    Done(7),
]


def stream_of_records() -> tuple[bytes, Stream]:
    stream = Stream(2)
    stream.add(Kind.MKDIR, "topic/t")
    stream.add(Kind.WRITE, "FORMAT", 7, b"x" * 3_000)
    stream.add(Kind.SYNC_DIR, "")
    entries = stream.after(0)
    assert entries is not None
    return b"".join(part for entry in entries for part in (entry.head, entry.path, entry.data)), stream


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_give_the_same_items(seed: int) -> None:
    chance, parser = random.Random(seed), Parser()
    parser.trusted = True
    shipped, stream = stream_of_records()
    data = b"".join(map(encode, FRAMES)) + shipped + encode(FRAMES[6])
    found: list[Record | Frame] = []
    at = 0
    while at < len(data):
        size = chance.choice((1, 3, 47, 48, 49, 500, 5_000))
        found += parser.feed(data[at : at + size])
        at += size
    records = [item for item in found if isinstance(item, Record)]
    assert [item for item in found if not isinstance(item, Record)] == [*FRAMES, FRAMES[6]]
    assert [(r.head.lsn, r.head.kind, r.path, len(r.data)) for r in records] == [
        (1, Kind.MKDIR, "topic/t", 0),
        (2, Kind.WRITE, "FORMAT", 3_000),
        (3, Kind.SYNC_DIR, "", 0),
    ]
    assert records[-1].chain == stream.chain


def test_a_stranger_may_not_send_records() -> None:
    with pytest.raises(BadPeer, match="before the proof"):
        Parser().feed(stream_of_records()[0])


def test_a_stranger_may_not_send_long_frames() -> None:
    data = encode(Refused("x" * 900, leader="y" * 900))
    long = bytearray(data)
    long[4:8] = (STRANGER_BYTES_MAX + 1).to_bytes(4, "little")
    assert Parser().feed(data)
    with pytest.raises(BadPeer, match="too long"):
        Parser().feed(bytes(long[:48]))


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: turtle\r\n" + b"x" * 40, b"\xff" * 48, bytes(range(48))])
def test_noise_is_refused_by_its_first_bytes(noise: bytes) -> None:
    parser = Parser()
    parser.trusted = True
    with pytest.raises(BadPeer):
        parser.feed(noise)


@pytest.mark.parametrize("at", range(120))
def test_a_flipped_bit_never_gives_another_frame(at: int) -> None:
    data = bytearray(encode(Hello(0, "b", "uuid", 3, 5, 6, True, 3, "0.1")))
    data[at] ^= 0x10
    parser = Parser()
    try:
        found: list[Any] = parser.feed(bytes(data))
    except BadPeer:
        return
    assert found in (
        [],
        [Hello(0, "b", "uuid", 3, 5, 6, True, 3, "0.1")],
    )  # a length that grew, or a field that frames do not use


def test_a_frame_with_wrong_types_is_refused() -> None:
    wrong = encode(Ack(7, 8, 9)).replace(b"\x45", b"\x46", 1)  # an ACK that says that it is a BEAT
    with pytest.raises(BadPeer, match="cannot be read"):
        Parser().feed(wrong)


def test_a_proof_is_of_one_role_one_cluster_and_both_nonces() -> None:
    sound = proof(b"secret", "standby", "prod", "a", "b")
    assert is_proof(sound, proof(b"secret", "standby", "prod", "a", "b"))
    others = [
        proof(b"Secret", "standby", "prod", "a", "b"),
        proof(b"secret", "leader", "prod", "a", "b"),
        proof(b"secret", "standby", "test", "a", "b"),
        proof(b"secret", "standby", "prod", "b", "a"),
        proof(b"secret", "standby", "prod", "a", "c"),
        proof(b"secret", "standby", "prod", "ab", ""),
    ]
    assert not any(is_proof(sound, other) for other in others)
