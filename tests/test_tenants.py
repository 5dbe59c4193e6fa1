"""Tenants: fair queues and limits with any history; and over HTTP, a noisy tenant beside a quiet one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.server_process import Server, running
from turtlemq.broker.results import Reserved
from turtlemq.engine import Engine
from turtlemq.fair_queue import FairQueue
from turtlemq.model import Message
from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.fair_turns import LARGE_PIECE_BYTES, TenantTurns
from turtlemq.server.fetches import Fetches
from turtlemq.server.long_polls import FetchRequest, LongPoll
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.tenants import Tenant, Tenants, may_hold

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=100, database=None)
OWNERS = "abcd"
Weights = st.fixed_dictionaries({owner: st.floats(0.1, 20) for owner in OWNERS})
Costs = st.integers(0, 50)


# Fair queues


@steady
@given(Weights, st.lists(st.one_of(st.tuples(st.sampled_from(OWNERS), Costs), st.none()), max_size=200))
def test_every_item_leaves_once_and_in_the_order_of_its_owner(
    weights: dict[str, float], steps: list[tuple[str, int] | None]
) -> None:
    queue, waiting = FairQueue[tuple[str, int]](weights.__getitem__, 10), {owner: list[int]() for owner in OWNERS}
    for n, step in enumerate([*steps, *[None] * len(steps)]):
        if step is not None:
            queue.push(step[0], (step[0], n), step[1])
            waiting[step[0]].append(n)
        elif (item := queue.pop()) is not None:
            assert waiting[item[0]].pop(0) == item[1]
        else:
            assert not any(waiting.values())
        assert len(queue) == sum(map(len, waiting.values()))
        assert all(queue.waiting(owner) == len(items) for owner, items in waiting.items())
    assert not queue


@steady
@given(Weights, st.lists(st.tuples(*[st.integers(1, 50)] * len(OWNERS)), min_size=1, max_size=20), st.integers(1, 300))
def test_owners_that_always_wait_get_shares_by_weight(
    weights: dict[str, float], costs: list[tuple[int, ...]], count: int
) -> None:
    """Of any two, neither is ahead of the other by more than two rounds and a piece of each."""
    queue, served, pushed = FairQueue[tuple[str, int]](weights.__getitem__, 10), Counter[str](), Counter[str]()
    for owner in OWNERS:
        _push_next(queue, owner, costs, pushed)
        _push_next(queue, owner, costs, pushed)
    for _ in range(count):
        owner, cost = _popped(queue)
        served[owner] += cost
        _push_next(queue, owner, costs, pushed)
    for one in OWNERS:
        for other in OWNERS:
            ahead = served[one] / weights[one] - served[other] / weights[other]
            assert ahead <= 2 * 10 + 50 / weights[one] + 50 / weights[other] + 1e-6


def _push_next(queue: FairQueue[tuple[str, int]], owner: str, costs: list[tuple[int, ...]], pushed: Counter[str]) -> None:
    cost = costs[pushed[owner] % len(costs)][OWNERS.index(owner)]
    queue.push(owner, (owner, cost), cost)
    pushed[owner] += 1


def _popped(queue: FairQueue[tuple[str, int]]) -> tuple[str, int]:
    item = queue.pop()
    assert item is not None
    return item


@steady
@given(st.integers(1, 60), st.integers(0, 100), st.integers(10, 40))
def test_an_owner_that_was_idle_waits_for_no_flood(flood: int, before: int, cost: int) -> None:
    queue = FairQueue[str](lambda _: 1, 10)
    for n in range(flood + before):
        queue.push("flood", f"f{n}", cost)
    for _ in range(before):
        queue.pop()
    queue.push("quiet", "q", 1)
    first = [queue.pop() for _ in range(1 if before else -(-10 // cost) + 1)]
    assert "q" in first, "at once; or, if both were idle, behind the first quantum of the flood"


@steady
@given(st.integers(0, 300), st.integers(1, 10))
def test_idle_time_saves_nothing_up(idle: int, cost: int) -> None:
    """After any idle time, an owner gets the quantum of its first round, then every second turn."""
    queue = FairQueue[str](lambda _: 1, 10)
    for _ in range(idle):
        queue.push("busy", "b", cost)
        queue.push("busy", "b", cost)
        queue.pop()
    queue.push("busy", "b", 10)
    for _ in range(100):
        queue.push("back", "r", 10)
        queue.push("busy", "b", 10)
    got = "".join(_text(queue) for _ in range(60))
    assert got.count("r") <= 32


def test_an_owner_that_comes_back_goes_first_again() -> None:
    queue = FairQueue[str](lambda _: 1, 10)
    for n in range(200):
        queue.push(f"flood {n % 5}", "f", 10)
    for _ in range(3):
        assert {_text(queue) for _ in range(20)} == {"f"}
        queue.push("quiet", "q", 10)
        assert _text(queue) == "q"


def _text(queue: FairQueue[str]) -> str:
    found = queue.pop()
    assert found is not None
    return found


def test_a_piece_that_is_not_wanted_costs_nothing() -> None:
    gone: set[str] = {"a0", "a1"}
    queue = FairQueue[str](lambda _: 1, 10, lambda item: item not in gone)
    for n in range(3):
        queue.push("a", f"a{n}", 10)
    queue.push("b", "b0", 10)
    assert [queue.pop() for _ in range(3)] == ["a2", "b0", None]


def test_debts_of_many_rounds_are_passed_at_once() -> None:
    queue = FairQueue[str](lambda owner: 0.1, 1)
    for owner in "ab":
        queue.push(owner, owner, 10**9)
        queue.push(owner, owner, 1)
    assert sorted(_text(queue) for _ in range(4)) == ["a", "a", "b", "b"]


def test_work_of_a_deleted_item_is_forgotten() -> None:
    queue, item = FairQueue[list[int]](lambda _: 1), [1]
    queue.push("a", item, 5)
    assert (queue.discard([1]), queue.discard(item), queue.discard(item), queue.pop()) == (False, True, False, None)


# Turns on the event loop


def test_a_quiet_tenant_is_late_by_one_round_of_a_flood() -> None:
    async def story() -> list[str]:
        turns, seen = TenantTurns(Tenants([Tenant("noisy", ("n",)), Tenant("quiet", ("q",))], 1 << 20)), list[str]()

        async def work(topic: str) -> None:
            await turns.turn(topic, LARGE_PIECE_BYTES)
            seen.append(topic)

        flood = [asyncio.create_task(work("n")) for _ in range(30)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begun = len(seen)
        gone = [asyncio.create_task(work("n")) for _ in range(30)]
        await work("q")
        for task in gone:
            task.cancel()
        assert seen.index("q") - begun <= 1
        await asyncio.gather(*flood, *gone, return_exceptions=True)
        await asyncio.wait_for(turns.turn("n"), 10)
        return seen

    assert Counter(asyncio.run(story())) == {"n": 30, "q": 1}


def test_turns_of_tenants_go_by_weight() -> None:
    async def story() -> list[str]:
        turns, seen = TenantTurns(Tenants([Tenant("one", ("a",)), Tenant("three", ("b",), weight=3)], 1 << 20)), list[str]()

        async def work(topic: str) -> None:
            for _ in range(200):
                await turns.turn(topic, 64 << 10)
                seen.append(topic)

        await asyncio.gather(*(work(topic) for topic in "ab" for _ in range(2)))
        return seen

    counts = Counter(asyncio.run(story())[:400])
    assert 2.5 <= counts["b"] / counts["a"] <= 3.5


# Limits


def test_the_first_tenant_that_fits_has_a_topic() -> None:
    tenants = Tenants([Tenant("vip", ("shop.vip",), weight=5), Tenant("shop", ("shop.*", "till"))], 1 << 20)
    owners = [tenants.owner(topic) for topic in ("shop.vip", "shop.x", "till", "vip", "")]
    assert owners == ["vip", "shop", "shop", "/vip", "/"]
    assert [tenants.weight(owner) for owner in owners] == [5, 1, 1, 1, 1]


@steady
@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from(["a.1", "a.2", "b"]), st.integers(1, 30), st.integers(1, 5000))))
def test_no_tenant_exceeds_its_rates(steps: list[tuple[float, str, int, int]]) -> None:
    tenants, now = Tenants([Tenant("a", ("a.*",), produce_per_s=20, bytes_per_s=3000)], 1 << 20), 0.0
    messages = size = refused = 0
    for pause, topic, count, bytes_ in steps:
        now += pause
        try:
            tenants.admit(topic, count, bytes_, now)
        except RateLimited as error:
            assert topic != "b"
            wait_ms = error.details["retry_after_ms"]
            assert isinstance(wait_ms, int)
            assert wait_ms > 0
            refused += 1
        else:
            if topic != "b":
                messages, size = messages + count, size + bytes_
        assert messages <= 20 + 20 * now + 30
        assert size <= 3000 + 3000 * now + 5000
    assert sum(tenants.accounts[0].refused.values()) == refused


@steady
@given(st.lists(st.tuples(st.sampled_from(["n1", "n2", "q", "other"]), st.integers(1, 60)), max_size=80), st.randoms())
def test_held_bytes_return_to_nothing_and_keep_their_limits(steps: list[tuple[str, int]], random: object) -> None:
    tenants, held = Tenants([Tenant("n", ("n*",), max_bytes=100), Tenant("q", ("q",), weight=3)], 400), list[tuple[str, int]]()
    for n, (topic, count) in enumerate(steps):
        total = sum(size for _, size in held)
        try:
            tenants.hold(topic, count, 0, total)
        except Overloaded:
            assert total, "the only request passes"
        else:
            held.append((topic, count))
        mine = sum(size for name, size in held if name[0] == "n")
        assert tenants.accounts[0].held == mine
        assert mine <= 100 or sum(name[0] == "n" for name, _ in held) == 1
        if n % 3 == 2 and held:
            tenants.release(*held.pop(n % len(held)))
    for topic, count in held:
        tenants.release(topic, count)
    assert [account.held for account in tenants.accounts] == [0, 0]
    assert not tenants._held


def test_in_a_full_server_a_tenant_above_its_share_is_refused() -> None:
    tenants = Tenants([Tenant("n", ("n",)), Tenant("q", ("q",))], 100)
    tenants.hold("n", 50, 0, 0)
    tenants.hold("q", 10, 0, 50)
    with pytest.raises(Overloaded, match="tenant 'n' hold 50 bytes"):
        tenants.hold("n", 1, 0, 60)
    tenants.hold("q", 30, 0, 60)
    assert not may_hold(50, 1, 0, 0, 50, 90, 100)


def test_the_only_request_of_a_tenant_may_be_of_any_size() -> None:
    tenants = Tenants([Tenant("n", ("n",), max_bytes=10)], 100)
    tenants.hold("n", 8, 0, 0)
    tenants.hold("n", 80, 8, 8)  # more of the same request
    with pytest.raises(Overloaded):
        tenants.hold("n", 1, 0, 88)
    tenants.release("n", 88)
    tenants.hold("n", 11, 0, 0)


def test_messages_in_flight_are_counted_again_when_there_is_no_room(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "d")
    engine.submit("t", [Message(b"0", 0) for _ in range(20)], 0)
    engine.tick(1)
    tenants = Tenants([Tenant("t", ("t",), max_in_flight=5)], 1 << 20)
    tenants.count_with(lambda topic: engine.topics[topic].view.in_flight, engine.topics)
    fetches = Fetches(engine, FlowControl(), tenants)
    for clock in (1.0, 2.0, 3.0):
        found = fetches.fetch(FetchRequest("t", "g", 10), 1, clock)
        assert len(found) == 5
        assert len(fetches.fetch(FetchRequest("t", "g", 10), 1, clock + 0.5)) == 0
        engine.ack("t", "g", found.ids, 1)
    engine.close()


def test_messages_in_flight_of_all_topics_count_together(tmp_path: Path) -> None:
    """Long polls in other topics of the tenant go on as soon as messages have ended."""
    engine = Engine.open(tmp_path / "d")
    topics = [f"t{n}" for n in range(30)]
    for topic in topics:
        engine.submit(topic, [Message(b"0", 0, id=f"{topic}-{n}") for n in range(3)], 0)
    engine.tick(1)
    tenants = Tenants([Tenant("t", ("t*",), max_in_flight=5)], 1 << 20)
    tenants.count_with(lambda topic: engine.topics[topic].view.in_flight if topic in engine.topics else 0, engine.topics)
    fetches, clock = Fetches(engine, FlowControl(), tenants), 0.0
    assert len(fetches.fetch(FetchRequest("t0", "g", 10), 1, clock)) == 3
    assert len(fetches.fetch(FetchRequest("t1", "g", 10), 1, clock)) == 2
    polls = {topic: Future[Reserved]() for topic in topics[2:]}
    for topic, future in polls.items():
        fetches.wait(LongPoll(FetchRequest(topic, "g", 10), future))
    done = list[str]()
    for step in range(200):
        clock += 1.0
        fetches.tick(step + 2, lambda: True)
        fetches.answer_polls(step + 2, clock, lambda: True)
        in_flight = sum(engine.topics[topic].view.in_flight for topic in topics)
        assert in_flight <= 5
        assert tenants.counted()[0].in_flight == in_flight
        for topic in ("t0", "t1", *(name for name, future in polls.items() if future.done())):
            held = [f"{topic}-{n}" for n in range(3)]
            if topic not in done and engine.ack(topic, "g", held, step + 2).acked:
                done.append(topic)
                fetches.look_after(topic)
    assert sorted(done) == sorted(topics), "none waits for ever"
    engine.close()


def test_ticks_of_many_topics_do_not_delay_another_tenant(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "d")
    for topic in (*(f"n{n:02}" for n in range(20)), "q"):
        engine.submit(topic, [Message(b"0", 10)], 0)
    engine.tick(5)
    engine.share_ticks(lambda topic: topic[0], lambda owner: 1)
    order = list[str]()
    for _ in range(30):
        engine.tick(10, may_go_on=lambda: False)
        order += sorted(engine.woken)
    assert order.index("q") <= 1
    assert len({*order}) == 21
    engine.close()


# Over HTTP

CONFIG = """
[[tenants]]
name = "noisy"
topics = ["noisy*"]
produce_per_s = 20
bytes_per_s = 100000
max_in_flight = 7

[[tenants]]
name = "quiet"
topics = ["quiet", "silent.*"]
weight = 4
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "turtle.toml").write_text(CONFIG)
    with running(folder / "data", "--config", str(folder / "turtle.toml")) as one:
        yield one


def test_a_noisy_tenant_is_refused_and_a_quiet_one_is_not(server: Server) -> None:
    refused = stored = 0
    with ThreadPoolExecutor(4) as threads:
        five = {"messages": [{"body": "x"}] * 5}
        noise = [threads.submit(server.call, "POST", "/v1/topics/noisy/messages", five) for _ in range(30)]
        for n in range(30):
            server.put("quiet", {"id": f"q{n}", "body": n})
        for one in noise:
            answer = one.result()
            assert answer.status in (201, 429)
            if answer.status == 429:
                refused += 1
                assert answer.code == "RATE_LIMITED"
                assert int(answer.headers["Retry-After"]) >= 1
                assert "tenant 'noisy' may send 20 messages a second" in answer.json["error"]["message"]
            else:
                stored += 5
    assert refused
    assert stored >= 20
    figures = {tenant["name"]: tenant for tenant in server.ok("GET", "/v1/tenants")["tenants"]}
    assert figures["quiet"]["produced"] == 30
    assert figures["quiet"]["refused"] == {}
    assert (figures["noisy"]["produced"], figures["noisy"]["refused"]["messages"]) == (stored, refused)
    sleeping = server.ok("GET", "/v1/topics/noisy")["stats"]
    assert sum(sleeping[state] for state in ("sleep", "ready")) == stored, "a refused request has stored nothing"


def test_bytes_are_refused_before_they_are_decoded(server: Server) -> None:
    while (full := server.call("POST", "/v1/topics/noisy.bytes/messages", {"body": "x" * 90_000})).status == 429:
        pass  # a test before this one has used up the messages of a second
    last = server.call("POST", "/v1/topics/noisy.bytes/messages", data=b"{" + b"x" * 90_000)
    assert full.status == 201
    assert (last.status, last.code) == (429, "RATE_LIMITED"), "it is no JSON, and was not looked at"
    assert "bytes a second" in last.json["error"]["message"]


def test_messages_in_flight_are_limited_over_all_topics(server: Server) -> None:
    for topic in ("noisy.a", "noisy.b"):
        while (put := server.call("POST", f"/v1/topics/{topic}/messages", {"messages": [{"body": 0}] * 5})).status == 429:
            pass
        assert put.status == 201
    first = server.fetch("noisy.a", max=10, wait=5)
    second = server.fetch("noisy.b", max=10, wait=5)
    assert (len(first), len(second)) == (5, 2)
    assert server.fetch("noisy.b", max=10) == []
    assert server.ok("GET", "/v1/tenants")["tenants"][0]["in_flight"] == 7
    with ThreadPoolExecutor(1) as threads:
        poll = threads.submit(server.fetch, "noisy.b", max=10, wait=30)
        server.ok("POST", "/v1/topics/noisy.a/groups/default/ack", [message["id"] for message in first])
        assert len(poll.result(30)) == 3
    server.ok("POST", "/v1/topics/noisy.b/groups/default/ack", [message["id"] for message in second])


def test_a_server_without_tenants_has_no_figures_of_any(tmp_path: Path) -> None:
    with running(tmp_path / "data") as plain:
        assert plain.ok("GET", "/v1/tenants") == {"tenants": []}
        assert "turtlemq_tenant" not in plain.call("GET", "/metrics").data.decode()


def test_metrics_tell_of_every_tenant(server: Server) -> None:
    text = server.call("GET", "/metrics").data.decode()
    server.put("silent.x", {"body": 0})
    for name in ("produced_total", "produced_bytes_total", "delivered_total", "in_flight", "held_bytes", "waiting"):
        assert f'turtlemq_tenant_{name}{{tenant="quiet"}}' in text
