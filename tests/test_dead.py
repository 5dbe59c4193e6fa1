"""Dead letters: their fields, how they are listed, requeued, deleted, kept and counted."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from tests.harness.engine_disk import Disk, abandon
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, Stopped
from turtlemq.index.index import Index
from turtlemq.index.seal import SealJob
from turtlemq.model import Message
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage.workers import Inline, Job
from turtlemq.topic import facts
from turtlemq.topic.dead_letters import DeadLetter, DeadLetters, Filter

T = TypeVar("T")

SETTINGS = Settings(max_attempts=1, ttr_ms=100, segment_bytes=8192, run_messages=8)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.open(tmp_path, settings=SETTINGS)


def die(engine: Engine, *ids: str, at: int = 10, error: str = "boom", group: str = "g") -> None:
    engine.submit("t", [Message(b"body", at, id=i, headers={"k": i}) for i in ids], at)
    engine.tick(at)
    got = engine.reserve("t", group, 100, at).ids
    assert engine.ack("t", group, [f"-{i}" for i in got], at + 1, error=error).dead == len(got)


def dead(engine: Engine, **asked: object) -> list[DeadLetter]:
    return list(engine.topic("t").view.dead_letters.all(Filter(**asked)))  # type: ignore[arg-type]


def test_a_letter_tells_everything(engine: Engine) -> None:
    die(engine, "a", at=10, error="boom")
    (letter,) = dead(engine)
    assert (letter.id, letter.group, letter.body, letter.headers) == ("a", "g", b"body", {"k": "a"})
    assert (letter.due_ms, letter.created_ms, letter.dropped_ms, letter.attempts, letter.error) == (10, 10, 11, 1, "boom")
    view = engine.message("t", "a")
    assert view is not None
    assert view.groups["g"]["state"] == "dead"


def test_letters_are_listed_in_pages_by_group_time_and_error(engine: Engine) -> None:
    for n in range(25):
        die(engine, f"m{n}", at=10 + n, error="odd" if n % 2 else "even")
    letters = engine.topic("t").view.dead_letters
    for newest in (False, True):
        seen: list[str] = []
        cursor = None
        while True:
            page, cursor = letters.page(Filter(), 4, cursor, newest)
            seen += [letter.id for letter in page]
            if cursor is None:
                break
        assert seen == [f"m{n}" for n in (range(24, -1, -1) if newest else range(25))]
    page, cursor = letters.page(Filter(error="odd"), 2, None, newest=True)
    following, _ = letters.page(Filter(error="odd"), 2, cursor, newest=True)
    assert [letter.id for letter in page + following] == ["m23", "m21", "m19", "m17"]
    assert Counter(letter.error for letter in letters.all(Filter())) == {"even": 13, "odd": 12}
    assert [letter.id for letter in dead(engine, error="odd", from_ms=12, to_ms=16)] == ["m1", "m3", "m5"]
    assert dead(engine, group="nobody") == []


def test_requeued_letters_come_again_at_a_rate_for_their_group_alone(engine: Engine) -> None:
    engine.move_group("t", "other", "earliest", 0)
    die(engine, *"abc")
    assert engine.requeue("t", dead(engine), 100, due_ms=1_000, per_s=2) == 3
    assert (engine.groups("t")["g"].dead, engine.stats("t").sleep) == (0, 3)
    came = []
    for now in (999, 1_000, 1_500, 2_000):
        engine.tick(now)
        came.append(engine.reserve("t", "g", 9, now, ttr_ms=10**6).ids)
    assert came == [[], ["a"], ["b"], ["c"]]
    assert engine.reserve("t", "other", 9, 2_000).ids == ["a", "b", "c"]
    assert engine.check() == []


def test_requeueing_twice_what_was_listed_once_delivers_it_once(engine: Engine) -> None:
    die(engine, "a")
    listed = dead(engine)
    assert (engine.requeue("t", listed, 20), engine.requeue("t", listed, 20), engine.delete_dead("t", listed, 20)) == (1, 0, 0)
    engine.tick(21)
    assert engine.reserve("t", "g", 9, 21).ids == ["a"]
    assert engine.check() == []


def test_attempts_go_on_unless_reset(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path, settings=Settings(max_attempts=2, backoff_base_ms=0))
    engine.submit("t", [Message(b"", 10, id="a")], 10)
    engine.tick(10)
    for now in (11, 12):
        engine.reserve("t", "g", 1, now)
        engine.ack("t", "g", ["-a"], now)
    engine.requeue("t", dead(engine), 20, reset_attempts=False)
    engine.tick(21)
    assert engine.reserve("t", "g", 1, 21).pieces[0].messages.attempts.tolist() == [3]
    engine.ack("t", "g", ["-a"], 22)
    engine.requeue("t", dead(engine), 30)
    engine.tick(31)
    assert engine.reserve("t", "g", 1, 31).pieces[0].messages.attempts.tolist() == [1]


def test_count_and_age_limits_hold_over_a_restart(tmp_path: Path) -> None:
    settings = Settings(max_attempts=1, dead_max_count=5, dead_ttl_hours=1)
    engine = Engine.open(tmp_path, settings=settings)
    die(engine, *(f"m{n}" for n in range(9)))
    engine.tick(100_000)
    assert [letter.id for letter in dead(engine)] == [f"m{n}" for n in range(4, 9)]
    assert (engine.groups("t")["g"].dead, engine.topic("t").view.dead_letters.dropped) == (5, 4)
    engine.close()
    engine = Engine.open(tmp_path, settings=settings)
    assert len(dead(engine)) == 5, "what was dropped stays dropped"
    engine.tick(2 * 3_600_000)
    assert (dead(engine), engine.groups("t")["g"].dead) == ([], 0)
    assert engine.check() == []
    engine.close()


def test_expired_messages_are_dead_for_every_group(engine: Engine) -> None:
    engine.submit("t", [Message(b"", 10, id=f"m{n}", expires_ms=20) for n in range(2_500)], 0)
    engine.submit("t", [Message(b"", 10, id="fresh")], 0)
    engine.tick(10)
    rounds = []
    while not (out := engine.reserve("t", "g", 10, 30)):
        assert out.more, "so many were passed over that there is nothing yet"
        rounds.append(engine.groups("t")["g"].dead)
    assert out.ids == ["fresh"]
    assert rounds
    assert Counter(letter.error for letter in engine.topic("t").view.dead_letters.all(Filter())) == {"expired": 2_500}
    assert engine.check() == []


def test_a_message_that_dies_again_after_a_replay_is_one_letter(engine: Engine) -> None:
    die(engine, "a", error="first")
    engine.move_group("t", "g", "earliest", 20)
    engine.reserve("t", "g", 9, 20)
    engine.ack("t", "g", ["-a"], 21, error="second")
    assert [letter.error for letter in dead(engine)] == ["second"]
    assert engine.groups("t")["g"].dead == 1
    assert engine.check() == []


# Disks that say no


def test_letters_that_a_full_disk_keeps_are_counted(tmp_path: Path) -> None:
    door = Disk()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    die(engine, "a", group="g")
    die(engine, "b", group="h")
    door.full = True
    with pytest.raises(DiskFull):
        engine.delete_dead("t", dead(engine), 20)
    door.full = False
    assert engine.stats("t").dead == len(dead(engine)) == 3, "h has had both"
    engine.topics["t"].checkpoint()
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.check() == []
    assert engine.delete_dead("t", dead(engine), 30) == 3
    assert engine.stats("t").dead == 0
    engine.close()


class NoTombs(Disk):
    """There is no room for anything more among the dead."""

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if self.full and name == "write" and path is not None and path.parent.name == "dead":
            raise OSError(errno.ENOSPC, "made to fail")
        return action(*args)


@pytest.mark.parametrize("crash", [False, True])
def test_a_requeued_letter_goes_when_there_is_room(tmp_path: Path, crash: bool) -> None:
    door = NoTombs()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    die(engine, "a")
    letters, door.full = dead(engine), True
    assert engine.requeue("t", letters, 20, due_ms=30) == 1
    assert engine.requeue("t", letters, 20, due_ms=30) == 0
    engine.tick(30)
    assert isinstance(engine.trouble["t"], DiskFull)
    assert engine.reserve("t", "g", 9, 30).ids == [], "it does not come before it is no dead letter any more"
    if crash:
        abandon(engine)
        engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    door.full = False
    engine.tick(2_000)
    assert dead(engine) == []
    assert engine.stats("t").dead == 0
    assert engine.reserve("t", "g", 9, 2_000).ids == ["a"]
    assert engine.check() == []
    engine.close()


class Wedged(Disk):
    """Nothing more is written to files whose names begin so."""

    wedged = ""

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if self.wedged and name == "write" and path is not None and path.name.startswith(self.wedged):
            raise OSError(errno.EIO, "made to fail")
        return super()._call(name, path, action, *args)


@pytest.mark.parametrize("what", ["its note", "its grave"])
def test_a_half_finished_death_is_counted_after_reopening(tmp_path: Path, what: str) -> None:
    door = Wedged()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(b"body", 10, id="first"), Message(b"body", 11, id="late", expires_ms=50)], 0)
    engine.tick(11)
    assert engine.ack("t", "g", engine.reserve("t", "g", 1, 11).ids, 12).acked == 1
    door.wedged, door.rotten = ("history", "") if what == "its note" else ("", "/dead/")
    with pytest.raises(Stopped):
        engine.reserve("t", "g", 1, 60)
    door.wedged, door.rotten = "", ""
    engine.tick(100_000)
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert engine.check() == []
    assert engine.stats("t").dead == len(dead(engine)) == 1
    assert engine.reserve("t", "g", 1, 100_000).ids == []
    engine.close()


def test_a_topic_that_was_dropped_in_trouble_can_be_made_again(tmp_path: Path) -> None:
    door = Disk()
    engine = Engine.open(tmp_path / "data", door=door, settings=SETTINGS)
    engine.submit("t", [Message(b"body", 10)], 0)
    door.full = True
    engine.tick(10)
    assert isinstance(engine.trouble["t"], DiskFull)
    door.full = False
    engine.drop_topic("t")
    engine.configure("t", max_attempts=3)
    assert engine.check() == []
    engine.close()


def test_recovery_looks_for_all_requeued_letters_at_once(tmp_path: Path, engine: Engine) -> None:
    """The disk was full after they slept again, and their removal, which is journaled, is still to be done."""
    die(engine, *(f"m{n}" for n in range(50)))
    with patch.object(DeadLetters, "remove", side_effect=DiskFull):
        assert engine.requeue("t", dead(engine), 20, due_ms=99) == 50
    abandon(engine)
    sought, original = list[int](), Index.find_many

    def find_many(index: Index, ids: Sequence[str], after_seq: int = -1) -> dict[int, f.Document]:
        sought.append(len(ids))
        return original(index, ids, after_seq)

    with patch.object(Index, "find", side_effect=AssertionError), patch.object(Index, "find_many", autospec=True) as many:
        many.side_effect = find_many
        engine = Engine.open(tmp_path, settings=SETTINGS)
    assert sought == [50, 50]  # letters, and retries
    stats = engine.stats("t")
    assert (stats.dead, stats.sleep) == (0, 50)
    assert engine.check() == []


def test_requeue_gathers_no_facts_of_groups_that_were_not_moved(engine: Engine) -> None:
    die(engine, "a", "b")
    with patch.object(facts, "gather", side_effect=AssertionError):
        assert engine.requeue("t", dead(engine), 20) == 2


def test_letters_are_sealed_by_the_worker(tmp_path: Path) -> None:
    """Not by the thread of the engine: up to a whole segment would be written at once."""
    sealed: list[Path] = []

    class Noting(Inline):
        def submit(self, work: Callable[..., Any], /, *args: Any) -> Job:
            sealed.extend(job.folder for job in args if isinstance(job, SealJob))
            return super().submit(work, *args)

    engine = Engine.open(tmp_path, settings=SETTINGS, worker=Noting())
    for n in range(6):
        die(engine, *(f"m{n}-{i}" for i in range(20)), at=10 + n)
    for n in range(50):
        engine.tick(20_000 * (n + 1))
    assert tmp_path / "topic" / "t" / "dead" in sealed
    assert len(dead(engine)) == 120
    assert engine.check() == []
    engine.close()
