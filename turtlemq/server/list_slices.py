"""Long lists of ids, cut into slices: an ack or extend of 100,000 messages takes a tenth of a second and more, and other requests
are served between two slices. Pure.

For the engine each slice is a request of its own: journaled as a whole, and not undone if a later one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

HANDLED_MAX = 10_000  # entries of a slice without failures: about 10 ms
FAILED_MAX = 1_000  # failures of a slice: as long, if all of them die

Leases = str | list[str] | None  # tokens: one for all entries, or one for each
Slice = tuple[list[str], Leases]


def ack_slices(acks: list[str], leases: Leases) -> tuple[list[Slice], list[str]]:
    """Slices of a list of acks, handled messages first; and the ids of entries that repeat another one. A short list is one
    slice, as it is: the engine finds its repetitions itself.

    >>> ack_slices(["a", "-b", "a"], None)
    ([(['a', '-b', 'a'], None)], [])
    >>> slices, repeated = ack_slices([f"-{n}" for n in range(1_500)] + ["a", "-7"], None)
    >>> [(acks[0], len(acks)) for acks, _ in slices], repeated
    ([('a', 1), ('-0', 1000), ('-1000', 500)], ['7'])
    """
    if len(acks) <= FAILED_MAX:
        return [(acks, leases)], []
    single, repeated = _first_rows(acks, leases)
    handled, failed = [i for i in single if acks[i][:1] != "-"], [i for i in single if acks[i][:1] == "-"]
    rows = [*_cut(handled, HANDLED_MAX), *_cut(failed, FAILED_MAX)]
    return [_pick(acks, leases, part) for part in rows], [acks[i].removeprefix("-") for i in repeated]


def extend_slices(ids: list[str], leases: Leases) -> tuple[list[Slice], list[str]]:
    """Slices of a list of ids, and the ids that are listed again.

    >>> [len(ids) for ids, _ in extend_slices(["x", *map(str, range(30_000)), "x"], None)[0]]
    [10000, 10000, 10000, 1]
    """
    if len(ids) <= HANDLED_MAX:
        return [(ids, leases)], []
    single, repeated = _first_rows(ids, leases)
    return [_pick(ids, leases, part) for part in _cut(single, HANDLED_MAX)], [ids[i] for i in repeated]


def _first_rows(entries: list[str], leases: Leases) -> tuple[Sequence[int], list[int]]:
    """Rows of a list, and rows that repeat another one. Different leases of one message are different entries."""
    keys = list(zip(entries, leases, strict=True)) if isinstance(leases, list) else entries
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    if len(first) == len(keys):
        return range(len(keys)), []
    return sorted(first.values()), [i for i, key in enumerate(keys) if first[key] != i]


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _pick(entries: list[str], leases: Leases, rows: Sequence[int]) -> Slice:
    return [entries[i] for i in rows], [leases[i] for i in rows] if isinstance(leases, list) else leases
