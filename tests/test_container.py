"""The container image: its steps in a clean environment, and the image itself where an engine has the base image.

An engine that needs options gets them from IMAGE_BUILD_OPTIONS (such as `--build-arg=BASE=…`) and IMAGE_RUN_OPTIONS."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from packages import release
from tests.harness.clean_environment import clean_environment, locked_packages
from tests.harness.cli_reference import verbs
from tests.harness.server_process import ROOT
from turtlemq import __version__
from turtlemq.server.config import Config

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text("utf-8").replace("\\\n", " ")
BUILD_OPTIONS, RUN_OPTIONS = (shlex.split(os.environ.get(f"IMAGE_{name}_OPTIONS", "")) for name in ("BUILD", "RUN"))


def steps(instruction: str, stage: int) -> list[str]:
    """The arguments of an instruction of the Dockerfile, in one of its two stages."""
    found = re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:][stage]
    return re.findall(rf"^{instruction} +(.*)$", found, re.MULTILINE)


def context() -> set[str]:
    """Files and folders at the top that .dockerignore lets pass."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def test_the_context_is_what_the_image_copies() -> None:
    copied = {name for step in steps("COPY", 0) for name in step.split()[:-1]}
    assert copied == context()
    assert all((ROOT / name).exists() for name in copied)
    assert steps("COPY", 1) == ["--from=build /opt/turtlemq /opt/turtlemq"]


def test_the_image_runs_as_an_ordinary_user_and_is_probed() -> None:
    assert steps("USER", 1) == ["10001"]
    assert steps("VOLUME", 1) == ["/data"]
    assert steps("EXPOSE", 1) == [str(Config().port)]
    program, verb, *options = json.loads(steps("ENTRYPOINT", 1)[0])
    known = {option for parameter in dict(verbs())[f"{program} {verb}"].params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known


def health_check(url: str, programs: Path) -> int:
    """The exit code of the image's health check, for a server on another port."""
    command = json.loads(steps("HEALTHCHECK", 1)[0].partition("CMD ")[2])
    assert f"127.0.0.1:{Config().port}" in command[-1]
    command[-1] = command[-1].replace(str(Config().port), url.rpartition(":")[2])
    return subprocess.run([programs / command[0], *command[1:]], capture_output=True, timeout=60).returncode


@pytest.mark.slow
def test_steps_of_the_image_make_a_server(tmp_path: Path) -> None:
    """The commands of the first stage, in a folder instead of a container, with the context alone.

    Packages that this environment has in the locked version are there already, so pip brings only the others."""
    source, target = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for name in context():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    clean_environment(target, *locked_packages(ROOT / "requirements-run.lock"))
    for step in steps("RUN", 0):
        command = step.replace("/opt/turtlemq", str(target)).replace("python3 ", f"{sys.executable} ")
        release.run("sh", "-e", "-c", command, cwd=source)
    programs = target / "bin"
    assert release.run(programs / "turtlemq", "--version").startswith(f"turtlemq {__version__} (")
    assert not (programs / "pip").exists()
    here = tmp_path / "here"
    here.mkdir()
    assert release.run_readme(programs, here) > 5
    with release.served(programs, here) as url:
        assert health_check(url, programs) == 0
    assert health_check(url, programs) != 0


# With an engine


@pytest.fixture(name="engine", scope="module")
def an_engine() -> tuple[str, str]:
    """The engine that has the base image, and the image's name there."""
    try:
        return release.engine(release.base_image(BUILD_OPTIONS), *RUN_OPTIONS)
    except release.NoEngine as why:
        pytest.skip(f"the steps of the image are tried without an engine, as {why}")


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first build brings all packages; later ones take about 15 s of processor time
def test_the_image_serves_with_a_read_only_root(engine: tuple[str, str]) -> None:
    name, base = engine
    tag = f"{release.IMAGE}-test"
    release.build_image(name, base, "1700000000", BUILD_OPTIONS, tag)
    hosts = {"TURTLEMQ_ALLOWED_HOSTS": "192.0.2.0/24", "TURTLEMQ_PORT_8878_TCP": "tcp://10.96.0.1:8878"}
    assert release.try_image(name, tag, *RUN_OPTIONS, *(f"--env={key}={text}" for key, text in hosts.items()))
    with pytest.raises(release.Failed, match="max_topics"):
        release.try_image(name, tag, *RUN_OPTIONS, "--env=TURTLEMQ_MAX_TOPICS=none")


@pytest.mark.parametrize(
    "tags", [["localhost/python:3.13-slim"], ["images.example/library/python:3.13-slim", "localhost/python:3.13-slim"]]
)
def test_podman_finds_an_image_made_here_as_localhost(tags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "run", lambda *command: json.dumps(tags))
    found = {name: release.local_image(name, "python:3.13-slim") for name in ("docker", "podman")}
    assert found == {"docker": "python:3.13-slim", "podman": "python:3.13-slim" if len(tags) > 1 else tags[0]}


def test_an_engine_that_starts_nothing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, verb: str, *rest: str) -> str:
        if name == "docker" or verb == "run":
            raise release.Failed("setrlimit: Operation not permitted")
        return "[]"

    monkeypatch.setattr(release, "run", run)
    with pytest.raises(release.NoEngine, match=r"sh packages/base_image\.sh.*setrlimit"):
        release.engine("python:3.13-slim")
    assert "setrlimit" in release.release_image("0", [], [])


def test_the_health_check_is_that_of_the_dockerfile() -> None:
    assert release.health_check() == json.loads(steps("HEALTHCHECK", 1)[0].partition("CMD ")[2])
