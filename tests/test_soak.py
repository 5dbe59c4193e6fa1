"""A short soak: load, restarts, samples and picture work, and the books balance. `make soak` does it for hours."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.trust.soak import main, wrong
from tests.trust.soak_audit import CANCELLED, FAULTS, Audit
from tests.trust.soak_load import CANCEL, MOVE
from tests.trust.soak_picture import PANELS, draw


@pytest.mark.slow
def test_a_short_soak_accounts_for_every_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0.3", "--rate", "400", "--out", str(tmp_path), "--picture", str(tmp_path / "copy.svg")]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert min(summary[name] for name in ("kills", "stops", "accepted", "cancelled", "moved", "failed")) > 0
    assert [summary[kind] for kind in FAULTS] == [0] * len(FAULTS)
    for what, share in (("cancelled", CANCEL), ("moved", MOVE)):  # a few come too late for it; a run of seconds has its chance
        assert 0.6 * share < summary[what] / summary["accepted"] < 1.3 * share, (what, summary)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) > 5
    assert all(sample["memory_mb"] > 10 for sample in samples)
    assert (tmp_path / "copy.svg").read_text() == (tmp_path / "soak.svg").read_text()
    assert "0 lost" in capsys.readouterr().out


def test_memory_that_grows_for_an_hour_is_a_fault() -> None:
    fine = {"memory_mb_max": 100.0, "memory_slope_mb_per_hour": 1.0, "minutes": 240.0}
    assert wrong(fine) == []
    assert wrong(fine | {"memory_slope_mb_per_hour": 30.0}) == ["memory grows by 30.0 MB an hour; 20 are the most"]
    assert wrong(fine | {"memory_slope_mb_per_hour": 30.0, "minutes": 20.0}) == [], "too short to tell"
    assert wrong(fine | {"memory_slope_mb_per_hour": float("nan")}) != []
    assert wrong(fine | {"memory_mb_max": 600.0}) == ["memory: 600 MB; 524 are the most"]


def test_a_picture_has_curves_for_figures_and_lines_for_restarts() -> None:
    names = [name for panel in PANELS for name in panel.lines]
    samples = [{"s": float(second), **dict.fromkeys(names, 10.0 * second or None)} for second in range(10)]
    picture = xml.etree.ElementTree.fromstring(draw(samples, [3.0, 6.0], ["all is well"]))
    paths = [found.get("d", "") for found in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert len(paths) == len(names)
    assert all(path.startswith("M") and path.count("L") == 8 for path in paths)
    assert sum(found.get("class") == "restart" for found in picture.iter()) == 2


def message(id_: str, due_ms: int = 1, attempt: int = 1) -> dict[str, object]:
    return {"id": id_, "due_ms": due_ms, "attempt": attempt, "body": f"{id_}:xx"}


def test_the_books_notice_each_kind_of_fault() -> None:
    audit, later = Audit("t"), float("inf")
    ids = [audit.new(0, 4) for _ in range(4)]
    audit.accepted(ids)
    audit.delivered(1, message(ids[0]), 0)
    assert sum(audit.faults.values()) == 0
    audit.settled(1, [ids[0]])
    audit.delivered(2, message(ids[0]), later)
    assert sum(audit.faults.values()) == 0, "the other group has not settled it"
    audit.delivered(1, message(ids[0], attempt=2), later)
    audit.cancelled([ids[1]])
    assert audit.ends[1] == CANCELLED
    audit.delivered(1, message(ids[1]), 0)
    assert dict(audit.faults) == {"lost": 0, "early": 0, "after ack": 1, "after cancel": 0, "wrong bytes": 0}
    audit.delivered(1, message(ids[1]), later)
    audit.delivered(1, message(ids[2], due_ms=1 << 50), later)
    audit.delivered(1, message(ids[2]) | {"body": "3:xx"}, later)
    audit.told(ids[3], None)
    assert dict(audit.faults) == {"lost": 2, "early": 1, "after ack": 1, "after cancel": 1, "wrong bytes": 1}
