"""Who fills the disk: the files of a snapshot with their sizes, and how many messages of each segment sleep. From the tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.pins import ORDER, TopicFiles
from turtlemq.index.parts import TablePart
from turtlemq.index.segments import Segments
from turtlemq.model import Damage
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

SCHEMA = (
    "topic string, log string, segment string, bytes bigint, table_bytes bigint, documents bigint, live bigint, "
    "sealed boolean, last boolean, compact_live_ratio double"
)


class _Shelf(Segments):
    """A shelf that writes nothing."""

    def damage(self, damage: Damage) -> None:
        self.counters.damage.append(damage)


def rows(opener: TopicLogs) -> list[tuple[Any, ...]]:
    """A row for each segment of a topic, in the order of `SCHEMA`."""
    pinned = opener.files
    counts = _counts(opener)
    ratio = _ratio(pinned)
    found: list[tuple[Any, ...]] = []
    for log in ORDER:
        segments = pinned.segments(log)
        for base, file in segments:
            documents, live, sealed = counts.get(base, (0, 0, False)) if log == "delay" else (None, None, None)
            last = base == segments[-1][0]
            found.append(
                (pinned.topic, log, file.name, file.size, _tables(pinned, log, base), documents, live, sealed, last, ratio)
            )
    return found


def _tables(pinned: TopicFiles, log: str, base: int) -> int:
    known = [(names.parse(name), file) for name, file in pinned.files.get(log, {}).items()]
    return sum(file.size for at, file in known if at is not None and at.base == base and at.what != "bson")


def _ratio(pinned: TopicFiles) -> float:
    """The topic's own setting, or the default."""
    try:
        told = tomllib.loads((pinned.source / "topic.toml").read_text("utf-8"))
        return float(told.get("compact_live_ratio", Settings().compact_live_ratio))
    except (OSError, ValueError, TypeError):
        return Settings().compact_live_ratio


def _counts(opener: TopicLogs) -> dict[int, tuple[int, int, bool]]:
    """By the base of each segment of sleepers: documents, how many of them sleep, and whether it is sealed."""
    log = opener.delay_log()
    door = Door()
    shelf = _Shelf(door, Path(), opener.files.topic, opener.ready_log().progress)
    opened = [(part, TablePart(Path(part.file.path).parent, part.open(), part.file.name, part.sealed)) for part in log.parts]
    shelf.parts = sorted((table for _, table in opened), key=lambda one: one.first_seq)
    for _, table in opened:
        shelf.set_cursors(table)
    shelf.apply_ends(shelf.parts)
    found: dict[int, tuple[int, int, bool]] = {}
    for part, table in opened:
        documents, live, _ = found.get(part.cover.base, (0, 0, False))
        found[part.cover.base] = (documents + table.documents, live + table.count_live(), part.sealed)
    door.shut()
    return found
