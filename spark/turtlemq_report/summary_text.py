"""A report in few words, for scripts and for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turtlemq_report.html_page import headline

if TYPE_CHECKING:
    from turtlemq_report.model import Report


def summary(made: Report) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "page": str(made.options.out / "report.html"),
        "tables": {
            name: {"file": str(made.options.out / f"{name}.parquet"), "rows": len(rows)} for name, rows in made.tables.items()
        },
        "topics": made.topics,
        "from_ms": made.range_ms[0] if made.range_ms else None,
        "to_ms": made.range_ms[1] if made.range_ms else None,
        "headline": {name: value for name, value, _ in headline(made)},
        "read_bytes": made.read_bytes,
        "incremental": not made.first,
        "pinned": made.pinned,
        "damaged": made.damaged,
        "damage": made.damage,
        "missed": made.missed,
        "made_ms": made.now_ms,
        "seconds": round(made.seconds, 1),
    }
