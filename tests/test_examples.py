"""The examples work as described, against a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.server_process import ROOT, Server, environment, running

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("examples") / "data") as found:
        yield found


def run(path: Path, *args: str, url: str = "http://127.0.0.1:9") -> str:
    program = [sys.executable, str(path), *args]
    done = subprocess.run(program, env=environment(TURTLEMQ_URL=url), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), (path.name, done.stdout, done.stderr)
    return done.stdout


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def test_all_of_them_are_tested_here() -> None:
    text = Path(__file__).read_text("utf-8")
    assert len(EXAMPLES) >= 3
    for path in EXAMPLES:
        assert f'"{path.stem}"' in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_explains_itself(path: Path) -> None:
    out = run(path, "--help")
    assert "--fast" in out
    assert "--url" in out


@pytest.mark.slow
def test_orders_that_are_not_paid_are_closed(server: Server) -> None:
    for _ in range(2):  # a second run is not disturbed by the first
        out, cancelled = paid_in_time(server)
        assert out.splitlines()[-1] == "at the end: {0: 'paid', 1: 'closed', 2: 'closed', 3: 'paid'}"
        assert cancelled == 2


def paid_in_time(server: Server, delay: int = 1) -> tuple[str, int]:
    """Run the example, with more time if this machine was so busy that orders came due before they were paid, which the example
    says. Returns its output, and how many messages it has cancelled."""
    server.ok("PUT", "/v1/topics/order-closer", {})
    before = server.ok("GET", "/v1/topics/order-closer")["stats"]["cancelled"]
    out = run(example("order_closer"), "--delay", str(delay), "--orders", "4", url=server.url)
    if delay < 36 and ("paid too late" in out or "its closer is in state" in out):
        return paid_in_time(server, 6 * delay)
    return out, server.ok("GET", "/v1/topics/order-closer")["stats"]["cancelled"] - before


@pytest.mark.slow
def test_who_stays_away_gets_a_mail(server: Server) -> None:
    lines = run(example("wake_up_mail"), "--fast", url=server.url).splitlines()
    assert {"Ada", "Bert", "Cleo"} == set(lines[-1].removeprefix("mailed: ").split(", "))
    assert "Cleo is here again" in lines, lines


@pytest.mark.slow
def test_payments_are_asked_for_until_they_are_known(server: Server) -> None:
    lines = run(example("payment_polling"), "--fast", url=server.url).splitlines()
    assert "transfer: paid at attempt 4" in lines, lines
    assert lines[-1] == "for a person to look at: [('cheque', 'still pending')]"
    assert "'cheque': 'given up'" in lines[-2]


@pytest.mark.slow
def test_jobs_of_an_apscheduler_are_moved_and_run(server: Server) -> None:
    lines = run(example("apscheduler_jobs"), "--fast", url=server.url).splitlines()
    assert lines[0] == "stay with APScheduler: ['tidy']"
    assert sorted(lines[1:]) == ["mail to Ada", "mail to Bert"]
