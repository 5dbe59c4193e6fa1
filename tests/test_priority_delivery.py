"""Delivery by priority from a ready log whose messages are found through columns of priorities in tables and tail.

The worst defects would be silent: an offset that is skipped or delivered twice, a priority that starves, a forgotten retry.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turtlemq import small_batches
from turtlemq.broker import delivery, ready_log, ready_tail
from turtlemq.broker.priorities import HIGH, LEVELS, LOW, NORMAL
from turtlemq.broker.ready_columns import find_level, levels_at
from turtlemq.broker.ready_tail import Rows
from turtlemq.broker.retry_queue import Retry, RetryQueue
from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.settings import Settings

SETTINGS = Settings(segment_bytes=8192, run_messages=8, backoff_base_ms=0, max_attempts=1_000, ttr_ms=10**9, preempt_after_ms=0)
LETTERS = {HIGH: "h", NORMAL: "n", LOW: "l"}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.open(tmp_path, settings=SETTINGS)


def put(engine: Engine, ids: list[str], at: int = 10, **more: Any) -> None:
    """Messages that are ready at once; the first letter of an id tells its priority."""
    priorities = {letter: Priority(level) for level, letter in LETTERS.items()}
    engine.submit("t", [Message(more.get("body", b"b"), at, id=id_, priority=priorities[id_[0]]) for id_ in ids], at)
    while (wake := engine.tick(at)) is not None and wake <= at:
        pass


def many(letter: str, count: int, first: int = 0) -> list[str]:
    return [f"{letter}{i}" for i in range(first, first + count)]


def ready_log_of(engine: Engine) -> ready_log.ReadyLog:
    return engine.topic("t").stores.broker._state.logs.ready


def of_level(ids: list[str], letter: str) -> list[str]:
    return [id_ for id_ in ids if id_[0] == letter]


# ── the columns ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_columns_know_every_priority_in_tables_and_tail(engine: Engine) -> None:
    dice = random.Random(1)
    ids = [f"{dice.choice('hnnl')}{i}" for i in range(300)]
    for first in range(0, len(ids), 7):
        put(engine, ids[first : first + 7], first + 1)
    ready = ready_log_of(engine)
    assert len(ready.segments) > 1
    assert ready.tail.count
    expected = np.array([{"h": HIGH, "n": NORMAL, "l": LOW}[id_[0]] for id_ in ids])
    assert levels_at(ready, np.arange(300)).tolist() == expected.tolist()
    for level in LEVELS:
        offsets = np.flatnonzero(expected == level)
        for first, last, count in ((0, 300, 1_000), (0, 300, 3), (17, 60, 1_000), (290, 300, 5), (40, 40, 5)):
            inside = offsets[(offsets >= first) & (offsets < last)][:count]
            assert find_level(ready, level, first, last, count).tolist() == inside.tolist()
    assert engine.check() == []


def test_tables_of_normal_messages_alone_keep_no_column(engine: Engine) -> None:
    for first in range(0, 100, 10):
        put(engine, many("n", 10, first))
    tables = [table for segment in ready_log_of(engine).segments for table in segment.tables]
    assert tables
    assert all(table.has_levels and table._sections["levels"][1] == 0 for table in tables)
    assert all(not table.levels(0, table.cover.documents).any() for table in tables)


def test_a_table_of_an_older_version_is_made_again_when_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_levels(cover: t.Cover, rows: Rows, seed: int, has_levels: bool = False) -> list[bytes]:
        return written(cover, rows, seed, has_levels)

    written = ready_tail.encode_table
    with monkeypatch.context() as older:
        older.setattr(ready_log, "encode_table", without_levels)
        engine = Engine.open(tmp_path, settings=SETTINGS)
        for ids in (many("l", 100), many("h", 3), many("l", 100, 100)):
            put(engine, ids)
        tables = [table for segment in ready_log_of(engine).segments for table in segment.tables]
        assert sum(table.cover.documents for table in tables) >= 103, "high ones among them"
        assert not any(table.has_levels for table in tables)
        engine.close()
    engine = Engine.open(tmp_path, settings=SETTINGS)
    assert engine.check() == [], "a table without priorities is no damage"
    assert of_level(engine.reserve("t", "g", 10, 11).ids, "h") == many("h", 3)
    assert all(table.has_levels for segment in ready_log_of(engine).segments for table in segment.tables)
    assert engine.check() == []


# ── messages found through them ────────────────────────────────────────────────────────────────────────────────────────


def test_only_delivered_documents_are_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(engine, [*many("l", 2_000), *many("h", 50)])
    read: list[int] = []
    reading = log.read_documents

    def counting(door: Any, path: Path, starts: Any, ends: Any) -> Any:
        read.append(len(starts))
        return reading(door, path, starts, ends)

    monkeypatch.setattr(log, "read_documents", counting)
    for _ in range(4):
        assert len(engine.reserve("t", "g", 10, 11)) == 10
    assert sum(read) == 40


def test_a_search_that_is_cut_short_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SEARCHED_MAX", 16)
    put(engine, [*many("l", 100), "h0"])
    empty = engine.reserve("t", "g", 1, 11, low=0)
    assert (empty.ids, empty.more) == ([], True)
    fetched = [engine.reserve("t", "g", 1, 11, low=0).ids for _ in range(8)]
    assert [ids for ids in fetched if ids] == [["h0"]]
    assert engine.check() == []
    assert [id_ for _ in range(8) for id_ in engine.reserve("t", "g", 200, 11).ids] == many("l", 100)


@pytest.mark.parametrize("threshold", [0, 1_000])
def test_high_comes_first_when_all_fits_in_one_fetch(engine: Engine, monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    monkeypatch.setattr(small_batches, "DOCUMENTS", threshold)
    put(engine, ["l0", "n0", "h0", "l1", "h1", "n1"])
    assert engine.reserve("t", "g", 10, 11).ids == ["h0", "h1", "n0", "n1", "l0", "l1"]
    put(engine, ["n2", "l2", "h2", "l3"])
    assert engine.reserve("t", "g", 10, 12, low=1).ids == ["h2", "n2", "l2"]
    assert engine.reserve("t", "g", 10, 12, low=1).ids == ["l3"]
    assert engine.check() == []


def test_large_messages_of_one_priority_leave_room_for_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FETCH_BYTES_MAX", 10_000)
    for letter in "lnh":
        put(engine, many(letter, 40), body=bytes(900))
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 100, 11).ids).keys() == {"h", "n", "l"}
    monkeypatch.setattr(delivery, "FETCH_BYTES_MAX", 1_000)
    taken = [id_ for _ in range(40) for id_ in engine.reserve("t", "g", 100, 11).ids]
    shares = Counter(id_[0] for id_ in taken)
    assert len(taken) == 40, "one fits"
    assert shares["h"] > shares["n"] > shares["l"] > 0


def test_weights_are_settings_and_zero_takes_what_is_left_over(tmp_path: Path) -> None:
    settings = replace(SETTINGS, priority_high=1, priority_normal=1, priority_low=0)
    engine = Engine.open(tmp_path, settings=settings)
    put(engine, [*many("l", 50), *many("n", 10), *many("h", 10)])
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 10, 11).ids) == {"h": 5, "n": 5}
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 20, 11).ids) == {"h": 5, "n": 5, "l": 10}


def test_high_pre_empts_and_low_keeps_its_floor(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=replace(SETTINGS, preempt_after_ms=50, preempt_floor=0.05))
    put(engine, [*many("l", 300), *many("n", 300), *many("h", 60)])
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 100, 60).ids) == {"h": 60, "n": 30, "l": 10}, "in time"
    put(engine, many("h", 90, 100), 100)
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 100, 151).ids) == {"h": 90, "n": 5, "l": 5}
    put(engine, many("h", 70, 200), 200)
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 100, 201).ids)["h"] == 70, "it lasts"
    put(engine, many("h", 70, 300), 1_300)
    assert Counter(id_[0] for id_ in engine.reserve("t", "g", 100, 1_301).ids)["h"] == 60, "none was ready for a second"
    assert engine.check() == []


def test_the_weight_of_high_rises_while_it_waits_and_falls_again(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=replace(SETTINGS, priority_high_p95_ms=100))
    weights: list[float] = []
    for second in range(60):
        now = 10_000 + 1_000 * second
        put(engine, [*many("l", 30, 100 * second), *many("h", 30, 100 * second)], now)
        for at in range(3):
            engine.reserve("t", "g", 30, now + (300 if 5 <= second < 15 else 10) + at)
        weights.append(engine.groups("t")["g"].high_weight)
    assert weights[:7] == [6.0] * 7
    assert max(weights) == weights[19] == 48.0, "three raises, and five more seconds of the same p95"
    assert sorted(weights[:20]) == weights[:20]
    assert sorted(weights[20:], reverse=True) == weights[20:]
    assert weights[-10:] == [6.0] * 10
    engine.topic("t").configure(replace(SETTINGS, priority_high_p95_ms=0))
    assert engine.groups("t")["g"].high_weight == 6.0


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────


def fail(engine: Engine, ids: list[str], now: int) -> None:
    assert engine.ack("t", "g", [f"-{id_}" for id_ in ids], now, retry_delay_ms=0).failed == len(ids)


def test_retries_of_low_do_not_hold_back_those_of_high(engine: Engine) -> None:
    put(engine, [*many("l", 60), *many("h", 4)])
    fail(engine, engine.reserve("t", "g", 64, 11).ids, 12)
    put(engine, [*many("l", 60, 100), *many("h", 60, 100)], 13)
    taken = engine.reserve("t", "g", 10, 14).ids
    assert len(of_level(taken, "h")) == 9, "normal leaves its share to high"
    assert of_level(taken, "h")[:4] == many("h", 4)
    assert len(of_level(taken, "l")) == 1


@pytest.mark.parametrize("letter", ["n", "l"])
def test_retries_that_do_not_fit_come_with_the_next_fetch(engine: Engine, monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    put(engine, many(letter, 30), body=bytes(900))
    fail(engine, engine.reserve("t", "g", 30, 11).ids, 12)
    monkeypatch.setattr(delivery, "FETCH_BYTES_MAX", 5_000)
    rounds = [engine.reserve("t", "g", 30, 13).ids for _ in range(8)]
    assert max(map(len, rounds)) == 5
    assert sorted(id_ for ids in rounds for id_ in ids) == sorted(many(letter, 30))


@pytest.mark.parametrize("letter", ["n", "l"])
def test_retries_are_half_of_a_fetch_while_fresh_messages_wait(engine: Engine, letter: str) -> None:
    put(engine, many(letter, 20))
    fail(engine, engine.reserve("t", "g", 20, 11).ids, 12)
    put(engine, many(letter, 20, 100), 13)
    rounds = [engine.reserve("t", "g", 3, 14).ids for _ in range(8)]
    old = [sum(id_ in many(letter, 20) for id_ in ids) for ids in rounds]
    assert set(old) == {1, 2}
    assert sum(old) == 12
    rest = engine.reserve("t", "g", 100, 15).ids
    assert sorted([*rest, *(id_ for ids in rounds for id_ in ids)]) == sorted([*many(letter, 20), *many(letter, 20, 100)])
    assert engine.check() == []


def test_a_fetch_that_meets_an_expired_message_takes_the_retry(engine: Engine) -> None:
    put(engine, ["n0"])
    fail(engine, engine.reserve("t", "g", 1, 11).ids, 12)
    engine.submit("t", [Message(b"", 13, id="n1", expires_ms=20)], 13)
    engine.tick(13)
    engine.topic("t").stores.broker.groups["g"].carry.retries[NORMAL] = -0.5  # the turn of a fresh message
    assert engine.reserve("t", "g", 1, 30).ids == ["n0"]


def test_a_retry_with_two_places_is_taken_once() -> None:
    queue, retry = RetryQueue(), Retry(12, 2, "")
    for _ in range(2):
        queue.add(7, retry)
    queue.sort_due(12, None)
    assert queue.take(NORMAL, 1) == [(7, retry)]
    assert queue.take(NORMAL, 1) == []
    queue.put_back([(7, retry)])
    queue.sort_due(12, None)
    assert queue.take(NORMAL, 9) == [(7, retry)]
    queue.remove([(7, retry)])
    assert not queue
    assert queue.next_time(12) is None


def test_a_clock_set_back_makes_no_retry_due_early(engine: Engine) -> None:
    put(engine, ["h0", "l0", "l1"])
    for id_, delay in zip(engine.reserve("t", "g", 3, 11).ids, (10, 20, 20), strict=True):
        assert engine.ack("t", "g", [f"-{id_}"], 12, retry_delay_ms=delay).failed == 1
    assert engine.reserve("t", "g", 1, 40).ids == ["h0"]
    assert engine.reserve("t", "g", 9, 31).ids == []
    assert engine.topic("t").stores.broker.groups["g"].retries.next_time(31) == 32
    assert engine.reserve("t", "g", 9, 32).ids == ["l0", "l1"]


def test_the_checkpoint_between_pick_and_journal_knows_the_retries(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(engine, ["n0", "h0"])
    fail(engine, engine.reserve("t", "g", 2, 11).ids, 12)
    broker = engine.topic("t").stores.broker
    seen: list[set[int]] = []
    write: Callable[..., int] = broker._logs.write_lease

    def looking(*args: Any) -> int:
        seen.append(set(broker.groups["g"].retries))
        return write(*args)

    monkeypatch.setattr(broker._logs, "write_lease", looking)
    assert len(engine.reserve("t", "g", 2, 13)) == 2
    assert seen == [{0, 1}]
    assert not broker.groups["g"].retries


# ── nothing is skipped, nothing comes twice ──────────────────────────────────────────────────────────────


class Walk:
    """A random life of a topic with mixed priorities, two groups, and a ledger of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice, self.folder, self.now = random.Random(seed), folder, 10
        pace = self.dice.choice([0, 20])
        high_p95_ms = self.dice.choice([0, 5])
        self.settings = replace(SETTINGS, preempt_after_ms=pace, priority_low=self.dice.choice([0, 1]), max_attempts=10**6)
        self.settings = replace(self.settings, priority_high_p95_ms=high_p95_ms)
        self.engine = Engine.open(folder, settings=self.settings)
        self.made = 0
        self.open: dict[str, set[str]] = {"g": set(), "h": set()}  # not yet acknowledged
        self.held: dict[str, set[str]] = {"g": set(), "h": set()}

    def run(self, steps: int) -> None:
        often = [self.put] * 2 + [self.fetch] * 3
        self.put()
        for _ in range(steps):
            self.now += self.dice.choice([0, 1, 30])
            self.dice.choice([*often, self.settle, self.replay, self.cancel, self.restart])()
        for group in self.open:
            self.drain(group)
        assert self.engine.check() == []

    def put(self) -> None:
        ids = [f"{self.dice.choice('hnll')}{i}" for i in range(self.made, self.made + self.dice.randint(1, 40))]
        self.made += len(ids)
        put(self.engine, ids, self.now)
        for group in self.open.values():
            group.update(ids)

    def fetch(self, group: str | None = None, count: int = 0) -> None:
        group = group or self.dice.choice("gh")
        low = self.dice.choice([None, None, 2]) if not count else None
        ids = self.engine.reserve("t", group, count or self.dice.choice([1, 3, 10, 60]), self.now, low=low).ids
        assert len(set(ids)) == len(ids)
        assert not self.held[group] & set(ids), "two leases of one message"
        assert set(ids) <= self.open[group], "it was acknowledged or cancelled"
        assert low is None or len(of_level(ids, "l")) <= low
        self.held[group] |= set(ids)

    def settle(self) -> None:
        group = self.dice.choice("gh")
        held = sorted(self.held[group])
        done = set(self.dice.sample(held, len(held) * 2 // 3))
        self.engine.ack("t", group, [id_ if id_ in done else f"-{id_}" for id_ in held], self.now)
        self.open[group] -= done
        self.held[group] = set()

    def replay(self) -> None:
        if self.dice.random() < 0.3:
            group = self.dice.choice("gh")
            self.engine.move_group("t", group, "earliest", self.now)
            self.open[group] = {id_ for id_ in self.known if id_ not in self.cancelled}
            self.held[group] = set()

    def cancel(self) -> None:
        some = self.dice.sample(self.known, min(3, len(self.known)))
        answers = self.engine.cancel("t", some, self.now)
        for id_ in (id_ for id_, answer in answers.items() if answer == "cancelled"):
            for group in self.open.values():
                group.discard(id_)

    @property
    def known(self) -> list[str]:
        """Ids of all messages in the ready log."""
        read, _ = ready_log_of(self.engine).read(np.arange(ready_log_of(self.engine).next_offset))
        return [bytes(id_).decode() for id_ in read.ids()]

    @property
    def cancelled(self) -> set[str]:
        visibility = self.engine.topic("t").stores.broker._visibility
        known = self.known
        return {known[offset] for offset in visibility.cancelled}

    def restart(self) -> None:
        for line in self.engine.check():
            raise AssertionError(line)
        self.engine.close()
        for path in self.folder.glob("topic/t/ready_*.run") if self.dice.random() < 0.5 else ():
            path.unlink()
        self.engine = Engine.open(self.folder, settings=self.settings)

    def drain(self, group: str) -> None:
        for _ in range(2_000):
            before = len(self.held[group])
            self.fetch(group, 50)
            if len(self.held[group]) == before:
                break
        assert self.held[group] == self.open[group], "a message was skipped"


@pytest.mark.parametrize("seed", range(12))
def test_every_message_is_delivered_once_whatever_happens(tmp_path: Path, seed: int) -> None:
    Walk(tmp_path, seed).run(60)


def test_each_priority_keeps_its_order_in_tables_and_tail(engine: Engine) -> None:
    dice = random.Random(3)
    ids = [f"{dice.choice('hnl')}{i}" for i in range(400)]
    for first in range(0, 400, 13):
        put(engine, ids[first : first + 13], first + 1)
    taken = [id_ for _ in range(400) for id_ in engine.reserve("t", "g", dice.choice([1, 2, 7]), 500).ids]
    assert sorted(taken) == sorted(ids)
    for letter in "hnl":
        assert of_level(taken, letter) == of_level(ids, letter)


def test_a_damaged_message_is_skipped_at_its_own_cursor(engine: Engine) -> None:
    put(engine, [*many("l", 20), *many("h", 20)])
    ready = ready_log_of(engine)
    _, table, ordinals = ready.split(np.array([22]))[0]
    start = (ready.tail if table is None else table).spans_of(ordinals)[0]
    path = next(segment.path for segment in reversed(ready.segments) if segment.first_offset <= 22)
    with path.open("r+b") as file:
        file.seek(int(start[0]) + f.PREFIX_BYTES + 2)
        file.write(b"\xff\xff")
    taken = [id_ for _ in range(40) for id_ in engine.reserve("t", "g", 3, 11).ids]
    assert sorted(taken) == sorted([*many("l", 20), *(id_ for id_ in many("h", 20) if id_ != "h2")])
    assert engine.groups("t")["g"].ready == 0, "it counts as passed"
