"""Verify many adjacent documents of one length with one CRC-32 pass: 0.05 µs each, instead of 0.15 for one checksum each. Pure.

CRC-32 is linear: the checksum of a range of documents follows from the checksums of the documents, each shifted by the bytes
behind it. So one pass over all bytes is compared with the value that the stored checksums predict. A table has, for each document
counted from the end and each bit of its checksum, the bits that it flips in the checksum of the range. Damage in one document is
detected whenever its own checksum would detect it; damage in several passes with a probability of 1 in 2³².
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from turtlemq import small_batches
from turtlemq.model import I64, U32
from turtlemq.segment import format as f

_ROWS = 1024  # documents in one pass
_LENGTH_MAX = 2048  # of a document; longer ones gain little
_LENGTHS = 16  # lengths that have a table, of 132 KiB each
_TRIES = 32  # calls with one length before its table is made, which takes 5 ms, or 14 for the longest
_seen: dict[int, int] = {}  # calls by length


def all_match(buffer: memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """True if all these documents are as written. False says nothing: each must be checked alone."""
    length, count = int(heads["len"][0]), len(starts)
    if (
        count < small_batches.BULK_CHECKSUM
        or length > _LENGTH_MAX
        or (heads["len"] != length).any()
        or (np.diff(starts) != length).any()
    ):
        return False
    if _seen.get(length, 0) < _TRIES:
        if len(_seen) > _LENGTHS:
            _seen.clear()
        _seen[length] = _seen.get(length, 0) + 1
        return False
    begin, sums = int(starts[0]), heads["crc"].copy()
    table, blanks = _table(length)
    for first in range(0, count, _ROWS):
        chunk = sums[first : first + _ROWS]
        flipped = table[_ROWS - len(chunk) :] * np.unpackbits(chunk.view(np.uint8), bitorder="little").reshape(-1, 32)
        expected = int(np.bitwise_xor.reduce(flipped, axis=None)) ^ int(blanks[len(chunk) - 1])
        if crc32(buffer[begin + first * length : begin + (first + len(chunk)) * length]) != expected:
            return False
    return True


@lru_cache(_LENGTHS)
def _table(length: int) -> tuple[U32, U32]:
    """For each document, the last one last, the bits that each bit of its checksum flips in the checksum of all; and for 1, 2, …
    documents the checksum of all if their own checksums were 0."""
    rest = bytes(length - f.CHECKED_FROM)

    def whole(sum_: int) -> int:
        """The CRC of a whole document, length and checksum field included, that stores this checksum."""
        head = length.to_bytes(4, "little") + f.MARK + sum_.to_bytes(4, "little")
        return int(crc32(rest, crc32(head)) ^ crc32(rest) ^ sum_)

    blank = whole(0)
    rows = np.array([[*(whole(1 << bit) ^ blank for bit in range(32)), blank]], np.uint32)
    while len(rows) < _ROWS:
        rows = np.concatenate((_moved(rows, length * len(rows)), rows))
    return rows[:, :32].copy(), np.bitwise_xor.accumulate(rows[::-1, 32])


def _moved(sums: U32, count: int) -> U32:
    """The effect of these checksum bits after `count` more bytes."""
    nothing, out = bytes(count), np.zeros_like(sums)
    blank = crc32(nothing)
    for bit in range(32):
        out ^= (sums >> np.uint32(bit) & np.uint32(1)) * np.uint32(crc32(nothing, 1 << bit) ^ blank)
    return out
