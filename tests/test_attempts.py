"""Attempts of a message: kept wherever it goes, bounded, told in every answer; and a retry that an operator asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.parts import scratch
from turtlemq import attempts as a
from turtlemq.attempts import Attempt
from turtlemq.broker.journal import Journal
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, UnknownGroup, UnknownMessage
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter
from turtlemq.topic.message_view import MessageView

SETTINGS = Settings(max_attempts=3, backoff_base_ms=1_000, backoff_jitter="none", segment_bytes=4096)
SLEEP_MS = 90_000  # a back-off that sleeps in the Index
LONG_TEXT = "Error: no\n" + "  frame\n" * 1_000


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return opened(tmp_path)


def opened(root: Path, settings: Settings = SETTINGS) -> Engine:
    engine = Engine.open(root, settings=settings)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(b"x", 10, id="x")], 0)
    engine.tick(10)
    return engine


def again(engine: Engine, settings: Settings = SETTINGS) -> Engine:
    """A new process in that folder. Its checkpoint is lost, so that the journals tell everything."""
    engine.close()
    (engine.root / "topic" / "t" / "offset").unlink()
    return Engine.open(engine.root, settings=settings)


def attempt(engine: Engine, at_ms: int, consumer: str = "c", **failure: object) -> None:
    """A delivery that fails a millisecond later."""
    engine.tick(at_ms)
    assert engine.reserve("t", "g", 1, at_ms, consumer=consumer).ids == ["x"]
    engine.ack("t", "g", ["-x"], at_ms + 1, **failure)  # type: ignore[arg-type]


def view(engine: Engine) -> MessageView:
    message = engine.message("t", "x")
    assert message is not None
    return message


def told(engine: Engine, group: str = "g") -> list[tuple[int, str, int, str | None]]:
    """Number, consumer, time and outcome of each attempt."""
    return [(one.attempt, one.consumer, one.reserved_ms, one.outcome) for name, one in view(engine).attempts if name == group]


FIRST, SECOND = (1, "a", 20, "failed"), (2, "b", 2_000, "failed")


def test_attempts_go_through_long_back_off_death_requeue_and_restarts(engine: Engine) -> None:
    attempt(engine, 20, "a", error="first")
    assert told(engine) == [FIRST]
    engine = again(engine)
    attempt(engine, 2_000, "b", error="second", retry_delay_ms=SLEEP_MS)
    assert told(engine) == [FIRST, SECOND]
    assert [(one.error, one.ended_ms, one.next_ms) for _, one in view(engine).attempts] == [
        ("first", 21, 1_021),
        ("second", 2_001, 2_001 + SLEEP_MS),
    ]
    engine = again(engine)
    attempt(engine, 100_000, "c", error="third")
    dead = [FIRST, SECOND, (3, "c", 100_000, "dead")]
    assert (view(engine).state, told(engine)) == ("dead", dead)
    engine = again(engine)
    (letter,) = engine.topic("t").view.dead_letters.all(Filter())
    assert [one.outcome for one in a.of_notes(letter.document.meta)] == ["failed", "failed", "dead"]
    engine.requeue("t", [letter], 100_010)
    engine.tick(100_010)
    assert (view(engine).groups["g"]["summary"], told(engine)) == ("ready for attempt 1", dead)
    engine.reserve("t", "g", 1, 100_020, consumer="d")
    assert told(engine) == [*dead, (1, "d", 100_020, None)]
    engine.ack("t", "g", ["x"], 100_021)
    engine = again(engine)
    assert told(engine) == [*dead, (1, "d", 100_020, "acked")]
    assert engine.check() == []


def test_expired_lease_and_delivery_given_back_are_told(engine: Engine) -> None:
    engine.reserve("t", "g", 1, 20, consumer="a")
    engine.give_back("t", "g", ["x"], 20)
    engine.reserve("t", "g", 1, 30, consumer="b", ttr_ms=50)
    engine.tick(500)
    expected = [(1, "a", 20, "given back"), (1, "b", 30, "expired")]
    assert told(engine) == expected
    assert view(engine).groups["g"]["summary"] == "waits for attempt 2"
    assert told(again(engine)) == expected


def test_attempts_come_back_from_the_checkpoint(engine: Engine) -> None:
    attempt(engine, 20, "a")
    engine.reserve("t", "g", 1, 2_000, consumer="b")
    expected = [FIRST, (2, "b", 2_000, None)]
    engine.close()
    engine = Engine.open(engine.root, settings=SETTINGS)
    assert told(engine) == expected
    assert told(again(engine)) == expected


def test_several_consumers_in_one_ack_keep_their_names(engine: Engine) -> None:
    engine.submit("t", [Message(b"y", 10, id="y")], 10)
    engine.tick(11)
    engine.reserve("t", "g", 1, 20, consumer="a")
    engine.reserve("t", "g", 1, 21, consumer="b")
    engine.ack("t", "g", ["y", "x"], 22)
    other = engine.message("t", "y")
    assert told(engine) == [(1, "a", 20, "acked")]
    assert other is not None
    assert [one.consumer for _, one in other.attempts] == ["b"]


def test_only_the_last_attempts_are_kept_and_their_bytes_are_bounded(tmp_path: Path) -> None:
    settings = Settings(max_attempts=1_000, backoff_base_ms=0, segment_bytes=1 << 20)
    engine = opened(tmp_path, settings)
    for i in range(60):
        attempt(engine, 100 + 10 * i, f"consumer {i}", error=f"{i} {LONG_TEXT}"[:4_000])
    numbers = [number for number, *_ in told(engine)]
    assert numbers == list(range(45, 61))
    attempt(engine, 1_000, error="é" * 4_000, retry_delay_ms=SLEEP_MS)
    document = engine.topic("t").stores.index.find("g/x")
    assert document is not None
    assert document.length < 4 * 4_000 + a.TEXTS_BYTES_MAX + 6_000
    assert [number for number, *_ in told(again(engine, settings))] == list(range(46, 62))


@pytest.mark.slow
def test_ten_thousand_attempts_cost_bounded_disk() -> None:
    settings = Settings(max_attempts=1_000_000, backoff_base_ms=0, segment_bytes=1 << 18, history_hours=0.01)
    with scratch() as folder:
        engine = opened(folder, settings)
        sizes = []
        for i in range(10_000):
            attempt(engine, 100 + 100 * i, f"consumer {i}", error=f"{i} {LONG_TEXT}"[:1_500])
            if i % 25 == 0:
                engine.topic("t").checkpoint()
                for _ in range(4):
                    engine.topic("t").maintain()
                sizes.append(sum(file.stat().st_size for file in (engine.root / "topic").rglob("*.bson")))
        assert len(told(engine)) == 16
        engine.close()
    assert 0 < max(sizes[100:]) < 1.5 * max(sizes[20:100]), "it does not grow with the attempts"


def test_group_that_began_later_has_not_seen_the_message(engine: Engine) -> None:
    engine.move_group("t", "late", "latest", 20)
    entry = view(engine).groups["late"]
    assert (entry["state"], entry["summary"]) == ("history", "not seen by this group: before its start")
    assert told(engine, "late") == []


def test_attempts_before_a_replay_are_told_once(engine: Engine) -> None:
    engine.reserve("t", "g", 1, 20, consumer="a")
    engine.ack("t", "g", ["x"], 21)
    engine.move_group("t", "g", "earliest", 30)
    engine.reserve("t", "g", 1, 40, consumer="b")
    assert told(engine) == [(1, "a", 20, "acked"), (1, "b", 40, None)]


def test_reused_id_has_no_attempts_of_the_earlier_message(engine: Engine) -> None:
    engine.reserve("t", "g", 1, 20, consumer="a")
    engine.ack("t", "g", ["x"], 21)
    broker, first = engine.topic("t").stores.broker, 1  # as if its document lay behind the settlement
    assert broker.find_settlements({"g": 0}, "x", first) == {}
    assert broker.find_settlements({"g": 0}, "x", 0).keys() == {"g"}


def test_cancelled_sleeper_keeps_its_times(engine: Engine) -> None:
    engine.submit("t", [Message(b"z", 900_000, id="z")], 30_000)
    engine.reschedule("t", "z", 40_000, due_ms=800_000)
    engine.cancel("t", ["z"], 50_000)
    message = engine.message("t", "z")
    assert message is not None
    assert (message.state, message.due_ms, message.created_ms, message.body) == ("cancelled", 800_000, 30_000, None)
    assert [(one.at_ms, one.event) for one in message.timeline] == [(30_000, "created"), (50_000, "cancelled")]


# Retry now


def test_retry_in_memory_is_ready_now_also_after_a_restart(engine: Engine) -> None:
    attempt(engine, 20, retry_delay_ms=20_000)
    assert engine.retry_now("t", "x", None, 30) == ["g"]
    engine = again(engine)
    assert told(engine) == [(1, "c", 20, "failed")]
    attempt(engine, 40)
    assert [number for number, *_ in told(engine)] == [1, 2]


def test_sleeping_retry_and_dead_letter_are_ready_now(engine: Engine) -> None:
    attempt(engine, 20, retry_delay_ms=SLEEP_MS)
    assert engine.retry_now("t", "x", "g", 30) == ["g"]
    assert view(engine).state == "ready"
    attempt(engine, 30, retry_delay_ms=0)
    attempt(engine, 40)
    assert view(engine).state == "dead"
    assert engine.retry_now("t", "x", "g", 50) == ["g"]
    assert (view(engine).state, len(told(engine))) == ("ready", 3)
    assert engine.reserve("t", "g", 1, 50).ids == ["x"]
    assert engine.check() == []


def test_retry_of_a_message_that_does_not_wait_is_refused(engine: Engine) -> None:
    engine.submit("t", [Message(b"", 5_000, id="later")], 10)
    for id_, state in (("x", "ready"), ("later", "sleep")):
        with pytest.raises(Conflict) as refused:
            engine.retry_now("t", id_, None, 20)
        assert refused.value.details["state"] == state
    engine.reserve("t", "g", 1, 20)
    with pytest.raises(Conflict, match="reserve"):
        engine.retry_now("t", "x", "g", 30)
    with pytest.raises(UnknownMessage):
        engine.retry_now("t", "nothing", None, 30)
    with pytest.raises(UnknownGroup):
        engine.retry_now("t", "x", "nothing", 30)


def test_reschedule_of_a_retry_says_what_it_waits_for(engine: Engine) -> None:
    attempt(engine, 20, retry_delay_ms=SLEEP_MS)
    with pytest.raises(Conflict, match=r"waits for attempt 2.*use retry"):
        engine.reschedule("t", "x", 30, due_ms=500_000)


# Encoding, and the search in a journal


def test_shortened_error_has_its_first_line_and_its_end() -> None:
    short = a.shorten(LONG_TEXT + "  last")
    assert len(short.encode()) <= a.ERROR_BYTES_MAX
    assert short.startswith("Error: no")
    assert short.endswith("  last")
    assert len(a.shorten("é" * 4_000).encode()) <= a.ERROR_BYTES_MAX


def test_attempts_decode_as_they_were_encoded() -> None:
    some = (Attempt(1, "c", 5, 6, "failed", "e", 9), Attempt(2, "", 10, None, None, "", None))
    assert tuple(a.decode(a.encode(some))) == some
    assert a.decode_many(a.encode_many({7: some, 3: some[:1]})) == {7: some, 3: some[:1]}


def test_newest_texts_are_the_last_to_be_cut() -> None:
    some = [Attempt(i, "c", i, i, "failed", f"{i} {'x' * 500}", None) for i in range(16)]
    errors = [one.error for one in a.decode(a.encode(some, 2_000))]
    assert errors[-1] == some[-1].error
    assert len(errors[0]) <= 100
    assert errors[0].startswith("0 x")


def test_events_from_a_time_on_are_found_in_long_files(tmp_path: Path) -> None:
    journal = Journal(Door(), tmp_path, "t", "history", Settings(segment_bytes=200_000))
    for at_ms in range(0, 3_000, 10):
        journal.append(at_ms, "g", {"event": "settle", "ids": b"x" * 1_500})
    for since in (0, 5, 1_230, 2_990, 9_999):
        times = [event.at_ms for raw in journal.documents_since(since) if (event := journal.event(raw)) is not None]
        wanted = list(range(-(-since // 10) * 10, 3_000, 10))
        assert times[len(times) - len(wanted) :] == wanted
        assert len(times) - len(wanted) < 60, "few older ones are read"
