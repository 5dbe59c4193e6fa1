"""Costs add up over messages and groups, they do not multiply: the function calls of an operation are counted, not its time."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.broker_insides import logs_of
from turtlemq.broker import delivery, events, journal, ready_log
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.index import group_lookup
from turtlemq.model import I64, Message, Priority
from turtlemq.segment.scan import scan
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter

FEW, MANY, IDS = 10, 60, 200
HOUR_MS = 3_600_000
TOPIC = "t"


def _calls(work: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, are called meanwhile."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _engine(folder: Path) -> Engine:
    engine = Engine.open(folder)
    engine.configure(TOPIC, backoff_base_ms=HOUR_MS, backoff_max_ms=HOUR_MS, backoff_jitter="none")
    return engine


def _ready(folder: Path, groups: int) -> Engine:
    """Messages m0, m1, … are ready in all groups."""
    engine = _engine(folder)
    engine.submit(TOPIC, [Message(b"", 0, id=f"m{i}") for i in range(IDS)], 0)
    engine.tick(1)
    for i in range(groups):
        engine.move_group(TOPIC, f"g{i}", "earliest", 1)
    return engine


def _settled(folder: Path, groups: int) -> Engine:
    """All groups have settled m0."""
    engine = _ready(folder, groups)
    for i in range(groups):
        assert engine.reserve(TOPIC, f"g{i}", 1, 2).ids == ["m0"]
        engine.ack(TOPIC, f"g{i}", ["m0"], 3)
    return engine


def _retried(folder: Path, groups: int) -> Engine:
    """Retries of ten messages sleep for each of ten groups; as many other groups as asked have none."""
    engine = _ready(folder, groups)
    for i in range(10):
        ids = engine.reserve(TOPIC, f"g{i}", 10, 2).ids
        engine.ack(TOPIC, f"g{i}", [f"-{id_}" for id_ in ids], 2)
    return engine


def _with_traces(folder: Path, groups: int, **settings: Any) -> Engine:
    """Each group has a dead letter of m0, and retries of m1 that slept and of m2 that sleep; retention has removed m0 to m9."""
    engine = _engine(folder)
    engine.configure(TOPIC, max_attempts=2, segment_bytes=4096, history_hours=0, **settings)
    for start in range(0, 100, 10):
        engine.submit(TOPIC, [Message(b"", 0, id=f"m{i}") for i in range(start, start + 10)], 0)
        engine.tick(1)
    for i in range(groups):
        ids = engine.reserve(TOPIC, f"g{i}", 100, 2).ids
        engine.ack(TOPIC, f"g{i}", [f"-{ids[0]}"], 2, retry_delay_ms=0)
        assert engine.reserve(TOPIC, f"g{i}", 1, 3).ids == ["m0"]
        engine.ack(TOPIC, f"g{i}", ["-m0", *ids[3:]], 3)
        engine.ack(TOPIC, f"g{i}", ["-m1"], 3, retry_delay_ms=100_000)
        engine.ack(TOPIC, f"g{i}", ["-m2"], 3, retry_delay_ms=2 * HOUR_MS)
    engine.tick(100_100)
    engine.tick(HOUR_MS)
    assert engine.topic(TOPIC).stores.broker.ready.first_offset >= 10
    assert {id_: view.state for id_ in ("m0", "m1", "m2") if (view := engine.message(TOPIC, id_))} == {
        "m0": "dead",
        "m1": "ready",
        "m2": "sleep",
    }
    return engine


def _put(engine: Engine, ids: Sequence[str]) -> list[bool]:
    return engine.submit(TOPIC, [Message(b"", 2 * HOUR_MS, id=id_) for id_ in ids], HOUR_MS).created


def _listing(state: str) -> Callable[[Engine], Any]:
    return lambda engine: engine.topic(TOPIC).view.messages(state, limit=IDS)


UNKNOWN = [f"x{i}" for i in range(IDS)]
OPERATIONS: dict[str, tuple[Callable[[Path, int], Engine], Callable[[Engine], Any]]] = {
    "list ready": (_ready, _listing("ready")),
    "list history": (_ready, _listing("history")),
    "cancel unknown": (_ready, lambda engine: engine.cancel(TOPIC, UNKNOWN, 2)),
    "view settled": (_settled, lambda engine: engine.message(TOPIC, "m0")),
    "put": (_with_traces, lambda engine: _put(engine, UNKNOWN)),
    "cancel unknown among traces": (_with_traces, lambda engine: engine.cancel(TOPIC, UNKNOWN, HOUR_MS)),
    "letters of unknown": (_with_traces, lambda engine: engine.topic(TOPIC).view.letters_of(UNKNOWN)),
    "hand off retries": (_retried, lambda engine: engine.tick(2 + HOUR_MS)),
    "cancel ready": (_ready, lambda engine: engine.cancel(TOPIC, [f"m{i}" for i in range(IDS)], 2)),
}


def test_view_tells_how_each_group_settled_the_message(tmp_path: Path) -> None:
    engine = _settled(tmp_path / "d", 3)
    engine.move_group(TOPIC, "late", "latest", 4)
    view = engine.message(TOPIC, "m0")
    assert view is not None
    settled = {"state": "history", "attempt": 1, "settled_ms": 3, "outcome": "acked", "summary": "acked in attempt 1"}
    unseen = {"state": "history", "attempt": 0, "summary": "not seen by this group: before its start"}
    assert view.groups == {"g0": settled, "g1": settled, "g2": settled, "late": unseen}
    assert sorted((moment.at_ms, moment.event, moment.group) for moment in view.timeline if moment.group) == [
        *((2, "reserved", f"g{i}") for i in range(3)),
        *((3, "acked", f"g{i}") for i in range(3)),
    ]
    engine.close()


class Syncs(Door):
    """Counts syncs by the kind of file."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def sync(self, fd: int, path: Path) -> None:
        self.count[path.name.partition("_")[0]] += 1
        super().sync(fd, path)


def _with_letters(folder: Path, groups: int, door: Door) -> Engine:
    """A dead letter of m0 in each group."""
    engine = Engine.open(folder, door=door)
    engine.configure(TOPIC, max_attempts=1)
    engine.submit(TOPIC, [Message(b"", 0, id="m0")], 0)
    engine.tick(1)
    for i in range(groups):
        engine.reserve(TOPIC, f"g{i}", 1, 2)
        engine.ack(TOPIC, f"g{i}", ["-m0"], 2)
    return engine


@pytest.mark.parametrize("requeued", [True, False], ids=["requeue", "delete"])
def test_removal_of_letters_of_many_groups_is_synced_once(tmp_path: Path, requeued: bool) -> None:
    door = Syncs()
    engine = _with_letters(tmp_path / "d", 20, door)
    letters = list(engine.topic(TOPIC).view.dead_letters.all(Filter()))
    door.count.clear()
    count = engine.requeue(TOPIC, letters, 3) if requeued else engine.delete_dead(TOPIC, letters, 3)
    assert (count, door.count["history"]) == (20, 1)
    engine.close()
    again = Engine.open(tmp_path / "d")
    assert again.check() == []
    assert (again.stats(TOPIC).dead, again.stats(TOPIC).sleep) == (0, 20 if requeued else 0)
    again.close()


@pytest.mark.parametrize("old_form", [False, True])
def test_recovery_counts_cancelled_messages_of_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_form: bool
) -> None:
    """The event tells how many messages each group had still to fetch; older versions listed their offsets."""
    if old_form:
        made = events._cancel

        def older(*args: Any) -> events.Fields:
            fields = made(*args)
            return fields | {"unfetched": {name: events.pack([0] * count) for name, count in fields["unfetched"].items()}}

        monkeypatch.setattr(events, "_cancel", older)
    engine = _ready(tmp_path / "d", 2)
    assert engine.reserve(TOPIC, "g0", 3, 2).ids == ["m0", "m1", "m2"]
    engine.topic(TOPIC).checkpoint()
    assert {*engine.cancel(TOPIC, ["m5", "m6", "m7"], 3).values()} == {"cancelled"}
    shutil.copytree(tmp_path / "d", tmp_path / "killed")
    engine.close()
    again = Engine.open(tmp_path / "killed")
    assert {name: group.ready for name, group in again.groups(TOPIC).items()} == {"g0": IDS - 6, "g1": IDS - 3}
    assert again.check() == []
    again.close()


@pytest.mark.parametrize("levels", [False, True], ids=["plain", "priorities"])
def test_fetch_skips_a_bounded_number_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: bool) -> None:
    monkeypatch.setattr(delivery, "SKIPPED_MAX", 8)
    monkeypatch.setattr(delivery, "_SCAN", 4)
    engine = _engine(tmp_path / "d")
    engine.submit(TOPIC, [Message(b"", 0, id=f"m{i}") for i in range(60)], 0)
    engine.tick(1)
    assert len(engine.reserve(TOPIC, "other", 60, 1)) == 60
    engine.move_group(TOPIC, "g", "latest", 1)
    engine.ack(TOPIC, "other", [f"-m{i}" for i in range(60)], 1)
    engine.tick(1 + HOUR_MS)
    engine.submit(TOPIC, [Message(b"", 0, id="last", priority=Priority.LOW if levels else Priority.NORMAL)], 1 + HOUR_MS)
    engine.tick(2 + HOUR_MS)
    reads, fetches = _counting_reads(monkeypatch), list[Reserved]()
    while not fetches or (not len(fetches[-1]) and fetches[-1].more):
        reads.clear()
        fetches.append(engine.reserve(TOPIC, "g", 1, 3 + HOUR_MS))
        assert sum(reads) <= 8 + 4 * (6 if levels else 1)
    assert fetches[-1].ids == ["last"]
    assert len(fetches) > 2
    engine.close()


@pytest.mark.parametrize("case", ["one asked", "all asked", "given back"])
def test_fetch_buries_a_bounded_number_of_expired_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(delivery, "EXPIRED_MAX", 8)
    engine = _engine(tmp_path / "d")
    engine.submit(TOPIC, [Message(b"", 0, id=f"m{i}", expires_ms=5) for i in range(60)], 0)
    engine.submit(TOPIC, [Message(b"", 0, id="last", expires_ms=20)], 0)
    engine.tick(1)
    if case == "given back":
        ids = engine.reserve(TOPIC, "g", 60, 1).ids
        assert len(ids) == 60
        engine.give_back(TOPIC, "g", ids, 1)
    reads = _counting_reads(monkeypatch)
    got = list[str]()
    for step in range(1, 9):
        before = len(reads)
        fetched = engine.reserve(TOPIC, "g", 1 if case == "one asked" else 100, 10)
        got += fetched.ids
        assert engine.stats(TOPIC).dead == min(60, 8 * step)
        assert len(reads) - before <= 4, "each message is read once to be picked, and once to be buried"
        assert fetched.more == (not got)
    assert got == ["last"]
    assert {letter.error for letter in engine.topic(TOPIC).view.dead_letters.all(Filter())} == {"expired"}
    assert engine.check() == []
    engine.close()


def _counting_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents in each read of the ready log from now on."""
    read, counts = ReadyLog.read, list[int]()

    def counting(self: ReadyLog, offsets: I64, *others: Any) -> Any:
        counts.append(len(offsets))
        return read(self, offsets, *others)

    monkeypatch.setattr(ReadyLog, "read", counting)
    return counts


def _seeds(engine: Engine) -> set[int]:
    stores = engine.topic(TOPIC).stores
    parts = [part for index in (stores.index, stores.dead_letters.index) for part in index._segments.parts]
    return {part.seed for part in parts} | {table.seed for segment in logs_of(engine).ready.segments for table in segment.tables}


@pytest.mark.parametrize("case", ["open", "restarted", "another secret", "no secret before", "no secret before, many pairs"])
def test_ids_with_a_trace_in_any_group_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Tables of versions without a secret are asked for each pair of group and id, or built again if these are too many."""
    secret = tmp_path / "d" / "HASH_SEED"
    if case.startswith("no secret before"):
        secret.parent.mkdir()
        secret.write_text("0" * 16 + "\n")
    engine = _with_traces(tmp_path / "d", 3, run_messages=5)
    if case != "open":
        engine.topic(TOPIC).compact()
        engine.close()
        if case != "restarted":
            secret.unlink()
        if case.endswith("many pairs"):
            monkeypatch.setattr(group_lookup, "_PAIRS_MAX", 2)
            monkeypatch.setattr(ready_log, "PAIRS_MAX", 2)
        engine = Engine.open(tmp_path / "d")
    assert (0 in _seeds(engine)) == case.startswith("no secret before")
    assert _put(engine, ["x", "m0", "m1", "m2", "m3"]) == [True, False, False, False, True]
    letters = engine.topic(TOPIC).view.letters_of(["m0", "m1"])
    assert {id_: sorted(letter.group for letter in found) for id_, found in letters.items()} == {
        "m0": ["g0", "g1", "g2"],
        "m1": [],
    }
    assert engine.cancel(TOPIC, ["m0", "m1", "m2", "y"], HOUR_MS) == {
        "m0": "dead",
        "m1": "cancelled",
        "m2": "cancelled",
        "y": "unknown",
    }
    assert (0 in _seeds(engine)) == (case == "no secret before")
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_add_up_over_ids_and_groups(tmp_path: Path, name: str) -> None:
    build, work = OPERATIONS[name]
    counts = []
    for groups in (FEW, MANY):
        engine = build(tmp_path / str(groups), groups)
        counts.append(_calls(lambda engine=engine: work(engine)))  # type: ignore[misc]
        engine.close()
    assert counts[1] - counts[0] < 150 * (MANY - FEW), f"{counts}, for {IDS * (MANY - FEW)} more pairs"


@pytest.mark.parametrize("case", ["whole", "damaged", "restarted"])
def test_newest_events_are_read_from_the_end_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    engine = _settled(tmp_path / "d", MANY)
    for n in range(40):
        engine.ack(TOPIC, f"g{n}", engine.reserve(TOPIC, f"g{n}", 1 + 5 * n % 100, 4).ids, 5)  # events of many sizes
    engine.topic(TOPIC).checkpoint()
    if case == "restarted":
        engine.close()
        engine = Engine.open(tmp_path / "d")
    history = logs_of(engine).history
    wanted = list(history.documents())
    assert len(wanted) > MANY
    path = tmp_path / "d" / "topic" / TOPIC / next(file.name for file in (tmp_path / "d" / "topic" / TOPIC).glob("history_*"))
    if case == "damaged":
        content = bytearray(path.read_bytes())
        at = content.index(wanted[30])
        content[at + len(wanted[30]) // 2] ^= 1
        path.write_bytes(content)
        del wanted[30]
    scanned = list[int]()

    def counting(view: memoryview, start: int, size: int, **more: Any) -> Any:
        scanned.append(size - start)
        return scan(view, start, size, **more)

    monkeypatch.setattr(journal, "scan", counting)
    for window in (1, 100, 400, 2_000, 5_000):
        monkeypatch.setattr(journal, "_WINDOW_BYTES", window)
        assert list(history.documents()) == wanted
        scanned.clear()
        newest = history.documents()
        assert next(newest) == wanted[0]
        assert sum(scanned) <= 8 * max(window, len(wanted[0])), "no more of the file is read than its end"
    assert path.stat().st_size > 8 * 5_000
    engine.close()
