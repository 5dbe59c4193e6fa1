"""A cache of the documents of small handoffs: a fetch right after a handoff reads no file, and checks no checksum.

Emptied by each sync, so that an idle topic holds no memory.
"""

from __future__ import annotations

_BYTES_MAX = 512 << 10  # of each of two generations: when the younger is full, the older is dropped
_ENTRY_BYTES = 250  # memory of an entry beside the document's bytes


class RecentDocuments:
    """Documents and their ready times, by ready offset. 0.2 µs each to add, 0.1 µs to find."""

    def __init__(self) -> None:
        self._young: dict[int, tuple[bytes, int]] = {}
        self._old: dict[int, tuple[bytes, int]] = {}
        self._bytes = 0  # of `_young`

    def add(self, first: int, ready_ms: int, raw: bytes, starts: list[int]) -> None:
        """Add the documents of one batch, from offset `first` on."""
        size = len(raw) + _ENTRY_BYTES * len(starts)
        if size > _BYTES_MAX:
            return
        if self._bytes + size > _BYTES_MAX:
            self._old, self._young, self._bytes = self._young, {}, 0
        self._bytes += size
        for offset, (begin, end) in enumerate(zip(starts, [*starts[1:], len(raw)], strict=True), first):
            self._young[offset] = (raw[begin:end], ready_ms)

    def find(self, first: int, last: int) -> list[tuple[bytes, int]] | None:
        """The documents in [first, last) with their ready times; None unless all of them are here."""
        try:
            return [self._young[offset] for offset in range(first, last)]
        except KeyError:
            entries = [self._young.get(offset) or self._old.get(offset) for offset in range(first, last)]
            present = [entry for entry in entries if entry is not None]
            return present if len(present) == len(entries) else None

    def clear(self) -> None:
        if self._bytes or self._old:
            self._young, self._old, self._bytes = {}, {}, 0
