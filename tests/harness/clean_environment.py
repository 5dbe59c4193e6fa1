"""Clean virtual environments with copies of packages that this environment has: quick, and without a package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def clean_environment(place: Path, *packages: str) -> Path:
    """Make an environment with some packages and without pip. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    (into,) = place.glob("lib/python*/site-packages")
    for name in packages:
        for file in distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                _link(Path(str(file.locate())), into / file)
    return place / "bin/python"


def locked_packages(lock: Path) -> list[str]:
    """The packages of a lock that this environment has in the locked version."""
    found = []
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text("utf-8"), re.MULTILINE):
        try:
            if distribution(name).version == version:
                found.append(name)
        except PackageNotFoundError:  # of another system or Python
            continue
    return found


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
