"""Placement of shards: each result is compared with all possible ones, and moves keep every copy that is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from turtlemq.replica.placement import leaders, place, step

Facts = tuple[int, dict[str, str], int, dict[int, list[str]]]  # shards, zones by node, replicas, current
Placed = Mapping[int, tuple[str, ...]]
NAMES = "abcde"


@st.composite
def clusters(draw: st.DrawFn, nodes_max: int = 5, shards_max: int = 12) -> Facts:
    """Shards, zones of nodes, replicas, and a present placement that may be of other nodes."""
    names = draw(st.lists(st.sampled_from(NAMES[:nodes_max]), min_size=1, unique=True))
    nodes = {name: draw(st.sampled_from(["x", "y", ""])) for name in names}
    shards, replicas = draw(st.integers(1, shards_max)), draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([*NAMES[:nodes_max], "gone"]), max_size=replicas, unique=True)
    return shards, nodes, replicas, draw(st.dictionaries(st.integers(0, shards - 1), row))


def loads(placed: Placed, nodes: Mapping[str, str]) -> list[int]:
    counts = Counter(node for row in placed.values() for node in row)
    return [counts[node] for node in nodes]


def badness(
    placed: Placed, nodes: Mapping[str, str], current: Mapping[int, list[str]], closed: frozenset[str] = frozenset()
) -> tuple[int, int, int]:
    """Copies in one zone, unevenness, moves: each counts more than all behind it."""
    in_zones = Counter((shard, nodes[node]) for shard, row in placed.items() for node in row)
    moves = sum(node not in current.get(shard, []) for shard, row in placed.items() for node in row)
    even = loads(placed, {node: zone for node, zone in nodes.items() if node not in closed})
    return sum(count**2 for count in in_zones.values()), sum(load**2 for load in even), moves


def all_placements(
    shards: int, nodes: Mapping[str, str], replicas: int, current: Mapping[int, list[str]], closed: frozenset[str]
) -> Iterator[Placed]:
    rows = []
    for shard in range(shards):
        may = [node for node in nodes if node not in closed or node in current.get(shard, [])]
        rows.append(list(combinations(may, min(replicas, len(may)))))
    for chosen in product(*rows):
        yield dict(enumerate(chosen))


@given(clusters())
def test_copies_of_a_shard_are_on_different_nodes_in_all_zones(
    given: Facts,
) -> None:
    shards, nodes, replicas, _ = given
    placed = place(*given)
    assert sorted(placed) == list(range(shards))
    for row in placed.values():
        assert len(set(row)) == len(row) == min(replicas, len(nodes))
        assert set(row) <= set(nodes)
        assert len({nodes[node] for node in row}) == min(replicas, len(set(nodes.values())))


@given(clusters())
def test_loads_differ_by_at_most_one_without_zones(given: Facts) -> None:
    shards, nodes, replicas, current = given
    nodes = dict.fromkeys(nodes, "")
    found = loads(place(shards, nodes, replicas, current), nodes)
    assert max(found) - min(found) <= 1


@given(clusters())
def test_the_answer_is_the_same_everywhere_and_stays(given: Facts) -> None:
    shards, nodes, replicas, current = given
    placed = place(*given)
    turned = dict(reversed(nodes.items()))
    assert place(shards, turned, replicas, dict(reversed(current.items()))) == placed
    assert place(shards, nodes, replicas, placed) == placed


@given(clusters(nodes_max=4, shards_max=3), st.frozensets(st.sampled_from(NAMES[:4]), max_size=2))
def test_no_other_placement_is_better(given: Facts, closed: frozenset[str]) -> None:
    _, nodes, _, current = given
    found = badness(place(*given, closed), nodes, current, closed)
    assert found == min(badness(other, nodes, current, closed) for other in all_placements(*given, closed))


def test_a_node_that_joins_takes_its_part_and_no_more_moves() -> None:
    before = place(8, {"a": "", "b": ""}, 2, {})
    after = place(8, {"a": "", "b": "", "c": ""}, 2, before)
    moved = sum(len(set(after[shard]) - set(before[shard])) for shard in before)
    assert sorted(loads(after, dict.fromkeys("abc", ""))) == [5, 5, 6]
    assert moved == 5


def test_a_closed_node_keeps_its_shards_and_gets_no_other() -> None:
    before = place(6, {"a": "", "b": "", "c": ""}, 2, {})
    after = place(6, {"a": "", "b": "", "c": "", "d": ""}, 2, before, closed={"a"})
    of_a = [{shard for shard, row in placed.items() if "a" in row} for placed in (before, after)]
    assert of_a[0] == of_a[1]


def test_first_nodes_of_new_shards_differ() -> None:
    placed = place(9, {"a": "", "b": "", "c": ""}, 3, {})
    assert Counter(row[0] for row in placed.values()) == {"a": 3, "b": 3, "c": 3}


# Leaders


@st.composite
def led(draw: st.DrawFn) -> tuple[dict[int, list[str]], dict[int, str]]:
    able = draw(
        st.dictionaries(st.integers(0, 3), st.lists(st.sampled_from("abc"), min_size=0, max_size=3, unique=True), min_size=1)
    )
    return able, draw(st.dictionaries(st.integers(0, 3), st.sampled_from("abcd")))


@given(led())
def test_leaders_are_able_even_and_change_least(given: tuple[dict[int, list[str]], dict[int, str]]) -> None:
    able, current = given
    found = leaders(able, current)
    shards = [shard for shard, nodes in able.items() if nodes]
    assert sorted(found) == sorted(shards)
    assert all(found[shard] in able[shard] for shard in shards)

    def cost(chosen: Mapping[int, str]) -> tuple[int, int]:
        counts = Counter(chosen.values())
        return sum(n**2 for n in counts.values()), sum(current.get(shard) != node for shard, node in chosen.items())

    others = product(*(able[shard] for shard in shards))
    assert cost(found) == min(cost(dict(zip(shards, chosen, strict=True))) for chosen in others)
    assert leaders(able, found) == found


# The way to a placement


@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    st.data(),
)
def test_steps_lead_to_the_target_and_keep_copies_in_sync(before: list[str], target: list[str], data: st.DataObject) -> None:
    want, in_sync = tuple(before), set(before)
    lead = data.draw(st.sampled_from(before))
    for _ in range(20):
        next_want = step(want, target, in_sync, lead, 7)
        assert lead in next_want
        gone = in_sync - set(next_want)
        assert not gone or set(target) <= in_sync
        want, in_sync = next_want, in_sync - gone
        assert len(in_sync) >= min(len(before), len(target))
        if want == step(want, target, in_sync, lead, 7) and set(want) == set(target):
            return
        arrived = sorted(set(want) - in_sync)  # then the leader takes in one copy, or hands over
        if arrived:
            in_sync.add(data.draw(st.sampled_from(arrived)))
        elif lead not in target:
            lead = data.draw(st.sampled_from(sorted(set(target) & in_sync)))
    raise AssertionError(f"{want} is not {target}")


def test_the_only_copy_in_sync_stays_wanted_without_a_leader() -> None:
    assert step(("a", "b"), ("b", "c"), {"a"}, None, 7) == ("b", "a", "c")


def test_a_lost_node_without_a_copy_in_sync_goes_at_once() -> None:
    assert step(("a", "b"), ("a", "c"), {"a"}, "a", 7) == ("a", "c")
    assert step(("a", "b"), ("a", "c"), {"a"}, "a", 7, may_add=False) == ("a",)


def test_nodes_at_once_are_limited_and_never_none() -> None:
    assert step(("a", "b"), ("c", "d"), {"a", "b"}, "a", 3) == ("a", "b", "c")
    assert step(("a",), ("b",), frozenset(), None, 7, may_add=False) == ("b",)
