"""A real server process on a free port with a folder of its own, and a small client that speaks HTTP to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turtlemq.engine import Engine
from turtlemq.model import Message

PROGRAM = [sys.executable, "-c", "from turtlemq.cli import main; main()"]
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60  # for a start, an answer or a stop of a server that has very much to do, on a machine that has, too


def environment(**more: str) -> dict[str, str]:
    """Ours, without the variables that a developer may have set for the program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURTLEMQ_")}
    return kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'spark'}", "COLUMNS": "200", **more}


@dataclass
class Answer:
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    data: Path
    tls: ssl.SSLContext | None = None  # how to trust it
    grpc_port: int = 0  # where it speaks gRPC; 0: nowhere

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.data.parent / "server.log").read_text()

    @property
    def stalls(self) -> int:
        """How often the event loop was held longer than its budget."""
        lines = self.call("GET", "/metrics").data.decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith("turtlemq_loop_stalls_total")]
        return int(float(value))

    def call(
        self,
        method: str,
        path: str,
        value: Any = None,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        source: str | None = None,
    ) -> Answer:
        """One request on a connection of its own, from this address of ours."""
        told: dict[str, Any] = {"timeout": PATIENCE_S, "source_address": None if source is None else (source, 0)}
        if self.tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, **told)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, **told)
        sent = {"Content-Type": "application/json"} if value is not None or data is not None else {}
        try:
            connection.request(method, path, json.dumps(value) if value is not None else data, sent | (headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def ok(self, method: str, path: str, value: Any = None, **more: Any) -> Any:
        """The JSON of an answer that must be a good one."""
        answer = self.call(method, path, value, **more)
        assert answer.status < 300, (method, path, answer.status, answer.data)
        return answer.json

    def put(self, topic: str, *messages: dict[str, Any]) -> list[str]:
        return list(self.ok("POST", f"/v1/topics/{topic}/messages", {"messages": messages})["ids"])

    def fetch(self, topic: str, group: str = "default", **asked: Any) -> list[dict[str, Any]]:
        return list(self.ok("POST", f"/v1/topics/{topic}/groups/{group}/fetch", asked)["messages"])

    def ack(self, topic: str, *acks: str, **more: Any) -> Any:
        return self.ok("POST", f"/v1/topics/{topic}/ack", {"acks": acks, **more})

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def until_ready(server: Server, serves: bool = True) -> None:
    """Wait until it serves; a standby only listens."""
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert "listens on" in line, (line, server.log)
    server.port = int(line.split(",")[0].rpartition(":")[2])
    end = time.monotonic() + PATIENCE_S
    while serves and server.call("GET", "/readyz").status != 200:
        assert time.monotonic() < end, server.log
        time.sleep(0.02)


@contextmanager
def running(
    data: Path,
    *args: str,
    group: bool = False,
    tls: ssl.SSLContext | None = None,
    files: int = 0,
    stderr: int | None = None,
    serves: bool = True,
    **env: str,
) -> Iterator[Server]:
    """A server for a while; it must end well, unless the test has ended it. `group`: as the head of a process group; `files`:
    so many that it may have open, 0 for as many as the system allows; `stderr`: a descriptor for its log instead of a file;
    `serves`: not a standby, which never does."""
    limits = ["prlimit", f"--nofile={files}:{files}"] if files else []
    with (data.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*limits, *PROGRAM, "serve", "--data", str(data), "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=log if stderr is None else stderr,
            text=True,
            env=environment(**env),
            cwd=data.parent,
            start_new_session=group,
        )
    server = Server(process, 0, data, tls)
    try:
        until_ready(server, serves)
        yield server
        if process.poll() is None:
            assert server.stop() == 0, server.log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line, once."""
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, timeout=30, env=environment(**env))


def damaged_folder(data: Path) -> None:
    """A data folder whose topic `t` has a flipped bit in the middle of its sleepers."""
    engine = Engine.open(data)
    for _ in range(3):
        engine.submit("t", [Message(b"x" * 100, due_ms=4 * 10**12)] * 20, time.time_ns() // 1_000_000)
    engine.close()
    (file,) = (data / "topic" / "t").glob("delay_*.bson")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    for cache in (data / "CLEAN", *file.parent.glob("delay_*.index")):
        cache.unlink()


def sockets(server: Server) -> int:
    """How many sockets the process has open."""
    count = 0
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            count += path.readlink().name.startswith("socket:")
    return count
