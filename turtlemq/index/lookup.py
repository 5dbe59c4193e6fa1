"""Lookup by id: the newest document of an id, or of many, in the parts of an Index.

A part gives candidates, documents whose id has the wanted hash; the ids themselves decide. Each part has the seed with which its
ids were hashed: ids are hashed once for each seed in use. Costs stay linear if many ids share one hash: each candidate is read
once for all wanted ids, in slices of bounded size.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import IdQuery, Part, TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import U64
from turtlemq.segment import format as f
from turtlemq.segment.bloom import BloomFilter
from turtlemq.segment.ids import SERVER_ID_BYTES, hash_any, hash_id, hash_texts, server_seq
from turtlemq.segment.table import Damaged

_ONE_BY_ONE = 4  # candidates of one id that are read alone: mostly there is one
_KEPT_BYTES = 4 << 20  # of documents that a lookup keeps
_FLOODED = 64  # candidates of one id, at which a table with another seed than the folder's is built again

Queries = dict[tuple[BloomFilter | None, int], IdQuery]  # by filter and seed


class Hit(NamedTuple):
    """A document that was found, and its place."""

    part: Part
    ordinal: int
    document: f.Document


class Place(NamedTuple):
    """The place of a document that was found, and its fixed fields."""

    raw_id: bytes
    due_ms: int
    seq: int
    flags: int
    part: Part
    ordinal: int
    raw: bytes | None = None  # the document, if it was asked for and there was room

    @property
    def id(self) -> str:
        return self.raw_id.decode()


def find(segments: Segments, id_: str) -> Hit | None:
    """The newest document of an id, unless it was cancelled or replaced. 2 µs a part, and a pread for the hit."""
    if not id_.isprintable():  # cannot be an id, and perhaps has no UTF-8 form
        return None
    seq = server_seq(id_)
    hinted = None if seq is None else segments.part_of(seq)
    if hinted is not None:
        assert seq is not None
        ordinal = hinted.find_seq(seq) if isinstance(hinted, Memtable) else None
        ordinals = hinted.find(hash_id(id_, hinted.seed)) if ordinal is None else (ordinal,)
        if (hit := _verify(segments, hinted, ordinals, id_)) is not None:
            return hit
    hashes: dict[int, int] = {}  # by seed
    maybe: dict[BloomFilter | None, bool] = {None: True}
    for part in reversed(segments.parts):
        filter_, hash_ = part.filter, hashes.get(part.seed)
        if hash_ is None:
            hash_ = hashes[part.seed] = hash_id(id_, part.seed)
        if filter_ not in maybe:
            assert filter_ is not None
            maybe[filter_] = filter_.may_hold_one(hash_)
        if maybe[filter_] and (ordinals := part.find(hash_)) and (hit := _verify(segments, part, ordinals, id_)) is not None:
            return hit
    return None


def _verify(segments: Segments, part: Part, ordinals: Sequence[int], id_: str) -> Hit | None:
    """The first of these candidates that is not ended and has this id."""
    if len(ordinals) > _FLOODED:
        _refuse_flooded(segments, part, len(ordinals), 0)
    for ordinal in ordinals[:_ONE_BY_ONE]:
        if part.alive_one(ordinal):
            document = segments.read_one(part, ordinal)
            if document is not None and document.id == id_:
                return Hit(part, ordinal, document)
    if len(ordinals) > _ONE_BY_ONE:
        rest, raw = np.array(ordinals[_ONE_BY_ONE:]), id_.encode()
        for chosen, read in segments.read_slices(part, rest[part.alive(rest)]):
            if raw in (ids := read.ids()):
                return Hit(part, int(chosen[ids.index(raw)]), read.decode(ids.index(raw)))
    return None


def find_many(
    segments: Segments, ids: Sequence[bytes], hashes: U64, after_seq: int = -1, kept: Set[bytes] = frozenset()
) -> dict[int, Place]:
    """Held ids, as index in `ids` → place of the newest document. 0.2 µs for an id that is not held. `hashes`: of the ids, with
    the seed of the Index. Parts in which nothing is newer than `after_seq` are skipped. `kept`: ids whose documents, which are
    read anyway, are wanted, as far as they fit into _KEPT_BYTES."""
    room = _KEPT_BYTES
    places: dict[bytes, Place] = {}
    wanted: set[bytes] = set()
    queries: Queries = {(None, segments.seed): IdQuery(hashes)}
    for part in reversed(segments.parts):
        if part.last_seq <= after_seq:
            continue
        query = _query_for(part, ids, queries)
        candidates = part.find_many(query)
        if not candidates:
            continue
        if len(candidates) > _FLOODED:
            _refuse_flooded(segments, part, len(candidates), len(query))
        wanted, ordinals = wanted or set(ids), np.array(sorted(candidates))
        for chosen, read in segments.read_slices(part, ordinals[part.alive(ordinals)]):
            fields = (read.heads[name].tolist() for name in ("due", "seq", "flags"))
            rows = zip(read.ids(), *fields, chosen.tolist(), strict=True)
            for i, (id_, due_ms, seq, flags, ordinal) in enumerate(rows):
                if id_ in wanted and (id_ not in places or places[id_].seq < seq):
                    raw = read.raw(i) if id_ in kept and room > 0 else None
                    room -= 0 if raw is None else len(raw)
                    places[id_] = Place(id_, due_ms, seq, flags, part, ordinal, raw)
        if len(places) == len(wanted):
            break
    return {i: places[id_] for i, id_ in enumerate(ids) if id_ in places} if places else {}


def find_any(segments: Segments, ids: Sequence[str], kept: Set[str] = frozenset()) -> dict[str, Place]:
    """The places of the newest documents of ids, server-given or not; those that are not held are left out. `kept`: as for
    `find_many`."""
    places: dict[str, Place] = {}
    own: list[str] = []
    for id_ in ids:
        if not id_.isprintable() or (len(id_) == SERVER_ID_BYTES and server_seq(id_) is not None) or len(ids) == 1:
            if (hit := find(segments, id_)) is not None:
                document = hit.document
                places[id_] = Place(id_.encode(), document.due_ms, document.seq, document.flags, hit.part, hit.ordinal)
        else:
            own.append(id_)
    if own:
        raw = [id_.encode() for id_ in own]
        found = find_many(segments, raw, hash_texts(raw, segments.seed), kept={id_.encode() for id_ in kept})
        places |= {own[i]: place for i, place in found.items()}
    return places


def read_places(segments: Segments, places: dict[int, Place]) -> dict[int, f.Document]:
    """The documents at these places, by the same keys; damaged ones are left out."""
    by_part: dict[Part, list[tuple[int, int]]] = {}
    for key, place in places.items():
        by_part.setdefault(place.part, []).append((place.ordinal, key))
    documents: dict[int, f.Document] = {}
    for part, rows in by_part.items():
        rows.sort()  # so that reads go forward
        ordinals = np.array([ordinal for ordinal, _ in rows])
        for (_, key), document in zip(rows, segments.read_many(part, ordinals), strict=True):
            if document is not None:
                documents[key] = document
    return documents


def _query_for(part: Part, ids: Sequence[bytes], queries: Queries) -> IdQuery:
    """The query for a part: with hashes of its seed, and through its Bloom filter. `queries` keeps those made before."""
    query = queries.get((part.filter, part.seed))
    if query is None:
        query = queries.get((None, part.seed))
        if query is None:
            query = queries[None, part.seed] = IdQuery(hash_any(ids, part.seed))
        if part.filter is not None:
            query = queries[part.filter, part.seed] = query.through(part.filter)
    return query


def _refuse_flooded(segments: Segments, part: Part, candidates: int, asked: int) -> None:
    """Raise `Damaged` if too many ids of a table share their hashes, so that it is built again with the seed of the Index. A
    client may have filled a table of an older version on purpose: it knew the hashes."""
    if part.seed != segments.seed and candidates > _FLOODED + 4 * asked and isinstance(part, TablePart):
        raise Damaged(f"{part.table.path.name}: too many ids have one hash. {Damaged.__doc__}", table=part.table)
