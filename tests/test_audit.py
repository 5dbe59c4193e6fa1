"""The audit log: each change is one event with the name of its token, in the log and in a file that is bounded and survives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.harness.command_line import Line
from tests.harness.server_process import ROOT, Answer, Server, running
from turtlemq.client import Client
from turtlemq.server import audit
from turtlemq.server.audit import Action, AuditEvent, AuditLog
from turtlemq.server.auth import hash_of, new_token
from turtlemq.server.operations import OPERATIONS

PEOPLE: dict[str, tuple[list[str], list[str]]] = {
    "boss": (["admin"], ["*"]),
    "orders reader": (["read"], ["orders"]),
    "worker": (["produce", "consume"], ["*"]),
}
SECRETS = {name: new_token() for name in PEOPLE}


def start(folder: Path) -> Any:
    entries = [
        f"[[tokens]]\nname = {json.dumps(name)}\nhash = {json.dumps(hash_of(SECRETS[name]))}\n"
        f"rights = {json.dumps(rights)}\ntopics = {json.dumps(topics)}\n"
        for name, (rights, topics) in PEOPLE.items()
    ]
    (folder / "t.toml").write_text("".join(entries))
    return running(folder / "data", "--config", str(folder / "t.toml"))


def as_(server: Server, name: str, method: str, path: str, value: Any = None) -> Answer:
    return server.call(method, path, value, headers={"Authorization": f"Bearer {SECRETS[name]}", "X-Request-Id": "asked-1"})


def events(server: Server, name: str = "boss", query: str = "") -> list[dict[str, Any]]:
    answer = as_(server, name, "GET", f"/v1/audit{query}")
    assert answer.status == 200, answer.data
    return list(answer.json["events"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("audit")) as one:
        yield one


def test_every_operation_that_changes_something_is_noted_but_daily_work() -> None:
    daily = {"produce", "fetch", "ack", "extend", "fetchInGroup", "ackInGroup", "extendInGroup", "command", "beatClient"}
    changes = {operation.name for operation in OPERATIONS if operation.method != "GET"}
    assert changes - {operation.name for operation in OPERATIONS if operation.audit} == daily | {"verifyCopies", "unpinBackup"}
    assert [operation.name for operation in OPERATIONS if operation.audit and operation.method == "GET"] == []


def test_the_manual_names_every_action() -> None:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text()
    assert [action for action in get_args(Action) if f"`{action}`" not in text] == []


def test_changes_are_noted_with_token_client_and_count(server: Server) -> None:
    base = "/v1/topics/orders"
    for method, path, value in (
        ("PUT", base, {"max_attempts": 1}),
        ("PUT", base, {"ttr": 30}),
        ("PUT", f"{base}/groups/g", {}),
        ("PUT", f"{base}/groups/g", {}),  # changes nothing
        ("PUT", f"{base}/groups/g", {"start": "latest"}),
        ("POST", f"{base}/messages", {"messages": [{"id": f"m{n}", "body": 0, "delay": 900} for n in range(6)]}),
        ("PATCH", f"{base}/messages/m0", {"delay": 1000}),
        ("DELETE", f"{base}/messages/m0", None),
        ("POST", f"{base}/cancel", {"ids": ["m1", "m2", "unknown"]}),
        ("POST", f"{base}/cancel", {"ids": ["unknown"]}),  # changes nothing
        ("POST", f"{base}/cancel", {"ids": ["m4"]}),
        ("POST", "/v1/command", {"command": "delete", "topic": "orders", "id": "m3"}),
        ("POST", f"{base}/groups/g/pause", None),
        ("POST", f"{base}/resume", None),
        ("POST", f"{base}/compact", None),
        ("DELETE", f"{base}/groups/g", None),
        ("DELETE", base, None),
    ):
        assert as_(server, "boss", method, path, value).status < 300, (method, path)
    found = events(server, query="?topic=orders")
    assert [(one["action"], one["target"], one["count"]) for one in found] == [
        ("topic_created", "", 1),
        ("settings", "", 1),
        ("group_created", "g", 1),
        ("group_moved", "g", 1),
        ("reschedule", "m0", 1),
        ("cancel", "m0", 1),
        ("cancel", "", 2),
        ("cancel", "m4", 1),
        ("cancel", "m3", 1),
        ("pause", "g", 1),
        ("resume", "", 1),
        ("compact", "", 1),
        ("group_deleted", "g", 1),
        ("topic_deleted", "", 1),
    ]
    assert {(one["token"], one["client"], one["request_id"], one["topic"]) for one in found} == {
        ("boss", "127.0.0.1", "asked-1", "orders")
    }
    lines = [line for line in server.log.splitlines() if "event=audit" in line and "topic=orders" in line]
    assert len(lines) == len(found)
    assert all("token=boss" in line and "request_id=asked-1" in line for line in lines)
    assert not any(secret in server.log for secret in SECRETS.values())


def test_dead_letters_are_noted_by_their_number(server: Server) -> None:
    base = "/v1/topics/dying"
    as_(server, "boss", "PUT", base, {"max_attempts": 1})
    as_(server, "worker", "POST", f"{base}/messages", {"messages": [{"id": f"d{n}", "body": 0} for n in range(5)]})
    got = as_(server, "worker", "POST", f"{base}/fetch", {"wait": 30}).json["messages"]
    as_(server, "worker", "POST", f"{base}/ack", [f"-{message['id']}" for message in got])
    dead = len(got)
    assert as_(server, "boss", "POST", f"{base}/dead/requeue", {"ids": ["d0"]}).json["requeued"] == 1
    assert as_(server, "boss", "POST", f"{base}/dead/delete", {"filter": {}}).json["deleted"] == dead - 1
    assert as_(server, "boss", "POST", f"{base}/dead/delete", {"filter": {}}).json["deleted"] == 0
    found = [(one["action"], one["target"], one["count"]) for one in events(server, query="?topic=dying")]
    deleted = [("dead_deleted", "", dead - 1)] if dead > 1 else []
    assert found == [("topic_created", "", 1), ("requeue", "d0", 1), *deleted]


def test_refused_requests_are_not_noted(server: Server) -> None:
    before = len(events(server))
    assert as_(server, "worker", "DELETE", "/v1/topics/orders").status == 403
    assert as_(server, "boss", "DELETE", "/v1/topics/nothing").status == 404
    assert as_(server, "boss", "PUT", "/v1/topics/bad", {"ttr": -1}).status == 400
    assert len(events(server)) == before


def test_a_token_sees_the_events_of_topics_that_it_may_read(server: Server) -> None:
    for topic in ("orders", "payroll"):
        assert as_(server, "boss", "PUT", f"/v1/topics/{topic}", {}).status == 200
    as_(server, "boss", "POST", "/v1/backup")
    assert {one["topic"] for one in events(server)} >= {"", "orders", "payroll"}
    assert {one["topic"] for one in events(server, "orders reader")} == {"orders"}
    assert events(server, "worker") == [], "to produce and to consume is not to look at what others do"
    assert as_(server, "orders reader", "GET", "/v1/audit?topic=payroll").code == "FORBIDDEN"


def test_events_are_limited_to_the_newest_and_by_time(server: Server) -> None:
    for _ in range(3):
        as_(server, "boss", "PUT", "/v1/topics/limited", {})
    found = events(server, query="?topic=limited")
    assert events(server, query="?topic=limited&limit=2") == found[1:]
    assert events(server, query=f"?topic=limited&from_ms={found[-1]['at_ms'] + 1}") == []
    assert as_(server, "boss", "GET", "/v1/audit?limit=0").status == 400


def test_client_and_command_line_show_events(server: Server) -> None:
    as_(server, "boss", "PUT", "/v1/topics/shown", {})
    with Client(server.url, token=SECRETS["boss"]) as client:
        assert [(one.action, one.token) for one in client.audit("shown")] == [("topic_created", "boss")]
    line = Line(server.url)
    text = line("audit", "shown", "--token", SECRETS["boss"])
    assert "topic_created" in text
    assert "boss" in text
    (told,) = line.json("audit", "shown", "--since", "-1h", "--token", SECRETS["boss"])
    assert told["topic"] == "shown"


def test_events_survive_a_restart(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        as_(server, "boss", "PUT", "/v1/topics/kept", {})
        before = events(server)
    with start(tmp_path) as server:
        as_(server, "boss", "DELETE", "/v1/topics/kept")
        assert events(server)[:-1] == before
        assert [one["action"] for one in events(server)] == ["topic_created", "topic_deleted"]


# The file


def note(log: AuditLog, topic: str, count: int = 1) -> None:
    log.note(AuditEvent(1, "me", "::1", "cancel", topic, count, "r"))


def read(log: AuditLog, limit: int = 1_000) -> list[str]:
    return [event.topic for event in log.read(0, limit, lambda topic: True).result()]


def test_the_file_is_set_aside_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES_MAX", 1_000)
    log, kept = AuditLog(tmp_path), list[str]()
    for number in range(100):
        note(log, f"t{number}")
        kept = read(log)  # written one by one: events that wait together are one write
    log.close()
    assert kept == [f"t{number}" for number in range(100 - len(kept), 100)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["AUDIT", "AUDIT.1"]
    assert all(path.stat().st_size <= 1_000 for path in tmp_path.iterdir())
    assert len(kept) > 5


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    note(log, "a")
    log.close()
    path = tmp_path / "AUDIT"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:20])
    log = AuditLog(tmp_path)
    note(log, "b", count=0)
    note(log, "c")
    assert read(log) == ["a", "c"]
    log.close()


def test_a_folder_that_cannot_be_written_harms_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(tmp_path / "gone")
    note(log, "a")
    assert read(log) == []
    log.close()
    assert "audit_not_written" in caplog.text
