"""Time and retries of the client: the timeout of each try, the retry budget, probes, and limits of time that travel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.client_world import ASK, CUT, GOOD, World, entries, refusal
from turtlemq.client import batching, errors, sending, topic_calls, wire
from turtlemq.client.retry_budget import PER_CALL, WINDOW_S, Allowance, RetryBudget
from turtlemq.client.sending import Pause, RetryPolicy, Send
from turtlemq.client.time_limit import limited, time_limit
from turtlemq.client.wire import Answer, Request

UNSENT = errors.ConnectionFailed("refused")
UNSENT.was_sent = False
BUSY = refusal(429, "OVERLOADED")


def budgeted(world: World, retries: int) -> RetryBudget:
    """Give a world's client a budget of retries."""
    budget = RetryBudget(retries)
    world.rules = dataclasses.replace(world.rules, retries=budget)
    return budget


# The timeout of a try


@settings(deadline=None)
@given(
    left=st.floats(0.001, 100),
    wait=st.floats(0, 60),
    tries=st.integers(0, 9),
    alpha=st.floats(0.1, 1),
    most=st.floats(0.05, 20),
)
def test_a_try_leaves_time_for_another_or_takes_all(left: float, wait: float, tries: int, alpha: float, most: float) -> None:
    policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0, alpha=alpha, try_timeout_s=most)
    timeout = policy.timeout_s(left, tries, wait)
    assert 0 < timeout <= left
    assert timeout <= wait + most + 1e-9
    if left > wait and timeout < left - 1e-9 and timeout < wait + most - 1e-9:
        assert timeout == pytest.approx(wait + alpha * (left - wait))
        assert left - timeout >= policy.backoff_s(tries + 1)


def test_a_short_budget_has_two_tries() -> None:
    """A server that hangs once costs seven tenths of the time, not all of it."""
    world = World(lambda _: GOOD)
    world.rules = dataclasses.replace(world.rules, budget_s=0.5)

    def serve(send: Send) -> Answer | Exception:
        if len(world.sent) == 1:
            world.now += send.timeout_s
            return CUT
        return Answer(200, {}, b'{"topics":[]}')

    world.server = serve
    assert world.play(sending.run_call(topic_calls.topics(), world.rules)) == []
    assert [send.timeout_s for send in world.sent] == pytest.approx([0.35, 0.1])
    assert [send.budget_ms for send in world.sent] == pytest.approx([350, 100], abs=1)


def test_a_long_poll_keeps_its_wait() -> None:
    policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0)
    assert policy.timeout_s(50, 0, wait_s=20) == 30
    assert policy.timeout_s(15, 0, wait_s=20) == 15


# The retry budget


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200), st.integers(0, 5))
def test_retries_in_any_window_stay_within_the_budget(steps: list[tuple[float, bool]], least: int) -> None:
    budget, now = RetryBudget(least), 0.0
    called: list[float] = []
    taken: list[float] = []
    for gap, is_call in steps:
        now += gap
        if is_call:
            budget.call(now)
            called.append(now)
        else:
            empty = budget.is_empty(now)
            assert budget.take(now) is not empty
            if not empty:
                taken.append(now)
    for end in taken:
        tried = [when for when in taken if end - WINDOW_S < when <= end]
        first = [when for when in called if end - WINDOW_S - 1 < when <= end]
        assert len(tried) <= least + PER_CALL * len(first) + 1e-6


def test_an_empty_budget_is_full_again_after_its_window() -> None:
    budget = RetryBudget(2)
    assert [budget.take(5.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(5.0 + WINDOW_S)
    assert budget.take(6.0 + WINDOW_S)


def test_a_call_without_retries_left_raises_its_error_at_once() -> None:
    world = World(lambda _: BUSY)
    budgeted(world, 2)
    for tries, exhausted in ((3, True), (1, True)):
        world.sent.clear()
        with pytest.raises(errors.Overloaded) as met:
            world.play(sending.run_call(topic_calls.topics(), world.rules))
        assert (len(world.sent), met.value.retries_exhausted) == (tries, exhausted)


def test_many_calls_earn_retries() -> None:
    world = World(lambda _: Answer(200, {}, b'{"topics":[]}'))
    budget = budgeted(world, 0)
    for _ in range(10):
        world.play(sending.run_call(topic_calls.topics(), world.rules))
    assert [budget.take(world.now) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("free", [UNSENT, refusal(421, "NOT_LEADER"), refusal(503, "NO_LEADER")])
def test_a_try_that_was_no_work_costs_nothing(free: Any) -> None:
    answers: list[Any] = [free] * 4 + [GOOD]
    world = World(lambda _: answers.pop(0))
    budget = budgeted(world, 0)
    budget.call(world.now)  # with the one below, less than a whole retry
    assert world.play(sending.send_with_retries(lambda _: ASK, world.rules, world.now + 10)) is GOOD
    assert budget.is_empty(world.now)


def test_a_loop_of_a_consumer_goes_on_with_an_empty_budget() -> None:
    answers: list[Any] = [BUSY] * 5 + [GOOD]
    world = World(lambda _: answers.pop(0))
    budgeted(world, 2)
    assert world.play(sending.send_with_retries(lambda _: ASK, world.rules, sending.FOREVER, patient=True)) is GOOD


# Probes of a producer


def test_one_sender_probes_while_the_others_wait() -> None:
    world = World(lambda _: BUSY)
    budget = budgeted(world, 0)
    flows = [batching.deliver_batch("t", entries(world, 1), world.rules) for _ in range(3)]
    steps: list[Any] = [next(flow) for flow in flows]
    assert [type(step) for step in steps] == [Send, Pause, Pause]
    for _ in range(5):  # the first has its answer, and tries again; the others ask now and then
        steps[0] = flows[0].send(BUSY if isinstance(steps[0], Send) else None)
        world.now += 0.05
        steps[1:] = [flow.send(None) for flow in flows[1:]]
        assert not [step for step in steps[1:] if isinstance(step, Send)]
    if isinstance(steps[0], Pause):
        world.now += steps[0].seconds
        steps[0] = flows[0].send(None)
    with pytest.raises(StopIteration):
        flows[0].send(Answer(201, {}, wire.to_json({"ids": ["0"], "created": 1})))
    assert isinstance(flows[1].send(None), Send)  # its turn
    assert isinstance(flows[2].send(None), Pause)
    flows[1].close()  # as a shell does when it is interrupted
    assert isinstance(flows[2].send(None), Send)
    flows[2].close()
    assert budget.begin_probe()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_there_is_at_most_one_probe(steps: list[tuple[int, bool]]) -> None:
    budget = RetryBudget(0)
    allowed = [Allowance(budget, "probe", lambda: 0.5) for _ in range(4)]
    holds = [False] * 4
    for number, ends in steps:
        if ends:
            allowed[number].end()
            allowed[number], holds[number] = Allowance(budget, "probe", lambda: 0.5), False
        else:
            pause = allowed[number].pause_s(0.0, False, False)
            assert pause is not None
            holds[number] = pause == 0
        assert sum(holds) <= 1


# Limits of time


def test_a_call_ends_with_the_limit_around_it() -> None:
    world = World(lambda _: CUT)
    ends = world.now + 0.4

    def serve(send: Send) -> Exception:
        world.now += send.timeout_s
        return CUT

    world.server = serve
    with limited(lambda: ends), pytest.raises(errors.TimedOut):
        world.play(sending.run_call(topic_calls.topics(), world.rules))
    assert world.now <= ends + 1e-6
    assert world.sent[0].budget_ms == 279
    assert time_limit() == sending.FOREVER


def test_a_limit_that_is_over_sends_nothing() -> None:
    world = World(lambda _: GOOD)
    with limited(lambda: world.now - 1), pytest.raises(errors.TimedOut):
        world.play(sending.run_call(topic_calls.topics(), world.rules))
    assert not world.sent


def test_the_limit_is_asked_at_each_call() -> None:
    world = World(lambda _: Answer(200, {}, b'{"topics":[]}'))
    ends = [world.now - 1]
    with limited(lambda: ends[0]):
        ends[0] = world.now + 1  # the lease was extended
        assert world.play(sending.run_call(topic_calls.topics(), world.rules)) == []
    assert world.sent[0].timeout_s == pytest.approx(0.7)


def test_a_request_without_an_end_has_no_budget() -> None:
    world = World(lambda _: GOOD)
    world.play(sending.send_with_retries(lambda _: Request("GET", "/"), world.rules, sending.FOREVER))
    assert world.sent[0].budget_ms is None


def test_an_outer_limit_of_time_stays_in_force() -> None:
    for outer, inner in ((10.0, 20.0), (20.0, 10.0)):
        with limited(lambda: outer), limited(lambda: inner):  # noqa: B023 - asked inside
            assert time_limit() == 10.0
    assert time_limit() == float("inf")
