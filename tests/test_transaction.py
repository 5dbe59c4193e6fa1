"""Transactions: puts, cancels and reschedules of one topic under conditions take effect together, or not at all."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command_line import Line
from tests.harness.doors import Failing
from tests.harness.engine_disk import abandon
from turtlemq.client import AsyncClient, Client, NewMessage, errors
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument, InvalidFireAt, TooLarge
from turtlemq.if_exists import IfExists
from turtlemq.index import versions
from turtlemq.model import Batch, Message
from turtlemq.testing import Turtle
from turtlemq.topic.transaction import OPERATIONS_MAX, Condition, Reschedule, Transaction

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
LATER = 1_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data")
    one.submit("t", [Message(b"old", LATER, id_) for id_ in ("a", "b", "c")], now_ms=0)
    one.submit("t", [Message(b"awake", 1, "r")], now_ms=0)
    one.tick(1)
    yield one
    assert one.check() == []
    one.close()


def puts(*ids: str | None, **more: Any) -> Batch:
    return Batch([b"new"] * len(ids), [LATER] * len(ids), list(ids), **more)


def transact(engine: Engine, given: Transaction, now_ms: int = 1) -> tuple[int, int, int]:
    topic = engine.topic("t")
    out = topic.stage_transaction(given, now_ms)
    topic.commit()
    engine.changed(topic, now_ms)
    return out.put.created.count(True), out.cancelled, out.rescheduled


def states(engine: Engine, *ids: str) -> list[str | None]:
    views = [engine.message("t", id_) for id_ in ids]
    return [None if view is None else view.state for view in views]


def sleepers(engine: Engine) -> dict[str, int]:
    return {message.id: message.due_ms for message in engine.browse("t")[0]}


# The engine


def test_all_operations_take_effect_together(engine: Engine) -> None:
    conditions = [Condition("a", "sleep"), Condition("r", "ready"), Condition("x", "unknown")]
    assert transact(engine, Transaction(puts("x", "y"), ["a"], [Reschedule("b", 50)], conditions)) == (2, 1, 1)
    assert sleepers(engine) == {"b": 50, "c": LATER, "x": LATER, "y": LATER}
    assert states(engine, "a") == ["cancelled"]
    stats = engine.stats("t")
    assert (stats.sleep, stats.cancelled) == (4, 1)
    engine.tick(50)
    assert engine.reserve("t", "g", 9, 50).ids == ["r", "b"]


def test_it_is_one_batch_of_the_log(engine: Engine) -> None:
    topic = engine.topic("t")
    topic.stage_transaction(Transaction(puts("x"), ["a", "b"], [Reschedule("c", 50)]), 1)
    group = topic.pending_commit
    assert group is not None
    assert (len(group.batches), len(group.batches[0].columns.bodies)) == (1, 4)
    topic.commit()


@pytest.mark.parametrize(
    ("given", "details"),
    [
        (
            Transaction(puts("x"), conditions=[Condition("a", "sleep"), Condition("b", "ready")]),
            {"condition": 1, "state": "sleep"},
        ),
        (Transaction(puts("x"), conditions=[Condition("z", "sleep")]), {"condition": 0, "state": "unknown"}),
        (Transaction(puts("x"), conditions=[Condition("r", "unknown")]), {"condition": 0, "state": "ready"}),
        (Transaction(puts("x"), ["a", "r"]), {"operation": "cancel", "index": 1, "state": "ready"}),
        (Transaction(puts("x"), ["a"], [Reschedule("z", 5)]), {"operation": "reschedule", "index": 0, "state": "unknown"}),
        (Transaction(puts("x", "b", if_exists=int(IfExists.ERROR)), ["a"]), {"index": 1, "state": "sleep"}),
    ],
)
def test_a_conflict_says_what_and_nothing_is_done(engine: Engine, given: Transaction, details: dict[str, Any]) -> None:
    before = sleepers(engine)
    with pytest.raises(Conflict) as refused:
        transact(engine, given)
    assert refused.value.details == details
    assert sleepers(engine) == before
    assert engine.topic("t").pending_commit is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (Transaction(puts("a"), ["a"]), InvalidArgument),
        (Transaction(cancel=["a", "a"]), InvalidArgument),
        (Transaction(cancel=["a"], reschedule=[Reschedule("a", 5)]), InvalidArgument),
        (Transaction(cancel=[f"m{i}" for i in range(OPERATIONS_MAX + 1)]), TooLarge),
        (Transaction(reschedule=[Reschedule("a", -1)]), InvalidArgument),
    ],
)
def test_a_transaction_that_is_none_is_refused(engine: Engine, given: Transaction, error: type[Exception]) -> None:
    with pytest.raises(error):
        transact(engine, given)
    assert states(engine, "a") == ["sleep"]


def test_conditions_alone_change_nothing(engine: Engine) -> None:
    assert transact(engine, Transaction(conditions=[Condition("a", "sleep")])) == (0, 0, 0)
    assert engine.topic("t").pending_commit is None


def test_puts_replace_and_count_duplicates_as_ever(engine: Engine) -> None:
    topic = engine.topic("t")
    out = topic.stage_transaction(Transaction(puts("a", "r", "x", if_exists=[0, int(IfExists.REPLACE), 0]), ["b"]), 1)
    topic.commit()
    assert (out.put.duplicates, out.put.replaced, out.put.created) == (1, [1], [False, False, True])
    assert states(engine, "a", "b", "r", "x") == ["sleep", "cancelled", "sleep", "sleep"]
    assert engine.reserve("t", "g", 9, 1).ids == []


def test_conditions_see_what_earlier_requests_have_staged(engine: Engine) -> None:
    topic = engine.topic("t")
    engine.stage("t", puts("x"), 1)
    engine.stage_cancel("t", ["a"], 1)
    topic.stage_transaction(Transaction(puts("y"), ["x"], conditions=[Condition("x", "sleep"), Condition("a", "cancelled")]), 1)
    with pytest.raises(Conflict):
        topic.stage_transaction(Transaction(cancel=["x"]), 1)
    topic.commit()
    assert states(engine, "a", "x", "y") == ["cancelled", "cancelled", "sleep"]


def test_puts_without_modes_are_those_of_a_batch(engine: Engine) -> None:
    topic = engine.topic("t")
    engine.stage("t", puts("s"), 1)  # with the same commit
    engine.stage_cancel("t", ["c"], 1)
    out = topic.stage_transaction(Transaction(puts("a", "r", "s", "x", "c", None), ["b"]), 1).put
    again = topic.stage_transaction(Transaction(puts("x", "y")), 1).put
    topic.commit()
    assert (out.created, again.created) == ([False, False, False, True, True, True], [False, True])
    assert states(engine, "a", "b", "c", out.ids[-1], "r", "s", "x", "y") == [
        *("sleep", "cancelled", "sleep", "sleep", "ready", "sleep", "sleep", "sleep")
    ]


def test_the_server_gives_ids(engine: Engine) -> None:
    out = engine.topic("t").stage_transaction(Transaction(Batch([b"1", b"2"], [LATER] * 2), ["a"], [Reschedule("b", 50)]), 1)
    engine.topic("t").commit()
    assert sleepers(engine) == {"b": 50, "c": LATER, **dict.fromkeys(out.put.ids, LATER)}
    assert transact(engine, Transaction(cancel=out.put.ids)) == (0, 2, 0)


FIELDS: dict[str, Any] = {"ttr_ms": 7_000, "priority": 1, "json": True, "headers": {"h": "é"}, "expires_ms": 10 * LATER}


@pytest.mark.parametrize("count", [2, 70])
def test_it_does_what_requests_for_each_operation_do(tmp_path: Path, count: int) -> None:
    """By loops and by arrays; some messages have optional fields, some were moved before."""
    shown = []
    for way in ("together", "one by one"):
        engine = Engine.open(tmp_path / way)
        old = [Message(b"%d" % i, LATER, f"{kind}{i}", **(FIELDS if i % 2 else {})) for kind in "cm" for i in range(count)]
        engine.submit("t", [*old, Message(b"awake", 1, "r")], 1)
        engine.tick(1)
        for i in range(0, count, 3):
            engine.reschedule("t", f"m{i}", 2, due_ms=LATER + 1)
            engine.reschedule("t", f"c{i}", 2, due_ms=LATER + 1)
        topic, ended, new = engine.topic("t"), [f"c{i}" for i in range(count)], puts(*(f"p{i}" for i in range(count)))
        moves = [Reschedule(f"m{i}", 2 * LATER + i) for i in range(count)]
        if way == "together":
            assert transact(engine, Transaction(new, ended, moves), 3) == (count, count, count)
        else:
            engine.submit("t", new, 3)
            assert set(engine.cancel("t", ended, 3).values()) == {"cancelled"}
            for move in moves:
                topic.stage_reschedule(move.id, 3, due_ms=move.due_ms)
            topic.commit()
        abandon(engine)
        engine = Engine.open(tmp_path / way)
        stored = [engine.get("t", f"{kind}{i}") for kind in "pm" for i in range(count)]
        shown.append([replace(one, seq=0) for one in stored if one is not None])
        assert states(engine, *ended) == ["cancelled"] * count
        assert engine.check() == []
        abandon(engine)
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2 * count


def test_sleepers_are_found_and_read_together(tmp_path: Path) -> None:
    """A transaction asks the disk as often with many operations as with few."""
    calls = []
    for count in (30, 300):
        engine = Engine.open(tmp_path / str(count), door=(door := Failing()))
        engine.submit("t", [Message(b"x" * 5_000, LATER, f"{kind}{i}") for i in range(count) for kind in "cm"], 0)
        engine.submit("t", [Message(b"awake", 1, "r")], 0)
        engine.tick(1)
        begin, names = len(door.calls), range(count)
        given = Transaction(puts(*(f"p{i}" for i in names)), [f"c{i}" for i in names], [Reschedule(f"m{i}", 50) for i in names])
        engine.topic("t").stage_transaction(given, 1)
        calls.append(len(door.calls) - begin)
        engine.topic("t").commit()
        abandon(engine)
    assert calls[0] == calls[1]


def test_moved_bodies_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KEPT_BYTES_MAX", 5)
    with pytest.raises(TooLarge, match="message 1: a batch reschedules at most 5 bytes"):
        transact(engine, Transaction(puts("x"), reschedule=[Reschedule(id_, 50) for id_ in "abc"]))
    assert sleepers(engine) == dict.fromkeys("abc", LATER)
    monkeypatch.setattr(versions, "KEPT_BYTES_MAX", 2)
    assert transact(engine, Transaction(reschedule=[Reschedule("a", 50)])) == (0, 0, 1)


def test_a_message_that_would_expire_is_not_moved(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"", 10, "a", expires_ms=20)], 0)
    with pytest.raises(InvalidFireAt, match="could only die"):
        transact(engine, Transaction(puts("x"), reschedule=[Reschedule("a", 30)]))
    assert sleepers(engine) == {"a": 10}
    engine.close()


def test_a_torn_write_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"old", LATER, id_) for id_ in ("a", "b", "c", "d")], now_ms=0)
    topic = engine.topic("t")
    topic.stage_transaction(Transaction(puts("x", "y"), ["a", "b"], [Reschedule("c", 70), Reschedule("d", 80)]), 1)
    group = topic.pending_commit
    assert group is not None
    starts, end, path = list(group.batches[0].starts), group.batches[0].end, group.path
    topic.commit()
    abandon(engine)
    whole, before = path.read_bytes(), {"a": LATER, "b": LATER, "c": LATER, "d": LATER}
    assert len(starts) == 6
    for cut in sorted({at + step for at in (*starts, end) for step in (-1, 0, 1)} - {end + 1}):
        path.write_bytes(whole[: max(cut, starts[0])])
        again = Engine.open(tmp_path / "data")
        assert sleepers(again) == ({"c": 70, "d": 80, "x": LATER, "y": LATER} if cut == end else before), cut
        abandon(again)


def test_it_survives_a_restart_as_a_whole(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"old", LATER, id_) for id_ in ("a", "b")], now_ms=0)
    transact(engine, Transaction(puts("x"), ["a"], [Reschedule("b", 70)]))
    engine.close()
    engine = Engine.open(tmp_path / "data")
    assert sleepers(engine) == {"b": 70, "x": LATER}
    assert states(engine, "a") == ["cancelled"]
    engine.close()


# Over HTTP


@pytest.fixture(scope="module")
def turtle() -> Iterator[Turtle]:
    with Turtle() as one:
        yield one


@pytest.fixture
def client(turtle: Turtle) -> Client:
    for topic in turtle.client.topics():
        turtle.client.drop_topic(topic.topic)
    return turtle.client


def test_the_client_moves_a_timer_and_says_why_not(client: Client) -> None:
    client.put("t", b"remind", id="reminder", delay=3600)
    done = client.transaction(
        "t", [NewMessage(body={"paid": 17}, id="paid"), b"log"], cancel=["reminder"], conditions={"reminder": "sleep"}
    )
    assert (done.ids[0], len(done.ids), done.cancelled, done.rescheduled, done.duplicates) == ("paid", 2, 1, 0, [])
    with pytest.raises(errors.Conflict) as refused:
        client.transaction("t", [b"never"], conditions={"paid": "ready", "reminder": "sleep"})
    assert (refused.value.details["condition"], refused.value.state) == (1, "cancelled")
    assert client.stats("t").ready == 2


def test_reschedules_take_times_and_delays(turtle: Turtle, client: Client) -> None:
    client.put_many("t", [NewMessage(body=b"", id=id_, delay=60) for id_ in "abc"])
    at = turtle.now + timedelta(days=1)
    moves = {"a": at, "b": timedelta(hours=1), "c": 7}
    assert client.transaction("t", reschedule=moves).rescheduled == 3  # type: ignore[arg-type]
    due = {message.id: message.due_ms - turtle.now_ms for message in client.browse("t")}
    assert due == {"a": 86_400_000, "b": pytest.approx(3_600_000, abs=5_000), "c": pytest.approx(7_000, abs=5_000)}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"cancel": ["a/b"]}, "INVALID_ID"),
        ({"put": [{"id": "a"}]}, "INVALID_MESSAGE"),
        ({"reschedule": [{"id": "a"}]}, "INVALID_ARGUMENT"),
        ({"reschedule": [{"id": "a", "due_ms": 5}]}, "INVALID_FIRE_AT"),
        ({"if": [{"id": "a", "state": "asleep"}]}, "INVALID_ARGUMENT"),
        ({"topics": ["u"]}, "INVALID_ARGUMENT"),
        ({"put": [{"body": 1, "headers": {"a": "x" * 40_000}}]}, "TOO_LARGE"),
        ({"put": [{"body": 1, "delay": 60, "expires_ms": 1}]}, "INVALID_MESSAGE"),
        ({"cancel": ["a"]}, "CONFLICT"),
        ({"put": [{"body": 1}], "if": [{"id": "a", "state": "sleep"}]}, "CONFLICT"),
    ],
)
def test_a_refusal_creates_no_topic(turtle: Turtle, client: Client, body: dict[str, Any], code: str) -> None:
    request = urllib.request.Request(
        f"{turtle.url}/v1/topics/new/transaction", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert json.loads(refused.value.read())["error"]["code"] == code
    refused.value.close()
    assert client.topics() == []


def test_one_that_puts_nothing_creates_no_topic(client: Client) -> None:
    for conditions in ({}, {"a": "unknown"}):
        done = client.transaction("new", conditions=conditions)
        assert (done.ids, done.cancelled, done.rescheduled) == ([], 0, 0)
    assert client.topics() == []


@pytest.mark.parametrize(
    "body",
    [
        {"topic": "u", "cancel": ["a"]},
        {"put": [{"topic": "u", "body": 1}]},
        {"reschedule": [{"topic": "u", "id": "a", "delay": 1}]},
        {"put": [{"body": 1}], "if": [{"topic": "u", "id": "a", "state": "sleep"}]},
    ],
)
def test_operations_on_other_topics_are_refused_with_the_reason(turtle: Turtle, client: Client, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{turtle.url}/v1/topics/t/transaction", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    error = json.loads(refused.value.read())["error"]
    refused.value.close()
    assert error["code"] == "INVALID_ARGUMENT"
    assert "files of two topics cannot change in one write" in error["message"]
    assert "send a request for each topic" in error["message"]
    assert client.topics() == []


def test_the_async_client_does_the_same(turtle: Turtle, client: Client) -> None:
    async def story() -> int:
        async with AsyncClient(turtle.url) as other:
            await other.transaction("t", [NewMessage(body=b"", id="a", delay=60)], conditions={"a": "unknown"})
            return (await other.transaction("t", cancel=["a"])).cancelled

    assert asyncio.run(story()) == 1


def test_metrics_tell_transactions_their_conflicts_and_messages(turtle: Turtle, client: Client) -> None:
    def figures() -> list[float]:
        with urllib.request.urlopen(f"{turtle.url}/metrics") as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        names = (
            'transactions_total{outcome="done"}',
            'transactions_total{outcome="conflict"}',
            'batch_messages_sum{kind="produce"}',
        )
        return [float(lines[f"turtlemq_{name}"]) for name in names]

    before = figures()
    client.transaction("t", [NewMessage(body=b"", id="a", delay=60), b"more"])
    for topic in ("t", "new"):
        with pytest.raises(errors.Conflict):
            client.transaction(topic, [b"never"], conditions={"b": "sleep"})
    client.transaction("t", cancel=["a"])
    assert [now - then for now, then in zip(figures(), before, strict=True)] == [2, 2, 2]


def test_the_command_line_takes_a_file(turtle: Turtle, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "operations.json"
    file.write_text(json.dumps({"put": [{"id": "b", "body": 1, "delay": "3d"}], "if": [{"id": "b", "state": "unknown"}]}))
    line = Line(turtle.url)
    assert line("transaction", "t", str(file)) == "1 created, 0 duplicates, 0 cancelled, 0 rescheduled\n"
    assert "in state sleep, not unknown" in line("transaction", "t", str(file), code=1)
    (answer,) = [json.loads(line("transaction", "t", "-", "--json", given='{"cancel": ["b"]}'))]
    assert answer["cancelled"] == 1
