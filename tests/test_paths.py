"""Paths and methods as clients send them: ids of any characters, and HEAD for every GET."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from tests.harness.server_process import Server, running
from turtlemq.cli.verbs import command_line
from turtlemq.client import AsyncClient, Client
from turtlemq.server.operations import OPERATIONS

GETS = [operation.path for operation in OPERATIONS if operation.method == "GET"]
IDS = ["{", "}", "{id}", "a{b}c", "{}", "%7B", "a b?c#d"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("paths") / "data") as one:
        one.ok("PUT", "/v1/topics/t", {"max_attempts": 1})
        one.put("t", {"id": "dead", "body": "x" * 1000})
        one.ack("t", *(f"-{message['id']}" for message in one.fetch("t", wait=10)))
        one.put("t", {"id": "m", "body": 1, "delay": 1000})
        yield one


# Ids


@pytest.mark.parametrize("id_", IDS)
def test_a_message_is_found_by_its_id_whatever_its_characters(server: Server, id_: str) -> None:
    path = f"/v1/topics/odd/messages/{quote(id_, safe='')}"
    server.put("odd", {"id": id_, "body": 1, "delay": 1000})
    assert server.ok("GET", path)["id"] == id_
    assert server.ok("PATCH", path, {"delay": 2000})["outcome"] == "rescheduled"
    assert server.ok("DELETE", path)["outcome"] == "cancelled"


def test_braces_need_no_quoting(server: Server) -> None:
    server.put("raw", {"id": "{a}", "body": 1, "delay": 1000})
    assert server.ok("GET", "/v1/topics/raw/messages/{a}")["id"] == "{a}"


@pytest.mark.parametrize("id_", IDS)
def test_clients_find_a_message_by_its_id(server: Server, id_: str) -> None:
    async def cancel() -> None:
        async with AsyncClient(server.url) as client:
            await client.cancel("clients", id_)

    server.put("clients", {"id": id_, "body": 1, "delay": 1000})
    with Client(server.url) as client:
        client.reschedule("clients", id_, delay=2000)
        assert client.get("clients", id_).id == id_
    found = CliRunner().invoke(command_line("get"), ["get", "clients", id_], env={"TURTLEMQ_URL": server.url})
    assert found.exit_code == 0, found.output
    assert id_ in found.output
    asyncio.run(cancel())


# HEAD


def _head(stream: socket.socket) -> tuple[str, dict[str, str]]:
    """Status line and headers of the next answer, and not a byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += stream.recv(1) or pytest.fail(f"no answer but {head!r}")
    status, *lines = head.decode().strip().split("\r\n")
    return status, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


@pytest.mark.parametrize("topic", ["t", "no-such-topic"])
@pytest.mark.parametrize("path", GETS)
def test_an_answer_to_head_has_no_body(server: Server, path: str, topic: str) -> None:
    """Behind it comes the answer to the next request of the same connection."""
    names = {"{topic}": topic, "{group}": "default", "{id}": "m", "{file}": "dashboard.js"}
    for name, value in names.items():
        path = path.replace(name, value)
    asked = server.call("GET", path)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stream:
        for line in (f"HEAD {path}", "GET /healthz"):
            stream.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status, headers = _head(stream)
        assert status.split()[1] == str(asked.status)
        assert headers["content-type"] == asked.headers["Content-Type"]
        assert _head(stream)[0] == "HTTP/1.1 200 OK", "the next answer"
