"""Mending: a table that is damaged, or that does not fit its segment, is built again from the segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from turtlemq.index import build
from turtlemq.index.parts import Part, TablePart
from turtlemq.index.segments import Segments
from turtlemq.segment import log
from turtlemq.segment.scan import scan
from turtlemq.segment.table import Damaged

R = TypeVar("R")


def repairing(segments: Segments, action: Callable[[], R]) -> R:
    """Do something that changes nothing before it has read all it needs. On a damaged table, build that again and begin anew."""
    try:
        if not segments.unintegrated and not segments.cursors_stale:
            return action()  # nearly always
    except Damaged as error:
        repair(segments, error)
    for _ in range(2 * len(segments.parts)):
        try:
            segments.finish()
            return action()
        except Damaged as error:
            repair(segments, error)
    return action()


def repair(segments: Segments, error: Damaged) -> None:
    """Build the table that raised `error` again: its segment is the truth. What was cancelled is worked in by `Shelf.finish`, for
    the tables that tell may be damaged too."""
    broken = error.details.get("table", error.details.get("part"))
    part = next((p for p in segments.parts if p is broken or (isinstance(p, TablePart) and p.table is broken)), None)
    if not isinstance(part, TablePart):
        raise error
    segment, cover = segments.by_base[part.base], part.table.cover
    view = segments.door.map(segment.path)
    found = scan(view, cover.start, cover.end, sealed=True, rising=not segment.sealed)  # durable when the table was made
    fresh = []
    if len(found):
        fresh = [build.from_scan(segments, segment, view, found, (0, len(found)), part.first, cover.start)]
        fresh[0].first_seq, fresh[0].last_seq = part.first_seq, part.last_seq
    retire(part)
    segment.parts = [new for old in segment.parts for new in (fresh if old is part else [old])]
    segments.unintegrated += fresh
    segments.arrange()
    for damage in log.damage_of(segment.path, found):
        segments.damage(damage)


def retire(part: Part) -> None:
    """A part that goes: its cursors are met no more. They name the part and the part names them: left so, its arrays and its
    mapping would stay until the garbage collector comes."""
    for cursor in part.cursors:
        cursor.alive = False
    part.cursors, part.gone = [], True
