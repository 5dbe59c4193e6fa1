"""Ids that the server gives, and the hashes by which all ids are found. Pure.

A server-given id is 't' and the seq of its document in base 32: it names the part that has the document, and its hash follows
from the seq without the text. The digits leave out i, l, o and t, and sort by value.

Every hash has a seed, a secret of the data folder (docs/decisions/0014): without it a client could choose ids that all have one
hash. Seed 0 gives the hashes of versions before that secret. Any id may have the hash of another one: callers compare ids.

Documents of one group alone (retries, dead letters) have ids like group/id. Their hashes agree in all but the low GROUP_BITS: one
lookup finds those of all groups, whatever their number. Hashes with seed 0 do not have this property.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import xxhash

from turtlemq.model import I64, U8, U64
from turtlemq.segment.buffers import gather

_DIGITS = "0123456789abcdefghjkmnpqrsuvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
_PAIR_ROWS = np.frombuffer("".join(_PAIRS).encode(), np.uint8).reshape(len(_PAIRS), 2)
_VALUES = {c: i for i, c in enumerate(_DIGITS)}
SERVER_ID_BYTES = 1 + 13
SEED_MAX = (1 << 63) - 1
GROUP_BITS = 30  # of the hash of group/id that depend on the group: 8 of them are stored in tables, which drop the low 22
_GROUP = np.uint64((1 << GROUP_BITS) - 1)
ID_MASK = ~_GROUP  # the bits that depend on the id alone
_xxh3 = xxhash.xxh3_64_intdigest  # (bytes, seed) → 64 bits


def server_ids(first_seq: int, count: int) -> list[str]:
    """Ids of `count` messages from `first_seq` on. 0.05 µs each in a batch.

    >>> server_ids(0, 2)
    ['t0000000000000', 't0000000000001']
    """
    return [head + pair for head, first, last in _shared_heads(first_seq, count) for pair in _PAIRS[first:last]]


def server_id_rows(first_seq: int, count: int) -> U8:
    """Ids of `count` messages from `first_seq` on, as a matrix with one id a row. 0.01 µs each in a batch."""
    rows = np.empty((count, SERVER_ID_BYTES), np.uint8)
    at = 0
    for head, first, last in _shared_heads(first_seq, count):
        block = rows[at : at + last - first]
        block[:, :-2], block[:, -2:] = np.frombuffer(head.encode(), np.uint8), _PAIR_ROWS[first:last]
        at += last - first
    return rows


def _shared_heads(seq: int, count: int) -> Iterator[tuple[str, int, int]]:
    """1,024 successive ids share all but their last two digits. Yields the shared part, and the range of those digits."""
    end = seq + count
    while seq < end:
        stop = min(end, (seq | 1023) + 1)
        shared = "".join(["t", _DIGITS[seq >> 60], *[_PAIRS[seq >> shift & 1023] for shift in (50, 40, 30, 20, 10)]])
        yield shared, seq & 1023, (stop - 1 & 1023) + 1
        seq = stop


def server_seq(id_: str) -> int | None:
    """The seq in a server-given id. None for any other id.

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


def _mix(x: U64, seed: int) -> U64:
    """splitmix64 of seqs: the hashes of server-given ids. Never 0, which stands for no hash."""
    with np.errstate(over="ignore"):
        x = x + np.uint64((0x9E3779B97F4A7C15 + seed) % (1 << 64))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.maximum(x ^ (x >> np.uint64(31)), np.uint64(1))


def hash_seqs(seqs: I64, seed: int) -> U64:
    """Hashes of the server-given ids with these seqs."""
    return _mix(seqs.astype(np.uint64), seed)


def hash_id(id_: str, seed: int) -> int:
    """The 64-bit hash of any id: of its text (XXH3), or of its seq if it is server-given."""
    seq = server_seq(id_)
    if seq is not None:
        return int(_mix(np.array([seq], np.uint64), seed)[0])
    raw = id_.encode()
    if "/" not in id_:
        return int(_xxh3(raw, seed)) or 1
    hashes = hash_texts([raw], seed)
    _share_bits(hashes, [raw], seed)
    return int(hashes[0])


def hash_texts(ids: Sequence[bytes], seed: int) -> U64:
    """Hashes of ids that are certainly not server-given, nor like group/id. 0.07 µs each."""
    hashes: U64 = np.fromiter(map(_xxh3, ids, repeat(seed)), np.uint64, len(ids))
    hashes[hashes == 0] = 1
    return hashes


def hash_group_ids(ids: Sequence[bytes], seed: int) -> U64:
    """The bits under ID_MASK of the hashes of group/id, which are the same for all groups. Requires: a seed other than 0.

    >>> bool(hash_group_ids([b"x"], 7)[0] == hash_any([b"g/x"], 7)[0] & ID_MASK)
    True
    """
    return hash_texts(ids, seed) & ID_MASK


def _share_bits(hashes: U64, ids: Sequence[bytes], seed: int) -> None:
    """Give the hashes of ids like group/id the bits that those of all groups share."""
    rows = [i for i, id_ in enumerate(ids) if b"/" in id_]
    if seed and rows:
        shared = hash_group_ids([ids[i].partition(b"/")[2] for i in rows], seed)
        hashes[rows] = np.maximum(shared | hashes[rows] & _GROUP, np.uint64(1))


def hash_any(ids: Sequence[bytes], seed: int) -> U64:
    """Hashes of any ids. 0.1 µs each, 0.4 µs for ids like group/id."""
    hashes = hash_texts(ids, seed)
    _share_bits(hashes, ids, seed)
    if SERVER_ID_BYTES in set(map(len, ids)):
        for i, id_ in enumerate(ids):
            if len(id_) == SERVER_ID_BYTES:
                hashes[i] = hash_id(id_.decode(), seed)
    return hashes


def hash_ids(buffer: bytes | bytearray | memoryview, starts: I64, sizes: I64, seed: int) -> U64:
    """Hashes of any ids in a buffer. Requires: a NUL follows each, none contains one. 0.1 µs each if few lengths differ, else
    0.4 µs."""
    joined = bytes(gather(buffer, starts, sizes + 1))[:-1]
    texts = joined.split(b"\0")
    hashes = hash_texts(texts, seed)
    if b"/" in joined:
        _share_bits(hashes, texts, seed)
    for i in np.flatnonzero(sizes == SERVER_ID_BYTES).tolist():
        hashes[i] = hash_id(texts[i].decode(), seed)
    return hashes
