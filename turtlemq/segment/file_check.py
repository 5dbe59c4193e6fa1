"""The check of one file by its own checksums: documents of segments, blocks of tables, other caches and checkpoints.

>>> is_checkable("delay_0000000000.bson"), is_checkable("topic.toml"), is_checkable("delay_0000000000.bson.tmp")
(True, False, False)
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from turtlemq.errors import TurtleError
from turtlemq.model import Damage
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.table import open_table
from turtlemq.storage import names
from turtlemq.storage.door import Door

_CHECKED = (names.OFFSET, names.CLEAN)  # files that are one document with a checksum


def is_checkable(name: str) -> bool:
    """Has a file of this name checksums of its own?"""
    known = names.parse(name)
    return name in _CHECKED if known is None else not known.suffix and known.what != "filter"


def is_whole(name: str, siblings: Collection[str]) -> bool:
    """Is this a segment that is not written any more, as a later one of its kind exists? Then nothing in it can be torn.

    >>> is_whole("ready_0000000000.bson", ["ready_0000000000.bson", "ready_0000000009.bson"])
    True
    """
    known = names.parse(name)
    others = (names.parse(sibling) for sibling in siblings)
    return known is not None and any(
        other is not None and other.what == "bson" and not other.suffix and other.kind == known.kind and other.base > known.base
        for other in others
    )


def damage_in(door: Door, path: Path, *, whole: bool) -> list[Damage]:
    """The damage of a file. Requires: `is_checkable`. `whole`: as `is_whole` says. Raises `OSError` if it cannot be read."""
    known = names.parse(path.name)
    try:
        if known is not None and known.what == "bson":
            return log.damage_of(path, log.scan_file(door, path, whole=whole)[1])
        if known is not None and known.what in ("index", "run"):
            table = open_table(door, path)
            if table is not None:
                table.verify()
        else:
            f.decode_checked(door.read_all(path))
    except (TurtleError, ValueError, KeyError, TypeError) as error:
        return [Damage(path.name, 0, door.size(path), str(error))]
    return []
