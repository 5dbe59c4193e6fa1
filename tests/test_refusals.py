"""A real server on a real disk that is filled to the brim, where the system lets us have such a disk."""

from __future__ import annotations

import pytest

from tests.trust.model import Broken, Figures
from tests.trust.parts import apart
from tests.trust.refusals import FULL_DISK, PART, sum_up
from tests.trust.refusals_server import NO_DISK


@pytest.mark.slow
def test_a_server_on_a_full_disk_refuses_producers_and_serves_consumers() -> None:
    seen = apart("refusals", FULL_DISK, FULL_DISK + 1)
    if seen["disks that could not be had"]:
        pytest.skip(NO_DISK)
    assert seen["disks filled"] == 1
    assert seen["delivered after 507"] > 0


def test_a_run_without_its_full_disk_is_no_whole_run() -> None:
    assert PART.sum_up is sum_up
    assert PART.full > FULL_DISK
    with pytest.raises(Broken, match="unshare -rm"):
        sum_up(Figures({"disks that could not be had": 1, "stories with a failed call": 4_000}))
    assert "50% refused" in sum_up(Figures({"stories with a failed call": 4, "calls refused": 2}))
