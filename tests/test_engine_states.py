"""The state of a message in every answer: cancel, get, listings, groups that come late, and messages that are given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.harness.engine_disk import Disk, Quick, abandon
from tests.trust.simulation_disk import Crash, Drive, Process
from turtlemq.broker import logs
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument, InvalidFireAt, Stopped, UnknownMessage
from turtlemq.model import DUE_MS_MAX, I64, Message, Priority
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.topic import listing
from turtlemq.topic.dead_letters import Filter

SETTINGS = Settings(segment_bytes=8192, run_messages=8, backoff_jitter="none", max_attempts=3, ttr_ms=1_000)
LONG = 100_000  # a back-off that sleeps through the Index


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    made.move_group("t", "g", "earliest", 0)
    yield made
    assert made.check() == []
    made.close()


def put(engine: Engine, *ids: str, due: int = 10) -> None:
    engine.submit("t", [Message(id_.encode(), due, id=id_) for id_ in ids], 0)
    engine.tick(due)


def nap(engine: Engine, *ids: str, now: int = 20, group: str = "g") -> None:
    """These fail, and sleep for long."""
    engine.reserve("t", group, 100, now)
    assert engine.ack("t", group, [f"-{id_}" for id_ in ids], now, retry_delay_ms=LONG, error="no").failed == len(ids)


# Cancel


def test_a_sleeping_retry_is_cancelled_for_good(engine: Engine) -> None:
    put(engine, "a", "b")
    nap(engine, "a", "b")
    assert engine.message("t", "a").state == "sleep"  # type: ignore[union-attr]
    assert engine.cancel("t", ["a"], 30) == {"a": "cancelled"}
    assert engine.cancel("t", ["a"], 30) == {"a": "cancelled before"}
    view = engine.message("t", "a")
    assert view is not None
    assert (view.state, view.groups["g"]["state"]) == ("cancelled", "cancelled")
    assert view.timeline[-1].event == "cancelled"
    assert (engine.stats("t").sleep, engine.stats("t").cancelled) == (1, 1)
    engine.tick(LONG + 50)
    assert engine.reserve("t", "g", 9, LONG + 50).ids == ["b"]


def test_a_retry_that_is_ready_again_is_cancelled(engine: Engine) -> None:
    put(engine, "a")
    nap(engine, "a")
    engine.tick(LONG + 50)
    assert engine.message("t", "a").state == "ready"  # type: ignore[union-attr]
    assert engine.cancel("t", ["a"], LONG + 60) == {"a": "cancelled"}
    assert engine.groups("t")["g"].ready == 0
    assert engine.stats("t").cancelled == 1
    assert engine.reserve("t", "g", 9, LONG + 70).ids == []


def test_leased_settled_or_dead_messages_are_not_cancelled(engine: Engine) -> None:
    engine.move_group("t", "h", "earliest", 0)
    put(engine, "a", "b", "c", "d")
    nap(engine, "a", "b", "c", "d", group="h")
    engine.reserve("t", "g", 9, 20)
    engine.ack("t", "g", ["b"], 21)
    for now in (22, 30_000, 60_000):
        assert engine.ack("t", "g", ["-c"], now, retry_delay_ms=0).unknown == []
        engine.reserve("t", "g", 9, now + 1)
    answers = engine.cancel("t", ["a", "b", "c", "d"], 60_100)
    assert answers == {"a": "reserve", "b": "history", "c": "dead", "d": "reserve"}
    engine.ack("t", "g", ["-a"], 60_200, retry_delay_ms=LONG)
    assert engine.cancel("t", ["a"], 60_300) == {"a": "cancelled"}, "asleep in one group and in the other"
    assert engine.stats("t").sleep == 3


def test_a_crash_within_a_cancel_leaves_all_or_nothing(tmp_path: Path) -> None:
    for at in range(4):
        door = Stop()
        root = tmp_path / str(at)
        engine = Engine.open(root, door=door, settings=SETTINGS)
        for group in ("g", "h"):
            engine.move_group("t", group, "earliest", 0)
        put(engine, "a")
        nap(engine, "a")
        door.left = at
        try:
            engine.cancel("t", ["a"], 30)
            done = True
        except (KeyboardInterrupt, Stopped):
            done = False
        abandon(engine)
        engine = Engine.open(root, door=Quick(), settings=SETTINGS)
        engine.tick(LONG + 50)
        got = [engine.reserve("t", group, 9, LONG + 60).ids for group in ("g", "h")]
        assert got in ([[["a"], ["a"]]] if at == 0 else [[[], []], [["a"], ["a"]]]), at
        assert not (done and got[0]), at
        assert engine.check() == []
        engine.close()


class Stop(Quick):
    """The process ends at a write."""

    left = 1 << 30

    def _call(self, name: str, path, action: Callable, *args):  # type: ignore[no-untyped-def,type-arg]
        if name == "write":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return super()._call(name, path, action, *args)


def test_a_cancel_on_a_full_disk_holds_for_a_sleeping_retry(tmp_path: Path) -> None:
    door = Disk()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    put(engine, "a")
    nap(engine, "a")
    door.full = True
    assert engine.cancel("t", ["a"], 30) == {"a": "cancelled"}
    engine.tick(LONG + 50)
    assert engine.reserve("t", "g", 9, LONG + 50).ids == []
    door.full = False
    engine.tick(LONG + 2_000)
    assert engine.reserve("t", "g", 9, LONG + 2_000).ids == []
    assert (engine.stats("t").sleep, engine.stats("t").ready) == (0, 0)
    assert engine.check() == []
    engine.close()


def test_sleeping_retries_are_listed_with_their_group(engine: Engine) -> None:
    put(engine, "a")
    nap(engine, "a")
    engine.submit("t", [Message(b"", LONG, id="b")], 30)
    page, _ = engine.browse("t")
    assert [(message.id, message.group) for message in page] == [("b", ""), ("a", "g")]
    assert engine.cancel("t", ["g/a"], 40) == {"g/a": "unknown"}
    assert engine.get("t", "g/a") is None
    assert engine.cancel("t", ["b"], 40) == {"b": "cancelled"}
    assert [message.id for message in engine.browse("t")[0]] == ["a"]
    with pytest.raises(UnknownMessage):
        engine.reschedule("t", "g/a", 40, due_ms=50)


# Changing


def test_what_came_due_is_not_rescheduled_and_its_state_is_told(engine: Engine) -> None:
    put(engine, *(f"m{n}" for n in range(40)))
    got = engine.reserve("t", "g", 2, 20).ids
    engine.ack("t", "g", ["m0"], 21)
    engine.ack("t", "g", ["-m1"], 21, retry_delay_ms=LONG)
    engine.compact("t")
    assert engine.topic("t").stores.index.find("m0") is None, "gone from there"
    for id_, state in (("m0", "history"), ("m1", "sleep"), ("m2", "ready")):
        with pytest.raises(Conflict) as caught:
            engine.reschedule("t", id_, 30, due_ms=50)
        assert caught.value.details["state"] == state
    assert got == ["m0", "m1"]


def test_times_beyond_the_last_are_refused_and_nothing_changes(engine: Engine) -> None:
    put(engine, "a")
    engine.reserve("t", "g", 1, 20)
    for delay in (DUE_MS_MAX, -21):
        with pytest.raises(InvalidArgument):
            engine.ack("t", "g", ["-a"], 20, retry_delay_ms=delay)
    assert engine.stats("t").reserve == 1
    for now in (30, 40, 50):
        engine.ack("t", "g", ["-a"], now, retry_delay_ms=0)
        engine.reserve("t", "g", 1, now)
    letters = list(engine.topic("t").view.dead_letters.all(Filter()))
    assert len(letters) == 1
    for due, per_s in ((DUE_MS_MAX + 1, None), (-1, None)):
        with pytest.raises(InvalidFireAt):
            engine.requeue("t", letters, 60, due_ms=due, per_s=per_s)
    assert engine.stats("t").dead == 1


# Given back


def test_given_back_messages_return_at_once_as_the_same_attempt(engine: Engine, tmp_path: Path) -> None:
    put(engine, "a", "b")
    engine.reserve("t", "g", 2, 20)
    assert engine.give_back("t", "g", ["a", "zz", "a"], 21) == (1, ["zz", "a"])
    assert engine.give_back("t", "nobody", ["a"], 21) == (0, ["a"])
    assert engine.groups("t")["g"].ready == 1
    for _ in range(5):
        out = engine.reserve("t", "g", 2, 22)
        assert (out.ids, out.pieces[0].messages.attempts.tolist()) == (["a"], [1])
        engine.give_back("t", "g", ["a"], 22)
    abandon(engine)
    again = Engine.open(tmp_path / "data", settings=SETTINGS)
    out = again.reserve("t", "g", 2, 23)
    assert (out.ids, out.pieces[0].messages.attempts.tolist()) == (["a"], [1])
    again.close()
    engine.topics.clear()


# Groups that come late


def test_a_new_group_is_counted_without_reading_what_others_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(engine, *(f"m{n}" for n in range(60)))
    nap(engine, *(f"m{n}" for n in range(0, 60, 2)))
    engine.submit("t", [Message(b"", LONG, id=f"s{n}") for n in range(30)], 30)
    engine.cancel("t", [f"s{n}" for n in range(20)], 30)
    engine.cancel("t", ["m2", "m4"], 30)
    engine.tick(LONG + 50)
    read: list[int] = []
    ready = engine.topic("t").stores.broker.ready
    real = ready.read

    def counting(offsets: I64, bytes_max: int | None = None) -> Any:
        read.append(len(offsets))
        return real(offsets, bytes_max)

    monkeypatch.setattr(ready, "read", counting)
    engine.move_group("t", "new", "earliest", LONG + 60)
    assert sum(read) == 0
    monkeypatch.undo()
    assert engine.groups("t")["new"].ready == 58 + 10
    assert len(engine.reserve("t", "new", 1_000, LONG + 60).ids) == 68
    assert engine.groups("t")["new"].ready == 0
    assert engine.move_group("t", "g", "earliest", LONG + 60) == 0
    assert engine.groups("t")["g"].ready == 68, "its own retries are void: their messages come again"


# Listings


def pages(engine: Engine, state: str, limit: int = 3, **where: Any) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        page, cursor = engine.topic("t").view.messages(state, limit=limit, cursor=cursor, **where)
        assert len(page) <= limit
        assert {view.state for view in page} <= {state}
        found += [view.id for view in page]
        if cursor is None:
            return found


def test_every_message_is_listed_in_the_state_that_get_tells(engine: Engine) -> None:
    engine.move_group("t", "h", "earliest", 0)
    engine.submit("t", [Message(b"", 10, id=f"p{n}", priority=Priority(n % 3)) for n in range(6)], 0)
    put(engine, *(f"m{n}" for n in range(30)), due=20)
    for group in ("g", "h"):
        engine.reserve("t", group, 20, 30, ttr_ms=10**9)
        held = sorted(engine.topic("t").stores.broker.groups[group].reserved_ids)
        engine.ack("t", group, held[:5], 31)
        engine.ack("t", group, [f"-{id_}" for id_ in held[5:8]], 31, retry_delay_ms=LONG)
        engine.ack("t", group, [f"-{id_}" for id_ in held[8:10]], 31, retry_delay_ms=0)
        for now in (32, 33):
            out = engine.reserve("t", group, 4, now, ttr_ms=10**9).ids
            engine.ack("t", group, [f"-{id_}" for id_ in out], now, retry_delay_ms=0)
    engine.submit("t", [Message(b"", 10**6 + n, id=f"s{n}") for n in range(7)], 40)
    engine.cancel("t", ["s3", "m29"], 41)
    listed = {state: pages(engine, state) for state in ("ready", "reserve", "history", "cancelled", "dead", "sleep")}
    everyone = [f"p{n}" for n in range(6)] + [f"m{n}" for n in range(30)] + [f"s{n}" for n in range(7)]
    for id_ in everyone:
        state = engine.message("t", id_).state  # type: ignore[union-attr]
        assert id_ in listed[state], (id_, state)
        others = [other for other in ("ready", "reserve", "history", "cancelled") if other != state]
        assert not any(id_ in listed[other] for other in others), id_
    assert all(listed.values())
    assert listed["cancelled"] == ["m29", "s3"]
    assert listed["sleep"][0].startswith(("m", "p"))
    assert pages(engine, "ready", from_ms=0, to_ms=15) == [id_ for id_ in listed["ready"] if id_[0] == "p"]
    for state, ids in listed.items():
        assert pages(engine, state, prefix="m") == [id_ for id_ in ids if id_[0] == "m"]
        if state not in ("dead", "sleep"):
            assert pages(engine, state, newest=True) == ids[::-1]
            assert pages(engine, state, newest=True, prefix="p") == [id_ for id_ in ids[::-1] if id_[0] == "p"]


def test_a_listing_of_the_newest_steps_back_over_large_documents(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_BYTES", 1_000)
    for n in range(40):
        engine.submit("t", [Message(b"x" * (10 if n % 4 else 900), 10, id=f"m{n:02}")], 0)
    engine.tick(10)
    assert pages(engine, "ready", newest=True) == pages(engine, "ready")[::-1] == [f"m{n:02}" for n in range(39, -1, -1)]


def test_a_listing_looks_at_little_at_a_time_and_refuses_nonsense(engine: Engine) -> None:
    for first in range(0, 9_000, 3_000):
        put(engine, *(f"m{n}" for n in range(first, first + 3_000)), due=10 + first)
    engine.cancel("t", ["m8999"], 9_000)
    topic = engine.topic("t")
    page, cursor = topic.view.messages("cancelled")
    assert (page, cursor) == ([], "500")
    assert pages(engine, "cancelled") == ["m8999"]
    for wrong in ({"state": "gone"}, {"limit": 0}, {"cursor": "x"}, {"cursor": "1-1"}, {"from_ms": 5, "to_ms": 4}):
        with pytest.raises(InvalidArgument):
            topic.view.messages(**{"state": "ready", **wrong})  # type: ignore[arg-type]


def test_dead_letters_that_few_match_are_looked_through_in_steps(engine: Engine) -> None:
    engine.configure("t", max_attempts=1)
    put(engine, *(f"m{n}" for n in range(1_300)))
    ids = engine.reserve("t", "g", 2_000, 20).ids
    engine.ack("t", "g", [f"-{id_}" for id_ in ids[:-1]], 21, error="usual")
    engine.ack("t", "g", [f"-{ids[-1]}"], 22, error="rare")
    dead = engine.topic("t").view.dead_letters
    page, cursor = dead.page(Filter(error="rare"), 10)
    assert page == []
    assert cursor is not None
    assert [letter.id for letter in dead.all(Filter(error="rare"))] == [ids[-1]]
    assert Counter(letter.error for letter in dead.all(Filter())) == {"usual": 1_299, "rare": 1}


def test_a_message_is_told_although_a_table_is_damaged(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    put(engine, *(f"m{n}" for n in range(20)))
    put(engine, *(f"s{n}" for n in range(20)), due=5_000)
    engine.close()
    for path in (tmp_path / "data" / "topic" / "t").glob("*.run"):
        data = bytearray(path.read_bytes())
        for at in range(4096 + 8, len(data), 256):
            data[at] ^= 0x55
        path.write_bytes(data)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert [engine.message("t", id_).state for id_ in ("m3", "s3")] == ["ready", "ready"]  # type: ignore[union-attr]
    engine.close()


# After a crash


def test_a_moved_group_does_not_count_cancelled_messages(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, door=Quick(), settings=SETTINGS)
    engine.move_group("t", "g", "latest", 0)
    put(engine, "a", "b", "c")
    engine.topic("t").checkpoint()
    engine.move_group("t", "g", "earliest", 20)
    engine.reserve("t", "g", 2, 20)
    engine.ack("t", "g", ["-a", "-b"], 20, retry_delay_ms=1_000)
    assert engine.cancel("t", ["a"], 21) == {"a": "cancelled"}
    before = engine.groups("t")
    abandon(engine)
    engine = Engine.open(tmp_path, door=Quick(), settings=SETTINGS)
    assert engine.groups("t") == before
    assert engine.check() == []
    engine.close()


def test_a_letter_that_replaces_an_older_one_counts_once(tmp_path: Path) -> None:
    door = Stop()
    settings = Settings(max_attempts=1)
    engine = Engine.open(tmp_path, door=door, settings=settings)
    engine.move_group("t", "g", "earliest", 0)
    put(engine, "a")
    for now in (20, 30):
        engine.move_group("t", "g", "earliest", now)
        engine.reserve("t", "g", 1, now)
        if now == 30:
            door.left = 1  # buried, but the history does not say so
        with pytest.raises(KeyboardInterrupt) if now == 30 else nullcontext():
            engine.ack("t", "g", ["-a"], now)
    abandon(engine)
    engine = Engine.open(tmp_path, door=Quick(), settings=settings)
    assert (engine.stats("t").dead, engine.groups("t")["g"].dead, engine.stats("t").reserve) == (1, 1, 0)
    assert engine.check() == []
    engine.close()


def test_a_restart_replays_a_bounded_part_of_the_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_UNSAVED_BYTES_MAX", 20_000)
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings())
    engine.move_group("t", "g", "earliest", 0)
    put(engine, *(f"m{n}" for n in range(2_000)))
    engine.topic("t").checkpoint()
    for _ in range(100):
        engine.ack("t", "g", engine.reserve("t", "g", 20, 20).ids, 20)
        engine.tick(20)
        assert not engine.topic("t").stores.broker.unsaved
    abandon(engine)
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings())
    assert engine.stats("t").history == 2_000
    engine.close()


def test_what_grows_old_by_itself_goes_although_nothing_happens(tmp_path: Path) -> None:
    hour = 3_600_000
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(max_attempts=1, dead_ttl_hours=1))
    engine.move_group("t", "g", "earliest", 0)
    put(engine, "a")
    engine.reserve("t", "g", 1, 20)
    assert engine.ack("t", "g", ["-a"], 20).dead == 1
    now: int | None = 20
    while now is not None and now < 2 * hour:
        now = max(now, engine.tick(now) or 3 * hour) + 1
    assert engine.stats("t").dead == 0
    engine.close()


def test_a_clean_mark_that_was_taken_never_comes_back(tmp_path: Path) -> None:
    """Killed between the removal of the mark and the sync of its folder: the next one to open must make it sure, or a power cut
    after that brings back a mark that no longer tells the truth."""
    for cut in range(20):
        drive = Drive(tmp_path / str(cut))
        first = Process(drive)
        engine = Engine.open(drive.root, door=first)
        engine.submit("t", [Message(b"x", 5, "a")], 0)
        engine.close()
        first.die()
        second = Process(drive)
        second.ends_in = cut
        try:
            Engine.open(drive.root, door=second)
        except Crash:
            pass
        second.die()
        taken = not (drive.root / names.CLEAN).exists()
        third = Process(drive)
        engine = Engine.open(drive.root, door=third)
        engine.submit("t", [Message(b"y", 5, "b")], 0)
        assert names.CLEAN not in drive.top.durable, f"killed at change {cut}"
        engine.close()
        third.die()
        if taken:
            return
    pytest.fail("the mark was never taken")
