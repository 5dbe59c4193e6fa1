"""`turtlemq.standing`: one table, read for one pair of message and group and for columns of pairs alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turtlemq import lifecycle, standing

FACTS = {
    "cancelled": standing.CANCELLED,
    "leased": standing.LEASED,
    "asleep": standing.ASLEEP,
    "waiting": standing.WAITING,
    "unfetched": standing.UNFETCHED,
    "letter": standing.LETTER,
    "predates": standing.PREDATES,
    "retained": standing.RETAINED,
}
facts = st.integers(0, sum(FACTS.values()))
moves = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=4)


def plain_decision(bits: int) -> str:
    """The order of the table, written out."""
    holds = {name for name, bit in FACTS.items() if bits & bit}
    if "cancelled" in holds:
        return "cancelled"
    if "leased" in holds:
        return "reserve"
    if "asleep" in holds:
        return "sleep"
    if holds & {"waiting", "unfetched"}:
        return "ready"
    if "letter" in holds:
        return "dead"
    return standing.NEVER_HAD if "predates" in holds else "history"


def test_each_fact_is_a_bit_of_its_own() -> None:
    assert sorted(FACTS.values()) == [1 << i for i in range(len(FACTS))]


@given(st.lists(facts, max_size=50))
def test_scalar_and_columnar_decision_agree_with_the_order_written_out(every: list[int]) -> None:
    codes = standing.decide_all(np.array(every, np.int64))
    assert [standing.STANDINGS[code] for code in codes.tolist()] == [standing.decide(bits) for bits in every]
    assert [standing.decide(bits) for bits in every] == [plain_decision(bits) for bits in every]


@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(facts, min_size=width, max_size=width), min_size=1)))
def test_standings_in_a_table_are_those_of_its_cells(rows: list[list[int]]) -> None:
    assert standing.standings_in(np.array(rows, np.uint8)) == [{standing.decide(bits) for bits in row} for row in rows]


@given(st.integers(0, 9), moves, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_scalar_and_columnar_rule_for_void_retries_agree(
    born: int, moved: list[tuple[int, int]], retries: list[tuple[int, int, int]]
) -> None:
    columns = [np.array([retry[i] for retry in retries], np.int64) for i in range(3)]
    alone = [standing.is_void(born, moved, *retry) for retry in retries]
    assert standing.are_void(born, moved, columns[0], columns[1], columns[2]).tolist() == alone


@given(moves)
def test_collapsed_moves_make_the_same_retries_void(given_moves: list[tuple[int, int]]) -> None:
    every = sorted(given_moves, key=lambda move: move[0])  # the newest seq only rises
    kept: list[tuple[int, int]] = []
    for seq, offset in every:
        kept = standing.add_move(kept, seq, offset)
    assert kept == sorted(kept)
    assert len({offset for _, offset in kept}) == len(kept)
    for order in range(0, 52, 3):
        for left in range(0, 52, 3):
            assert standing.is_void(0, kept, 1, order, left) == standing.is_void(0, every, 1, order, left)
    assert standing.first_had(kept) == min((offset for _, offset in every), default=0)


@given(st.lists(facts, min_size=1, max_size=4))
def test_message_is_cancelled_only_if_no_group_forbids_it(groups: list[int]) -> None:
    states = {standing.decide(bits) for bits in groups}
    answer = standing.cancel_answer(states, any(bits & standing.LETTER for bits in groups))
    allowed = all(state == standing.NEVER_HAD or lifecycle.target(state, "cancel") for state in states)
    if answer == "cancelled":
        assert allowed
        assert not any(bits & standing.LETTER for bits in groups)
    elif answer != "dead":
        assert not allowed
        assert answer.removesuffix(" before") in states


@given(st.lists(facts, min_size=1, max_size=4))
def test_state_over_all_groups_is_one_that_a_group_shows(groups: list[int]) -> None:
    standings = {standing.decide(bits) for bits in groups}
    assert standing.over_groups(standings) in {standing.shown(each) for each in standings}
    assert standing.over_groups(standings) in lifecycle.STATES


def test_pending_states_are_those_that_lead_to_a_delivery() -> None:
    pending = {standing.decide(bits) for bits in range(2 * standing.RETAINED) if standing.is_pending(bits & ~standing.LETTER)}
    assert pending == {"sleep", "ready", "reserve"}
