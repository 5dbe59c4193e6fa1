"""Limits in pairs: two of them reached at the same time, where their product is the danger."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

from tests.trust.limits_ground import TOPIC, Ground, Limit, as_json, long_ids
from tests.trust.model import Broken
from turtlemq.model import BATCH_MESSAGES_MAX

_TOPIC = f"/v1/topics/{TOPIC}"
GROUPS = 1_000
FLIGHT = 100_000
POLLS = 800  # long polls at once; many systems let a process open 1,024 files


def _nothing(_: Ground) -> None:
    """The pair itself is the walk: there is no request beyond it."""


def _groups_times_ids(ground: Ground) -> None:
    """As many groups as are allowed, and every request that names many ids or lists many messages."""
    for n in range(GROUPS):
        ground.ok("POST", f"{_TOPIC}/groups/g{n}/fetch", {})
    ids = long_ids(BATCH_MESSAGES_MAX)
    ground.put({"body": 1, "id": id_} for id_ in ids)
    for path in ("messages?state=ready&limit=1000", f"messages/{ids[7]}", "stats", "groups"):
        ground.server.call("GET", f"{_TOPIC}/{path}")
    unknown = [f"u{id_[1:]}" for id_ in ids]
    answer = ground.ok("POST", f"{_TOPIC}/cancel", {"ids": unknown[:5_000]})
    if answer["cancelled"]:
        raise Broken(f"unknown ids are cancelled: {answer['cancelled']}")
    cancelled = ground.ok("POST", f"{_TOPIC}/cancel", {"ids": ids[:20_000]})["cancelled"]
    if cancelled != 20_000:
        raise Broken(f"{cancelled:,} of 20,000 ready messages are cancelled")
    again = ground.ok("POST", f"{_TOPIC}/messages", {"messages": [{"body": 1, "id": id_} for id_ in ids]})
    if again["duplicates"] != BATCH_MESSAGES_MAX - 20_000:  # cancelled ids are free again
        raise Broken(f"{again['duplicates']:,} of {BATCH_MESSAGES_MAX - 20_000:,} known ids are duplicates")


def _dead_letters_times_groups(ground: Ground) -> None:
    """Every group has a dead letter of one message, retention has removed the first files, and a batch of own ids comes."""
    ground.ok("PUT", _TOPIC, {"max_attempts": 1, "segment_bytes": 4_096, "retention": {"history_hours": 0}})
    ground.put({"body": "x" * 100, "id": str(n)} for n in range(200))
    for n in range(GROUPS):
        if ground.fetch(1, f"g{n}", ttr=600) != ["0"]:
            raise Broken("the first message of a group is not the oldest one")
        ground.ok("POST", f"{_TOPIC}/groups/g{n}/ack", ["-0"])
    ground.ok("POST", f"{_TOPIC}/compact")
    ground.put({"body": 1, "id": f"own-{n}"} for n in range(10_000))
    groups = ground.ok("GET", f"{_TOPIC}/messages/0")["groups"]
    if [group["state"] for group in groups.values()] != ["dead"] * GROUPS:
        raise Broken(f"message 0 is dead in {GROUPS:,} groups, and not in all of {len(groups):,}")
    ground.ok("GET", f"{_TOPIC}/messages?state=dead&limit=1000")
    if (count := ground.ok("POST", f"{_TOPIC}/dead/requeue", {"ids": ["0"], "delay": 3_600})["requeued"]) != GROUPS:
        raise Broken(f"{count:,} of {GROUPS:,} dead letters are requeued")


def _groups_times_retries(ground: Ground) -> None:
    """Every group failed the same messages: the retries of some are ready in all groups, those of the others sleep in all."""
    ready, asleep = [f"ready-{n}" for n in range(10)], [f"asleep-{n}" for n in range(10)]
    for n in range(GROUPS):
        ground.ok("PUT", f"{_TOPIC}/groups/g{n}", {})
    ground.put({"body": 1, "id": id_} for id_ in ready + asleep)
    for n in range(GROUPS):
        ground.fetch(20, f"g{n}", wait=10, ttr=600)
        for ids, delay_s in ((ready, 31), (asleep, 3_600)):
            ground.ok("POST", f"{_TOPIC}/groups/g{n}/ack", {"acks": [f"-{id_}" for id_ in ids], "retry_delay": delay_s})
    end = time.monotonic() + 120
    while (count := ground.ok("GET", _TOPIC)["stats"]["ready"]) < GROUPS * len(ready):
        if time.monotonic() > end:
            raise Broken(f"{count:,} retries are ready")
        time.sleep(1)
    page = ground.ok("GET", f"{_TOPIC}/messages?state=ready&limit=1000")
    listed = [message["id"] for message in page["messages"]]
    while page["cursor"] is not None:
        page = ground.ok("GET", f"{_TOPIC}/messages?state=ready&limit=1000&cursor={page['cursor']}")
        listed += [message["id"] for message in page["messages"]]
    if listed != ready:
        raise Broken(f"{listed} are listed as ready, not {ready}")
    for path in (f"messages/{ready[0]}", f"messages/{asleep[0]}", "messages?state=sleep&limit=10000"):
        ground.ok("GET", f"{_TOPIC}/{path}")
    if (count := ground.ok("POST", f"{_TOPIC}/cancel", {"ids": ready + asleep})["cancelled"]) != 20:
        raise Broken(f"{count} of 20 messages are cancelled")


def _errors_times_in_flight(ground: Ground) -> None:
    """The state of a topic at its largest: eight groups with as much in flight as is allowed, and failures with long errors."""
    for at in range(0, FLIGHT, 50_000):
        ground.put({"body": 1, "id": f"{at + n}"} for n in range(50_000))
    for n in range(8):
        ground.fetch(FLIGHT, f"g{n}", wait=10, ttr=600)
    ground.ok("PUT", _TOPIC, {"backoff": {"base": 20, "jitter": "none"}})
    for n in range(1_200):
        ground.ok("POST", f"{_TOPIC}/groups/g0/ack", {"acks": [f"-{n}"], "error": f"{n:04d}".ljust(4_000, "e")})
    ground.ok("POST", f"{_TOPIC}/compact")
    ground.fetch(10, "late", ttr=600)


def _extend_times_attempts(ground: Ground) -> None:
    """One extend of everything in flight, and then every lease ends with the last attempt: each message is buried once."""
    ids = long_ids(FLIGHT)
    ground.ok("PUT", _TOPIC, {"max_attempts": 1})
    ground.put({"body": 1, "id": id_} for id_ in ids)
    ground.fetch(FLIGHT, wait=10, ttr=600)
    ground.ok("POST", f"{_TOPIC}/extend", {"ids": ids, "ttr": 2})
    _until_dead(ground, FLIGHT)
    size = _bytes(ground.server.data)
    time.sleep(3)
    stats, after = ground.ok("GET", _TOPIC)["stats"], _bytes(ground.server.data)
    if stats["dead"] != FLIGHT or after > 1.2 * size + (1 << 20):
        raise Broken(f"{stats['dead']:,} dead letters of {FLIGHT:,} messages, files grew from {size:,} to {after:,} bytes")


def _until_dead(ground: Ground, count: int) -> None:
    end = time.monotonic() + 120
    while (dead := ground.ok("GET", _TOPIC)["stats"]["dead"]) < count:
        if time.monotonic() > end:
            raise Broken(f"{dead:,} of {count:,} messages are dead")
        time.sleep(0.2)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def _headers_times_batch(ground: Ground) -> None:
    """A request of the greatest size, of messages that are nearly all headers."""
    headers = {"h": "x" * 32_000}
    ids = ground.put({"body": 1, "headers": headers} for _ in range(2_000))
    got = ground.fetch(len(ids), wait=10)
    if sorted(got) != sorted(ids):
        raise Broken(f"{len(got):,} of {len(ids):,} messages with large headers came")


def _topics_times_descriptors(ground: Ground) -> None:
    """More topics written in one beat than the process may have files open. Each request succeeds, or may be repeated."""
    refused = 0
    for turn in range(3):
        for n in range(200):
            while (answer := ground.server.call("POST", f"/v1/topics/n{n}/messages", {"id": str(turn), "body": 1})).status != 201:
                refused += 1
                if answer.status not in (429, 503) or refused > 2_000:
                    raise Broken(f"topic n{n}: {answer.status} {answer.data[:200]!r} after {refused} refusals")
                time.sleep(0.05)
    for path in ("/readyz", "/metrics"):
        if ground.server.call("GET", path).status != 200:
            raise Broken(f"{path} is not served")
    held = sum(counts["to come"] for name, counts in ground.figures().items() if name.startswith("n"))
    if held != 600:
        raise Broken(f"{held} of 600 accepted messages are there")


def _deaths_times_tick(ground: Ground) -> None:
    """A consumer with as much in flight as is allowed vanishes, and every message has had its last attempt."""
    ground.ok("PUT", _TOPIC, {"max_attempts": 1})
    ground.put({"body": n} for n in range(FLIGHT))
    ground.fetch(FLIGHT, wait=10, ttr=5)
    _until_dead(ground, FLIGHT)


def _failures_times_list(ground: Ground) -> None:
    """One list of failures of everything in flight: with a short back-off, then with a long one."""
    for backoff_s, group in ((1, "short"), (3_600, "long")):
        ground.ok("PUT", _TOPIC, {"backoff": {"base": backoff_s, "jitter": "none"}})
        if group == "short":
            ground.put({"body": n} for n in range(FLIGHT))
        ids = ground.fetch(FLIGHT, group, wait=10, ttr=600)
        failed = ground.ok("POST", f"{_TOPIC}/groups/{group}/ack", {"acks": [f"-{id_}" for id_ in ids], "error": "no"})["failed"]
        if failed != FLIGHT:
            raise Broken(f"{failed:,} of {FLIGHT:,} messages failed")


def _topics_times_requests(ground: Ground) -> None:
    """Every request that is about all topics, with many of them."""
    for n in range(1_000):
        ground.put([{"body": 1, "delay": 3_600}], f"many-{n}")
    for path in ("/v1/topics", "/metrics", "/v1/status", "/readyz"):
        ground.server.call("GET", path)
    ground.server.call("POST", "/v1/command", {"command": "delete", "id": "unknown"})


def _expiry_times_fetch(ground: Ground) -> None:
    """The largest batch expires before any consumer asks for it: the fetches bury it, whether they ask for many or for one."""
    end = time.time_ns() // 1_000_000 + 4_000
    groups = {"many": 10_000, "one": 1}
    for group in groups:
        ground.ok("POST", f"{_TOPIC}/groups/{group}/fetch", {})
    ground.put({"body": 1, "expires_ms": end} for _ in range(BATCH_MESSAGES_MAX // 5))
    time.sleep(max(0.0, end / 1000 - time.time()))
    for group, count in groups.items():
        if came := ground.ok("POST", f"{_TOPIC}/groups/{group}/fetch", {"max": count})["messages"]:
            raise Broken(f"{len(came)} expired messages came to group {group}")
    _until_dead(ground, len(groups) * BATCH_MESSAGES_MAX // 5)


def _groups_times_polls(ground: Ground) -> None:
    """A long poll of every group waits, and one message becomes ready for all of them."""
    for n in range(POLLS):
        ground.ok("PUT", f"{_TOPIC}/groups/g{n}", {})
    connections = [http.client.HTTPConnection("127.0.0.1", ground.server.port, timeout=60) for _ in range(POLLS)]
    try:
        for n, connection in enumerate(connections):
            asked = as_json({"wait": 60, "ttr": 600})
            connection.request("POST", f"{_TOPIC}/groups/g{n}/fetch", asked, {"Content-Type": "application/json"})
        while ground.ok("GET", "/v1/status")["long_polls"] < POLLS:
            time.sleep(0.05)
        (id_,) = ground.put([{"body": 1}])
        for n, connection in enumerate(connections):
            came = [message["id"] for message in json.load(connection.getresponse())["messages"]]
            if came != [id_]:
                raise Broken(f"{came} came to group g{n}, not {id_}")
    finally:
        for connection in connections:
            connection.close()


PAIRS = (
    Limit("groups × long polls", _groups_times_polls, _nothing, {"TURTLEMQ_MAX_GROUPS": str(GROUPS)}),
    Limit("expiry × fetch", _expiry_times_fetch, _nothing),
    Limit("deaths × tick", _deaths_times_tick, _nothing),
    Limit("failures × list", _failures_times_list, _nothing),
    Limit("topics × requests", _topics_times_requests, _nothing),
    Limit("groups × ids", _groups_times_ids, _nothing, {"TURTLEMQ_MAX_GROUPS": str(GROUPS)}),
    Limit("groups × retries", _groups_times_retries, _nothing, {"TURTLEMQ_MAX_GROUPS": str(GROUPS)}),
    Limit("dead letters × groups", _dead_letters_times_groups, _nothing, {"TURTLEMQ_MAX_GROUPS": str(GROUPS)}),
    Limit("errors × in flight", _errors_times_in_flight, _nothing),
    Limit("extend × max_attempts", _extend_times_attempts, _nothing),
    Limit("headers × batch", _headers_times_batch, _nothing),
    Limit("topics × descriptors", _topics_times_descriptors, _nothing, {}, files=256),
)
