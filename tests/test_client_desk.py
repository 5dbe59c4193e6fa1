"""The desk of consumers: high priority first, a length that fits the handlers, room for urgent messages; budgets of handlers,
cancelled messages, and tokens that call off calls and consumers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.client_world import ASK, GOOD, World
from tests.harness.server_process import Server, running
from turtlemq.client import AsyncClient, AsyncConsumer, CancelToken, Client, Consumer, Message, errors, sending, topic_calls
from turtlemq.client.consumer_flows import fetch, limit
from turtlemq.client.consumer_state import FULL_WAIT_S, ConsumerOptions, ConsumerState
from turtlemq.client.desk import AHEAD_MAX, Desk, desk_size, low_most
from turtlemq.client.time_limit import NO_LIMIT
from turtlemq.client.wire import Answer, Request
from turtlemq.engine import Engine
from turtlemq.model import Message as EngineMessage
from turtlemq.model import Priority

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
Levels = st.lists(st.sampled_from(["high", "normal", "low", "unknown"]), max_size=60)


# Rules


@steady
@given(Levels)
def test_a_desk_hands_out_high_first_and_each_level_in_order(levels: list[str]) -> None:
    desk = Desk[tuple[int, str]]()
    for n, level in enumerate(levels):
        desk.add((n, level), level)
    assert len(desk) == len(levels)
    assert [desk.count(level) for level in ("high", "low")] == [levels.count(level) for level in ("high", "low")]
    order = {"high": 0, "unknown": 1, "normal": 1, "low": 2}
    expected = sorted(enumerate(levels), key=lambda item: (order[item[1]], item[0]))
    assert [desk.take() for _ in levels] == expected


@steady
@given(st.integers(1, 64), st.floats(0, 100))
def test_a_desk_holds_a_tenth_of_a_second_of_work(handlers: int, mean_s: float) -> None:
    size = desk_size(handlers, mean_s)
    assert handlers <= size <= AHEAD_MAX * handlers
    assert size == handlers or (size - 1) * mean_s / handlers <= 0.1
    assert min(size, handlers) <= low_most(size, handlers) <= size
    assert low_most(size, handlers) == size or low_most(size, handlers) >= size * 3 // 4


def state(now: list[float], **options: Any) -> ConsumerState:
    return ConsumerState(ConsumerOptions("t", **{"ttr": 10.0, "concurrency": 4, **options}), lambda: now[0])


def message(id_: str, priority: str = "normal", **more: Any) -> Message:
    return Message(id=id_, lease="L", priority=priority, **{"lease_until_ms": 10_000, **more})


def test_the_length_follows_the_handling_time() -> None:
    now = [0.0]
    one = state(now)
    assert one.fetch_count() == 4
    one.add_fetched([message(str(n)) for n in range(4)], 0.0)
    job = one.next_job(0.0)
    one.finished(job, {}, 0.01)
    assert (one.prefetch, one.fetch_count()) == (40, 37)
    for _ in range(3):
        one.finished(one.next_job(0.01), {}, 5.01)
    assert one.prefetch == 4, "slow handlers: no message waits for them here"


def test_low_priority_leaves_room_for_others() -> None:
    one = state([0.0], prefetch=40)
    assert one.fetch_low() is None, "a topic without priorities is asked as ever"
    one.add_fetched([message(str(n), "low") for n in range(25)], 0.0)
    for _ in range(5):
        one.next_job(0.0)
    assert one.fetch_low() == 5, "those that are being handled count"
    one.add_fetched([message("urgent", "high")], 0.0)
    assert one.next_job(0.0)[0].message.id == "urgent"


def test_the_quarter_that_is_not_for_low_is_fetched_for_early() -> None:
    one = state([0.0], prefetch=40)
    one.add_fetched([message(str(n), "low") for n in range(30)], 0.0)
    for _ in range(4):
        one.next_job(0.0)
    assert (one.fetch_count(), one.fetch_low(), one.full_wait_s()) == (10, 0, FULL_WAIT_S), "26 of 40 are not begun"
    one.finished(one.next_job(0.0), {}, 0.02)
    assert one.full_wait_s() == pytest.approx(5 * 0.02 / 4), "then half of them are begun"
    one.add_fetched([message("urgent", "high")], 0.0)
    assert one.fetch_count() == 10
    assert one.full_wait_s() == pytest.approx(6 * 0.02 / 4)
    one.add_fetched([message(f"n{n}") for n in range(5)], 0.0)
    assert one.fetch_count() == 0, "fetches stay large"
    while one.next_job(0.0)[0].message.id != "9":
        pass
    assert (one.fetch_low(), one.full_wait_s()) == (1, FULL_WAIT_S), "29 are in hand"
    plain = state([0.0], prefetch=40)
    plain.add_fetched([message(str(n)) for n in range(30)], 0.0)
    assert plain.fetch_count() == 0, "a topic without low priority is asked as ever"


def test_a_fetch_without_room_for_low_is_short() -> None:
    world = World(lambda _: GOOD)
    waits = []
    for low in (None, 3, 0):
        flow = fetch(ConsumerOptions("t"), 5, world.rules, low)
        step = next(flow)
        assert isinstance(step, sending.Send)
        waits.append((step.request.wait_s, b'"low"' in (step.request.body or b"")))
        flow.close()
    assert waits == [(20, False), (20, True), (FULL_WAIT_S, True)]


def test_a_budget_is_what_expiry_and_lease_leave() -> None:
    now = [100.0]
    one = state(now)
    one.add_fetched([message("a"), message("b", expires_ms=4_000), message("c", expires_ms=60_000)], 100.0)
    a, b, c = (one.next_job(100.0)[0] for _ in range(3))
    now[0] = 101.0
    budgets = [item.message.budget() for item in (a, b, c)]
    assert budgets == [8, 3, 8], "a tenth of the lease is not relied on; b expires 6 s before its lease of 10 s ends"
    assert [item.limit_s() for item in (a, b, c)] == [NO_LIMIT, 104, 160], "the lease of a handler that runs is extended"
    now[0] = 105.0
    assert b.message.budget() == 0
    assert message("x").budget() == NO_LIMIT


def test_calls_of_a_handler_end_with_its_budget() -> None:
    world = World(lambda _: Answer(200, {}, b'{"topics":[]}'))
    now = [world.now]
    one = ConsumerState(ConsumerOptions("t", ttr=10.0), lambda: world.now)
    one.add_fetched([message("a", expires_ms=2_000)], now[0])
    job = one.next_job(now[0])
    with limit(job):
        world.play(sending.run_call(topic_calls.topics(), world.rules))
    assert world.sent[0].budget_ms == 1_400, "0.7 of two seconds"
    one.extended(["a"], ["a"], now[0])
    with limit(job), pytest.raises(errors.TimedOut):
        world.play(sending.run_call(topic_calls.topics(), world.rules))
    one.finished(job, {}, now[0])
    with limit(job):
        assert world.play(sending.run_call(topic_calls.topics(), world.rules)) == [], "tasks that outlive their handler"


def test_a_handler_sees_that_its_message_is_lost() -> None:
    now = [100.0]
    desk = state(now)
    desk.add_fetched([message("a"), message("b"), message("c")], 100.0)
    a, b, c = (desk.next_job(100.0)[0].message for _ in range(3))
    assert [one.cancelled for one in (a, b, c)] == [False] * 3
    desk.extended(["a", "b", "c"], ["a"], 105.0)
    assert [one.cancelled for one in (a, b)] == [True, False]
    desk.add_fetched([message("a", attempt=2)], 105.0)
    assert [one.cancelled for one in (a, b)] == [False] * 2, "it came back to the consumer that handles it"
    now[0] = 116.0
    assert b.cancelled, "its lease has ended"
    now[0] = 105.0
    desk.give_back(105.0)
    assert c.cancelled, "the consumer waits no longer"


# The engine


def test_the_last_quarter_in_flight_is_not_for_low(tmp_path: Path) -> None:
    engine, now = Engine.open(tmp_path / "data"), 1_790_000_000_000
    engine.configure("t", max_in_flight=8)
    engine.submit("t", [EngineMessage(b"x", due_ms=now, priority=Priority.LOW) for _ in range(20)], now)
    engine.tick(now)
    low = engine.reserve("t", "g", 20, now_ms=now)
    assert len(low) == 6
    assert len(engine.reserve("t", "g", 20, now_ms=now)) == 0
    engine.submit("t", [EngineMessage(b"x", due_ms=now, priority=Priority.HIGH) for _ in range(20)], now)
    engine.tick(now)
    assert len(engine.reserve("t", "g", 20, now_ms=now)) == 2
    engine.ack("t", "g", low.ids[:4], now_ms=now)
    found = engine.reserve("t", "g", 20, now_ms=now)
    assert len(found) == 4
    engine.close()


# A real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


@pytest.mark.parametrize("wire", ["json", "bson"])
def test_consumers_get_expiries_and_a_limit_on_low(client: Client, wire: Any) -> None:
    topic = f"expiries-{wire}"
    client.put(topic, b"1", id="a", expires=4_000_000_000_000)
    client.put_many(topic, [b"2", b"3"])
    found = client.fetch(topic, wait=5, wire=wire)
    assert [message.expires_ms for message in found] == [4_000_000_000_000, None, None]
    for n in range(6):
        client.put(topic, b"x", id=f"low{n}", priority="low")
    client.put(topic, b"x", id="high", priority="high")
    assert sorted(message.id for message in client.fetch(topic, wait=5, wire=wire, low=2)) == ["high", "low0", "low1"]
    assert client.fetch(topic, low=0) == []


def test_urgent_messages_overtake_those_in_hand(client: Client) -> None:
    client.put_many("desk", [b"x"] * 40)
    for n in range(3):
        client.put("desk", b"x", id=f"high{n}", priority="high")
    order: list[str] = []
    done = threading.Event()

    def handle(message: Message) -> None:
        order.append(message.priority)
        if len(order) == 43:
            done.set()

    with Consumer("desk", handle, client, concurrency=1, prefetch=50):
        assert done.wait(60)
    assert order.index("high") < 3
    assert order[order.index("high") :][:3] == ["high"] * 3


def test_a_token_calls_off_a_long_poll(client: Client) -> None:
    token, met, begun = CancelToken(), list[BaseException](), threading.Event()

    def wait() -> None:
        with token:
            begun.set()
            try:
                client.fetch("nothing", wait=60)
            except errors.Cancelled as error:
                met.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    while client.topics() and not waits(client):
        time.sleep(0.01)
    token.cancel()
    thread.join(30)
    assert len(met) == 1
    assert client.topics(), "other calls go on"
    with pytest.raises(errors.Cancelled), token:
        client.topics()


def waits(client: Client) -> bool:
    """Whether the server has a long poll."""
    answer = client.pool.send(sending.Send(Request("GET", "/v1/status"), 30, None))
    return b'"long_polls":1' in answer.body


def test_a_token_interrupts_pauses_between_tries() -> None:
    token = CancelToken()
    with Client("http://127.0.0.1:9", timeout=600) as client:
        timer = threading.Timer(0.3, token.cancel)
        timer.start()
        flow = sending.send_with_retries(lambda _: ASK, client.options.policy, sending.FOREVER, patient=True)
        with pytest.raises(errors.Cancelled), token:
            client.run(flow)
        assert token.cancelled
        timer.join()


def test_a_token_stops_consumers_of_both_kinds(server: Server) -> None:
    token = CancelToken()
    consumer = Consumer("stops", print, url=server.url, cancel=token)
    thread = threading.Thread(target=consumer.run)
    thread.start()

    async def story() -> None:
        async def handle(message: Message) -> None:
            raise AssertionError(message)

        async with AsyncClient(server.url) as client:
            other = AsyncConsumer("stops", handle, client, cancel=token)
            threading.Timer(0.2, token.cancel).start()
            await other.run()

    asyncio.run(story())
    thread.join(60)
    assert not thread.is_alive()
