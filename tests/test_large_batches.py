"""Batches that the commit encodes on its thread: the same files, answers and refusals as of small ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.harness.server_process import Server, running
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, InvalidId, TooLarge
from turtlemq.index import validate, writer
from turtlemq.index.columns import as_batch
from turtlemq.index.recover import open_index
from turtlemq.index.validate import checked
from turtlemq.model import Batch, Message, Progress, Receipt
from turtlemq.segment import format as f
from turtlemq.server.handlers.produce import IDS_MAX
from turtlemq.server.incoming import large_batches
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

MANY = 64

NO_OTHERS = {"replaced": 0, "rescheduled": 0, "durable": "fsync"}


def batch(own_ids: bool, headers: bool = False) -> Batch:
    bodies = [b"x" * (n % 7) for n in range(MANY)]
    ids = [f"id-{n}" for n in range(MANY)] if own_ids else None
    return Batch(
        bodies, [10**12 + n for n in range(MANY)], ids, headers=[{"a": str(n)} for n in range(MANY)] if headers else None
    )


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("headers", [False, True])
def test_a_batch_has_the_same_bytes_on_loop_and_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_ids: bool, headers: bool
) -> None:
    files = []
    for large, large_bytes in ((10 * MANY, 1 << 20), (MANY, 1 << 20), (10 * MANY, 0)):
        monkeypatch.setattr(writer, "_LARGE", large)
        monkeypatch.setattr(writer, "_LARGE_BYTES", large_bytes)
        folder = tmp_path / f"{large}-{large_bytes}"
        folder.mkdir()
        index = open_index(Door(), folder, "t", Settings(), Progress())
        for one in (batch(own_ids, headers), checked(Batch([b"y"] * MANY, [10**12] * MANY), 0)):
            index.append(one, 5)
        assert index.check() == []
        index.close()
        files.append((folder / "delay_0000000000.bson").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_few_large_messages_are_encoded_by_the_commit(tmp_path: Path) -> None:
    index = open_index(Door(), tmp_path, "t", Settings(), Progress())
    index.stage(Batch([b"x" * 3_000_000, b"y"], [10**12] * 2), 5)
    small = index.pending
    assert small is not None
    assert not any(map(callable, small.buffers))
    index.stage(Batch([b"x" * 3_000_000] * 2, [10**12] * 2), 5)
    assert [callable(buffer) for buffer in small.buffers] == [False, True]
    index.commit()
    assert (index.stats().sleep, index.check()) == (4, [])
    index.close()


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
    assert checked(Batch([b""] * 2, [1, 1], ids), 7).ids == ids
    for bad in ("c" * 201, "é" * 101, "d/", "-e", "\n"):
        with pytest.raises(InvalidId) as refused:
            checked(Batch([b""] * 3, [1] * 3, [*ids, bad]), 7)
        assert refused.value.details["index"] == 2


def test_no_step_of_a_check_takes_more_than_a_few_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that joins 100,000 long ids in one bytecode keeps the event loop waiting."""
    taken: list[int] = []
    plain = validate._plain_ids

    def watched(ids: Sequence[Any]) -> bool:
        taken.append(len(ids))
        return plain(ids)

    monkeypatch.setattr(validate, "_plain_ids", watched)
    ids: list[str | None] = [f"{n:0200d}" for n in range(10_000)]
    validate.check_ids(ids)
    assert sum(taken) == len(ids)
    assert max(taken) <= 2_048
    ids[9_000], ids[9_001] = None, "a/b"
    with pytest.raises(InvalidId) as refused:
        validate.check_ids(ids)
    assert refused.value.details["index"] == 9_001


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
    again = produce(server, known)
    assert again.pop("duplicate_indexes") == list(range(many))
    assert again == {"ids": [m["id"] for m in known], "created": 0, "duplicates": many, **NO_OTHERS}
    mixed = [_message(n, many) for n in range(many)]
    mixed[7]["id"] = "k7"
    answer = produce(server, mixed)
    twice = [n for n in range(many - 5, many) if "id" in mixed[n] and "id" in mixed[n - many + 5]]
    assert answer["duplicates"] == len(twice) + 1
    assert [given for given, message in zip(answer["ids"], mixed, strict=True) if given != message.get("id", given)] == []
    assert len(set(answer["ids"])) == many - len(twice)
    view = server.ok("GET", f"/v1/topics/t/messages/{answer['ids'][9]}")
    assert (view["body"], view["headers"]) == (9, {"n": "9"})


@pytest.mark.parametrize("more", [-1, 0, 1, IDS_MAX + 1])
def test_all_ids_are_answered_in_order(server: Server, more: int) -> None:
    """The answer is written in slices."""
    many = IDS_MAX + more
    own = [f"o{more}-{n}" for n in range(many)]
    answer = produce(server, [{"id": id_, "body": 1, "delay": 60} for id_ in own])
    assert answer == {"ids": own, "created": many, "duplicates": 0, **NO_OTHERS}
    given = produce(server, [{"body": 1, "delay": 60}] * many)["ids"]
    assert len(given) == many
    assert sorted(set(given)) == given


def test_a_bad_message_in_a_large_batch_is_named(server: Server) -> None:
    many = large_batches.LARGE
    messages: list[dict[str, Any]] = [{"body": n} for n in range(many)]
    refused = server.call("POST", "/v1/topics/u/messages", {"messages": [*messages, {"body": 1, "id": "a/b"}]})
    assert (refused.status, refused.code, refused.json["error"]["index"]) == (400, "INVALID_ID", many)
    assert server.call("GET", "/v1/topics/u").status == 404


class Stub:
    """As much of a `Service` as is needed: an engine, and turns between which other requests do something."""

    def __init__(self, folder: Path, meanwhile: Callable[[Engine], object]) -> None:
        self.engine, self.turns, self._meanwhile, self._turns = Engine.open(folder), self, meanwhile, 0

    async def turn(self, topic: str = "", cost: int = 0) -> None:
        self._turns += 1
        if self._turns == 3:
            self._meanwhile(self.engine)

    def put(self, ids: Sequence[str | None]) -> Receipt:
        """A large batch, looked up in slices."""
        batch, service = Batch([b"b"] * len(ids), [10**12] * len(ids), ids), cast(Any, self)
        prepared = asyncio.run(large_batches.prepare(service, "t", batch, 5))
        topic, receipt = large_batches.stage(service, "t", prepared, 6)
        large_batches.finish(prepared)
        topic.commit()
        return receipt


def one(id_: str) -> Message:
    return Message(b"other", 10**12, id_)


@pytest.mark.parametrize(
    ("meanwhile", "known"),
    [
        (lambda engine: None, {0, 10}),
        (
            lambda engine: engine.submit("t", [one("i25"), one("other")], 5),
            {0, 10, 25},
        ),  # will be looked up
        (lambda engine: engine.submit("t", [one("i1"), one("i99")], 5), {0, 10, 1, 99}),
        (lambda engine: engine.cancel("t", ["i10"], 5), {0, 10}),
        (lambda engine: engine.drop_topic("t"), {10}),  # of the batch itself: the id stands in it twice
    ],
)
def test_other_requests_between_two_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Engine], object], known: set[int]
) -> None:
    monkeypatch.setattr(large_batches, "SLICE", 10)
    stub = Stub(tmp_path, meanwhile)
    stub.engine.submit("t", [one("i0")], 4)
    ids: list[str | None] = [f"i{n}" for n in range(100)]
    ids[10], ids[50] = "i9", None
    receipt = stub.put(ids)
    assert {i for i, created in enumerate(receipt.created) if not created} == known
    assert [given for given, id_ in zip(receipt.ids, ids, strict=True) if id_ is not None and given != id_] == []
    assert stub.engine.check() == []
    assert all(stub.engine.get("t", id_) is not None for i, id_ in enumerate(receipt.ids) if i != 10)
    stub.engine.close()


def test_a_failed_commit_makes_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request has staged an id when it is looked up, and its commit fails before the batch is staged."""
    monkeypatch.setattr(large_batches, "SLICE", 10)
    monkeypatch.setattr(Door, "write", full := FullOnce(Door.write))
    stub = Stub(tmp_path, lambda engine: full.strike(engine.topics["t"].commit))
    stub.engine.submit("t", [one("x")], 4)
    stub.engine.stage("t", as_batch([one("i3")]), 5)
    receipt = stub.put([f"i{n}" for n in range(100)])
    assert all(receipt.created)
    assert stub.engine.get("t", "i3") is not None
    stub.engine.close()


def test_staging_copies_no_ids_of_a_large_batch(tmp_path: Path) -> None:
    """The set of its ids was made on a thread. While it is staged, its ids count as held, also for other large batches."""
    stub = Stub(tmp_path, lambda engine: None)
    stub.engine.topic("t", create=True)
    service, ids = cast(Any, stub), [f"i{n}" for n in range(100)]
    first, other = (
        asyncio.run(large_batches.prepare(service, "t", Batch([b"b"] * 100, [10**12] * 100, ids), 5)) for _ in range(2)
    )
    topic, receipt = large_batches.stage(service, "t", first, 6)
    group = topic.pending_commit
    assert group is not None
    assert [held is first.batch.own_ids for held in group.ids] == [True]
    assert stub.engine.stage("t", as_batch([one("i7"), one("x")]), 6)[1].created == [False, True]
    assert large_batches.stage(service, "t", other, 6)[1].created == [False] * 100
    assert all(receipt.created)
    topic.commit()
    assert stub.engine.submit("t", [one("i7")], 7).created == [False]
    stub.engine.close()


class FullOnce:
    """`Door.write` on a disk that is full for one commit."""

    def __init__(self, write: Callable[..., int]) -> None:
        self._write, self._is_full = write, False

    def __get__(self, door: Door, _: type) -> Callable[..., int]:
        return lambda *args: self._fail() if self._is_full else self._write(door, *args)

    def _fail(self) -> int:
        raise DiskFull

    def strike(self, commit: Callable[[], object]) -> None:
        self._is_full = True
        with pytest.raises(DiskFull):
            commit()
        self._is_full = False
