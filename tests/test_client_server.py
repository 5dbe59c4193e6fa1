"""The producer and the calls of a client against a real server, with a network that breaks: threads and asyncio alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.certificates import certificate
from tests.harness.client_network import WAIT_S, Proxy, Shell, canned, proxied, server, shell, topic
from tests.harness.server_process import Server, environment, running
from turtlemq.client import AsyncClient, AsyncProducer, Client, NewMessage, Producer, errors
from turtlemq.server.auth import hash_of, new_token

__all__ = ["server", "shell", "topic"]
BODIES: list[Any] = [b"", b"\x00\xff" * 50, None, "ü\n", 17, -1.5, [1, {"a": None}], {"deep": {"er": [True, False]}}, 2**70]


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxied(server.port) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


# Messages come out as they went in


@pytest.mark.parametrize("wire", ["json", "bson"])
def test_every_kind_of_body_comes_back_as_it_was(client: Client, topic: str, wire: Any) -> None:
    ids = client.put_many(topic, BODIES)
    found = {message.id: message for message in client.fetch(topic, wait=5, wire=wire)}
    assert [found[id_].body for id_ in ids] == BODIES
    assert [type(found[id_].body) for id_ in ids] == [type(body) for body in BODIES]


@pytest.mark.parametrize("wire", ["json", "bson"])
@pytest.mark.parametrize("body", [b"bytes", {"json": 1}], ids=["bytes", "json"])
def test_every_field_of_a_message_arrives(client: Client, topic: str, wire: Any, body: Any) -> None:
    due = datetime.now(UTC) - timedelta(seconds=5)
    headers = {"kind": "bill", "ü": ""}
    expires = datetime.now(UTC) + timedelta(hours=1)
    client.put(topic, body, id="a b", due=due, priority="high", expires=expires, ttr=77, headers=headers)
    looked = client.get(topic, "a b")
    (found,) = client.fetch(topic, wait=5, wire=wire)
    assert (found.id, found.body, found.headers, found.priority, found.attempt) == ("a b", body, headers, "high", 1)
    assert found.due_ms == looked.due_ms == -(-int(due.timestamp() * 1e6) // 1000)
    assert (looked.ttr, looked.body, looked.expires_ms) == (77, body, -(-int(expires.timestamp() * 1e6) // 1000))
    assert (found.topic, found.group) == (topic, "default")


def test_numbers_beyond_every_type_are_read_as_decimals(client: Client, server: Server, topic: str) -> None:
    odd = {"big": Decimal("1e999"), "digits": [Decimal("9" * 5000), 1.5, 2**70]}
    text = b'{"big": 1e999, "digits": [%s, 1.5, %d]}' % (b"9" * 5000, 2**70)
    client.configure(topic, max_attempts=1)
    server.ok("POST", f"/v1/topics/{topic}/messages", data=b'{"body": %s, "id": "a", "delay": 3600}' % text)

    async def story() -> list[Any]:
        async with AsyncClient(server.url) as mine:
            look = await mine.get(topic, "a")
            return [look.body, *[found.body async for found in mine.browse(topic)]]

    assert client.get(topic, "a").body == odd
    assert [found.body for found in client.browse(topic)] == [odd]
    assert asyncio.run(story()) == [odd, odd]
    client.reschedule(topic, "a", delay=0)
    (found,) = client.fetch(topic, wait=5)
    client.ack(topic, ["-a"])
    assert [found.body, *[letter.body for letter in client.dead(topic)]] == [odd, odd]


def test_ids_of_the_client_sort_in_the_order_of_their_making(client: Client, topic: str) -> None:
    ids = [client.put(topic, b"") for _ in range(20)]
    assert ids == sorted(set(ids))


# Errors are told by their kind


def test_refusals_have_their_class(client: Client, topic: str) -> None:
    with pytest.raises(errors.UnknownTopic):
        client.stats("never-seen")
    with pytest.raises(errors.InvalidTopic):
        client.put("-bad-", b"")
    client.put(topic, b"x", id="a")
    with pytest.raises(errors.UnknownMessage):
        client.get(topic, "nobody")
    client.fetch(topic, wait=5)
    with pytest.raises(errors.Conflict) as conflict:
        client.cancel(topic, "a")
    assert (conflict.value.state, conflict.value.status, conflict.value.code) == ("reserve", 409, "CONFLICT")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"id": ""}, errors.InvalidId),
        ({"id": "-a"}, errors.InvalidId),
        ({"id": "a/b"}, errors.InvalidId),
        ({"id": "ü" * 101}, errors.InvalidId),
        ({"delay": -1}, errors.InvalidFireAt),
        ({"delay": "5"}, errors.InvalidFireAt),
        ({"delay": Decimal("NaN")}, errors.InvalidFireAt),
        ({"delay": 1, "due": 5}, errors.InvalidFireAt),
        ({"due": datetime(2030, 1, 1)}, errors.InvalidFireAt),  # noqa: DTZ001 - that is the point
        ({"due": 1.5}, errors.InvalidFireAt),
        ({"ttr": 0}, errors.InvalidMessage),
        ({"ttr": timedelta(seconds=-5)}, errors.InvalidMessage),
        ({"priority": "urgent"}, errors.InvalidMessage),
        ({"headers": {"a\0": "b"}}, errors.InvalidMessage),
        ({"headers": {"a": "\ud800"}}, errors.InvalidMessage),
        ({"headers": {"a": 1}}, errors.InvalidMessage),
        ({"body": object()}, errors.InvalidMessage),
    ],
)
def test_a_bad_message_is_refused_where_it_is_put(client: Client, topic: str, fields: Any, kind: type[Exception]) -> None:
    with Producer(topic, client) as producer, pytest.raises(kind):
        producer.put(**{"body": b"", **fields})
    with pytest.raises(kind) as met:
        client.put_many(topic, [b"good", NewMessage(**{"body": b"", **fields})])
    assert isinstance(met.value, errors.ClientError)
    assert met.value.index == 1


def test_put_many_says_which_one_and_how_many_before_it(client: Client, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turtlemq.client.sending.REQUEST_COUNT", 10)
    messages = [NewMessage(body=n, due=2**50 if n == 25 else None) for n in range(30)]
    with pytest.raises(errors.InvalidFireAt) as met:
        client.put_many(topic, messages)
    assert (met.value.index, met.value.details["stored"]) == (25, 20)
    with pytest.raises(errors.InvalidFireAt) as met:
        client.put_many(f"{topic}-b", messages, together=True)
    assert (met.value.index, met.value.details["stored"]) == (25, 0)
    assert client.put_many(topic, []) == client.put_many(topic, [], together=True) == []


def test_a_closed_port_is_a_connection_error(topic: str) -> None:
    with Client("http://127.0.0.1:9", timeout=0.3) as client, pytest.raises(errors.TimedOut, match="tries"):
        client.put(topic, b"")


def test_something_else_listens(proxy: Proxy, topic: str) -> None:
    proxy.canned = canned("200 OK", b"<html>")
    proxy.set("answer")
    with Client(proxy.url) as client:
        for call in (lambda: client.put(topic, b""), lambda: client.stats(topic), lambda: client.fetch(topic)):
            with pytest.raises(errors.BadAnswer):
                call()


def test_the_second_address_is_used_when_the_first_is_dead(server: Server, topic: str) -> None:
    with Client(["http://127.0.0.1:9", server.url]) as client:
        assert client.put(topic, b"", id="a") == "a"


def test_token_agent_and_budget_are_sent(proxy: Proxy, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURTLEMQ_URL", proxy.url)
    monkeypatch.setenv("TURTLEMQ_TOKEN", "s3cret")
    with Client(user_agent="shop/2", timeout=5) as client:
        client.put(topic, b"")
    head = proxy.requests[0].partition(b"\r\n\r\n")[0].decode()
    assert "Authorization: Bearer s3cret" in head
    assert "User-Agent: shop/2" in head
    assert 0 < int(re.findall(r"X-Turtlemq-Budget-Ms: (\d+)", head)[0]) <= 5000


# Gathering


def produced(proxy: Proxy) -> list[bytes]:
    return [request for request in proxy.requests if b"/messages HTTP" in request.partition(b"\r\n")[0]]


def test_single_puts_are_gathered(proxy: Proxy, shell: Shell, topic: str) -> None:
    with shell.producer(topic, proxy.url, linger=60.0, count=50) as producer:
        puts = [producer.put(n, id=str(n)) for n in range(100)]
        assert [put.result(WAIT_S) for put in puts] == [str(n) for n in range(100)]
        assert len(produced(proxy)) == 2  # by count
        last = producer.put(100)
        producer.flush()
        assert last.result(0.1) == last.id
    assert len(produced(proxy)) == 3


def test_a_batch_goes_when_it_has_lingered_or_is_large(proxy: Proxy, shell: Shell, topic: str) -> None:
    with shell.producer(topic, proxy.url, linger=0.05) as producer:
        first = producer.put(b"x")
        assert first.result(WAIT_S) == first.id  # without a flush
    with shell.producer(topic, proxy.url, linger=60.0, bytes=10_000) as producer:
        puts = [producer.put(b"x" * 1000) for _ in range(9)]
        assert [put.result(WAIT_S) for put in puts[:8]] == [put.id for put in puts[:8]]  # as many as fit


def test_one_bad_message_does_not_sink_the_others(server: Server, shell: Shell, topic: str) -> None:
    with shell.producer(topic, server.url, linger=60.0) as producer:
        puts = [producer.put(b"x", id=str(n), due=2**50 if n in (0, 7, 8, 19) else None) for n in range(20)]
        producer.flush()
        for n, put in enumerate(puts):
            if n in (0, 7, 8, 19):
                with pytest.raises(errors.InvalidFireAt) as met:
                    put.result(1)
                assert met.value.index == 0  # of the one message that was put
            else:
                assert put.result(1) == str(n)
    assert sorted(m["id"] for m in server.fetch(topic, wait=5)) == sorted(str(n) for n in range(20) if n not in (0, 7, 8, 19))


def test_an_error_of_the_whole_batch_is_told_to_everyone(server: Server, shell: Shell) -> None:
    with shell.producer("-bad-", server.url, linger=60.0) as producer:
        puts = [producer.put(b"x") for _ in range(3)]
        producer.flush()
        for put in puts:
            with pytest.raises(errors.InvalidTopic):
                put.result(1)


def test_a_full_producer_lets_wait_or_says_so(proxy: Proxy, shell: Shell, topic: str, server: Server) -> None:
    proxy.set("hold")
    with shell.producer(topic, proxy.url, linger=0.0, held_count=10) as producer:
        puts = [producer.put(n) for n in range(10)]
        for block in (0, 0.05):
            with pytest.raises(errors.BufferFull):
                producer.put(10, block=block)
        with pytest.raises(errors.TimedOut):
            producer.flush(timeout=0.05)
        waiting = threading.Thread(target=lambda: puts.append(producer.put(10)))
        waiting.start()
        proxy.set("pass")
        waiting.join(WAIT_S)
        assert [put.result(WAIT_S) for put in puts] == [put.id for put in puts]
    with pytest.raises(errors.Closed):
        producer.put(11)
    assert len(server.fetch(topic, wait=5)) == 11


def test_a_full_producer_does_not_linger(server: Server, shell: Shell, topic: str) -> None:
    with shell.producer(topic, server.url, linger=600.0, held_count=10) as producer:
        puts = [producer.put(n, block=WAIT_S) for n in range(25)]
        assert puts[19].result(WAIT_S) == puts[19].id


def test_bytes_count_towards_fullness_but_one_message_always_fits(proxy: Proxy, shell: Shell, topic: str) -> None:
    proxy.set("hold")
    with shell.producer(topic, proxy.url, linger=0.0, held_bytes=1000) as producer:
        producer.put(b"x" * 5000)
        with pytest.raises(errors.BufferFull):
            producer.put(b"x", block=0)
        proxy.set("pass")


FORKED = """
import os, sys
from turtlemq.client import Client, Producer, errors

client = Client()
producer = Producer(sys.argv[1], client, linger=0.2)
mine = producer.put("parent", id="parent")
producer._lock.acquire(), client.pool._lock.acquire()  # as other threads may at that moment
child = os.fork()
if child:
    producer._lock.release(), client.pool._lock.release()
    mine.result(10)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    mine.result(10)
except errors.Closed:
    producer.put("child", id="child").result(10)
    producer.put("exit", id="exit")  # sent by the end of the program
"""


def test_a_producer_works_on_in_a_forked_child(server: Server, topic: str) -> None:
    """And messages that its parent had put are sent once, by the parent."""
    program = [sys.executable, "-c", FORKED, topic]
    done = subprocess.run(program, env=environment(TURTLEMQ_URL=server.url), capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(message["id"] for message in server.fetch(topic, wait=5)) == ["child", "exit", "parent"]


# The end of a program


@pytest.mark.parametrize("sudden", [False, True])
def test_what_an_async_producer_holds_is_sent_at_the_end(server: Server, topic: str, sudden: bool) -> None:
    async def main() -> None:
        producer = AsyncProducer(topic, url=server.url, linger=60.0, count=4)
        for n in range(10):
            await producer.put(n)
        if sudden:
            sys.exit()

    with pytest.raises(SystemExit) if sudden else contextlib.nullcontext():
        asyncio.run(main())
    assert sorted(message["body"] for message in server.fetch(topic, wait=5)) == list(range(10))


def test_a_batch_under_way_at_close_is_sent_again(proxy: Proxy, server: Server, topic: str) -> None:
    async def main() -> None:
        producer = AsyncProducer(topic, url=proxy.url, linger=0.0, senders=2, count=2)
        for n in range(6):
            await producer.put(n)
        await asyncio.to_thread(proxy.wait_for, lambda: len(produced(proxy)) == 2)
        threading.Timer(0.2, proxy.set, ["pass"]).start()

    proxy.set("hold")
    asyncio.run(main())
    assert sorted(message["body"] for message in server.fetch(topic, wait=5)) == list(range(6))
    assert len(produced(proxy)) > 3


def test_an_end_without_a_server_takes_no_longer_than_the_timeout(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        producer = AsyncProducer(topic, url="http://127.0.0.1:9", timeout=0.4, linger=60.0)
        puts.extend([await producer.put(n) for n in range(3)])

    puts: list[Any] = []
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "turtlemq.client"):
        asyncio.run(main())
    assert time.monotonic() - start < 5
    assert [type(put.exception()) for put in puts] == [errors.TimedOut] * 3
    assert f"event=puts_failed topic={topic} count=3" in caplog.text


def test_a_producer_that_is_cancelled_again_says_what_it_drops(
    proxy: Proxy, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        producer = AsyncProducer(topic, url=proxy.url, linger=0.0, count=2)
        puts = [await producer.put(n) for n in range(5)]
        await asyncio.to_thread(proxy.wait_for, lambda: len(produced(proxy)) == 1)
        (sender,) = producer._tasks
        for tries in (2, 3):
            sender.cancel()
            if tries == 2:
                await asyncio.to_thread(proxy.wait_for, lambda: len(produced(proxy)) == 2)
        await asyncio.wait_for(producer.close(), WAIT_S)
        assert [type(put.exception()) for put in puts] == [errors.Closed] * 5

    proxy.set("hold")
    with caplog.at_level(logging.WARNING, "turtlemq.client"):
        asyncio.run(main())
    assert caplog.text.count("event=puts_failed") == 3
    proxy.set("pass")


# A network that breaks


@pytest.mark.parametrize("mode", ["refuse", "cut-request", "cut-answer", "cut-half"])
def test_a_batch_that_is_sent_again_is_stored_once(proxy: Proxy, server: Server, shell: Shell, topic: str, mode: Any) -> None:
    proxy.set(mode, 3)
    with shell.producer(topic, proxy.url, linger=60.0) as producer:
        puts = [producer.put(n) for n in range(10)]
        producer.flush()
        ids = [put.result(1) for put in puts]
    assert len(produced(proxy)) == 4
    assert sorted(m["id"] for m in server.fetch(topic, wait=5)) == sorted(ids)
    assert server.fetch(topic) == []
    left = [int(re.findall(rb"X-Turtlemq-Budget-Ms: (\d+)", request)[0]) for request in produced(proxy)]
    assert left == sorted(left, reverse=True)  # each try has the time that earlier ones have left


@pytest.mark.parametrize("mode", ["cut-answer", "cut-half"])
def test_what_was_done_though_its_answer_was_lost_is_no_error(proxy: Proxy, client: Client, topic: str, mode: Any) -> None:
    client.put(topic, b"", id="a", delay=60)
    client.place_group(topic, "g")

    async def story() -> None:
        async with AsyncClient(proxy.url) as mine:
            proxy.set(mode, 1)
            await mine.drop_topic(topic)

    with Client(proxy.url) as mine:
        proxy.set(mode, 1)
        mine.cancel(topic, "a")
        with pytest.raises(errors.Conflict):
            mine.cancel(topic, "a")
        proxy.set(mode, 1)
        mine.drop_group(topic, "g")
        asyncio.run(story())
        with pytest.raises(errors.UnknownTopic):
            mine.drop_topic(topic)


def test_a_producer_waits_as_long_as_it_is_told_to(proxy: Proxy, shell: Shell, topic: str) -> None:
    proxy.canned = canned("429 Too Many Requests", b'{"error": {"code": "RATE_LIMITED", "message": "slowly"}}', "Retry-After: 1")
    proxy.set("answer", 1)
    start = time.monotonic()
    with shell.producer(topic, proxy.url) as producer:
        producer.put(b"x")
    assert time.monotonic() - start >= 1
    assert len(produced(proxy)) == 2


def test_when_the_budget_is_spent_every_put_is_told(proxy: Proxy, shell: Shell, topic: str) -> None:
    proxy.set("refuse")
    with shell.producer(topic, proxy.url, timeout=0.5, linger=0.0) as producer:
        puts = [producer.put(n) for n in range(5)]
        for put in puts:
            with pytest.raises(errors.TimedOut, match="tries"):
                put.result(WAIT_S)
        proxy.set("pass")
        assert producer.put(5).result(WAIT_S)  # and it goes on afterwards
    assert len(produced(proxy)) > 2


def test_a_silent_server_costs_no_more_than_the_budget(proxy: Proxy, topic: str) -> None:
    proxy.set("hold")
    with Client(proxy.url, timeout=0.4) as client, pytest.raises(errors.TimedOut):
        client.put(topic, b"")
    proxy.set("pass")


def test_many_threads_share_one_producer_and_one_client(server: Server, client: Client, topic: str) -> None:
    ids: list[str] = []
    lock = threading.Lock()

    def work(n: int) -> None:
        puts = [producer.put({"thread": n, "n": i}) for i in range(100)]
        own: list[str] = [client.put(topic, b"direct") for _ in range(5)]
        with lock:
            ids.extend([put.result(WAIT_S) for put in puts] + own)

    with Producer(topic, client, senders=3, count=37, linger=0.001) as producer:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert len(set(ids)) == 840
    assert {m.id for m in client.fetch(topic, max=1000, wait=5)} == set(ids)


@pytest.mark.slow
def test_kill_9_under_a_producer_neither_loses_nor_doubles(tmp_path: Path, shell: Shell) -> None:
    """Two servers die while messages come in; the address stays the same."""
    puts: list[Any] = []
    with proxied(9) as proxy, shell.producer("t", proxy.url, linger=0.001, count=20, senders=2) as producer:
        for _ in range(2):
            with running(tmp_path / "data") as server:
                proxy.target = server.port
                before = len(produced(proxy))
                while len(produced(proxy)) < before + 25:
                    puts.append(producer.put(len(puts)))
                os.kill(server.process.pid, signal.SIGKILL)
                server.process.wait()
        with running(tmp_path / "data") as server:
            proxy.target = server.port
            producer.flush()
            ids = [put.result(1) for put in puts]
            with Client(server.url) as client:
                found: list[Any] = []
                while some := client.fetch("t", max=10_000, wait=0 if found else 5):
                    found += some
    assert sorted(message.id for message in found) == sorted(ids)
    assert {message.id: message.body for message in found} == {put.id: n for n, put in enumerate(puts)}


# A server that is careful


def test_a_producer_keeps_to_the_rate_of_its_topic(client: Client, shell: Shell, server: Server, topic: str) -> None:
    client.configure(topic, rate={"produce_per_s": 100, "burst": 10})
    with shell.producer(topic, server.url, count=10, linger=0.0) as producer:
        puts = [producer.put(n) for n in range(60)]
        assert [put.result(WAIT_S) for put in puts] == [put.id for put in puts]
    assert sorted(message.body for message in client.fetch(topic, wait=5)) == list(range(60))
    slow = f"{topic}.slow"
    client.configure(slow, rate={"produce_per_s": 0.001, "burst": 1})
    client.put(slow, b"the burst")
    with Client(server.url, timeout=0.5) as hasty, pytest.raises(errors.TimedOut, match="at once") as met:
        hasty.put(slow, b"")
    assert isinstance(met.value.__cause__, errors.RateLimited)
    assert (met.value.__cause__.retry_after_s or 0) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_tls_and_tokens(tmp_path: Path, kind: str) -> None:
    cert, key = certificate(tmp_path)
    secret = new_token()
    tokens = json.dumps([{"name": "me", "hash": hash_of(secret), "rights": ["produce"], "topics": ["mine*"]}])
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key), "TURTLEMQ_TOKENS": tokens}

    def put(url: str, topic: str, **options: Any) -> str:
        async def story() -> str:
            async with AsyncClient(url, timeout=0.5, **options) as client:
                return await client.put(topic, b"x", id="a")

        if kind == "asyncio":
            return asyncio.run(story())
        with Client(url, timeout=0.5, **options) as client:
            return client.put(topic, b"x", id="a")

    with running(tmp_path / "data", tls=ssl.create_default_context(cafile=str(cert)), **files) as server:
        assert put(server.url, "mine", token=secret, cacert=str(cert)) == "a"
        with pytest.raises(errors.Forbidden):
            put(server.url, "yours", token=secret, cacert=str(cert))
        with pytest.raises(errors.Unauthenticated):
            put(server.url, "mine", cacert=str(cert))
        with pytest.raises(errors.TimedOut, match=r"(?i)certificate"):
            put(server.url, "mine", token=secret)


# Dead letters and listings, page by page


def test_listings_go_on_to_the_next_page(client: Client, topic: str) -> None:
    client.put_many(topic, [NewMessage(body=n, id=f"s{n}", delay=100 + n) for n in range(7)])
    assert [found.id for found in client.browse(topic, limit=3)] == [f"s{n}" for n in range(7)]
    client.configure(topic, max_attempts=1)
    client.put_many(topic, [NewMessage(body={"n": n}, id=f"d{n}") for n in range(7)])
    ids = [message.id for message in client.fetch(topic, wait=5)]
    assert client.ack(topic, [f"-{id_}" for id_ in ids], error="why not").dead == 7
    assert {letter.id: letter.body for letter in client.dead(topic, limit=2)} == {f"d{n}": {"n": n} for n in range(7)}
    file = io.BytesIO()
    client.export_dead(topic, file)
    assert sorted(json.loads(line)["id"] for line in file.getvalue().splitlines()) == sorted(ids)
    with pytest.raises(errors.UnknownTopic):
        client.export_dead("never-seen", file)
    with pytest.raises(errors.InvalidArgument):
        client.delete_dead(topic)
    with pytest.raises(errors.InvalidArgument):
        client.requeue_dead(topic, ["d1"], error="why not")
    assert client.requeue_dead(topic, error="why not", delay=100) == 7
    assert client.dead_summary(topic).total == 0


class Full(io.RawIOBase):
    def write(self, piece: Any, /) -> int:
        raise OSError(28, "No space left on device")


def test_a_file_that_is_full_is_no_broken_connection(client: Client, server: Server, topic: str) -> None:
    client.configure(topic, max_attempts=1)
    client.put(topic, b"x", id="d")
    client.fetch(topic, wait=5)
    client.ack(topic, ["-d"])
    full: Any = Full()

    async def story() -> None:
        async with AsyncClient(server.url) as mine:
            with pytest.raises(OSError, match="No space left"):
                await mine.export_dead(topic, full)
            assert (await mine.stats(topic)).dead == 1

    with pytest.raises(OSError, match="No space left"):
        client.export_dead(topic, full)
    assert client.stats(topic).dead == 1
    asyncio.run(story())


def test_the_async_client_has_the_same_calls(server: Server, topic: str) -> None:
    async def story() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.put_many(topic, [NewMessage(body=n, id=f"s{n}", delay=100 + n) for n in range(7)])
            assert [found.id async for found in client.browse(topic, limit=3)] == [f"s{n}" for n in range(7)]
            await client.configure(topic, max_attempts=1)
            await client.put(topic, b"x", id="d")
            await client.fetch(topic, wait=5)
            assert (await client.ack(topic, ["-d"], error="why")).dead == 1
            assert [letter.error async for letter in client.dead(topic)] == ["why"]
            file = io.BytesIO()
            await client.export_dead(topic, file)
            assert json.loads(file.getvalue())["id"] == "d"
            with pytest.raises(errors.InvalidFireAt) as met:
                await client.put_many(topic, [b"", NewMessage(body=b"", due=2**50)])
            assert met.value.index == 1
        with pytest.raises(errors.Closed):
            await client.topics()

    asyncio.run(story())
    public = [name for name in vars(Client) if not name.startswith("_") and name != "pool"]
    for name in public:
        theirs = getattr(AsyncClient, name)
        assert theirs.__doc__, name
        assert (
            list(inspect.signature(getattr(Client, name)).parameters) == list(inspect.signature(theirs).parameters)
            or name == "run"
        )
