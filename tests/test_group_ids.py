"""Hashes of ids like group/id: all groups share their upper bits, so that one lookup finds the documents of all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turtlemq.model import SEGMENT_MESSAGES_MAX, U64
from turtlemq.segment import bloom
from turtlemq.segment import table as t
from turtlemq.segment.ids import (
    GROUP_BITS,
    ID_MASK,
    SERVER_ID_BYTES,
    hash_any,
    hash_group_ids,
    hash_id,
    hash_ids,
    hash_texts,
    server_ids,
)

SEED = 7
names = st.text("abc-", min_size=1, max_size=5)


def table(hashes: U64, hashed: list[int], documents: int) -> t.Table:
    cover = t.Cover(0, 0, 0, documents, 0, documents, 0, documents - 1, 0)
    keys, positions = np.arange(documents, dtype=np.uint64), np.arange(documents + 1)
    data = b"".join(t.build(cover, keys, positions, hashes, np.array(hashed, np.int64), np.empty(0, np.int64), seed=SEED))
    return t.parse_table(Path("x.run"), memoryview(data))


@given(names, names, names)
def test_groups_share_the_upper_bits_of_an_id(one: str, other: str, id_: str) -> None:
    hashes = hash_any([f"{one}/{id_}".encode(), f"{other}/{id_}".encode()], SEED)
    assert {*(hashes & ID_MASK).tolist()} == {*hash_group_ids([id_.encode()], SEED).tolist()}
    assert (hashes[0] == hashes[1]) == (one == other)
    assert hashes.tolist() == [hash_id(f"{name}/{id_}", SEED) for name in (one, other)]


def test_pair_of_the_length_of_server_given_ids_is_hashed() -> None:
    (pair,) = [b"audit/order-18"]
    assert len(pair) == SERVER_ID_BYTES
    one, every = hash_id(pair.decode(), SEED), hash_any([pair], SEED)
    assert [one] == every.tolist() == hash_ids(pair + b"\0", np.array([0]), np.array([len(pair)]), SEED).tolist()


def test_hashes_without_a_seed_are_those_of_older_versions() -> None:
    ids = [b"g/a", b"h/a", b"a"]
    assert hash_any(ids, 0).tolist() == hash_texts(ids, 0).tolist()


@pytest.mark.parametrize("documents", [60, 3_000, 1 << 18])
@pytest.mark.parametrize("groups", [1, 7, 50])
def test_table_finds_an_id_in_all_groups(documents: int, groups: int) -> None:
    ids = [f"m{i}" for i in range(max(1, 40 // groups))] + server_ids(5 << 20, 2)
    pairs = [f"g{k}/{id_}".encode() for id_ in ids for k in range(groups)][:documents]
    others = [f"other{i}".encode() for i in range(min(documents - len(pairs), 50_000))]
    found = table(hash_any(pairs + others, SEED), list(range(len(pairs) + len(others))), documents)
    for wanted in ([ids[0]], ids, [*ids, *(f"unknown{i}" for i in range(200))]):
        ordinals = found.find_groups(hash_group_ids([id_.encode() for id_ in wanted], SEED))
        expected = [i for i, pair in enumerate(pairs) if pair.decode().partition("/")[2] in wanted]
        assert set(expected) <= set(ordinals)
        assert len(ordinals) <= len(expected) + 2
    few = table(hash_any(pairs, SEED), list(range(len(pairs))), documents)  # fewer bits of each hash, if documents are many
    assert set(range(groups)) <= set(few.find_groups(hash_group_ids([ids[0].encode()], SEED)))


def test_filter_passes_ids_of_all_groups() -> None:
    ids = [f"m{i}".encode() for i in range(500)]
    hashes = np.sort(hash_any([b"g%d/%b" % (k, id_) for id_ in ids for k in range(8)], SEED))
    words = bloom.words_for(len(hashes))
    into = np.zeros(words, np.uint64)
    bloom.enter(hashes, into, 0, words)
    made = bloom.BloomFilter(memoryview(into.tobytes()))
    assert made.may_hold_groups(hash_group_ids(ids, SEED)).tolist() == list(range(500))
    unknown = hash_group_ids([f"x{i}".encode() for i in range(2_000)], SEED)
    assert len(made.may_hold_groups(unknown)) < 400


def test_bits_of_groups_choose_neither_bucket_nor_fingerprint() -> None:
    assert 64 - t._bucket_bits(SEGMENT_MESSAGES_MAX) - 16 >= GROUP_BITS
