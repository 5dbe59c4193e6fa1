"""The Java client of the Hyper Delay Server, byte for byte as its manual has it, against a real server."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.grpc_process import grpc_running
from tests.harness.server_process import PATIENCE_S, ROOT, Server
from tests.harness.tools import grpc_classes, program

CLIENT = ROOT / "examples" / "java" / "grpc" / "com" / "example" / "delay" / "DelayGrpcClient.java"
DRIVE = ROOT / "tests" / "harness" / "java" / "Drive.java"
PROTOS = {"upstream": DRIVE.with_name("upstream.proto"), "whole": ROOT / "turtlemq" / "server" / "grpc" / "proto" / "delay.proto"}
GRACE = {"TURTLEMQ_GRPC_PAST_GRACE_MS": "-1"}  # a Java machine that has much to do may be late with its first tasks


@contextmanager
def client(classes: str, port: int, *args: str) -> Iterator[subprocess.Popen[str]]:
    command = [program("java"), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", classes, "Drive", str(port), *args]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def until(check: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 3 * PATIENCE_S
    while not check():
        assert all(process.poll() is None for process in processes), [
            process.stderr and process.stderr.read() for process in processes
        ]
        assert time.monotonic() < end
        time.sleep(0.05)


def count(server: Server, state: str) -> int:
    answer = server.call("GET", "/v1/topics/my-service-1")
    return int(answer.json["stats"][state]) if answer.status == 200 else 0


def test_the_client_is_that_of_the_manual() -> None:
    digest = "d7344496af5bcba72d9c0346e0dd9c2954ede81468affe034f91ce3a1a40d4a5"
    assert hashlib.sha256(CLIENT.read_bytes()).hexdigest() == digest


@pytest.mark.slow
@pytest.mark.parametrize("proto", PROTOS)
def test_the_java_client_schedules_receives_and_acknowledges(proto: str, tmp_path: Path) -> None:
    classes = grpc_classes(PROTOS[proto], [CLIENT, DRIVE], tmp_path / "java")
    with grpc_running(tmp_path / "data", **GRACE) as (server, port):
        with client(classes, port, "my-service-1", "500", "300", "ack") as worker:
            until(lambda: count(server, "history") == 500, worker)
            assert worker.stdin is not None
            worker.stdin.close()  # the client closes its stream and ends
            assert worker.stdout is not None
            lines = worker.stdout.read().splitlines()
        assert sorted(lines) == sorted(f"task task-{n}" for n in range(500)), "each once, and none early"


@pytest.mark.slow
def test_tasks_of_a_killed_java_client_go_to_another(tmp_path: Path) -> None:
    classes = grpc_classes(PROTOS["upstream"], [CLIENT, DRIVE], tmp_path / "java")
    with grpc_running(tmp_path / "data", **GRACE) as (server, port):
        with client(classes, port, "my-service-1", "6", "0", "hold") as stuck:
            until(lambda: count(server, "reserve") == 6, stuck)
            stuck.kill()
            with client(classes, port, "my-service-1", "0", "0", "ack") as other:
                until(lambda: count(server, "history") == 6, other)
                assert other.stdin is not None
                other.stdin.close()
                assert other.stdout is not None
                lines = other.stdout.read().splitlines()
        assert sorted(lines) == [f"task task-{n}" for n in range(6)]
