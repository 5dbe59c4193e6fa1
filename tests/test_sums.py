"""Checksums and hashes of ids computed for many documents at once are equal to those of each document alone."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.broker_insides import logs_of
from turtlemq.broker.ready_tail import document_hashes
from turtlemq.engine import Engine
from turtlemq.model import I64, Message
from turtlemq.segment import bulk_crc
from turtlemq.segment import format as f
from turtlemq.segment.buffers import checksums
from turtlemq.segment.ids import hash_id, hash_ids, server_ids

Heads = np.ndarray[Any, np.dtype[Any]]


def documents(count: int, body_bytes: int, seed: int = 1) -> tuple[bytearray, I64]:
    """Documents of one length behind a few other bytes, and where they begin."""
    chance = random.Random(seed)
    bodies = [chance.randbytes(body_bytes) for _ in range(count)]
    dues = [chance.randrange(1 << 41) for _ in range(count)]
    data, lengths = f.encode([b"order-%06d" % n for n in range(count)], bodies, dues, 7 << 20, 0, [0] * count)
    return bytearray(b"before" + bytes(data)), len(b"before") + np.arange(count) * int(lengths[0])


def matches(data: bytearray, starts: I64) -> bool:
    return bulk_crc.all_match(memoryview(data), starts, f.prefixes(data, starts))


def warm(data: bytearray, starts: I64) -> None:
    """A length is told apart once it has come a few times."""
    assert any(matches(data, starts) for _ in range(100))


@pytest.mark.parametrize(("count", "body_bytes"), [(64, 0), (100, 1), (1_000, 100), (1_024, 37), (2_500, 20)])
def test_documents_as_they_were_written_match(count: int, body_bytes: int) -> None:
    data, starts = documents(count, body_bytes)
    warm(data, starts)
    other, where = documents(count, body_bytes, seed=2)
    assert matches(other, where)
    assert matches(other, where[: count - 1]) == (count > 64), "any number of them, from the least that pays"


@pytest.mark.parametrize("count", [100, 1_500])
def test_any_bit_that_changes_is_noticed(count: int) -> None:
    data, starts = documents(count, 50)
    warm(data, starts)
    chance = random.Random(3)
    length = int(starts[1] - starts[0])
    spots = [*range(length), *(chance.randrange(count * length) for _ in range(300))]  # every byte of the first, some of others
    for spot in spots:
        broken = data.copy()
        broken[int(starts[0]) + spot] ^= 1 << chance.randrange(8)
        assert not matches(broken, starts), spot
    assert matches(data, starts)


def test_swapped_documents_match_and_mixed_halves_do_not() -> None:
    data, starts = documents(200, 50)
    warm(data, starts)
    first, second, length = int(starts[3]), int(starts[9]), int(starts[1] - starts[0])
    one, other = data[first : first + length], data[second : second + length]
    data[first : first + length], data[second : second + length] = other, one
    assert matches(data, starts), "each is what was written"
    half = length // 2
    data[first + half : first + length], data[second + half : second + length] = one[half:], other[half:]
    assert not matches(data, starts)


def test_documents_that_do_not_lie_evenly_are_not_judged() -> None:
    data, starts = documents(200, 50)
    warm(data, starts)
    assert not matches(data, np.delete(starts, 100))
    assert not matches(data, starts[::-1])


def test_hashes_that_come_with_a_handoff_are_those_of_the_documents(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    own = [Message(b"x", 100, id=f"order-{n}") for n in range(100)]
    engine.submit("t", [*own, *(Message(b"x", 100) for _ in range(100))], now_ms=1)
    engine.reschedule("t", "order-7", 2, due_ms=99)
    named = engine.submit("t", [Message(b"x", 1_000)], now_ms=3).ids[0]
    engine.reschedule("t", named, 4, due_ms=98)  # its id names the seq of another document
    engine.tick(100)
    ready = logs_of(engine).ready
    assert ready.next_offset == 201
    read, _ = ready.read(np.arange(201))
    ready.tail.enter_pending()
    assert ready.tail.hashes[:201].tolist() == document_hashes(bytes(read.buffer), read.starts, read.heads, ready.seed).tolist()
    engine.close()


def test_hashes_of_ids_are_those_of_each_alone() -> None:
    (like_ours,) = server_ids(5 << 20, 1)  # a producer may name a message so
    ids = [like_ours, "t" + "i" * 13, "Ü-bung", "x", *(f"order-{n}" for n in range(0, 2_000, 7)), "y" * 255]
    texts = [id_.encode() for id_ in ids]
    sizes = np.array([len(text) for text in texts])
    starts = np.cumsum(sizes + 1) - (sizes + 1) + 3
    found = hash_ids(b"..." + b"".join(text + b"\0" for text in texts) + b"behind", starts, sizes, 7)
    assert found.tolist() == [hash_id(id_, 7) for id_ in ids]


@pytest.mark.parametrize("body_bytes", [10, 900, 1_100, 5_000])
@pytest.mark.parametrize("gap", [0, 3])
def test_sums_of_short_and_long_pieces_are_those_of_each_alone(body_bytes: int, gap: int) -> None:
    """Short pieces of one length are copied together, long ones are looked at in place."""
    data = random.Random(2).randbytes(200 * (body_bytes + gap))
    starts = np.arange(200) * (body_bytes + gap)
    alone = [zlib.crc32(data[at : at + body_bytes]) for at in starts.tolist()]
    assert list(checksums(memoryview(data), starts, starts + body_bytes)) == alone
