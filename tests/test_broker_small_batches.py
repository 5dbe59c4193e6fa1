"""Few messages take ways of their own through the broker, without arrays. They must not show: same answers, same bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import SameSecret
from turtlemq import small_batches
from turtlemq.broker import ready_cache
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.ready_cache import RecentDocuments
from turtlemq.broker.ready_tail import Tail
from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.segment import format as f
from turtlemq.server.outgoing.fetch import fetched_bson, fetched_json
from turtlemq.settings import Settings

SMALL = Settings(
    segment_bytes=8192, run_messages=16, max_attempts=3, ttr_ms=50, backoff_base_ms=10, max_in_flight=40, beat_ms=100
)
FEW = small_batches.DOCUMENTS


@contextmanager
def few(count: int) -> Iterator[None]:
    """Arrays are used from this many messages on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_batches, "DOCUMENTS", count)
        yield


# The whole engine, twice

Step = tuple[Any, ...]
NAMES = st.sampled_from(["g", "h"])
MESSAGE = st.tuples(
    st.sampled_from(["", "", "own"]),
    st.integers(0, 20),  # how long it sleeps
    st.sampled_from([0, 0, 0, 30]),  # its time to run
    st.sampled_from([None, None, None, 15]),  # how soon it expires
    st.sampled_from([{}, {}, {"a": "1"}]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(MESSAGE, min_size=1, max_size=5)),
        st.tuples(st.just("submit"), st.lists(MESSAGE, min_size=1, max_size=5)),
        st.tuples(st.just("plain"), st.integers(1, 40)),
        st.tuples(st.just("tick"), st.integers(0, 30)),
        st.tuples(st.just("tick"), st.integers(0, 3)),
        st.tuples(st.just("reserve"), NAMES, st.sampled_from([1, 3, 10, 100]), st.sampled_from([None, None, 20]), st.booleans()),
        st.tuples(st.just("reserve"), NAMES, st.sampled_from([1, 3, 10, 100]), st.none(), st.just(False)),
        st.tuples(st.just("ack"), NAMES, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.0, 0.3])),
        st.tuples(st.just("whole"), NAMES),
        st.tuples(st.just("extend"), NAMES),
        st.tuples(st.just("give back"), NAMES),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("move"), NAMES),
        st.tuples(st.just("level")),
        st.tuples(st.just("beat")),
        st.tuples(st.just("reopen")),
    ),
    min_size=5,
    max_size=40,
)


class Run:
    """One engine, and everything that it said."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.count = root, 1_000, 0
        self.engine = Engine.open(root, door=SameSecret(), settings=SMALL)
        self.held: dict[str, list[list[str]]] = {"g": [], "h": []}
        self.said: list[object] = []

    def do(self, step: Step) -> None:
        self.said.append(getattr(self, step[0].replace(" ", "_"))(*step[1:]))

    def _put(self, messages: list[Message]) -> object:
        self.count += len(messages)
        return self.engine.submit("t", messages, self.now)

    def submit(self, given: list[tuple[Any, ...]]) -> object:
        messages = []
        for n, (own, sleep, ttr, expires, headers) in enumerate(given):
            due = self.now + sleep
            end = None if expires is None else due + expires
            id_ = f"{own}-{self.count + n}" if own else None
            messages.append(Message(b'"x"' * n, due, id=id_, ttr_ms=ttr, expires_ms=end, headers=headers))
        return self._put(messages)

    def plain(self, count: int) -> object:
        return self._put([Message(b"x", self.now) for _ in range(count)])

    def level(self) -> object:
        return self._put([Message(b"x", self.now, priority=Priority.HIGH)])

    def tick(self, ms: int) -> object:
        self.now += ms
        return self.engine.tick(self.now)

    def reserve(self, name: str, count: int, ttr_ms: int | None, auto: bool) -> object:
        out = self.engine.reserve("t", name, count, self.now, ttr_ms=ttr_ms, auto=auto)
        if out.ids and not auto:
            self.held[name].append(out.ids)
        columns = [
            [getattr(piece.messages, column).tolist() for column in ("offsets", "seqs", "due_ms", "ready_ms", "attempts")]
            for piece in out.pieces
        ]
        until = [some.tolist() for some in out.until_ms]
        return (
            out.ids,
            columns,
            until,
            out.documents(),
            b"".join(fetched_json(out)),
            b"".join(fetched_bson(out)),
            out.more,
            out.idle,
        )

    def ack(self, name: str, chance: Any, failing: float) -> object:
        """Any of those that were handed out, some of them gone long since, some twice, some failed."""
        ids = [id_ for batch in self.held[name][-4:] for id_ in batch if chance.random() < 0.7]
        chance.shuffle(ids)
        if chance.random() < 0.3:
            ids += [*ids[:1], "nobody"]
        return self.engine.ack("t", name, [f"-{i}" if chance.random() < failing else i for i in ids], self.now)

    def whole(self, name: str) -> object:
        return self.engine.ack("t", name, self.held[name].pop(), self.now) if self.held[name] else None

    def extend(self, name: str) -> object:
        return self.engine.extend("t", name, [i for ids in self.held[name][-2:] for i in ids[::2]], 200, self.now)

    def give_back(self, name: str) -> object:
        return self.engine.give_back("t", name, [i for ids in self.held[name][-2:] for i in ids[1::2]], self.now)

    def cancel(self, n: int) -> object:
        return self.engine.cancel("t", [f"own-{n}"], self.now)

    def move(self, name: str) -> object:
        return self.engine.move_group("t", name, "earliest", self.now)

    def beat(self) -> None:
        self.engine.topic("t").checkpoint()

    def reopen(self) -> None:
        self.engine.close()
        self.engine = Engine.open(self.root, door=SameSecret(), settings=SMALL)

    def end(self) -> tuple[object, ...]:
        """Everything that can be seen of it."""
        assert self.engine.check() == []
        stats, figures = self.engine.stats("t"), self.engine.groups("t")
        waited = self.engine.topic("t").stores.broker.wait.counts
        self.engine.close()
        files = {path.relative_to(self.root).as_posix(): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        files.pop("LOCK", None)
        return self.said, stats, figures, waited, files


def run(steps: list[Step], count: int) -> tuple[object, ...]:
    with few(count), tempfile.TemporaryDirectory() as folder:
        made = Run(Path(folder))
        made.plain(2)
        for step in steps:
            if step[0] == "ack":  # its dice begin anew, for each of the two
                step[2].seed(len(made.said))
            made.do(step)
        return made.end()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_few_and_many_do_the_same_and_leave_the_same_bytes(steps: list[Step]) -> None:
    assert run(steps, FEW) == run(steps, 0)


def test_that_comparison_takes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    find = RecentDocuments.find

    def noted(self: RecentDocuments, first: int, last: int) -> Any:
        found.append(find(self, first, last))
        return found[-1]

    monkeypatch.setattr(RecentDocuments, "find", noted)
    steps: list[Step] = [
        ("tick", 0),
        ("reserve", "g", 10, None, False),
        ("plain", 3),
        ("tick", 1),
        ("reserve", "g", 10, None, False),
    ]
    assert run(steps, FEW) == run(steps, 0)
    assert [some is not None for some in found] == [False, True], "the first tick of all keeps house, and lets go"


# Which leases hold which ids


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 12), max_size=12))
def test_ids_are_sought_alike(sizes: list[int], wanted: list[int]) -> None:
    def sought(count: int) -> object:
        group = Group("g")
        group.start(0)
        first = 0
        for size in sizes:
            column = np.arange(first, first + size)
            group.lease(MessageColumns(column, column, column, column, column, [str(n) for n in column.tolist()]), 0, 10, "")
            first += size
        with few(count):
            taken, unknown = group.locate([str(n) for n in wanted])
        return [(lease.number, which.tolist()) for lease, which in taken], unknown

    assert sought(FEW) == sought(0)


def test_acknowledging_nothing_enters_no_ids() -> None:
    group = Group("g")
    column = np.arange(2)
    group.lease(MessageColumns(column, column, column, column, column, ["a", "b"]), 0, 10, "")
    assert group.locate([]) == ([], [])
    assert group.whole_lease(["a", "b"]) is not None


# The end of the ready log


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 40))
def test_batches_entered_late_are_those_entered_at_once(sizes: list[int], asked: int) -> None:
    late, prompt = Tail(100, 0), Tail(100, 0)
    at = 100
    for n, size in enumerate(sizes):
        ids = [f"{'g/' if k == 2 else ''}{n}.{k}".encode() for k in range(size)]
        flags = [(0, f.SERVER_ID, f.META, f.NOTICE, f.EXPIRES)[k] for k in range(size)]
        raw, lengths = f.encode(ids, [b"x" * n] * size, [n] * size, 7 * n, 0, flags)
        starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
        for tail in (late, prompt):
            tail.add(at + 50, n, bytes(raw), starts)
        at += 50 + len(raw)
        late.end = prompt.end = at
        prompt.enter_pending()
        assert (late.count, late.last_ready_ms) == (prompt.count, prompt.last_ready_ms)
        if n == asked:
            assert late.rank(n) == prompt.rank(n)
        if n > asked and late.count:
            assert late.spans_small(0, 1) == prompt.spans_small(0, 1), "it was entered before"
    ones, others = late.rows(0, late.count), prompt.rows(0, prompt.count)
    for name in ("starts", "ready_ms", "hashes", "restricted", "owners"):
        assert getattr(ones, name).tolist() == getattr(others, name).tolist()
    if late.count:
        every = np.arange(late.count)
        assert [a.tolist() for a in late.spans_of(every)] == [a.tolist() for a in prompt.spans_of(every)]
        assert late.ready_times(every).tolist() == prompt.ready_times(every).tolist()
        begin, end = (some.tolist() for some in late.spans_of(every))
        for first in (0, late.count - 1):
            assert late.spans_small(first, late.count) == (
                list(zip(begin, end, strict=True))[first:],
                ones.ready_ms[first:].tolist(),
            )
        assert late.may_hold(ones.hashes).all()
        assert prompt.may_hold(ones.hashes).all()
        for hash_ in ones.hashes.tolist():
            assert late.find(hash_) == prompt.find(hash_)


# State in memory


def test_recent_documents_are_found_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_cache, "_BYTES_MAX", 2_000)
    kept = RecentDocuments()
    for n in range(0, 40, 2):
        kept.add(n, 1_000 + n, b"abcd", [0, 3])
    assert kept.find(38, 40) == [(b"abc", 1_038), (b"d", 1_038)]
    assert kept.find(33, 39) is not None, "from both halves"
    assert kept.find(0, 2) is None
    assert kept.find(38, 41) is None, "not all of them"
    kept.add(40, 1, b"x" * 3_000, [0])
    assert kept.find(40, 41) is None, "too large"
    kept.clear()
    assert kept.find(39, 40) is None


def test_a_checkpoint_empties_the_cache_and_the_disk_agrees(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.tick(0)
    engine.submit("t", [Message(b"one", 10, id="1"), Message(b"two", 10, id="2")], 1)
    engine.tick(10)
    ready = logs_of(engine).ready
    assert ready.recent.find(0, 2) is not None
    first = engine.reserve("t", "g", 5, 11)
    engine.topic("t").checkpoint()
    assert ready.recent.find(0, 1) is None
    again = engine.reserve("t", "h", 5, 11)
    assert first.documents() == again.documents()
    assert json.loads(b"".join(fetched_json(first)))["messages"] == json.loads(b"".join(fetched_json(again)))["messages"]
    engine.close()


def test_asking_in_vain_changes_nothing(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"one", 10, id="1")], 1)
    assert not engine.reserve("t", "g", 5, 2).idle, "a group was made"
    before = logs_of(engine).reserve.number
    assert engine.reserve("t", "g", 5, 3).idle
    assert logs_of(engine).reserve.number == before
    assert engine.topic("t").stores.broker.groups["g"].seen_ms == 3
    engine.close()
