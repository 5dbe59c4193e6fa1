"""The ring of minutes behind the charts: counts and quantiles of each minute, bounded memory, changing topics and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.server_process import Server, running
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.server import history_ring
from turtlemq.server.history_ring import COLUMNS, ROWS, TOPICS_MAX, HistoryRing, Ring, columns, no_sample
from turtlemq.server.service import Service

T = 1_790_000_000_000
MINUTE = 60_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine.open(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [T]
    monkeypatch.setattr(history_ring, "now_ms", lambda: now[0])
    return now


def put(engine: Engine, topic: str, count: int, due: int, now: int) -> None:
    engine.submit(topic, [Message(b"x", due_ms=due) for _ in range(count)], now_ms=now)


def test_each_minute_has_its_own_counts_and_quantiles(engine: Engine, clock: list[int]) -> None:
    async def story() -> None:
        service = Service()
        ring = HistoryRing(service)
        put(engine, "t", 5, T + 500, T)
        await ring.add(engine, T + MINUTE)
        engine.tick(T + MINUTE)
        batch = engine.reserve("t", "default", 3, now_ms=T + MINUTE + 40)
        engine.ack("t", "default", [batch.ids[0], f"-{batch.ids[1]}"], now_ms=T + MINUTE + 50)
        service.meter.rejected["DISK_FULL"] += 2
        service.meter.rejected["INVALID_JSON"] += 9
        await ring.add(engine, T + 2 * MINUTE)
        clock[0] = T + 2 * MINUTE + 15_000
        put(engine, "t", 1, T + 10 * MINUTE, clock[0])
        found = await ring.of_all(engine, 0)
        assert list(found) == list(COLUMNS)
        assert found["at_ms"] == [T + MINUTE, T + 2 * MINUTE, clock[0]]
        assert found["seconds"] == [60, 60, 15]
        assert (found["sleep"], found["reserve"]) == ([5, 0, 1], [0, 1, 1])
        assert (found["produced"], found["delivered"]) == ([5, 0, 1], [0, 3, 0])
        assert (found["acked"], found["failed"], found["refused"]) == ([0, 1, 0], [0, 1, 0], [0, 2, 0])
        lateness = found["scheduler_p99_ms"]
        assert lateness[0] is None
        assert lateness[1] is not None
        assert 30_000 < lateness[1] <= 300_000, "59.5 s late"
        assert found["consumer_wait_p99_ms"][2] is None
        assert (await ring.of_all(engine, T + 2 * MINUTE - 1))["seconds"] == [60, 15]
        of_topic = ring.of_topic(engine.topic("t"), 0)
        assert (of_topic["produced"], of_topic["refused"]) == ([5, 0, 1], [0, 0, 0])

    asyncio.run(story())


def test_a_ring_keeps_the_last_day_in_order() -> None:
    ring, sample = Ring(T), no_sample()
    for n in range(ROWS + 7):
        sample = sample.copy()
        sample[4] += n
        ring.add(sample, T + (n + 1) * MINUTE)
    found = columns(ring.rows(0, sample, T + (ROWS + 7) * MINUTE + 1))
    assert found["produced"] == [*range(7, ROWS + 7), 0]
    assert found["at_ms"] == sorted(found["at_ms"])  # type: ignore[type-var]
    assert len(found["at_ms"]) == ROWS + 1


def test_deleted_topics_free_their_rings(engine: Engine, clock: list[int]) -> None:
    async def story() -> None:
        ring = HistoryRing(Service())
        for n in range(TOPICS_MAX + 3):
            put(engine, f"t{n:02}", n + 1, T + 10 * MINUTE, T)
        await ring.add(engine, T + MINUTE)
        assert not ring.of_topic(engine.topic("t00"), 0)["at_ms"], "the busiest have a ring"
        engine.drop_topic("t52")
        await ring.add(engine, T + 2 * MINUTE)
        clock[0] = T + 2 * MINUTE
        assert (await ring.of_all(engine, 0))["produced"] == [sum(range(1, TOPICS_MAX + 4)), 0, 0]
        put(engine, "t52", 4, T + 10 * MINUTE, T + 2 * MINUTE)
        assert not ring.of_topic(engine.topic("t52"), 0)["at_ms"], "another topic of that name"

    asyncio.run(story())


def test_counters_of_another_engine_begin_anew(engine: Engine, tmp_path: Path, clock: list[int]) -> None:
    async def story() -> None:
        ring = HistoryRing(Service())
        put(engine, "t", 3, T + MINUTE, T)
        await ring.add(engine, T + MINUTE)
        clock[0] = T + 2 * MINUTE
        other = Engine.open(tmp_path / "other")
        assert (await ring.of_all(other, 0))["produced"] == [0]
        other.close()

    asyncio.run(story())


def test_a_server_tells_its_history(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.put("orders", {"body": 1, "delay": 900})
        found = server.ok("GET", "/v1/status/history")
        assert (sum(found["produced"]), found["sleep"][-1]) == (1, 1)
        assert columns_are_equally_long(found)
        assert columns_are_equally_long(server.ok("GET", "/v1/topics/orders/history?after_ms=5"))
        assert refused(server, "/v1/topics/none/history") == "UNKNOWN_TOPIC"
        assert refused(server, "/v1/status/history?after_ms=x") == "INVALID_ARGUMENT"
        totals = server.ok("GET", "/v1/status?limit=1&q=ord")["totals"]
        assert (totals["produced"], totals["acked"]) == (1, 0)


def columns_are_equally_long(found: dict[str, list[Any]]) -> bool:
    return list(found) == list(COLUMNS) and len({len(column) for column in found.values()}) == 1


def refused(server: Server, path: str) -> str | None:
    return server.call("GET", path).code
