"""A read-only view of the ready log, for the topic: documents by offset or id, and facts about them.

The state of a message in a group follows from these facts, and is decided in `turtlemq.standing`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from turtlemq.broker.group import Group
from turtlemq.broker.ready_lookup import READ_BYTES
from turtlemq.broker.state import BrokerState
from turtlemq.broker.visibility import is_void
from turtlemq.model import I64, U64, Mask
from turtlemq.segment import format as f
from turtlemq.segment.log import Documents


class ReadyView:
    """The ready log of one topic, to be read."""

    def __init__(self, state: BrokerState) -> None:
        self._log, self._visibility, self._groups = state.logs.ready, state.visibility, state.groups

    @property
    def first_offset(self) -> int:
        """Offset of the oldest document that is retained."""
        return self._log.first_offset

    @property
    def next_offset(self) -> int:
        """Offset that the next document gets."""
        return self._log.next_offset

    @property
    def is_damaged(self) -> bool:
        """Whether damage was found, so that it may lack handoffs that the Index has made."""
        return bool(self._log.damage)

    def offset_at(self, ready_ms: int) -> int:
        """The first offset that became ready at or after a time."""
        return self._log.offset_at(ready_ms)

    def read(self, offsets: I64, bytes_max: int | None = None) -> tuple[Documents, I64]:
        """Documents at rising offsets, checked, and their ready times; no more than `bytes_max`, but at least one."""
        return self._log.read(offsets, bytes_max)

    def find_many(self, ids: Sequence[bytes], hashes: U64 | None = None) -> dict[int, int]:
        """The ids that the log knows, as index → newest offset. `hashes`: of the ids, with the seed of the topic, if the caller
        has them."""
        return self._log.find_many(ids, hashes)

    def find_ids(self, ids: Sequence[str]) -> dict[str, int]:
        """The newest offset of each id that has one."""
        usable = [id_ for id_ in ids if id_.isprintable()]
        offsets = self._log.find_many([id_.encode() for id_ in usable]) if usable else {}
        return {usable[i]: offset for i, offset in offsets.items()}

    def valid_retries(self, ids: Sequence[str], count_max: int | None = None) -> tuple[dict[tuple[str, str], int], int]:
        """The newest retry of each message for each group that is neither void nor cancelled, as (group, id) → offset; and for
        how many of the ids, from the first on: fewer than all if there may be more than `count_max` retries."""
        retries: dict[tuple[str, str], int] = {}
        if not self._visibility.has_restricted or not self._groups:
            return retries, len(ids)
        raw = [id_.encode() if id_.isprintable() else b"\n" for id_ in ids]  # no id has that
        newest, count = self._log.find_of_groups(raw, self._groups, count_max)
        for key, retry in newest.items():
            name, _, id_ = key.partition("/")
            group = self._groups.get(name)
            if group is None:
                continue
            seq = 0 if retry.flags & f.MOVED else retry.seq  # a copy by compaction: look at it
            moved = not group.moves or seq <= group.moves[-1][0]  # perhaps since the retry was written
            valid = self._newest_valid(group, key, retry.offset) if moved else retry.offset
            if valid is not None and valid not in self._visibility.cancelled:
                retries[name, id_] = valid
        return retries, count

    def all_retries(self, ids: Sequence[str]) -> dict[int, str]:
        """Every retry of these messages in groups that exist and that was not cancelled, also void and settled ones: by offset,
        the name of its group."""
        if not self._visibility.has_restricted:
            return {}
        retries = self._log.all_of_groups([id_.encode() for id_ in ids], self._groups)
        by_offset = {retry.offset: key.partition("/")[0] for key, retry in retries}
        gone = self._visibility.cancelled
        return {offset: name for offset, name in by_offset.items() if name in self._groups and offset not in gone}

    def documents_of(self, id_: str) -> list[tuple[int, int, f.Document]]:
        """Every document with this id that is retained, notices and earlier messages included, oldest first: each with its offset
        and its ready time."""
        return [row for row in self._decoded(self._log.offsets_of(id_.encode())) if row[2].id == id_]

    def retries_of(self, id_: str) -> list[tuple[int, int, f.Document]]:
        """Every retry of a message that is retained, for any group: each with its offset and its ready time."""
        if not self._visibility.has_restricted:
            return []
        return list(self._decoded([retry.offset for _, retry in self._log.all_of_groups([id_.encode()], self._groups)]))

    def _decoded(self, at: Sequence[int]) -> Iterator[tuple[int, int, f.Document]]:
        """The undamaged documents at rising offsets, with their ready times."""
        offsets = np.array(at, np.int64)
        while len(offsets):
            read, times = self._log.read(offsets, READ_BYTES)
            for i, (offset, ready_ms) in enumerate(zip(offsets.tolist(), times.tolist(), strict=False)):
                if read.good[i]:
                    yield offset, ready_ms, read.decode(i)
            offsets = offsets[len(times) :]

    def heads(self, offsets: I64) -> np.ndarray[Any, np.dtype[Any]]:
        """The fixed fields of documents at rising offsets."""
        return self._visibility.heads(offsets)

    def _newest_valid(self, group: Group, key: str, offset: int) -> int | None:
        """The newest retry that is not void, from the newest of all at `offset` back. Each retry names the offset that its
        message had left, which is that of the retry before it: after a move between two of them the newer is void, and the older
        comes again."""
        while offset >= self._log.first_offset:
            read, _ = self._log.read(np.array([offset]))
            if not read.good[0]:
                return None
            retry = read.decode(0)
            if retry.id != key:  # the message itself
                return None
            if not is_void(group, retry):
                return offset
            offset = min(int(retry.meta["offset"]), offset - 1)
        return None

    def is_cancelled_ready(self, offset: int) -> bool:
        """Whether the message at this offset was cancelled while it was ready."""
        return offset in self._visibility.cancelled

    def cancelled_among(self, offsets: Collection[int]) -> set[int]:
        """Those of the offsets whose message was cancelled, while it was ready or while it slept."""
        return self._visibility.cancelled_among(offsets)

    def is_unfetched(self, group: Group, offset: int) -> bool:
        """Whether the cursor of a group has still to pass this document. A retry that waits in memory is not unfetched."""
        return self._visibility.is_unfetched(group, offset)

    def are_unfetched(self, groups: Sequence[Group], offsets: I64) -> Mask:
        """Whether the cursors of groups, a column each, have still to pass documents, a row each."""
        return self._visibility.are_unfetched(groups, offsets)
