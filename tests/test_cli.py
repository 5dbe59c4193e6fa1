"""The command line: every verb has help, the right exit code, and output for humans and for scripts."""

from __future__ import annotations

import io
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.harness.cli_reference import verbs
from tests.harness.client_network import proxied
from tests.harness.command_line import Line, on_a_terminal
from tests.harness.server_process import PROGRAM, Server, environment, run, running
from turtlemq.cli import queue
from turtlemq.cli.times import parse_duration, parse_time
from turtlemq.engine import Engine
from turtlemq.model import Message


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("cli") / "data") as found:
        yield found


@pytest.fixture
def line(server: Server) -> Line:
    return Line(server.url)


@pytest.mark.parametrize("verb", [name.removeprefix("turtlemq ") for name, _ in verbs()])
def test_every_verb_has_help(verb: str) -> None:
    assert "Usage" in Line("")(*verb.split(), "--help")


def test_the_contract_s_verbs_are_there() -> None:
    wanted = "serve put fetch ack cancel topics stats dead forecast check inspect compact backup restore bench report".split()
    assert {f"turtlemq {verb}" for verb in wanted} <= {name for name, _ in verbs()}


@pytest.mark.slow
def test_the_program_itself() -> None:
    assert run("--version").stdout.startswith("turtlemq ")
    assert json.loads(run("version", "--json").stdout)["format"] == 1
    assert run("fly").returncode == 2
    refused = run("topics", "--url", "http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Is the server running" in refused.stderr
    assert "turtlemq serve" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert run("topics", "--url", "nonsense://x").returncode == 2


def test_put_fetch_ack(line: Line) -> None:
    assert line("put", "a", "plain text", "--id", "one") == "one\n"
    assert line.json("put", "a", '{"x": 1}', "--id", "two", "--ttr", "9")[0]["created"] == 1
    assert line.json("put", "a", "again", "--id", "two")[0]["duplicates"] == 1
    first, second = line.json("fetch", "a", "--wait", "5")
    assert (first["body"], second["body"]) == ("plain text", {"x": 1})
    assert line("ack", "a", "one", "-two", "--error", "why", "--retry-delay", "0") == "1 acked, 1 failed, 0 dead, 0 unknown\n"
    assert "attempt 2" in line("fetch", "a", "--wait", "5", "--max", "1")
    assert line.json("ack", "a", "two", "three", code=1)[0] == {"acked": 1, "failed": 0, "dead": 0, "unknown": ["three"]}


def test_ack_and_extend_name_a_lease(line: Line) -> None:
    line("put", "leases", "text", "--id", "one")
    shown = line("fetch", "leases", "--wait", "5").rstrip().split("\t")
    lease = shown[-1].removeprefix("lease ")
    late = "one: held under another lease by now\n"
    assert line("extend", "leases", "one", "--lease", "0-0", code=1) == f"0 extended, 0 unknown, 1 late\n{late}"
    assert line("ack", "leases", "-one", "--lease", "0-0", code=1) == f"0 acked, 0 failed, 0 dead, 0 unknown, 1 late\n{late}"
    assert line("extend", "leases", "one", "--lease", lease) == "1 extended, 0 unknown, 0 late\n"
    assert line("ack", "leases", "-one", "--lease", lease, "--retry-delay", "0").startswith("0 acked, 1 failed")
    (again,) = line.json("fetch", "leases", "--wait", "5")
    assert line("ack", "leases", "one", "--lease", again["lease"]) == "1 acked, 0 failed, 0 dead, 0 unknown, 0 late\n"


def test_text_does_nothing_to_a_terminal(line: Line) -> None:
    line("put", "escape", "\x1b[2Jgone\n")
    assert "\\x1b[2Jgone\\n" in line("fetch", "escape", "--wait", "5", "--ack", "auto")


def test_put_from_a_file_and_from_stdin(line: Line, tmp_path: Path) -> None:
    lines = [json.dumps({"body": i, "id": f"m{i}", "delay": 60}) for i in range(2500)]
    (tmp_path / "f.ndjson").write_text("\n".join(lines))
    assert "2500 created, 0 duplicates" in line("put", "many", "--file", str(tmp_path / "f.ndjson"))
    assert "1 created, 1 duplicates" in line("put", "many", "-", given=f'{lines[0]}\n\n{{"body": 1}}\n')
    line("put", "many", "--file", str(tmp_path / "missing"), code=1)
    line("put", "many", code=2)
    line("put", "many", "-", "--delay", "5", code=2)
    line("put", "many", "-", given="{", code=1)
    line("put", "bad/name", "x", code=2)


def test_a_file_that_turns_bad_says_how_far_it_got(line: Line, tmp_path: Path) -> None:
    (tmp_path / "f.ndjson").write_text('{"body": 1, "delay": 60}\n' * 1000 + '{"boddy": 1}\n')
    said = line("put", "half", "--file", str(tmp_path / "f.ndjson"), code=1)
    assert "boddy" in said
    assert "turtlemq: line 1001: INVALID" in said
    assert "1000 created and 0 duplicates before; nothing of line 1001 is stored" in said


def test_lines_are_counted_as_they_stand_in_the_file(line: Line) -> None:
    good = '{"body": 1, "delay": 60}\n'
    said = line("put", "blank", "-", given="\n" + good * 1000 + "\n\n" + good + "\nnot json\n\n", code=1)
    assert "turtlemq: line 1006: " in said
    assert "1000 created and 0 duplicates before; nothing of lines 1004 to 1006" in said


@pytest.mark.parametrize("mode", ["cut-answer", "cut-half", "cut-request"])
def test_lines_whose_answer_was_lost_may_be_stored(line: Line, server: Server, mode: Any) -> None:
    with proxied(server.port) as proxy:
        proxy.set(mode)
        said = Line(proxy.url)("put", f"lost.{mode}", "-", given='{"body": 1, "delay": 60}\n' * 3, code=1)
    assert "0 created and 0 duplicates before; whether lines 1 to 3 are stored is not known" in said
    said = Line("http://127.0.0.1:9")("put", "lost", "-", given='{"body": 1, "delay": 60}\n' * 3, code=1)
    assert "nothing of lines 1 to 3" in said


def test_batches_of_a_file_are_bounded_in_lines_and_bytes() -> None:
    long, short = b"x" * 1_000_000 + b"\n", b"y\n"
    found = list(queue._batches(io.BytesIO(long * 20 + short * 2500 + b"\n  \nend")))
    batches = [lines for _, lines in found]
    assert [(numbers[0], numbers[-1]) for numbers, _ in found][-2:] == [(1021, 2020), (2021, 2523)]
    assert sum(map(len, batches)) == 2521
    assert max(map(len, batches)) == queue.LINES
    assert max(sum(map(len, batch)) for batch in batches) <= queue.LINE_BYTES + len(long)
    assert batches[-1][-1] == b"end\n"


def test_put_comes_later_where_the_server_says_so(line: Line) -> None:
    line("topics", "create", "slow", "rate.produce_per_s=2000", "rate.burst=1000")
    lines = '{"body": 1, "delay": 60}\n' * 2000
    assert "2000 created" in line("put", "slow", "-", given=lines)


def test_options_of_put(line: Line) -> None:
    options = ["--priority", "high", "--header", "a=b=c", "--header", "d=", "--due", "+1h", "--expires", "+2h", "--ttr", "2m"]
    line("put", "options", "x", "--id", "i", *options)
    (found,) = line.json("get", "options", "i")
    assert (found["headers"], found["priority"]) == ({"a": "b=c", "d": ""}, "high")
    assert found["expires_ms"] - found["due_ms"] == pytest.approx(3_600_000, abs=1000)
    line("put", "options", "x", "--header", "nothing", code=2)
    line("put", "options", "x", "--delay", "soon", code=2)
    line("put", "options", "x", "--due", "yesterday", code=2)
    line("put", "options", "x", "--priority", "odd", code=2)
    line("fetch", "options", "--ack", "maybe", code=2)


def test_durations_and_times_as_people_write_them() -> None:
    now = time.time() * 1000
    assert [parse_duration(text) for text in ("0", "1.5s", ".5h", "2w")] == [0, 1.5, 1800, 1_209_600]
    assert parse_time("-2h") == pytest.approx(now - 7_200_000, abs=60_000)
    assert parse_time("2030-01-01T00:00+01:00") == 1_893_452_400_000
    for text in ("-1", "1 h", "", "h", "1y", "nan", "inf"):
        with pytest.raises(typer.BadParameter):
            parse_duration(text)
    for text in ("", "+", "tomorrow", "2030-13-01"):
        with pytest.raises(typer.BadParameter):
            parse_time(text)


@pytest.mark.parametrize("id_", ["json", "9", "a=b", "url", "h", "ünï", "x y", "help"])
def test_any_id_can_fail(line: Line, id_: str) -> None:
    """A dash before it, for any id."""
    line("put", "dash", "1", f"--id={id_}")
    line("fetch", "dash", "--wait", "5")
    assert line("ack", "dash", f"-{id_}", "--retry-delay", "60") == "0 acked, 1 failed, 0 dead, 0 unknown\n"


@pytest.mark.parametrize("option", ["--retry-dely", "--retry-dely=5", "--x"])
def test_a_misspelt_option_of_ack_is_no_id(line: Line, option: str) -> None:
    topic = f"typo.{option.strip('-').partition('=')[0]}{len(option)}"
    for id_ in ("x", "60"):
        line("put", topic, "1", "--id", id_)
    line("fetch", topic, "--wait", "5")
    assert f"there is no option {option}" in line("ack", topic, "-x", option, "60", code=2)
    assert line.json("stats", topic)[0]["stats"]["reserve"] == 2


def test_bodies_are_sent_to_the_digit_and_shown_as_they_are(line: Line) -> None:
    bodies = ["0.1000000000000000055511151231257827", "12345678901234567890", "NaN", "[/red]", "[bold]", "007", '{"a": [1e2]}']
    for number, body in enumerate(bodies):
        line("put", "digits", body, "--delay", str(number + 100), "--id", f"[{number}]")
    shown = line("list", "digits")
    assert [row.split("  ")[0] for row in shown.splitlines()[1:]] == [f"[{number}]" for number in range(len(bodies))]
    assert "[/red]" in shown
    assert [message["body"] for message in line.json("list", "digits")][2:5] == ["NaN", "[/red]", "[bold]"]
    assert "[bold]" in line("get", "digits", "[4]")
    assert "INVALID_TOPIC: '[/x]'" in line("stats", "[/x]", code=2)


def test_the_shell_completes_verbs_and_topics(line: Line, server: Server) -> None:
    line("put", "complete.me", "1", "--delay", "60")

    def completed(words: str) -> list[str]:
        number = str(len(words.split()) - 1)
        told = {"_TURTLEMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number, "TURTLEMQ_URL": server.url}
        program = Path(sys.executable).with_name("turtlemq")
        return subprocess.run([program], env=environment(**told), capture_output=True, text=True, timeout=30).stdout.split()

    assert completed("turtlemq pu") == ["put"]
    assert completed("turtlemq stats complete") == ["complete.me"]


def test_extend(line: Line) -> None:
    line("put", "e", "1", "--id", "x")
    line("fetch", "e", "--wait", "5")
    assert line("extend", "e", "x", "--ttr", "5m") == "1 extended, 0 unknown\n"
    assert line.json("extend", "e", "y", code=1)[0]["unknown"] == ["y"]
    assert line("extend", "e", "y", code=1) == "0 extended, 1 unknown\ny: not held by the group\n"
    assert line("ack", "e", "-y", code=1) == "0 acked, 0 failed, 0 dead, 1 unknown\ny: not held by the group\n"


def test_one_message(line: Line) -> None:
    line("put", "one", '{"n": 1}', "--id", "x", "--delay", "1h", "--header", "k=v")
    assert line("list", "one", "--to", "+2h").splitlines()[1].startswith("x   20")
    assert line.json("list", "one", "--to", "+1m") == []
    assert "rescheduled, due 20" in line("reschedule", "one", "x", "--delay", "0", "--body", "other")
    line("reschedule", "one", "x", code=2)
    line("fetch", "one", "--wait", "5", "--consumer", "me")
    line("ack", "one", "x")
    story = line("get", "one", "x")
    assert story.startswith("x  history\n")
    assert '"k": "v"' in story
    assert story.count("●") >= 4
    assert "│" in story
    line("get", "one", "nobody", code=1)
    line("reschedule", "one", "x", "--delay", "1", code=1)


def test_topics(line: Line) -> None:
    assert "ttr" in line("topics", "create", "made", "ttr=7", "backoff.base=2", "delivery=at-most-once")
    assert line.json("topics", "set", "made", "max_attempts=3")[0]["settings"]["ttr"] == 7
    assert "at-most-once" in line("topics", "set", "made")
    assert "already" in line("topics", "create", "made", code=1)
    line("topics", "set", "made", "nonsense", code=2)
    line("topics", "set", "made", "nonsense=1", code=2)
    line("topics", "set", "nobody", "ttr=1", code=1)
    assert "made" in line("topics", "list")
    assert "--yes" in line("topics", "delete", "made", code=2)
    assert line("topics", "delete", "made", "--yes") == "made deleted\n"
    assert "made" not in line("topics")


def test_groups(line: Line) -> None:
    line("put", "g", "1", "--id", "x")
    line("fetch", "g", "--wait", "5", "--ack", "auto")
    assert "0 before the end" in line("groups", "place", "g", "late", "--start", "latest")
    assert "1 before the end" in line("groups", "replay", "g", "late", "--since", "-1h")
    assert line.json("fetch", "g", "--group", "late")[0]["id"] == "x"
    assert "late" in line("groups", "list", "g")
    assert set(line.json("groups", "list", "g")[0]) == {"default", "late"}
    line("groups", "place", "g", "late", "--start", "someday", code=2)
    line("groups", "delete", "g", "late", "--yes")
    line("groups", "delete", "g", "late", "--yes", code=1)


def test_cancel(line: Line) -> None:
    line("put", "c", "1", "--id", "x", "--delay", "60")
    assert line("cancel", "c", "x") == "1 cancelled\n"
    first, *rest = line("get", "c", "x").splitlines()
    assert first == "x  cancelled"
    assert [row.split()[0] for row in rest if row][:2] == ["due", "created"], "its times are kept"
    assert not any("1970" in row or "body" in row for row in rest), "and nothing is made up"
    assert line.json("cancel", "c", "nobody", code=1)[0] == {"cancelled": 0, "missed": {"nobody": "unknown"}}
    line("put", "c", "1", "--id", "y", "--delay", "60")
    assert line("cancel", "c", "--due-from", "+30s", "--due-to", "+2m") == "1 cancelled\n"
    line("cancel", "c", code=2)


def test_looking(line: Line) -> None:
    line("put", "look", "1", "--delay", "90")
    line("fetch", "look")
    assert "look" in line("topics")
    assert "look" in [one["topic"] for one in line.json("topics")[0]]
    assert "default" in line("stats", "look")
    assert line.json("stats", "look")[0]["stats"]["sleep"] == 1
    picture = line("forecast", "look", "--hours", "0.05", "--bucket", "60").splitlines()
    assert len(picture) in (3, 4), "whole minutes, of which the first has begun"
    assert sorted(row.count("█") for row in picture)[-2:] == [0, 50], "one line has all of it"
    counts = line.json("forecast", "look", "--bucket", "60", "--hours", "0.05")[0]["counts"]
    assert (sum(counts), max(counts)) == (1, 1)
    line("stats", "nobody", code=1)
    assert "bytes before" in line("compact", "look")
    line("compact", "nobody", code=1)


def test_watching_ends_with_ctrl_c(line: Line, server: Server) -> None:
    line("put", "watched", "1", "--delay", "60")
    args = [*PROGRAM, "stats", "watched", "--watch", "--every", "0.1", "--json"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it, and so do theirs
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment(TURTLEMQ_URL=server.url)) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["stats"]["sleep"] for _ in range(2)] == [1, 1]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0


@pytest.mark.slow
def test_colours_and_bars_are_for_terminals(line: Line, server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.ndjson").write_text('{"body": 1, "delay": 60}\n' * 3000)
    file = str(tmp_path / "f.ndjson")
    assert "\x1b[" in on_a_terminal("put", "bars", "--file", file, TURTLEMQ_URL=server.url)
    assert "\x1b[36m" in on_a_terminal("topics", TURTLEMQ_URL=server.url)
    assert "\x1b[36m" not in on_a_terminal("topics", TURTLEMQ_URL=server.url, NO_COLOR="1")
    piped = run("put", "bars", "--file", file, TURTLEMQ_URL=server.url)
    assert (piped.stdout, piped.stderr) == ("3000 created, 0 duplicates\n", "")
    assert "\x1b" not in line("topics")


@pytest.mark.parametrize("kind", ["json", "bson"])
@pytest.mark.slow
def test_bench_counts_what_it_sends(line: Line, kind: str) -> None:
    (found,) = line.json("bench", "--duration", "0.5", "--delay", "0.2", "--rate", "4000", "--batch", "100", "--format", kind)
    assert found["ok"]
    assert 0 < found["sent"] == found["received"] == found["acked"] == found["stored"]
    assert found["early"] == 0
    assert found["lateness_ms"]["p50"] >= 0
    assert not [one for one in line.json("topics")[0] if one["topic"].startswith("bench")]


def test_bench_of_single_posts_and_of_nothing(line: Line) -> None:
    said = line(
        "bench", "--duration", "0.3", "--delay", "0", "--batch", "1", "--connections", "3", "--consumers", "1", "--rate", "100"
    )
    assert "ok: sent = received = acked" in said
    assert "NOT ok" in line("bench", "--duration", "0.2", "--connections", "0", "--consumers", "0", code=1)
    line("put", "taken", "1")
    line("bench", "--topic", "taken", code=2)
    line("bench", "--format", "xml", code=2)
    Line("http://127.0.0.1:9")("bench", code=1)


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
    assert line("dead", "delete", "d", "m9", code=1) == "0 deleted\nm9: no dead letter\n"
    assert "2 requeued" in line("dead", "requeue", "d", "--error", "even", "--delay", "60")
    assert "Delete all dead letters of 'd'? Say --yes if so." in line("dead", "delete", "d", "--all", code=2)
    assert "'odd'? Say --yes" in line("dead", "delete", "d", "--error", "odd", code=2)
    assert "1 deleted" in line("dead", "delete", "d", "--all", "--yes")


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


def test_inspect_shows_for_whom_a_cancel_was(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", [Message(b"", 10, id="a"), Message(b"", 10, id="b")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    engine.ack("t", "g", ["-a"], 10, retry_delay_ms=100_000)
    engine.cancel("t", ["a", "b"], 11)
    engine.close()
    (event,) = Line("").json("inspect", str(tmp_path / "topic" / "t" / "history_0000000000.bson"))
    assert (event["event"]["unfetched"], event["event"]["naps"]) == ({"g": 1}, {"g": ["a"]})


def test_compact(data: Path) -> None:
    line = Line("")
    assert "bytes before" in line("compact", "t", "--data", str(data))
    line("compact", "nobody", "--data", str(data), code=1)
