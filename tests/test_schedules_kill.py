"""Schedules of a real server that is killed again and again: each time is fired exactly once, and none early."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.harness.server_process import Server, running

EVERY_MS, NAMES, KILLS = 200, 5, 4
CATCH_UPS = ("all", "one", "skip")  # which make no difference: each start comes within a minute


def taken(server: Server, count: int) -> list[tuple[str, int]]:
    """Fetch and settle so many firings: ids and due times."""
    out: list[tuple[str, int]] = []
    while len(out) < count:
        got = server.fetch("t", max=count - len(out), wait=5, ack="auto")
        assert all(message["ready_ms"] >= message["due_ms"] for message in got), "never early"
        out += [(message["id"], message["due_ms"]) for message in got]
    return out


@pytest.mark.slow
def test_kills_neither_lose_nor_double_a_firing(tmp_path: Path) -> None:
    chance, fired, first = Random(7), list[tuple[str, int]](), dict[str, int]()
    with running(tmp_path / "data") as server:
        for name in map(str, range(NAMES)):
            given = {"every": EVERY_MS / 1000, "catch_up": CATCH_UPS[int(name) % 3], "body": name}
            first[name] = server.ok("PUT", f"/v1/topics/t/schedules/{name}", given)["next_ms"]
        fired += taken(server, 10)
        server.stop(signal.SIGKILL)
    for _ in range(KILLS):
        with running(tmp_path / "data") as server:
            fired += taken(server, chance.randint(1, 60))
            server.stop(signal.SIGKILL)
    with running(tmp_path / "data") as server:
        for name in first:
            server.ok("POST", f"/v1/topics/t/schedules/{name}/pause")
        left = server.ok("GET", "/v1/topics/t")["stats"]
        fired += taken(server, left["ready"] + left["sleep"])
    assert {id_: count for id_, count in Counter(id_ for id_, _ in fired).items() if count > 1} == {}
    for name, start_ms in first.items():
        times = sorted(due_ms for id_, due_ms in fired if id_ == f"{name}@{due_ms}")
        assert times == list(range(start_ms, start_ms + EVERY_MS * len(times), EVERY_MS)), name
        assert len(times) > KILLS
