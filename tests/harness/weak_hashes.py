"""Weak hashes of ids, and secrets of a data folder that change: a few ids meet the collisions that an attacker would make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from turtlemq import data_folder
from turtlemq.model import U64
from turtlemq.segment import ids

_REPEATED = 0x1111_1111_1111_1111  # four bits, in all places of a hash
_xxh3, _mix = ids._xxh3, ids._mix


@contextmanager
def weak_hashes(seed: int) -> Iterator[list[str]]:
    """Meanwhile, for half of the seeds, the hashes of ids have four bits; for half, each opening of a folder gets another secret.
    Yields the names of these variants."""
    chance = Random(seed)
    weak, changing = chance.random() < 0.5, chance.random() < 0.5
    secrets = cycle(chance.sample([0, 0, 7, 8, 9], 5))
    with (
        patch.multiple(ids, _xxh3=_four_bits, _mix=_four_bits_each) if weak else nullcontext(),
        patch.object(data_folder, "hash_seed", lambda _, __: next(secrets)) if changing else nullcontext(),
    ):
        yield [name for name, so in (("weak hashes", weak), ("changed secrets", changing)) if so]


def _four_bits(data: bytes, seed: int) -> int:
    return (_xxh3(data, seed) & 15) * _REPEATED


def _four_bits_each(seqs: U64, seed: int) -> Any:
    return np.maximum((_mix(seqs, seed) & np.uint64(15)) * np.uint64(_REPEATED), np.uint64(1))
