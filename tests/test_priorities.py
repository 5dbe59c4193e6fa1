"""Policies of priorities: shares, retries among fresh messages, pre-emption, dynamic weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turtlemq.broker.priorities import (
    BOOST_MAX,
    EMPTY_MS,
    HIGH,
    LEVELS,
    LOW,
    NORMAL,
    Preemption,
    Weight,
    allot,
    preempt,
    preempted,
    shares,
    weigh,
)

BASE: dict[int, float] = {HIGH: 6, NORMAL: 3, LOW: 1}
WEIGHTS = st.fixed_dictionaries({level: st.integers(0, 1_000) for level in LEVELS})
COUNTS = st.fixed_dictionaries({level: st.integers(0, 60) for level in LEVELS})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), WEIGHTS)
def test_shares_give_out_all_and_forget_nothing(counts: list[int], weights: dict[int, float]) -> None:
    carry: dict[int, float] = {}
    total, whole = dict.fromkeys(LEVELS, 0), sum(weights.values())
    for count in counts:
        given_out = shares(count, carry, weights)
        assert sum(given_out.values()) == (count if whole else 0)
        assert min(given_out.values()) >= 0
        for level, n in given_out.items():
            total[level] += n
    for level, weight in weights.items():
        assert abs(total[level] - (sum(counts) * weight / whole if whole else 0)) <= 2
        assert weight or not total[level], "no weight, no share"


def test_one_message_at_a_time_low_still_gets_its_tenth() -> None:
    carry: dict[int, float] = {}
    taken = [next(level for level, n in shares(1, carry, BASE).items() if n) for _ in range(1000)]
    assert [taken.count(level) for level in LEVELS] == [600, 300, 100]
    longest = max(len(run) for run in "".join("l" if level == LOW else "." for level in taken).split("l"))
    assert longest <= 15


@given(st.integers(1, 100), WEIGHTS, COUNTS, COUNTS)
def test_a_fetch_takes_all_that_it_can_and_no_more(
    count: int, weights: dict[int, float], fresh: dict[int, int], due: dict[int, int]
) -> None:
    quotas = shares(count, {}, weights)
    taken = allot(count, quotas, fresh, due, {})
    waiting = {level: fresh[level] + due[level] for level in LEVELS}
    assert sum(map(sum, taken.values())) == min(count, sum(waiting.values())), "no level holds another back"
    for level, (retries, new) in taken.items():
        assert 0 <= retries <= due[level]
        assert 0 <= new <= fresh[level]
        assert retries + new >= min(quotas[level], waiting[level]), "its quota is its own"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=80), st.sampled_from(LEVELS))
def test_retries_are_half_while_fresh_messages_wait(counts: list[int], level: int) -> None:
    carry: dict[int, float] = {}
    taken = [allot(count, {level: count}, {level: 1_000}, {level: 1_000}, carry)[level] for count in counts]
    assert abs(sum(retries for retries, _ in taken) - sum(counts) / 2) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), WEIGHTS, st.integers(0, 500), st.floats(0, 0.5))
def test_pre_emption_moves_places_and_keeps_the_floor(
    counts: list[int], weights: dict[int, float], waiting: int, floor: float
) -> None:
    carry: dict[int, float] = {}
    floors: dict[int, float] = {}
    kept, had = dict.fromkeys(LEVELS, 0), dict.fromkeys(LEVELS, 0)
    for count in counts:
        quotas = shares(count, carry, weights)
        moved = preempted(count, quotas, waiting, floor, floors)
        assert sum(moved.values()) == sum(quotas.values())
        assert min(moved.values()) >= 0
        assert moved[HIGH] >= quotas[HIGH], "high never loses"
        assert moved[HIGH] <= max(waiting, quotas[HIGH]), "it takes no place that it does not need"
        if moved[LOW] > int(count * floor + 1):
            assert moved[NORMAL] == quotas[NORMAL], "low gives way before normal does"
        for level in LEVELS:
            kept[level] += moved[level]
            had[level] += quotas[level]
    for level in (NORMAL, LOW):
        bursts = 1 + sum(counts) * floor - had[level]
        assert kept[level] >= min(had[level], sum(counts) * floor) - max(bursts, 0) - len(counts)
        assert kept[level] <= had[level]


def test_the_floor_of_small_fetches_is_kept_over_time() -> None:
    carry: dict[int, float] = {}
    floors: dict[int, float] = {}
    taken = dict.fromkeys(LEVELS, 0)
    for _ in range(1_000):
        for level, n in preempted(1, shares(1, carry, BASE), 500, 0.05, floors).items():
            taken[level] += n
    assert (taken[NORMAL], taken[LOW]) == (49, 49), "the last ones are owed"


@pytest.mark.parametrize(
    ("waiting", "wait_ms", "active"), [(0, 0, False), (5, 50, False), (5, 51, True), (10, 1, False), (11, 1, True)]
)
def test_pre_emption_begins_when_high_waits_long_or_has_no_room(waiting: int, wait_ms: int, active: bool) -> None:
    assert preempt(Preemption(), waiting, wait_ms, 10, 50, 1_000).active is active
    assert preempt(Preemption(), waiting, wait_ms, 10, 0, 1_000) == Preemption(), "off"


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 20), st.integers(0, 100)), max_size=60))
def test_pre_emption_ends_when_high_was_empty_for_a_second(looks: list[tuple[int, int, int]]) -> None:
    state, now, last = Preemption(), 10_000, None
    for passed, waiting, wait_ms in looks:
        now += passed
        before, state = state, preempt(state, waiting, wait_ms, 10, 50, now)
        if waiting and (wait_ms > 50 or waiting > 10):
            assert state.active
        elif last is None or now - last >= EMPTY_MS:
            assert not state.active
        else:
            assert state.active is before.active
        last = now if waiting else last


LOOKS = st.lists(st.one_of(st.none(), st.floats(0, 200)), max_size=120)


@given(LOOKS)
def test_the_weight_moves_only_by_its_rules(looks: list[float | None]) -> None:
    state, above, calm = Weight(), 0, 0
    for p95 in looks:
        before, state = state, weigh(state, p95, 50)
        above = above + 1 if p95 is not None and p95 > 50 else 0
        calm = calm + 1 if p95 is None or p95 < 30 else 0
        assert 1 <= state.factor <= BOOST_MAX
        if state.factor > before.factor:
            assert above >= 2
            assert state.factor == min(before.factor * 1.5, BOOST_MAX)
        if state.factor < before.factor:
            assert calm >= 10, "it holds for ten seconds"


@given(LOOKS)
def test_the_weight_is_back_twenty_calm_seconds_later(looks: list[float | None]) -> None:
    state = Weight()
    for p95 in looks:
        state = weigh(state, p95, 50)
    for _ in range(20):
        state = weigh(state, None, 50)
    assert state.factor == 1.0


def test_a_wait_between_the_thresholds_changes_nothing() -> None:
    state = weigh(weigh(Weight(), 90, 50), 90, 50)
    assert state.factor == 1.5
    for _ in range(100):
        state = weigh(state, 40, 50)
    assert state.factor == 1.5
