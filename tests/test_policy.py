"""Decisions of the broker as pure functions: when a failed message comes again, shares of consumers, removable segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turtlemq.broker.policy import Extent, backoff_ms, droppable
from turtlemq.settings import Settings

HOUR = 3_600_000


def test_backoff_grows_by_its_factor_up_to_the_limit() -> None:
    settings = Settings(backoff_base_ms=100, backoff_factor=3, backoff_max_ms=5_000, backoff_jitter="none")
    assert [backoff_ms(settings, "x", n) for n in (1, 2, 3, 4, 5, 100, 10_000)] == [100, 300, 900, 2700, 5000, 5000, 5000]


def test_a_base_of_zero_means_at_once() -> None:
    assert backoff_ms(Settings(backoff_base_ms=0), "x", 7) == 0


@given(st.text(min_size=1), st.integers(1, 100), st.sampled_from(["equal", "full"]))
def test_jitter_is_the_same_every_time_and_within_bounds(id_: str, attempt: int, jitter: str) -> None:
    settings = Settings(backoff_jitter=jitter)
    full = backoff_ms(Settings(backoff_jitter="none"), id_, attempt)
    found = backoff_ms(settings, id_, attempt)
    assert found == backoff_ms(settings, id_, attempt)
    assert (full // 2 if jitter == "equal" else 0) <= found <= full


def test_jitter_spreads_messages_that_failed_together() -> None:
    times = [backoff_ms(Settings(backoff_jitter="full", backoff_base_ms=1000), f"m{i}", 1) for i in range(1000)]
    assert len(set(times)) > 500
    assert 400 < sum(times) / len(times) < 600


@pytest.mark.parametrize(
    ("extents", "hours", "limit", "expected"),
    [
        ([], 1, 1 << 40, 0),
        ([Extent(100, 0, True)], 1, 0, 0),  # the newest always stays
        ([Extent(100, 0, True), Extent(100, 0, True)], 1, 1 << 40, 1),  # too old
        ([Extent(100, 10 * HOUR, True), Extent(100, 0, True)], 1, 1 << 40, 0),  # young enough
        ([Extent(100, 10 * HOUR, True), Extent(100, 0, True)], 1, 150, 1),  # too much
        ([Extent(100, 0, False), Extent(100, 0, True), Extent(1, 0, True)], 1, 0, 0),  # a group needs the oldest
        ([Extent(100, 0, True), Extent(100, 0, False), Extent(1, 0, True)], 1, 0, 1),  # only the segment before it goes
        ([Extent(100, 10 * HOUR, True)] * 4, 1, 250, 2),  # no more than necessary
    ],
)
def test_only_old_or_surplus_settled_files_go(extents: list[Extent], hours: float, limit: int, expected: int) -> None:
    settings = Settings(history_hours=hours, history_bytes=limit)
    assert droppable(extents, settings, 10 * HOUR, sum(e.bytes for e in extents)) == expected
