"""Limits that are reached together, over HTTP: no internal document grows beyond its bound, so no valid request is too large."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.harness.server_process import Server, running

BATCH = 100_000  # messages in a batch, and ids in an ack list
FETCH = 10_000  # messages in a fetch
LONG = "i" * 190  # ids have at most 200 bytes


def put(server: Server, topic: str, count: int, prefix: str = "m") -> None:
    """Messages that are due now."""
    lines = "\n".join(f'{{"id": "{prefix}{i}", "body": 0}}' for i in range(count))
    headers = {"Content-Type": "application/x-ndjson"}
    assert server.call("POST", f"/v1/topics/{topic}/messages", data=lines.encode(), headers=headers).status == 201


def fetch_all(server: Server, topic: str, group: str, count: int, **asked: Any) -> list[str]:
    """All these messages, in flight."""
    ids: list[str] = []
    while len(ids) < count:
        got = server.fetch(topic, group, max=FETCH, wait=10, **asked)
        assert got
        ids += [message["id"] for message in got]
    return ids


def reserve_files(server: Server, topic: str) -> list[Path]:
    return sorted((server.data / "topic" / topic).glob("reserve_*.bson"))


def groups_of(server: Server, topic: str) -> dict[str, Any]:
    return dict(server.ok("GET", f"/v1/topics/{topic}")["groups"])


@pytest.mark.slow
def test_a_state_above_sixteen_mebibytes_is_written_and_read(tmp_path: Path) -> None:
    groups = [f"g{i}" for i in range(8)]
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"segment_bytes": 4 << 20, "ttr": 3600})
        put(server, "t", BATCH)
        for group in groups:
            fetch_all(server, "t", group, BATCH)
        sizes = [file.stat().st_size for file in reserve_files(server, "t")]
        assert sum(sizes) < 5 * 8 * BATCH * 32, "checkpoints are at most half of what was written"
        server.stop(signal.SIGKILL)
    newest = max((tmp_path / "data/topic/t").glob("reserve_*.bson"), key=lambda file: int(file.stem.partition("_")[2]))
    assert newest.stat().st_size > 16 << 20, "it begins with the whole state"
    damaged = bytearray(newest.read_bytes())
    damaged[-40] ^= 1  # in its last event
    newest.write_bytes(damaged)
    (tmp_path / "data/topic/t/offset").unlink()
    with running(tmp_path / "data") as server:
        found = groups_of(server, "t")
        assert all(found[group]["reserve"] + found[group]["ready"] == BATCH for group in groups)
        assert sum(found[group]["reserve"] for group in groups) >= 8 * BATCH - FETCH
        assert server.ack("t", "m0", "m99999")["unknown"] == ["m0", "m99999"], "no group default"
        assert server.ok("POST", "/v1/topics/t/groups/g0/ack", ["m0", "m50000"])["acked"] == 2


@pytest.mark.slow
def test_failures_with_long_errors_of_their_own_are_taken(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"segment_bytes": 8 << 20, "ttr": 3600})
        put(server, "t", 1_100)
        for number, id_ in enumerate(fetch_all(server, "t", "default", 1_100)):
            error = f"{number:04}" + "\U0001f422" * 3_996
            assert server.ack("t", f"-{id_}", error=error, retry_delay=20)["failed"] == 1
        assert len(reserve_files(server, "t")) < 6
        server.stop(signal.SIGKILL)
    with running(tmp_path / "data") as server:
        assert groups_of(server, "t")["default"]["ready"] == 1_100
        assert server.ok("GET", "/v1/topics/t/messages/m7")["groups"]["default"]["error"].startswith("0007\U0001f422")


@pytest.mark.slow
def test_long_ids_are_acknowledged_a_hundred_thousand_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 3600})
        put(server, "t", BATCH, LONG)
        ids = fetch_all(server, "t", "default", BATCH)
        answer = server.ok("POST", "/v1/topics/t/ack", ids)
        assert (answer["acked"], answer["unknown"]) == (BATCH, [])
        server.stop(signal.SIGKILL)
    with running(tmp_path / "data") as server:
        stats = server.ok("GET", "/v1/topics/t")["stats"]
        assert (stats["history"], stats["reserve"], stats["ready"]) == (BATCH, 0, 0)


@pytest.mark.slow
def test_leases_extended_together_die_once(tmp_path: Path) -> None:
    """Each message has one dead letter, and the group counts as many as there are."""
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 3600, "max_attempts": 1})
        put(server, "t", BATCH, LONG)
        ids = fetch_all(server, "t", "default", BATCH)
        assert server.ok("POST", "/v1/topics/t/extend", {"ids": ids, "ttr": 0.001})["extended"] == BATCH
        dead = 0
        while dead < BATCH:
            found = server.ok("GET", "/v1/topics/t")
            assert found["stats"]["dead"] == found["groups"]["default"]["dead"] >= dead
            dead = found["stats"]["dead"]
        stats = server.ok("GET", "/v1/topics/t")["stats"]
        assert (stats["reserve"], stats["dead"]) == (0, BATCH)
        letters = sum(file.stat().st_size for file in (server.data / "topic/t/dead").glob("delay_*.bson"))
        assert letters < BATCH * 700, "none was stored twice"


def seen_meanwhile(server: Server, work: Callable[[], Any], figure: str) -> list[int]:
    """The values of a figure of the topic that other clients see while `work` goes on."""
    seen: list[int] = []
    thread = Thread(target=work)
    thread.start()
    while thread.is_alive():
        seen.append(server.ok("GET", "/v1/topics/t")["stats"][figure])
    thread.join()
    return seen


@pytest.mark.slow
def test_a_long_list_of_failures_lets_others_in_between(tmp_path: Path) -> None:
    count = 3 * FETCH
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 3600, "max_attempts": 1})
        put(server, "t", count)
        ids = fetch_all(server, "t", "default", count)
        answers: list[Any] = []
        acks = [*(f"-{id_}" for id_ in ids), "-m0", "m1", "m1", "-unheard"]
        seen = seen_meanwhile(server, lambda: answers.append(server.ok("POST", "/v1/topics/t/ack", acks)), "dead")
        assert (answers[0]["acked"], answers[0]["failed"], answers[0]["dead"]) == (1, 0, count - 1)
        assert sorted(answers[0]["unknown"]) == ["m0", "m1", "m1", "unheard"]
        assert len({dead for dead in seen if 0 < dead < count - 1}) >= 2
        groups = groups_of(server, "t")
        assert (groups["default"]["dead"], groups["default"]["history"]) == (count - 1, 1)


@pytest.mark.slow
def test_many_deaths_at_once_let_others_in_between(tmp_path: Path) -> None:
    count = 3 * FETCH
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/t", {"ttr": 3600, "max_attempts": 1})
        put(server, "t", count)
        ids = fetch_all(server, "t", "default", count)
        server.ok("POST", "/v1/topics/t/extend", {"ids": ids, "ttr": 0.001})
        seen: list[int] = []
        while not seen or seen[-1] < count:
            seen.append(server.ok("GET", "/v1/topics/t")["stats"]["dead"])
        assert len({dead for dead in seen if 0 < dead < count}) >= 2
