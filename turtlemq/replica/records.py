"""Records: one change of one file each, as bytes. Pure.

A record is a head of 48 bytes, the path of the file in the data folder, and the data. `sum` covers path and data; `chain` covers
the head and the chain of the record before. So a record that is missing, doubled, moved or changed shows at once, and two copies
with the same LSN and chain have had the same history.

>>> head = Head(Kind.WRITE, epoch=1, lsn=7, offset=4096, path_bytes=6, data_bytes=2, sum=sum_of("FORMAT", b"3\\n"))
>>> data, chain = seal(head, chain=0)
>>> len(data), parse_head(data) == (head, chain)
(48, True)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from turtlemq.errors import TurtleError

_HEAD = struct.Struct("<BBHIIIQQQQ")
HEAD_BYTES = _HEAD.size
_CHAINED = HEAD_BYTES - 8  # bytes of the head before its chain
DATA_BYTES_MAX = 1 << 20  # of one record; a longer write is several
PATH_BYTES_MAX = 512


class OutOfStep(TurtleError):
    """The records do not continue what this copy has. It must be compared with the leader's files."""


class NotArrived(OutOfStep):
    """A file that came apart from the stream did not arrive before the connection ended. It is asked for again."""


class Kind(IntEnum):
    """The kind of change that a record tells of, with the meaning of its `offset` and data."""

    CREATE = 1  # a new file; offset: its mode
    WRITE = 2  # data at offset
    CUT = 3  # the file ends at offset
    SYNC = 4  # a sync of the file begins
    SYNC_DIR = 5  # a sync of the names in a folder begins
    SYNCED = 6  # the sync that began with record `offset` is over
    RENAME = 7  # data: the new path, of a file or folder
    REMOVE = 8
    MKDIR = 9
    RMDIR = 10
    ADOPT = 11  # a file that came apart from the stream gets its name; offset: its size, data: its checksum and the new path


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a record, without its chain."""

    kind: int
    epoch: int
    lsn: int
    offset: int
    path_bytes: int
    data_bytes: int
    sum: int


@dataclass(frozen=True, slots=True)
class Record:
    """A whole record, as a standby gets it."""

    head: Head
    chain: int
    path: str
    data: bytes


def sum_of(path: str, data: bytes) -> int:
    """The checksum of a record's path and data.

    >>> sum_of("FORMAT", b"1") == sum_of("FORMA", b"T1")
    False
    """
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(path.encode()))


def seal(head: Head, chain: int) -> tuple[bytes, int]:
    """The bytes of a head that follows a record with this chain, and its own chain."""
    data = _HEAD.pack(head.kind, 0, head.path_bytes, head.data_bytes, head.epoch, 0, head.lsn, head.offset, head.sum, 0)[
        :_CHAINED
    ]
    following = xxhash.xxh3_64_intdigest(data, seed=chain)
    return data + following.to_bytes(8, "little"), following


def parse_head(data: bytes | memoryview) -> tuple[Head, int]:
    """The head in 48 bytes, and its chain. Raises `OutOfStep` if no record can begin so."""
    kind, flags, path_bytes, data_bytes, epoch, spare, lsn, offset, total, chain = _HEAD.unpack(data)
    if flags or spare or path_bytes > PATH_BYTES_MAX or data_bytes > DATA_BYTES_MAX:
        raise OutOfStep(f"no record begins with {bytes(data[:8]).hex()}")
    return Head(kind, epoch, lsn, offset, path_bytes, data_bytes, total), chain


def check(record: Record, chain: int) -> None:
    """Raise `OutOfStep` unless this record follows one with this chain, and is as it was made."""
    if seal(record.head, chain)[1] != record.chain:
        raise OutOfStep(f"record {record.head.lsn:,} does not follow the one before it")
    if sum_of(record.path, record.data) != record.head.sum:
        raise OutOfStep(f"record {record.head.lsn:,} was changed on its way")
