"""Are many documents of one length, one behind the other, what was written? Answered for all of them at once: 0.05 µs each, where
a checksum of each takes 0.15. Pure.

A CRC-32 is linear: that of a stretch of documents follows from those of the documents, each moved by as much as stands behind it.
So one pass over all bytes is compared with what the sums in the documents say together. A table tells, for each document from the
end and each bit of its sum, which bits that turns in the sum of the stretch. Whatever gives a single document away does so here;
damage in several of them passes with a chance of one in 2³², as that in one does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from turtlemq import small_batches
from turtlemq.model import I64, U32
from turtlemq.segment import format as f

_ROWS = 1024  # documents taken at once
_LENGTH_MAX = 2048  # of a document; longer ones gain little
_LENGTHS = 16  # for which there is a table, of 132 KiB each
_TRIES = 32  # stretches of a length that come before its table is made, which takes 5 ms, or 14 for the longest
_seen: dict[int, int] = {}


def all_match(buffer: memoryview, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Are all these documents as written? False: not, or they are not alike, or it is not known."""
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
        some = sums[first : first + _ROWS]
        turned = table[_ROWS - len(some) :] * np.unpackbits(some.view(np.uint8), bitorder="little").reshape(-1, 32)
        expected = int(np.bitwise_xor.reduce(turned, axis=None)) ^ int(blanks[len(some) - 1])
        if crc32(buffer[begin + first * length : begin + (first + len(some)) * length]) != expected:
            return False
    return True


@lru_cache(_LENGTHS)
def _table(length: int) -> tuple[U32, U32]:
    """For each document, the last one last, what each bit of its sum turns in the sum of all; and for one, two, … documents what
    their sum would be, were their own sums 0."""
    rest = bytes(length - f.CHECKED_FROM)

    def whole(sum_: int) -> int:
        """The sum of a document that carries this one."""
        head = length.to_bytes(4, "little") + f.MARK + sum_.to_bytes(4, "little")
        return int(crc32(rest, crc32(head)) ^ crc32(rest) ^ sum_)

    blank = whole(0)
    rows = np.array([[*(whole(1 << bit) ^ blank for bit in range(32)), blank]], np.uint32)
    while len(rows) < _ROWS:
        rows = np.concatenate((_moved(rows, length * len(rows)), rows))
    return rows[:, :32].copy(), np.bitwise_xor.accumulate(rows[::-1, 32])


def _moved(sums: U32, count: int) -> U32:
    """What these sums come to with so many bytes behind them."""
    nothing, out = bytes(count), np.zeros_like(sums)
    blank = crc32(nothing)
    for bit in range(32):
        out ^= (sums >> np.uint32(bit) & np.uint32(1)) * np.uint32(crc32(nothing, 1 << bit) ^ blank)
    return out
