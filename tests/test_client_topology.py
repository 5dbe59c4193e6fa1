"""The client in a cluster: it finds the leader, survives its loss within the budget of a call, and asks no more than it must."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.forwarding import Stub, process, stub
from tests.harness.shard_process import topic_in
from turtlemq.client import AsyncClient, Client, errors, sending, topic_calls, wire
from turtlemq.client.options import later, question_of
from turtlemq.client.sending import Pause, RetryPolicy, Send
from turtlemq.client.topology import ASK_S, AVOID_S, REFRESH_S, TOPOLOGY, Servers, Target
from turtlemq.client.wire import Answer
from turtlemq.shards import shard_of

pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")  # keys of requests are texts
A, B, C = "http://a:8878", "http://b:8878", "http://c:8878"
IN_CLUSTER = {"x-turtlemq-cluster": "prod"}
GOOD = Answer(200, IN_CLUSTER, b'{"topics": []}')


def told(leader: str | None, epoch: int = 1, **more: Any) -> Answer:
    """The answer of a cluster with nodes `a`, `b` and `c`."""
    nodes = {name: {"url": url + "/", "zone": "", "more": 1} for name, url in zip("abc", (A, B, C), strict=True)}
    leaders: list[Any] = [{"shard": 0, "epoch": epoch, "url": leader, "isr": []}]
    return Answer(200, IN_CLUSTER, wire.to_json({"cluster": "prod", "shards": 1, "nodes": nodes, "leaders": leaders} | more))


def refusal(status: int, code: str, **details: Any) -> Answer:
    return Answer(status, IN_CLUSTER, wire.to_json({"error": {"code": code, "message": "no", **details}}))


def servers(*urls: str) -> Servers:
    return Servers(urls or (A,), random=lambda: 0.0)


def informed(leader: str | None = A, *urls: str) -> Servers:
    """At time 0, in a cluster."""
    out = servers(*urls)
    out.answered(out.target(0), GOOD, 0)
    assert out.question(0) is not None
    out.learn(told(leader), 0)
    return out


def test_without_a_cluster_there_are_no_questions() -> None:
    one = servers(A, B)
    for now in range(10):
        assert one.question(now) is None
        one.answered(one.target(now), Answer(200 if now < 5 else 503, {}, b"{}"), now)
    assert {one.target(now).direct for now in range(10)} == {False}


def test_a_cluster_is_noticed_and_its_leader_asked_directly() -> None:
    one = servers(B)
    one.answered(one.target(0), GOOD, 0)
    assert one.question(0) == Target(B, False)
    one.learn(told(A), 0)
    assert one.target(0) == Target(A, True)
    assert one.has_others
    assert one.question(REFRESH_S - 1) is None
    assert one.question(REFRESH_S) is not None


def test_a_lost_leader_is_avoided_until_there_is_another() -> None:
    one = informed(A, A)
    one.failed(Target(A, True), 10.0)
    assert one.target(10.0) == Target(B, False), "any other node waits for the next leader"
    assert one.question(10.0) == Target(B, False)
    one.learn(told(A), 10.0)  # the name server does not know yet
    assert one.target(10.1) == Target(B, False)
    assert one.question(10.0 + ASK_S / 2) is None
    assert one.question(10.0 + ASK_S) is not None
    one.learn(told(C, epoch=2), 10.3)
    assert one.target(10.3) == Target(C, True)


def test_a_leader_that_was_elected_again_is_trusted_at_once() -> None:
    one = informed(A, A)
    one.failed(Target(A, True), 10.0)
    one.learn(told(A, epoch=2), 10.1)
    assert one.target(10.1) == Target(A, True)


def test_a_node_that_does_not_lead_names_the_leader() -> None:
    one = informed(A, A, B)
    one.answered(Target(A, True), refusal(421, "NOT_LEADER", leader_url=C + "/", revision=7), 5.0)
    assert one.target(5.0) == Target(C, True)
    one.answered(Target(C, True), refusal(421, "NOT_LEADER", leader_url=None, revision=8), 5.1)
    assert one.target(5.1) == Target(A, False)
    for body in (b"", b"[]", b'{"error": {"leader_url": 5}}', b'{"error": {"leader_url": "ftp://x"}}'):
        one.answered(Target(A, True), Answer(421, {}, body), 5.2)
        assert not one.target(5.2).direct


def test_many_requests_that_fail_together_are_one_failure() -> None:
    one = informed(A, A)
    for n in range(64):
        one.failed(Target(A, True), 10.0 + n / 1000)
    assert not one.target(10.9).direct
    assert one.target(10.0 + AVOID_S[0]) == Target(A, True)


def test_a_leader_that_is_never_reached_costs_few_tries() -> None:
    """As behind another network: requests go through the node that was given."""
    one, tries, questions = informed(A, B), 0, 0
    for tick in range(6_000):  # ten minutes, ten requests a second
        now = 1.0 + tick / 10
        if one.question(now) is not None:
            questions += 1
            one.learn(told(A), now)
        target = one.target(now)
        if target.direct:
            tries += 1
            one.failed(target, now)
        else:
            assert target.url != A
            one.answered(target, GOOD, now)
    assert tries < 12
    assert questions < 30


def test_no_token_leaves_tls() -> None:
    one = Servers(("https://a",), random=lambda: 0.0)
    one.answered(one.target(0), GOOD, 0)
    one.learn(told("http://b:8878"), 0)
    assert one.target(0) == Target("https://a", False)
    assert not one.has_others
    one.answered(one.target(0), refusal(421, "NOT_LEADER", leader_url="http://b:8878"), 0)
    assert one.target(0) == Target("https://a", False)


@pytest.mark.parametrize("answer", [Answer(404, {}, b"{}"), Answer(200, {}, b"<html>"), told(A, cluster=""), told(A, shards=4)])
def test_what_names_no_leader_leaves_the_given_server(answer: Answer) -> None:
    one = informed(A, A)
    one.learn(answer, 1.0)
    assert one.target(1.0) == Target(A, False)
    assert one.question(2.0) is None


# A whole failover, without any wire


class Nodes:
    """Three nodes on a clock of their own. The leader dies at `dies`, the next one is elected at `elected`."""

    def __init__(self, dies: float, elected: float, seed: int) -> None:
        self.now, self.dies, self.elected = 0.0, dies, elected
        self.rng = random.Random(seed)
        self.questions: list[float] = []
        self.servers = Servers((A, B), self.rng.random)
        self.policy = RetryPolicy(now=lambda: self.now, random=self.rng.random)

    def leader(self, seen_from: str) -> str | None:
        return A if self.now < self.dies else None if self.now < self.elected else C

    def exchange(self, target: Target, step: Send) -> Answer | None:
        """The answer of a node; None if it is gone."""
        self.now += 0.001
        if target.url == A and self.now >= self.dies:
            return None
        if step.request is TOPOLOGY:
            self.questions.append(self.now)
            return told(self.leader(target.url), 1 if self.now < self.elected else 2)
        if target.url == self.leader(target.url):
            return GOOD
        if target.direct:
            return refusal(421, "NOT_LEADER", leader_url=self.leader(target.url), revision=1)
        waits = min(5.0, max(0.0, self.elected - self.now), 0.9 * step.timeout_s)
        self.now += waits
        return GOOD if self.now >= self.elected or self.leader(B) else refusal(503, "NO_LEADER", retry_after_ms=200)

    def send(self, step: Send) -> Answer | Exception:
        """As both shells do it."""
        if (question := self.servers.question(self.now)) is not None:
            begun = self.now
            answer = self.exchange(question, question_of(step))
            if answer is None:
                self.servers.failed(question, self.now)
            else:
                self.servers.answered(question, answer, self.now)
                self.servers.learn(answer, self.now)
            step = later(step, self.now - begun)
        target = self.servers.target(self.now)
        answer = self.exchange(target, step)
        if answer is None:
            self.servers.failed(target, self.now)
            return errors.ConnectionFailed("cut")
        self.servers.answered(target, answer, self.now)
        return answer

    def call(self) -> Any:
        steps = sending.run_call(topic_calls.topics(), self.policy)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self.now += step.seconds
                    step = steps.send(None)
                    continue
                got = self.send(step)
                step = steps.throw(got) if isinstance(got, Exception) else steps.send(got)
        except StopIteration as end:
            return end.value


@settings(deadline=None, max_examples=200)
@given(dies=st.floats(0, 5), away=st.floats(0, 24), seed=st.integers(0, 1000))
def test_a_program_does_not_notice_a_failover(dies: float, away: float, seed: int) -> None:
    nodes = Nodes(dies, dies + away, seed)
    while nodes.now < dies + away + 3:
        begun = nodes.now
        nodes.call()
        assert nodes.now - begun < 30
        nodes.now += 0.05
    assert nodes.servers.target(nodes.now) == Target(C, True)
    assert all(after - before >= ASK_S - 1e-6 for before, after in itertools.pairwise(nodes.questions))
    assert len(nodes.questions) < 3 + (away + 4) / ASK_S


# Both shells, over a real wire


async def node(request: web.BaseRequest, name: str, cluster: dict[str, Any]) -> web.StreamResponse:
    headers = {"X-Turtlemq-Cluster": "prod"}
    if request.path == "/v1/cluster":
        nodes = {one: {"url": url} for one, url in cluster["urls"].items()}
        leaders = [{"shard": 0, "epoch": cluster["epoch"], "url": cluster["urls"].get(cluster["leader"])}]
        return web.json_response({"cluster": "prod", "shards": 1, "nodes": nodes, "leaders": leaders}, headers=headers)
    if request.headers.get("X-Turtlemq-Direct") and name != cluster["leader"]:
        error = {"code": "NOT_LEADER", "message": "no", "leader_url": cluster["urls"][cluster["leader"]], "revision": 1}
        return web.json_response({"error": error}, status=421, headers=headers)
    return web.json_response({"topics": []}, headers=headers)


def of(one: Stub) -> list[str]:
    """The requests of a stub: paths, with a mark at those that were sent to it as the leader."""
    marks = [("!" if "X-Turtlemq-Direct" in request.headers else "") + request.path for request in one.requests]
    one.requests.clear()
    return marks


@pytest.mark.parametrize("shell", ["threads", "asyncio"])
def test_a_client_follows_the_leader(shell: str) -> None:
    """It is learned from the first answer, and from a refusal; the single node that is asked at first is enough."""

    async def story() -> None:
        cluster: dict[str, Any] = {"urls": {}, "leader": "a", "epoch": 1}
        async with (
            stub(lambda request: node(request, "a", cluster)) as a,
            stub(lambda request: node(request, "b", cluster)) as b,
        ):
            cluster["urls"] |= {"a": a.url, "b": b.url}
            async with AsyncClient(b.url) as client:
                blocking = Client(b.url)
                ask: Callable[[], Any] = client.topics if shell == "asyncio" else lambda: asyncio.to_thread(blocking.topics)
                for _ in range(3):
                    await ask()
                assert (of(b), of(a)) == (["/v1/topics", "/v1/cluster"], ["!/v1/topics"] * 2)
                cluster |= {"leader": "b", "epoch": 2}
                for _ in range(2):
                    await ask()
                assert of(a) == ["!/v1/topics"]
                assert [one for one in of(b) if one != "/v1/cluster"] == ["!/v1/topics"] * 2
                blocking.close()

    asyncio.run(story())


def test_a_single_node_is_asked_nothing_more() -> None:
    async def plain(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"topics": []})

    async def story() -> None:
        async with stub(plain) as one, AsyncClient([one.url, "http://127.0.0.1:1"]) as client:
            for _ in range(3):
                await client.topics()
            with Client([one.url, "http://127.0.0.1:1"]) as blocking:
                await asyncio.to_thread(blocking.topics)
            assert of(one) == ["/v1/topics"] * 4

    asyncio.run(story())


def test_puts_go_through_a_change_of_the_leader(tmp_path: Path) -> None:
    """Two nodes that forward: the first leads and stops, then the second leads. No put fails, and each is stored once."""

    async def story() -> None:
        async with process("a") as a, process("b") as b:
            a.lead(tmp_path / "a")
            for one in (a, b):
                one.cluster.set_leader("a", a.url)
                one.cluster.set_leader("a", a.url)
            stop, count, put = threading.Event(), itertools.count(), list[str]()

            def produce(client: Client) -> None:
                while not stop.is_set():
                    put.append(client.put("t", {"n": 1}, id=f"p{next(count)}"))

            async def more(messages: int) -> None:
                end = len(put) + messages
                while len(put) < end and not any(one.done() for one in producing):  # noqa: ASYNC110 - threads put
                    await asyncio.sleep(0.02)

            with Client([a.url, b.url], timeout=20) as client:
                producing = [asyncio.create_task(asyncio.to_thread(produce, client)) for _ in range(2)]
                await more(20)
                a.cluster.role = "standby"  # it hands over
                await asyncio.sleep(0.3)
                b.lead(tmp_path / "b")
                for one in (a, b):
                    one.cluster.set_leader("b", b.url, epoch=2)
                await more(20)
                stop.set()
                await asyncio.gather(*producing)
            a.cluster.role = "leader"  # for a look at its messages: these two replicate nothing
            stored = [id_ for one in (a, b) for id_ in await ready_ids(one.url)]
            assert sorted(stored) == sorted(put)
            assert len(await ready_ids(b.url)) > 10

    asyncio.run(story())


async def ready_ids(url: str) -> list[str]:
    target = url + "/v1/topics/t/messages?state=ready&limit=10000"
    async with aiohttp.ClientSession() as session, session.get(target) as response:
        return [message["id"] for message in (await response.json())["messages"]]


# Shards of one server

OWNED = {"x-turtlemq-owner": B}
ORDERS, OTHERS = "/v1/topics/orders/messages", "/v1/topics/others/fetch"


def owned(*urls: str) -> Servers:
    """It has learned that `orders` lives at B."""
    out = servers(*urls)
    out.answered(out.target(0, ORDERS), Answer(201, OWNED, b"{}"), 0)
    return out


def test_requests_about_a_topic_go_to_its_process() -> None:
    one = owned()
    assert one.target(1, "/v1/topics/orders/fetch") == Target(B, True, "orders")
    assert one.target(1, OTHERS) == Target(A, False, "others")
    assert one.target(1, "/v1/topics") == Target(A, False)
    assert one.question(1) is None
    one.answered(one.target(1, ORDERS), Answer(200, {}, b"{}"), 1)
    assert one.target(2, ORDERS).direct


def test_a_process_that_cannot_be_reached_is_avoided() -> None:
    one = owned()
    one.failed(one.target(1, ORDERS), 1)
    assert one.target(1, ORDERS) == Target(A, False, "orders")
    assert one.target(1 + AVOID_S[0], ORDERS) == Target(B, True, "orders")


@pytest.mark.parametrize("status", [502, 503])
def test_a_process_that_does_not_serve_is_forgotten(status: int) -> None:
    one = owned()
    one.answered(one.target(1, ORDERS), Answer(status, {}, b"{}"), 1)
    assert one.target(1, ORDERS) == Target(A, False, "orders")


def test_a_refusal_names_the_process_of_a_topic() -> None:
    one = owned()
    body = wire.to_json({"error": {"code": "NOT_LEADER", "message": "no", "leader_url": C}})
    one.answered(one.target(1, ORDERS), Answer(421, {}, body), 1)
    assert one.target(1, ORDERS) == Target(C, True, "orders")


def test_a_client_of_tls_follows_no_plain_address() -> None:
    one = servers("https://a:8878")
    one.answered(one.target(0, ORDERS), Answer(201, OWNED, b"{}"), 0)
    assert one.target(1, ORDERS) == Target("https://a:8878", False, "orders")


# Several shards


def sharded(*leaders: str | None, epoch: int = 1) -> Answer:
    places = [{"shard": number, "epoch": epoch, "url": url} for number, url in enumerate(leaders)]
    return told(None, shards=len(leaders), leaders=places)


def path_in(shard: int, shards: int) -> str:
    return f"/v1/topics/{topic_in(shard, shards)}/messages"


def test_requests_go_to_the_leader_of_their_shard() -> None:
    one = informed(None, C)
    one.learn(sharded(A, B), 1)
    assert [one.target(1, path_in(shard, 2)).url for shard in (0, 1)] == [A, B]
    assert one.target(1, path_in(0, 2)).direct
    assert one.target(1, "/v1/topics") == Target(C, False)
    assert one.question(30) is None
    quoted = one.target(1, f"/v1/topics/{quote('große/x', safe='')}")
    assert quoted.url == (A, B)[shard_of("große/x", 2)]


def test_a_lost_leader_of_a_shard_leaves_the_others() -> None:
    one = informed(None, C)
    one.learn(sharded(A, B), 1)
    target = one.target(1, path_in(0, 2))
    one.failed(target, 1)
    assert one.target(1, path_in(0, 2)).url == C
    assert one.target(1, path_in(1, 2)).url == B
    assert one.question(1) is not None
    one.learn(sharded(A, B), 1.1)  # the name server does not know yet
    assert one.question(1.5) is not None
    one.learn(sharded(B, B, epoch=2), 1.5)
    assert one.target(1.5, path_in(0, 2)) == Target(B, True, topic_in(0, 2))
    assert one.question(2) is None


def test_a_refusal_names_the_leader_of_one_shard() -> None:
    one = informed(None, C)
    one.learn(sharded(A, B), 1)
    one.answered(one.target(1, path_in(1, 2)), refusal(421, "NOT_LEADER", leader_url=A), 1)
    assert [one.target(1, path_in(shard, 2)).url for shard in (0, 1)] == [A, A]
    one.answered(one.target(1, path_in(0, 2)), refusal(503, "NO_LEADER"), 1)
    assert [one.target(1, path_in(shard, 2)).direct for shard in (0, 1)] == [False, True]


def test_a_shard_without_a_leader_is_asked_for_when_needed() -> None:
    one = informed(None, C)
    one.learn(sharded(A, None), 1)
    assert one.question(10) is None
    one.answered(one.target(10, path_in(1, 2)), GOOD, 10)
    assert one.question(10) is not None
