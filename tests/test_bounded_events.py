"""No event of a journal grows with the number of messages: long ones are split. A checkpoint that lacks a part does not count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bson
import numpy as np
import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import abandon, messages, start
from turtlemq.broker import events, journal
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.journal import Journal
from turtlemq.broker.results import DeadRemoval
from turtlemq.engine import Engine
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment.scan import Scan, scan
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

BOUND = 400
COUNT = 100


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    """Events so short that a few messages do not fit into one."""
    with patch.object(events, "EVENT_BYTES", BOUND):
        yield


def columns() -> MessageColumns:
    numbers = np.arange(COUNT)
    return MessageColumns(numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4, [f"id-{n}" for n in range(COUNT)])


def joined(pieces: list[events.Fields], name: str) -> I64:
    return np.concatenate([events.unpack(piece[name]) for piece in pieces])


def test_events_of_many_messages_are_split_and_lose_none() -> None:
    group, all_ = Group("g", epoch=7), columns()
    removals = [DeadRemoval("g", id_, n, 0) for n, id_ in enumerate(all_.ids)]
    split = {
        "offsets": [
            events.settle(group, all_, all_.seqs, events.DEAD, "why", 3),
            events.retry(group, all_, all_.attempts, all_.due_ms, "why"),
            events.moved(group, all_),
            events.extend(group, all_.offsets, 9),
        ],
        "letters": [events.remove_dead(removals, withdrawn=False)],
    }
    for name, kinds in split.items():
        for pieces in kinds:
            assert len(pieces) > 1
            assert all(len(bson.encode(piece)) < 2 * BOUND for piece in pieces)
            assert joined(pieces, name).tolist() == list(range(COUNT))


def test_replaced_letters_are_counted_once_in_a_split_settlement() -> None:
    pieces = events.settle(Group("g"), columns(), columns().seqs, events.DEAD, "", 3)
    assert [int(piece["replaced"]) for piece in pieces] == [3] + [0] * (len(pieces) - 1)
    assert [id_ for piece in pieces for id_ in events.split_ids(piece["ids"])] == columns().ids


def test_a_cancellation_is_split_by_documents_groups_and_retries() -> None:
    offsets, names = np.arange(COUNT), [f"group-{n}" for n in range(40)]
    unfetched = {name: n for n, name in enumerate(names)}
    sleeping = {name: [f"id-{k}" for k in range(n)] for n, name in enumerate(names) if n}
    pieces = events.cancel(offsets, offsets + 5, {3, 99}, unfetched, sleeping, 7)
    assert all(len(bson.encode(piece)) < 3 * BOUND for piece in pieces)
    assert joined(pieces, "offsets").tolist() == offsets.tolist()
    assert joined(pieces, "seqs").tolist() == (offsets + 5).tolist()
    assert joined(pieces, "again").tolist() == [3, 99]
    for piece in pieces:
        assert set(events.unpack(piece["again"]).tolist()) <= set(events.unpack(piece["offsets"]).tolist())
    ahead: dict[str, int] = {}
    asleep: dict[str, list[str]] = {}
    for piece in pieces:
        ahead |= piece["unfetched"]
        for name, ids in piece["naps"].items():
            asleep.setdefault(name, []).extend(events.split_ids(ids))
    assert (ahead, asleep) == (unfetched, sleeping)


def state(size: int) -> list[events.Fields]:
    return events.state({"text": "x" * size})


def test_checkpoint_without_all_parts_does_not_count() -> None:
    whole = [(n, fields) for n, fields in enumerate(state(3 * BOUND))]
    assert len(whole) == 4
    assert events.find_states(whole) == [range(4)]
    for missing in range(4):
        left = [event for event in whole if event[0] != missing]
        assert events.find_states(left) == []
        after = [(number + 10, fields) for number, fields in whole]
        found = events.find_states([*left, *after])
        assert found == [range(3, 7)]
    mixed = [*whole[:2], *((number + 10, fields) for number, fields in whole[2:])]
    assert events.find_states(mixed) == [], "parts of two checkpoints"
    short = [(9, fields) for fields in state(10)]
    assert events.find_states([*whole[:3], *short]) == [range(3, 4)]


def test_short_and_long_checkpoints_come_back() -> None:
    for size in (10, BOUND, 50 * BOUND):
        decoded = [bson.decode(bson.encode(fields)) for fields in state(size)]
        assert events.join_state(decoded) == {"text": "x" * size}


# On disk


def in_flight(tmp_path: Path, count: int, **settings: Any) -> Engine:
    engine = start(tmp_path, ttr_ms=1_000_000, **settings)
    engine.submit("t", messages(count), 0)
    engine.tick(10)
    return engine


def reserve_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / "topic" / "t").glob("reserve_*.bson"))


def test_split_event_that_was_torn_leaves_nothing_of_it(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, COUNT)
    engine.reserve("t", "g", COUNT, 20)
    history = logs_of(engine).history
    engine.ack("t", "g", ["m0"], 30)
    before = history.size
    engine.ack("t", "g", [f"m{n}" for n in range(1, COUNT)], 30)
    after = history.size
    path = next((tmp_path / "data" / "topic" / "t").glob("history_*.bson"))
    whole = path.read_bytes()
    abandon(engine)
    for end in range(before, after, (after - before) // 7):
        path.write_bytes(whole[:end])
        engine = Engine.open(tmp_path / "data", settings=engine.settings)
        assert (engine.stats("t").history, engine.stats("t").reserve) == (1, COUNT - 1)
        assert engine.check() == []
        abandon(engine)
        path.write_bytes(whole)


def test_opening_goes_on_from_a_checkpoint_in_parts(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, 1_000, segment_bytes=4096)
    for _ in range(20):
        engine.reserve("t", "g", 50, 20)
    engine.topic("t").checkpoint()
    abandon(engine)
    (tmp_path / "data" / "topic" / "t" / "offset").unlink()
    for file in reserve_files(tmp_path)[:-1]:
        file.unlink()  # as retention does
    engine = Engine.open(tmp_path / "data", settings=engine.settings)
    assert (engine.stats("t").reserve, engine.stats("t").ready) == (1_000, 0)
    assert engine.check() == []
    abandon(engine)


def test_damaged_part_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Recovery falls back to an older checkpoint and replays the events behind it."""
    engine = in_flight(tmp_path, 1_000, segment_bytes=4096)
    for _ in range(20):
        engine.reserve("t", "g", 50, 20)
    engine.topic("t").checkpoint()
    engine.extend("t", "g", ["m0"], 2_000_000, 30)  # says that all before it was synced
    abandon(engine)
    (tmp_path / "data" / "topic" / "t" / "offset").unlink()
    path = reserve_files(tmp_path)[-1]
    data = path.read_bytes()
    start_ = len(f.encode_header(f.FileHeader("reserve", "t", 0)))
    second = int(scan(data, start_, len(data), sealed=True).positions[1])
    path.write_bytes(data[: second + 100] + bytes([data[second + 100] ^ 1]) + data[second + 101 :])
    engine = Engine.open(tmp_path / "data", settings=engine.settings)
    assert (engine.stats("t").reserve, engine.stats("t").ready) == (1_000, 0)
    assert [line for lines in engine.damage().values() for line in lines]
    abandon(engine)


def test_small_segments_do_not_repeat_the_state_for_each_fetch(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, 3_000, segment_bytes=4096)
    engine.reserve("t", "g", 2_500, 20)  # 60 kB of state
    before = len(reserve_files(tmp_path))
    for _ in range(200):
        engine.reserve("t", "g", 1, 20)
    assert len(reserve_files(tmp_path)) <= before + 2
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=engine.settings)  # it finds the length of the state in the file
    assert engine.stats("t").reserve == 2_700
    for _ in range(200):
        engine.reserve("t", "g", 1, 30)
    files = reserve_files(tmp_path)
    assert len(files) <= before + 4
    bases = [int(file.stem.partition("_")[2]) for file in files]
    assert all(after - base == file.stat().st_size for file, (base, after) in zip(files, pairwise(bases), strict=False))
    assert engine.check() == []
    engine.close()


def test_file_without_events_is_used_by_the_next_roll(tmp_path: Path) -> None:
    engine = in_flight(tmp_path, COUNT)
    engine.reserve("t", "g", COUNT, 20)
    reserve = logs_of(engine).reserve
    with patch.object(reserve, "_write", side_effect=MemoryError), pytest.raises(MemoryError):
        reserve.roll(20)
    count = len(reserve_files(tmp_path))
    reserve.roll(20)
    assert len(reserve_files(tmp_path)) == count, "no second file"
    assert engine.check() == []
    engine.close()


def test_checkpoint_is_of_the_moment_at_which_it_was_captured(tmp_path: Path) -> None:
    """It is encoded later, on another thread, while consumers go on."""
    engine = in_flight(tmp_path, 3 * COUNT, backoff_base_ms=20_000)
    ids = [f"m{n}" for n in range(3 * COUNT)]
    for _ in range(2):
        engine.reserve("t", "g", COUNT, 20, consumer="c")
    engine.ack("t", "g", [*ids[:10], *(f"-{id_}" for id_ in ids[10:20]), *ids[COUNT : COUNT + 5]], 30, error="why")
    broker = engine.topic("t").stores.broker
    now, later = broker.begin_save(), broker.begin_save()
    for save in (now, later):
        for _, fd, _ in save.logs.syncs:
            engine.door.close(fd)
    expected = now.encode()
    engine.ack("t", "g", [*ids[20:30], *(f"-{id_}" for id_ in ids[30:40])], 40, error="other")
    engine.extend("t", "g", ids[COUNT + 5 : 2 * COUNT], 5_000_000, 40)
    engine.cancel("t", [ids[10], ids[-1]], 40)
    engine.reserve("t", "g", 20, 40_000)
    engine.move_group("t", "h", "earliest", 50)
    assert later.encode() == expected
    assert len(events.unpack(expected["groups"]["g"]["offsets"])) == 2 * COUNT - 25
    abandon(engine)


@pytest.mark.parametrize("event_bytes", [100, 100_000])  # also longer than the piece that is read at first
def test_time_of_the_last_event_needs_only_the_files_end(tmp_path: Path, event_bytes: int) -> None:
    """A file may have a gigabyte of events, which retention must not read."""
    written = Journal(Door(), tmp_path, "t", "history", Settings())
    written.open((0, 0))
    for n in range(3_000_000 // event_bytes):
        written.append(1_000 + n, "g", {"event": "settle", "ids": b"x" * event_bytes})
    written.close()
    again, read = Journal(Door(), tmp_path, "t", "history", Settings()), list[int]()

    def noting(view: memoryview, first: int, size: int, **more: Any) -> Scan:
        read.append(size - first)
        return scan(view, first, size, **more)

    again.find_files()
    with patch.object(journal, "scan", noting):
        assert again.last_event_ms(again.bases[0]) == 1_000 + n
    assert sum(read) < 1_200_000
