"""A plain model of a table file: sorted keys, positions, hashes, in lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from turtlemq.model import ORDINAL_BITS
from turtlemq.segment import table as t

PATH = Path("delay_0000000000.index")


class Model:
    """Keys, positions and hashes of a table, as plain lists."""

    def __init__(self, count: int, seed: int = 0, hashed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        due = random.integers(0, max(1, count // 3) + 1, count, dtype=np.uint64)
        self.keys: list[int] = np.sort(due << np.uint64(ORDINAL_BITS) | np.arange(count, dtype=np.uint64)).tolist()
        self.positions: list[int] = np.cumsum(random.integers(70, 300, count + 1)).tolist()
        self.hashed = list(range(count if hashed is None else hashed))
        self.hashes: list[int] = random.integers(1, 1 << 64, len(self.hashed), dtype=np.uint64).tolist()
        self.kills: list[int] = np.flatnonzero(random.integers(0, 5, count) == 0).tolist()
        self.cover = t.Cover(0, 1, 0, count, 158, self.positions[-1], 5, 5 + count, 9)

    def data(self) -> bytes:
        hashes = np.array(self.hashes, np.uint64)
        arrays: list[Any] = [np.array(column, np.int64) for column in (self.positions, self.hashed, self.kills)]
        return b"".join(t.build(self.cover, np.array(self.keys, np.uint64), arrays[0], hashes, arrays[1], arrays[2]))

    def table(self) -> t.Table:
        return t.parse_table(PATH, memoryview(self.data()))

    def find(self, hash_: int) -> list[int]:
        return [o for h, o in zip(self.hashes, self.hashed, strict=True) if h >> ORDINAL_BITS == hash_ >> ORDINAL_BITS][::-1]
