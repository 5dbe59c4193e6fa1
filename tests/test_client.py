"""The rules of the client, without any wire: retries, gathering, messages held by a consumer; and its bytes, made and read."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.client_world import ASK, CUT, GOOD, Promise, World, entries, refusal, said
from tests.harness.server_process import ROOT, environment
from turtlemq.client import (
    AsyncClient,
    Client,
    batching,
    calls,
    consumer_flows,
    dead_calls,
    errors,
    fetched,
    outgoing,
    past_calls,
    sending,
    wire,
)
from turtlemq.client.batching import BatchBuffer, PendingPut
from turtlemq.client.consumer_state import STOPPED_ERROR, AckList, ConsumerOptions, ConsumerState, Retry, error_text
from turtlemq.client.fetched import Message
from turtlemq.client.options import Sink
from turtlemq.client.outgoing import OutgoingMessage
from turtlemq.client.sending import RetryPolicy, Send
from turtlemq.client.wire import Answer

# Retries


@pytest.mark.parametrize("bad", [CUT, refusal(503, "UNAVAILABLE"), refusal(429, "OVERLOADED"), Answer(502, {}, b"proxy says no")])
def test_what_may_pass_is_tried_again_after_growing_pauses(bad: Any) -> None:
    answers = [bad] * 4 + [GOOD]
    world = World(lambda _: answers.pop(0))
    assert world.play(sending.send_with_retries(lambda _: ASK, world.rules, world.now + 10)) is GOOD
    assert world.pauses == [0.05, 0.1, 0.2, 0.4]
    assert {(send.timeout_s, send.budget_ms) for send in world.sent} == {(3.0, 3_000)}


@pytest.mark.parametrize(
    ("status", "code"), [(400, "INVALID_ID"), (404, "UNKNOWN_TOPIC"), (507, "DISK_FULL"), (504, "DEADLINE_EXCEEDED")]
)
def test_what_will_not_pass_is_raised_at_once(status: int, code: str) -> None:
    world = World(lambda _: refusal(status, code, index=3))
    with pytest.raises(errors.BY_CODE[code]) as met:
        world.play(sending.send_with_retries(lambda _: ASK, world.rules, world.now + 10))
    assert (met.value.index, met.value.status, len(world.sent)) == (3, status, 1)


def test_a_patient_caller_tries_again_whatever_the_server_says_of_itself() -> None:
    answers: list[Any] = [refusal(500, "INTERNAL"), refusal(507, "DISK_FULL"), CUT, GOOD]
    world = World(lambda _: answers.pop(0))
    assert world.play(sending.send_with_retries(lambda _: ASK, world.rules, sending.FOREVER, patient=True)) is GOOD
    assert {send.budget_ms for send in world.sent} == {None}


def test_the_server_says_how_long_to_wait() -> None:
    answers = [refusal(429, "RATE_LIMITED", retry_after_ms=1500), Answer(503, {"retry-after": "2"}, b""), GOOD]
    world = World(lambda _: answers.pop(0), roll=0.0)
    world.play(sending.send_with_retries(lambda _: ASK, world.rules, world.now + 10))
    assert world.pauses == [1.5, 2.0]


@settings(deadline=None)
@given(roll=st.floats(0, 1), latency=st.floats(0.01, 4), budget=st.floats(0.01, 20))
def test_all_tries_stay_inside_the_budget(roll: float, latency: float, budget: float) -> None:
    world = World(lambda _: CUT, roll=roll, latency_s=0.0)
    start = world.now

    def serve(send: Send) -> Exception:
        world.now += min(latency, send.timeout_s)
        return CUT

    world.server = serve
    with pytest.raises(errors.TimedOut) as met:
        world.play(sending.send_with_retries(lambda _: ASK, world.rules, start + budget))
    assert world.now <= start + budget + 1e-6
    assert met.value.__cause__ is CUT or not world.sent
    assert all(send.budget_ms is not None and 0 < send.budget_ms <= budget * 1000 + 1 for send in world.sent)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (calls.reschedule("t", "a", delay=Decimal(5)), "delay"),  # type: ignore[arg-type]
        (dead_calls.requeue_dead("t", ["a"], delay=5), "delay"),
        (calls.ack("t", ["-a"], retry_delay=5, error="why"), "retry_delay"),
    ],
    ids=["reschedule", "requeue_dead", "ack"],
)
def test_a_delay_counts_from_the_call(call: sending.Call[Any], field: str) -> None:
    answers: list[Any] = [CUT, CUT, CUT, Answer(200, {}, b'{"due_ms": 1}')]
    world = World(lambda _: answers.pop(0), latency_s=2.0)
    world.play(sending.run_call(call, world.rules))
    delays = [json.loads(send.request.body or b"")[field] for send in world.sent]
    assert delays == pytest.approx([5.0, 2.95, 0.85, 0.0])


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "5"])
def test_a_delay_that_json_would_not_say_is_refused(delay: Any) -> None:
    for call in (calls.reschedule, dead_calls.requeue_dead):
        with pytest.raises(errors.InvalidFireAt):
            call("t", "a", delay=delay)


# Delivering gathered messages


@settings(deadline=None)
@given(count=st.integers(1, 40), bad=st.sets(st.integers(0, 39), max_size=9), named=st.booleans(), seed=st.integers(0, 99))
def test_exactly_the_bad_messages_fail(count: int, bad: set[int], named: bool, seed: int) -> None:
    """Whether or not the server says which one it is, and however often the connection breaks in between."""
    stored: list[str] = []
    dice = random.Random(seed)

    def serve(send: Send) -> Answer | Exception:
        ids = [found["id"] for found in bson.decode_all(send.request.body or b"")]
        if dice.random() < 0.2:
            return CUT
        wrong = [i for i, id_ in enumerate(ids) if int(id_) in bad]
        if wrong:
            return refusal(400, "INVALID_FIRE_AT", **({"index": wrong[0]} if named else {}))
        stored.extend(ids)
        return Answer(201, {}, wire.to_json({"ids": ids, "created": len(ids)}))

    world = World(serve, roll=0.0)
    batch = entries(world, count)
    world.play(batching.deliver_batch("t", batch, world.rules))
    good = [str(i) for i in range(count) if i not in bad]
    assert stored == good  # once each, in order
    for i, outcome in enumerate(said(batch)):
        assert outcome == str(i) if i not in bad else isinstance(outcome, errors.InvalidFireAt)


@pytest.mark.parametrize(
    ("status", "code"), [(400, "INVALID_TOPIC"), (401, "UNAUTHENTICATED"), (404, "UNKNOWN_TOPIC"), (507, "DISK_FULL")]
)
def test_a_request_error_fails_all_after_one_try(status: int, code: str) -> None:
    world = World(lambda _: refusal(status, code))
    batch = entries(world, 5)
    world.play(batching.deliver_batch("t", batch, world.rules))
    assert len(world.sent) == 1
    assert {type(outcome) for outcome in said(batch)} == {errors.BY_CODE[code]}
    assert len({id(outcome) for outcome in said(batch)}) == 5  # each has its own, for each may be raised


def test_puts_with_more_time_go_on_when_others_time_out() -> None:
    world = World(lambda _: CUT)
    early, late = entries(world, 3), entries(world, 3)
    for entry in late:
        entry.deadline_s += 60

    def serve(send: Send) -> Answer | Exception:
        ids = [found["id"] for found in bson.decode_all(send.request.body or b"")]
        return Answer(201, {}, wire.to_json({"ids": ids})) if world.now > 1020 else CUT

    world.server = serve
    world.play(batching.deliver_batch("t", early + late, world.rules))
    assert {type(outcome) for outcome in said(early)} == {errors.TimedOut}
    assert said(late) == ["0", "1", "2"]


# Gathering


def test_a_batch_goes_by_count_bytes_time_or_flush() -> None:
    world = World(lambda _: GOOD)
    gather = BatchBuffer(3, 1000, 0.5, 100, 10_000)
    some = entries(world, 4)
    assert gather.send_at_s() is None
    gather.add(some[0])
    assert gather.send_at_s() == world.now + 0.5
    gather.add(some[1])
    gather.add(some[2])
    assert gather.send_at_s() == 0.0
    gather.add(some[3])
    assert gather.take_batch() == some[:3]
    assert gather.send_at_s() == world.now + 0.5
    mark = gather.flush_now()
    assert gather.send_at_s() == 0.0
    assert gather.take_batch() == some[3:]
    gather.release(some[3:])
    assert not gather.flushed(mark)
    gather.release(some[:3])
    assert gather.flushed(mark)
    assert (gather.unconfirmed_bytes, gather.waiting_bytes) == (0, 0)
    gather.add(some[0])
    taken = gather.take_batch()
    gather.add(some[1])
    gather.put_back(taken)
    assert gather.take_batch() == some[:2]  # it is the next again
    assert gather.waiting_bytes == 0
    gather.add(PendingPut(OutgoingMessage("big", b"x" * 5000), Promise(), 0.0))
    assert gather.send_at_s() == 0.0
    assert len(gather.take_batch()) == 1


# Messages that a consumer holds


def leased(id_: str, **more: Any) -> Message:
    return Message(id=id_, lease_until_ms=1, **more)


def desk(*ids: str, now: float = 100.0, **terms: Any) -> ConsumerState:
    made = ConsumerState(ConsumerOptions("t", **{"ttr": 10.0, "prefetch": 100, **terms}), lambda: now)
    made.add_fetched([leased(id_) for id_ in ids], now)
    return made


def ids_of(job: Any) -> list[str]:
    return [held.message.id for held in job]


def test_a_message_is_handled_and_acknowledged() -> None:
    one = desk("a", "b")
    job = one.next_job(101)
    assert ids_of(job) == ["a"]
    one.finished(job, {}, 102)
    one.finished(one.next_job(102), {"b": Retry("later", delay=5)}, 103)
    assert one.acks_due_s() == 102 + one.options.ack_linger_s
    assert one.take_acks() == [AckList(["a", "-b"], 5, "later")]
    assert one.counts == {"fetched": 2, "handled": 1, "failed": 1, "lost": 0, "late": 0}
    assert not one.idle
    one.acks_done(2)
    assert one.idle


def test_different_failures_are_told_apart() -> None:
    one = desk("a", "b", "c", batch=3)
    one.finished(one.next_job(101), {"a": ValueError("x"), "b": ValueError("y"), "c": "x" * 9999}, 101)
    assert [(acks.acks, acks.error) for acks in one.take_acks()] == [
        (["-a"], "ValueError: x"),
        (["-b"], "ValueError: y"),
        (["-c"], "x" * 4000),
    ]


def test_what_waited_longer_than_its_lease_is_not_handled() -> None:
    one = desk("a", "b")
    assert one.next_job(109.5) == []
    assert one.counts["lost"] == 2
    assert not one.in_hand


def test_leases_are_extended_together_and_in_time() -> None:
    one = desk("a", "b")
    one.next_job(100)
    due = one.extend_due_s(100)
    assert due is not None
    assert 100 < due < 105
    one.add_fetched([leased("c")], due - 0.1)
    assert sorted(one.ids_to_extend(due)) == ["a", "b", "c"]  # the new one goes along
    one.extended(["a", "b"], [], due)
    assert one.holds(leased("a"), due + 9.9)
    assert not one.holds(leased("a"), due + 10.1)
    assert (one.extend_due_s(due) or 0) > 0


def test_a_lost_lease_is_noticed() -> None:
    one = desk("a", "b", "c", "d")
    first, second = one.next_job(100), one.next_job(100)
    one.extended(["a", "b", "c", "d"], ["a", "b", "c"], 104)
    assert ids_of(one.next_job(105)) == ["d"]  # c is another's by now
    one.finished(first, {"a": ValueError()}, 106)  # its failure is not told: that would be the other's
    one.finished(second, {}, 106)  # but that it is done, is
    assert one.take_acks() == [AckList(["b"])]
    assert one.counts["lost"] == 3


def test_a_message_redelivered_in_its_handler_is_handled_once() -> None:
    one = desk("a")
    job = one.next_job(100)
    one.add_fetched([leased("a", attempt=2)], 120)
    assert one.next_job(120) == []
    one.finished(job, {"a": ValueError("x")}, 125)
    assert one.take_acks() == [AckList(["-a"], None, "ValueError: x")]


def test_a_handler_that_takes_too_long_is_given_up() -> None:
    one = desk("a", limit_s=20)
    one.next_job(100)
    one.extended(["a"], [], 115)
    assert one.ids_to_extend(119) == ["a"]
    assert one.ids_to_extend(121) == []
    assert one.extend_due_s(121) is None


def test_it_asks_for_more_when_half_is_gone() -> None:
    one = desk(*"abcdefgh", prefetch=8)
    assert one.fetch_count() == 0
    for _ in range(4):
        one.finished(one.next_job(100), {}, 100)
    assert one.fetch_count() == 4
    one.next_job(100)
    assert one.fetch_count() == 4  # messages being handled count
    one.stopping = True
    assert one.fetch_count() == 0


def test_unstarted_messages_are_given_back() -> None:
    one = desk("a", "b", "c")
    one.next_job(100)
    one.give_back(101)
    assert one.take_acks() == [AckList(["-b", "-c"], 0.0, STOPPED_ERROR)]


def test_at_most_once_holds_and_tells_nothing() -> None:
    one = desk("a", "b", mode="at-most-once")
    job = one.next_job(500)
    assert ids_of(job) == ["a"]
    one.finished(job, {"a": ValueError()}, 501)
    assert (one.in_hand, one.take_acks(), one.extend_due_s(501)) == ({}, [], None)


def test_at_most_once_messages_are_handled_however_late() -> None:
    """A topic may be at-most-once though the consumer is not: there is no lease, to lose or to extend."""
    one = desk(now=100)
    one.add_fetched([Message(id="a"), Message(id="b"), leased("c")], 100)
    assert one.holds(Message(id="a"), 500)
    assert one.ids_to_extend(105) == ["c"]
    job = one.next_job(500)
    assert ids_of(job) == ["a"]
    one.finished(job, {"a": ValueError()}, 501)
    assert ids_of(one.next_job(501)) == ["b"]
    assert one.take_acks() == []
    assert one.next_job(501) == []
    assert one.counts == {"fetched": 3, "handled": 0, "failed": 1, "lost": 1, "late": 0}


@pytest.mark.parametrize("delay", [-1, 1e9 + 1, 1.7e12, float("nan"), float("inf"), Decimal("NaN"), "5"])
def test_an_impossible_delay_is_refused_by_the_client(delay: Any) -> None:
    with pytest.raises(ValueError, match="delay"):
        Retry(delay=delay)


def test_a_retry_has_its_delay_as_a_float() -> None:
    assert [type(Retry(delay=delay).delay) for delay in (5, Decimal(5), Fraction(1, 2))] == [float] * 3  # type: ignore[arg-type]


def test_an_exception_that_cannot_say_what_it_is_has_its_name() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return self.args[0]  # type: ignore[no-any-return]

    one = desk("a")
    one.finished(one.next_job(100), {"a": Odd(404)}, 100)
    assert one.take_acks() == [AckList(["-a"], None, "Odd")]
    assert error_text(Odd("text")) == "Odd: text"


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": 0},
        {"ttr": 0},
        {"wait": 61},
        {"batch": 200, "prefetch": 100},
        {"mode": "never"},
        {"prefetch": 0},
        {"ack_linger_s": 20},
    ],
)
def test_terms_that_make_no_sense(bad: Any) -> None:
    with pytest.raises(ValueError, match=" or "):
        ConsumerOptions("t", **bad)


# Bytes

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=5)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@settings(deadline=None)
@given(
    body=st.binary(max_size=50),
    delay=st.none() | st.floats(0, 1e9),
    ttr=st.none() | st.floats(0.1, 1e6),
    priority=st.none() | st.sampled_from(outgoing.PRIORITIES),
    expires=st.none() | st.integers(0, 2**41),
    headers=st.none() | st.dictionaries(names, texts, max_size=3),
)
def test_our_bson_is_bson(body: bytes, headers: dict[str, str] | None, expires: int | None, **fields: Any) -> None:
    out = outgoing.outgoing_message(body, "ü-1", headers=headers, expires=expires, **fields)
    (found,) = bson.decode_all(outgoing.batch_to_bson([out], out.put_s))
    wanted = {"id": "ü-1", **fields, "expires_ms": expires, "headers": headers or None, "body": body}
    assert found == {name: value for name, value in wanted.items() if value is not None}


@pytest.mark.parametrize("body", [b"bytes", "json"])
def test_lingering_and_retried_puts_keep_their_due_time(body: Any) -> None:
    out = outgoing.outgoing_message(body, "a", delay=60.0, put_s=1000.0)
    for later, left in ((0.0, 60.0), (0.5, 59.5), (70.0, 0.0)):
        request = outgoing.produce_request("t", [out], 1000.0 + later)
        assert request.body is not None
        (found,) = bson.decode_all(request.body) if request.content_type == wire.BSON else json.loads(request.body)["messages"]
        assert found["delay"] == left


documents = st.fixed_dictionaries(
    {"due_ms": st.integers(0, 2**41).map(Int64), "created_ms": st.integers(0, 2**41).map(Int64)}
    | {"ready_ms": st.integers(0, 2**41).map(Int64), "lease_until_ms": st.integers(0, 2**41).map(Int64)}
    | {"attempt": st.integers(1, 99), "headers": st.just({}) | st.dictionaries(names, texts, max_size=2)}
    | {"priority": st.sampled_from(outgoing.PRIORITIES), "id": names, "body": st.binary(max_size=40) | texts | st.integers(0, 99)}
)


@settings(deadline=None)
@given(st.lists(documents, max_size=5), st.booleans())
def test_fetched_bson_is_read_in_any_order_of_fields(found: list[dict[str, Any]], turned: bool) -> None:
    if turned:
        found = [dict(reversed(document.items())) for document in found]
    read = fetched.messages_from_bson(b"".join(map(bson.encode, found)))
    assert [{name: getattr(message, name) for name in ("id", "headers", "attempt", "due_ms", "body")} for message in read] == [
        {name: document[name] for name in ("id", "headers", "attempt", "due_ms", "body")} for document in found
    ]


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_broken_bson_is_a_bad_answer_and_nothing_else(data: bytes) -> None:
    good = bson.encode(
        {"due_ms": Int64(1), "created_ms": Int64(1), "ready_ms": Int64(1), "lease_until_ms": Int64(1), "attempt": 1}
    )
    for some in (data, good[:-1] + data, good + data):
        try:
            fetched.messages_from_bson(some)
        except errors.BadAnswer:
            pass


def test_a_value_that_bson_does_not_have_comes_as_json() -> None:
    (found,) = fetched.messages_from_bson(bson.encode({"id": "a", "body_json": str(2**70)}))
    assert found.body == 2**70


NUMBERS = {b"1e999": Decimal("1e999"), b"-1e400": Decimal("-1e400"), b"9" * 5000: Decimal("9" * 5000)}


@pytest.mark.parametrize(("text", "number"), [*NUMBERS.items(), (b"1e99999999999999999999", float("inf"))])
def test_a_number_that_fits_no_type_leaves_its_neighbours_readable(text: bytes, number: Any) -> None:
    body = b'{"deep": [%s, 1.5, 2]}' % text
    odd = {"deep": [number, 1.5, 2]}
    each = b'{"id": "a", "state": "sleep", "due_ms": 5, "group": "g", "body": %s}' % body
    two = b'{"messages": [{"id": "b", "state": "sleep", "due_ms": 5, "group": "g", "body_base64": "AP8="}, %s]}' % each
    answer = Answer(200, {}, two)
    for parse in (fetched.parse_fetched, calls.browse_page("t").parse, dead_calls.dead_page("t").parse):
        found: Any = parse(answer)
        assert [message.body for message in getattr(found, "messages", found)] == [b"\x00\xff", odd]
    assert past_calls.get("t", "a").parse(Answer(200, {}, each)).body == odd
    documents = bson.encode({"id": "b", "body": 1}) + bson.encode({"id": "a", "body_json": body.decode()})
    assert [message.body for message in fetched.messages_from_bson(documents)] == [1, odd]


@pytest.mark.parametrize(
    "text", [b"<html>", b"NaN", b'{"messages": [{"id": 5}]}', b'{"messages": [{"id": 1e999}]}', b'{"messages": 1e999', b""]
)
def test_what_is_no_answer_is_still_none(text: bytes) -> None:
    for parse in (fetched.parse_fetched, calls.browse_page("t").parse):
        with pytest.raises(errors.BadAnswer):
            parse(Answer(200, {}, text))


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize("body", [b"bytes", "json"])
@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ({"delay": Decimal("1.5")}, {"delay": 1.5}),
        ({"delay": Fraction(3, 2), "ttr": Fraction(5)}, {"delay": 1.5, "ttr": 5.0}),
        ({"ttr": Decimal(5)}, {"ttr": 5.0}),
        ({"due": True, "expires": True}, {"due_ms": 1, "expires_ms": 1}),
        ({"priority": Name("high")}, {"priority": "high"}),
        ({"headers": {Name("a"): Name("b")}}, {"headers": {"a": "b"}}),
    ],
)
def test_fields_of_odd_types_do_not_break_their_batch(body: Any, odd: Any, plain: Any) -> None:
    request = outgoing.produce_request(
        "t", [outgoing.outgoing_message(body, Name("x"), **odd), outgoing.outgoing_message(body, "y")], 0.0
    )
    assert request.body is not None
    found = bson.decode_all(request.body) if request.content_type == wire.BSON else json.loads(request.body)["messages"]
    given = {name: value for name, value in found[0].items() if not name.startswith("body")}
    assert repr(sorted(given.items())) == repr(sorted({"id": "x", **plain}.items()))  # True is no number
    assert found[1]["id"] == "y"


def test_a_sink_takes_everything_and_keeps_its_error() -> None:
    class Little:
        def __init__(self) -> None:
            self.got = b""

        def write(self, piece: bytes) -> int:
            if len(self.got) > 8:
                raise OSError(28, "full")
            self.got += piece[:3]
            return len(piece[:3])

    file: Any = Little()
    sink = Sink(file)
    sink.write(b"12345678")
    assert (file.got, sink.error) == (b"12345678", None)
    with pytest.raises(OSError, match="full") as met:
        sink.write(b"9abc")
    assert sink.error is met.value


# A closed client


def test_acks_on_a_closed_client_are_logged_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def acks(policy: RetryPolicy) -> sending.Flow[int]:
        return consumer_flows.send_acks(ConsumerOptions("t"), AckList(["a"]), policy, policy.now() + 1)

    async def with_asyncio() -> None:
        async_client = AsyncClient()
        await async_client.close()
        await async_client.run(acks(async_client.options.policy))

    client = Client()
    client.close()
    client.run(acks(client.options.policy))
    asyncio.run(with_asyncio())
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=ack_failed"] * 2


# The package


def test_every_code_of_the_docs_has_its_class() -> None:
    table = (ROOT / "docs/HTTP.md").read_text("utf-8").partition("## Errors")[2].partition("## Produce")[0]
    codes = set(re.findall(r"`([A-Z][A-Z_]{4,})`", table)) - {"NOT_FOUND", "METHOD_NOT_ALLOWED", "INTERNAL"}
    assert len(codes) > 15
    assert codes <= set(errors.BY_CODE)


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = ("aiohttp", "asyncio", "bson", "numpy", "pymongo", "rich", "typer", "uvloop", "turtlemq.engine", "turtlemq.model")
    program = f"import sys, turtlemq.client; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([], "")
