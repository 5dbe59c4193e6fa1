"""Mending: a table that is damaged, or that does not fit its segment, is built again from the segment."""

from __future__ import annotations

from turtlemq.errors import Corrupt
from turtlemq.index import build
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.shelf import Shelf
from turtlemq.segment import log
from turtlemq.segment.scan import scan
from turtlemq.segment.table import Damaged


def mend(shelf: Shelf, error: Damaged) -> None:
    """Build the table that raised `error` again. Its segment is the truth; what was cancelled is worked in again."""
    broken = error.details.get("table", error.details.get("part"))
    part = next((p for p in shelf.parts if p is broken or (isinstance(p, TablePart) and p.table is broken)), None)
    if not isinstance(part, TablePart):
        raise error
    segment, cover = shelf.segments[part.base], part.table.cover
    view = shelf.door.map(segment.path)
    found = scan(view, cover.start, cover.end, sealed=True)  # it was durable when the table was made: nothing can be torn
    if not len(found):
        raise Corrupt(f"{segment.path.name}: nothing in it can be read. Restore it from a backup.") from error
    fresh = build.from_scan(shelf, segment, view, found, (0, len(found)), part.first, cover.start)
    fresh.first_seq, fresh.last_seq = part.first_seq, part.last_seq
    retire(part)
    segment.parts[segment.parts.index(part)] = fresh
    shelf.arrange()
    for damage in log.damage_of(segment.path, found):
        shelf.damage(damage)
    settle(shelf, fresh)


def settle(shelf: Shelf, part: TablePart) -> None:
    """A part that has just come: set its cursors, and end in it what was ended since it was made."""
    shelf.place(part)
    shelf.apply_kills([part])
    part.live = part.count_live()
    shelf.arrange()


def retire(part: Part) -> None:
    """A part that goes: its cursors are met no more."""
    for cursor in part.cursors:
        cursor.alive = False
