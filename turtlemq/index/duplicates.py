"""Duplicates: which ids of a batch are held already, or staged by another batch, or stand twice in it.

`known_elsewhere` finds the ids that count as held although the Index does not hold them: those of messages that were handed off.
Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np

from turtlemq.errors import InvalidId
from turtlemq.index import lookup
from turtlemq.index.columns import may_repeat
from turtlemq.index.segments import Segments
from turtlemq.index.staged_ids import StagedIds
from turtlemq.model import U64
from turtlemq.segment.ids import SERVER_ID_BYTES, hash_id, hash_texts, server_seq

KnownIds = Callable[[Sequence[bytes], U64], Iterable[int]]  # from ids and their hashes to the indexes of known ids


class NewIds(NamedTuple):
    """The ids of a batch in which each is new, and their hashes."""

    raw: list[bytes]
    hashes: U64


GIVEN_BY_SERVER = NewIds([], np.empty(0, np.uint64))  # of a batch without ids


def all_new(
    segments: Segments, staged: StagedIds, given: Sequence[str | None], known_elsewhere: KnownIds | None
) -> NewIds | None:
    """Fast path without a loop: ids as bytes, and their hashes. None unless every message has an id, and each is new and unlike a
    server-given one."""
    try:
        raw = list(map(str.encode, cast("Sequence[str]", given)))
    except TypeError:  # a message without id
        return None
    hashes = hash_texts(raw, segments.seed)
    like_given = SERVER_ID_BYTES in set(map(len, raw)) and any(server_seq(r.decode()) is not None for r in raw)
    if like_given or may_repeat(raw, hashes):
        return None
    if (staged and not staged.isdisjoint(raw)) or lookup.find_many(segments, raw, hashes):
        return None
    if known_elsewhere is not None and len(list(known_elsewhere(raw, hashes))):
        return None
    return NewIds(raw, hashes)


def leave_out(
    segments: Segments, staged: StagedIds, given: Sequence[str | None], next_seq: int, known_elsewhere: KnownIds | None
) -> tuple[list[bytes], list[int], list[int]]:
    """Ids as bytes, their hashes (0 for messages without id), and the indexes of messages that are not held yet."""
    raw = [b"" if id_ is None else id_.encode() for id_ in given]
    hashes: list[int] = np.where([bool(r) for r in raw], hash_texts(raw, segments.seed), np.uint64(0)).tolist()
    first: dict[bytes, int] = {}
    held: set[int] = set()
    covers = segments.progress.covers_one
    for i, r in enumerate(raw):
        if not r:
            continue
        if r in staged or first.setdefault(r, i) != i:
            held.add(i)
        elif len(r) == SERVER_ID_BYTES and (seq := server_seq(r.decode())) is not None:
            if seq >= next_seq:
                raise _is_given(given[i], i)
            hashes[i] = hash_id(r.decode(), segments.seed)
            hit = lookup.find(segments, r.decode())
            if hit is not None and (known_elsewhere is None or not covers(hit.document.due_ms, hit.document.seq)):
                held.add(i)
    unsure = [i for i in first.values() if i not in held]
    texts, numbers = [raw[i] for i in unsure], np.array([hashes[i] for i in unsure], np.uint64)
    places = lookup.find_many(segments, texts, numbers)  # also ids whose end is staged: that may fail
    if known_elsewhere is not None:  # the receiver of handed-off messages knows their ids as long as they count
        places = {k: place for k, place in places.items() if not covers(place.due_ms, place.seq)}
        held.update(unsure[k] for k in known_elsewhere(texts, numbers))
    held.update(unsure[k] for k in places)
    return raw, hashes, [i for i in range(len(raw)) if i not in held]


def check_not_given(given: Sequence[str | None], next_seq: int) -> None:
    """Raise `InvalidId` for an id that the server is going to give."""
    for i, id_ in enumerate(given):
        if id_ is not None and len(id_) == SERVER_ID_BYTES and (seq := server_seq(id_)) is not None and seq >= next_seq:
            raise _is_given(id_, i)


def _is_given(id_: str | None, i: int) -> InvalidId:
    return InvalidId(f"{id_!r} is an id that the server is going to give; choose another.", index=i)
