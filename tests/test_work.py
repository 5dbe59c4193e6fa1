"""`turtlemq work` runs a command for each message: its exit code decides, leases are extended, SIGTERM lets commands finish."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.harness.server_process import PROGRAM, Server, environment, running
from turtlemq.cli.verbs import command_line
from turtlemq.client import Client

PATIENCE_S = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("work") / "data") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def work(server: Server, topic: str, command: str, *args: str, code: int = 0) -> str:
    """Run the verb in this process, until it ends by itself."""
    given = ["work", topic, "--exec", command, *args]
    found = CliRunner().invoke(command_line("work"), given, env={"TURTLEMQ_URL": server.url})
    assert found.exit_code == code, (found.output, found.exception)
    return found.output


def worker(server: Server, topic: str, command: str, *args: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return worker_at(server.url, topic, command, *args)


@contextmanager
def worker_at(url: str, topic: str, command: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The verb as a process of its own."""
    process = subprocess.Popen(
        [*PROGRAM, "work", topic, "--exec", command, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TURTLEMQ_URL=url),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_command_gets_the_body_and_exit_code_0_acks(server: Server, client: Client, tmp_path: Path) -> None:
    bodies = [{"price": 17}, "a text\n", b"\xff\0bytes", None]
    for number, body in enumerate(bodies):
        client.put("bodies", body, id=f"m{number}", headers={"Trace-Id": f"t{number}", "nul": "\0"}, priority="high")
    save = f'cat > "{tmp_path}/$MESSAGE_ID"; env | grep ^MESSAGE_ > "{tmp_path}/$MESSAGE_ID.env"'
    work(server, "bodies", save, "--max", "4", "--group", "savers")
    found = [(tmp_path / f"m{number}").read_bytes() for number in range(4)]
    assert found == [b'{"price":17}', b"a text\n", b"\xff\0bytes", b"null"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "m1.env").read_text().splitlines())
    due_ms, created_ms = int(variables.pop("MESSAGE_DUE_MS")), int(variables.pop("MESSAGE_CREATED_MS"))
    assert due_ms >= created_ms > 1_700_000_000_000
    assert json.loads(variables.pop("MESSAGE_HEADERS")) == {"Trace-Id": "t1", "nul": "\0"}
    assert variables == {
        "MESSAGE_ID": "m1",
        "MESSAGE_TOPIC": "bodies",
        "MESSAGE_GROUP": "savers",
        "MESSAGE_ATTEMPT": "1",
        "MESSAGE_PRIORITY": "high",
        "MESSAGE_BODY_KIND": "text",
        "MESSAGE_HEADER_TRACE_ID": "t1",
    }
    assert {client.get("bodies", f"m{number}").groups["savers"]["state"] for number in range(4)} == {"history"}


def test_another_exit_code_fails_with_the_last_lines(server: Server, client: Client) -> None:
    client.configure("failing", max_attempts=2)
    client.put("failing", "x", id="a")
    lines = "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $n >&2; done; exit 3"
    work(server, "failing", lines, "--max", "2", "--retry-delay", "0")
    (letter,) = client.dead("failing")
    assert letter.error == "exit code 3: " + "\n".join(f"line {n}" for n in range(3, 13))
    assert letter.attempts == 2


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("kill -9 $$", "ended by SIGKILL"),
        ("no-such-command", "exit code 127: "),
        ("exec 0<&-; exit 1", "exit code 1"),
    ],
)
def test_every_way_to_fail_is_told(server: Server, client: Client, command: str, error: str) -> None:
    topic = f"ways-{len(command)}"
    client.configure(topic, max_attempts=1)
    client.put(topic, "x" * 200_000)  # more than a pipe holds, and no command here reads it
    work(server, topic, command, "--max", "1")
    (letter,) = client.dead(topic)
    assert letter.error.startswith(error)


def test_a_command_over_its_limit_is_ended(server: Server, client: Client) -> None:
    client.configure("slow", max_attempts=1)
    client.put("slow", "x")
    work(server, "slow", "echo begun >&2; sleep 60", "--max", "1", "--limit", "300ms")
    (letter,) = client.dead("slow")
    assert letter.error == "ended after 0.3 s: begun"


@pytest.mark.slow
def test_leases_are_extended_while_a_command_runs(server: Server, client: Client, tmp_path: Path) -> None:
    client.put("long", "x", id="a")
    work(server, "long", f"echo $MESSAGE_ATTEMPT >> {tmp_path}/runs; sleep 1.5", "--ttr", "0.5", "--max", "1")
    assert (tmp_path / "runs").read_text() == "1\n"
    assert client.stats("long").history == 1


def test_a_command_that_leaves_a_child_does_not_hold_the_worker(server: Server, client: Client) -> None:
    client.put("child", "x")
    work(server, "child", "sleep 3 & echo $! >&2", "--max", "1")
    assert client.stats("child").history == 1


def test_commands_run_at_the_same_time(server: Server, client: Client, tmp_path: Path) -> None:
    for number in range(4):
        client.put("many", number)
    meet = f'touch {tmp_path}/$MESSAGE_ID; until [ "$(ls {tmp_path} | wc -l)" = 4 ]; do sleep 0.02; done'
    work(server, "many", meet, "--concurrency", "4", "--max", "4")
    assert client.stats("many").history == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_commands_finish(server: Server, client: Client, tmp_path: Path, number: int) -> None:
    topic = f"drain{number}"
    client.put(topic, 1, id="a")
    client.put(topic, 2, id="b")
    command = f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done $MESSAGE_ID"
    with worker(server, topic, command) as process:
        until((tmp_path / "begun").exists)
        os.killpg(process.pid, number)  # as a terminal does
        time.sleep(0.5)  # it has noticed, and waits
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "done a\n", "")
    assert client.get(topic, "a").groups["default"]["state"] == "history"
    assert client.get(topic, "b").state == "ready"


@pytest.mark.parametrize("signals", [1, 2])
def test_commands_end_with_the_drain_or_a_second_signal(server: Server, client: Client, tmp_path: Path, signals: int) -> None:
    topic = f"ended{signals}"
    client.configure(topic, max_attempts=1)
    client.put(topic, 1)
    command = f"touch {tmp_path}/begun; sleep 600"
    with worker(server, topic, command, "--drain", "0.2" if signals == 1 else "60") as process:
        until((tmp_path / "begun").exists)
        for _ in range(signals):
            process.terminate()
            time.sleep(0.3)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "event=command_failed" in err
    (letter,) = client.dead(topic)
    assert letter.error == "ended by SIGTERM"


def test_wrong_use_and_refusals_end_it(server: Server) -> None:
    assert "bad/name" in work(server, "bad/name", "true", code=1)
    work(server, "t", "true", "--ttr", "0.01", code=2)


def test_a_worker_may_start_before_its_server(tmp_path: Path) -> None:
    with worker_at("http://127.0.0.1:9", "early", "true") as process:
        assert process.stderr is not None
        assert "The worker goes on trying" in process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
