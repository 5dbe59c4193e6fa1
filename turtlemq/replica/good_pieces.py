"""Damage does not spread: a copy that replaces a file keeps its own bytes where those of the leader have damage.

Bytes of the leader may have rotted since they were written. A segment that has come from there is checked by its own checksums.
Where it has damage, this copy's own bytes stay, if they pass their checksums, and if the bytes before them and right behind them
are equal, as far as these have no damage.
"""

from __future__ import annotations

from pathlib import Path

from turtlemq.model import Damage
from turtlemq.replica.manifest import PIECE_BYTES
from turtlemq.segment.file_check import damage_in, is_checkable, is_whole
from turtlemq.storage import names
from turtlemq.storage.door import Door

NEAR_BYTES = 4096  # behind a damaged stretch: another history would differ there


def damage_of(door: Door, path: Path) -> list[Damage]:
    """The damage of a file in its place, by its own checksums. A file without checksums has none. Nor has a cache: a power cut of
    the leader may have cut it short, and it is made again from its segment when an engine opens the folder."""
    known = names.parse(path.name)
    if not is_checkable(path.name) or (known is not None and known.what != "bson"):
        return []
    return damage_in(door, path, whole=is_whole(path.name, door.names(path.parent)))


def keep_good_pieces(door: Door, old: Path, new: Path, fd: int) -> None:
    """Put bytes of `old`, the file of this copy, into `new`, which came from the leader and has the descriptor `fd`."""
    known = names.parse(old.name)
    if known is None or known.what != "bson" or known.suffix:
        return
    named = new.with_name(old.name)  # the check goes by the name of a file
    door.remove(named)
    door.link(new, named)
    try:
        whole = is_whole(old.name, door.names(old.parent))
        holes = damage_in(door, named, whole=whole)
        for hole in holes:
            _keep_own(door, old, named, fd, hole, holes, whole)
    finally:
        door.remove(named)


def _keep_own(door: Door, old: Path, new: Path, fd: int, hole: Damage, holes: list[Damage], whole: bool) -> None:
    """Take the own bytes of a damaged stretch, if there is less damage with them."""
    begin, end = hole.position, hole.position + hole.length
    first = begin // PIECE_BYTES * PIECE_BYTES
    size = end + NEAR_BYTES - first
    own, theirs = door.read(old, first, size), door.read(new, first, size)
    common = min(len(own), len(theirs))
    if first + common < end or _without(own[:common], first, holes) != _without(theirs[:common], first, holes):
        return
    before = len(damage_in(door, new, whole=whole))
    door.write(fd, new, begin, [own[begin - first : end - first]])
    if len(damage_in(door, new, whole=whole)) >= before:
        door.write(fd, new, begin, [theirs[begin - first : end - first]])


def _without(data: bytes, first: int, holes: list[Damage]) -> bytes:
    """Bytes of a file from `first` on, with zeros in the place of all holes."""
    left = bytearray(data)
    for hole in holes:
        begin, end = max(0, hole.position - first), max(0, min(len(left), hole.position + hole.length - first))
        left[begin:end] = bytes(max(0, end - begin))
    return bytes(left)
