"""Tables of the command line: no id is ever cut, in a pipe or on a narrow terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.harness.command_line import on_a_terminal
from tests.harness.server_process import Server, run, running

IDS = ["order-17", "customer-0000000000000017-invoice", "x" * 100]
LONG = "connection to payment.example refused after 30 seconds; " * 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("tables") / "data") as found:
        found.ok("PUT", "/v1/topics/dead", {"max_attempts": 1})
        found.put("sleepers", *({"id": id_, "body": {"text": LONG}, "delay": 3600} for id_ in IDS))
        found.put("dead", *({"id": id_, "body": {"text": LONG}} for id_ in IDS))
        assert len(found.fetch("dead", wait=5)) == 3
        found.ack("dead", *(f"-{id_}" for id_ in IDS), error=LONG)
        found.ok("PUT", "/v1/topics/" + "t" * 120, {})
        yield found


TABLES = [("list", "sleepers"), ("dead", "list", "dead")]


@pytest.mark.parametrize("verb", TABLES)
def test_a_pipe_gets_every_cell_whole(server: Server, verb: tuple[str, ...]) -> None:
    lines = run(*verb, TURTLEMQ_URL=server.url, COLUMNS="80").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["id", *IDS]
    assert all(LONG in line for line in lines[1:])
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("verb", TABLES)
@pytest.mark.parametrize("columns", [80, 120])
def test_a_narrow_terminal_folds_ids(server: Server, verb: tuple[str, ...], columns: int) -> None:
    seen = on_a_terminal(*verb, columns=columns, TURTLEMQ_URL=server.url)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    width = min(len(line) - len(line[line.find(" ") :].lstrip()) for line in lines if line[:1] not in ("", " ", "x"))
    first = "".join(line[:width].strip() for line in lines)
    assert all(id_ in first for id_ in IDS)
    assert "…" in seen, "bodies give way"


def test_the_audit_log_names_actions_and_times_whole(server: Server) -> None:
    server.put("audited", {"id": "a", "body": 1, "delay": 900})
    server.ok("POST", "/v1/topics/audited/cancel", {"ids": ["a"]})
    server.ok("PUT", "/v1/topics/audited/schedules/nightly", {"every": 3600, "body": 1})
    seen = on_a_terminal("audit", "audited", columns=80, TURTLEMQ_URL=server.url)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert [re.findall(r"cancel|schedule_created|audited|nightly", line) for line in lines] == [
        [],
        ["cancel", "audited"],
        ["schedule_created", "audited", "nightly"],
    ]


def test_a_forecast_fits_the_terminal(server: Server) -> None:
    server.put("forecast", {"body": 1, "delay": 900})
    for columns in (60, 80):
        seen = on_a_terminal("forecast", "forecast", columns=columns, TURTLEMQ_URL=server.url)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).replace("\r", "").splitlines()
        assert 50 < max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [80, 30])
def test_names_of_topics_are_whole_beside_figures(server: Server, columns: int) -> None:
    seen = on_a_terminal("topics", columns=columns, TURTLEMQ_URL=server.url)
    assert re.sub(r"\x1b\[[0-9;]*m", "", seen).count("t") >= 120
    assert "…" not in seen


def test_where_a_setting_comes_from_is_always_shown() -> None:
    variable = "TURTLEMQ_HOST_NAMES"
    told = {variable: ",".join(f"machine-{n}.example" for n in range(20))}
    assert variable in run("config", COLUMNS="80", **told).stdout
    seen = on_a_terminal("config", columns=80, **told)
    assert variable in re.sub(r"\s", "", seen)
    assert "…" not in seen
