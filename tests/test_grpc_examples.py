"""Producers and consumers of the gRPC services in Python and Node, as docs/GRPC.md shows them, against a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.grpc_process import grpc_running
from tests.harness.server_process import PATIENCE_S, ROOT, Server, environment
from tests.harness.tools import NODE_MODULES, program, run

EXAMPLES = ROOT / "examples"


def node(name: str) -> list[str]:
    if not (NODE_MODULES / "@grpc" / "grpc-js").exists():
        pytest.skip("there is no @grpc/grpc-js here: `make tools` installs it where that is allowed")
    return [program("node"), str(EXAMPLES / "node" / name)]


def columns(language: str) -> list[str]:
    """The command of the native service's example."""
    return node("queue.cjs") if language == "node" else [sys.executable, str(EXAMPLES / "grpc" / "columns.py")]


ENVIRONMENT = {"NODE_PATH": str(NODE_MODULES)}


def count(server: Server, state: str, topic: str = "orders") -> int:
    answer = server.call("GET", f"/v1/topics/{topic}")
    return int(answer.json["stats"][state]) if answer.status == 200 else 0


@pytest.mark.slow
@pytest.mark.parametrize("language", ["python", "node"])
def test_columns_are_published_delivered_and_acknowledged(language: str, tmp_path: Path) -> None:
    command, env = columns(language), environment(**ENVIRONMENT)
    with grpc_running(tmp_path / "data") as (server, port):
        target = f"127.0.0.1:{port}"
        told = run(*command, target, "produce", "orders", "5", env=env)
        again = run(*command, target, "produce", "orders", "5", env=env)
        assert (told.count("stored, 0 known"), "0 known" in again) == (3 if language == "python" else 1, False)
        assert server.ok("GET", "/v1/topics/orders/messages/order-3")["body"] == {"close": 3}
        lines = run(*command, target, "consume", "orders", "5", env=env).splitlines()
        assert sorted(lines) == [f'order-{n}, attempt 1: {{"close":{" " * (language == "python")}{n}}}' for n in range(1, 6)]
        assert count(server, "history") == 5


@pytest.mark.slow
def test_the_stream_of_the_delay_server_works_in_node(tmp_path: Path) -> None:
    command = node("delay.cjs")
    with grpc_running(tmp_path / "data", TURTLEMQ_GRPC_PAST_GRACE_MS="-1") as (server, port):
        lines = run(*command, f"127.0.0.1:{port}", env=environment(**ENVIRONMENT)).splitlines()
        assert sorted(lines) == ["due: call 0", "due: call 1", "due: call 2"]
        assert count(server, "history", "calls") == 3


def test_a_killed_subscriber_and_a_killed_server_lose_nothing(tmp_path: Path) -> None:
    """A subscriber is killed with messages in hand, then the server: another subscriber gets all that were not acknowledged."""
    command, env = columns("python"), environment(**ENVIRONMENT)
    with grpc_running(tmp_path / "data") as (server, port):
        run(*command, f"127.0.0.1:{port}", "produce", "orders", "40", env=env)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with grpc_running(tmp_path / "data") as (server, port):
        stuck = subprocess.Popen(
            [*command, f"127.0.0.1:{port}", "consume", "orders", "1000"], env=env, stdout=subprocess.PIPE, text=True
        )
        with stuck:
            assert stuck.stdout is not None
            assert stuck.stdout.readline().startswith("order-")
            os.kill(stuck.pid, signal.SIGKILL)
        left = 40 - count(server, "history")
        end = time.monotonic() + PATIENCE_S
        while count(server, "history") < 40 - left or count(server, "reserve"):
            assert time.monotonic() < end
            time.sleep(0.05)
        left = 40 - count(server, "history")
        if left:
            lines = run(*command, f"127.0.0.1:{port}", "consume", "orders", str(left), env=env).splitlines()
            assert len({line.partition(",")[0] for line in lines}) == left
        assert count(server, "history") == 40
