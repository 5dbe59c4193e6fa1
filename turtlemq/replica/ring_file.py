"""The file REPLICA.ring: the newest records of a copy that was stopped properly, so that others resume that stopped earlier.

The nodes of a cluster never stop at the same record: the last leader makes some more, at least those of its own stop. Its ring
would be empty after a start, and every other copy would have to compare its files. The file is a cache: its records count only if
each follows the one before, and if they end with the LSN and chain of the file REPLICA. It is removed when it has been read.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from turtlemq.errors import DiskFull
from turtlemq.replica.records import HEAD_BYTES, OutOfStep, Record, check, parse_head
from turtlemq.replica.stream import Stream
from turtlemq.storage import names
from turtlemq.storage.door import Door

KEPT_BYTES = 8 << 20  # of records: read in half a second at most, and far more than a stop makes
_CHAIN_BYTES = 8  # of the record before the first one, at the beginning of the file


class Tail(NamedTuple):
    """Records behind the one with this LSN and chain."""

    lsn: int
    chain: int
    records: list[Record]


def write(door: Door, root: Path, stream: Stream) -> None:
    """Keep the newest records of a stream. Without room on the disk, none are kept."""
    chain, entries = stream.newest(KEPT_BYTES)
    parts = (part for entry in entries for part in (entry.head, entry.path, entry.data))
    with contextlib.suppress(OSError, DiskFull):
        door.replace(root / names.REPLICA_RING, chain.to_bytes(_CHAIN_BYTES, "little") + b"".join(parts), durable=False)


def take(door: Door, root: Path, lsn: int, chain: int) -> Tail:
    """The records that lead up to this position, without any if they are not known. The file is removed."""
    path = root / names.REPLICA_RING
    try:
        data = door.read_all(path)
    except FileNotFoundError:
        return Tail(lsn, chain, [])
    door.remove(path)
    try:
        before, records = int.from_bytes(data[:_CHAIN_BYTES], "little"), _records(data)
    except (OutOfStep, ValueError):
        return Tail(lsn, chain, [])
    if not records or (records[-1].head.lsn, records[-1].chain) != (lsn, chain):
        return Tail(lsn, chain, [])
    return Tail(lsn - len(records), before, records)


def _records(data: bytes) -> list[Record]:
    """Raises `OutOfStep` or `ValueError` unless the whole file is records of which each follows the one before."""
    records: list[Record] = []
    chain, at = int.from_bytes(data[:_CHAIN_BYTES], "little"), _CHAIN_BYTES
    while at < len(data):
        if len(data) < at + HEAD_BYTES:
            raise ValueError("a record is not whole")
        head, own_chain = parse_head(data[at : at + HEAD_BYTES])
        at += HEAD_BYTES
        path, rest = data[at : at + head.path_bytes].decode(), at + head.path_bytes
        at = rest + head.data_bytes
        record = Record(head, own_chain, path, data[rest:at])
        check(record, chain)
        if records and head.lsn != records[-1].head.lsn + 1:
            raise OutOfStep(f"record {head.lsn:,} does not follow the one before it")
        records.append(record)
        chain = own_chain
    return records
