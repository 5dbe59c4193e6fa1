"""Consumers against a real server: acks, leases, stops, restarts and kills, with threads and asyncio alike."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client_network import WAIT_S, Log, Shell, proxied, server, settled, shell, topic
from tests.harness.server_process import Server, environment, running
from turtlemq.client import AsyncConsumer, Client, Consumer, Dedup, Message, Retry, errors

__all__ = ["server", "shell", "topic"]


def test_messages_are_handled_and_acknowledged_in_groups(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, *({"body": n, "id": str(n)} for n in range(200)))
    with proxied(server.port) as proxy:
        log = Log()
        with shell.consumer(topic, lambda message: log.add(message.body), proxy.url, ack_linger_s=10, ack_count=50):
            log.until(lambda seen: len(seen) == 200)
        assert sorted(log.seen) == list(range(200))
        settled(server, topic, history=200, reserve=0, ready=0)
        acks = [request for request in proxy.requests if b"/ack HTTP" in request]
        assert len(acks) <= 5


def test_a_failure_is_recorded_and_comes_again(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"}, {"body": 2, "id": "b"})
    log = Log()

    def handle(message: Message) -> None:
        log.add((message.id, message.attempt))
        if message.id == "a" and message.attempt == 1:
            raise Retry("not yet", delay=0.05)
        if message.id == "b":
            raise ValueError("no such customer")

    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 2, "backoff": {"base": 0.05, "jitter": "none"}})
    with shell.consumer(topic, handle, server.url):
        log.until(lambda seen: len(seen) == 4)
    assert sorted(log.seen) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    settled(server, topic, dead=1, reserve=0, ready=0)
    (letter,) = server.ok("GET", f"/v1/topics/{topic}/dead")["messages"]
    error, *frames = letter["error"].splitlines()
    assert (letter["id"], error) == ("b", "ValueError: no such customer")
    assert frames[-1].strip() == 'raise ValueError("no such customer")'
    assert "aio_consumer" not in letter["error"]
    assert "client/consumer" not in letter["error"]


def test_a_batch_handler_says_which_failed(server: Server, shell: Shell, topic: str) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    server.put(topic, *({"body": n, "id": str(n)} for n in range(30)))
    log = Log()

    def handle(messages: list[Message]) -> dict[str, BaseException | str]:
        assert 1 <= len(messages) <= 10
        log.add(len(messages))
        return {message.id: "odd" for message in messages if message.body % 2}

    with shell.consumer(topic, handle, server.url, batch=10, wire="bson"):
        log.until(lambda seen: sum(seen) == 30)
    settled(server, topic, dead=15, reserve=0)
    assert server.ok("GET", f"/v1/topics/{topic}/dead/summary")["errors"] == {"odd": 15}


@pytest.mark.slow
def test_a_slow_handler_keeps_its_lease(server: Server, shell: Shell, topic: str) -> None:
    """Longer than two leases, with another consumer that would take it at once."""
    server.put(topic, {"body": 1, "id": "slow"})
    log = Log()

    def handle(message: Message) -> None:
        log.add(message.attempt)
        time.sleep(2.5)
        log.add("done")

    first, second = (shell.consumer(topic, handle, server.url, ttr=1.0, wait=1) for _ in range(2))
    with first, second:
        log.until(lambda seen: "done" in seen)
        settled(server, topic, history=1, reserve=0)
    assert log.seen == [1, "done"]
    assert first.counts["lost"] + second.counts["lost"] == 0


@pytest.mark.slow
def test_no_message_is_held_by_two_at_once(server: Server, shell: Shell, topic: str) -> None:
    """Four consumers, short leases, failures and slow handlers."""
    holders: Counter[str] = Counter()
    done: Counter[str] = Counter()
    twice: list[str] = []
    lock, log = threading.Lock(), Log()

    def handle(message: Message) -> None:
        with lock:
            holders[message.id] += 1
            if holders[message.id] > 1:
                twice.append(message.id)
        time.sleep(2.5 if message.body == 0 else 0.002)
        with lock:
            holders[message.id] -= 1
        if message.body % 10 == 3 and message.attempt == 1:
            raise Retry(delay=0)
        with lock:
            done[message.id] += 1
        log.add(message.id)

    server.put(topic, *({"body": n, "id": str(n)} for n in range(300)))
    consumers = [shell.consumer(topic, handle, server.url, ttr=1.5, wait=1, prefetch=20) for _ in range(4)]
    for consumer in consumers:
        consumer.start()
    log.until(lambda seen: len(set(seen)) == 300)
    for consumer in consumers:
        consumer.stop()
    settled(server, topic, history=300, reserve=0, ready=0, sleep=0)
    assert twice == []
    assert set(done.values()) == {1}


def test_a_graceful_stop_finishes_what_runs(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, *({"body": n, "id": str(n)} for n in range(3)))
    log, go = Log(), threading.Event()

    def handle(message: Message) -> None:
        log.add("began")
        assert go.wait(WAIT_S)
        log.add("ended")

    consumer = shell.consumer(topic, handle, server.url, concurrency=1, prefetch=3)
    consumer.start()
    log.until(lambda seen: seen == ["began"])
    stopping = threading.Thread(target=consumer.stop)
    stopping.start()
    go.set()
    stopping.join(WAIT_S)
    assert log.seen == ["began", "ended"] * 3  # fetched messages are finished as well
    settled(server, topic, history=3, reserve=0)


def test_a_stop_gives_unstarted_messages_back_at_once(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, *({"body": n, "id": str(n)} for n in range(3)))
    log, go = Log(), threading.Event()

    def handle(message: Message) -> None:
        log.add(message.id)
        go.wait(WAIT_S)

    consumer = shell.consumer(topic, handle, server.url, concurrency=1)
    consumer.start()
    log.until(lambda seen: len(seen) == 1)
    consumer.stop(timeout=0.2)
    again = {message["id"] for message in server.fetch(topic, wait=5)}
    assert {"0", "1", "2"} - set(log.seen) <= again
    go.set()


def test_a_stop_ends_a_long_poll(server: Server, shell: Shell, topic: str) -> None:
    with proxied(server.port) as proxy:
        consumer = shell.consumer(topic, lambda message: None, proxy.url, wait=60)
        consumer.start()
        proxy.wait_for(lambda: bool(proxy.requests))
        consumer.stop(timeout=WAIT_S)
        server.put(topic, {"body": 1, "id": "a"})
        assert [message["id"] for message in server.fetch(topic, wait=5)] == ["a"]  # no consumer took it along


def test_at_most_once_never_comes_again(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, *({"body": n, "id": str(n)} for n in range(5)))
    log = Log()

    def handle(message: Message) -> None:
        log.add(message.id)
        raise ValueError

    with shell.consumer(topic, handle, server.url, mode="at-most-once", wait=0.2):
        log.until(lambda seen: len(seen) == 5)
        settled(server, topic, history=5, reserve=0, ready=0, dead=0)
    assert len(log.seen) == 5


def test_at_most_once_holds_for_every_consumer_of_the_topic(server: Server, shell: Shell, topic: str) -> None:
    """Messages that wait for their turn have no lease that could end meanwhile, and are handled."""
    server.ok("PUT", f"/v1/topics/{topic}", {"delivery": "at-most-once"})
    server.put(topic, *({"body": n, "id": str(n)} for n in range(6)))
    log = Log()

    def handle(message: Message) -> None:
        time.sleep(0.1)
        log.add((message.id, consumer.holds(message)))

    consumer = shell.consumer(topic, handle, server.url, concurrency=1, ttr=0.2, wait=0.2)
    with consumer:
        log.until(lambda seen: len(seen) == 6)
    assert sorted(log.seen) == [(str(n), True) for n in range(6)]
    assert consumer.counts == {"fetched": 6, "handled": 6, "failed": 0, "lost": 0, "late": 0}


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("wire", ["json", "bson"])
def test_what_is_settled_has_no_lease(server: Server, topic: str, count: int, wire: Any) -> None:
    server.put(topic, *({"body": n, "id": str(n)} for n in range(count)))
    with Client(server.url) as client:
        for group, ack in (("a", "auto"), ("m", "manual")):
            found = client.fetch(topic, group=group, max=1000, wait=5, ack=ack, wire=wire)  # type: ignore[arg-type]
            assert (len(found), {message.lease_until_ms == 0 for message in found}) == (count, {ack == "auto"})
        client.configure(topic, delivery="at-most-once")
        assert {message.lease_until_ms for message in client.fetch(topic, group="t", max=1000, wait=5, wire=wire)} == {0}


@pytest.mark.parametrize("wire", ["json", "bson"])
def test_a_number_beyond_floats_does_not_stop_a_consumer(server: Server, shell: Shell, topic: str, wire: str) -> None:
    for body in (b"1", b"1e999", b"9" * 5000, b"2"):
        server.ok("POST", f"/v1/topics/{topic}/messages", data=b'{"body": %s}' % body)
    log = Log()
    with shell.consumer(topic, lambda message: log.add(message.body), server.url, wire=wire):
        log.until(lambda seen: len(seen) == 4)
        settled(server, topic, history=4, reserve=0)
    assert sorted(log.seen) == [1, 2, Decimal("1e999"), Decimal("9" * 5000)]


def test_a_handler_that_awaits_what_was_cancelled_has_failed(server: Server, topic: str) -> None:
    """And its worker goes on."""
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    server.put(topic, {"body": 1, "id": "bad", "priority": "high"}, {"body": 2, "id": "good"})

    consumer: Any = None

    async def handle(message: Message) -> None:
        if message.id == "bad":
            waiting = asyncio.ensure_future(asyncio.sleep(WAIT_S))
            waiting.cancel()
            await waiting
        await consumer.stop(wait=False)

    async def make() -> None:
        nonlocal consumer
        consumer = AsyncConsumer(topic, handle, url=server.url, concurrency=1)
        await asyncio.wait_for(consumer.run(), WAIT_S)

    asyncio.run(make())
    assert consumer.counts == {"fetched": 2, "handled": 1, "failed": 1, "lost": 0, "late": 0}
    settled(server, topic, history=1, dead=1, reserve=0)
    (error,) = server.ok("GET", f"/v1/topics/{topic}/dead/summary")["errors"]
    assert error.splitlines()[0] == "CancelledError: "


def test_a_cancelled_consumer_ends_though_its_handlers_wait(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"})
    began = threading.Event()

    async def handle(message: Message) -> None:
        began.set()
        await asyncio.sleep(WAIT_S)

    async def story() -> None:
        consumer = AsyncConsumer(topic, handle, url=server.url)
        await consumer.start()
        await asyncio.to_thread(began.wait, WAIT_S)
        await asyncio.wait_for(consumer.stop(timeout=0.1), WAIT_S)

    start = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - start < WAIT_S / 2


def test_ctrl_c_stops_the_workers_before_it_is_raised(server: Server, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put(topic, {"body": 1, "id": "a"})
    log = Log()
    consumer = Consumer(topic, lambda message: log.add(message.id), url=server.url)

    def interrupted(timeout: float) -> bool:
        log.until(lambda seen: seen == ["a"])
        raise KeyboardInterrupt

    monkeypatch.setattr(consumer._stopped, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.run(timeout=WAIT_S)
    assert not [thread for thread in consumer._threads if thread.is_alive()]
    settled(server, topic, history=1, reserve=0)


def test_what_will_not_change_ends_the_consumer(server: Server, shell: Shell) -> None:
    consumer = shell.consumer("-bad-", lambda message: None, server.url)
    with pytest.raises(errors.InvalidTopic):
        consumer.run()


def test_threads_take_no_coroutines(topic: str) -> None:
    async def handle(message: Message) -> None:
        pass

    with pytest.raises(TypeError, match="AsyncConsumer"):
        Consumer(topic, handle)


def test_a_handler_can_end_its_consumer(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "a"})

    def handle(message: Message) -> None:
        consumer.stop()

    consumer = Consumer(topic, handle, url=server.url)
    consumer.run()
    settled(server, topic, history=1, reserve=0)
    with pytest.raises(RuntimeError):
        consumer.start()


@pytest.mark.slow
def test_a_consumer_survives_its_server(tmp_path: Path, shell: Shell) -> None:
    """kill -9 while messages are handled; the consumer comes back with the server, and every message is handled."""
    log = Log()

    def handle(message: Message) -> None:
        time.sleep(0.002)
        log.add(message.body)

    with proxied(9) as proxy, shell.consumer("t", handle, proxy.url, ttr=1, wait=5, prefetch=20):
        with running(tmp_path / "data") as server:
            server.put("t", *({"body": n, "id": str(n)} for n in range(400)))
            proxy.target = server.port
            log.until(lambda seen: len(seen) > 100)
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
        with running(tmp_path / "data") as server:
            proxy.target = server.port
            log.until(lambda seen: len(set(seen)) == 400)
            settled(server, "t", history=400, reserve=0, ready=0, sleep=0, dead=0)
    assert len(log.seen) < 500  # few of them twice: those that were not acknowledged when it died


PROGRAM = """
import asyncio, sys, time
from turtlemq.client import AsyncConsumer, Consumer

def work(message):
    print("began", flush=True)
    time.sleep(0.3)
    print("ended", flush=True)

async def main():
    await AsyncConsumer(sys.argv[1], lambda message: asyncio.to_thread(work, message)).run(signals=True)

asyncio.run(main()) if sys.argv[2] == "asyncio" else Consumer(sys.argv[1], work).run(signals=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_gracefully(server: Server, topic: str, kind: str, number: int) -> None:
    server.put(topic, {"body": 1, "id": "a"})
    program = [sys.executable, "-c", PROGRAM, topic, kind]
    with subprocess.Popen(program, env=environment(TURTLEMQ_URL=server.url), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "ended\n")
    settled(server, topic, history=1, reserve=0)


# Effects once


@pytest.fixture(name="connect")
def connections() -> Iterator[Callable[..., sqlite3.Connection]]:
    """`sqlite3.connect`, whose connections are closed at the end."""
    with ExitStack() as opened:
        yield lambda *how, **more: opened.enter_context(closing(sqlite3.connect(*how, **more)))


def test_an_effect_and_its_record_stand_or_fall_together(connect: Callable[..., sqlite3.Connection], tmp_path: Path) -> None:
    database = connect(tmp_path / "shop.db")
    database.execute("CREATE TABLE paid (id TEXT)")
    dedup = Dedup(database)
    message = Message(id="a", topic="t", group="g")

    def work(fail: bool) -> bool:
        with dedup.once(message) as first:
            if first:
                database.execute("INSERT INTO paid VALUES (?)", (message.id,))
            if fail:
                raise ValueError("again")
        return first

    with pytest.raises(ValueError, match="again"):
        work(fail=True)
    assert database.execute("SELECT count(*) FROM paid").fetchone() == (0,)
    assert [work(False), work(False)] == [True, False]
    with pytest.raises(ValueError, match="again"):
        work(fail=True)
    assert database.execute("SELECT count(*) FROM paid").fetchone() == (1,)
    other = Dedup(connect(tmp_path / "shop.db"))
    with other.once(message) as first:
        assert not first
    with other.once(Message(id="a", topic="t", group="another")) as first:
        assert first
    assert dedup.forget(3600) == 0
    assert dedup.forget(-1) == 2
    assert work(False)
    with pytest.raises(ValueError, match="one transaction"):
        Dedup(connect(tmp_path / "shop.db", isolation_level=None))
    with pytest.raises(ValueError, match="table"):
        Dedup(database, table="x; DROP TABLE paid")


def test_a_commit_that_fails_leaves_nothing_behind(connect: Callable[..., sqlite3.Connection]) -> None:
    """Neither for the next message nor for `forget`."""
    database = connect(":memory:")
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("CREATE TABLE customer (id INTEGER PRIMARY KEY)")
    database.execute("CREATE TABLE paid (customer REFERENCES customer (id) DEFERRABLE INITIALLY DEFERRED)")
    dedup = Dedup(database)
    with pytest.raises(sqlite3.IntegrityError), dedup.once(Message(id="a")):
        database.execute("INSERT INTO paid VALUES (99)")
    assert not database.in_transaction
    with dedup.once(Message(id="b")) as first:
        assert first
    database.execute("INSERT INTO paid VALUES (99)")
    with pytest.raises(sqlite3.IntegrityError):
        dedup.forget(-1)
    assert not database.in_transaction
    assert dedup.forget(-1) == 1  # b alone


def test_a_message_that_comes_twice_has_its_effect_once(
    server: Server, topic: str, connect: Callable[..., sqlite3.Connection], tmp_path: Path
) -> None:
    """The ack is lost each first time, so everything comes again."""
    path = tmp_path / "shop.db"
    seen_from_here = connect(path)
    seen_from_here.execute("CREATE TABLE paid (id TEXT)")
    server.put(topic, *({"body": n, "id": str(n)} for n in range(20)))
    log = Log()

    def handle(message: Message) -> None:
        database = sqlite3.connect(path, timeout=WAIT_S)
        try:
            with Dedup(database).once(message) as first:
                if first:
                    database.execute("INSERT INTO paid VALUES (?)", (message.id,))
        finally:
            database.close()
        log.add(message.id)
        if message.attempt == 1:
            raise Retry(delay=0)

    with Client(server.url) as client, Consumer(topic, handle, client, concurrency=4):
        log.until(lambda seen: len(seen) == 40)
    assert seen_from_here.execute("SELECT count(*), count(DISTINCT id) FROM paid").fetchone() == (20, 20)
