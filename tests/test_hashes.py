"""The hash table of arrays gives the answers of a dict."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from turtlemq.model import BATCH_MESSAGES_MAX, RUN_MESSAGES
from turtlemq.segment.id_map import IdMap


@pytest.mark.parametrize("seed", range(6))
def test_it_says_what_a_dict_would(seed: int) -> None:
    chance = Random(seed)
    space = chance.choice([50, 5_000, 1 << 64])
    column, known, expected, count = np.zeros(30_000, np.uint64), IdMap(), dict[int, int](), 0
    while count < 6_000:
        size = chance.choice([1, 2, 30, 700, 1_500])
        fresh = [chance.randrange(space) * chance.choice([0, 1, 1, 1]) for _ in range(size)]
        if chance.random() < 0.1:  # all in one chain
            fresh = [value - value % 65_536 + 3 for value in fresh if value >= 65_536]
        column[count : count + len(fresh)] = fresh
        known.add(column, count, count + len(fresh))
        expected |= {value: count + i for i, value in enumerate(fresh) if value}
        count += len(fresh)
        asked = [*chance.sample(sorted(expected), min(len(expected), 50)), *(chance.randrange(1, 1 << 64) for _ in range(50))]
        found = known.find_many(column, np.array(asked, np.uint64)).tolist()
        assert found == [expected.get(value, -1) for value in asked]
        assert [known.find(column, value) for value in asked[::7]] == [expected.get(value) for value in asked[::7]]


def test_nothing_is_found_where_nothing_is() -> None:
    column = np.zeros(4, np.uint64)
    assert IdMap().find_many(column, np.array([], np.uint64)).tolist() == []
    assert IdMap().find(column, 5) is None


def test_the_batch_that_fills_a_memtable_does_not_move_its_entries() -> None:
    """Entering 262,144 hashes anew takes 25 ms, right before they go to disk."""
    column, known = np.arange(1, RUN_MESSAGES + BATCH_MESSAGES_MAX, dtype=np.uint64), IdMap()
    known.add(column, 0, RUN_MESSAGES - 1)
    slots = known._slots
    known.add(column, RUN_MESSAGES - 1, len(column))
    assert known._slots is slots
