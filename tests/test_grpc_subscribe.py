"""Subscriptions of `turtlemq.v1.Queue`: credit, sharing, acks, patterns, leases, and each way in which a stream can end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.committer import Slow
from tests.harness.grpc_peer import Peer, Site, run_site, soon
from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc import statuses
from turtlemq.server.grpc.framing import frame
from turtlemq.server.grpc.messages import message

FAR = 4 * 10**12
Request, Reply = message("turtlemq.v1.SubscribeRequest"), message("turtlemq.v1.SubscribeReply")
OPEN: dict[str, Any] = {"open": {"topics": ["t"]}}


def credit(messages: int, **more: int) -> dict[str, Any]:
    return {"credit": {"messages": messages, **more}}


class Subscriber:
    """One subscription, and the messages that it holds."""

    def __init__(self, peer: Peer, **metadata: str) -> None:
        self.peer, self.stream = peer, peer.begin("/turtlemq.v1.Queue/Subscribe", **metadata)

    def send(self, *sent: dict[str, Any]) -> None:
        self.peer.send_raw(self.stream, frame([Request(**one).SerializeToString() for one in sent]))

    def got(self, kind: str) -> list[Any]:
        told = [Reply.FromString(data) for data in self.peer.messages[self.stream]]
        return [getattr(one, kind) for one in told if one.WhichOneof("what") == kind]

    def rows(self, topic: str = "") -> list[tuple[str, int]]:
        """Ids and attempts of everything that was delivered."""
        out = list[tuple[str, int]]()
        for one in self.got("deliveries"):
            if topic in ("", one.topic):
                attempts = list(one.attempts) * (len(one.batch.ids) if len(one.attempts) == 1 else 1)
                out += zip(one.batch.ids, attempts, strict=True)
        return out

    @property
    def ids(self) -> list[str]:
        return [id_ for id_, _ in self.rows()]

    def ack(self, *ids: str, topic: str = "t", **more: Any) -> None:
        self.send({"acks": {"topic": topic, "ids": ids, **more}})

    async def until(self, count: int) -> None:
        await soon(lambda: len(self.ids) >= count)


async def subscribed(made: Site, *sent: dict[str, Any], **metadata: str) -> Subscriber:
    found = Subscriber(await made.peer(), **metadata)
    found.send(*sent)
    return found


def test_deliveries_are_columns_and_acks_are_lists(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.engine.submit("t", [Message(b'{"a": 1}', due_ms=5, id="j", json=True, headers={"h": "v"})], now_ms())
        made.put(["a", "b"], body=b"\0x")
        one = await subscribed(made, OPEN, credit(10))
        await one.until(3)
        (delivery,) = one.got("deliveries")
        assert (delivery.topic, list(delivery.batch.ids), list(delivery.batch.bodies)) == (
            "t",
            ["j", "a", "b"],
            [b'{"a": 1}', b"\0x", b"\0x"],
        )
        assert (list(delivery.batch.flags), delivery.batch.due_ms[0], list(delivery.attempts)) == ([4, 0, 0], 5, [1])
        assert [dict(one.fields) for one in delivery.batch.headers] == [{"h": "v"}, {}, {}]
        assert delivery.lease_until_ms[0] > now_ms()
        one.ack("j", "a", "x", "-a", "", failed=["b"], error="no paper", retry_delay_ms=0)
        await soon(lambda: one.got("acked"))
        (acked,) = one.got("acked")
        assert (acked.topic, acked.acked, acked.failed, sorted(acked.unknown)) == ("t", 2, 1, ["", "-a", "x"])
        await one.until(4)
        assert one.rows()[3] == ("b", 2)

    run_site(tmp_path, story)


def test_credit_is_added_up_and_never_exceeded(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        for topic in "tuv":
            made.put([f"{topic}{n}" for n in range(40)], topic)
        one = await subscribed(made, {"open": {"topics": ["t", "u", "v"]}}, credit(7), credit(5))
        for given in (12, 13, 33):
            await one.until(given)
            await asyncio.sleep(0.1)
            assert len(one.ids) == given
            one.send(credit({12: 1, 13: 20, 33: 0}[given]))
        assert len(set(one.ids)) == 33

    run_site(tmp_path, story)


def test_bytes_of_credit_are_never_exceeded(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put([f"m{n}" for n in range(30)], body=b"x" * 1_000)
        made.put(["large"], body=b"x" * 5_000)
        one = await subscribed(made, OPEN, credit(1_000, bytes=4_500))
        await one.until(4)
        await asyncio.sleep(0.1)
        assert len(one.ids) == 4
        one.send(credit(0, bytes=26_500))
        await one.until(30)
        one.ack(*one.ids)
        await soon(lambda: one.got("error"))
        assert (one.got("error")[0].code, "5,000" in one.got("error")[0].message) == ("TOO_LARGE", True)
        one.send(credit(0, bytes=4_000))
        await one.until(31)

    run_site(tmp_path, story)


def test_low_priority_has_three_quarters_of_the_credit(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        low = [Message(b"x", due_ms=5, id=f"l{n}", priority=Priority.LOW) for n in range(40)]
        made.engine.submit("t", low, now_ms())
        one = await subscribed(made, OPEN, credit(20))
        await one.until(15)
        await asyncio.sleep(0.1)
        assert len(one.ids) == 15
        made.put(["n"])
        await one.until(16)
        assert one.ids[-1] == "n"
        one.ack(*one.ids[:15])
        await one.until(18)
        other = await subscribed(made, OPEN, credit(20, low=3))
        await other.until(3)
        await asyncio.sleep(0.1)
        assert len(other.ids) == 3
        other.send(credit(0, low=2))
        await other.until(5)

    run_site(tmp_path, story)


def test_two_subscribers_share(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        ones = [await subscribed(made, OPEN, credit(100)) for _ in range(2)]
        await soon(lambda: len(made.service.fetches._waiting.of_topic("t")) == 1)
        made.put([f"m{n}" for n in range(40)])
        await soon(lambda: sum(len(one.ids) for one in ones) == 40)
        assert [len(one.ids) for one in ones] == [20, 20]
        assert len({id_ for one in ones for id_ in one.ids}) == 40

    run_site(tmp_path, story)


def test_topics_that_appear_later_join_a_pattern(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a"], "mail.de")
        made.put(["x"], "other")
        one = await subscribed(made, {"open": {"topics": ["mail.*", "plain"]}}, credit(100))
        await one.until(1)
        made.put(["b"], "mail.fr")
        made.put(["p"], "plain")
        await one.until(3)
        made.service.fetches.drop_topic("mail.fr")
        made.put(["c"], "mail.fr")
        await one.until(4)
        assert sorted(one.ids) == ["a", "b", "c", "p"]
        made.service.fetches.drop_topic("plain")
        await soon(lambda: one.got("error"))
        assert (one.got("error")[0].code, one.got("error")[0].topic) == ("UNKNOWN_TOPIC", "plain")

    run_site(tmp_path, story)


# Ends of a stream


@pytest.mark.parametrize("end", ["half_close", "leave", "reset", "lost"])
def test_what_an_ended_subscription_holds_goes_to_another(end: str, tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a", "b"])
        one = await subscribed(made, OPEN, credit(10))
        await one.until(2)
        other = await subscribed(made, OPEN, credit(10))
        if end == "half_close":
            one.peer.half_close(one.stream)
        elif end == "leave":
            one.send({"leave": True})
        elif end == "reset":
            one.peer.reset(one.stream)
        else:
            one.peer.transport.abort()
        await other.until(2)
        attempt = 1 if end in ("half_close", "leave") else 2
        assert sorted(other.rows()) == [("a", attempt), ("b", attempt)]

    run_site(tmp_path, story)


def test_a_subscription_that_leaves_gets_no_more_and_may_acknowledge(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a"])
        one = await subscribed(made, OPEN, credit(10))
        await one.until(1)
        one.send({"leave": False}, {"beat": 3})
        await soon(lambda: one.got("beat") == [3])
        made.put(["b"])
        one.ack("a")
        await soon(lambda: made.state("a") == "history")
        await asyncio.sleep(0.1)
        assert (one.ids, made.state("b")) == (["a"], "ready")

    run_site(tmp_path, story)


def test_a_stopping_server_drains_subscriptions(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a", "b"])
        one = await subscribed(made, OPEN, credit(10))
        await one.until(2)
        stop = asyncio.create_task(made.grpc.stop())
        await soon(lambda: one.got("drain_ms"))
        one.ack("a")
        await soon(lambda: made.state("a") == "history")
        await stop
        assert await one.peer.status(one.stream) == statuses.UNAVAILABLE
        assert made.state("b") == "ready", "given back"

    run_site(tmp_path, story)


def test_deliveries_that_the_socket_never_had_are_given_back(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["big"], body=b"x" * 200_000)
        one = Subscriber(await made.peer(reads=False))
        one.send(OPEN, credit(10))
        await soon(lambda: made.state("big") == "reserve")
        await asyncio.sleep(0.05)
        one.peer.transport.abort()
        other = await subscribed(made, OPEN, credit(10))
        await other.until(1)
        assert other.rows() == [("big", 1)]

    run_site(tmp_path, story)


# Terms


def test_leases_last_as_long_as_the_stream(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a", "b"])
        one = await subscribed(made, {"open": {"topics": ["t"], "ttr_ms": 300, "extend": True}}, credit(10))
        await one.until(2)
        await asyncio.sleep(1.5)
        assert (made.state("a"), len(one.ids)) == ("reserve", 2)
        one.peer.transport.abort()
        await soon(lambda: made.state("a") == "ready")

    run_site(tmp_path, story)


def test_a_lease_is_made_longer_on_request(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a"])
        one = await subscribed(made, {"open": {"topics": ["t"], "ttr_ms": 1_000}}, credit(1))
        await one.until(1)
        one.send({"longer": {"topic": "t", "ids": ["a", "x"], "ttr_ms": 600_000}})
        await soon(lambda: one.got("acked"))
        assert list(one.got("acked")[0].unknown) == ["x"]
        await asyncio.sleep(1.5)
        assert made.state("a") == "reserve", "its first lease is over"

    run_site(tmp_path, story)


def test_at_most_once_settles_before_it_sends(tmp_path: Path) -> None:
    door = Slow()

    async def story(made: Site) -> None:
        door.gate.set()
        made.put([f"m{n}" for n in range(5)])
        made.put([f"u{n}" for n in range(5)], "u")
        once = {"open": {"topics": ["t", "u"], "at_most_once": True}}
        one = await subscribed(made, once, credit(3))
        await one.until(3)
        assert {made.state(id_, "t" if id_[0] == "m" else "u") for id_ in one.ids} == {"history"}
        await asyncio.sleep(0.1)
        left = [made.state(f"{name}{n}", topic) for name, topic in (("m", "t"), ("u", "u")) for n in range(5)]
        assert Counter(left) == {"history": 3, "ready": 7}
        one.peer.transport.abort()
        other = await subscribed(made, once, credit(10))
        await other.until(7)
        assert not set(one.ids) & set(other.ids)

    try:
        run_site(tmp_path, story, door=door)
    finally:
        door.gate.set()


def test_messages_that_could_not_be_settled_give_their_credit_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = Engine.ack, list[str]()

    def ack(engine: Engine, topic: str, group: str, ids: list[str], now: int, leases: str) -> Any:
        if not refused:  # their lease is lost meanwhile
            refused.extend(ids)
            engine.give_back(topic, group, ids, now, leases)
        return real(engine, topic, group, ids, now, leases=leases)

    monkeypatch.setattr(Engine, "ack", ack)

    async def story(made: Site) -> None:
        made.put(["a", "b", "c"])
        one = await subscribed(made, {"open": {"topics": ["t"], "at_most_once": True}}, credit(3))
        await soon(lambda: refused)
        made.service.answer_polls_soon("t")
        await one.until(3)
        assert sorted(one.ids) == ["a", "b", "c"]

    run_site(tmp_path, story)


def test_messages_settled_by_their_topic_wait_for_credit(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        for topic in "tu":
            made.engine.configure(topic, delivery="at-most-once")
        one = await subscribed(made, {"open": {"topics": ["t", "u"]}}, credit(1))
        await soon(lambda: len(made.service.fetches._waiting.of_topic("u")) == 1)
        for n in range(4):
            made.put([f"m{n}"], "tu"[n % 2])
        for n in range(1, 5):
            await one.until(n)
            one.send(credit(1))
        assert sorted(one.ids) == ["m0", "m1", "m2", "m3"]

    run_site(tmp_path, story)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"open": {}}, "INVALID_ARGUMENT"),
        ({"open": {"topics": ["no topic"]}}, "INVALID_TOPIC"),
        ({"open": {"topics": ["t"], "group": "no group"}}, "INVALID_ARGUMENT"),
        ({"open": {"topics": ["t"], "ttr_ms": (1 << 32) - 1}}, "INVALID_ARGUMENT"),
        ({"acks": {"topic": "none", "ids": ["a"]}}, "UNKNOWN_TOPIC"),
        ({"longer": {"topic": "none", "ids": ["a"]}}, "UNKNOWN_TOPIC"),
    ],
)
def test_a_refusal_is_told_and_the_stream_goes_on(sent: dict[str, Any], code: str, tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        one = await subscribed(made, sent, {"beat": 1})
        await soon(lambda: one.got("beat"))
        assert [error.code for error in one.got("error")] == [code]

    run_site(tmp_path, story)


# Rights


@pytest.mark.parametrize("right", ["read", "produce", "consume", "operate", "admin"])
def test_only_consumers_subscribe_and_acknowledge(right: Any, tmp_path: Path) -> None:
    token = new_token()
    tokens = (Token("one", hash_of(token), (right,), ("t", "mine.*")),)
    may = right in ("consume", "admin")

    async def story(made: Site) -> None:
        made.put(["a"])
        made.put(["b"], "mine.b")
        made.put(["c"], "foreign")
        bare = await subscribed(made)
        assert await bare.peer.status(bare.stream) == statuses.UNAUTHENTICATED
        one = await subscribed(made, {"open": {"topics": ["t", "*"]}}, credit(10), authorization=f"Bearer {token}")
        if may:
            await one.until(2)
        one.send({"acks": {"topic": "t", "ids": ["a"]}}, {"acks": {"topic": "foreign", "ids": ["c"]}}, {"beat": 1})
        await soon(lambda: one.got("beat"))
        assert sorted(one.ids) == (["a", "b"] if may else [])
        codes = [(error.code, error.topic) for error in one.got("error")]
        refused = [("FORBIDDEN", "t"), ("FORBIDDEN", "t"), ("FORBIDDEN", "foreign")]
        assert codes == (refused[2:] if may else refused)
        made.grpc._auth.use((Token("other", hash_of(new_token()), ("read",), ("t",)),))
        if may:
            await soon(lambda: len(one.got("error")) == 3)
            assert {error.topic for error in one.got("error")[1:]} == {"t", "mine.b"}, "its right was taken away"

    run_site(tmp_path, story, tokens=tokens)


# Every message in one place


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_ends_leaves_each_message_in_one_place(seed: int, tmp_path: Path) -> None:
    """Subscribers come, acknowledge, fail, lose leases, leave and break; no message is lost, held twice or settled twice."""
    dice, count = random.Random(seed), 120

    async def story(made: Site) -> None:
        made.engine.configure("t", max_attempts=10_000, backoff_base_ms=0, backoff_max_ms=0)
        made.put([f"m{n}" for n in range(count)])
        ones, seen = list[Subscriber](), dict[int, int]()

        def act(one: Subscriber) -> bool:
            """Returns whether the subscriber goes on."""
            new = one.ids[seen.get(id(one), 0) :]
            seen[id(one)] = len(one.ids)
            good = [id_ for id_ in new if dice.random() < 0.5]
            failed = [id_ for id_ in new if dice.random() < 0.2 and id_ not in good]
            one.send({"acks": {"topic": "t", "ids": good, "failed": failed, "retry_delay_ms": 0}})
            one.send(credit(dice.choice([0, 1, 10])))
            ends: list[Callable[[], object]] = [
                lambda: one.peer.half_close(one.stream),
                lambda: one.peer.reset(one.stream),
                one.peer.transport.abort,
                lambda: one.send({"leave": True}),
            ]
            if dice.random() < 0.8:
                return True
            dice.choice(ends)()
            return False

        def is_done() -> bool:
            group = made.engine.groups("t").get("default")
            if group is None:
                return False
            places = group.ready + group.reserve + group.history + made.engine.stats("t").sleep
            assert places == count, "each message is in one place"
            return group.history == count

        while not is_done():
            while len(ones) < 3:
                ttr_ms = dice.choice([50, 60_000])
                ones.append(await subscribed(made, {"open": {"topics": ["t"], "ttr_ms": ttr_ms}}, credit(10)))
            await asyncio.sleep(0.01)
            ones = [one for one in ones if act(one)]
            assert made.engine.check() == []
        assert all(made.state(f"m{n}") == "history" for n in range(count))

    run_site(tmp_path, story)
