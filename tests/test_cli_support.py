"""The command line in support: find a message, list any state, watch the server, and errors that name the option that helps."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.certificates import certificate
from tests.harness.cli_reference import verbs
from tests.harness.client_network import canned, proxied
from tests.harness.command_line import Line, on_a_terminal
from tests.harness.server_process import PROGRAM, Server, environment, run, running
from turtlemq.server.auth import hash_of, new_token


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("support") / "data") as found:
        yield found


@pytest.fixture
def line(server: Server) -> Line:
    return Line(server.url)


def test_an_id_is_found_without_its_topic(line: Line, server: Server) -> None:
    server.put("find.a", {"id": "order-17", "body": 1, "delay": 60})
    server.put("find.b", {"id": "order-17", "body": 1})
    server.fetch("find.b", wait=5)
    first, second = (row.split() for row in line("find", "order-17").splitlines()[1:])
    assert (first[:3], second[:3]) == (["find.a", "order-17", "sleep"], ["find.b", "order-17", "reserve"])
    assert [one["topic"] for one in line.json("find", "order-17")] == ["find.a", "find.b"]
    assert "no topic knows a message 'order-18'" in line("find", "order-18", code=1)
    line("find", "a/b", code=2)


def test_lists_reach_every_message_in_every_state(line: Line, server: Server) -> None:
    server.put(
        "lists", *({"id": f"s{n}", "body": n, "delay": 3600} for n in range(2500)), {"id": "other", "body": 0, "delay": 60}
    )
    server.put("lists", *({"id": f"r{n}", "body": n} for n in range(3)))
    assert len(server.fetch("lists", wait=5, max=1)) == 1
    assert len(line.json("list", "lists", "--all")) == 2501
    assert [one["id"] for one in line.json("list", "lists", "--prefix", "oth")] == ["other"]
    assert len(line.json("list", "lists", "--prefix", "s24", "--limit", "200")) == 111
    assert [one["id"] for one in line.json("list", "lists", "--state", "reserve")] == ["r0"]
    assert {one["id"] for one in line.json("list", "lists", "--state", "ready", "--prefix", "r")} >= {"r1", "r2"}
    assert "--state is one of sleep, ready" in line("list", "lists", "--state", "asleep", code=2)
    rows = line("list", "lists", "--all").splitlines()
    assert [row.split()[0] for row in rows[:2]] == ["id", "other"], "the header comes once"
    assert len(rows) == 2502


def test_more_is_said_only_if_there_is_more(line: Line, server: Server) -> None:
    server.ok("PUT", "/v1/topics/exact", {"max_attempts": 1})
    server.put("exact", *({"id": f"m{n}", "body": n} for n in range(5)))
    server.fetch("exact", wait=5)
    server.ack("exact", *(f"-m{n}" for n in range(5)))
    server.put("exact", *({"id": f"s{n}", "body": n, "delay": 60} for n in range(5)))
    for verb in (("dead", "list", "exact"), ("list", "exact")):
        assert "more" not in line(*verb, "--limit", "5")
        assert len(line.json(*verb, "--all")) == 5
        assert "… and more than these 4 (--limit)" in line(*verb, "--limit", "4")


def test_status_tells_of_the_whole_server(line: Line, server: Server) -> None:
    server.put("status", {"id": "a", "body": 1, "delay": 60})
    (answer,) = line.json("status")
    rows = dict(row.split(maxsplit=1) for row in line("status").splitlines()[1:])
    assert rows["sleep"] == f"{answer['states']['sleep']:,}"
    assert re.fullmatch(r"[\d.]+ \wiB free of [\d.]+ \wiB", rows["disk"])
    assert rows["version"] == answer["version"]


def test_top_shows_all_topics_sorted(line: Line, server: Server) -> None:
    for number, topic in enumerate(("top.a", "top.b", "top.c")):
        server.put(topic, *({"body": n, "delay": 60} for n in range(number + 1)))
    rows = [row.split() for row in line("top", "--once", "--match", "top.", "--sort", "sleep").splitlines()]
    assert [row[:2] for row in rows] == [["topic", "sleep"], ["top.c", "3"], ["top.b", "2"], ["top.a", "1"], ["all", "3"]]
    assert rows[-1][2] == "6"
    assert line("top", "--match", "top.", "--sort", "topic").splitlines()[1].startswith("top.a")
    assert "--sort is one of topic" in line("top", "--sort", "size", code=2)


def test_top_is_live_on_a_terminal_until_ctrl_c(server: Server) -> None:
    server.put("top.live", {"body": 1, "delay": 60})
    ours, theirs = pty.openpty()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it, and so do theirs
    args = [*PROGRAM, "top", "--match", "top.live", "--every", "0.1"]
    env = environment(TERM="xterm-256color", TURTLEMQ_URL=server.url)
    with subprocess.Popen(args, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"top.live") < 3:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while os.read(ours, 65536):
                pass
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_bench_that_is_stopped_early_tells_its_figures(line: Line, server: Server) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = [
        *PROGRAM,
        "bench",
        "--topic",
        "stopped",
        "--duration",
        "60",
        "--delay",
        "0",
        "--rate",
        "1000",
        "--batch",
        "10",
        "--json",
    ]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment(TURTLEMQ_URL=server.url)) as process:
        while not [one for one in line.json("topics")[0] if one["topic"] == "stopped" and one["stats"]["history"]]:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert 0 < found["sent"] == found["acked"] < 60_000


def test_replay_of_a_misspelt_group_creates_nothing(line: Line, server: Server) -> None:
    server.put("replay", {"body": 1})
    server.fetch("replay", wait=5)
    assert "UNKNOWN_GROUP" in line("groups", "replay", "replay", "typo", "--since", "-1h", code=1)
    assert "UNKNOWN_TOPIC" in line("groups", "replay", "nowhere", "typo", "--since", "-1h", code=1)
    assert list(line.json("groups", "list", "replay")[0]) == ["default"]


def test_broken_json_is_stored_with_a_warning(line: Line) -> None:
    assert "the body is no JSON (Expecting" in line("put", "broken", '{"a": 1', "--delay", "60")
    for body, option in (("[1", "--text"), ("plain", "--text"), ("plain", ""), ('{"a": 1}', "--text"), ("[1]", "")):
        assert len(line("put", "broken", body, "--delay", "60", *([option] if option else [])).splitlines()) == 1, body
    assert [one["body"] for one in line.json("list", "broken")].count('{"a": 1}') == 1
    line("put", "broken", "-", "--text", given="{}", code=2)


def test_messages_come_from_stdin_by_either_name(line: Line) -> None:
    for number, words in enumerate((["-"], ["--file", "-"])):
        line("put", "stdin", *words, given=f'{{"id": "{number}", "body": 1, "delay": 60}}\n')
    assert [one["id"] for one in line.json("list", "stdin")] == ["0", "1"]
    assert "give a BODY" in line("put", "stdin", "1", "--file", "-", code=2)


def test_a_quiet_topic_has_a_short_forecast(line: Line, server: Server) -> None:
    server.ok("PUT", "/v1/topics/quiet", {})
    assert line("forecast", "quiet") == "nothing comes due in the next 1 d\n"
    server.put("quiet", {"body": 1, "delay": 86_400 * 3})
    assert line("forecast", "quiet").splitlines()[1] == "later 1"
    assert re.search(r"live ratio +100.0 %", line("stats", "quiet"))


# Use of the program


def test_connection_options_may_stand_before_the_verb(server: Server) -> None:
    nowhere = Line("http://127.0.0.1:9")
    before = dict(os.environ)
    assert "topic" in nowhere("--url", server.url, "--token", "x", "topics")
    assert dict(os.environ) == before
    nowhere("topics", code=1)
    assert run("--url", server.url, "status", "--json").returncode == 0


def test_help_is_a_verb_and_has_panels() -> None:
    line = Line("")
    everything = line("help")
    panels = [panel for panel in re.findall(r"─ ([A-Z][a-z ]+) ─", everything) if panel not in ("Options", "Connection")]
    assert panels == ["Messages", "Topics", "Dead letters", "Files", "Server"]
    assert "turtlemq dead requeue" in line("help", "dead", "requeue")
    assert "Usage: turtlemq dead requeue [OPTIONS] TOPIC [ID…]" in line("help", "dead", "requeue")
    line("help", "fly", code=2)


def test_help_has_placeholders_and_no_types() -> None:
    line = Line("")
    for verb in ("", *(full.removeprefix("turtlemq ") for full, _ in verbs())):
        told = line("help", *verb.split())
        assert "--help" in told
        assert re.findall(r"<[a-z\[\]]+>|Usage: .*[{}]", told) == [], verb


def completed(server: Server | None, words: str) -> list[str]:
    """The words that the shell offers to go on with. `server`: of the environment; without, the words name it."""
    number = str(len(words.split()) - 1 + words.endswith(" "))
    told = {"_TURTLEMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    told |= {"TURTLEMQ_URL": "http://127.0.0.1:9" if server is None else server.url}
    program = Path(sys.executable).with_name("turtlemq")
    return subprocess.run([program], env=environment(**told), capture_output=True, text=True, timeout=30).stdout.split()


@pytest.mark.slow
def test_the_shell_completes_groups_settings_and_values(server: Server) -> None:
    server.put("shell", {"body": 1})
    for group in ("audit", "mirror"):
        server.ok("PUT", f"/v1/topics/shell/groups/{group}", {})
    assert completed(server, "turtlemq groups replay shell m") == ["mirror"]
    assert completed(server, "turtlemq fetch shell --group a") == ["audit"]
    assert completed(server, "turtlemq topics set shell ret") == ["retention.history_hours=", "retention.history_bytes="]
    assert completed(server, "turtlemq topics set shell delivery=at-m") == ["delivery=at-most-once"]
    assert completed(server, "turtlemq put shell x --priority ") == ["high", "normal", "low"]
    assert completed(server, "turtlemq list shell --state r") == ["ready", "reserve"]
    assert completed(server, "turtlemq groups place shell g --start l") == ["latest"]


@pytest.mark.slow
def test_completion_asks_the_server_of_the_line(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    secret = new_token()
    tokens = json.dumps([{"name": "me", "hash": hash_of(secret), "rights": ["admin"]}])
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key), "TURTLEMQ_TOKENS": tokens}
    with running(tmp_path / "data", tls=ssl.create_default_context(cafile=str(cert)), **files) as secure:
        bearer = {"Authorization": f"Bearer {secret}"}
        secure.ok("PUT", "/v1/topics/shell.tls/groups/mirror", {}, headers=bearer)
        secure.ok("PUT", "/v1/topics/shell.tls/schedules/nightly", {"every": 3600, "body": 1}, headers=bearer)
        line = f"--url {secure.url} --cacert {cert} --token {secret}"
        for words, found in (
            (f"turtlemq {line} stats shell", "shell.tls"),
            (f"turtlemq stats {line} shell", "shell.tls"),
            (f"turtlemq {line} groups replay shell.tls m", "mirror"),
            (f"turtlemq groups replay {line} shell.tls m", "mirror"),
            (f"turtlemq fetch shell.tls {line} --group m", "mirror"),
            (f"turtlemq schedules trigger {line} shell.tls n", "nightly"),
        ):
            assert completed(None, words) == [found], words
        assert completed(None, f"turtlemq stats {line.replace(str(cert), '/none')} shell") == []


def test_only_a_429_makes_a_request_go_again(server: Server) -> None:
    with proxied(server.port) as proxy:
        line = Line(proxy.url)
        busy = b'{"error": {"code": "OVERLOADED", "message": "busy", "retry_after_ms": 10}}'
        proxy.canned = canned("429 Too Many Requests", busy)
        proxy.set("answer", 2)
        line("put", "again", "1")
        assert len(proxy.requests) == 3
        proxy.canned = canned("503 Service Unavailable", b"a proxy says no")
        proxy.set("answer", 1)
        assert "turtlemq: HTTP 503: a proxy says no" in line("put", "again", "1", code=1)
        proxy.set("cut-answer", 1)
        assert "no answer from" in line("put", "again", "1", code=1)
        assert len(proxy.requests) == 5


def test_an_export_that_breaks_off_fails(server: Server) -> None:
    server.ok("PUT", "/v1/topics/export", {"max_attempts": 1})
    server.put("export", *({"body": "x" * 1000, "id": f"m{n}"} for n in range(100)))
    server.ack("export", *(f"-{one['id']}" for one in server.fetch("export", wait=5, max=100)))
    with proxied(server.port) as proxy:
        proxy.set("cut-half")
        assert "turtlemq: no answer from" in Line(proxy.url)("dead", "export", "export", code=1)
    with open("/dev/full", "wb") as full:
        command = [*PROGRAM, "dead", "export", "export"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(TURTLEMQ_URL=server.url))
    assert done.returncode != 0
    assert "turtlemq: cannot write to stdout: No space left" in done.stderr


@pytest.mark.parametrize("url", ["ftp://queue", "http://", "http://queue:99999", "http://[::1"])
def test_a_url_that_is_none_is_wrong_use(url: str) -> None:
    assert f"turtlemq: {url!r} is no address of a server" in Line(url)("topics", code=2)


def first_line_of_worker(url: str) -> str:
    """The first line that a worker says, which goes on trying."""
    command = [*PROGRAM, "work", "t", "--exec", "true", "--url", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        try:
            return process.stderr.readline()
        finally:
            process.kill()


@pytest.mark.slow
def test_tls_errors_name_what_helps(tmp_path: Path, server: Server) -> None:
    cert, key = certificate(tmp_path)
    (tmp_path / "rows.csv").write_text("id,body\na,1\n")
    imported = ["import", "csv", "imported", str(tmp_path / "rows.csv")]
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key)}
    with running(tmp_path / "data", tls=ssl.create_default_context(cafile=str(cert)), **files) as secure:
        untrusted = run("topics", TURTLEMQ_URL=secure.url)
        plain = run("topics", TURTLEMQ_URL=secure.url.replace("https", "http"))
        for verb in (["topics"], imported):
            assert run(*verb, "--cacert", str(cert), TURTLEMQ_URL=secure.url).returncode == 0
        unreadable = run(*imported, "--cacert", str(tmp_path / "none"), TURTLEMQ_URL=secure.url)
        of_import, of_work = run(*imported, TURTLEMQ_URL=secure.url), first_line_of_worker(secure.url)
    assert (unreadable.returncode, "cannot be read as certificates" in unreadable.stderr) == (2, True)
    assert of_import.stderr == untrusted.stderr
    assert of_work == untrusted.stderr.replace("\n", " The worker goes on trying.\n")
    encrypted = run("topics", TURTLEMQ_URL=server.url.replace("http", "https"))
    for found, text in ((untrusted, "--cacert"), (plain, "speaks TLS only. Use https://"), (encrypted, "Use http://")):
        assert (found.returncode, found.stderr.count("\n")) == (1, 1)
        assert text in found.stderr
        assert "turtlemq serve" not in found.stderr


def test_a_pipe_that_closes_early_ends_a_long_list(server: Server) -> None:
    server.put("pipe", *({"id": f"s{n}", "body": n, "delay": 60} for n in range(3000)))
    args = [*PROGRAM, "list", "pipe", "--all", "--json"]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(TURTLEMQ_URL=server.url)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == "s0"
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_long_list_on_a_terminal_keeps_its_columns(server: Server) -> None:
    server.put("wide", *({"id": f"s{n}", "body": n, "delay": 60} for n in range(1500)))
    seen = on_a_terminal("list", "wide", "--all", columns=100, TURTLEMQ_URL=server.url)
    rows = re.sub(r"\x1b\[[0-9;]*m", "", seen).replace("\r", "").splitlines()
    assert len(rows) == 1501
    assert len({row.index(" 20") for row in rows[1:1001]}) == 1
