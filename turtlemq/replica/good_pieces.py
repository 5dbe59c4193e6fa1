"""Damage does not spread: a copy that replaces a file keeps its own bytes where those of the leader have damage.

Bytes of the leader may have rotted since they were written. A segment that has come from there is checked by its own checksums.
Where it has damage, this copy's own bytes stay, if they pass their checksums, and if all bytes around them are equal.
"""

from __future__ import annotations

from pathlib import Path

from turtlemq.model import Damage
from turtlemq.replica.manifest import PIECE_BYTES
from turtlemq.segment.file_check import damage_in, is_whole
from turtlemq.storage import names
from turtlemq.storage.door import Door


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
        for hole in damage_in(door, named, whole=whole):
            _keep_own(door, old, named, fd, hole, whole)
    finally:
        door.remove(named)


def _keep_own(door: Door, old: Path, new: Path, fd: int, hole: Damage, whole: bool) -> None:
    """Take the own bytes of a damaged stretch, if there is less damage with them."""
    begin, end = hole.position, hole.position + hole.length
    first = begin // PIECE_BYTES * PIECE_BYTES
    size = -(-end // PIECE_BYTES) * PIECE_BYTES - first
    own, theirs = door.read(old, first, size), door.read(new, first, size)
    begin, end = begin - first, end - first
    if len(own) < end or own[:begin] != theirs[:begin] or own[end : len(theirs)] != theirs[end : len(own)]:
        return
    before = len(damage_in(door, new, whole=whole))
    door.write(fd, new, hole.position, [own[begin:end]])
    if len(damage_in(door, new, whole=whole)) >= before:
        door.write(fd, new, hole.position, [theirs[begin:end]])
