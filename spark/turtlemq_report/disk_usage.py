"""Disk usage: each segment of a snapshot with its size and its number of live sleepers, from file names and tables alone."""

from __future__ import annotations

import tomllib
from typing import Any

from pyspark_turtlemq.index_view import with_parts
from pyspark_turtlemq.parts import TopicLogs
from pyspark_turtlemq.snapshot_files import LOGS, TopicFiles
from turtlemq.settings import Settings
from turtlemq.storage import names

SCHEMA = (
    "topic string, log string, segment string, bytes bigint, table_bytes bigint, documents bigint, live bigint, "
    "sealed boolean, last boolean, compact_live_ratio double"
)


def rows(logs: TopicLogs) -> list[tuple[Any, ...]]:
    """A row for each segment of a topic, in the order of `SCHEMA`. Counts are null but for the delay log."""
    files = logs.files
    counts = _counts(logs)
    ratio = _compact_live_ratio(files)
    segment_rows: list[tuple[Any, ...]] = []
    for log in LOGS:
        segments = files.segments(log)
        for base, file in segments:
            documents, live, sealed = counts.get(base, (0, 0, False)) if log == "delay" else (None, None, None)
            last = base == segments[-1][0]
            table_bytes = _table_bytes(files, log, base)
            segment_rows.append((files.topic, log, file.name, file.size, table_bytes, documents, live, sealed, last, ratio))
    return segment_rows


def _table_bytes(files: TopicFiles, log: str, base: int) -> int:
    parsed = [(names.parse(name), file) for name, file in files.files.get(log, {}).items()]
    return sum(file.size for at, file in parsed if at is not None and at.base == base and at.what != "bson")


def _compact_live_ratio(files: TopicFiles) -> float:
    """The setting of the topic, or the default."""
    try:
        settings = tomllib.loads((files.source / names.SETTINGS).read_text("utf-8"))
        return float(settings.get("compact_live_ratio", Settings().compact_live_ratio))
    except (OSError, ValueError, TypeError):
        return Settings().compact_live_ratio


def _counts(logs: TopicLogs) -> dict[int, tuple[int, int, bool]]:
    """By the base of each segment of the delay log: documents, live sleepers among them, and whether it is sealed."""
    parts = logs.delay_log().parts
    progress = logs.ready_log().progress
    figures = with_parts(
        logs.files.topic, parts, progress, lambda tables: [(each.documents, each.count_live()) for each in tables]
    )
    counts: dict[int, tuple[int, int, bool]] = {}
    for part, (of_part, live_of_part) in zip(parts, figures, strict=True):
        documents, live, _ = counts.get(part.cover.base, (0, 0, False))
        counts[part.cover.base] = (documents + of_part, live + live_of_part, part.sealed)
    return counts
