"""The past of a message: answers of noted moments are told again later, from the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import Server, running
from tests.harness.standing_walk import EVENTS, TOPIC, WEIGHTS, Walk
from turtlemq.broker import checkpoint
from turtlemq.client import Client
from turtlemq.client import errors as client_errors
from turtlemq.engine import Engine
from turtlemq.errors import NotKept, UnknownMessage
from turtlemq.model import Message
from turtlemq.segment.forward import documents_with
from turtlemq.settings import Settings
from turtlemq.topic.message_view import MessageView
from turtlemq.topic.past import PastView

SETTINGS = Settings(backoff_jitter="none", backoff_base_ms=60_000, max_attempts=2)


def then(engine: Engine, id_: str, at_ms: int, topic: str = "t") -> PastView:
    """A message as it was at a moment."""
    steps = engine.topic(topic).view.message_at(id_, at_ms)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: PastView = end.value
            return found


def states(view: MessageView) -> dict[str, object]:
    return {name: entry["state"] for name, entry in view.groups.items()}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data", settings=SETTINGS)
    yield one
    one.close()


def test_every_step_of_a_life_is_told_with_its_times(engine: Engine) -> None:
    engine.submit("t", [Message(b"x", 1_000, id="m")], 10)
    engine.reschedule("t", "m", 20, due_ms=2_000)
    engine.reschedule("t", "m", 30, due_ms=1_500, body=b"y")
    engine.move_group("t", "g", "earliest", 40)
    engine.tick(1_500)
    engine.reserve("t", "g", 1, 1_600, consumer="w1")
    engine.ack("t", "g", ["-m"], 1_700, error="no")
    engine.tick(70_000)
    engine.reserve("t", "g", 1, 70_100, consumer="w2")
    engine.ack("t", "g", ["-m"], 70_200, error="again")
    topic = engine.topic("t")
    engine.requeue("t", topic.view.letters_of(["m"])["m"], 80_000)
    engine.tick(80_100)
    engine.reserve("t", "g", 1, 80_200)
    engine.ack("t", "g", ["m"], 80_300)

    told = {
        at: then(engine, "m", at).view for at in (10, 25, 30, 1_499, 1_500, 1_650, 1_700, 70_000, 70_150, 70_200, 80_050, 80_400)
    }
    assert [view.state for view in told.values()] == [
        *["sleep"] * 4,
        *["ready", "reserve", "sleep", "ready", "reserve", "dead", "sleep", "history"],
    ]
    assert [(told[at].due_ms, told[at].body) for at in (10, 25, 30)] == [(1_000, b"x"), (2_000, b"x"), (1_500, b"y")]
    assert told[1_650].groups["g"]["consumer"] == "w1"
    assert told[1_700].groups["g"] == {
        "state": "sleep",
        "attempt": 1,
        "due_ms": 61_700,
        "error": "no",
        "summary": "waits for attempt 2",
    }
    assert told[70_200].groups["g"]["error"] == "again"
    assert [(one.attempt, one.consumer, one.outcome) for _, one in told[70_150].attempts] == [
        (1, "w1", "failed"),
        (2, "w2", None),
    ]
    assert [moment.event for moment in told[70_150].timeline] == ["created", "due", "ready", "reserved", "failed", "reserved"]
    assert told[80_400].groups["g"]["settled_ms"] == 80_300
    with pytest.raises(UnknownMessage, match="held no message"):
        then(engine, "m", 9)
    with pytest.raises(UnknownMessage, match="held no message"):
        then(engine, "other", 1_500)


def test_moved_deleted_and_late_groups_are_told(engine: Engine) -> None:
    engine.submit("t", [Message(b"", 100, id="m")], 10)
    engine.tick(100)
    assert then(engine, "m", 105).view.state == "ready"
    assert then(engine, "m", 105).view.groups == {}
    engine.reserve("t", "a", 1, 110)
    engine.ack("t", "a", ["m"], 120)
    engine.move_group("t", "b", "latest", 130)
    engine.move_group("t", "a", "earliest", 140)
    engine.drop_group("t", "b", 150)
    engine.cancel("t", ["m"], 160)
    told = [states(then(engine, "m", at).view) for at in (115, 125, 135, 145, 155, 165)]
    assert told == [
        {"a": "reserve"},
        {"a": "history"},
        {"a": "history", "b": "history"},
        {"a": "ready", "b": "history"},
        {"a": "ready"},
        {"a": "cancelled"},
    ]
    assert "not seen" in str(then(engine, "m", 135).view.groups["b"]["summary"])
    assert then(engine, "m", 165).view.timeline[-1].event == "cancelled"


def test_a_move_of_its_group_ends_the_sleep_of_a_retry(engine: Engine) -> None:
    engine.submit("t", [Message(b"", 100, id="m")], 10)
    engine.tick(100)
    engine.reserve("t", "g", 1, 110)
    engine.ack("t", "g", ["-m"], 120)
    engine.move_group("t", "g", "earliest", 130)
    assert [then(engine, "m", at).view.state for at in (115, 125, 135)] == ["reserve", "sleep", "ready"]


def test_earlier_messages_of_an_id_are_told_as_they_were(engine: Engine) -> None:
    engine.submit("t", [Message(b"1", 1_000, id="m")], 10)
    engine.cancel("t", ["m"], 20)
    engine.submit("t", [Message(b"2", 1_000, id="m")], 30)
    told = [then(engine, "m", at).view for at in (15, 25, 35)]
    assert [(view.state, view.body) for view in told] == [("sleep", b"1"), ("cancelled", None), ("sleep", b"2")]


def test_versions_that_a_seal_has_removed_are_not_made_up(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data", settings=Settings(segment_bytes=4096))
    engine.submit("t", [Message(b"x", 10**9, id="m")], 10)
    engine.reschedule("t", "m", 20, due_ms=2 * 10**9)
    engine.reschedule("t", "m", 30, due_ms=3 * 10**9)
    for n in range(12):
        engine.submit("t", [Message(b"x" * 900, 10**9 + n)], 40 + n)
    engine.compact("t")
    found = {at: then(engine, "m", at) for at in (15, 25, 35)}
    assert [one.view.state for one in found.values()] == ["sleep"] * 3
    known = {at: one.view.due_ms for at, one in found.items() if one.due_known}
    assert known == {25: 2 * 10**9, 35: 3 * 10**9}, "the version before the last is told by the last one, an older one by none"
    assert (found[25].view.body, found[35].view.body) == (None, b"x")
    engine.close()


def test_moments_before_kept_journals_are_refused_with_the_first_known(tmp_path: Path) -> None:
    settings = Settings(segment_bytes=4096, history_hours=0.0003, beat_ms=10)
    engine = Engine.open(tmp_path / "data", settings=settings)
    engine.submit("t", [Message(b"", 0, id="kept")], 0)
    engine.move_group("t", "slow", "earliest", 0)
    for n in range(1, 120):
        now = 1_000 * n
        engine.submit("t", [Message(b"x" * 200, due_ms=now, id=f"m{n}")], now)
        engine.tick(now)
        engine.ack("t", "g", engine.reserve("t", "g", 9, now).ids, now + 1)
        for _ in range(3):
            engine.topic("t").maintain()
    with pytest.raises(NotKept) as refused:
        then(engine, "kept", 1_500)
    begin = int(str(refused.value.details["known_from_ms"]))
    assert 10_000 < begin < 119_000, "the journals lost files, and kept some"
    assert f"from {begin} on" in str(refused.value)
    assert states(then(engine, "kept", begin).view) == {"slow": "ready", "g": "history"}
    assert states(then(engine, "m119", 119_000).view) == {"slow": "ready", "g": "reserve"}
    engine.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_walks_are_told_again_as_they_were(tmp_path: Path, seed: int) -> None:
    """All operations, files of 4 KiB, retention: at the end, the past agrees with the views after each step."""
    walk, noted, seen = Walk(tmp_path, seed, spark=False), list[tuple[int, dict[str, MessageView | None]]](), Counter[str]()
    weights = [WEIGHTS.get(name, 1.0) for name in EVENTS]
    for _ in range(45):
        operation = walk.chance.choices(list(EVENTS), weights)[0]
        walk.now += 1  # so that each step has a moment of its own
        walk.reused = set()
        walk.compare(operation, getattr(walk, f"_{operation}")())
        noted.append((walk.now, dict(walk.before.views)))
    for at, views in Random(seed).sample(noted, 25):
        for id_, view in views.items():
            try:
                found = then(walk.engine, id_, at, TOPIC)
            except (NotKept, UnknownMessage) as error:
                seen[type(error).__name__] += 1
                assert walk.retention or view is None
                continue
            assert view is not None, (at, id_, found.view)
            assert (found.view.state, states(found.view)) == (view.state, states(view)), (at, id_)
            if view.state == "sleep" and not view.groups and found.due_known:
                assert found.view.due_ms == view.due_ms
            seen[view.state] += 1
    assert seen["ready"] + seen["history"] > 5
    assert len(seen) > 3
    walk.engine.close()


def test_a_checkpoint_is_decoded_for_a_few_messages(engine: Engine) -> None:
    engine.submit("t", [Message(b"", 0, id=f"m{n}") for n in range(40)], 0)
    engine.tick(0)
    for count in (1, 5, 20):
        engine.reserve("t", "g", count, 1, consumer=f"w{count}")
    engine.ack("t", "g", ["m3", "-m4"], 2, retry_delay_ms=1_000)
    engine.cancel("t", ["m30", "m31"], 3)
    reserve, _ = engine.topic("t").stores.broker.journals
    assert reserve.make_checkpoint is not None
    fields = reserve.make_checkpoint()
    whole, few = checkpoint.decode(fields), checkpoint.decode(fields, {4, 7, 25, 31})
    (mark,), (own,) = whole.groups.values(), few.groups.values()
    assert len(mark.open) == 25
    assert own.open == {at: entry for at, entry in mark.open.items() if at in (4, 7, 25)}
    assert (whole.cancelled, few.cancelled) == ({30, 31}, {31})
    assert (own.cursors, own.moves, few.numbers) == (mark.cursors, mark.moves, whole.numbers)


def test_a_search_for_bytes_finds_whole_documents_in_any_piece(engine: Engine) -> None:
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(b"x", 0, id=f"m{n}") for n in range(3_000)], 0)
    engine.tick(0)
    while ids := engine.reserve("t", "g", 7, 1).ids:
        engine.ack("t", "g", ids, 2)
    history = engine.topic("t").stores.broker.journals[1]
    everything = [raw for _, raw in history.documents_from(0)]
    for part in (b"m1234", b"\0m2\0", b"settle", b"not there"):
        found = [one for one in documents_with(history.files(), 0, history.end, [part]) if one is not None]
        assert [raw for _, raw in found] == [raw for raw in everything if part in raw]
        middle = len(found) // 2
        for position, raw in found[middle : middle + 1]:
            late = [one for one in documents_with(history.files(), position, history.end, [part, b"zz"]) if one is not None]
            assert late == found[middle:]
            assert raw in everything


# Over HTTP, the client and the command line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("past") / "data") as found:
        yield found


def test_the_past_over_http_and_on_the_command_line(server: Server) -> None:
    with Client(server.url) as client:
        client.put("shop", {"n": 1}, id="order-1")
        (message,) = client.fetch("shop", wait=5, consumer="w")
        client.fail("shop", ["order-1"], error="no connection", retry_delay=3600)
        now = client.get("shop", "order-1")
        reserved = next(moment.at_ms for moment in now.timeline if moment.event == "reserved")
        failed = next(moment.at_ms for moment in now.timeline if moment.event == "failed")
        before = client.get("shop", "order-1", at=reserved)
        assert (before.state, before.at_ms, before.due_known, before.body) == (
            "reserve" if failed > reserved else "sleep",
            reserved,
            True,
            {"n": 1},
        )
        with pytest.raises(client_errors.UnknownMessage):
            client.get("shop", "order-1", at=message.created_ms - 1)
        with pytest.raises(client_errors.InvalidArgument, match="future"):
            client.get("shop", "order-1", at=4_000_000_000_000)
        text = Line(server.url)("get", "shop", "order-1", "--at", str(failed))
        assert "no connection" in text
        assert " at 20" in text.splitlines()[0]
    assert server.call("GET", "/v1/topics/shop/messages/order-1?at_ms=x").code == "INVALID_ARGUMENT"
