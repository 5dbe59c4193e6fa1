"""Batches that the commit encodes on its thread: the same files, answers and refusals as of small ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turtlemq.errors import InvalidId, TooLarge
from turtlemq.index import writer
from turtlemq.index.recover import open_index
from turtlemq.index.validate import checked
from turtlemq.model import Batch, Progress
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

MANY = 64


def batch(own_ids: bool, headers: bool = False) -> Batch:
    bodies = [b"x" * (n % 7) for n in range(MANY)]
    ids = [f"id-{n}" for n in range(MANY)] if own_ids else None
    return Batch(
        bodies, [10**12 + n for n in range(MANY)], ids, headers=[{"a": str(n)} for n in range(MANY)] if headers else None
    )


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("headers", [False, True])
def test_a_batch_has_the_same_bytes_whoever_encodes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_ids: bool, headers: bool
) -> None:
    files = []
    for large in (10 * MANY, MANY):
        monkeypatch.setattr(writer, "_LARGE", large)
        folder = tmp_path / str(large)
        folder.mkdir()
        index = open_index(Door(), folder, "t", Settings(), Progress())
        for one in (batch(own_ids, headers), checked(Batch([b"y"] * MANY, [10**12] * MANY))):
            index.append(one, 5)
        assert index.check() == []
        index.close()
        files.append((folder / "delay_0000000000.bson").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("extras", [None, [b"", b"\x12a\0" + bytes(8)]])
def test_the_length_of_a_document_is_known_before_it_is_encoded(extras: list[bytes] | None) -> None:
    ids, bodies = [b"a", b"longer"], [b"", b"body"]
    data, lengths = f.encode(ids, bodies, [1, 2], 7, 0, [0, 0], extras)
    assert f.lengths_of(ids, bodies, extras).tolist() == list(lengths)
    assert len(data) == sum(lengths)
    assert f.lengths_of(np.zeros((2, 14), np.uint8), bodies, None).tolist() == [
        n + 14 - len(i) for n, i in zip(f.encode(ids, bodies, [1, 2], 7, 0, [0, 0])[1], ids, strict=True)
    ]
    with pytest.raises(TooLarge):
        f.lengths_of([b"a"], [bytes(f.DOCUMENT_BYTES_MAX)], None)


def test_long_ids_are_checked_together_and_refused_by_index() -> None:
    ids = ["a" * 200, "b" * 200]
    assert checked(Batch([b""] * 2, [1, 1], ids)).ids == ids
    for bad in ("c" * 201, "é" * 101, "d/", "-e", "\n"):
        with pytest.raises(InvalidId) as refused:
            checked(Batch([b""] * 3, [1] * 3, [*ids, bad]))
        assert refused.value.details["index"] == 2
