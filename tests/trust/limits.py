"""Every documented limit, walked to its edge and one beyond, alone and in pairs.

At the edge a request succeeds; beyond it the documented error comes and nothing has changed. After each walk another topic still
works, the server is killed, and the next one has the same figures and passes every check. The tables "Limits" in docs/HTTP.md and
docs/OPERATIONS.md name the limits; each has a walk here or a reason why it has none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.server_process import running
from tests.trust.kills import calm, check_copy
from tests.trust.limits_ground import MESSAGES, TOPIC, Ground, Limit, as_json, long_ids
from tests.trust.limits_pairs import PAIRS
from tests.trust.limits_timers import TIMERS
from tests.trust.model import Broken, Figures, Part
from turtlemq.model import BATCH_MESSAGES_MAX, BODY_BYTES_MAX, DUE_MS_MAX, HEADERS_BYTES_MAX, ID_BYTES_MAX, TTR_MS_MAX

_TOPIC = f"/v1/topics/{TOPIC}"
Walk = Callable[[Ground], None]
STALLED = "stalled: "
STALL_TRIES = 3  # a virtual machine may stand still for a moment; work that is too long stalls the loop every time


def _field(name: str, edge: Any, beyond: Any, status: int, code: str) -> tuple[Walk, Walk]:
    """Walks for a field of a message."""
    return (
        lambda ground: _put_one(ground, {"body": 1} | {name: edge}),
        lambda ground: ground.refuses(status, code, "POST", MESSAGES, {"messages": [{"body": 0}, {"body": 1} | {name: beyond}]}),
    )


def _put_one(ground: Ground, message: dict[str, Any]) -> None:
    ground.put([message])


def _post(path: str, edge: Any, beyond: Any, status: int, code: str) -> tuple[Walk, Walk]:
    """Walks for a value in the body of a request about the topic."""
    return (
        lambda ground: ground.ok("POST", _TOPIC + path, edge),
        lambda ground: ground.refuses(status, code, "POST", _TOPIC + path, beyond),
    )


def _get(path: str, edge: Any, beyond: Any) -> tuple[Walk, Walk]:
    """Walks for a value in a query."""
    return (
        lambda ground: ground.ok("GET", f"{_TOPIC}{path}{edge}"),
        lambda ground: ground.refuses(400, "INVALID_ARGUMENT", "GET", f"{_TOPIC}{path}{beyond}"),
    )


# Names and messages


def _name_edge(ground: Ground) -> None:
    ground.put([{"body": 1}], "n" * 200)
    ground.ok("POST", f"/v1/topics/{'n' * 200}/groups/{'g' * 200}/fetch", {})


def _name_beyond(ground: Ground) -> None:
    ground.refuses(400, "INVALID_TOPIC", "POST", f"/v1/topics/{'n' * 201}/messages", {"body": 1})
    ground.refuses(400, "INVALID_ARGUMENT", "POST", f"{_TOPIC}/groups/{'g' * 201}/fetch", {})


def _body_edge(ground: Ground) -> None:
    ground.ok("POST", MESSAGES, data=as_json({"id": "large", "body": "x" * (BODY_BYTES_MAX - 2)}))
    (message,) = ground.ok("POST", f"{_TOPIC}/fetch", {"max": 1, "wait": 5})["messages"]
    if len(message["body"]) != BODY_BYTES_MAX - 2:
        raise Broken("the largest body came back with another length")
    ground.ok("POST", f"{_TOPIC}/ack", ["-large"])


def _body_beyond(ground: Ground) -> None:
    ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, data=as_json({"body": "x" * (BODY_BYTES_MAX - 1)}))


def _headers(size: int) -> dict[str, str]:
    return {"a": "x" * (size - len("a") - 7)}


def _depth(levels: int) -> bytes:
    return b'{"id":"deep","body":' + b"[" * levels + b"]" * levels + b"}"


def _depth_edge(ground: Ground) -> None:
    ground.ok("POST", MESSAGES, data=_depth(DEPTH_MAX))
    (message,) = ground.ok("POST", f"{_TOPIC}/fetch", {"max": 1, "wait": 5})["messages"]
    value, levels = message["body"], 1
    while value:
        (value,), levels = value, levels + 1
    if levels != DEPTH_MAX:
        raise Broken(f"{DEPTH_MAX} levels came back as {levels}")


# Batches and lists


def _batch_edge(ground: Ground) -> None:
    ids = ground.put({"body": n} for n in range(BATCH_MESSAGES_MAX))
    if len(set(ids)) != BATCH_MESSAGES_MAX:
        raise Broken("a batch of the greatest number of messages has fewer ids")


def _batch_beyond(ground: Ground) -> None:
    ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, {"messages": [{"body": 1}] * (BATCH_MESSAGES_MAX + 1)})


def _lists_edge(ground: Ground) -> None:
    """Every request that names ids, with ids of the greatest length: extend, ack, cancel, and dead letters."""
    ids = long_ids(BATCH_MESSAGES_MAX)
    ground.ok("PUT", _TOPIC, {"max_attempts": 1})
    ground.put({"body": 1, "id": id_} for id_ in ids)
    ground.fetch(len(ids), wait=10, ttr=600)
    _same(ground.ok("POST", f"{_TOPIC}/extend", {"ids": ids, "ttr": 600})["extended"], len(ids), "extended")
    _same(ground.ok("POST", f"{_TOPIC}/ack", [f"-{id_}" for id_ in ids])["dead"], len(ids), "dead")
    _same(ground.ok("POST", f"{_TOPIC}/dead/requeue", {"ids": ids})["requeued"], len(ids), "requeued")
    ground.fetch(len(ids), wait=10, ttr=600)
    _same(ground.ok("POST", f"{_TOPIC}/ack", ids)["acked"], len(ids), "acked")
    ground.put({"body": 1, "id": f"s{id_[1:]}", "delay": 3_600} for id_ in ids)
    _same(ground.ok("POST", f"{_TOPIC}/cancel", {"ids": [f"s{id_[1:]}" for id_ in ids]})["cancelled"], len(ids), "cancelled")


def _lists_beyond(ground: Ground) -> None:
    ids = [str(n) for n in range(BATCH_MESSAGES_MAX + 1)]
    ground.put([{"body": 1}])
    for path, value in (
        ("ack", ids),
        ("extend", {"ids": ids, "ttr": 5}),
        ("cancel", {"ids": ids}),
        ("dead/requeue", {"ids": ids}),
        ("dead/delete", {"ids": ids}),
    ):
        ground.refuses(413, "TOO_LARGE", "POST", f"{_TOPIC}/{path}", value)


def _same(got: int, wanted: int, what: str) -> None:
    if got != wanted:
        raise Broken(f"{got:,} of {wanted:,} {what}")


def _request_edge(ground: Ground) -> None:
    ground.ok("POST", MESSAGES, data=_padded(1 << 20))


def _request_beyond(ground: Ground) -> None:
    ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, data=_padded((1 << 20) + 1))


def _padded(size: int) -> bytes:
    data = as_json({"body": 1})
    return data + b" " * (size - len(data))


def _fetch_bytes_edge(ground: Ground) -> None:
    """Three bodies of 15 MiB are more than one answer has: they come in several, and all come."""
    for n in range(3):
        ground.ok("POST", MESSAGES, data=as_json({"id": str(n), "body": "x" * (15 << 20)}))
    got: list[str] = []
    for _ in range(3):
        got += [message["id"] for message in ground.ok("POST", f"{_TOPIC}/fetch", {"max": 10_000, "wait": 5})["messages"]]
        if len(got) == 3:
            break
    _same(len(set(got)), 3, "large messages fetched")


def _head(ground: Ground, fields: int, value_bytes: int) -> tuple[int, str]:
    headers = {f"x-{n}": "v" * value_bytes for n in range(fields)}
    answer = ground.server.call("GET", "/v1/topics", headers=headers)
    return answer.status, answer.json.get("error", {}).get("code", "")


def _head_edge(ground: Ground) -> None:
    for fields, value_bytes in ((90, 10), (1, 8_000)):
        if (seen := _head(ground, fields, value_bytes))[0] != 200:
            raise Broken(f"{fields} fields of {value_bytes} bytes: {seen}")


def _head_beyond(ground: Ground) -> None:
    for fields, value_bytes in ((101, 10), (1, 8_400)):
        if (seen := _head(ground, fields, value_bytes)) != (400, "INVALID_ARGUMENT"):
            raise Broken(f"{fields} fields of {value_bytes} bytes: {seen}")
        ground.refused += 1


# The server


def _topics_edge(ground: Ground) -> None:
    for n in range(5):
        ground.ok("PUT", f"/v1/topics/n{n}", {})


def _topics_beyond(ground: Ground) -> None:
    ground.refuses(400, "INVALID_ARGUMENT", "PUT", "/v1/topics/n5", {})
    ground.refuses(400, "INVALID_ARGUMENT", "POST", "/v1/topics/n6/messages", {"body": 1})
    ground.ok("DELETE", "/v1/topics/n0")  # there is room again


def _groups_edge(ground: Ground) -> None:
    ground.put([{"body": 1}])
    for n in range(3):
        ground.ok("POST", f"{_TOPIC}/groups/g{n}/fetch", {})


def _groups_beyond(ground: Ground) -> None:
    ground.refuses(400, "INVALID_ARGUMENT", "POST", f"{_TOPIC}/groups/g3/fetch", {})
    ground.ok("DELETE", f"{_TOPIC}/groups/g0")
    ground.ok("POST", f"{_TOPIC}/groups/g3/fetch", {})


def _connections_edge(ground: Ground) -> None:
    held = [_connect(ground) for _ in range(6)]  # and one more for the next request
    ground.ok("GET", "/v1/topics")
    for connection in held:
        connection.close()
    time.sleep(0.3)


def _connections_beyond(ground: Ground) -> None:
    held = [_connect(ground) for _ in range(40)]
    answer = ground.server.call("GET", "/v1/topics")
    if (answer.status, answer.code) != (429, "OVERLOADED"):
        raise Broken(f"more connections than allowed: {answer.status} {answer.data[:200]!r}")
    ground.refused += 1
    for connection in held:
        connection.close()
    _until(lambda: ground.server.call("GET", "/v1/topics").status == 200, "connections that were closed still count")


def _connect(ground: Ground) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ground.server.port))


def _until(condition: Callable[[], bool], otherwise: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Broken(otherwise)
        time.sleep(0.05)


def _polls(ground: Ground, many: int) -> list[socket.socket]:
    held = [_connect(ground) for _ in range(many)]
    body = as_json({"wait": 30})
    head = f"POST {_TOPIC}/fetch HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    for connection in held:
        connection.sendall(head.encode() + body)
    _until(lambda: bool(ground.ok("GET", "/v1/status")["long_polls"] == many), f"{many} long polls do not all wait")
    return held


def _polls_edge(ground: Ground) -> None:
    ground.ok("PUT", _TOPIC, {})
    held = _polls(ground, 2)
    ground.refuses(429, "OVERLOADED", "POST", f"{_TOPIC}/fetch", {"wait": 30})
    ground.ok("POST", f"{_TOPIC}/fetch", {"wait": 0})  # a fetch that does not wait is always answered
    for connection in held:
        connection.close()
    _until(lambda: bool(ground.ok("GET", "/v1/status")["long_polls"] == 0), "long polls of clients that are gone still wait")


def _in_flight_edge(ground: Ground) -> None:
    ground.ok("PUT", _TOPIC, {"max_in_flight": 10})
    ground.put({"body": n, "id": str(n)} for n in range(20))
    _same(len(ground.fetch(10, ttr=600)), 10, "messages fetched")
    more = ground.ok("POST", f"{_TOPIC}/fetch", {"max": 10})["messages"]
    _same(len(more), 0, "messages above max_in_flight")


def _in_flight_beyond(ground: Ground) -> None:
    ground.refuses(400, "INVALID_ARGUMENT", "PUT", _TOPIC, {"max_in_flight": 1_000_001})


def _rate_edge(ground: Ground) -> None:
    ground.ok("PUT", _TOPIC, {"rate": {"produce_per_s": 0.001, "burst": 5}})
    ground.put({"body": n} for n in range(5))


def _rate_beyond(ground: Ground) -> None:
    ground.refuses(429, "RATE_LIMITED", "POST", MESSAGES, {"body": 1})


def _dead_edge(ground: Ground) -> None:
    """Above `dead.max_count` the oldest letters go, at the next retention."""
    ground.ok("PUT", _TOPIC, {"max_attempts": 1, "dead": {"max_count": 5}})
    ids = ground.put({"body": n} for n in range(9))
    ground.fetch(len(ids), wait=5)
    _same(ground.ok("POST", f"{_TOPIC}/ack", [f"-{id_}" for id_ in ids])["dead"], len(ids), "dead")
    ground.ok("POST", f"{_TOPIC}/compact")
    _until(lambda: bool(ground.ok("GET", _TOPIC)["stats"]["dead"] <= 5), "more dead letters than dead.max_count", 90)


def _nothing(_: Ground) -> None:
    """There is nothing beyond: the edge itself is the walk."""


DEPTH_MAX = 100
LIMITS = (
    Limit("id", *_field("id", "i" * ID_BYTES_MAX, "i" * (ID_BYTES_MAX + 1), 400, "INVALID_ID")),
    Limit("name of a topic or group", _name_edge, _name_beyond),
    Limit("body of a message", _body_edge, _body_beyond),
    Limit(
        "headers of a message",
        *_field("headers", _headers(HEADERS_BYTES_MAX), _headers(HEADERS_BYTES_MAX + 1), 413, "TOO_LARGE"),
    ),
    Limit(
        "depth of a body",
        _depth_edge,
        lambda ground: ground.refuses(400, "INVALID_JSON", "POST", MESSAGES, data=_depth(DEPTH_MAX + 1)),
    ),
    Limit("due time", *_field("due_ms", DUE_MS_MAX, DUE_MS_MAX + 1, 400, "INVALID_FIRE_AT")),
    Limit("ttr", *_field("ttr", TTR_MS_MAX / 1000, (TTR_MS_MAX + 1) / 1000, 400, "INVALID_MESSAGE")),
    Limit("messages of a batch", _batch_edge, _batch_beyond),
    *TIMERS,
    Limit("body of a request", _request_edge, _request_beyond, {"TURTLEMQ_MAX_BODY_BYTES": str(1 << 20)}),
    Limit("messages of a fetch", *_post("/fetch", {"max": 10_000}, {"max": 10_001}, 400, "INVALID_ARGUMENT")),
    Limit("bytes of a fetch", _fetch_bytes_edge, _nothing),
    Limit("wait of a fetch", *_post("/fetch", {"wait": 0.1}, {"wait": 60.1}, 400, "INVALID_ARGUMENT")),
    Limit("consumer", *_post("/fetch", {"consumer": "c" * 200}, {"consumer": "c" * 201}, 400, "INVALID_ARGUMENT")),
    Limit(
        "error of a failure",
        *_post("/ack", {"acks": ["-x"], "error": "e" * 4_000}, {"acks": ["-x"], "error": "e" * 4_001}, 400, "INVALID_ACK_LIST"),
    ),
    Limit("page of a listing", *_get("/messages?state=sleep&limit=", 10_000, 10_001)),
    Limit("buckets of a forecast", *_get("/forecast?bucket=1&hours=", 100_000 / 3_600, 100_002 / 3_600)),
    Limit("head of a request", _head_edge, _head_beyond),
    Limit("topics", _topics_edge, _topics_beyond, {"TURTLEMQ_MAX_TOPICS": "5"}),
    Limit("groups of a topic", _groups_edge, _groups_beyond, {"TURTLEMQ_MAX_GROUPS": "3"}),
    Limit("connections", _connections_edge, _connections_beyond, {"TURTLEMQ_MAX_CONNECTIONS": "8"}),
    Limit("long polls", _polls_edge, _nothing, {"TURTLEMQ_MAX_WAITING": "2"}),
    Limit("messages in flight", _in_flight_edge, _in_flight_beyond),
    Limit("rates", _rate_edge, _rate_beyond),
    Limit("dead letters", _dead_edge, _nothing),
    Limit("ids of a request", _lists_edge, _lists_beyond),
)
WALKS = (*LIMITS, *PAIRS)


def run(cases: range, folder: Path) -> Figures:
    """One walk each: first the limits alone, then the pairs."""
    seen = Figures()
    for case in cases:
        limit, found, stalls = WALKS[case % len(WALKS)], Figures(), 1
        for attempt in range(STALL_TRIES):
            place = folder / f"{case}-{attempt}"
            place.mkdir()
            try:
                found, stalls = walk(limit, place)
            except Broken as error:
                raise Broken(f"case {case} ({limit.name}): {error}") from error
            if not stalls:
                break
        seen.update(found)
        if stalls:
            seen[f"{STALLED}{limit.name}"] += 1
    return seen


def sum_up(seen: Figures) -> str:
    """No walk holds the event loop too long. Judged over a whole run, which has the machine for itself."""
    if stalled := [name.removeprefix(STALLED) for name in seen if name.startswith(STALLED)]:
        raise Broken(f"the event loop was held too long in each of {STALL_TRIES} tries: {', '.join(stalled)}")
    return "no stall of the event loop"


def walk(limit: Limit, place: Path) -> tuple[Figures, int]:
    """Walk to one limit and beyond; then kill the server. Returns the figures and how often the event loop was held too long."""
    data = place / "data"
    with running(data, **limit.options) as server:
        ground = Ground(server)
        if limit.name not in ("topics", "connections"):
            ground.ok("PUT", _TOPIC, {})
        limit.edge(ground)
        limit.beyond(ground)
        ground.works()
        stalls, before = server.stalls, ground.figures()
        server.process.kill()
        server.process.wait()
    check_copy(data, place / "copy", limit.name)
    with running(data, **limit.options) as server:
        after = Ground(server).figures()
        if _settled(after) != _settled(before):
            raise Broken(f"after a kill the figures are {after}, and were {before}")
    calm(place, limit.name)
    return Figures({"walks": 1, "refusals": ground.refused}), stalls


def _settled(figures: dict[str, Any]) -> dict[str, Any]:
    """All messages of a topic that are not settled: a lease that has ended meanwhile changes no sum."""
    return {name: counts["to come"] + counts["reserve"] + counts["dead"] for name, counts in figures.items()}


PART = Part(
    name="limits",
    unit="walks",
    about=(
        "Every documented limit to its edge and one beyond, alone and in pairs: success, then the documented error and no "
        "change, no stall of the event loop, bounded memory, and the same figures after a kill."
    ),
    run=run,
    quick=len(LIMITS) - 2,  # the last ones take a minute each
    full=len(WALKS),
    chunk=1,
    alone=True,
    sum_up=sum_up,
    must=("walks",),
)
