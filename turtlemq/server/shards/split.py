"""Request bodies cut by partition: each message, ack or id goes into the body for its partition. Pure.

Messages are copied as they were sent. One without an id gets one here, which tells its partition.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.errors import InvalidArgument
from turtlemq.server.incoming.bson_messages import documents
from turtlemq.server.media_types import BSON, NDJSON
from turtlemq.server.outgoing.reply import encode
from turtlemq.server.shards.unite import Piece
from turtlemq.shards import partition_of, partitions_of

ID_RANDOM_BYTES = 10  # of an id, behind six of the time


def new_ids(now_ms: int, count: int) -> list[str]:
    """Ids for messages without one: 32 hexadecimal digits, which begin with the time.

    >>> [len(id_) for id_ in new_ids(1_790_000_000_000, 2)]
    [32, 32]
    """
    head, size = f"{now_ms:012x}", 2 * ID_RANDOM_BYTES
    digits = os.urandom(ID_RANDOM_BYTES * count).hex()
    return [head + digits[at : at + size] for at in range(0, size * count, size)]


def rows_by_partition(ids: Iterable[str], partitions: int) -> dict[int, list[int]]:
    """The rows of a list of ids that lie in each partition.

    >>> rows_by_partition(["order-17", "order-18", "a"], 4)
    {2: [0, 1], 3: [2]}
    """
    found: dict[int, list[int]] = {}
    for row, partition in enumerate(partitions_of(ids, partitions)):
        found.setdefault(partition, []).append(row)
    return found


# Messages


class _Envelope(Struct):
    """Many messages in one JSON object, not decoded."""

    messages: list[Raw] | UnsetType = UNSET
    if_exists: str | None = None


def messages(data: bytes, kind: str, given: Sequence[str | None], partitions: int, now_ms: int) -> tuple[list[Piece], list[str]]:
    """The messages of a valid request, cut by partition, and the ids of all. `given`: the ids that they have, or None."""
    raws, if_exists = _raw(data, kind)
    fresh = iter(new_ids(now_ms, sum(id_ is None for id_ in given)))
    ids = []
    for row, own in enumerate(given):
        if own is None:
            own = next(fresh)
            raws[row] = (_bson_with_id if kind == BSON else _json_with_id)(raws[row], own)
        ids.append(own)
    pieces = []
    for partition, rows in rows_by_partition(ids, partitions).items():
        pieces.append(Piece(partition, rows, _joined([raws[row] for row in rows], kind, if_exists)))
    return pieces, ids


def _raw(data: bytes, kind: str) -> tuple[list[bytes], str | None]:
    """The messages of a request as they were sent, and the mode for known ids that JSON may name for all of them."""
    if kind == BSON:
        bounds = documents(data).tolist()
        return [data[start:end] for start, end in pairwise(bounds)], None
    if kind == NDJSON:
        return [line for line in map(bytes.strip, data.split(b"\n")) if line], None
    found = msgspec.json.decode(data, type=_Envelope)
    if isinstance(found.messages, UnsetType):
        return [data.strip()], None
    return [bytes(message) for message in found.messages], found.if_exists


def _joined(raws: list[bytes], kind: str, if_exists: str | None) -> bytes:
    if kind == BSON:
        return b"".join(raws)
    if kind == NDJSON:
        return b"\n".join(raws)
    mode = b"" if if_exists is None else b',"if_exists":' + encode(if_exists)
    return b'{"messages":[' + b",".join(raws) + b"]" + mode + b"}"


def _json_with_id(raw: bytes, id_: str) -> bytes:
    """A message with an id. A null that stood for it before no longer counts: of two values the last one does."""
    return b'%b,"id":"%b"}' % (raw.rstrip()[:-1], id_.encode())


def _bson_with_id(raw: bytes, id_: str) -> bytes:
    value = id_.encode() + b"\0"
    element = b"\x02id\0" + struct.pack("<i", len(value)) + value
    return struct.pack("<i", len(raw) + len(element)) + raw[4:-1] + element + b"\0"


# Lists of ids


def lease_in(lease: str, partition: int) -> str:
    """The lease of one partition, out of one that an answer with messages of several has: `2.LEASE_3.LEASE`.

    >>> lease_in("2.1c-1a_3.2f-1b", 3), lease_in("1c-1a", 3), lease_in("2.1c-1a", 3)
    ('2f-1b', '1c-1a', '-')
    """
    if "." not in lease:
        return lease
    named = dict(part.partition(".")[::2] for part in lease.split("_"))
    return named.get(str(partition), "-")


def joined_lease(leases: dict[int, str]) -> str:
    """The lease of an answer with messages of these partitions. The inverse of `lease_in`."""
    if len(leases) == 1:
        return next(iter(leases.values()))
    return "_".join(f"{partition}.{lease}" for partition, lease in leases.items())


def entries(body: dict[str, Any], name: str, partitions: int) -> list[Piece]:
    """A body with a list of ids, `-` before those that failed, and perhaps leases, cut by partition."""
    listed, lease = body[name], body.get("lease")
    pieces = []
    for partition, rows in rows_by_partition([entry.removeprefix("-") for entry in listed], partitions).items():
        part = body | {name: [listed[row] for row in rows]}
        if isinstance(lease, str):
            part["lease"] = lease_in(lease, partition)
        elif isinstance(lease, list) and len(lease) == len(listed):
            part["lease"] = [lease_in(lease[row], partition) if isinstance(lease[row], str) else lease[row] for row in rows]
        pieces.append(Piece(partition, rows, encode(part)))
    return pieces


# Transactions


class _Put(Struct):
    id: str | None = None


class _Named(Struct):
    id: str


class _Operations(Struct):
    """The ids of a transaction."""

    put: list[_Put] = []
    cancel: list[str] = []
    reschedule: list[_Named] = []
    conditions: list[_Named] = msgspec.field(name="if", default_factory=list)


def transaction(data: bytes, partitions: int, now_ms: int) -> tuple[int, bytes]:
    """The only partition of a transaction, and its body with an id for each message. Raises `InvalidArgument` if there are
    several."""
    asked = msgspec.json.decode(data, type=_Operations)
    named = [*(move.id for move in asked.reschedule), *(one.id for one in asked.conditions), *asked.cancel]
    named += [put.id for put in asked.put if put.id is not None]
    found = sorted(set(partitions_of(named, partitions)))
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise InvalidArgument(
            f"a transaction is about one partition, and these ids lie in partitions {listed}: send one request for each, or use "
            "a topic without partitions for messages that belong together"
        )
    partition = found[0] if found else 0
    if all(put.id is not None for put in asked.put):
        return partition, data
    body = msgspec.json.decode(data, type=dict[str, Raw])
    raws = msgspec.json.decode(body["put"], type=list[Raw])
    whole = [
        bytes(raw) if put.id is not None else _json_with_id(bytes(raw), _id_in(partition, partitions, now_ms))
        for raw, put in zip(raws, asked.put, strict=True)
    ]
    return partition, encode(body | {"put": Raw(b"[" + b",".join(whole) + b"]")})


def _id_in(partition: int, partitions: int, now_ms: int) -> str:
    """A new id that lies in this partition."""
    while True:
        for id_ in new_ids(now_ms, 2 * partitions):
            if partition_of(id_, partitions) == partition:
                return id_
