"""The summary of a report, as `--json` prints it. The terminal's summary lives in `turtlemq.cli.report`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turtlemq_report.html_page import headline

if TYPE_CHECKING:
    from turtlemq_report.model import Report


def summary(report: Report) -> dict[str, Any]:
    """Paths of the page and of the tables, the headline figures, and how the report was made."""
    out = report.options.out
    return {
        "page": str(out / "report.html"),
        "tables": {name: {"file": str(out / f"{name}.parquet"), "rows": len(rows)} for name, rows in report.tables.items()},
        "topics": report.topics,
        "from_ms": report.range_ms[0] if report.range_ms else None,
        "to_ms": report.range_ms[1] if report.range_ms else None,
        "headline": {name: value for name, value, _ in headline(report)},
        "read_bytes": report.read_bytes,
        "incremental": not report.first,
        "pinned": report.pinned,
        "damaged": report.damaged,
        "damage": report.damage,
        "missed": report.missed,
        "made_ms": report.now_ms,
        "seconds": round(report.seconds, 1),
    }
