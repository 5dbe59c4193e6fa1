"""Sets of producers' own ids: those of documents that are staged and not yet published. Pure.

>>> ids = StagedIds()
>>> ids.add([b"a", b"b"])
>>> many = frozenset([b"c"])
>>> ids.add(many)
>>> b"c" in ids, ids.isdisjoint([b"b"]), sorted(ids.common({b"a", b"c", b"x"}))
(True, False, [b'a', b'c'])
>>> ids.remove([[b"a"], many])
>>> b"c" in ids, b"b" in ids
(False, True)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class StagedIds:
    """Ids of many batches. The frozen set of a large batch is kept as it is: copying 100,000 ids would hold the event loop for
    25 ms."""

    def __init__(self) -> None:
        self._single: set[bytes] = set()
        self._sets: list[frozenset[bytes]] = []

    def __bool__(self) -> bool:
        return bool(self._single or self._sets)

    def __contains__(self, id_: bytes) -> bool:
        return id_ in self._single or any(id_ in ids for ids in self._sets)

    def add(self, ids: Collection[bytes]) -> None:
        """Add the ids of one batch."""
        if isinstance(ids, frozenset):
            self._sets.append(ids)
        else:
            self._single.update(ids)

    def remove(self, batches: Iterable[Collection[bytes]]) -> None:
        """Remove the ids of batches that were added."""
        for ids in batches:
            if isinstance(ids, frozenset):
                self._sets = [other for other in self._sets if other is not ids]
            else:
                self._single.difference_update(ids)

    def clear(self) -> None:
        """Remove all ids."""
        self._single.clear()
        self._sets.clear()

    def isdisjoint(self, ids: Collection[bytes]) -> bool:
        """Whether none of these ids is here."""
        return self._single.isdisjoint(ids) and all(other.isdisjoint(ids) for other in self._sets)

    def common(self, ids: Collection[bytes]) -> set[bytes]:
        """Those of these ids that are here."""
        return self._single.intersection(ids).union(*(other.intersection(ids) for other in self._sets))
