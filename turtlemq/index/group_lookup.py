"""Lookup of documents that one group alone has: sleeping retries and dead letters, whose ids are group/id.

They are found for many messages in all groups at once. A message may have one in each of a thousand groups, so a lookup can be
bounded: then it is about the first of the messages, as many as the bound allows. Bodies are read for their checksums alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import bson
import numpy as np

from turtlemq.index.parts import IdQuery, Part, TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import I64, U64
from turtlemq.segment import fields, log
from turtlemq.segment import format as f
from turtlemq.segment.bloom import BloomFilter
from turtlemq.segment.ids import hash_any, hash_group_ids
from turtlemq.segment.table import Damaged

_PAIRS_MAX = 20_000  # of group and id for which a table without a seed is asked at once: 10 ms
_NO_META = bson.encode({})


@dataclass(frozen=True, slots=True)
class GroupDocument:
    """A document of one group alone, without its body unless that was asked for."""

    id: str  # group/id
    due_ms: int
    seq: int
    flags: int
    order: int
    expires_ms: int | None
    raw_meta: bytes
    document: f.Document | None = None  # with its body, if that was asked for

    @property
    def meta(self) -> dict[str, Any]:
        """The Broker's notes. 2 µs."""
        notes: dict[str, Any] = bson.decode(self.raw_meta)
        return notes

    @property
    def pair(self) -> tuple[str, str]:
        """The group, and the id of the message."""
        group, _, id_ = self.id.partition("/")
        return group, id_


def find_of_groups(
    segments: Segments, ids: Sequence[bytes], names: Collection[str], count_max: int | None = None, bodies: bool = False
) -> tuple[list[GroupDocument], int]:
    """The newest documents of one group alone for these ids in all groups, without those that were handed off; and the number of
    ids, from the first on, that this is about: fewer than all if there may be more than `count_max` documents. 0.2 µs for an id
    without any, for any number of groups.

    `names`: groups that may have such documents, for tables without a seed: these are asked for each group and id."""
    candidates, count = _candidates(segments, ids, names), len(ids)
    while count_max is not None and count > 1 and (many := sum(len(own) for _, own in candidates)) > count_max:
        count = max(1, min(count // 2, count * count_max // many))
        candidates = _candidates(segments, ids[:count], names)
    newest = _Newest(segments, set(ids[:count]), bodies)
    for part, ordinals in candidates:
        for _, read in segments.read_slices(part, ordinals):
            newest.note(read)
    return list(newest.documents.values()), count


class _Newest:
    """The newest documents among those read so far, by id."""

    def __init__(self, segments: Segments, wanted: set[bytes], bodies: bool) -> None:
        self._progress, self._wanted, self._bodies = segments.progress, wanted, bodies
        self._seqs: dict[bytes, int] = {}
        self.documents: dict[bytes, GroupDocument] = {}  # of those that were not handed off

    def note(self, read: log.Documents) -> None:
        due_ms, seqs = read.heads["due"].astype(np.int64), read.heads["seq"].astype(np.int64)
        handed_off, rows = self._progress.covers(due_ms, seqs).tolist(), dict[bytes, int]()
        for i, (id_, seq) in enumerate(zip(read.ids(), seqs.tolist(), strict=True)):
            if id_.partition(b"/")[2] in self._wanted and self._seqs.get(id_, -1) < seq:
                self._seqs[id_] = seq
                self.documents.pop(id_, None)
                rows.pop(id_, None)
                if not handed_off[i]:
                    rows[id_] = i
        if rows:
            which = np.fromiter(rows.values(), np.int64, len(rows))
            self.documents |= zip(rows, _documents(read, which, list(rows), self._bodies), strict=True)


def _documents(read: log.Documents, which: I64, ids: Sequence[bytes], bodies: bool) -> list[GroupDocument]:
    """The documents `which` of a read; `ids`: theirs."""
    buffer, heads = memoryview(read.buffer), read.heads[which]
    found = fields.locate(buffer, read.starts[which], heads)
    ends = found.meta + f.lengths(buffer, np.maximum(found.meta, 0))
    spans = zip(found.meta.tolist(), ends.tolist(), strict=True)
    metas = [bytes(buffer[at:end]) if at >= 0 else _NO_META for at, end in spans]
    expiries = [None if at == fields.ABSENT else at for at in found.optional["expires"].tolist()]
    columns = (heads[name].tolist() for name in ("due", "seq", "flags"))
    whole = [read.decode(i) if bodies else None for i in which.tolist()]
    rows = zip((id_.decode() for id_ in ids), *columns, found.order.tolist(), expiries, metas, whole, strict=True)
    return [GroupDocument(*row) for row in rows]


def _candidates(segments: Segments, ids: Sequence[bytes], names: Collection[str]) -> list[tuple[Part, I64]]:
    """Documents that are not ended and may have such an id, by their hashes."""
    shared, out = dict[tuple[BloomFilter | None, int], U64](), list[tuple[Part, I64]]()
    for part in reversed(segments.parts):
        found = part.find_groups(_shared_for(part, ids, shared)) if part.seed else _find_pairs(segments, part, ids, names)
        if found:
            ordinals = np.unique(np.array(found, np.int64))
            out.append((part, ordinals[part.alive(ordinals)]))
    return out


def _shared_for(part: Part, ids: Sequence[bytes], shared: dict[tuple[BloomFilter | None, int], U64]) -> U64:
    """The bits of hashes to ask a part for, with its seed, and through its Bloom filter. `shared` keeps those made before."""
    hashes = shared.get((part.filter, part.seed))
    if hashes is None:
        hashes = shared.get((None, part.seed))
        if hashes is None:
            hashes = shared[None, part.seed] = hash_group_ids(ids, part.seed)
        if part.filter is not None:
            hashes = shared[part.filter, part.seed] = hashes[part.filter.may_hold_groups(hashes)]
    return hashes


def _find_pairs(segments: Segments, part: Part, ids: Sequence[bytes], names: Collection[str]) -> list[int]:
    """Candidates of a part without a seed: each pair of group and id is asked for. A table that is asked for too many of them is
    built again with the seed of the Index."""
    if len(ids) * len(names) > _PAIRS_MAX and segments.seed and isinstance(part, TablePart):
        raise Damaged(f"{part.table.path.name}: it was made for few groups. {Damaged.__doc__}", table=part.table)
    pairs = [f"{name}/".encode() + id_ for name in names for id_ in ids]
    return part.find_many(IdQuery(hash_any(pairs, part.seed))) if pairs else []
