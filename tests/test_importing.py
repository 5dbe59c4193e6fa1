"""`turtlemq import` copies the waiting messages of real servers and of files, once, with their due times, and removes nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from tests.harness.other_queues import beanstalkd_server, redis_server, run_bullmq
from tests.harness.server_process import Server, running
from turtlemq.cli.verbs import command_line
from turtlemq.client import Client
from turtlemq.importing import copy
from turtlemq.importing.bullmq import BullMq
from turtlemq.importing.copy import CopyOptions, copy_messages
from turtlemq.importing.csv_file import CsvFile
from turtlemq.importing.redis_zset import RedisZset
from turtlemq.importing.sqs_json import READ_CHARS, SqsJson

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("importing") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Any]:
    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture(scope="module")
def beanstalkd_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with beanstalkd_server(tmp_path_factory.mktemp("beanstalkd")) as port:
        yield port


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def run_import(server: Server, *args: str, code: int = 0) -> str:
    given = ["import", *args]
    found = CliRunner().invoke(command_line("import"), given, env={"TURTLEMQ_URL": server.url, "COLUMNS": "200"})
    assert found.exit_code == code, (args, found.output, found.exception)
    return found.output


def report(server: Server, *args: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_import(server, *args, "--json", code=code))
    return found


def sleepers(client: Client, topic: str) -> dict[str, tuple[int, Any]]:
    """Due time and body of every sleeper."""
    return {found.id: (found.due_ms, found.value if found.data is None else found.data) for found in client.browse(topic)}


def later_ms(hours: float = 1) -> int:
    return int(time.time() * 1000 + hours * HOUR_MS)


# A sorted set of Redis


def test_a_sorted_set_is_copied_once_and_stays(server: Server, client: Client, redis: Any, redis_url: str) -> None:
    due_ms = later_ms()
    redis.zadd("delayed", {f"job-{n}": due_ms + n for n in range(2_500)})
    redis.hset("bodies", mapping={f"job-{n}": json.dumps({"n": n}) for n in range(2_499)})
    args = ("redis-zset", "zset", "--redis", redis_url, "--key", "delayed", "--bodies", "bodies")
    assert "dry run: 2499 would be put, due " in run_import(server, *args, "--dry-run")
    assert [found.topic for found in client.topics()] == []
    first = report(server, *args, "--batch", "100")
    assert (first["created"], first["duplicates"], first["skipped"]) == (2_499, 0, {"no body": 1})
    again = report(server, *args)
    assert (again["read"], again["created"], again["duplicates"]) == (2_499, 0, 2_499)
    assert sleepers(client, "zset") == {f"job-{n}": (due_ms + n, {"n": n}) for n in range(2_499)}
    assert (redis.zcard("delayed"), redis.hlen("bodies")) == (2_500, 2_499)


def test_members_are_bodies_of_any_kind(server: Server, client: Client, redis: Any, redis_url: str) -> None:
    due_s = time.time() + 3600
    members = [b'{"price": 0.10}', b"close 17", b"\xff\0", b"order-17"]
    redis.zadd("set", dict.fromkeys(members, due_s))
    found = report(server, "redis-zset", "kinds", "--redis", redis_url, "--key", "set", "--id-prefix", "z-")
    assert found["created"] == 4
    stored = sleepers(client, "kinds")
    assert sorted(map(repr, (body for _, body in stored.values()))) == sorted(
        map(repr, [{"price": 0.1}, "close 17", b"\xff\0", "order-17"])
    )
    assert "z-order-17" in stored
    assert all(len(id_) == 34 for id_ in stored if id_ != "z-order-17")
    assert {due for due, _ in stored.values()} == {round(due_s * 1000)}


def test_bodies_may_be_keys_of_their_own(server: Server, client: Client, redis: Any, redis_url: str) -> None:
    due_ms = later_ms()
    redis.zadd("set", {"a": due_ms})
    redis.set("job:a:body", b"text")
    run_import(server, "redis-zset", "keys", "--redis", redis_url, "--key", "set", "--body-key", "job:{}:body", "--score", "ms")
    assert sleepers(client, "keys") == {"a": (due_ms, "text")}


def test_a_range_of_due_times_leaves_the_rest(server: Server, client: Client, redis: Any, redis_url: str) -> None:
    dues = {f"h{hours}": later_ms(hours) for hours in (0, 1, 2, 3)}
    redis.zadd("set", dues)
    args = ("redis-zset", "range", "--redis", redis_url, "--key", "set", "--due-from", "+30m", "--due-to", str(dues["h3"]))
    assert report(server, *args)["skipped"] == {"due outside of the range": 2}
    assert sleepers(client, "range").keys() == {"h1", "h2"}


def test_sources_that_cannot_be_read_are_named(server: Server, redis: Any, redis_url: str) -> None:
    redis.set("text", "x")
    assert "is a string, not a zset" in run_import(server, "redis-zset", "t", "--redis", redis_url, "--key", "text", code=1)
    assert "there is no key" in run_import(server, "redis-zset", "t", "--redis", redis_url, "--key", "none", code=1)
    assert "there is no queue" in run_import(server, "bullmq", "t", "--redis", redis_url, "--queue", "none", code=1)
    gone = "redis://me:secret@127.0.0.1:9/0"
    said = run_import(server, "redis-zset", "t", "--redis", gone, "--key", "k", code=1)
    assert "no answer from redis://127.0.0.1:9/0" in said
    assert "secret" not in said
    assert "no answer from beanstalkd" in run_import(server, "beanstalkd", "t", "--port", "9", code=1)
    run_import(server, "redis-zset", "t", "--key", "k", "--score", "days", code=2)
    run_import(server, "redis-zset", "t", "--key", "k", "--body-key", "job", code=2)
    run_import(server, "csv", "t", "none.csv", "--column", "nonsense=x", code=2)
    assert "none.csv" in run_import(server, "csv", "t", "none.csv", code=1)


# BullMQ


def test_jobs_of_bullmq_are_copied_with_their_due_times(server: Server, client: Client, redis: Any, redis_url: str) -> None:
    added = run_bullmq(
        redis_url,
        """
        const queue = new Queue("mails", { connection });
        const jobs = await queue.addBulk([
          { name: "remind", data: { to: "ada" }, opts: { jobId: "a", delay: 3600000, attempts: 4 } },
          { name: "remind", data: { to: "bert" }, opts: { delay: 7200000, priority: 5 } },
          { name: "welcome", data: ["now"] },
          { name: "welcome", data: "urgent", opts: { priority: 3 } },
        ]);
        await queue.upsertJobScheduler("nightly", { every: 86400000, offset: 1000 }, { name: "tidy", data: 1 });
        const worker = new Worker("mails", null, { connection, autorun: false });
        await queue.add("taken", { by: "a worker" }, { lifo: true });
        const taken = await worker.getNextJob("token");
        const found = [];
        for (const job of await queue.getDelayed()) found.push([job.id, job.timestamp + job.delay, job.data]);
        return { ids: jobs.map((job) => job.id), taken: taken.data, delayed: found };
        """,
    )
    assert added["taken"] == {"by": "a worker"}
    args = ("bullmq", "mails", "--redis", redis_url, "--queue", "mails")
    keys = {key: redis.dump(key) for key in redis.scan_iter()}
    assert report(server, *args)["skipped"] == {"active: a worker has it": 1}
    assert report(server, *args)["created"] == 0
    assert {key: redis.dump(key) for key in redis.scan_iter()} == keys
    delayed = {f"mails-{id_}": (due_ms, data) for id_, due_ms, data in added["delayed"] if data != 1}
    stored = sleepers(client, "mails")
    assert {id_: found for id_, found in stored.items() if found[1] != 1} == delayed
    assert len(delayed) == 2
    view = client.get("mails", "mails-a")
    assert view.headers | {"bullmq-timestamp": ""} == {"bullmq-name": "remind", "bullmq-attempts": "4", "bullmq-timestamp": ""}
    assert client.get("mails", f"mails-{added['ids'][1]}").priority == "low"
    ready = {json.dumps(found.body): found for found in client.fetch("mails", max=10, wait=5)}
    assert ready.keys() >= {'["now"]', '"urgent"'}
    assert (ready['["now"]'].priority, ready['"urgent"'].priority) == ("normal", "low")


def test_a_list_of_bullmq_that_grows_is_read_whole(redis: Any) -> None:
    def add(name: str) -> None:
        redis.hset(f"bull:q:{name}", mapping={"name": "n", "data": "1", "opts": "{}", "timestamp": "1", "priority": "0"})
        redis.lpush("bull:q:wait", name)

    redis.hset("bull:q:meta", "version", "bullmq")
    names = [f"n{number}" for number in range(20)]
    for name in names:
        add(name)
    found = []
    for number, (_, messages) in enumerate(BullMq(redis, "q", "").batches(4)):
        found += [message.id for message in messages]
        if number < 3:
            add(f"new{number}")
            redis.rpop("bull:q:wait")
    assert set(found) >= set(names[3:])


# beanstalkd


def beanstalk(port: int, *commands: bytes) -> list[bytes]:
    """The first line of the answer to each command."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection, connection.makefile("rwb") as stream:
        lines = []
        for command in commands:
            stream.write(command)
            stream.flush()
            lines.append(stream.readline().strip())
            if lines[-1].startswith((b"OK", b"RESERVED", b"FOUND")):
                stream.read(int(lines[-1].split()[-1]) + 2)
        return lines


def put_job(body: bytes, delay: int = 0, priority: int = 65_536) -> bytes:
    return b"put %d %d 90 %d\r\n%b\r\n" % (priority, delay, len(body), body)


def test_jobs_of_a_tube_are_copied_and_stay(server: Server, client: Client, beanstalkd_port: int) -> None:
    jobs = [put_job(b'{"n": %d}' % n, delay=3600) for n in range(30)]
    begun_ms = time.time() * 1000
    beanstalk(beanstalkd_port, b"use other\r\n", put_job(b"of another tube", 3600))
    beanstalk(beanstalkd_port, b"use orders\r\n", *jobs, put_job(b"due now", priority=0))
    beanstalk(beanstalkd_port, b"use orders\r\n", put_job(b"first"), b"watch orders\r\n", b"reserve\r\n", b"bury 32 0\r\n")
    args = ("beanstalkd", "jobs", "--port", str(beanstalkd_port), "--tube", "orders", "--batch", "7")
    assert report(server, *args, "--dry-run")["read"] == 31
    first = report(server, *args)
    assert first["created"] == 31
    assert first["skipped"] == {"buried: ask for it with --buried": 1}
    again = report(server, *args, "--buried")
    assert (again["created"], again["duplicates"]) == (1, 31)
    stored = sleepers(client, "jobs")
    assert [stored[f"orders-{n + 2}"][1] for n in range(30)] == [{"n": n} for n in range(30)]
    assert all(begun_ms + HOUR_MS - 2_000 < due_ms <= time.time() * 1000 + HOUR_MS for due_ms, _ in stored.values())
    ready = {found.body: found for found in client.fetch("jobs", max=10, wait=5)}
    assert ready["first"].priority == "normal" if "first" in ready else ready["due now"].priority == "high"
    assert client.get("jobs", "orders-2").ttr == 90
    assert beanstalk(beanstalkd_port, b"use orders\r\n", b"peek 2\r\n", b"peek-delayed\r\n")[1].startswith(b"FOUND 2 ")
    assert b"turtlemq-import-probe" not in _tubes(beanstalkd_port)


def _tubes(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"list-tubes\r\n")
        return connection.recv(65_536)


# Files


def test_a_csv_file_is_copied_once(server: Server, client: Client, tmp_path: Path) -> None:
    due_ms = later_ms()
    rows = [f'{n},{due_ms + n},"{{""n"": {n}}}",en' for n in range(1_500)]
    (tmp_path / "orders.csv").write_text("\n".join(["order,close_at,body,header.lang", *rows]))
    args = ("csv", "csv", str(tmp_path / "orders.csv"), "--column", "id=order", "--column", "due=close_at", "--id-prefix", "o-")
    assert run_import(server, *args) == "1500 read: 1500 created, 0 duplicates, 0 refused\n"
    assert run_import(server, *args, "--per-s", "100000") == "1500 read: 0 created, 1500 duplicates, 0 refused\n"
    assert sleepers(client, "csv") == {f"o-{n}": (due_ms + n, {"n": n}) for n in range(1_500)}
    assert client.get("csv", "o-7").headers == {"lang": "en"}


def test_rows_without_ids_have_the_same_ids_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("body;delay\nsame;60\nsame;60\n")
    args = ("csv", "rows", str(tmp_path / "f.csv"), "--delimiter", ";")
    assert report(server, *args)["created"] == 2
    assert report(server, *args)["duplicates"] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,text\n1,2\n", "no column 'body'; it has: id, text"),
        ("body,due\n1,2\n2,tomorrow\n", "row 2: 'tomorrow' is no time"),
        ("body,ttr\n1,long\n", "row 1: "),
        ('body\n"half', "line 2: unexpected end of data"),
    ],
)
def test_a_bad_csv_file_is_refused_with_its_row(server: Server, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.csv").write_text(text)
    assert said in run_import(server, "csv", "bad", str(tmp_path / "f.csv"), code=1)


def test_refused_messages_are_named_and_the_rest_is_stored(server: Server, client: Client, tmp_path: Path) -> None:
    rows = [f"m{n},{'later' if n in (3, 5) else 'low'},60" for n in range(8)]
    (tmp_path / "f.csv").write_text("\n".join(["body,priority,delay", *rows, f"far,low,{9e9}"]))
    args = ("csv", "refused", str(tmp_path / "f.csv"))
    found = report(server, *args, code=1)
    assert (found["created"], len(found["refused"])) == (6, 3)
    assert {body for _, body in sleepers(client, "refused").values()} == {"m0", "m1", "m2", "m4", "m6", "m7"}
    assert "6 duplicates, 3 refused" in run_import(server, *args, code=1)


def test_messages_of_sqs_are_copied(server: Server, client: Client, tmp_path: Path) -> None:
    sent_ms = later_ms()
    received = {
        "Messages": [
            {
                "MessageId": "5fea7756-0ea4-451a-a703-a558b933e274",
                "ReceiptHandle": "x/y",
                "Body": '{"close": 17}',
                "Attributes": {"SentTimestamp": str(sent_ms)},
                "MessageAttributes": {
                    "lang": {"StringValue": "en", "DataType": "String"},
                    "deliver-at": {"StringValue": "2033-01-01T00:00:00Z", "DataType": "String"},
                },
            }
        ]
    }
    entries = {"Entries": [{"Id": "two", "MessageBody": "text", "DelaySeconds": 900}]}
    single = {"MessageId": "three", "Body": "x", "Attributes": {"SentTimestamp": str(sent_ms)}, "DelaySeconds": 60}
    file = tmp_path / "received.json"
    file.write_text("\n".join([json.dumps(received, indent=2), json.dumps(entries), json.dumps(single), "[]"]))
    before_ms = time.time() * 1000
    assert report(server, "sqs-json", "sqs", str(file), "--due-attribute", "deliver-at")["created"] == 3
    stored = sleepers(client, "sqs")
    assert stored["5fea7756-0ea4-451a-a703-a558b933e274"] == (1_988_150_400_000, {"close": 17})
    assert client.get("sqs", "5fea7756-0ea4-451a-a703-a558b933e274").headers == {"lang": "en"}
    assert stored["three"] == (sent_ms + 60_000, "x")
    assert before_ms + 899_000 < stored["two"][0]
    file.write_text('{"Messages": [{"Body": "without an id"}]}')
    assert "message 1: a message has a Body and a MessageId" in run_import(server, "sqs-json", "sqs", str(file), code=1)
    file.write_text('{"Messages": [')
    assert "is no JSON" in run_import(server, "sqs-json", "sqs", str(file), code=1)


def test_a_large_file_of_sqs_is_read_in_pieces(tmp_path: Path) -> None:
    bodies = ["x" * size for size in (10, 3 * READ_CHARS, 10, 700_000, 700_000)]
    lines = [json.dumps({"MessageId": str(n), "Body": body}) for n, body in enumerate(bodies)]
    (tmp_path / "f.json").write_text("\n \n".join(lines))
    found = [message for _, batch in SqsJson(tmp_path / "f.json").batches(2) for message in batch]
    assert [message.body for message in found] == bodies


# Copies


def test_a_copy_that_broke_goes_on_when_run_again(server: Server, client: Client, redis: Any) -> None:
    redis.zadd("set", {f"m{n}": later_ms() for n in range(1_000)})

    class Breaks(RedisZset):
        def batches(self, count: int) -> Iterator[Any]:
            for number, batch in enumerate(super().batches(count)):
                if number == 3:
                    raise ConnectionError("gone")
                yield batch

    with pytest.raises(ConnectionError):
        copy_messages(Breaks(redis, "set"), "broken", client, CopyOptions(batch=100))
    first = client.stats("broken").sleep
    assert 0 < first < 1_000
    report = copy_messages(RedisZset(redis, "set"), "broken", client, CopyOptions(batch=100))
    assert (report.created, report.duplicates) == (1_000 - first, first)


def test_a_dry_run_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("body,due\n1,1893456000\n")
    report = copy_messages(CsvFile(tmp_path / "f.csv"), "t", None, CopyOptions())
    assert (report.read, report.first_ms, report.created) == (1, 1_893_456_000_000, 0)


def test_many_refused_messages_end_a_copy(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("body,priority\n" + "x,none\n" * 101)
    assert "more than 100 messages are refused" in run_import(server, "csv", "wrong", str(tmp_path / "f.csv"), code=1)


def test_a_rate_is_kept(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.csv").write_text("body\n" + "x\n" * 250)
    now_s, sizes = [0.0], list[int]()

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(copy, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0], time_ns=time.time_ns))
    copy_messages(CsvFile(tmp_path / "f.csv"), "rate", client, CopyOptions(per_s=100), sizes.append)
    assert (sizes, now_s) == ([100, 100, 50], [2.5])


def test_a_batch_that_is_too_large_for_a_request_is_split(server: Server, client: Client, tmp_path: Path) -> None:
    sizes = [10, 3 << 20, 3 << 20, 10]
    rows = [f"m{number},{'x' * size},3600" for number, size in enumerate(sizes)]
    (tmp_path / "f.csv").write_text("\n".join(["id,body,delay", *rows]))
    assert report(server, "csv", "large", str(tmp_path / "f.csv"))["created"] == 4
    assert {id_: len(body) for id_, (_, body) in sleepers(client, "large").items()} == {f"m{n}": sizes[n] for n in range(4)}
