"""Lookup by id in the ready log: candidates from the tail and the tables, then the newest document of each id. Pure.

Tables and tail know hashes of ids. Ids are hashed once for each seed in use. Documents with one hash form a group, which is read
once for all wanted ids, in slices of bounded size: costs stay linear if many ids share one hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from turtlemq.model import I64, U64, Mask
from turtlemq.segment.ids import hash_any, hash_group_ids
from turtlemq.segment.log import Documents

READ_BYTES = 4 << 20  # of documents read at once
_READ_DOCUMENTS = 4_096  # read at once
PAIRS_MAX = 20_000  # of group and id for which a table without a seed is asked at once: 10 ms
_FLOODED = 64  # documents for each id: more are a sign of ids that were made to share a hash


class HasIds(Protocol):
    """Documents with hashes of their ids: a table, or the tail."""

    @property
    def seed(self) -> int: ...
    def may_hold(self, hashes: U64, /) -> Mask: ...
    def find(self, hash_: int, /) -> list[int]: ...
    def find_groups(self, shared: U64, /) -> list[int]: ...


class RetryAt(NamedTuple):
    """A retry in the ready log."""

    offset: int
    seq: int
    flags: int


class GroupLookup:
    """One lookup of documents of one group alone (id: group/id) for many ids in all groups. `names`: groups that may have such
    documents, for parts without a seed: these are asked for each group and id."""

    def __init__(self, ids: Sequence[bytes], names: Collection[str]) -> None:
        self._ids, self._names = ids, names
        self._shared: dict[int, U64] = {}  # bits of the hashes, by seed
        self._offsets: list[int] = []

    def __len__(self) -> int:
        """How many candidates there are."""
        return len(self._offsets)

    @property
    def pairs(self) -> int:
        """How many pairs of group and id a part without a seed is asked for."""
        return len(self._ids) * len(self._names)

    def ask(self, part: HasIds, first: int) -> None:
        """Note the candidates of a part whose first document has offset `first`."""
        if not part.seed:
            ids = [f"{name}/".encode() + id_ for name in self._names for id_ in self._ids]
            hashes = hash_any(ids, part.seed)
            ordinals = [ordinal for hash_ in np.unique(hashes[part.may_hold(hashes)]).tolist() for ordinal in part.find(hash_)]
        else:
            if part.seed not in self._shared:
                self._shared[part.seed] = hash_group_ids(self._ids, part.seed)
            ordinals = part.find_groups(self._shared[part.seed])
        self._offsets += [first + ordinal for ordinal in ordinals]

    def newest(self, read: Callable[[I64], Documents]) -> dict[str, RetryAt]:
        """The newest document of each group/id. `read`: documents at rising offsets, perhaps only the first."""
        return dict(self.all(read))  # offsets rise

    def all(self, read: Callable[[I64], Documents]) -> Iterator[tuple[str, RetryAt]]:
        """All documents, as group/id and place, by rising offset. `read`: documents at rising offsets, perhaps only the first."""
        offsets, wanted = np.unique(np.array(self._offsets, np.int64)), set(self._ids)
        while len(offsets):
            documents = read(offsets[:_READ_DOCUMENTS])
            fields = (documents.heads[name].tolist() for name in ("seq", "flags"))
            for row in zip(documents.ids(), offsets.tolist(), *fields, strict=False):
                if row[0].partition(b"/")[2] in wanted:
                    yield row[0].decode(), RetryAt(*row[1:])
            offsets = offsets[len(documents.good) :]


class Lookup:
    """One lookup of many ids. `hashes`: of the ids with this seed, if the caller has them."""

    def __init__(self, ids: Sequence[bytes], seed: int, hashes: U64 | None) -> None:
        self._ids = ids
        self._hashes = {} if hashes is None else {seed: hashes}  # by seed
        self._groups: dict[tuple[int, int], list[int]] = {}  # offsets by seed and hash
        self._wanted: dict[tuple[int, int], set[bytes]] = {}  # ids of each group that were asked for

    def ask(self, part: HasIds, first: int) -> bool:
        """Note the candidates of a part whose first document has offset `first`. True if they are far too many."""
        if part.seed not in self._hashes:
            self._hashes[part.seed] = hash_any(self._ids, part.seed)
        hashes = self._hashes[part.seed]
        by_hash: dict[int, set[bytes]] = {}
        for i in np.flatnonzero(part.may_hold(hashes)).tolist():
            by_hash.setdefault(int(hashes[i]), set()).add(self._ids[i])
        count = 0
        for hash_, ids in by_hash.items():
            if ordinals := part.find(hash_):
                count += len(ordinals)
                self._groups.setdefault((part.seed, hash_), []).extend(first + ordinal for ordinal in ordinals)
                self._wanted.setdefault((part.seed, hash_), set()).update(ids)
        return count > _FLOODED + 4 * len(by_hash)

    @property
    def offsets(self) -> list[int]:
        """All candidates, rising."""
        return sorted({offset for group in self._groups.values() for offset in group})

    def newest(self, read: Callable[[I64], Documents]) -> dict[int, int]:
        """The newest offset of each id that has one, by its index. `read`: documents at rising offsets, perhaps only the first.

        Of each group the newest document is read first. Mostly it is the one; if not, the rest of the group is read."""
        newest: dict[bytes, int] = {}
        if not self._groups:
            return {}
        for offsets in self._groups.values():
            offsets.sort(reverse=True)
        left = self._match(read, {key: offsets[:1] for key, offsets in self._groups.items()}, newest)
        self._match(read, {key: self._groups[key][1:] for key in left}, newest)
        return {i: newest[id_] for i, id_ in enumerate(self._ids) if id_ in newest}

    def _match(
        self, read: Callable[[I64], Documents], groups: dict[tuple[int, int], list[int]], newest: dict[bytes, int]
    ) -> list[tuple[int, int]]:
        """Read the documents of these groups, and note the newest offset of each wanted id. Returns the groups of which not every
        wanted id was met."""
        wanted = set().union(*(self._wanted[key] for key in groups))
        offsets = np.unique(np.array([offset for group in groups.values() for offset in group], np.int64))
        found: dict[int, bytes] = {}
        while len(offsets):
            documents = read(offsets[:_READ_DOCUMENTS])
            for offset, id_ in zip(offsets.tolist(), documents.ids(), strict=False):
                if id_ in wanted:
                    found[offset] = id_
                    newest[id_] = max(newest.get(id_, -1), offset)
            offsets = offsets[len(documents.good) :]
        return [key for key, group in groups.items() if self._wanted[key] - {found.get(offset) for offset in group}]
