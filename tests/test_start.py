"""From the command line to the server: on the short cut for plain flags, with nothing loaded that is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli_reference import verbs
from tests.harness.server_process import environment, run
from turtlemq.cli.serve import flags_of
from turtlemq.cli.start import parse_plain_flags

PLAIN = [  # as the files in deploy/ and most users write it
    "serve",
    "serve --data /var/lib/turtlemq/data --config /etc/turtlemq.toml",
    "serve --data /data --host 0.0.0.0 --data elsewhere",
    "serve --host ::1 --port 0",
    "serve --port 8878 --port 65535",
    "serve --port 080",
]
NOT_PLAIN = [
    "",
    "put orders hello",
    "--help",
    "serve --help",
    "serve --data=there",
    "serve --dat there",
    "serve --data",
    "serve there",
    "serve --port 65536",
    "serve --port high",
    "serve --port ٣",
    "serve --port -1",
    "serve --port " + "9" * 5000,
    "serve --data --port 1",
]


@pytest.mark.parametrize("words", PLAIN)
@pytest.mark.parametrize("file", ["", "of-the-environment.toml"])
def test_plain_flags_mean_the_same_without_a_parser(words: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURTLEMQ_CONFIG", file)
    told = parse_plain_flags(words.split())
    assert told is not None
    serve: Any = dict(verbs())["turtlemq serve"]
    parsed = serve.make_context("serve", words.split()[1:]).params
    config = parsed.pop("config")
    assert {name: value for name, value in flags_of(**parsed).items() if value is not None and value is not False} == told[0]
    assert (None if config is None else str(config)) == told[1]


@pytest.mark.parametrize("words", NOT_PLAIN, ids=lambda words: words[:30])
def test_all_else_is_left_to_the_parser(words: str) -> None:
    assert parse_plain_flags(words.split()) is None


def test_a_server_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    unwanted = (
        "click",
        "pydantic",
        "rich",
        "turtlemq.cli.call",
        "turtlemq.cli.output",
        "turtlemq.cli.verbs",
        "turtlemq.client",
        "typer",
    )
    said = f"print(*sorted(set({unwanted!r}) & set(sys.modules)), os.environ.get('SSL_CERT_FILE'))"
    program = f"import atexit, os, sys; atexit.register(lambda: {said}); from turtlemq.cli import main; main()"
    args = [sys.executable, "-c", program, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment(SSL_CERT_FILE="mine")) as process:
        assert process.stdout is not None
        assert "listens on" in process.stdout.readline()
        process.terminate()
        assert process.stdout.read().split() == ["mine"]
    assert process.returncode == 0


def test_what_is_wrong_is_said_on_both_ways(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    short, long = run("serve", "--config", missing), run("serve", f"--config={missing}")
    assert (short.returncode, short.stdout, short.stderr) == (long.returncode, long.stdout, long.stderr)
    assert (short.returncode, short.stdout) == (2, "")
    assert short.stderr.startswith(f"turtlemq: {missing} cannot be read")


def test_a_verb_loads_its_own_module_only() -> None:
    program = "import sys; from turtlemq.cli.verbs import command_line; command_line('put'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=environment())
    assert done.returncode == 0, done.stderr
    kinds = {"turtlemq.cli." + name for name in "backup bench config dead files message queue report serve stats topics".split()}
    loaded = set(done.stdout.split())
    assert kinds & loaded == {"turtlemq.cli.queue"}
    assert not {"turtlemq.client", "http.client", "ssl"} & loaded, "only a request needs them"
