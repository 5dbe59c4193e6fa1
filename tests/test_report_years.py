"""`turtlemq report` over a long time: many runs into one folder, while the data goes on and history is removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.spark_session import MARKS, need_spark, spark

need_spark()

from tests.harness.report_data import Years  # noqa: E402
from turtlemq_report.model import Report, ReportOptions  # noqa: E402
from turtlemq_report.run import report  # noqa: E402

__all__ = ["spark"]
pytestmark = MARKS


def told(made: Report) -> dict[str, list[dict[str, Any]]]:
    """All tables but that of the files."""
    return {name: table.to_pylist() for name, table in made.tables.items() if name != "storage"}


def test_many_runs_agree_with_one_report_over_everything(spark: Any, tmp_path: Path) -> None:
    """Seven periods with restarts, a kill, retention, compaction, topics that come, go and come again. The report after each
    reads only new data; the last one is that of a folder that was kept whole and is reported on once."""
    lost, kept = Years(tmp_path / "data", keeps=False), Years(tmp_path / "kept", keeps=True)
    removed, reports = set[str](), list[Report]()
    for _ in range(7):
        for years in (lost, kept):
            years.live()
        reports.append(report(spark, ReportOptions(lost.root, tmp_path / "report"), now_ms=lost.now + 5_000))
        before = {str(path) for path in lost.root.glob("topic/*/*.bson")}
        for years in (lost, kept):
            years.after_the_report()
        removed |= before - {str(path) for path in lost.root.glob("topic/*/*.bson")}
    whole = report(spark, ReportOptions(kept.root, tmp_path / "whole"), now_ms=kept.now + 5_000)
    for log in ("ready", "reserve", "history"):
        assert any(log in path for path in removed), f"{log}: retention had something to do"
    assert [made.first for made in reports] == [True] + [False] * 6
    assert [line for line in reports[-1].missed if "checkpoints among them" not in line] == reports[-1].damage == []
    assert told(reports[-1]) == told(whole)
    lost.engine.close()
    kept.engine.close()
