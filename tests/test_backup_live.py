"""A server in use is backed up while nothing moves in it, and another one on the restored folder tells the very same story."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.backup_traffic import Traffic, line
from tests.harness.server_process import Server, running
from turtlemq.lifecycle import STATES

HOUR = 3_600
PRIORITIES = ("high", "normal", "low")
SIZES = ("bytes", "segments", "live_ratio")  # of files, which a start may put in order


def populate(server: Server, topic: str, sign: str) -> None:
    """Messages in every state that there is, in two groups that have come to different places."""
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": 2, "ttr": 1_800, "backoff": {"base": 2, "max": 900}})
    for group in ("default", "audit"):
        server.ok("PUT", f"/v1/topics/{topic}/groups/{group}", {"start": "earliest"})
    names = ("done", "fails-soon", "fails-late", "dies", "held")
    server.put(topic, *(message(f"{sign}-{name}", n) for n, name in enumerate(names)))
    take(server, topic, "default", {f"{sign}-{name}" for name in names})
    server.ack(topic, f"{sign}-done", f"-{sign}-dies", retry_delay=0, error=f"the first time, {sign}")
    server.ack(topic, f"-{sign}-fails-soon", retry_delay=25, error="soon")  # waits in memory
    server.ack(topic, f"-{sign}-fails-late", retry_delay=900, error="late")  # sleeps
    take(server, topic, "default", {f"{sign}-dies"})
    server.ack(topic, f"-{sign}-dies", error=f"for good, {sign}")
    take(server, topic, "audit", {f"{sign}-done", f"{sign}-held"}, consumer="auditor", ttr=900)
    server.ok("POST", f"/v1/topics/{topic}/groups/audit/ack", [f"{sign}-done"])
    server.put(topic, *(message(f"{sign}-sleeps-{n}", n, delay=HOUR + n) for n in range(9)))
    server.put(topic, *(message(f"{sign}-ready-{n}", n) for n in range(6)))
    server.ok("DELETE", f"/v1/topics/{topic}/messages/{sign}-sleeps-0")
    server.ok("PATCH", f"/v1/topics/{topic}/messages/{sign}-sleeps-1", {"delay": 2 * HOUR, "headers": {"why": "later"}})
    until(lambda: len(listed(server, topic, "ready")) >= 6)
    server.ok("DELETE", f"/v1/topics/{topic}/messages/{sign}-ready-0")


def message(id_: str, n: int, delay: float = 0) -> dict[str, Any]:
    """One with something of its own in every field."""
    own = {"headers": {"n": str(n), "größe": "ä" * n}, "priority": PRIORITIES[n % 3]}
    times = {"ttr": 600 + n} | ({"expires_ms": 4 * 10**12 + n} if n % 2 else {})
    return {"id": id_, "body": {"is": id_, "n": n}, "delay": delay, **own, **times}


def take(server: Server, topic: str, group: str, wanted: set[str], **asked: Any) -> None:
    """Fetch until these are in hand."""
    got: set[str] = set()
    while not wanted <= got:
        found = server.fetch(topic, group, max=1 if group == "audit" else 10, wait=5, **asked)
        assert found, (wanted, got)
        got |= {one["id"] for one in found}


def until(done: Any) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def listed(server: Server, topic: str, state: str) -> list[dict[str, Any]]:
    return pages(server, f"/v1/topics/{topic}/messages?state={state}&limit=1000")


def pages(server: Server, path: str) -> list[dict[str, Any]]:
    """All messages of a listing."""
    out, cursor = [], ""
    while True:
        page = server.ok("GET", f"{path}{cursor}")
        out += page["messages"]
        if page["cursor"] is None:
            return out
        cursor = f"&cursor={page['cursor']}"


def dump(server: Server) -> dict[str, Any]:
    """All that a server tells of its topics."""
    out: dict[str, Any] = {}
    for told in server.ok("GET", "/v1/topics")["topics"]:
        name = told["topic"]
        base = f"/v1/topics/{name}"
        out[name] = {
            "stats": {field: value for field, value in told["stats"].items() if field not in SIZES},
            "settings": told["settings"],
            "groups": {group: figures(server.ok("GET", f"{base}/groups/{group}")["stats"]) for group in told["groups"]},
            **{state: listed(server, name, state) for state in STATES},
            "dead letters": pages(server, f"{base}/dead?limit=1000"),
            "causes": server.ok("GET", f"{base}/dead/summary"),
            "export": sorted(server.call("GET", f"{base}/dead/export").data.splitlines()),
        }
        ids = {one["id"] for state in STATES for one in out[name][state]}
        out[name]["views"] = {} if name == "busy" else {id_: server.ok("GET", f"{base}/messages/{id_}") for id_ in sorted(ids)}
    return out


def figures(group: dict[str, Any]) -> dict[str, Any]:
    """Of `offset` and `lag` the sum: fetches that pass nothing but cancelled messages are not noted."""
    return {
        **{name: group[name] for name in ("ready", "reserve", "history", "dead", "changed_ms")},
        "end": group["offset"] + group["lag"],
    }


def at_rest(server: Server) -> bool:
    """Nothing comes due or ends for a while."""
    found = server.ok("GET", "/v1/topics/busy")["stats"]
    return bool(found["reserve"] == 0 and found["next_due_ms"] > (time.time() + 60) * 1000)


@pytest.mark.slow
def test_a_backup_of_a_running_server_holds_everything_as_it_was(tmp_path: Path) -> None:
    data, into, again = tmp_path / "data", tmp_path / "bk", tmp_path / "other" / "again"
    again.parent.mkdir()
    with running(data) as server:
        server.ok("PUT", "/v1/topics/busy", {"segment_bytes": 65_536, "compact_live_ratio": 0.9, "beat": 0.02})
        populate(server, "orders", "o")
        populate(server, "mails", "m")
        with Traffic(server) as traffic:
            until(lambda: len(traffic.put) > 1_000 and len(traffic.acked) > 200)
        until(lambda: at_rest(server))
        before = dump(server)
        told = json.loads(line("backup", into, "--data", data, "--json", url=server.url))
        assert told["live"]
        assert told["damage"] == []
        assert dump(server) == before, "nothing moved meanwhile"
        with Traffic(server) as traffic:  # messages that come after it are not in it
            until(lambda: len(traffic.acked) > 200)
    line("restore", told["backup"], "--data", again)
    with running(again) as server:
        after = dump(server)
        for topic, whole in before.items():
            for what, value in whole.items():
                assert after[topic][what] == value, (topic, what)
        assert after == before
    there = Counter(
        state for topic in ("orders", "mails") for view in before[topic]["views"].values() for state in states_of(view)
    )
    assert there.keys() == set(STATES) | {"waits"}, there
    assert sum("lease_until_ms" in group for one in before["orders"]["views"].values() for group in one["groups"].values()) >= 3
    line("check", "--data", again)


def states_of(view: dict[str, Any]) -> set[str]:
    """A message's own state and those in its groups; `waits`: for another attempt, in memory."""
    groups = view["groups"].values()
    waits = {"waits" for group in groups if group["state"] == "ready" and group.get("attempt")}
    return {view["state"], *(group["state"] for group in groups)} | waits
