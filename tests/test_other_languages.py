"""Workers in TypeScript, Go and Java, as docs/OTHER-LANGUAGES.md shows them, against a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ROOT, Server, environment, running
from tests.harness.tools import GSON, NODE_MODULES, program, run

EXAMPLES = ROOT / "examples"
WORK_S, TTR_S, PATIENCE_S = 0.5, 1.5, 60


def typescript(folder: Path) -> list[str]:
    node, tsc = program("node"), program("tsc")
    run(tsc, "-p", EXAMPLES / "typescript", "--typeRoots", NODE_MODULES / "@types", "--outDir", folder)
    (folder / "worker.js").rename(folder / "worker.mjs")
    return [node, str(folder / "worker.mjs")]


def go(folder: Path) -> list[str]:
    env = environment(GOCACHE=str(folder / "cache"), GOFLAGS="-buildvcs=false", GOPROXY="off")
    assert run(program("gofmt"), "-l", EXAMPLES / "go") == ""
    run(program("go"), "vet", ".", cwd=EXAMPLES / "go", env=env)
    run(program("go"), "build", "-o", folder / "worker", ".", cwd=EXAMPLES / "go", env=env)
    return [str(folder / "worker")]


def java(folder: Path) -> list[str]:
    if not GSON.exists():
        pytest.skip("there is no Gson here: `make tools` installs it where that is allowed")
    run(program("javac"), "-Xlint:all", "-Werror", "-cp", GSON, "-d", folder, EXAMPLES / "java" / "Worker.java")
    return [program("java"), "-XX:TieredStopAtLevel=1", "-cp", f"{GSON}{os.pathsep}{folder}", "Worker"]


LANGUAGES: dict[str, Callable[[Path], list[str]]] = {"typescript": typescript, "go": go, "java": java}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("languages") / "data") as found:
        yield found


def count(server: Server, topic: str, state: str) -> int:
    return int(server.ok("GET", f"/v1/topics/{topic}")["stats"][state])


def total(server: Server, metric: str, topic: str = "") -> float:
    """The sum of a metric, of one topic or of all."""
    wanted = rf'^{metric}(?:{{[^}}]*topic="{topic}".*}})? (.+)$'
    return sum(map(float, re.findall(wanted, server.call("GET", "/metrics").data.decode(), re.MULTILINE)))


def until(true: Callable[[], bool], worker: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert worker.poll() is None, worker.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def stop(worker: subprocess.Popen[str]) -> list[str]:
    """Lines of a worker that SIGTERM ends. A Java program ends with the number of the signal."""
    worker.send_signal(signal.SIGTERM)
    out, errors = worker.communicate(timeout=PATIENCE_S)
    assert errors == ""
    assert worker.returncode in (0, 128 + signal.SIGTERM)
    return out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_worker_extends_acks_retries_and_stops(language: str, server: Server, tmp_path: Path) -> None:
    command, topic = LANGUAGES[language](tmp_path), f"of-{language}"
    env = environment(TURTLEMQ_URL=server.url, TTR=str(TTR_S), WORK=str(WORK_S))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([*command, "consume", topic], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    server.ok("PUT", f"/v1/topics/{topic}", {"backoff": {"base": 0.1, "factor": 1, "max": 1}})
    server.put(topic, {"id": "bad", "body": {"number": 9, "fails": 1}, "delay": 1})
    assert run(*command, "produce", topic, "3", env=env) == "3 created, 0 duplicates\n"
    assert run(*command, "produce", topic, "3", env=env) == "0 created, 3 duplicates\n"
    worker = start()
    until(lambda: count(server, topic, "history") == 4, worker)
    server.put(topic, {"id": "last", "body": {"number": 5}})
    until(lambda: count(server, topic, "reserve") == 1, worker)
    lines = stop(worker)
    assert sorted(lines[:-2]) == [
        "failed bad attempt 1",
        "handled bad attempt 2",
        *(f"handled order-{i} attempt 1" for i in range(3)),
    ]
    assert lines[-2:] == ["handled last attempt 1", "stopped"]
    assert count(server, topic, "history") == 5
    assert total(server, "turtlemq_timed_out_total", topic) == 0, "the batch takes longer than a lease"
    worker = start()
    until(lambda: total(server, "turtlemq_long_polls") == 1, worker)
    assert stop(worker) == ["stopped"]
