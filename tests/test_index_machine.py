"""The Index against a dict, driven by Hypothesis: producers, time, receiver, housekeeping, crashes and damaged index files come
in any order, each message is in exactly one state, nothing fires early, twice or out of order, and nothing is lost.

    TURTLEMQ_MACHINE_EXAMPLES=2000 pytest tests/test_index_machine.py     a long run, with new examples each time
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.harness.index_world import Later, World, replace_by, spoil
from turtlemq.model import Batch
from turtlemq.segment import format as f
from turtlemq.settings import Settings

LONG = int(os.environ.get("TURTLEMQ_MACHINE_EXAMPLES", "0"))

OWN = ["a", "b", "c", "d", "e", "ä-ö", "order 7", "t0000000000000", "x" * 200]
ids = st.one_of(st.none(), st.sampled_from(OWN), st.integers(0, 40).map(lambda n: f"id-{n}"))
dues = st.one_of(st.integers(0, 60), st.sampled_from([5, 5, 5, 20, 20, 1000, 10**12]))
bodies = st.one_of(st.binary(max_size=8), st.integers(0, 3000).map(lambda n: b"b" * n))
hows = st.sampled_from(["delete", "flip", "cut", "zero", "garbage"])
picks = st.integers(0, 1 << 16)


@st.composite
def rich_batches(draw: st.DrawFn) -> Batch:
    """A few messages with everything that a message can have."""
    n = draw(st.integers(1, 4))

    def column(items: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(items, min_size=n, max_size=n))

    return Batch(
        bodies=column(bodies),  # type: ignore[arg-type]
        due_ms=column(dues),  # type: ignore[arg-type]
        ids=column(ids),  # type: ignore[arg-type]
        ttr_ms=column(st.integers(0, 99)),  # type: ignore[arg-type]
        flags=column(st.sampled_from([0, 1, 2, f.JSON, f.JSON | 1])),  # type: ignore[arg-type]
        expires_ms=column(st.one_of(st.none(), st.integers(4 * 10**12, 4 * 10**12 + 99))),  # type: ignore[arg-type]
        headers=column(st.one_of(st.none(), st.just({}), st.just({"k": "v"}))),  # type: ignore[arg-type]
    )


class Machine(RuleBasedStateMachine):
    """Rules are verbs of the Index; `World` compares each with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="turtlemq-", dir=_RAM))
        self.now = 0

    @initialize(
        run=st.integers(1, 16),
        size=st.sampled_from([4096, 4096, 9000, 1 << 20]),
        ratio=st.sampled_from([0.05, 0.5]),
        later=st.booleans(),
    )
    def begin(self, run: int, size: int, ratio: float, later: bool) -> None:
        shape = Settings(segment_bytes=size, run_messages=run, compact_live_ratio=ratio)
        self.world = World(self.root / "t", shape, flusher=Later() if later else None)

    # Producing

    @rule(batch=rich_batches(), sync=st.booleans())
    def append(self, batch: Batch, sync: bool) -> None:
        self.world.append(batch, self.now, sync=sync)

    @rule(due=dues, n=st.integers(1, 60), spread=st.integers(0, 3))
    def append_many(self, due: int, n: int, spread: int) -> None:
        """Ids that the server gives, enough of them to travel as arrays."""
        self.world.append(Batch([b"%d" % i for i in range(n)], [due + i * spread % 7 for i in range(n)]), self.now)

    @rule(due=dues, first=st.integers(0, 40), n=st.integers(24, 40), prefix=st.sampled_from(["id", "other", "x" * 30]))
    def append_own(self, due: int, first: int, n: int, prefix: str) -> None:
        own: list[str | None] = [f"{prefix}-{first + i % 30}" for i in range(n)]
        self.world.append(Batch([b"own"] * n, [due] * n, ids=own), self.now)

    @rule(batch=rich_batches())
    def stage(self, batch: Batch) -> None:
        """Some later commit takes it along; a crash takes it away."""
        self.world.stage(batch, self.now)

    @rule(some=st.lists(picks, min_size=1, max_size=3))
    def stage_cancel(self, some: list[int]) -> None:
        self.world.cancel([self._id(pick) for pick in some], commit=False)

    @rule()
    def commit(self) -> None:
        self.world.index.commit()

    # One message

    def _id(self, pick: int) -> str:
        known = [*self.world.asleep, *self.world.handed, *self.world.cancelled, *OWN]
        return known[pick % len(known)]

    @rule(some=st.lists(picks, min_size=1, max_size=5))
    def cancel(self, some: list[int]) -> None:
        self.world.cancel([self._id(pick) for pick in some])

    @rule(first=picks, n=st.integers(10, 60))
    def cancel_many(self, first: int, n: int) -> None:
        """Most sleepers, so that segments run empty."""
        known = list(self.world.asleep)
        if known:
            self.world.cancel([known[(first + i) % len(known)] for i in range(n)])

    @rule(pick=picks, due=st.one_of(st.none(), dues), body=st.one_of(st.none(), bodies), headed=st.booleans())
    def reschedule(self, pick: int, due: int | None, body: bytes | None, headed: bool) -> None:
        self.world.reschedule(self._id(pick), self.now, due, body, {"h": "1"} if headed else None)

    # Time

    @rule(now=st.integers(0, 70))
    def set_clock(self, now: int) -> None:
        self.now = now

    @rule(by=st.integers(1, 10))
    def pass_time(self, by: int) -> None:
        self.now += by

    @rule(count=st.integers(1, 6), size=st.sampled_from([1, 300, 5000, 1 << 24]), store=st.booleans())
    def fire_some(self, count: int, size: int, store: bool) -> None:
        self.world.due(self.now, count_max=count, bytes_max=size, store=store)

    @rule(count=st.sampled_from([3, 10_000]))
    def fire_all(self, count: int) -> None:
        self.world.drain(self.now, count)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def crash_after_the_receiver_stored(self) -> None:
        """Stored durably there, but the Index never heard of it."""
        due = self.world.due(self.now, count_max=5, store=False)
        if due is not None and len(due):
            self.world.receiver.store(due)
            self.world.receiver.sync()
            for batch in self.world.receiver.durable[-1:]:
                for document in batch:
                    self.world.handed[document.id] = self.world.asleep.pop(document.id)
            self.world.reopen(clean=False)

    # Housekeeping

    @rule()
    def flush(self) -> None:
        self.world.index.maintenance.flush()

    @precondition(lambda self: self.world.flusher is not None and self.world.flusher.jobs)
    @rule()
    def tables_are_written(self) -> None:
        assert self.world.flusher is not None
        self.world.flusher.finish()

    @rule()
    def roll(self) -> None:
        self.world.roll()

    @precondition(lambda self: self.world.sealed is None)
    @rule(pick=picks)
    def seal(self, pick: int) -> None:
        live = [base for base in self.world.closed if self.world.index._segments.by_base[base].live]
        if live:
            self.world.seal(live[pick % len(live)])

    @precondition(lambda self: self.world.sealed is not None)
    @rule()
    def adopt(self) -> None:
        self.world.adopt()

    @precondition(lambda self: self.world.sealed is not None)
    @rule()
    def crash_while_adopting(self) -> None:
        self.world.cut_adoption()

    @rule(pick=picks, budget=st.integers(1, 5))
    def compact(self, pick: int, budget: int) -> None:
        if closed := self.world.closed:
            self.world.index.maintenance.compact(closed[pick % len(closed)], budget)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        if closed := self.world.closed:
            self.world.index.maintenance.drop(closed[pick % len(closed)])

    @rule(budget=st.integers(1, 50))
    def step(self, budget: int) -> None:
        if self.world.sealed is None:
            self.world.step(budget)
        else:
            self.world.index.maintenance.step(budget, self.world.busy)

    @rule()
    def keep_house(self) -> None:
        if self.world.sealed is None:
            self.world.keep_house()

    # Ends, beginnings and damage

    @rule(mark=st.booleans())
    def reopen(self, mark: bool) -> None:
        self.world.reopen(mark=mark)

    @rule()
    def crash(self) -> None:
        self.world.reopen(clean=False)

    @rule(some=st.lists(st.tuples(picks, hows, picks), min_size=1, max_size=4), clean=st.booleans())
    def reopen_with_damaged_caches(self, some: list[tuple[int, str, int]], clean: bool) -> None:
        def meanwhile() -> None:
            for pick, how, at in some:
                if files := self.world.caches():
                    spoil(files[pick % len(files)], how, at)

        self.world.reopen(clean=clean, meanwhile=meanwhile)

    @rule(kind=st.sampled_from([".dead", ".index", ".run", ""]))
    def reopen_without_caches(self, kind: str) -> None:
        def meanwhile() -> None:
            for path in self.world.caches():
                if path.name.endswith(kind):
                    path.unlink()

        self.world.reopen(clean=False, meanwhile=meanwhile)

    @rule(pick=picks, how=hows, at=picks)
    def damage_a_cache_while_open(self, pick: int, how: str, at: int) -> None:
        files = [path for path in self.world.caches() if not path.name.endswith(".tmp")]
        if files:
            replace_by(files[pick % len(files)], how, at)

    @rule(pick=picks, block=picks)
    def damage_a_block_not_yet_read(self, pick: int, block: int) -> None:
        files = [path for path in self.world.caches() if not path.name.endswith((".tmp", ".dead"))]
        if files:
            self.world.damage_unread(files[pick % len(files)], block)

    # Invariants

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "world") and self.world.open:
            self.world.compare()

    @rule(limit=st.integers(1, 30))
    def look_at_everything(self, limit: int) -> None:
        self.world.compare_all(limit)

    @rule(bucket=st.integers(1, 30), buckets=st.integers(1, 40))
    def forecast(self, bucket: int, buckets: int) -> None:
        self.world.forecast(self.now, bucket, buckets)

    def teardown(self) -> None:
        try:
            if hasattr(self, "world") and self.world.open:
                self.world.compare_all()
                self.world.index.close()
                self.world.index._segments.door.shut()
        finally:
            shutil.rmtree(self.root)


_RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def profile(examples: int, steps: int) -> settings:
    """Equal examples in every run, unless a long run was asked for."""
    return settings(
        max_examples=LONG or examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Brief(Machine):
    """A taste of it, for every commit."""


TestIndexBriefly = Brief.TestCase
TestIndexBriefly.settings = profile(10, 40)
TestIndexAtLength = pytest.mark.slow(Machine.TestCase)
TestIndexAtLength.settings = profile(60, 70)
