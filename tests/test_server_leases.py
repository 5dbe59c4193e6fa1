"""Leases over real HTTP: a fetch names its lease, and acks and extends that name one touch no lease of another consumer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bson
import pytest

from tests.harness.server_process import Server, running

LEASE = "X-Turtlemq-Lease"
HOUR = 3_600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("leases") / "data") as found:
        yield found
        assert "Traceback" not in found.log


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")[:100]


def fetch(server: Server, topic: str, **asked: Any) -> tuple[list[str], str]:
    """The ids and the lease of a fetch that waits for the first message."""
    out = server.ok("POST", f"/v1/topics/{topic}/fetch", {"wait": 20, "ttr": HOUR, **asked})
    return [message["id"] for message in out["messages"]], out["lease"]


def extend(server: Server, topic: str, *ids: str, **more: Any) -> Any:
    return server.ok("POST", f"/v1/topics/{topic}/extend", {"ids": ids, "ttr": HOUR, **more})


def handed_on(server: Server, topic: str) -> tuple[str, str]:
    """A message whose first holder lost its lease: the leases of the first and of the second holder."""
    server.put(topic, {"body": 1, "id": "m"})
    _, first = fetch(server, topic, ttr=0.05)
    ids, second = fetch(server, topic)
    assert (ids, first != second) == (["m"], True)
    return first, second


def state(server: Server, topic: str, id_: str = "m") -> str:
    return str(server.ok("GET", f"/v1/topics/{topic}/messages/{id_}")["groups"]["default"]["state"])


# A late holder


def test_a_late_failure_leaves_the_message_to_its_holder(server: Server, topic: str) -> None:
    first, second = handed_on(server, topic)
    told = server.ack(topic, "-m", lease=first, retry_delay=0)
    assert told == {"acked": 0, "failed": 0, "dead": 0, "unknown": [], "late": ["m"]}
    assert server.fetch(topic, wait=0.2) == [], "the second holder has it"
    assert f'turtlemq_late_total{{topic="{topic}",group="default"}} 1' in server.call("GET", "/metrics").data.decode()
    assert server.ack(topic, "m", lease=second) == {"acked": 1, "failed": 0, "dead": 0, "unknown": [], "late": []}
    assert state(server, topic) == "history"


def test_a_late_success_does_not_end_the_work_of_another(server: Server, topic: str) -> None:
    first, second = handed_on(server, topic)
    assert server.ack(topic, "m", lease=[first])["late"] == ["m"]
    assert state(server, topic) == "reserve"
    assert server.ack(topic, "-m", lease=[second], retry_delay=HOUR)["failed"] == 1


def test_a_late_extend_is_told_so(server: Server, topic: str) -> None:
    first, second = handed_on(server, topic)
    assert extend(server, topic, "m", ttr=0.01, lease=first) == {"extended": 0, "unknown": [], "late": ["m"]}
    time.sleep(0.1)
    assert state(server, topic) == "reserve"
    assert extend(server, topic, "m", lease=second) == {"extended": 1, "unknown": [], "late": []}
    assert server.ack(topic, "m", lease=second)["acked"] == 1, "the lease is still the same"


def test_answers_without_a_lease_are_as_they_were(server: Server, topic: str) -> None:
    handed_on(server, topic)
    assert extend(server, topic, "m", "x") == {"extended": 1, "unknown": ["x"]}
    assert server.ack(topic, "m", "x") == {"acked": 1, "failed": 0, "dead": 0, "unknown": ["x"]}
    assert server.ok("POST", f"/v1/topics/{topic}/ack", ["m"]) == {"acked": 0, "failed": 0, "dead": 0, "unknown": ["m"]}


def test_a_lease_that_is_not_held_changes_nothing(server: Server, topic: str) -> None:
    _, second = handed_on(server, topic)
    for other in ("0-0", "nonsense", "é" * 64, f"{second}0"):
        assert server.ack(topic, "m", "x", lease=other) == {"acked": 0, "failed": 0, "dead": 0, "unknown": ["x"], "late": ["m"]}
        assert extend(server, topic, "m", "x", lease=other) == {"extended": 0, "unknown": ["x"], "late": ["m"]}
    assert state(server, topic) == "reserve"


# Several fetches in one request


def test_one_request_acknowledges_messages_of_several_fetches(server: Server, topic: str) -> None:
    server.put(topic, *({"body": n, "id": f"m{n}"} for n in range(6)))
    (a, b), one = fetch(server, topic, max=2)
    (c, d), two = fetch(server, topic, max=2)
    (e, f), three = fetch(server, topic, max=2)
    assert extend(server, topic, a, c, e, lease=[one, two, two]) == {"extended": 2, "unknown": [], "late": [e]}
    told = server.ack(topic, a, f"-{b}", c, f"-{d}", "x", f, lease=[one, one, two, one, one, three], retry_delay=HOUR)
    assert told == {"acked": 3, "failed": 1, "dead": 0, "unknown": ["x"], "late": [d]}
    assert server.ack(topic, d, e, lease=[two, three])["acked"] == 2


def test_a_part_of_a_fetch_may_be_acknowledged(server: Server, topic: str) -> None:
    server.put(topic, *({"body": n, "id": f"m{n}", "ttr": 60 + n % 2} for n in range(300)))
    ids, lease = fetch(server, topic, max=1_000, ttr=None)
    assert len(ids) == 300
    assert server.ack(topic, *ids[::3], lease=lease)["acked"] == 100
    assert server.ack(topic, *ids[1::3], ids[1], lease=lease) == {
        "acked": 100,
        "failed": 0,
        "dead": 0,
        "unknown": [ids[1]],
        "late": [],
    }
    assert server.ack(topic, *ids[2::3], lease=[lease] * 100)["acked"] == 100


# Fetches


def test_a_fetch_that_leases_nothing_names_no_lease(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "m"})
    assert "lease" not in server.ok("POST", f"/v1/topics/{topic}/fetch", {"wait": 20, "ack": "auto"})
    assert server.ok("POST", f"/v1/topics/{topic}/fetch", {}) == {"messages": []}
    answer = server.call("POST", f"/v1/topics/{topic}/fetch", {}, headers={"Accept": "application/bson"})
    assert (answer.data, LEASE in answer.headers) == (b"", False)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_a_bson_answer_names_the_lease_in_a_header(server: Server, topic: str, connection: str) -> None:
    server.put(topic, {"body": 1, "id": "m"})
    told = {"Accept": "application/bson", "Connection": connection}
    answer = server.call("POST", f"/v1/topics/{topic}/fetch", {"wait": 20, "ttr": HOUR}, headers=told)
    assert [document["id"] for document in bson.decode_all(answer.data)] == ["m"]
    assert server.ack(topic, "m", lease="0-0")["late"] == ["m"]
    assert server.ack(topic, "m", lease=answer.headers[LEASE])["acked"] == 1


def test_a_lease_is_the_same_after_kill_9(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.put("t", *({"body": n, "id": f"m{n}"} for n in range(3)))
        ids, lease = fetch(server, "t")
        assert len(ids) == 3
        extend(server, "t", "m1", lease=lease)
        server.stop(9)
    with running(tmp_path / "data") as server:
        assert extend(server, "t", "m0", lease="0-0")["late"] == ["m0"]
        assert extend(server, "t", "m0", lease=lease)["extended"] == 1
        assert server.ack("t", *ids, lease=lease)["acked"] == 3


# Bad shapes


@pytest.mark.parametrize("lease", ["", 7, {}, [7], [""], "x" * 65, ["x" * 65], ["a", "b"], []], ids=str)
@pytest.mark.parametrize("verb", ["ack", "extend"])
def test_a_lease_of_a_wrong_shape_is_refused(server: Server, verb: str, lease: Any) -> None:
    server.put("shapes", {"body": 1, "id": "m"})
    body = {"acks": ["m"], "lease": lease} if verb == "ack" else {"ids": ["m"], "lease": lease}
    answer = server.call("POST", f"/v1/topics/shapes/{verb}", body)
    assert (answer.status, answer.code) == (400, "INVALID_ACK_LIST" if verb == "ack" else "INVALID_ARGUMENT"), answer.data


@pytest.mark.parametrize("ends", ["id", "-id"], ids=["acked", "failed"])
def test_the_end_of_a_delivery_makes_room_for_a_waiting_fetch(server: Server, topic: str, ends: str) -> None:
    server.ok("PUT", f"/v1/topics/{topic}", {"max_in_flight": 1, "backoff": {"base": 600}})
    server.put(topic, {"body": 1, "id": "id"}, {"body": 2, "id": "next"})
    assert [message["id"] for message in server.fetch(topic, ttr=600)] == ["id"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.fetch, topic, wait=30)
        while "turtlemq_long_polls 1" not in server.call("GET", "/metrics").data.decode():
            time.sleep(0.01)
        server.ack(topic, ends)
        assert [message["id"] for message in waiting.result()] == ["next"], "at the end of its wait it would get none"
    assert server.ack(topic, "next")["acked"] == 1
