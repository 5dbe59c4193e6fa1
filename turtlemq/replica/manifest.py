"""Plans of a reconcile: which bytes a copy pulls from its leader, and which records it applies behind them. Pure.

The leader links its files and notes their lengths, one *unit* after another, each at an LSN of its own. A unit is the folder of a
topic; files beside the topics are the unit "". The manifest lists units, folders, and files with checksums of their pieces.
A copy with these files follows the stream from the first of these LSNs on, and skips records that a unit has already (`CatchUp`).
It is complete when it has passed the last of them: then all units are at one LSN.

>>> wanted = FileState("FORMAT", 2, [7])
>>> plan_file(wanted, 2, [7]).action, plan_file(wanted, 5, [7]).action, plan_file(wanted, None, []).action
(<Action.KEEP: 'keep'>, <Action.CUT: 'cut'>, <Action.ANEW: 'anew'>)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from turtlemq.replica.records import DATA_BYTES_MAX, Kind, OutOfStep, Record
from turtlemq.replica.shared_files import is_shared
from turtlemq.storage import names

PIECE_BYTES = 4 << 20  # of a file that one checksum covers
_FRAME_BYTES = DATA_BYTES_MAX // 2  # of a part of the manifest, by a rough count


class FileState(Struct, frozen=True):
    """A file of the leader: its length, and the xxh3 of each piece of it."""

    path: Annotated[str, Meta(max_length=512)]
    size: Annotated[int, Meta(ge=0)]
    sums: list[int]


class UnitState(Struct, frozen=True):
    """A unit of the leader's folder, and the last record that its files have."""

    name: Annotated[str, Meta(max_length=512)]
    lsn: Annotated[int, Meta(ge=0)]


def unit_of(path: str) -> str:
    """The unit that a file or folder belongs to.

    >>> unit_of("topic/orders/dead/offset"), unit_of("topic/orders"), unit_of("topic"), unit_of("FORMAT")
    ('topic/orders', 'topic/orders', '', '')
    """
    parts = path.split("/", 2)
    return "/".join(parts[:2]) if len(parts) > 1 else ""


def piece_count(size: int) -> int:
    """How many pieces a file has."""
    return -(-size // PIECE_BYTES)


# Files


class Action(Enum):
    """The change of one file."""

    KEEP = "keep"
    CUT = "cut"  # it is longer than the leader's, and equal so far
    EXTEND = "extend"  # it is shorter, and its whole pieces are equal
    ANEW = "anew"  # bytes in it differ, or it does not exist: readers may hold the old file


class FilePlan(NamedTuple):
    """The change of one file. `number`: its place in the manifest. `pulled`: the pieces that come from the leader."""

    number: int
    wanted: FileState
    action: Action
    pulled: tuple[int, ...]
    own_size: int  # 0 if there is no file

    @property
    def pull_bytes(self) -> int:
        return sum(min(PIECE_BYTES, self.wanted.size - piece * PIECE_BYTES) for piece in self.pulled)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each part that is asked for: a frame holds 1 MiB."""
        for piece in self.pulled:
            end = min((piece + 1) * PIECE_BYTES, self.wanted.size)
            for at in range(piece * PIECE_BYTES, end, DATA_BYTES_MAX):
                yield at, min(DATA_BYTES_MAX, end - at)


def plan_file(wanted: FileState, own_size: int | None, own_sums: list[int], number: int = 0) -> FilePlan:
    """Compare one file. `own_sums`: of the pieces of the own file, as far as the leader's file is long."""
    size, sums = wanted.size, wanted.sums
    if own_size is None:
        return FilePlan(number, wanted, Action.ANEW, tuple(range(len(sums))), 0)
    whole = min(own_size, size) // PIECE_BYTES
    equal = piece_count(size) if own_size >= size else whole
    differing = [piece for piece in range(equal) if own_sums[piece] != sums[piece]]
    if not differing:
        if own_size < size:
            return FilePlan(number, wanted, Action.EXTEND, tuple(range(whole, len(sums))), own_size)
        return FilePlan(number, wanted, Action.KEEP if own_size == size else Action.CUT, (), own_size)
    return FilePlan(number, wanted, Action.ANEW, (*differing, *range(equal, len(sums))), own_size)


# Folders


@dataclass(frozen=True, slots=True)
class Names:
    """Changes of names before any file is written. Removed folders are in an order in which they can be removed."""

    removed_files: list[str]
    removed_folders: list[str]
    new_folders: list[str]


def plan_names(files: Iterable[str], folders: Collection[str], own_files: Collection[str], own_folders: Collection[str]) -> Names:
    """Compare the names of shared files and folders."""
    wanted = set(files)
    return Names(
        sorted(set(own_files) - wanted),
        sorted(set(own_folders) - set(folders), key=lambda path: (-path.count("/"), path)),
        sorted(set(folders) - set(own_folders), key=lambda path: (path.count("/"), path)),
    )


def check_paths(paths: Iterable[str]) -> None:
    """Raise `OutOfStep` for a path that no copy has."""
    for path in paths:
        if not path or not is_shared(path):
            raise OutOfStep(f"the manifest names {path!r}, which is no replicated file")


def frames_of(files: Iterable[FileState]) -> Iterator[list[FileState]]:
    """The files in groups that fit into a frame each; at least one group."""
    group: list[FileState] = []
    size = 0
    for file in files:
        weight = 64 + 6 * len(file.path) + 21 * len(file.sums)
        if group and size + weight > _FRAME_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += weight
    yield group


def is_unfinished(path: str) -> bool:
    """Is this a file that another process of the leader may be writing? Its content does not count until a record names it."""
    return path.endswith(names.TMP)


# Records


class Verdict(Enum):
    """The use of a record while a copy catches up."""

    APPLY = "apply"
    SKIP = "skip"  # the files have it already
    REMOVE = "remove"  # a folder was renamed, and is here under its new name already: only the old one goes


class CatchUp:
    """Which records behind `lsn` a copy applies whose units were linked at different LSNs. A unit that is not listed did not
    exist at `lsn`: all records of it count. Call `verdict` for each record, in order."""

    def __init__(self, lsn: int, units: Mapping[str, int]) -> None:
        self.lsn, self._units = lsn, dict(units)
        self.last = max(units.values(), default=lsn)
        self._missing: set[str] = set()  # dropped folders that this copy never had

    def is_complete(self, lsn: int) -> bool:
        """Are all units at this LSN? A folder that this copy lacks must be gone on the leader as well."""
        return lsn >= self.last and not self._missing

    def verdict(self, record: Record) -> Verdict:
        kind, lsn, unit = record.head.kind, record.head.lsn, unit_of(record.path)
        if kind == Kind.SYNCED:
            return Verdict.APPLY
        if kind == Kind.RENAME and (target := unit_of(record.data.decode(errors="replace"))) != unit:
            return self._moved(unit, target, lsn)
        if unit in self._missing:
            if kind == Kind.RMDIR and record.path == unit:
                self._missing.discard(unit)
            return Verdict.SKIP
        return Verdict.APPLY if self._counts(unit, lsn) else Verdict.SKIP

    def _moved(self, unit: str, target: str, lsn: int) -> Verdict:
        """A topic was dropped: its folder became another unit."""
        if self._counts(unit, lsn):
            return Verdict.APPLY if self._counts(target, lsn) else Verdict.REMOVE
        if self._counts(target, lsn):
            self._missing.add(target)
        return Verdict.SKIP

    def _counts(self, unit: str, lsn: int) -> bool:
        return lsn > self._units.get(unit, self.lsn)
