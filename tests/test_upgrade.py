"""Upgrades: a server takes over data folders of earlier versions (tests/golden), delivers their messages, and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.server_process import Server, run, running

GOLDEN = Path(__file__).resolve().parent / "golden"
# Messages that a new group gets from each topic. All were due in 2023; one of `good` has expired since.
HELD = {
    "leases_1": {"t": 4},
    "unseeded": {"t": 61},
    "v1/clean": {"t": 2},
    "v1/data": {
        "bad_checksum_at_the_end": 3,
        "bad_checksum_in_the_middle": 4,
        "bad_header": 5,
        "damaged_and_torn": 2,
        "good": 3,
        "handed_off": 5,
        "sealed": 6,
        "torn_tail": 3,
        "zero_tail": 5,
    },
}
DAMAGED = ("v1/clean", "v1/data")  # on purpose


def delivered(server: Server, topic: str, count: int) -> list[str]:
    """The ids of all messages that the group gets, each acknowledged: at least so many, and no more if all are there."""
    ids: list[str] = []
    while True:
        wait = 10 if len(ids) < count else 0
        batch = server.ok("POST", f"/v1/topics/{topic}/groups/upgrade/fetch", {"wait": wait})["messages"]
        if not batch:
            return ids
        ids += (got := [message["id"] for message in batch])
        server.ok("POST", f"/v1/topics/{topic}/groups/upgrade/ack", got)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_a_server_goes_on_with_an_earlier_folder(tmp_path: Path, name: str) -> None:
    data = Path(shutil.copytree(GOLDEN / name, tmp_path / "data"))
    with running(data) as server:
        topics = [topic["topic"] for topic in server.ok("GET", "/v1/topics")["topics"]]
        held = {topic: delivered(server, topic, HELD[name].get(topic, 0)) for topic in topics}
        assert {topic: len(ids) for topic, ids in held.items()} == HELD[name]
        assert all(len(set(ids)) == len(ids) for ids in held.values()), "each once"
        for topic in topics:
            server.ok("POST", f"/v1/topics/{topic}/messages", {"id": "new", "body": 1})
    checked = run("check", "--data", str(data))
    assert checked.returncode == (1 if name in DAMAGED else 0), checked.stdout
    with running(data) as server:
        assert {topic: delivered(server, topic, 1) for topic in topics} == {topic: ["new"] for topic in topics}
