"""Tables against a naive model, and the treatment of a table file that was cut or flipped anywhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.table_model import PATH, Model
from turtlemq.model import ORDINAL_BITS, U64
from turtlemq.segment import table as t
from turtlemq.storage.door import Door

steady = settings(derandomize=True, deadline=None, max_examples=60, database=None)
SIZES = [0, 1, 2, 63, 64, 511, 512, 513, 1_024, 1_025]
LOW = (1 << ORDINAL_BITS) - 1


@cache
def made(count: int) -> tuple[Model, t.Table]:
    model = Model(count)
    return model, model.table()


def near(model: Model) -> list[int]:
    """Keys worth asking for: those that are there, their neighbours, node borders, and the ends of the world."""
    picked = model.keys[:: max(1, len(model.keys) // 40)] + model.keys[-2:] + model.keys[510:514] + model.keys[1022:1026]
    return [0, 1, (1 << 64) - 1, *(key + step for key in picked for step in (-1, 0, 1) if key + step >= 0)]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", SIZES)
def test_a_rank_is_how_many_keys_are_smaller(count: int) -> None:
    model, table = made(count)
    asked = near(model)
    expected = [bisect_left(model.keys, key) for key in asked]
    assert [table.rank(key) for key in asked] == expected
    assert table.ranks(np.array(asked, np.uint64)).tolist() == expected
    assert table.ranks(np.empty(0, np.uint64)).tolist() == []
    assert len(table) == count


@pytest.mark.parametrize("count", SIZES)
def test_a_slice_is_the_keys_of_these_ranks(count: int) -> None:
    model, table = made(count)
    for first, last in [(0, 0), (0, 1), (0, count), (count // 2, count), (510, 514), (count, count + 5), (5, 3)]:
        assert table.slice(first, last).tolist() == model.keys[first:last]


@pytest.mark.parametrize("count", SIZES)
def test_places_are_where_documents_begin_and_end(count: int) -> None:
    model, table = made(count)
    ordinals = np.arange(count)[:: max(1, count // 50)]
    starts, ends = table.spans_of(ordinals)
    assert starts.tolist() == [model.positions[o] for o in ordinals]
    assert ends.tolist() == [model.positions[o + 1] for o in ordinals]


@pytest.mark.parametrize("count", SIZES)
def test_ids_are_found_by_their_hashes_and_prints_deny_none(count: int) -> None:
    model, table = made(count)
    hashes = np.array(model.hashes, np.uint64)
    assert table.may_hold(hashes).all()
    for hash_ in model.hashes[:: max(1, count // 100)]:
        assert table.find(hash_) == model.find(hash_)
        assert table.find(hash_ ^ 1) == model.find(hash_), "the low bits give way to the ordinal"
        assert table.find(hash_ ^ 1 << ORDINAL_BITS) == model.find(hash_ ^ 1 << ORDINAL_BITS)
    assert table.id_count == count
    assert table.ids().tolist() == sorted(h & ~LOW | o for h, o in zip(model.hashes, model.hashed, strict=True))
    assert not table.lacks(hashes, np.array(model.hashed))
    assert count < 2 or table.lacks(hashes, np.array(model.hashed[::-1]))


@pytest.mark.parametrize("count", SIZES)
def test_kills_are_kept(count: int) -> None:
    model, table = made(count)
    assert table.ending_ordinals().tolist() == model.kills
    assert table.cover == model.cover


@given(st.integers(0, 1_200), st.integers(0, 99), st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
@settings(steady, max_examples=30)
def test_any_table_answers_like_the_model(count: int, seed: int, others: list[int]) -> None:
    model = Model(count, seed)
    table = model.table()
    asked = [*others, *near(model)[:60]]
    assert table.ranks(np.array(asked, np.uint64)).tolist() == [bisect_left(model.keys, key) for key in asked]
    assert [table.rank(key) for key in asked[:10]] == [bisect_left(model.keys, key) for key in asked[:10]]
    assert [table.find(hash_) for hash_ in others] == [model.find(hash_) for hash_ in others]
    between = [hash_ for hash_ in table.ids().tolist() if min(asked) <= hash_ < max(asked)]
    assert table.ids(min(asked), max(asked)).tolist() == between
    table.verify()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 70))
@steady
def test_ids_with_equal_hashes_are_all_found_newest_first(few: list[int], shift: int) -> None:
    model = Model(len(few))
    model.hashes = [(value << 62 | 1 << ORDINAL_BITS) >> shift % 40 or 1 for value in few]
    table = model.table()
    for hash_ in {*model.hashes, 1, (1 << 64) - 1}:
        assert table.find(hash_) == model.find(hash_)
    assert table.may_hold(np.array(model.hashes, np.uint64)).all()


def test_three_levels_of_three_hundred_thousand_keys() -> None:
    model = Model(300_000)
    table = model.table()
    keys = np.array(model.keys, np.uint64)
    random = np.random.default_rng(1)
    asked = np.concatenate((keys[::997], keys[::997] + np.uint64(1), random.integers(0, int(keys[-1]) + 9, 300, dtype=np.uint64)))
    expected = np.searchsorted(keys, asked)
    assert np.array_equal(table.ranks(asked), expected)
    assert [table.rank(key) for key in asked[::7].tolist()] == expected[::7].tolist()
    hashes = np.array(model.hashes, np.uint64)
    assert table.may_hold(hashes).all()
    assert all(ordinal in table.find(model.hashes[ordinal]) for ordinal in range(0, 300_000, 1_009))
    foreign = random.integers(1, 1 << 64, 50_000, dtype=np.uint64)
    assert table.may_hold(foreign).mean() < 0.002, "prints tell strangers"
    assert not any(table.find(hash_) for hash_ in foreign[:300].tolist())


def test_a_table_without_ids_holds_none() -> None:
    table = Model(5, hashed=0).table()
    assert not table.may_hold(np.array([1, 1 << 63], np.uint64)).any()
    assert table.find(7) == []
    assert table.ids().tolist() == []


def test_a_table_with_few_ids_denies_none_of_them() -> None:
    """Then there are few buckets, and ordinals take the room of other bits of the hash."""
    model = Model(60_000, hashed=40)
    table = model.table()
    assert table.id_bits == 1 + 16 + 16
    assert all(ordinal in table.find(hash_) for hash_, ordinal in zip(model.hashes, model.hashed, strict=True))
    assert [value & LOW for value in np.sort(table.ids() & np.uint64(LOW)).tolist()] == model.hashed
    assert not table.lacks(np.array(model.hashes, np.uint64), np.array(model.hashed))
    assert table.lacks(np.array([7], np.uint64))


# ── damaged tables ───────────────────────────────────────────────────────────────────────────────────────


def use(table: t.Table, model: Model) -> None:
    """Everything that a table is asked, compared with the model."""
    keys = np.array(near(model), np.uint64)
    assert table.ranks(keys).tolist() == [bisect_left(model.keys, key) for key in keys.tolist()]
    assert table.rank(model.keys[-1]) == len(model.keys) - 1
    assert table.slice(0, len(table)).tolist() == model.keys
    assert table.spans_of(np.arange(len(model.keys)))[0].tolist() == model.positions[:-1]
    assert table.may_hold(np.array(model.hashes, np.uint64)).all()
    assert [table.find(hash_) for hash_ in model.hashes[:9]] == [model.find(hash_) for hash_ in model.hashes[:9]]
    assert table.ending_ordinals().tolist() == model.kills
    assert table.cover == model.cover


def flipped(data: bytes, i: int, mask: int = 0x10) -> memoryview:
    return memoryview(data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :])


def header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def outcome(data: memoryview, model: Model) -> str:
    try:
        table = t.parse_table(PATH, data)
    except t.Damaged:
        return "refused"
    try:
        table.verify()
    except t.Damaged as error:
        return "found" if error.details["table"] is table else "found, but not which one to mend"
    use(table, model)
    return "harmless"


def test_every_flipped_byte_outside_the_padding_is_found() -> None:
    """Behind its document, the first block is filled with zeros that are never read."""
    model = Model(600)
    data = model.data()
    use(model.table(), model)
    end = header_bytes(data)
    for mask in (0x01, 0x10, 0xFF):
        for i in range(end):
            assert outcome(flipped(data, i, mask), model) == "refused", i
    for i in range(end, t.BLOCK, 37):
        assert outcome(flipped(data, i), model) == "harmless", i
    sums = len(data) - 4 * (len(data) // t.BLOCK - 1)
    for i in range(t.BLOCK, sums, 11):
        assert outcome(flipped(data, i), model) == "found", i
    for i in range(sums, len(data)):
        assert outcome(flipped(data, i), model) == "refused", i


QUESTIONS: dict[str, Callable[[t.Table, Model], object]] = {
    "keys": lambda table, model: table.slice(0, len(table)),
    "inner0": lambda table, model: table.rank(model.keys[1]),
    "positions": lambda table, model: table.spans_of(np.arange(len(table))),
    "buckets": lambda table, model: table.may_hold(np.array([1], np.uint64)),
    "prints": lambda table, model: table.may_hold(np.array([1], np.uint64)),
    "ordinals": lambda table, model: [table.find(hash_) for hash_ in model.hashes],
    "kills": lambda table, model: table.ending_ordinals(),
}


def sections(data: bytes) -> dict[str, list[int]]:
    return t.parse_table(PATH, memoryview(data))._sections


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_damaged_section_is_found_at_first_use(name: str) -> None:
    model = Model(600)
    data = model.data()
    table = t.parse_table(PATH, flipped(data, sections(data)[name][0] + 3))
    before = [other for other in QUESTIONS if other not in (name, "inner0", "buckets", "prints", "ordinals")]
    for other in before:
        QUESTIONS[other](table, model)
    with pytest.raises(t.Damaged, match=r"^delay_0000000000.index: the block at \d+ is damaged"):
        QUESTIONS[name](table, model)
    with pytest.raises(t.Damaged):
        table.verify()


def test_one_damaged_leaf_spoils_no_other() -> None:
    model = Model(1_100)
    data = model.data()
    table = t.parse_table(PATH, flipped(data, sections(data)["keys"][0] + t.BLOCK + 5))
    assert table.slice(0, 512).tolist() == model.keys[:512]
    assert table.slice(1024, 1100).tolist() == model.keys[1024:]
    assert table.rank(model.keys[1_050]) == 1_050
    asked: U64 = np.array([model.keys[700]], np.uint64)
    for call in (lambda: table.slice(511, 513), lambda: table.rank(model.keys[700]), lambda: table.ranks(asked)):
        with pytest.raises(t.Damaged):
            call()


def test_a_truncated_table_is_refused_whatever_is_missing() -> None:
    data = Model(600).data()
    for size in (*range(header_bytes(data) + 2), *range(t.BLOCK, len(data), 97), len(data) - 1):
        with pytest.raises(t.Damaged, match=r"^delay_0000000000.index: .* It is built again from its segment"):
            t.parse_table(PATH, memoryview(data[:size]))
    with pytest.raises(t.Damaged):
        t.parse_table(PATH, memoryview(data + b"\0"))


@given(st.binary(max_size=200))
@steady
def test_noise_is_no_table(noise: bytes) -> None:
    with pytest.raises(t.Damaged):
        t.parse_table(PATH, memoryview(noise))


def test_a_table_is_opened_from_its_file_or_there_is_none(tmp_path: Path) -> None:
    model, door = Model(3), Door()
    path = tmp_path / PATH.name
    assert t.open_table(door, path) is None
    path.write_bytes(b"")
    with pytest.raises(t.Damaged):
        t.open_table(door, path)
    path.write_bytes(model.data())
    table = t.open_table(door, path)
    assert table is not None
    path.unlink()
    assert table.slice(0, 3).tolist() == model.keys, "the mapping outlives the name"
