"""Differences between two copies of the same files at the same LSN, by the checksums of their pieces. Pure.

>>> here = [FileState("FORMAT", 2, [7]), FileState("topic/t/offset", 9_000_000, [1, 2, 3])]
>>> there = [FileState("topic/t/offset", 9_000_000, [1, 5, 3])]
>>> for difference in differences(here, there):
...     print(difference.path, difference.ranges, difference.why)
FORMAT [(0, 2)] it is missing
topic/t/offset [(4194304, 8388608)] its bytes differ
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from turtlemq.replica.manifest import PIECE_BYTES, FileState, is_unfinished, piece_count


class Difference(NamedTuple):
    """A file of a copy that is not as the leader's. `ranges`: the bytes that differ, from and to, by pieces of 4 MiB."""

    path: str
    ranges: list[tuple[int, int]]
    why: str


def counts(path: str) -> bool:
    """Do all copies have this file? Another process of the leader may be writing an unfinished one."""
    return not is_unfinished(path)


def differences(own: Iterable[FileState], other: Iterable[FileState]) -> list[Difference]:
    """Files of the other copy that are not as the own ones, sorted by path. Unfinished files do not count."""
    here, there = ({file.path: file for file in files if counts(file.path)} for files in (own, other))
    found = (_difference(path, here.get(path), there.get(path)) for path in sorted(here.keys() | there.keys()))
    return [difference for difference in found if difference is not None]


def overlaps(position: int, length: int, start: int, end: int) -> bool:
    """Have a damaged stretch and a range bytes in common? A stretch without bytes stands for its position.

    >>> overlaps(10, 5, 14, 20), overlaps(10, 5, 15, 20), overlaps(10, 0, 0, 11)
    (True, False, True)
    """
    return position < end and position + max(1, length) > start


def _difference(path: str, own: FileState | None, other: FileState | None) -> Difference | None:
    if own is None or other is None:
        size = (own or other or FileState(path, 0, [])).size
        return Difference(path, [(0, size)], "it is missing" if other is None else "only this copy has it")
    if own == other:
        return None
    size = max(own.size, other.size)
    pieces = range(piece_count(size))
    wrong = [piece for piece in pieces if own.sums[piece : piece + 1] != other.sums[piece : piece + 1]]
    why = "its bytes differ" if own.size == other.size else f"it has {other.size:,} bytes, not {own.size:,}"
    return Difference(path, _ranges(wrong, size), why)


def _ranges(pieces: list[int], size: int) -> list[tuple[int, int]]:
    """Neighbouring pieces as one range."""
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        start, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, size)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((start, end))
    return ranges
