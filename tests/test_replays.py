"""Replays into another topic: which messages are copied, nothing twice over crashes and second runs, rates, cancels, rights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import PATIENCE_S, PROGRAM, Server, environment, running
from tests.harness.shard_process import topic_in
from turtlemq.client import Client
from turtlemq.client import errors as client_errors
from turtlemq.client.results import Replay
from turtlemq.engine import Engine
from turtlemq.model import ID_BYTES_MAX, Message, Priority
from turtlemq.server.auth import hash_of, new_token
from turtlemq.settings import Settings
from turtlemq.topic.copies import PAGE, Page, Wanted, copy_id


def copied(engine: Engine, from_ms: int, to_ms: int, wanted: Wanted | None = None) -> list[str]:
    """The ids of the messages that a replay copies."""
    view = engine.topic("t").view
    at, end = view.offsets_between(from_ms, to_ms)
    ids: list[str] = []
    while at < end:
        page: Page = view.copies(at, end, wanted or Wanted(), 0)
        ids += [str(id_).partition("@")[0] for id_ in page.batch.ids or ()]
        at = page.next
    return ids


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    one = Engine.open(tmp_path / "data", settings=Settings(max_attempts=1, segment_bytes=64 << 10))
    yield one
    one.close()


def test_range_is_of_ready_times_without_cancelled_and_sleeping_messages(engine: Engine) -> None:
    for n in range(6):
        engine.submit("t", [Message(b"x", 1_000 * n, id=f"m{n}")], 0)
    engine.submit("t", [Message(b"x", 10**9, id="asleep"), Message(b"x", 10**9, id="ended")], 0)
    for now in range(0, 6_000, 1_000):
        engine.tick(now)
    engine.cancel("t", ["m3", "ended"], 6_000)
    assert copied(engine, 1_000, 5_000) == ["m1", "m2", "m4"]
    assert copied(engine, 1_001, 5_001) == ["m2", "m4", "m5"]
    assert copied(engine, 0, 10_000) == ["m0", "m1", "m2", "m4", "m5"]
    assert copied(engine, 7_000, 10_000) == []


def test_filters_choose_by_state_prefix_and_headers(engine: Engine) -> None:
    shops = [Message(b"x", 0, id=f"a{n}", headers={"shop": str(n % 2), "v": "1"}) for n in range(4)]
    engine.submit("t", [*shops, Message(b"x", 0, id="b0")], 0)
    engine.tick(0)
    engine.reserve("t", "g", 3, 1)
    engine.ack("t", "g", ["a0", "-a1"], 2, error="no")
    choices = {
        ("a0",): Wanted(state="history"),
        ("a1",): Wanted(state="dead"),
        ("a2",): Wanted(state="reserve"),
        ("a3", "b0"): Wanted(state="ready"),
        ("b0",): Wanted(prefix="b"),
        ("a1", "a3"): Wanted(headers={"shop": "1"}),
        ("a3",): Wanted(state="ready", prefix="a", headers={"shop": "1", "v": "1"}),
        (): Wanted(headers={"shop": "2"}),
    }
    assert {tuple(copied(engine, 0, 9, wanted)): wanted for wanted in choices.values()} == choices


def test_copies_keep_everything_but_the_expiry_and_retries_are_passed_over(engine: Engine) -> None:
    message = Message(b"{}", 0, id="m", ttr_ms=5_000, priority=Priority.HIGH, json=True, headers={"h": "1"}, expires_ms=10**6)
    engine.submit("t", [message, *(Message(b"y", 0) for _ in range(2 * PAGE))], 0)
    engine.configure("t", max_attempts=5)
    engine.tick(0)
    engine.reserve("t", "g", 1, 1)
    engine.ack("t", "g", ["-m"], 2, retry_delay_ms=60_000)
    engine.tick(70_000)
    view = engine.topic("t").view
    page = view.copies(*view.offsets_between(0, 10**6), Wanted(prefix="m"), 77)
    assert copied(engine, 0, 10**6).count("m") == 1
    assert (page.batch.bodies, page.batch.due_ms, page.batch.ttr_ms, page.batch.headers) == ([b"{}"], [77], [5_000], [{"h": "1"}])
    assert page.batch.expires_ms is None
    receipt = engine.submit("u", page.batch, 70_000)
    engine.tick(70_000)
    got = engine.reserve("u", "g", 1, 70_000).pieces[0]
    assert got.read.decode(0).flags & 3 == Priority.HIGH
    assert receipt.ids[0].startswith("m@")


def test_ids_of_copies_differ_by_topic_and_life_and_fit() -> None:
    ids = {copy_id(topic, id_, arrived) for topic in ("t", "u") for id_ in ("a", "b", "ä" * 100) for arrived in (1, 2)}
    assert len(ids) == 12
    assert max(len(id_.encode()) for id_ in ids) <= ID_BYTES_MAX


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("replays") / "data") as found:
        yield found


def filled(client: Client, topic: str, count: int) -> int:
    """Messages that are ready, in the order of their ids. Returns a time behind all of them."""
    client.put_many(topic, [{"n": n} for n in range(count)])
    ready = max(message.ready_ms for message in client.fetch(topic, max=count, wait=30))
    while time.time() * 1000 <= ready + 1:
        time.sleep(0.002)
    return ready + 1


def ended(client: Client, job: Replay) -> Replay:
    """A job at its end."""
    end = time.monotonic() + PATIENCE_S
    while job.state == "running":
        assert time.monotonic() < end, job
        time.sleep(0.02)
        job = client.replay_state(job.topic, job.id)
    return job


def test_a_second_run_copies_nothing_of_the_range_again(server: Server) -> None:
    with Client(server.url) as client:
        before = filled(client, "src", 450)
        job = ended(client, client.replay("src", "dst", from_=0, to=before))
        assert (job.state, job.total, job.scanned, job.copied, job.duplicates) == ("done", 450, 450, 450, 0)
        bodies = [message.body["n"] for message in client.fetch("dst", max=1_000, wait=5)]
        assert sorted(bodies) == list(range(450))
        client.put("src", {"n": 450})
        (late,) = client.fetch("src", wait=30)
        again = ended(client, client.replay("src", "dst", from_=0, to=late.ready_ms))
        assert (again.copied, again.duplicates) == (0, 450)
        assert [one.id for one in client.replays("src")] == [job.id, again.id]
        assert client.replay_state("src", job.id).ended_ms is not None
        metrics = server.call("GET", "/metrics").data.decode()
        assert "turtlemq_replayed_messages_total 450" in metrics
        assert "turtlemq_replays_running 0" in metrics
        assert [one.action for one in client.audit("src")][-2:] == ["replay", "replay"]


def test_bad_replays_are_refused_and_make_nothing(server: Server) -> None:
    with Client(server.url) as client:
        client.put("bad", b"x")
        base = {"from_ms": 0, "to_ms": 1, "into": "other"}
        for change, code in (
            ({"into": "bad"}, "INVALID_ARGUMENT"),
            ({"into": "no/topic"}, "INVALID_TOPIC"),
            ({"to_ms": 0}, "INVALID_ARGUMENT"),
            ({"to_ms": 4_000_000_000_000}, "INVALID_ARGUMENT"),
            ({"filter": {"state": "cancelled"}}, "INVALID_ARGUMENT"),
            ({"filter": {"group": "g"}}, "INVALID_ARGUMENT"),
            ({"per_s": 0}, "INVALID_ARGUMENT"),
            ({"delay": -1}, "INVALID_FIRE_AT"),
        ):
            answer = server.call("POST", "/v1/topics/bad/replay", base | change)
            assert (answer.status, answer.code) == (400, code), answer.data
        assert server.call("POST", "/v1/topics/none/replay", base).code == "UNKNOWN_TOPIC"
        assert server.call("GET", "/v1/topics/bad/replays/123456789abc").code == "UNKNOWN_REPLAY"
        assert client.replays("bad") == []
        assert "other" not in {topic.topic for topic in client.topics()}


def test_a_rate_is_kept_and_a_cancel_ends_the_job(server: Server) -> None:
    with Client(server.url) as client:
        before = filled(client, "slow", 3 * PAGE)
        job = client.replay("slow", "slow-copy", from_=0, to=before, per_s=1)
        end = time.monotonic() + PATIENCE_S
        while client.replay_state("slow", job.id).copied == 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert client.replay_state("slow", job.id).copied == PAGE, "the next page comes when its time has come"
        cancelled = client.cancel_replay("slow", job.id)
        assert (cancelled.state, cancelled.copied) == ("cancelled", PAGE)
        assert client.cancel_replay("slow", job.id).state == "cancelled"
        assert client.stats("slow-copy").ready == PAGE
        rest = ended(client, client.replay("slow", "slow-copy", from_=0, to=before))
        assert (rest.copied, rest.duplicates) == (2 * PAGE, PAGE)


def test_after_a_kill_the_next_run_copies_the_rest(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server, Client(server.url) as client:
        before = filled(client, "src", 2 * PAGE)
        job = client.replay("src", "dst", from_=0, to=before, per_s=1)
        end = time.monotonic() + PATIENCE_S
        while client.replay_state("src", job.id).copied == 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with running(tmp_path / "data") as server, Client(server.url) as client:
        (found,) = client.replays("src")
        assert (found.id, found.state) == (job.id, "interrupted")
        assert "begin it again" in found.error
        again = ended(client, client.replay("src", "dst", from_=0, to=before))
        assert (again.copied, again.duplicates) == (PAGE, PAGE)
        left = client.replay("src", "dst-2", from_=0, to=before, per_s=1)
        assert server.stop() == 0
    with running(tmp_path / "data") as server, Client(server.url) as client:
        assert client.replay_state("src", left.id).state == "interrupted"
        assert client.replay_state("src", again.id).state == "done"
        assert server.call("GET", "/v1/topics/src").status == 200


def test_the_other_topic_may_live_in_another_process(tmp_path: Path) -> None:
    secret = new_token()
    tokens = json.dumps([{"name": "me", "hash": hash_of(secret), "rights": ["consume", "produce", "read"]}])
    with (
        running(tmp_path / "data", "--shards", "2", TURTLEMQ_TOKENS=tokens) as server,
        Client(server.url, token=secret) as client,
    ):
        source, into = topic_in(0, 2, "a"), topic_in(1, 2, "b")
        client.put_many(source, [b"\0bytes", {"json": 1}])
        ready = max(message.ready_ms for message in client.fetch(source, wait=30))
        while time.time() * 1000 <= ready + 1:
            time.sleep(0.002)
        job = ended(client, client.replay(source, into, from_=0, to=ready + 1))
        assert (job.state, job.copied, job.error) == ("done", 2, "")
        assert ended(client, client.replay(source, into, from_=0, to=ready + 1)).duplicates == 2
        bodies = [message.body for message in client.fetch(into, max=9, wait=5)]
        assert sorted(bodies, key=str) == [b"\0bytes", {"json": 1}]


def test_a_replay_needs_rights_on_both_topics(tmp_path: Path) -> None:
    secrets = {name: new_token() for name in ("root", "reader", "writer")}
    rights: dict[str, Any] = {
        "root": (["admin"], ["*"]),
        "reader": (["read"], ["*"]),
        "writer": (["read", "produce"], ["src", "dst"]),
    }
    tokens = [{"name": n, "hash": hash_of(s), "rights": rights[n][0], "topics": rights[n][1]} for n, s in secrets.items()]
    with running(tmp_path / "data", TURTLEMQ_TOKENS=json.dumps(tokens)) as server:
        clients = {name: Client(server.url, token=secret) for name, secret in secrets.items()}
        clients["root"].put("src", b"x")
        clients["root"].put("secret", b"x")
        for name, source, into in (("reader", "src", "dst"), ("writer", "secret", "dst"), ("writer", "src", "else")):
            with pytest.raises(client_errors.Forbidden):
                clients[name].replay(source, into, from_=0, to=1)
        begun = clients["writer"].replay("src", "dst", from_=0, to=1)
        assert begun.into == "dst"
        with pytest.raises(client_errors.Forbidden):
            clients["reader"].cancel_replay("src", begun.id)
        assert clients["writer"].cancel_replay("src", begun.id).into == "dst"
        for client in clients.values():
            client.close()


# The command line


def test_the_command_line_shows_the_end_and_ctrl_c_cancels(server: Server) -> None:
    with Client(server.url) as client:
        before = filled(client, "lines", 2 * PAGE)
        line = Line(server.url)
        assert f"done: {2 * PAGE} copied, 0 were" in line(
            "replay", "lines", "--from", "0", "--to", str(before), "--into", "lines-1"
        )
        few = line("replay", "lines", "--from", "0", "--to", str(before), "--into", "lines-2", "--header", "a=b", "--prefix", "t")
        assert few.startswith("done: 0 copied")
        command = [*PROGRAM, "replay", "lines", "--from", "-1h", "--into", "lines-3", "--per-s", "1", "--url", server.url]
        told = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        end = time.monotonic() + PATIENCE_S
        while client.replays("lines")[-1].into != "lines-3" or not client.replays("lines")[-1].copied:
            assert time.monotonic() < end
            time.sleep(0.05)
        told.send_signal(signal.SIGINT)
        out, trouble = told.communicate(timeout=PATIENCE_S)
        assert told.returncode == 1
        assert f"cancelled: {PAGE} copied" in out
        assert "looked at" in trouble
        assert client.replays("lines")[-1].state == "cancelled"
