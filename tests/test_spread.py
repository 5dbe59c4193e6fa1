"""Spread: messages that are due at one time come due evenly over the time behind it, never early, an id always at its place."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bson
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.command_line import Line
from turtlemq.client import Client, NewMessage
from turtlemq.client.errors import ClientError, InvalidMessage
from turtlemq.engine import Engine
from turtlemq.errors import InvalidMessage as Refused
from turtlemq.if_exists import IfExists
from turtlemq.model import DUE_MS_MAX, SPREAD_MS_MAX, Batch
from turtlemq.testing import Turtle
from turtlemq.topic.spread import Spreader, what_if

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
AT_MS, WIDTH_MS = 1_000_000, 600_000


def spread(ids: list[str | None], width_ms: int = WIDTH_MS, **more: list[int | None]) -> list[int]:
    batch = Batch(bodies=[b""] * len(ids), due_ms=[AT_MS] * len(ids), ids=ids, **more)  # type: ignore[arg-type]
    return [int(at) - AT_MS for at in Spreader().spread(batch, width_ms).due_ms]


# Places


@pytest.mark.parametrize("own", [True, False], ids=["own ids", "ids of the server"])
def test_places_are_even_and_inside(own: bool) -> None:
    found = spread([f"order-{i}" if own else None for i in range(10_000)])
    assert 0 <= min(found) < 500
    assert WIDTH_MS - 500 < max(found) <= WIDTH_MS
    tenths, _ = np.histogram(found, 10, (0, WIDTH_MS))
    assert tenths.min() > 900
    assert tenths.max() < 1_100


def test_an_id_has_the_same_place_everywhere() -> None:
    ids: list[str | None] = ["a", None, "b", "order-17"]
    first = spread(ids)
    assert [spread([id_])[0] for id_ in ids if id_] == [first[0], first[2], first[3]]
    assert first[3] == 82_735, "a constant: other programs, and other versions of this one, find the same place"


def test_messages_without_an_id_fill_each_part_of_the_time() -> None:
    spreader, found = Spreader(), list[int]()
    for _ in range(100):  # one put each
        out = spreader.spread(Batch(bodies=[b""], due_ms=[AT_MS]), WIDTH_MS)
        found.append(int(out.due_ms[0]) - AT_MS)
    assert np.histogram(found, 10, (0, WIDTH_MS))[0].tolist() == pytest.approx([10] * 10, abs=2)


def test_a_message_says_its_own_spread() -> None:
    assert spread(["a", "a", "a"], 0, spread_ms=[0, 1_000, None])[::2] == [0, 0]
    assert 0 < spread(["a"], WIDTH_MS, spread_ms=[1_000])[0] <= 1_000
    assert spread(["a"], WIDTH_MS, spread_ms=[None]) == spread(["a"])


def test_nothing_is_due_behind_the_last_time() -> None:
    batch = Batch(bodies=[b""] * 9, due_ms=[DUE_MS_MAX - 5] * 9, ids=[str(i) for i in range(9)])
    assert max(int(at) for at in Spreader().spread(batch, SPREAD_MS_MAX).due_ms) == DUE_MS_MAX


def test_a_batch_that_is_not_spread_stays_as_it_is() -> None:
    batch = Batch(bodies=[b""], due_ms=[AT_MS])
    assert Spreader().spread(batch, 0) is batch


# The engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data")
    one.configure("t", spread_ms=WIDTH_MS)
    yield one
    one.close()


def put(engine: Engine, ids: list[str | None], if_exists: list[int] | None = None, **more: object) -> None:
    columns = {"due_ms": [AT_MS] * len(ids), **more}
    engine.submit("t", Batch(bodies=[b"x"] * len(ids), ids=ids, if_exists=if_exists, **columns), now_ms=0)  # type: ignore[arg-type]


def due(engine: Engine) -> dict[str, int]:
    return {message.id: message.due_ms for message in engine.browse("t")[0]}


def test_messages_come_due_at_their_places_and_not_before(engine: Engine) -> None:
    put(engine, [f"m{i}" for i in range(50)])
    places = due(engine)
    assert all(AT_MS <= at <= AT_MS + WIDTH_MS for at in places.values())
    for at in sorted(places.values()):
        engine.tick(at - 1)
        assert engine.stats("t").ready == sum(one < at for one in places.values())
    engine.tick(AT_MS + WIDTH_MS)
    assert engine.stats("t").ready == 50


def test_a_timer_that_starts_again_keeps_its_place(engine: Engine) -> None:
    put(engine, ["a", "b"])
    before = due(engine)
    put(engine, ["a", "b"], [int(IfExists.REPLACE), int(IfExists.RESCHEDULE)], due_ms=[AT_MS + 5, AT_MS + 7])
    assert due(engine) == {"a": before["a"] + 5, "b": before["b"] + 7}


def test_a_message_that_would_expire_before_its_place_is_refused(engine: Engine) -> None:
    with pytest.raises(Refused, match="could only die"):
        put(engine, [f"m{i}" for i in range(9)], expires_ms=[AT_MS + 1] * 9)
    assert due(engine) == {}


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


def stored(client: Client) -> dict[str, int]:
    return {message.id: message.due_ms for message in client.browse("t", limit=10_000)}


@pytest.mark.parametrize("count", [1, 3, 6_000])
@pytest.mark.parametrize("kind", ["json", "bson"])
def test_every_way_in_spreads_the_same_id_to_the_same_place(turtle: Turtle, client: Client, kind: str, count: int) -> None:
    body: object = b"x" if kind == "bson" else {"x": 1}
    given = [NewMessage(body=body, id=f"m{i}", due=turtle.now_ms + AT_MS, spread=600) for i in range(count)]
    client.put_many("t", given, together=True)
    places = spread([message.id for message in given])
    assert stored(client) == {f"m{i}": turtle.now_ms + AT_MS + place for i, place in enumerate(places)}


def test_single_puts_at_once_keep_their_spreads(turtle: Turtle, client: Client) -> None:
    client.configure("t")
    at, ids = turtle.now_ms + AT_MS, [f"m{i}" for i in range(40)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda id_: client.put("t", b"x", id=id_, due=at, spread=600), ids))
    assert stored(client) == {id_: at + place for id_, place in zip(ids, spread([*ids]), strict=True)}


def test_the_setting_of_a_topic_is_the_default(turtle: Turtle, client: Client) -> None:
    client.configure("t", spread=600)
    assert client.topic("t").settings["spread"] == 600
    client.put("t", b"x", id="a", due=turtle.now_ms + AT_MS)
    client.put("t", b"x", id="b", due=turtle.now_ms + AT_MS, spread=0)
    assert stored(client) == {"a": turtle.now_ms + AT_MS + spread(["a"])[0], "b": turtle.now_ms + AT_MS}


@pytest.mark.parametrize("wrong", [-1, 31 * 86_400 + 1, "soon", []])
def test_a_spread_that_is_none_is_refused_with_its_index(turtle: Turtle, client: Client, wrong: object) -> None:
    bad: dict[str, object] = {"body": 1, "spread": wrong}
    for kind, data in (
        ("application/json", json.dumps({"messages": [{"body": 1}, bad]}).encode()),
        ("application/bson", bson.encode({"body": 1}) + bson.encode(bad)),
    ):
        request = urllib.request.Request(f"{turtle.url}/v1/topics/t/messages", data, {"Content-Type": kind})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        error = json.loads(refused.value.read())["error"]
        refused.value.close()
        assert (error["code"], error["index"]) == ("INVALID_MESSAGE", 1), error
        assert "spread is a number of seconds" in error["message"]


def test_the_client_refuses_what_is_no_spread(client: Client) -> None:
    for wrong in (-1, float("nan"), "600"):
        with pytest.raises(InvalidMessage, match="spread"):
            client.put("t", b"x", spread=wrong)  # type: ignore[arg-type]
    with pytest.raises(ClientError):
        client.configure("t", spread=-1)


# What if


def test_a_forecast_shows_a_herd_before_and_after(turtle: Turtle, client: Client) -> None:
    client.put_many("t", [NewMessage(body=b"x", due=turtle.now_ms + 120_000) for _ in range(600)])
    found = client.forecast("t", bucket=60, hours=0.2, what_if_spread=180)
    assert found.counts == [0, 0, 600, *[0] * 9]
    assert found.what_if is not None
    assert (found.what_if.counts, found.what_if.beyond) == ([0, 0, 200, 200, 200, *[0] * 7], 0)
    assert client.forecast("t", bucket=60, hours=0.2).what_if is None
    drawn = Line(turtle.url)("forecast", "t", "--hours", "0.2", "--bucket", "60", "--what-if-spread", "3m")
    assert "at most 200 in one line, instead of 600" in drawn
    assert drawn.count("  200  ") == 3


def test_the_command_line_puts_with_a_spread(turtle: Turtle, client: Client) -> None:
    Line(turtle.url)("put", "t", "1", "--id", "a", "--due", str(turtle.now_ms + AT_MS), "--spread", "10m")
    assert stored(client) == {"a": turtle.now_ms + AT_MS + spread(["a"])[0]}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=50), st.integers(1, 10**6), st.integers(0, 10**7))
def test_no_message_is_lost_or_moved_forward_in_a_forecast(counts: list[int], bucket_ms: int, width_ms: int) -> None:
    after, beyond = what_if(counts, bucket_ms, width_ms)
    assert sum(after) + beyond == sum(counts)
    assert len(after) == len(counts)
    assert min(after) >= 0
    assert all(late <= early for late, early in zip(np.cumsum(after), np.cumsum(counts), strict=True))
