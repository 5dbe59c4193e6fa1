"""Deliveries that end without an ack, very many at once: they end in slices, and an error costs no more than one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import abandon, messages, start
from turtlemq.broker import delivery, failures
from turtlemq.broker.events import SETTLE
from turtlemq.broker.journal import Journal
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, Stopped
from turtlemq.model import Message
from turtlemq.topic.dead_letters import DeadLetters, Filter

SLICE = 30
COUNT = 100


@pytest.fixture(autouse=True)
def _small_slices() -> Iterator[None]:
    with patch.object(failures, "SLICE_MESSAGES", SLICE):
        yield


def in_flight(tmp_path: Path, sizes: list[int], **settings: Any) -> Engine:
    engine = start(tmp_path, segment_bytes=1 << 20, **settings)
    engine.submit("t", [Message(b"x" * size, 10, id=f"m{n}") for n, size in enumerate(sizes)], 0)
    engine.tick(10)
    while engine.reserve("t", "g", COUNT, 20).ids:
        pass
    return engine


def counts(engine: Engine) -> tuple[int, int, int]:
    """Messages in flight; dead letters, as the topic and as its group count them."""
    stats = engine.stats("t")
    return stats.reserve, stats.dead, engine.groups("t")["g"].dead


@pytest.mark.parametrize("backoff_ms", [10, 60_000], ids=["retried soon", "put to sleep"])
@pytest.mark.parametrize("max_attempts", [1, 2], ids=["dead", "retried"])
def test_a_tick_ends_one_slice_and_asks_for_the_next(tmp_path: Path, max_attempts: int, backoff_ms: int) -> None:
    engine = in_flight(tmp_path, [10] * COUNT, max_attempts=max_attempts, backoff_base_ms=backoff_ms)
    left = COUNT
    while left:
        wake = engine.tick(2_000)
        assert counts(engine)[0] == max(0, left - SLICE)
        left = counts(engine)[0]
        assert not left or (wake is not None and wake <= 2_000)
    stats = engine.stats("t")
    assert stats.dead + stats.ready + stats.sleep == COUNT
    assert engine.check() == []
    engine.close()


def test_slices_are_bounded_by_bytes(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, [1_000] * 20, max_attempts=1)
    stored: list[int] = []
    store = DeadLetters.store

    def counted(self: DeadLetters, ended: Any) -> int:
        stored.append(len(ended))
        return store(self, ended)

    with patch.object(failures, "SLICE_BYTES", 5_000), patch.object(DeadLetters, "store", counted):
        engine.tick(2_000)
    assert stored == [4] * 5
    assert counts(engine) == (0, 20, 20)
    engine.close()


@pytest.mark.parametrize("journal", ["history", "reserve"])
def test_an_error_behind_the_store_takes_no_message_over_again(tmp_path: Path, journal: str) -> None:
    """The messages were stored, but the event that says so was not written: nothing goes on until the topic is opened again."""
    dead = journal == "history"
    engine = in_flight(tmp_path, [10] * COUNT, max_attempts=1 if dead else 2, backoff_base_ms=60_000)
    append, asked = Journal.append_many, 0

    def broken(self: Journal, *args: Any) -> None:
        nonlocal asked
        if self is getattr(logs_of(engine), journal):
            asked += 1
            if asked == 2:
                raise ValueError("made to fail")
        append(self, *args)

    with patch.object(Journal, "append_many", broken):
        fail_all(engine, dead)
        for _ in range(5):
            fail_all(engine, dead)
        stats = engine.stats("t")
        assert (stats.dead if dead else stats.sleep) == 2 * SLICE, "one slice was noted, one was not"
        assert asked == 2
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=engine.settings)
    stats = engine.stats("t")
    assert (stats.dead if dead else stats.sleep) == 2 * SLICE
    assert counts(engine)[0] == COUNT - 2 * SLICE
    assert engine.groups("t")["g"].dead == stats.dead
    assert engine.check() == []
    engine.close()


def fail_all(engine: Engine, dead: bool) -> None:
    """All deliveries fail: their leases end, or the consumer says so."""
    try:
        if dead:
            engine.tick(2_000)
            engine.tick(2_000)
        else:
            engine.ack("t", "g", [f"-m{n}" for n in range(COUNT)], 30)
    except (ValueError, Stopped):
        return


def test_fetch_of_limited_bytes_passes_over_no_message(tmp_path: Path) -> None:
    """A document that does not fit ends the fetch, even if those behind it, which another table covers, would fit: for limits
    around each document."""
    engine = start(tmp_path, run_messages=50, ttr_ms=100_000)
    sizes = [10] * 49 + [900] + [10] * 50
    for n, size in enumerate(sizes):
        engine.submit("t", [Message(b"x" * size, 10, id=f"m{n}")], 0)
        engine.tick(10 + n)
    for limit in range(2_000, 14_000, 200):
        engine.move_group("t", f"g{limit}", "earliest", 200)
        fetched: list[tuple[str, str]] = []
        with patch.object(delivery, "FETCH_BYTES_MAX", limit):
            while (out := engine.reserve("t", f"g{limit}", 80, 200)).ids:
                fetched += [(id_, document.id) for id_, document in zip(out.ids, out.documents(), strict=True)]
        assert fetched == [(f"m{n}", f"m{n}") for n in range(100)], limit
    assert engine.check() == []
    engine.close()


def test_letters_of_all_slices_are_there(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, [10] * COUNT, max_attempts=1)
    for _ in range(COUNT // SLICE + 1):
        engine.tick(2_000)
    letters = engine.topic("t").view.dead_letters.all(Filter())
    assert sorted(letter.id for letter in letters) == sorted(message.id or "" for message in messages(COUNT))
    engine.close()


def test_topics_take_turns_when_a_tick_must_stop(tmp_path: Path) -> None:
    """A busy topic does not keep the others waiting, although its work was due first: each has its turn before it has another."""
    engine = start(tmp_path, max_attempts=1, ttr_ms=10)
    names = ["a", "b", "c", "t"]
    for name in names:
        engine.move_group(name, "g", "earliest", 0)
        engine.submit(name, messages(COUNT), 0)
    for at, name in enumerate(names):
        engine.topic(name).tick(10)
        assert len(engine.reserve(name, "g", COUNT, 20 + at)) == COUNT
    turns: list[str] = []
    while sum(engine.stats(name).dead for name in names) < len(names) * COUNT:
        wake = engine.tick(100 + len(turns), may_go_on=lambda: False)
        assert len(engine.woken) == 1
        turns += engine.woken
        assert wake is not None
        assert wake <= 100 + len(turns) or len(turns) >= 4 * len(names)
    assert [sorted(turns[at : at + 4]) for at in range(0, 16, 4)] == [names] * 4
    engine.close()


def test_leases_of_many_fetches_end_with_one_sync(tmp_path: Path) -> None:
    engine = start(tmp_path, max_attempts=1)
    engine.submit("t", messages(SLICE), 0)
    engine.tick(10)
    for n in range(SLICE):
        assert engine.reserve("t", "g", 1, 20 + n, consumer=f"c{n}").ids == [f"m{n}"]
    with patch.object(DeadLetters, "store", autospec=True, side_effect=DeadLetters.store) as store:
        engine.tick(2_000)
    assert store.call_count == 1
    assert counts(engine) == (0, SLICE, SLICE)
    settled = next(event for event in logs_of(engine).history.events() if event.fields["event"] == SETTLE)
    assert settled.array("reserved").tolist() == [20 + n for n in range(SLICE)], "each its own"
    engine.close()


def test_lease_extended_twice_to_one_moment_ends_once(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, [10] * 5)
    for _ in range(2):
        assert engine.extend("t", "g", [f"m{n}" for n in range(5)], 500, 30).extended == 5
    engine.tick(2_000)
    stats = engine.stats("t")
    assert (stats.reserve, stats.ready) == (0, 5)
    assert engine.check() == []
    engine.close()


def test_two_letters_of_one_id_are_stored_one_after_the_other(tmp_path: Path) -> None:
    """A requeued letter and its message, after the group was moved back, are in flight together: the later letter replaces."""
    engine = in_flight(tmp_path, [10], max_attempts=1)
    engine.tick(2_000)
    letters = list(engine.topic("t").view.dead_letters.all(Filter()))
    assert engine.requeue("t", letters, 2_000) == 1
    engine.tick(2_000)
    engine.move_group("t", "g", "earliest", 2_000)
    out = engine.reserve("t", "g", 5, 2_010).ids
    engine.tick(20_000)
    assert counts(engine) == (0, 1, 1), out
    assert engine.check() == []
    engine.close()


def test_removal_withdrawn_on_a_full_disk_keeps_the_counts(tmp_path: Path) -> None:
    """There is room for the intent, but neither for the tombstones nor for the event that withdraws it."""
    engine = in_flight(tmp_path, [10] * 5, max_attempts=1)
    engine.tick(2_000)
    letters = list(engine.topic("t").view.dead_letters.all(Filter()))
    append, asked = Journal.append_many, 0

    def full(self: Journal, *args: Any) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise DiskFull
        append(self, *args)

    with patch.object(Journal, "append_many", full), patch.object(DeadLetters, "remove", side_effect=DiskFull):
        with pytest.raises(DiskFull):
            engine.delete_dead("t", letters, 2_000)
        assert counts(engine) == (0, 5, 5)
    engine.topic("t").tick(3_000)  # there is room again
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=engine.settings)
    assert counts(engine) == (0, 5, 5)
    assert engine.check() == []
    engine.close()
