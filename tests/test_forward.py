"""Forwarding: a node that does not lead passes requests on, bodies untouched in both directions, once, and within their time."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from yarl import URL

from tests.harness.certificates import certificate
from tests.harness.forwarding import process, stub
from turtlemq.replica import topology
from turtlemq.server import forward
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.cluster_config import Cluster
from turtlemq.server.outgoing import answers
from turtlemq.server.proxy import KEPT_BYTES

pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")  # keys of requests are texts
PUT, TOPIC, GROUP = "/v1/topics/t/messages", "/v1/topics/t", "/v1/topics/t/groups/g"
MIB = 1 << 20


def run(story: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]) -> None:
    """Play a story with a client of its own."""

    async def played() -> None:
        async with asyncio.timeout(60), aiohttp.ClientSession(auto_decompress=False) as client:
            await story(client)

    asyncio.run(played())


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110 - figures of another object
            await asyncio.sleep(0.01)


async def code(response: aiohttp.ClientResponse) -> tuple[int, str]:
    return response.status, (await response.json())["error"]["code"]


async def mirror(request: web.BaseRequest) -> web.StreamResponse:
    """Gives the body back as it came, with a header of its own."""
    body = await request.content.read()
    headers = {"X-Own": "1", "Content-Type": request.headers.get("Content-Type", "text/plain")}
    if "Content-Encoding" in request.headers:
        headers["Content-Encoding"] = request.headers["Content-Encoding"]
    return web.Response(body=body, status=201, headers=headers)


async def never(request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


# Bodies


@pytest.mark.parametrize("size", [0, 100, KEPT_BYTES, KEPT_BYTES + 1, 16 * MIB])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_go_both_ways_untouched(size: int, chunked: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    async def pieces() -> Any:
        for at in range(0, size, 100_000):
            yield body[at : at + 100_000]

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            follower.cluster.set_leader("a", leader.url)
            headers = {"Content-Type": "application/bson", "Authorization": "Bearer secret", "X-Request-Id": "mine"}
            data = pieces() if chunked else io.BytesIO(body)
            async with client.post(URL(follower.url + PUT + "?q=%2F", encoded=True), data=data, headers=headers) as response:
                assert (response.status, response.headers["X-Own"]) == (201, "1")
                assert response.headers["X-Request-Id"] == "mine"
                assert response.headers["X-Turtlemq-Cluster"] == "prod"
                assert await response.read() == body
            (seen,) = leader.requests
            assert seen.raw_path == PUT + "?q=%2F"
            expected = headers | {"X-Turtlemq-Hop": "1"}
            assert {name: seen.headers.get(name) for name in expected} == expected
            assert seen.headers["Host"] == leader.url.removeprefix("http://")
            assert follower.proxied("answered") == 1

    run(story)


def test_compressed_bodies_stay_compressed() -> None:
    packed = gzip.compress(b"x" * 10_000)

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            follower.cluster.set_leader("a", leader.url)
            headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
            async with client.post(follower.url + PUT, data=packed, headers=headers) as response:
                assert response.headers["Content-Encoding"] == "gzip"
                assert await response.read() == packed

    run(story)


def test_a_stream_is_passed_on_while_it_is_made() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        more = asyncio.Event()

        async def lines(request: web.BaseRequest) -> web.StreamResponse:
            out = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await out.prepare(request)
            await out.write(b'{"n": 1}\n')
            await more.wait()
            await out.write(b'{"n": 2}\n')
            return out

        async with process("b") as follower, stub(lines) as leader:
            follower.cluster.set_leader("a", leader.url)
            async with client.get(follower.url + "/v1/topics/t/dead/export") as response:
                assert await response.content.readline() == b'{"n": 1}\n'
                more.set()
                assert await response.content.read() == b'{"n": 2}\n'

    run(story)


def test_a_stream_that_breaks_is_not_taken_for_a_whole_one() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async def torn(request: web.BaseRequest) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            await out.write(b"half")
            assert request.transport is not None
            request.transport.abort()
            return out

        async with process("b") as follower, stub(torn) as leader:
            follower.cluster.set_leader("a", leader.url)
            async with client.get(follower.url + "/v1/topics/t/dead/export") as response:
                with pytest.raises(aiohttp.ClientError):
                    await response.read()

    run(story)


# A leader that is the application itself


def test_the_whole_life_of_a_message_through_a_node_that_follows(tmp_path: Path) -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as leader, process("b") as follower:
            leader.lead(tmp_path / "data")
            for one in (leader, follower):
                one.cluster.set_leader("a", leader.url)
            messages = io.BytesIO(b"".join(b'{"id": "m%d", "body": "%s"}\n' % (n, b"x" * 200_000) for n in range(80)))
            headers = {"Content-Type": "application/x-ndjson"}
            async with client.post(follower.url + PUT, data=messages, headers=headers) as response:
                assert (response.status, (await response.json())["created"]) == (201, 80)
            async with client.post(follower.url + "/v1/topics/t/fetch", json={"max": 80, "wait": 5}) as response:
                fetched = (await response.json())["messages"]
                assert {message["body"] for message in fetched} == {"x" * 200_000}
            async with client.post(follower.url + "/v1/topics/t/ack", json=[m["id"] for m in fetched]) as response:
                assert (await response.json())["acked"] == len(fetched)
            async with client.get(follower.url + "/v1/status") as response:
                assert (await response.json())["topics_total"] == 1
            async with client.head(follower.url + "/v1/topics/t") as response:
                assert (response.status, int(response.headers["Content-Length"]) > 100) == (200, True)
            async with client.get(follower.url + "/v1/topics/unknown") as response:
                assert await code(response) == (404, "UNKNOWN_TOPIC")

    run(story)


def test_a_long_poll_ends_when_its_client_is_gone(tmp_path: Path) -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as leader, process("b") as follower:
            leader.lead(tmp_path / "data")
            for one in (leader, follower):
                one.cluster.set_leader("a", leader.url)
            poll = asyncio.create_task(client.post(follower.url + "/v1/topics/t/fetch", json={"wait": 60}))
            await until(lambda: leader.service.polls == 1)
            poll.cancel()
            await until(lambda: leader.service.polls == 0)
            waiting = asyncio.create_task(client.post(follower.url + "/v1/topics/t/fetch", json={"wait": 60}))
            await until(lambda: leader.service.polls == 1)
            await client.post(leader.url + PUT, json={"id": "m", "body": 1})
            async with await waiting as response:
                assert [message["id"] for message in (await response.json())["messages"]] == ["m"]

    run(story)


def test_tokens_and_tls_of_the_leader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = (str(path) for path in certificate(tmp_path))
    secret, other = new_token(), new_token()
    tokens = (Token("app", hash_of(secret), ("produce",), ("t",)),)
    trusting = Cluster(tls_ca=cert)

    async def story(client: aiohttp.ClientSession) -> None:
        async with (
            process("a", tls_cert=cert, tls_key=key, tokens=tokens) as leader,
            process("b", tokens=tokens, cluster=trusting) as follower,
            process("c", tokens=tokens) as doubting,
        ):
            leader.lead(tmp_path / "data")
            for one in (leader, follower, doubting):
                one.cluster.set_leader("a", leader.url)

            async def put(url: str, token: str) -> int:
                headers = {"Authorization": f"Bearer {token}", "X-Turtlemq-Budget-Ms": "1000"}
                async with client.post(url + PUT, json={"body": 1}, headers=headers) as response:
                    return response.status

            assert [await put(follower.url, token) for token in (secret, other)] == [201, 401]
            assert await put(doubting.url, secret) == 503  # its leader has a certificate of an unknown authority
            assert "leader_unreachable" in caplog.text

    run(story)


# Time


def test_the_time_that_is_left_goes_along() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            asked = asyncio.create_task(client.post(follower.url + PUT, data=b"x", headers={"X-Turtlemq-Budget-Ms": "10000"}))
            await asyncio.sleep(0.3)
            follower.cluster.set_leader("a", leader.url)
            async with await asked as response:
                assert response.status == 201
            assert 5_000 < int(leader.requests[0].headers["X-Turtlemq-Budget-Ms"]) <= 9_900
            async with client.post(follower.url + PUT, data=b"x") as response:
                assert response.status == 201
            assert "X-Turtlemq-Budget-Ms" not in leader.requests[1].headers

    run(story)


def test_without_a_leader_a_request_waits_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "WAIT_S", 0.6)

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower:
            for headers, low, high in (({}, 0.55, 5.0), ({"X-Turtlemq-Budget-Ms": "200"}, 0.15, 0.55)):
                begun = time.monotonic()
                async with client.post(follower.url + PUT, data=b"x", headers=headers) as response:
                    assert await code(response) == (503, "NO_LEADER")
                    assert response.headers["Retry-After"] == "1"
                    assert (await response.json())["error"]["retry_after_ms"] == 200
                assert low < time.monotonic() - begun < high
            assert follower.proxied("no_leader") == 2

    run(story)


def test_a_request_waits_for_the_process_that_opens_its_files(tmp_path: Path) -> None:
    """The name server names the leader before it serves. Forwarded requests wait there as well, and are not sent in circles."""

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as winner, process("b") as follower:
            for one in (winner, follower):
                one.cluster.set_leader("a", winner.url)
            message = {"id": "m", "body": 1}
            targets = [(winner.url, {}), (winner.url, {"X-Turtlemq-Direct": "1"}), (follower.url, {})]
            asked = [asyncio.create_task(client.post(url + PUT, json=message, headers=headers)) for url, headers in targets]
            await asyncio.sleep(0.2)
            assert not any(one.done() for one in asked)
            winner.lead(tmp_path / "data")
            created = [(await (await one).json())["created"] for one in asked]
            assert sorted(created) == [0, 0, 1]

    run(story)


def test_a_body_that_arrives_during_a_handover_goes_on(tmp_path: Path) -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as old, stub(mirror) as new:
            old.lead(tmp_path / "data")
            old.cluster.set_leader("a", old.url)
            half = asyncio.Event()

            async def body() -> Any:
                yield b'{"body": '
                await half.wait()
                yield b"1}"

            headers = {"Content-Type": "application/json", "Content-Length": "11"}
            asked = asyncio.create_task(client.post(old.url + PUT, data=body(), headers=headers))
            await until(lambda: old.service.meter.in_flight)
            old.cluster.role = "standby"
            old.cluster.set_leader("c", new.url, epoch=2)
            half.set()
            async with await asked as response:
                assert (response.status, await response.read()) == (201, b'{"body": 1}')

    run(story)


# One hop


@pytest.mark.parametrize("header", ["X-Turtlemq-Hop", "X-Turtlemq-Direct"])
def test_a_request_that_was_forwarded_is_not_forwarded_again(header: str) -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            for url in (None, leader.url):
                if url:
                    follower.cluster.set_leader("a", url)
                async with client.post(follower.url + PUT, data=b"x", headers={header: "1"}) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"], error["leader_url"]) == (421, "NOT_LEADER", url)
                    assert error["revision"] == follower.cluster.topology().revision
            assert leader.requests == []
            assert follower.proxied("refused") == 2

    run(story)


def test_two_nodes_that_name_each_other_end_after_one_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "WAIT_S", 0.5)

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as one, process("b") as other:
            one.cluster.set_leader("b", other.url)
            other.cluster.set_leader("a", one.url)
            async with client.post(one.url + PUT, data=b"x") as response:
                assert await code(response) == (503, "NO_LEADER")
            assert 0 < other.proxied("refused") < 10
            assert one.proxied("refused") == 0

    run(story)


def test_a_node_that_knows_more_is_believed() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("a") as deposed, process("b") as follower, stub(mirror) as leader:
            follower.cluster.set_leader("c", leader.url)
            follower.cluster.set_leader("a", deposed.url)
            for _ in range(5):
                deposed.cluster.set_leader("c", leader.url, epoch=2)
            async with client.post(follower.url + PUT, data=b"x") as response:
                assert response.status == 201
            assert (deposed.proxied("refused"), len(leader.requests)) == (1, 1)

    run(story)


# A leader that is lost


def test_a_leader_that_cannot_be_reached_is_replaced_by_the_next() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            follower.cluster.set_leader("a", "http://127.0.0.1:1")
            for size in (10, 2 * MIB):
                follower.cluster.set_leader("a", "http://127.0.0.1:1")
                asked = asyncio.create_task(client.post(follower.url + PUT, data=io.BytesIO(b"x" * size)))
                await asyncio.sleep(0.2)
                follower.cluster.set_leader("c", leader.url, epoch=2)
                async with await asked as response:
                    assert (response.status, len(await response.read())) == (201, size)

    run(story)


@pytest.mark.parametrize("silent", [True, False])
def test_only_requests_that_can_be_repeated_are_sent_twice(silent: bool) -> None:
    """Whether the connection breaks, or the machine is silent and another leader is elected."""

    taken: list[web.BaseRequest] = []  # as a whole: it may be carried out

    async def loses(request: web.BaseRequest) -> web.StreamResponse:
        await request.content.read()
        taken.append(request)
        if silent:
            return await never(request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(loses) as lost, stub(mirror) as leader:
            tries = [("POST", PUT, 503), ("DELETE", PUT, 503), ("PUT", GROUP, 503), ("PUT", TOPIC, 201), ("GET", PUT, 201)]
            for method, path, status in tries:
                taken.clear()
                follower.cluster.set_leader("a", lost.url)
                asked = asyncio.create_task(client.request(method, follower.url + path))
                await until(lambda: taken)
                follower.cluster.set_leader("c", leader.url, epoch=2)
                async with await asked as response:
                    assert response.status == status
                    if status == 503:
                        error = (await response.json())["error"]
                        assert error["code"] == "NOT_REPLICATED"
                        assert "with the same ids is safe" in error["message"]
            assert [request.method for request in leader.requests] == ["PUT", "GET"]
            assert follower.proxied("lost") == 3
            if silent:
                await until(lambda: lost.gone == len(tries))

    run(story)


@pytest.mark.parametrize("size", [0, 10, 2 * MIB])
def test_a_request_that_no_process_took_goes_to_the_next(size: int) -> None:
    """The port of a node is open while its process is replaced: a request waits there, and is not carried out."""

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(never) as dead, stub(mirror) as leader:
            dead.takes_bodies = False
            follower.cluster.set_leader("a", dead.url)
            method, data = ("POST", io.BytesIO(b"x" * size)) if size else ("DELETE", None)
            asked = asyncio.create_task(client.request(method, follower.url + PUT, data=data))
            await until(lambda: dead.requests)
            follower.cluster.set_leader("c", leader.url, epoch=2)
            async with await asked as response:
                assert (response.status, len(await response.read())) == (201, size)

    run(story)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_long_request_has_as_much_time_for_the_next_leader(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The time with a leader that is silent is no time without a leader."""
    monkeypatch.setattr(forward, "WAIT_S", 0.3)

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(never) as silent, stub(mirror) as leader:
            silent.takes_bodies = False
            follower.cluster.set_leader("a", silent.url)
            asked = asyncio.create_task(client.request(method, follower.url + PUT))
            await until(lambda: silent.requests)
            await asyncio.sleep(2 * forward.WAIT_S)
            follower.cluster.set_leader("c", leader.url, epoch=2)
            async with await asked as response:
                assert response.status == 201

    run(story)


def test_a_leader_carries_out_nothing_before_it_has_the_whole_request(tmp_path: Path) -> None:
    """A request without a body is forwarded with an empty one: while its end is not sent, nothing is done."""

    async def story(_: aiohttp.ClientSession) -> None:
        async with process("a") as leader:
            leader.lead(tmp_path / "data")
            leader.service.engine.configure("t")
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(leader.url).port)
            head = "DELETE /v1/topics/t HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nX-Turtlemq-Empty: 1\r\n\r\n"
            writer.write(head.encode())
            await until(lambda: leader.service.meter.in_flight)
            await asyncio.sleep(0.1)
            assert list(leader.service.engine.topics) == ["t"]
            writer.write(b"0\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            assert list(leader.service.engine.topics) == []
            writer.close()

    run(story)


def test_a_leader_that_resets_connections_leaves_nothing_in_the_log() -> None:
    """aiohttp's task that sends a body fails beside the request, which gets the error of its answer."""
    uvloop = pytest.importorskip("uvloop")
    noise: list[dict[str, Any]] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        server = await asyncio.start_server(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0)
        async with server, process("b") as follower, aiohttp.ClientSession() as client:
            follower.cluster.set_leader("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            headers = {"X-Turtlemq-Budget-Ms": "500"}
            for data in (b"x", b"x" * 2 * MIB):
                async with client.post(follower.url + PUT, data=io.BytesIO(data), headers=headers) as response:
                    assert await code(response) == (503, "NO_LEADER")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
        gc.collect()
        runner.run(asyncio.sleep(0))
    assert noise == []


# Everything else


def test_each_node_answers_for_itself_where_it_can() -> None:
    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            async with client.get(follower.url + "/readyz") as response:
                assert response.status == 503
            follower.cluster.set_leader("a", leader.url)
            for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/", "/v1/cluster"):
                async with client.get(follower.url + path) as response:
                    assert response.status == 200, path
            async with client.get(follower.url + "/readyz?lead=1") as response:
                assert response.status == 503
            async with client.get(follower.url + "/v1/cluster") as response:
                told = msgspec.json.decode(await response.read(), type=topology.Topology)
                assert told == follower.cluster.topology()
            assert leader.requests == []

    run(story)


def test_so_many_requests_are_forwarded_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FORWARDS_MAX", 2)

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(never) as leader:
            follower.cluster.set_leader("a", leader.url)
            held = [asyncio.create_task(client.get(follower.url + "/v1/topics")) for _ in range(2)]
            await until(lambda: len(leader.requests) == 2)
            async with client.get(follower.url + "/v1/topics") as response:
                assert await code(response) == (429, "OVERLOADED")
            for one in held:
                one.cancel()
            await until(lambda: leader.gone == 2)

    run(story)


def test_a_page_of_this_node_may_send_changes_through_it() -> None:
    """Origin names the node that served the page. It is compared there, and not by the leader, whose name is another."""

    async def story(client: aiohttp.ClientSession) -> None:
        async with process("b") as follower, stub(mirror) as leader:
            follower.cluster.set_leader("a", leader.url)
            async with client.post(follower.url + PUT, data=b"x", headers={"Origin": follower.url}) as response:
                assert response.status == 201
            async with client.post(follower.url + PUT, data=b"x", headers={"Origin": "http://evil.example"}) as response:
                assert response.status == 403
            assert len(leader.requests) == 1
            assert "Origin" not in leader.requests[0].headers

    run(story)


def test_the_answer_types_have_the_fields_of_the_topology() -> None:
    pairs: list[tuple[Any, Any]] = [
        (answers.ClusterAnswer, topology.Topology),
        (answers.ClusterNode, topology.NodePlace),
        (answers.ClusterShard, topology.ShardPlace),
    ]
    for answer, place in pairs:
        assert answer.__struct_fields__ == place.__struct_fields__
