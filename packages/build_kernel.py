"""Compile turtlemq/segment/kernel.c, where there is a C compiler: `python packages/build_kernel.py` builds it in place.

`make setup` and `make run` call it, and so does hatchling when it makes a wheel (`pip install .`): that wheel is for this
platform then, and for every Python from 3.11 on, since the kernel keeps to the stable ABI. Without a compiler or the headers of
Python, or with TURTLEMQ_KERNEL=off, the wheel is for any platform, and the server does the same work with numpy.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script, where only the server's packages are installed
    BuildHookInterface = object  # type: ignore[assignment, misc]

SOURCE = Path(__file__).resolve().parents[1] / "turtlemq" / "segment" / "kernel.c"
MODULE = "_kernel.abi3.so"
OPTIONS = ("-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter")
COMPILE_S = 120


def build(into: Path, more: Sequence[str] = ()) -> str | None:
    """Compile the kernel into a folder. Returns why it could not be done, or None."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    platform = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    made = into / f".{MODULE}.{os.getpid()}"
    command = [*compiler, *OPTIONS, *platform, *more, f"-I{sysconfig.get_path('include')}", SOURCE.name, "-o", str(made)]
    try:
        done = subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode == 0:
            made.replace(into / MODULE)
            return None
        return (done.stderr.strip() or f"{compiler[0]} ends with {done.returncode}").splitlines()[0]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        made.unlink(missing_ok=True)


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the kernel to a wheel, or builds it in place for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        if os.environ.get("TURTLEMQ_KERNEL") == "off":
            return
        folder = SOURCE.parent if version == "editable" else Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        if why := build(folder):
            self.app.display_warning(f"Without the compiled kernel: {why}")
        elif version != "editable":
            build_data["force_include"][str(folder / MODULE)] = f"turtlemq/segment/{MODULE}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is built: the module lies in it now."""
        if version != "editable":
            (Path(self.directory) / MODULE).unlink(missing_ok=True)


if __name__ == "__main__":
    failed = build(SOURCE.parent)
    print(f"Without the compiled kernel: {failed}" if failed else f"Compiled: turtlemq/segment/{MODULE}")
