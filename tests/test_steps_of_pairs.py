"""Listings and cancels of messages with retries or dead letters in many groups go in steps, bounded by the pairs of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.topic import facts, listing
from turtlemq.topic.facts import Gathered

GROUPS, IDS, PAIRS = 7, 12, 20  # two messages a step
HOUR_MS = 3_600_000
MESSAGES = [f"m{i:02d}" for i in range(IDS)]


def _retried(folder: Path, asleep: bool, dead: bool, retained: bool = True) -> Engine:
    """All groups failed every message. `asleep`: their retries sleep; else they are ready. `dead`: they became dead letters.
    `retained`: the ready log still has the messages themselves."""
    engine = Engine.open(folder)
    engine.configure("t", max_attempts=1 if dead else 5, segment_bytes=4096, history_hours=99 if retained else 0)
    engine.submit("t", [Message(b"x" * 200, 0, id=id_) for id_ in MESSAGES], 0)
    engine.tick(1)
    engine.submit("t", [Message(b"x" * 200, 0, id=f"other{i}") for i in range(IDS)], 1)
    engine.tick(2)
    for n in range(GROUPS):
        ids = engine.reserve("t", f"g{n}", 2 * IDS, 2).ids
        engine.ack("t", f"g{n}", [id_ if id_.startswith("other") else f"-{id_}" for id_ in ids], 3, retry_delay_ms=HOUR_MS)
    if not asleep:
        engine.tick(3 + HOUR_MS)
    engine.tick(4 + HOUR_MS if not asleep else HOUR_MS)
    assert (engine.topic("t").stores.broker.ready.first_offset == 0) == retained
    return engine


def _pages(engine: Engine, state: str) -> list[list[str]]:
    view, pages, cursor, places = engine.topic("t").view, list[list[str]](), None, listing.Places()
    while True:
        page, cursor = view.messages(state, limit=1_000, cursor=cursor, places=places)
        pages.append([message.id for message in page])
        if cursor is None:
            return pages


def _bounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pairs that each step gathers from now on."""
    gather, counts = facts.gather, list[int]()

    def counting(*args: object, **more: object) -> Gathered:
        gathered = gather(*args, **more)  # type: ignore[arg-type]
        counts.append(max(len(gathered.asleep), len(gathered.letters), len(gathered.located.retries)))
        return gathered

    monkeypatch.setattr(facts, "gather", counting)
    monkeypatch.setattr(listing, "_PAIRS_MAX", PAIRS)
    return counts


@pytest.mark.parametrize("retained", [True, False], ids=["retained", "only retries"])
@pytest.mark.parametrize("case", ["ready", "asleep", "dead"])
def test_listing_goes_on_in_steps_of_bounded_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, retained: bool
) -> None:
    engine = _retried(tmp_path / "d", case == "asleep", case == "dead", retained)
    states = ("ready", "history", "reserve", "cancelled")
    wanted = {state: [id_ for page in _pages(engine, state) for id_ in page] for state in states}
    assert wanted["ready"] == (MESSAGES if case == "ready" else [])
    counts = _bounded(monkeypatch)
    for state in states:
        assert [id_ for page in _pages(engine, state) for id_ in page] == wanted[state]
    assert max(counts) <= PAIRS
    assert len(counts) <= len(states) * (2 + IDS), "each message is looked up once"
    assert len(counts) > len(states) or not (retained or case == "ready"), "there was more than a step can do"
    engine.close()


@pytest.mark.parametrize("case", ["ready", "asleep", "dead"])
def test_cancel_answers_for_the_messages_that_a_step_came_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    engine = _retried(tmp_path / "d", case == "asleep", case == "dead")
    counts = _bounded(monkeypatch)
    topic, left = engine.stage_cancel("t", [*MESSAGES, "unknown"], 2 * HOUR_MS)
    topic.commit()
    answers = dict[str, str]()
    while left:
        step = engine.finish_cancel(topic, left, 2 * HOUR_MS, PAIRS)
        assert step, "each step comes to one message at least"
        assert list(step) == list(left)[: len(step)]
        answers |= step
        left = {id_: state for id_, state in left.items() if id_ not in step}
    assert answers == dict.fromkeys(MESSAGES, "dead" if case == "dead" else "cancelled") | {"unknown": "unknown"}
    assert len(counts) >= IDS // 2
    assert max(counts) <= PAIRS
    assert engine.stats("t").sleep == 0
    assert engine.check() == []
    engine.close()
    again = Engine.open(tmp_path / "d")
    assert again.stats("t").cancelled == (0 if case == "dead" else IDS)
    again.close()


def test_a_step_is_about_one_message_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _retried(tmp_path / "d", asleep=False, dead=False)
    monkeypatch.setattr(listing, "_PAIRS_MAX", 1)
    assert [id_ for page in _pages(engine, "ready") for id_ in page] == MESSAGES
    engine.close()
