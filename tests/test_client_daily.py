"""The client in daily work: types of applications, mistakes that are told, results with the outcome of each message."""

from __future__ import annotations

import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from tests.harness.client_network import WAIT_S, Log, Shell, proxied, server, settled, shell, topic
from tests.harness.server_process import Server
from turtlemq.client import AsyncClient, AsyncConsumer, AsyncProducer, Client, Consumer, NewMessage, Producer, Retry, errors
from turtlemq.client.arguments import CLIENT_NAMES, CONSUMER_NAMES, PRODUCER_NAMES
from turtlemq.client.consumer_state import ERROR_CHARS_MAX, ConsumerOptions, error_text
from turtlemq.client.fetched import Message
from turtlemq.client.results import StoredId

__all__ = ["server", "shell", "topic"]
ROOT = Path(__file__).parents[1]


@dataclass
class Order:
    number: int
    at: datetime | None = None


class Bill(pydantic.BaseModel):
    number: int
    at: datetime | None = None


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


# Errors of handlers


def test_a_handler_that_raises_leaves_its_traceback_in_the_log(
    server: Server, shell: Shell, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    server.put(topic, {"body": {}})

    def handle(message: Message) -> None:
        message.body["missing"]

    with caplog.at_level(logging.WARNING, "turtlemq.client"), shell.consumer(topic, handle, server.url):
        settled(server, topic, dead=1)
    (record,) = [record for record in caplog.records if "event=handler_failed" in record.message]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    assert 'message.body["missing"]' in caplog.text


def raised(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_the_text_of_an_error_has_the_last_frames() -> None:
    error = ValueError("deep")

    def fall(depth: int) -> None:
        fall_on(depth)

    def fall_on(depth: int) -> None:
        if depth:
            fall(depth - 1)
        raise error

    with pytest.raises(ValueError, match="deep"):
        fall(100)
    text = error_text(error)
    assert text.startswith("ValueError: deep\n  File ")
    assert text.endswith("raise error")
    assert text.count("\n  File ") == 5
    assert error_text(raised("x")).count("\n  File ") == 1
    assert len(error_text(raised("y" * 9_000))) == ERROR_CHARS_MAX
    assert "raise ValueError(text)" in error_text(raised("y" * 9_000))
    assert error_text(Retry("later")) == "later"


# Names of arguments


def test_typed_arguments_are_those_of_the_classes() -> None:
    assert (*CONSUMER_NAMES,) == tuple(ConsumerOptions.__dataclass_fields__)[1:]
    own = {name for name, one in inspect.signature(Client).parameters.items() if one.kind is not one.VAR_KEYWORD}
    assert own == set(CLIENT_NAMES)
    for kind in (Producer, AsyncProducer):
        keywords = [one.name for one in inspect.signature(kind).parameters.values() if one.kind is one.KEYWORD_ONLY]
        assert (*keywords,) == PRODUCER_NAMES


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Consumer("t", print, concurency=3), "Consumer has no argument 'concurency'; did you mean 'concurrency'?"),  # type: ignore[call-arg]
        (lambda: AsyncConsumer("t", print, tokn=""), "AsyncConsumer has no argument 'tokn'; did you mean 'token'?"),  # type: ignore[arg-type, call-arg]
        (lambda: Producer("t", lingr=3), "Producer has no argument 'lingr'; did you mean 'linger'?"),  # type: ignore[call-arg]
        (lambda: Consumer("t", print, xyz=1), "Consumer has no argument 'xyz'; it has ack_count, "),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_names_the_class_and_a_near_name(make: Any, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value).startswith(told)


def test_a_misspelt_argument_fails_in_mypy(tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(
        "from datetime import timedelta\n"
        "from turtlemq.client import Client, Consumer, Producer, AsyncConsumer, AsyncProducer\n"
        "Consumer('t', print, Client(), concurrency=3, ttr=timedelta(minutes=1))\n"
        "Producer('t', linger=0.1, token='x').put(1, delay=timedelta(minutes=1))\n"
        "Consumer('t', print, concurency=3)\n"
        "Producer('t', tokn='x')\n"
        "AsyncProducer('t', tokn='x')\n"
        "Client().put('t', 1, dely=3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}/cache", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in lines] == [5, 6, 7, 8], done.stdout + done.stderr
    assert all("Unexpected keyword argument" in line for line in lines)


# Times and bodies


def test_timedeltas_and_datetimes_say_when(client: Client, topic: str) -> None:
    due = datetime(2040, 1, 1, tzinfo=UTC)
    client.put_many(
        topic,
        [NewMessage(body=1, id="a", delay=timedelta(hours=1)), NewMessage(body=b"1", id="b", due=due, ttr=timedelta(minutes=1))],
    )
    a, b = client.get(topic, "a"), client.get(topic, "b")
    assert round((a.due_ms - a.created_ms) / 3_600_000, 1) == 1.0
    assert (b.due_ms, b.ttr) == (2_208_988_800_000, 60)
    assert round((client.reschedule(topic, "b", delay=timedelta(days=1)) - a.created_ms) / 86_400_000, 1) == 1.0
    assert client.reschedule(topic, "b", due=due) == 2_208_988_800_000
    client.put(topic, 1, id="c")
    (c,) = client.fetch(topic, wait=timedelta(seconds=5), ttr=timedelta(minutes=2))
    assert client.extend(topic, [c.id], timedelta(minutes=3)).extended == 1
    assert client.fail(topic, [c.id], retry_delay=timedelta(hours=2)).failed == 1
    assert Retry(delay=timedelta(minutes=2)).delay == 120.0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"due": datetime(2040, 1, 1)}, "a datetime needs its time zone"),  # noqa: DTZ001 - that is the point
        ({"due": timedelta(hours=1)}, "a timedelta is a delay"),
        ({"delay": datetime(2040, 1, 1, tzinfo=UTC)}, "delay is seconds or a timedelta"),
        ({"delay": timedelta(hours=-1)}, "delay is seconds or a timedelta"),
    ],
)
def test_a_time_that_is_none_is_refused(client: Client, topic: str, fields: Any, told: str) -> None:
    with pytest.raises(errors.InvalidFireAt, match=told):
        client.put(topic, 1, **fields)


def test_seconds_that_are_none_are_refused(client: Client, topic: str) -> None:
    for wrong in (lambda: client.fetch(topic, ttr="5"), lambda: client.extend(topic, ["a"], float("nan"))):  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="ttr is a number of seconds or a timedelta"):
            wrong()


def test_models_go_in_as_bodies(client: Client, topic: str) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    client.put_many(topic, [Order(1, at), Bill(number=2, at=at), {"all": [Bill(number=3)]}, StoredId("a", True)])
    bodies = [message.body for message in client.fetch(topic, wait=5)]
    assert [body["number"] for body in bodies[:2]] == [1, 2]
    assert bodies[2:] == [{"all": [{"number": 3, "at": None}]}, "a"]
    with pytest.raises(errors.InvalidMessage, match="object has no JSON form"):
        client.put(topic, object())


@pytest.mark.parametrize("kind", [Order, Bill])
@pytest.mark.parametrize("body", [{"number": 1, "at": "2030-01-01T00:00:00Z"}, b'{"number": 1, "at": "2030-01-01T00:00:00Z"}'])
def test_a_body_comes_out_as_a_type(client: Client, topic: str, kind: Any, body: Any) -> None:
    client.put(topic, body)
    (message,) = client.fetch(topic, wait=5)
    assert message.as_type(kind) == kind(number=1, at=datetime(2030, 1, 1, tzinfo=UTC))
    assert message.as_type(bytes) == body if isinstance(body, bytes) else message.as_type(dict) == body
    with pytest.raises(errors.BodyMismatch, match=r"the body of message '.*' is no int"):
        message.as_type(int)


@pytest.mark.parametrize("batch", [0, 10])
def test_a_consumer_gives_bodies_of_its_type(server: Server, shell: Shell, topic: str, batch: int) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    server.put(topic, {"body": {"number": 1}, "id": "a"}, {"body": {"number": "one"}, "id": "b"})
    log = Log()

    def handle(given: Any) -> None:
        for message in given if batch else [given]:
            log.add(message.body)

    with shell.consumer(topic, handle, server.url, body=Order, batch=batch):
        settled(server, topic, dead=1, history=1)
    assert log.seen == [Order(1)]
    (letter,) = server.ok("GET", f"/v1/topics/{topic}/dead")["messages"]
    assert letter["error"].startswith("the body of message 'b' is no Order: Expected `int`, got `str`")


# Lists, failures, results


def test_a_text_where_a_list_belongs_is_refused(client: Client, topic: str) -> None:
    calls = [client.ack, client.fail, client.extend, client.cancel_many, client.requeue_dead, client.delete_dead]
    for call in calls:
        with pytest.raises(errors.InvalidArgument, match=r"ids are a list, not one text: \['order'\]"):
            call(topic, "order")  # type: ignore[operator]
    for one in ("order", b"order", {"body": 1}):
        with pytest.raises(errors.InvalidArgument, match="put_many takes a list"):
            client.put_many(topic, one)


def test_failed_messages_are_told_with_their_error(client: Client, topic: str) -> None:
    client.configure(topic, max_attempts=1)
    client.put_many(topic, [NewMessage(body=1, id=id_) for id_ in "ab"])
    assert len(client.fetch(topic, wait=5)) == 2
    done = client.fail(topic, ["a", "b", "c"], error="no such customer")
    assert (done.failed, done.dead, done.unknown) == (0, 2, ["c"])
    assert client.dead_summary(topic).errors == {"no such customer": 2}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_shows_the_signature_of_a_method(kind: Any) -> None:
    signature = str(inspect.signature(kind.ack))
    assert signature.startswith("(self, topic: ")
    assert signature.endswith("-> 'Acked'")
    assert str(inspect.signature(kind.cancel)).endswith("-> 'None'")
    assert str(inspect.signature(kind("http://x").ack)).startswith("(topic: ")


def test_a_put_tells_whether_it_stored(client: Client, topic: str) -> None:
    first, second = client.put(topic, 1, id="a"), client.put(topic, 2, id="a")
    assert (first, second, first.created, second.created) == ("a", "a", True, False)
    assert pickle.loads(pickle.dumps(second)).created is False
    many = client.put_many(topic, [NewMessage(body=1, id=id_) for id_ in "bac"])
    assert (many, many.created, many.duplicates) == (["b", "a", "c"], [True, False, True], ["a"])
    assert msgspec.json.encode(many) == b'["b","a","c"]'


@pytest.mark.parametrize("size", [1, 12_000])
def test_a_list_of_any_length_tells_its_duplicates(client: Client, topic: str, size: int) -> None:
    ids = [str(n) for n in range(size)]
    assert client.put_many(topic, [NewMessage(body=1, id=id_) for id_ in ids]).created == [True] * size
    again = client.put_many(topic, [NewMessage(body=1, id=id_) for id_ in [*ids, "new"]])
    assert again.duplicates == ids
    assert again.created[-1] is True


def test_a_producer_tells_which_puts_were_stored(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "b"})
    with shell.producer(topic, server.url, linger=0.2) as producer:
        puts = [producer.put(id_, id=id_) for id_ in "abc"]
        producer.flush()
        assert [put.created for put in puts] == [True, False, True]


def test_a_lost_answer_leaves_it_open_whether_a_put_stored(server: Server, topic: str) -> None:
    with proxied(server.port) as proxy, Client(proxy.url, timeout=WAIT_S) as client:
        proxy.set("cut-answer", 1)
        assert client.put(topic, 1, id="a").created is None
        assert client.put(topic, 1, id="a").created is False
