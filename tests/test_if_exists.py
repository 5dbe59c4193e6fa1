"""Ids as timers: a put that keeps, replaces, reschedules or refuses a message of the same id, in every state of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.harness.engine_disk import Quick, abandon
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidFireAt, InvalidId, InvalidMessage
from turtlemq.if_exists import MODES, IfExists
from turtlemq.model import Batch, Receipt
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter

SETTINGS = Settings(segment_bytes=8192, run_messages=8, backoff_jitter="none", max_attempts=2, ttr_ms=1_000)
LONG = 100_000  # a back-off that sleeps through the Index
KEEP, REPLACE, RESCHEDULE, ERROR = IfExists
LATER = 1_000_000  # when all that was put with `put` by default has come due


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    made.move_group("t", "g", "earliest", 0)
    yield made
    assert made.check() == []
    made.close()


def put(
    engine: Engine, mode: int | Sequence[int], *ids: str | None, body: str = "new", due: int = 500_000, now: int = 50
) -> Receipt:
    bodies = [body.encode() if i == 0 else f"{body}{i}".encode() for i in range(len(ids))]
    return engine.submit("t", Batch(bodies, [due] * len(ids), list(ids), if_exists=mode), now)


def fetch(engine: Engine, now: int, group: str = "g") -> list[tuple[str, bytes]]:
    engine.tick(now)
    return [(document.id.rpartition("/")[2], document.body) for document in engine.reserve("t", group, 99, now).documents()]


def asleep(engine: Engine) -> None:
    put(engine, KEEP, "a", body="old", due=400_000, now=0)


def ready(engine: Engine) -> None:
    put(engine, KEEP, "a", body="old", due=10, now=0)
    engine.tick(20)


def settled(engine: Engine) -> None:
    ready(engine)
    assert fetch(engine, 25) == [("a", b"old")]
    assert engine.ack("t", "g", ["a"], 30).acked == 1


def dead(engine: Engine) -> None:
    ready(engine)
    for at in (21, 22):
        assert fetch(engine, at) == [("a", b"old")]
        engine.ack("t", "g", ["-a"], at, retry_delay_ms=0)
    assert engine.stats("t").dead == 1


def waiting(engine: Engine) -> None:
    """A short back-off, in memory."""
    ready(engine)
    fetch(engine, 25)
    assert engine.ack("t", "g", ["-a"], 30, retry_delay_ms=5_000).failed == 1


def backing_off(engine: Engine) -> None:
    """A long back-off: a sleeping retry."""
    ready(engine)
    fetch(engine, 25)
    assert engine.ack("t", "g", ["-a"], 30, retry_delay_ms=LONG).failed == 1


def retried(engine: Engine) -> None:
    """A sleeping retry has come due, was delivered and settled."""
    backing_off(engine)
    assert fetch(engine, 30 + LONG) == [("a", b"old")]
    assert engine.ack("t", "g", ["a"], 31 + LONG).acked == 1


def cancelled_asleep(engine: Engine) -> None:
    asleep(engine)
    assert engine.cancel("t", ["a"], 5) == {"a": "cancelled"}


def cancelled_ready(engine: Engine) -> None:
    ready(engine)
    assert engine.cancel("t", ["a"], 25) == {"a": "cancelled"}


def reserved(engine: Engine) -> None:
    ready(engine)
    assert fetch(engine, 25) == [("a", b"old")]


def unknown(engine: Engine) -> None:
    put(engine, KEEP, "other", due=10, now=0)


Made = Callable[[Engine], None]
KNOWN: tuple[tuple[Made, str], ...] = (
    (asleep, "sleep"),
    (ready, "ready"),
    (settled, "history"),
    (dead, "dead"),
    (waiting, "ready"),
    (backing_off, "sleep"),
    (retried, "history"),
)
FREE: tuple[Made, ...] = (unknown, cancelled_asleep, cancelled_ready)
AWAKE = tuple(made for made, _ in KNOWN if made is not asleep)


def only_the_new_one_comes(engine: Engine, body: bytes = b"new") -> None:
    """In the group, in a group that is moved back, in a new one, and after a restart."""
    assert "a" not in dict(fetch(engine, 499_999))
    assert [got for got in fetch(engine, 600_000) if got[0] == "a"] == [("a", body)]
    engine.ack("t", "g", ["a"], 600_000)
    engine.move_group("t", "g", "earliest", 600_001)
    engine.move_group("t", "late", "earliest", 600_001)
    for group in ("g", "late"):
        assert [got for got in fetch(engine, 600_002, group) if got[0] == "a"] == [("a", body)]
        engine.ack("t", group, ["a"], 600_003)
    assert list(engine.topic("t").view.dead_letters.all(Filter())) == []
    assert engine.check() == []


@pytest.mark.parametrize(("made", "state"), KNOWN)
def test_a_known_id_is_kept_or_refused_with_its_state(engine: Engine, made: Made, state: str) -> None:
    made(engine)
    kept = put(engine, KEEP, "a")
    assert (kept.created, kept.duplicates) == ([False], 1)
    with pytest.raises(Conflict) as refused:
        put(engine, ERROR, "b", "a")
    assert refused.value.details == {"index": 1, "state": state}
    assert engine.message("t", "b") is None, "nothing of the batch is stored"


@pytest.mark.parametrize("made", [made for made, _ in KNOWN])
def test_replaced_gives_way(engine: Engine, made: Made) -> None:
    made(engine)
    answer = put(engine, REPLACE, "b", "a", due=500_000, now=200_000)
    assert (answer.ids, answer.created, answer.replaced, answer.rescheduled, answer.duplicates) == (
        ["b", "a"],
        [True, False],
        [1],
        [],
        0,
    )
    view = engine.message("t", "a")
    assert view is not None
    assert view.state == "sleep"
    only_the_new_one_comes(engine, b"new1")


@pytest.mark.parametrize("made", AWAKE)
def test_reschedule_of_an_id_that_does_not_sleep_creates_it(engine: Engine, made: Made) -> None:
    made(engine)
    answer = put(engine, RESCHEDULE, "a", now=200_000)
    assert (answer.created, answer.replaced, answer.rescheduled) == ([True], [], [])
    only_the_new_one_comes(engine)


@pytest.mark.parametrize("mode", IfExists)
@pytest.mark.parametrize("made", FREE)
def test_a_cancelled_id_counts_as_unknown(engine: Engine, made: Made, mode: int) -> None:
    made(engine)
    answer = put(engine, mode, "a")
    assert (answer.created, answer.duplicates) == ([True], 0)
    only_the_new_one_comes(engine)


def test_a_batch_of_defaults_creates_cancelled_ids(engine: Engine) -> None:
    cancelled_ready(engine)
    answer = engine.submit("t", Batch([b"new"], [500_000], ["a"]), 50)
    assert answer.created == [True]
    only_the_new_one_comes(engine)


def test_a_rescheduled_sleeper_keeps_its_body_and_creation(engine: Engine) -> None:
    engine.submit("t", Batch([b"old"], [400_000], ["a"], ttr_ms=[7_000], flags=[1], headers=[{"h": "1"}]), 1_000)
    answer = put(engine, RESCHEDULE, "a", now=2_000)
    assert (answer.created, answer.rescheduled) == ([False], [0])
    kept = engine.get("t", "a")
    assert kept is not None
    assert (kept.body, kept.due_ms, kept.created_ms, kept.ttr_ms, kept.headers) == (b"old", 500_000, 1_000, 7_000, {"h": "1"})
    only_the_new_one_comes(engine, b"old")


@pytest.mark.parametrize("mode", [REPLACE, RESCHEDULE])
def test_a_reserved_message_does_not_give_way(engine: Engine, mode: int) -> None:
    reserved(engine)
    engine.move_group("t", "other", "latest", 26)
    with pytest.raises(Conflict) as refused:
        put(engine, mode, "b", "a")
    assert refused.value.details == {"index": 1, "state": "reserve"}
    assert engine.message("t", "b") is None
    assert engine.ack("t", "g", ["a"], 60).acked == 1
    assert put(engine, mode, "a").created == [mode == RESCHEDULE]


def test_the_mode_of_a_message_is_its_own(engine: Engine) -> None:
    asleep(engine)
    put(engine, KEEP, "b", body="old", due=400_000, now=0)
    put(engine, KEEP, "c", body="old", due=400_000, now=0)
    answer = put(engine, [KEEP, REPLACE, RESCHEDULE, ERROR, ERROR], "a", "b", "c", "d", None)
    assert answer.created == [False, False, False, True, True]
    assert (answer.duplicates, answer.replaced, answer.rescheduled) == (1, [1], [2])
    bodies = {id_: (kept.body, kept.due_ms) for id_ in answer.ids if (kept := engine.get("t", id_)) is not None}
    assert list(bodies.values()) == [
        (b"old", 400_000),
        (b"new1", 500_000),
        (b"old", 500_000),
        (b"new3", 500_000),
        (b"new4", 500_000),
    ]


# The same id twice


def test_messages_of_one_batch_take_effect_one_after_the_other(engine: Engine) -> None:
    batch = Batch(
        [b"0", b"1", b"2", b"3"], [100_000, 200_000, 300_000, 400_000], ["a"] * 4, if_exists=[ERROR, REPLACE, RESCHEDULE, KEEP]
    )
    answer = engine.submit("t", batch, 0)
    assert (answer.created, answer.replaced, answer.rescheduled, answer.duplicates) == ([True, False, False, False], [1], [2], 1)
    kept = engine.get("t", "a")
    assert kept is not None
    assert (kept.body, kept.due_ms, engine.stats("t").sleep) == (b"1", 300_000, 1)
    again = Batch([b"4", b"5"], [500_000, 600_000], ["a"] * 2, if_exists=[RESCHEDULE, REPLACE])
    assert engine.submit("t", again, 0).rescheduled == [0]
    kept = engine.get("t", "a")
    assert kept is not None
    assert (kept.body, kept.due_ms, engine.stats("t").sleep) == (b"5", 600_000, 1)


def test_an_id_twice_in_a_batch_with_error_is_a_conflict(engine: Engine) -> None:
    with pytest.raises(Conflict) as refused:
        put(engine, ERROR, "a", "b", "a")
    assert refused.value.details == {"index": 2, "state": "sleep"}
    assert engine.message("t", "a") is None


@pytest.mark.parametrize("made", [unknown, asleep, ready, settled])
def test_requests_of_one_commit_take_effect_one_after_the_other(engine: Engine, made: Made) -> None:
    made(engine)
    topic = engine.topic("t")
    first = topic.stage(Batch([b"1"], [300_000], ["a"], if_exists=REPLACE), 50)
    second = topic.stage(Batch([b"2"], [400_000], ["a"], if_exists=RESCHEDULE), 50)
    third = topic.stage(Batch([b"3"], [500_000], ["a"]), 50)
    with pytest.raises(Conflict):
        topic.stage(Batch([b"4"], [500_000], ["a"], if_exists=ERROR), 50)
    topic.commit()
    engine.changed(topic, 60)
    assert first.created == [made is unknown]
    assert (second.rescheduled, third.duplicates) == ([0], 1)
    kept = engine.get("t", "a")
    assert kept is not None
    assert (kept.body, kept.due_ms) == (b"1", 400_000)
    assert [got for got in fetch(engine, 700_000) if got[0] == "a"] == [("a", b"1")]


# Between the put and its commit


def test_a_message_that_is_about_to_be_replaced_is_not_delivered(engine: Engine) -> None:
    ready(engine)
    topic = engine.topic("t")
    topic.stage(Batch([b"new"], [500_000], ["a"], if_exists=REPLACE), 50)
    assert fetch(engine, 60) == [], "it lands before the fetch"
    engine.changed(topic, 60)
    only_the_new_one_comes(engine)


def test_a_new_message_may_be_due_at_once(engine: Engine) -> None:
    settled(engine)
    put(engine, REPLACE, "a", due=50, now=50)
    assert fetch(engine, 50) == [("a", b"new")]
    assert engine.ack("t", "g", ["a"], 60).acked == 1


# Refused


def test_an_expired_message_is_not_rescheduled(engine: Engine) -> None:
    engine.submit("t", Batch([b"old"], [400_000], ["a"], expires_ms=[450_000]), 0)
    with pytest.raises(InvalidFireAt) as refused:
        put(engine, RESCHEDULE, "b", "a")
    assert refused.value.details == {"index": 1}
    both = Batch([b"1", b"2"], [400_000, 500_000], ["c", "c"], expires_ms=[450_000, None], if_exists=RESCHEDULE)
    with pytest.raises(InvalidMessage) as other:
        engine.submit("t", both, 0)
    assert other.value.details == {"index": 1}
    assert engine.stats("t").sleep == 1


def test_an_id_that_the_server_is_going_to_give_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidId):
        put(engine, REPLACE, "t7sskca3h88000")


def test_modes_have_names() -> None:
    assert [MODES[mode] for mode in IfExists] == ["keep", "replace", "reschedule", "error"]


# Crashes


@pytest.mark.parametrize("made", [made for made, _ in KNOWN] + list(FREE))
@pytest.mark.parametrize("mode", [REPLACE, RESCHEDULE])
def test_what_was_answered_survives_a_kill(tmp_path: Path, made: Made, mode: int) -> None:
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    made(engine)
    put(engine, mode, "a", now=200_000)
    abandon(engine)
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    assert engine.check() == []
    only_the_new_one_comes(engine, b"old" if (made, mode) == (asleep, RESCHEDULE) else b"new")
    engine.close()


@pytest.mark.parametrize("made", [made for made, _ in KNOWN])
def test_a_kill_between_the_two_logs_ends_the_old_message(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new message is durable, and the process ends before the Broker knows."""
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    engine.move_group("t", "g", "earliest", 0)
    made(engine)
    with monkeypatch.context() as patch:
        patch.setattr("turtlemq.topic.superseded.end_awake", lambda *_: False)
        put(engine, REPLACE, "a", now=200_000)
    abandon(engine)
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=SETTINGS)
    assert engine.check() == []
    only_the_new_one_comes(engine)
    engine.close()


@pytest.mark.parametrize("before", [ready, settled, dead])
def test_a_replaced_message_is_listed_in_no_state(engine: Engine, before: Callable[[Engine], None]) -> None:
    before(engine)
    put(engine, REPLACE, "a")
    listed = {
        state: len(engine.topic("t").view.messages(state)[0]) for state in ("sleep", "ready", "history", "dead", "cancelled")
    }
    assert listed == {"sleep": 1, "ready": 0, "history": 0, "dead": 0, "cancelled": 0}
    fetch(engine, LATER)
    assert engine.topic("t").view.messages("cancelled")[0] == []


def test_a_cancelled_id_put_again_is_listed_as_what_it_is(engine: Engine) -> None:
    ready(engine)
    put(engine, KEEP, "b", due=10)
    engine.tick(60)
    engine.cancel("t", ["a", "b"], 70)
    put(engine, KEEP, "a", now=80)
    pages = [engine.topic("t").view.messages("cancelled", limit=limit)[0] for limit in (1, 10)]
    assert [[view.id for view in page] for page in pages] == [["b"], ["b"]]


def test_void_retries_of_replaced_messages_leave_the_backlog_alone(engine: Engine) -> None:
    ready(engine)
    assert fetch(engine, 25) == [("a", b"old")]
    assert engine.ack("t", "g", ["-a"], 30, retry_delay_ms=60_000).failed == 1
    engine.tick(70_000)  # the retry is in the ready log
    engine.drop_group("t", "g", 70_000)
    engine.move_group("t", "g", "earliest", 70_000)  # of the group before, so it is void
    assert engine.groups("t")["g"].ready == 1
    put(engine, REPLACE, "a", now=70_000)
    assert engine.groups("t")["g"].ready == 0
    put(engine, KEEP, "b", due=70_100, now=70_050)
    assert fetch(engine, 70_200) == [("b", b"new")]
