"""Early refusal by expected time, rates in bytes, buckets with room for urgent messages, and long polls that take no low."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.server import listen
from turtlemq.server.app import make_app
from turtlemq.server.config import Config
from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.fetches import Fetches
from turtlemq.server.long_polls import FetchRequest, LongPoll
from turtlemq.server.pace import INTERVAL_S, RATE_MIN, SMALL_BYTES, Pace
from turtlemq.server.rate_limit import FlowControl
from turtlemq.server.service import Service
from turtlemq.settings import Settings

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
Requests = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1 << 20), st.floats(0, 2)), max_size=60)


@steady
@given(Requests)
def test_all_work_that_begins_ends(requests: list[tuple[float, int, float]]) -> None:
    pace, events = Pace(), list[tuple[float, int, int]]()
    for n, (at, size, takes) in enumerate(requests):
        events += [(at, n, size), (at + takes, n, -1)]
    works: dict[int, int] = {}
    for at, n, size in sorted(events, key=lambda event: (event[0], event[2] < 0)):
        if size >= 0:
            works[n] = pace.begin(size, at)
        else:
            pace.end(works.pop(n), at)
        assert pace.waiting == sum(works.values())
        assert 0 <= pace.expected_s() <= pace.waiting / RATE_MIN
    assert pace.waiting == 0


def test_expected_time_is_waiting_work_by_its_rate() -> None:
    pace, now = Pace(), 0.0
    works = [pace.begin(1 << 20, now) for _ in range(40)]
    for work in works[:20]:  # 100 MB a second
        now += (1 << 20) / 100e6
        pace.end(work, now)
    assert pace.expected_s() == pytest.approx(20 * (1 << 20) / 100e6, rel=0.1)
    for _ in range(20):
        pace.committed(0.03)
    before = pace.expected_s()
    assert before == pytest.approx(20 * (1 << 20) / 100e6 + 0.03, rel=0.1)
    pace.begin(1, now)
    assert pace.expected_s() - before == pytest.approx(SMALL_BYTES / 100e6, rel=0.1), "a small request is work, too"


def test_only_requests_that_would_come_too_late_are_refused() -> None:
    pace = Pace()
    pace.begin(int(RATE_MIN), 0)
    pace.refuse_late(1.01)
    pace.refuse_late(2.01, is_low=True)
    for left, is_low in ((0.99, False), (1.99, True)):
        with pytest.raises(Overloaded) as met:
            pace.refuse_late(left, is_low)
        assert met.value.details["retry_after_ms"] == 1_000
    pace.end(int(RATE_MIN), INTERVAL_S / 2)
    pace.refuse_late(0.001)


def test_a_slow_disk_is_asked_again() -> None:
    pace = Pace()
    for _ in range(8):
        pace.committed(5.0)
    pace.refuse_late(0.2)
    work = pace.begin(1, 0)
    with pytest.raises(Overloaded):
        pace.refuse_late(0.2)
    pace.refuse_late(0.2, is_low=True, own=work)
    pace.end(work, 0.01)
    pace.refuse_late(0.2)


@pytest.mark.parametrize(
    ("budget_ms", "priority", "is_late"), [(900, "normal", True), (1_500, "low", True), (1_500, "high", False), (0, "low", False)]
)
def test_a_put_whose_answer_would_come_too_late_is_refused(tmp_path: Path, budget_ms: int, priority: str, is_late: bool) -> None:
    """A second of work waits. Low priority may use half of a request's time."""

    async def story() -> None:
        engine, service, config = Engine.open(tmp_path / "data"), Service(), Config(port=0)
        runner = listen.runner_for(make_app(service, config), 1)
        await runner.setup()
        try:
            await listen.Site(runner, config, None).start()
            service.start(engine)
            work = service.flow.pace.begin(int(RATE_MIN), 0.0)
            headers = {"X-Turtlemq-Budget-Ms": str(budget_ms)} if budget_ms else {}
            messages = {"messages": [{"body": n, "priority": priority} for n in range(3)]}
            url = "http://{}:{}/v1/topics/t/messages".format(*runner.addresses[0][:2])
            async with ClientSession() as session:
                found = await session.post(url, json=messages, headers=headers)
                assert found.status == (429 if is_late else 201)
                if is_late:
                    error = (await found.json())["error"]
                    assert (error["code"], error["retry_after_ms"] > 900) == ("OVERLOADED", True)
                    assert "t" not in engine.topics
                    service.flow.pace.end(work, 0.01)
                    assert (await session.post(url, json=messages, headers=headers)).status == 201
            service.drain()
        finally:
            await runner.cleanup()
            service.close()
            engine.close()

    asyncio.run(story())


# Rates


def test_low_priority_leaves_a_fifth_of_a_bucket() -> None:
    flow, settings = FlowControl(), Settings(rate_produce_per_s=100)
    flow.admit_produced("t", settings, "me", 80, 0, is_low=True)
    with pytest.raises(RateLimited) as met:
        flow.admit_produced("t", settings, "me", 1, 0, is_low=True)
    assert met.value.details["retry_after_ms"] == 10
    flow.admit_produced("t", settings, "me", 20, 0)
    with pytest.raises(RateLimited):
        flow.admit_produced("t", settings, "me", 1, 0)
    flow.admit_produced("t", settings, "me", 500, 2, is_low=True)  # a large batch passes when the bucket is full
    small = Settings(rate_produce_per_s=1)
    flow.admit_produced("small", small, "me", 1, 0, is_low=True)


def test_deliveries_of_low_priority_leave_a_fifth() -> None:
    flow, settings = FlowControl(), Settings(rate_deliver_per_s=1_000)
    assert (flow.deliverable("t", "g", settings, 500, 0), flow.deliverable_low("t", "g", settings, 0)) == (100, 80)
    flow.delivered("t", "g", settings, 80, 0)
    assert (flow.deliverable("t", "g", settings, 500, 0), flow.deliverable_low("t", "g", settings, 0)) == (20, 0)
    assert flow.deliverable_low("t", "g", Settings(), 0) is None
    assert flow.deliverable_low("slow", "g", Settings(rate_deliver_per_s=1), 0) == 1


def test_a_rate_of_bytes_pauses_a_group_in_debt() -> None:
    flow, settings = FlowControl(), Settings(rate_deliver_bytes_per_s=10_000)
    assert (flow.deliverable("t", "g", settings, 500, 0), flow.delivery_pause("t", "g", settings, 0)) == (500, 0)
    flow.delivered("t", "g", settings, 50, 0, size=21_000)
    assert flow.deliverable("t", "g", settings, 500, 1) == 0
    assert flow.delivery_pause("t", "g", settings, 1) == pytest.approx(1.0, rel=0.01)
    assert flow.deliverable("t", "g", settings, 500, 2.1) == 500
    assert flow.deliverable("t", "other", settings, 500, 0) == 500


# Long polls


class Answer:
    """The future of a long poll, without an event loop."""

    def __init__(self) -> None:
        self.ids: list[str] | None = None

    def done(self) -> bool:
        return self.ids is not None

    def set_result(self, messages: object) -> None:
        self.ids = messages.ids  # type: ignore[attr-defined]

    def set_exception(self, error: BaseException) -> None:
        raise error


def test_a_poll_that_takes_no_low_holds_up_no_other(tmp_path: Path) -> None:
    engine, now = Engine.open(tmp_path / "data"), 1_790_000_000_000
    fetches = Fetches(engine, FlowControl())
    engine.topic("t", create=True)
    answers = [Answer() for _ in range(3)]
    for answer, low in zip(answers, (0, 1, None), strict=True):
        request = FetchRequest("t", "g", 5, low=None if low is None else partial(int, low))
        fetches.fetch(request, now, 0.0)
        fetches.wait(LongPoll(request, answer))
    engine.submit("t", [Message(b"x", due_ms=now, priority=Priority.LOW) for _ in range(6)], now)
    for _ in range(4):
        fetches.tick(now, lambda: True)
        fetches.answer_polls(now, 0.0, lambda: True)
    assert [len(answer.ids or ()) for answer in answers] == [0, 1, 5]
    engine.submit("t", [Message(b"x", id="high", due_ms=now, priority=Priority.HIGH)], now)
    fetches.tick(now, lambda: True)
    fetches.answer_polls(now, 0.0, lambda: True)
    assert answers[0].ids == ["high"]
    engine.close()
