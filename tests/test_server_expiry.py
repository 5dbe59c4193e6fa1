"""`expires_ms` over real HTTP: it is about the first delivery, a requeue may renew it, and it comes after the due time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.server_process import Server, run, running
from turtlemq.client import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("expiry") / "data") as found:
        yield found
        assert "Traceback" not in found.log


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).replace("[", "-").replace("]", "").replace(" ", "-")[:100]
    server.ok("PUT", f"/v1/topics/{name}", {"max_attempts": 2, "backoff": {"base": 0, "jitter": "none"}})
    return name


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def pass_until(moment_ms: int) -> None:
    time.sleep(max(0.0, moment_ms - now_ms() + 5) / 1000)


def letters(server: Server, topic: str) -> list[tuple[str, str, int]]:
    listed = server.ok("GET", f"/v1/topics/{topic}/dead")["messages"]
    return [(letter["id"], letter["error"], letter["attempts"]) for letter in listed]


def expired(server: Server, topic: str) -> None:
    """Make the message `m` a dead letter that expired."""
    end = now_ms() + 200
    server.put(topic, {"body": 1, "id": "m", "expires_ms": end})
    pass_until(end)
    assert server.fetch(topic) == []
    assert letters(server, topic) == [("m", "expired", 0)]


def requeue(server: Server, topic: str, **more: Any) -> Any:
    return server.ok("POST", f"/v1/topics/{topic}/dead/requeue", {"ids": ["m"], **more})


def test_a_message_delivered_in_time_dies_of_its_own_error(server: Server, topic: str) -> None:
    end = now_ms() + 1_000
    server.put(topic, {"body": 1, "id": "m", "expires_ms": end})
    assert [message["attempt"] for message in server.fetch(topic, wait=20)] == [1]
    server.ack(topic, "-m", error="first", retry_delay=0)
    pass_until(end)
    assert [message["attempt"] for message in server.fetch(topic, wait=20)] == [2], "it was delivered in time"
    assert server.ack(topic, "-m", error="second")["dead"] == 1
    assert letters(server, topic) == [("m", "second", 2)]


def test_an_expired_letter_can_be_requeued(server: Server, topic: str) -> None:
    expired(server, topic)
    assert requeue(server, topic) == {"requeued": 1, "unknown": []}
    assert [message["id"] for message in server.fetch(topic, wait=20)] == ["m"]
    assert server.ack(topic, "m")["acked"] == 1


@pytest.mark.parametrize("delay", [0, 60])
def test_the_view_of_a_message_tells_its_new_expiry(server: Server, topic: str, delay: int) -> None:
    expired(server, topic)
    end = now_ms() + 3_600_000
    requeue(server, topic, expires_ms=end, delay=delay)
    path, state = f"/v1/topics/{topic}/messages/m", "sleep" if delay else "ready"
    while (group := server.ok("GET", path)["groups"]["default"])["state"] != state:
        time.sleep(0.01)
    assert group["expires_ms"] == end
    shown = run("get", topic, "m", "--url", server.url).stdout
    assert re.search(r"group default: .*, expires 20", shown), shown
    if not delay:
        assert [message["id"] for message in server.fetch(topic, wait=20)] == ["m"]
        assert "expires_ms" not in server.ok("GET", path)["groups"]["default"], "it was delivered in time"


def test_a_requeued_letter_gets_a_new_expiry(server: Server, topic: str) -> None:
    expired(server, topic)
    end = now_ms() + 300
    requeue(server, topic, expires_ms=end)
    pass_until(end)
    assert server.fetch(topic) == []
    assert letters(server, topic) == [("m", "expired", 0)]
    requeue(server, topic, expires_ms=now_ms() + 60_000)
    assert [message["id"] for message in server.fetch(topic, wait=20)] == ["m"]


def test_a_new_expiry_counts_whatever_the_attempts(server: Server, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "m"})
    for _ in range(2):
        assert server.fetch(topic, wait=20)
        server.ack(topic, "-m", error="no", retry_delay=0)
    assert letters(server, topic) == [("m", "no", 2)]
    end = now_ms() + 300
    requeue(server, topic, reset_attempts=False, expires_ms=end)
    pass_until(end)
    assert server.fetch(topic) == []
    assert letters(server, topic) == [("m", "expired", 2)]


@pytest.mark.parametrize("wrong", ["before the due time", "at the due time", "past", "none"])
def test_a_requeue_with_an_impossible_expiry_is_refused(server: Server, topic: str, wrong: str) -> None:
    expired(server, topic)
    far = now_ms() + 1_000_000
    fields: dict[str, Any] = {
        "before the due time": {"due_ms": far, "expires_ms": far - 1},
        "at the due time": {"due_ms": far, "expires_ms": far},
        "past": {"expires_ms": now_ms() - 1},
        "none": {"expires_ms": -1},
    }[wrong]
    answer = server.call("POST", f"/v1/topics/{topic}/dead/requeue", {"ids": ["m"], **fields})
    assert (answer.status, answer.code) == (400, "INVALID_FIRE_AT"), answer.data
    assert "expires_ms" in answer.json["error"]["message"]
    assert letters(server, topic) == [("m", "expired", 0)]


@pytest.mark.parametrize("due", ["delay", "due_ms"])
@pytest.mark.parametrize("count", [2, 200, 6_000])
def test_a_message_that_can_only_die_is_refused(server: Server, topic: str, due: str, count: int) -> None:
    """The whole batch, as for other wrong fields."""
    end = now_ms() + 1_000_000
    when = {"delay": 2_000} if due == "delay" else {"due_ms": end}
    batch = [{"body": n, "expires_ms": end} for n in range(count - 1)] + [{"body": 1, "id": "m", "expires_ms": end, **when}]
    answer = server.call("POST", f"/v1/topics/{topic}/messages", {"messages": batch})
    assert (answer.status, answer.code) == (400, "INVALID_MESSAGE"), answer.data
    assert answer.json["error"]["index"] == count - 1
    assert "expires_ms" in answer.json["error"]["message"]
    stats = server.ok("GET", f"/v1/topics/{topic}")["stats"]
    assert (stats["sleep"], stats["ready"]) == (0, 0)
    assert server.call("POST", "/v1/topics/never/messages", {"messages": batch}).status == 400
    assert server.call("GET", "/v1/topics/never").status == 404, "a refused batch creates no topic"


def test_a_late_message_is_stored_and_dies(server: Server, topic: str) -> None:
    """Its due time has come, so the two times do not contradict each other: a put that is sent again must not be refused."""
    server.put(topic, {"body": 1, "id": "m", "expires_ms": now_ms() - 1_000})
    assert server.fetch(topic, wait=0.2) == []
    assert letters(server, topic) == [("m", "expired", 0)]


def test_a_message_cannot_be_put_off_beyond_its_expiry(server: Server, topic: str) -> None:
    end = now_ms() + 1_000_000
    server.put(topic, {"body": 1, "id": "m", "due_ms": end - 1_000, "expires_ms": end})
    path = f"/v1/topics/{topic}/messages/m"
    for due in (end, end + 1):
        answer = server.call("PATCH", path, {"due_ms": due})
        assert (answer.status, answer.code) == (400, "INVALID_FIRE_AT"), answer.data
        assert "expires_ms" in answer.json["error"]["message"]
    assert server.ok("GET", path)["due_ms"] == end - 1_000
    assert server.ok("PATCH", path, {"due_ms": end - 1})["due_ms"] == end - 1
    assert server.ok("PATCH", path, {"body": 2})["outcome"] == "edited"


def test_client_and_command_line_give_a_new_expiry(server: Server, topic: str) -> None:
    expired(server, topic)
    end = now_ms() + 1_000_000
    with Client(server.url) as client:
        assert client.requeue_dead(topic, ["m"], delay=100, expires=end) == 1
        assert client.get(topic, "m").groups["default"]["state"] == "sleep"
    topic = f"{topic}-cli"
    expired(server, topic)
    assert run("dead", "requeue", topic, "m", "--delay", "1h", "--expires", "+30m", "--url", server.url).returncode == 2
    done = run("dead", "requeue", topic, "m", "--delay", "100ms", "--expires", "+2h", "--url", server.url)
    assert (done.returncode, done.stdout) == (0, "1 requeued\n"), done.stderr
    assert [message["id"] for message in server.fetch(topic, wait=20)] == ["m"]
