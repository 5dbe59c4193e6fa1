"""Ids: those that the server gives, and the hashes under which all of them are found. Pure.

An id of the server's is 't' and the document's seq in base 32, so it says where to look and its hash needs no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from turtlemq.model import I64, U8, U64

_FEW = 24  # below this many, loops beat arrays
# Ids that the server gives: 't' and the document's seq in base 32. The letters leave out i, l, o and t, and sort as they count.
_DIGITS = "0123456789abcdefghjkmnpqrsuvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
_VALUES = {c: i for i, c in enumerate(_DIGITS)}
SERVER_ID_BYTES = 1 + 13


def server_ids(first_seq: int, count: int) -> tuple[list[str], Sequence[bytes] | U8]:
    """Ids for `count` messages from `first_seq` on, as text and as `encode` takes them. 0.1 µs each in a batch.

    >>> server_ids(0, 2)[0]
    ['t0000000000000', 't0000000000001']
    """
    ids: list[str] = []
    seq, end = first_seq, first_seq + count
    while seq < end:  # 1,024 in a row share all but their last two digits
        stop = min(end, (seq | 1023) + 1)
        head = "".join(["t", _DIGITS[seq >> 60], *[_PAIRS[seq >> shift & 1023] for shift in (50, 40, 30, 20, 10)]])
        ids += [head + pair for pair in _PAIRS[seq & 1023 : (stop - 1 & 1023) + 1]]
        seq = stop
    if count < _FEW:
        return ids, [id_.encode() for id_ in ids]
    return ids, np.frombuffer("".join(ids).encode(), np.uint8).reshape(count, SERVER_ID_BYTES)


def server_seq(id_: str) -> int | None:
    """The seq that a server-given id names, or None for any other id.

    >>> server_seq("t0000000000010"), server_seq("order-17"), server_seq("tz000000000000")
    (32, None, None)
    """
    if len(id_) != SERVER_ID_BYTES or id_[0] != "t":
        return None
    seq = 0
    for c in id_[1:]:
        value = _VALUES.get(c)
        if value is None:
            return None
        seq = seq << 5 | value
    return seq if seq < 1 << 63 else None


def _mix(x: U64) -> U64:
    """splitmix64: the hash of a server-given id, from its seq, for whole arrays at once. Never 0, which stands for no hash."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.maximum(x ^ (x >> np.uint64(31)), np.uint64(1))


def hash_seqs(seqs: I64) -> U64:
    """Hashes of the server-given ids of these seqs."""
    return _mix(seqs.astype(np.uint64))


def hash_id(id_: str) -> int:
    """64 bits of an id: xxh3, or for a server-given one the hash of its seq, which arrays can compute without the text."""
    seq = server_seq(id_)
    return int(xxhash.xxh3_64_intdigest(id_.encode())) or 1 if seq is None else int(_mix(np.array([seq], np.uint64))[0])


def hash_texts(ids: Sequence[bytes]) -> U64:
    """Hashes of ids that cannot be a server's, such as group/id. 0.15 µs each."""
    found: U64 = np.fromiter(map(xxhash.xxh3_64_intdigest, ids), np.uint64, len(ids))
    found[found == 0] = 1
    return found


def hash_ids(buffer: memoryview, starts: I64, ends: I64) -> U64:
    """xxh3 of ids in a buffer, none of which a server gave. 0.2 µs each."""
    digest = xxhash.xxh3_64_intdigest
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    found: U64 = np.fromiter((digest(buffer[a:b]) for a, b in spans), np.uint64, len(starts))
    found[found == 0] = 1
    return found
