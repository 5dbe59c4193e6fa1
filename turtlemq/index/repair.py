"""Repair: a table that is damaged, or does not fit its segment, is built again from the segment while the Index serves."""

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
    """Run `action` and return its result. If it meets a damaged table, rebuild the table and run the action again.

    Requires: the action changes nothing before it has read everything it needs."""
    try:
        if not segments.unintegrated and not segments.cursors_stale:
            return action()  # the usual case
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
    """Build the table that raised `error` again from its segment. Its ended bits come later, from `Segments.finish`: the tables
    that list the tombstones may be damaged, too."""
    broken = error.details.get("table", error.details.get("part"))
    part = next((p for p in segments.parts if p is broken or (isinstance(p, TablePart) and p.table is broken)), None)
    if not isinstance(part, TablePart):
        raise error
    segment, cover = segments.by_base[part.base], part.table.cover
    view = segments.door.map(segment.path)
    scanned = scan(view, cover.start, cover.end, sealed=True, rising=not segment.sealed)  # durable when the table was made
    rebuilt = []
    if len(scanned):
        rebuilt = [build.from_scan(segments, segment, view, scanned, (0, len(scanned)), part.first, cover.start)]
        rebuilt[0].first_seq, rebuilt[0].last_seq = part.first_seq, part.last_seq
    retire(part)
    segment.parts = [new for old in segment.parts for new in (rebuilt if old is part else [old])]
    segments.unintegrated += rebuilt
    segments.arrange()
    for damage in log.damage_of(segment.path, scanned):
        segments.damage(damage)


def retire(part: Part) -> None:
    """End a part that was replaced. Its cursors are dropped, for cursors and part refer to each other: that cycle would keep its
    arrays and its mapping until a garbage collection."""
    for cursor in part.cursors:
        cursor.alive = False
    part.cursors, part.gone = [], True
