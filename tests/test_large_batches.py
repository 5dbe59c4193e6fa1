"""Batches that the commit encodes on its thread: the same files, answers and refusals as of small ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.server_process import Server, running
from turtlemq.errors import InvalidId, TooLarge
from turtlemq.index import writer
from turtlemq.index.recover import open_index
from turtlemq.index.validate import checked
from turtlemq.model import Batch, Progress
from turtlemq.segment import format as f
from turtlemq.server.incoming import large_batches
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("large") / "data") as one:
        yield one


def produce(server: Server, messages: list[dict[str, Any]]) -> Any:
    return server.ok("POST", "/v1/topics/t/messages", {"messages": messages})


def _message(n: int, many: int) -> dict[str, Any]:
    """The last five have the ids of the first five; every third has none."""
    own_id = {"id": f"n{n % (many - 5)}"} if n % 3 else {}
    return {"body": n} | own_id | ({"headers": {"n": str(n)}} if n % 2 else {})


def test_duplicates_in_large_batches_are_left_out(server: Server) -> None:
    """Known ids, sleeping and ready; ids twice in one batch, far from each other; messages without an id."""
    many = large_batches.LARGE + 10
    known = [{"id": f"k{n}", "body": n, "delay": 3_600 * (n % 2)} for n in range(many)]
    assert produce(server, known)["created"] == many
    assert produce(server, known) == {"ids": [m["id"] for m in known], "created": 0, "duplicates": many, "durable": "fsync"}
    mixed = [_message(n, many) for n in range(many)]
    mixed[7]["id"] = "k7"
    answer = produce(server, mixed)
    twice = [n for n in range(many - 5, many) if "id" in mixed[n] and "id" in mixed[n - many + 5]]
    assert answer["duplicates"] == len(twice) + 1
    assert [given for given, message in zip(answer["ids"], mixed, strict=True) if given != message.get("id", given)] == []
    assert len(set(answer["ids"])) == many - len(twice)
    view = server.ok("GET", f"/v1/topics/t/messages/{answer['ids'][9]}")
    assert (view["body"], view["headers"]) == (9, {"n": "9"})


def test_a_bad_message_in_a_large_batch_is_named(server: Server) -> None:
    many = large_batches.LARGE
    messages: list[dict[str, Any]] = [{"body": n} for n in range(many)]
    refused = server.call("POST", "/v1/topics/u/messages", {"messages": [*messages, {"body": 1, "id": "a/b"}]})
    assert (refused.status, refused.code, refused.json["error"]["index"]) == (400, "INVALID_ID", many)
    assert server.call("GET", "/v1/topics/u").status == 404
