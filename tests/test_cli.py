"""The command line: every verb has help, the right exit code, and output for people and for scripts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.serving import Server, run, running
from turtlemq.cli.verbs import app
from turtlemq.engine import Engine
from turtlemq.model import Message

VERBS = ["serve", "put", "fetch", "ack", "cancel", "topics", "stats", "forecast", "check", "inspect", "compact", "dead"]
DEAD = ["list", "summary", "requeue", "delete", "export"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("cli") / "data") as found:
        yield found


class Line:
    """The command line in this process, which is quicker than a new one."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, *args: str, code: int = 0, given: str | None = None) -> str:
        found = CliRunner().invoke(app, list(args), input=given, env={"TURTLEMQ_URL": self._url, "COLUMNS": "200"})
        assert found.exit_code == code, (args, found.exit_code, found.output, found.exception)
        return found.output

    def json(self, *args: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*args, "--json", code=code).splitlines()]


@pytest.fixture
def line(server: Server) -> Line:
    return Line(server.url)


@pytest.mark.parametrize("verb", [[verb] for verb in VERBS] + [["dead", verb] for verb in DEAD])
def test_every_verb_has_help(verb: list[str]) -> None:
    assert "Usage" in Line("")(*verb, "--help")


def test_the_program_itself() -> None:
    assert run("--version").stdout.startswith("turtlemq ")
    assert run("fly").returncode == 2
    refused = run("topics", "--url", "http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Is the server running" in refused.stderr


def test_put_fetch_ack(line: Line) -> None:
    assert line("put", "a", "plain text", "--id", "one") == "one\n"
    assert line.json("put", "a", '{"x": 1}', "--id", "two", "--ttr", "9")[0]["created"] == 1
    assert line.json("put", "a", "again", "--id", "two")[0]["duplicates"] == 1
    first, second = line.json("fetch", "a", "--wait", "5")
    assert (first["body"], second["body"]) == ("plain text", {"x": 1})
    assert line("ack", "a", "one", "-two", "--error", "why", "--retry-delay", "0") == "1 acked, 1 failed, 0 dead, 0 unknown\n"
    assert "attempt 2" in line("fetch", "a", "--wait", "5", "--max", "1")
    assert line.json("ack", "a", "two", "three")[0] == {"acked": 1, "failed": 0, "dead": 0, "unknown": ["three"]}


def test_text_does_nothing_to_a_terminal(line: Line) -> None:
    line("put", "escape", "\x1b[2Jgone\n")
    assert "\\x1b[2Jgone\\n" in line("fetch", "escape", "--wait", "5", "--auto-ack")


def test_put_from_a_file_and_from_stdin(line: Line, tmp_path: Path) -> None:
    lines = [json.dumps({"body": i, "id": f"m{i}", "delay": 60}) for i in range(2500)]
    (tmp_path / "f.ndjson").write_text("\n".join(lines))
    assert "2500 created, 0 duplicates" in line("put", "many", "--file", str(tmp_path / "f.ndjson"))
    assert "1 created, 1 duplicates" in line("put", "many", "-", given=f'{lines[0]}\n\n{{"body": 1}}\n')
    line("put", "many", "--file", str(tmp_path / "missing"), code=1)
    line("put", "many", code=2)
    line("put", "many", "-", "--delay", "5", code=2)
    line("put", "many", "-", given="{", code=1)
    line("put", "bad/name", "x", code=1)


def test_cancel(line: Line) -> None:
    line("put", "c", "1", "--id", "x", "--delay", "60")
    assert line("cancel", "c", "x") == "1 cancelled\n"
    assert line.json("cancel", "c", "nobody", code=1)[0] == {"cancelled": 0, "missed": {"nobody": "unknown"}}
    line("put", "c", "1", "--id", "y", "--delay", "60")
    assert line("cancel", "c", "--due-from-ms", "0") == "1 cancelled\n"
    line("cancel", "c", code=2)


def test_looking(line: Line) -> None:
    line("put", "look", "1", "--delay", "90")
    line("fetch", "look")
    assert "look" in line("topics")
    assert "look" in [one["topic"] for one in line.json("topics")[0]]
    assert "default" in line("stats", "look")
    assert line.json("stats", "look")[0]["stats"]["sleep"] == 1
    picture = line("forecast", "look", "--hours", "0.05", "--bucket", "60").splitlines()
    assert [row.count("█") for row in picture] == [0, 50, 0]
    assert line.json("forecast", "look", "--bucket", "60", "--hours", "0.05")[0]["counts"] == [0, 1, 0]
    line("stats", "nobody", code=1)


def test_dead_letters(line: Line, server: Server) -> None:
    server.ok("PUT", "/v1/topics/d", {"max_attempts": 1})
    server.put("d", *({"body": i, "id": f"m{i}"} for i in range(4)))
    server.fetch("d")
    server.ack("d", "-m0", "-m1", error="odd")
    server.ack("d", "-m2", "-m3", error="even")
    assert [letter["id"] for letter in line.json("dead", "list", "d")] == ["m0", "m1", "m2", "m3"]
    assert "odd" in line("dead", "list", "d", "--limit", "1")
    assert line.json("dead", "summary", "d")[0] == {"total": 4, "errors": {"odd": 2, "even": 2}}
    assert "4  in all" in line("dead", "summary", "d")
    assert len(line("dead", "export", "d", "--error", "odd").splitlines()) == 2
    line("dead", "requeue", "d", code=2)
    assert line.json("dead", "requeue", "d", "m0", "m9", code=1)[0] == {"requeued": 1, "unknown": ["m9"]}
    assert "2 requeued" in line("dead", "requeue", "d", "--error", "even", "--delay", "60")
    assert "1 deleted" in line("dead", "delete", "d", "--all")


# On files


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a few messages."""
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(f"body {i}".encode(), due_ms=i, id=f"m{i}", headers={"n": "1"}) for i in range(10)], now_ms=0)
    engine.tick(4)
    engine.reserve("t", "default", 2, now_ms=5)
    engine.ack("t", "default", ["m0"], now_ms=6)
    engine.close()
    return tmp_path / "data"


def test_check_finds_damage(data: Path) -> None:
    line = Line("")
    assert "no problem" in line("check", "--data", str(data))
    file = data / "topic" / "t" / "delay_0000000000.bson"
    content = bytearray(file.read_bytes())
    at = content.rindex(b"body 7")
    content[at] ^= 1
    file.write_bytes(content)
    (said,) = line.json("check", "--data", str(data), code=1)
    assert any("delay_0000000000.bson" in problem for problem in said["problems"])
    line("check", "--data", str(data / "nowhere"), code=1)


def test_inspect_shows_documents_with_positions(data: Path) -> None:
    line, folder = Line(""), data / "topic" / "t"
    documents = line.json("inspect", str(folder / "delay_0000000000.bson"))
    assert [document["id"] for document in documents] == [f"m{i}" for i in range(10)]
    assert [document["body"] for document in documents][:2] == ["body 0", "body 1"]
    positions = [(document["position"], document["length"]) for document in documents]
    assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(positions))
    (settled,) = line.json("inspect", str(folder / "history_0000000000.bson"))
    assert (settled["group"], settled["event"]["outcome"], settled["event"]["ids"]) == ("default", "acked", ["m0"])
    assert line("inspect", str(folder / "ready_0000000000.bson"), "--limit", "1").count("position=") == 1
    line("inspect", str(data / "LOCK"), code=1)
    line("inspect", str(data / "nothing"), code=1)


def test_compact(data: Path) -> None:
    line = Line("")
    assert "bytes before" in line("compact", "t", "--data", str(data))
    line("compact", "nobody", "--data", str(data), code=1)
