"""Release files: sdists, wheels, a bill of materials and checksums. `make release` builds and tries them.

Everything is built twice, in this tree and in a copy of the tracked files elsewhere, and must be equal byte for byte: nothing
comes from the place, the time or files that only this machine has. Then the wheels are installed into clean environments, with
every Python from 3.11 to 3.14 that is found, and the first commands of README.md are run there. docs/RELEASING.md has the steps
around it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.harness.doc_pages import URL, Block, blocks, commands, matches
from turtlemq import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = ("packages/client", ".")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
IMAGE = f"turtlemq:{__version__}"
READY_S = 60
SBOM = f"turtlemq-{__version__}.cdx.json"
_LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?: ; ([^\\\n]+?))? \\$", re.MULTILINE)


class Failed(Exception):
    """A release that must not be published."""


def run(*command: str | Path, cwd: Path = ROOT, **more: str) -> str:
    """The output of a command; `Failed` with all of it if it fails."""
    done = subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, without those that change where Python or the program look for things."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURTLEMQ_", "PYTHON"))}
    return kept | more


def source_date() -> str:
    """The time that all files in the archives get: SOURCE_DATE_EPOCH, or that of the last commit."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").strip()


# Building


def build(tree: Path, into: Path, date: str) -> None:
    """Build sdist and wheel of both distributions."""
    for project in PROJECTS:
        run(sys.executable, "-m", "hatchling", "build", "-d", into.resolve(), cwd=tree / project, SOURCE_DATE_EPOCH=date)


def wheels_of_sdists(dist: Path, into: Path, date: str) -> None:
    """Build the wheels again, from the sdists."""
    for sdist in sorted(dist.glob("*.tar.gz")):
        with tempfile.TemporaryDirectory() as place:
            with tarfile.open(sdist) as archive:
                archive.extractall(place, filter="data")
            source = Path(place, sdist.name.removesuffix(".tar.gz"))
            run(
                sys.executable,
                "-m",
                "hatchling",
                "build",
                "-t",
                "wheel",
                "-d",
                into.resolve(),
                cwd=source,
                SOURCE_DATE_EPOCH=date,
            )


def copy_tracked(into: Path) -> None:
    """Copy the files that git knows, with links as links."""
    for name in run("git", "ls-files", "-z").split("\0"):
        if name and ((ROOT / name).is_symlink() or (ROOT / name).is_file()):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, into / name, follow_symlinks=False)


def differences(first: Path, second: Path) -> list[str]:
    """Names of files that are not in both folders, or not equal."""
    names = {file.name for folder in (first, second) for file in folder.iterdir()}
    return sorted(name for name in names if _bytes(first / name) != _bytes(second / name))


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


# Papers


def bill_of_materials(lock: str, date: str) -> dict[str, Any]:
    """A CycloneDX document of the server and the packages of a lock, which an image has.

    >>> bill_of_materials("uvloop==0.22 ; sys_platform != 'win32' \\\\\\n", "0")["components"][1]["purl"]
    'pkg:pypi/uvloop@0.22'
    """
    ours = [
        {**_component(name, __version__), "licenses": [{"license": {"id": "Apache-2.0"}}]}
        for name in ("turtlemq-client", "turtlemq")
    ]
    client, server = ours
    locked = []
    for name, version, marker in _LOCKED.findall(lock):
        condition = {"properties": [{"name": "turtlemq:marker", "value": marker}]} if marker else {}
        locked.append({**_component(name, version), **condition})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": datetime.fromtimestamp(int(date), UTC).isoformat(), "component": server},
        "components": [client, *locked],
        "dependencies": [{"ref": server["bom-ref"], "dependsOn": sorted(one["bom-ref"] for one in (client, *locked))}],
    }


def _component(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def write_papers(dist: Path, date: str) -> None:
    """Write the bill of materials and the checksums of all files."""
    document = bill_of_materials((ROOT / "requirements-run.lock").read_text("utf-8"), date)
    (dist / SBOM).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(lines))


# Trying


def found_pythons() -> dict[str, str]:
    """Interpreters of the versions that are supported, by version: from the path, and from pyenv."""
    found: dict[str, str] = {}
    for version in VERSIONS:
        installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for program in (f"python{version}", *map(str, installed)):
            with contextlib.suppress(Failed, OSError):
                run(
                    program,
                    "-c",
                    f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})",
                )
                found.setdefault(version, program)
    return found


def install(python: str, place: Path, dist: Path) -> Path:
    """Make an environment with the locked packages and the wheels, as a user would. Returns its folder of programs."""
    run(python, "-m", "venv", "--clear", place)
    pip = [str(place / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run(*pip, "install", "--require-hashes", "-r", ROOT / "requirements-run.lock")
    run(*pip, "install", "--no-deps", "--no-index", *sorted(dist.glob("*.whl")))
    run(*pip, "check")
    return place / "bin"


def first_commands() -> list[Block]:
    """The blocks of README.md with which a newcomer begins, as far as they talk to a server."""
    quick = (ROOT / "README.md").read_text("utf-8").partition("## Quick start")[2].partition("\n## ")[0]
    return [block for block in blocks(quick) if block.language in ("console", "python") and not block.skip]


def run_readme(programs: Path, place: Path) -> int:
    """Run the first commands of README.md with installed programs, in a folder of their own. Returns how many there were."""
    count, place = 0, place.resolve()
    with served(programs, place) as url:
        more = {"PATH": f"{programs}:{os.environ['PATH']}", "TURTLEMQ_URL": url, "COLUMNS": "200"}
        for block in first_commands():
            if block.language == "python":
                run(programs / "python", "-c", block.text, cwd=place, **more)
                count += 1
                continue
            for command, shown in commands(block):
                quiet = command.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
                printed = run("sh", "-e", "-c", quiet.replace(URL, url), cwd=place, **more)
                if not matches(shown or [], printed):
                    raise Failed(f"README.md: {command}\nshows: {shown}\nprints: {printed}")
                count += 1
    return count


@contextlib.contextmanager
def served(programs: Path, place: Path) -> Iterator[str]:
    """A server of an environment on a free port; its URL. It must end well."""
    command: list[str | Path] = [programs / "turtlemq", "serve", "--data", place / "data", "--port", "0"]
    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=place, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None, "it is a pipe"
    try:
        line = process.stdout.readline()
        listens = re.search(r"http://\S+?(?=,|\s|$)", line)
        if listens is None:
            raise Failed(f"the server says {line!r}\n{(place / 'server.log').read_text()}")
        until_ready(listens[0])
        yield listens[0]
        process.terminate()
        if process.wait(60):
            raise Failed(f"the server ended with exit code {process.returncode}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until_ready(url: str) -> None:
    """Wait until a server serves."""
    end = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=READY_S):
                return
        except urllib.error.HTTPError as error:  # 503 while it opens its files
            error.close()
            if time.monotonic() > end:
                raise Failed(f"the server is not ready after {READY_S} s: {error}") from None
            time.sleep(0.1)


# Image


def engine() -> str | None:
    """A container engine that works here."""
    for name in ("docker", "podman"):
        with contextlib.suppress(Failed, OSError):
            run(name, "info")
            return name
    return None


def base_image(options: Sequence[str]) -> str:
    """The image that ours is built on: of the options, or of the Dockerfile."""
    texts = [*options, (ROOT / "deploy/Dockerfile").read_text("utf-8")]
    return next(match[1] for text in texts if (match := re.search(r"\bBASE=(\S+)", text)))


def has_image(name: str, image: str) -> bool:
    """Whether an engine has an image already."""
    with contextlib.suppress(Failed):
        return bool(run(name, "image", "inspect", image))
    return False


def build_image(date: str, options: Sequence[str]) -> str:
    """Build the image, where there is an engine. Returns a sentence about it."""
    if (name := engine()) is None:
        return "No image: there is no container engine (docker or podman) here"
    if not has_image(name, base := base_image(options)):
        try:
            run(name, "pull", base)
        except Failed as failed:
            return f"No image: {base} cannot be pulled. {str(failed).strip().rpartition(chr(10))[2]}"
    run(name, "build", *options, "--tag", IMAGE, "--file", "deploy/Dockerfile", ".", SOURCE_DATE_EPOCH=date)
    return f"Image {IMAGE}: built with {name}, {run(name, 'run', '--rm', '--entrypoint', 'turtlemq', IMAGE, '--version').strip()}"


def main() -> None:
    """Build and try a release in dist/."""
    parser = argparse.ArgumentParser(prog="make release", description=main.__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--image-option", action="append", default=[], help="for `docker build`, such as --build-arg=BASE=…")
    asked = parser.parse_args()
    try:
        release(asked.into, asked.image_option)
    except Failed as failed:
        sys.exit(f"No release: {failed}")


def release(dist: Path, image_options: Sequence[str]) -> None:
    """Build into a folder, compare, try, and say what was done."""
    date = source_date()
    if dist.exists() and any(dist.iterdir()) and not (dist / "SHA256SUMS").exists() and dist != ROOT / "dist":
        raise Failed(f"{dist} has files of something else; name an empty folder")
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    build(ROOT, dist, date)
    with tempfile.TemporaryDirectory() as place:
        again, tree = Path(place, "again"), Path(place, "tree")
        copy_tracked(tree)
        build(tree, again, date)
        if differs := differences(dist, again):
            raise Failed(
                f"a build of the tracked files alone differs: {', '.join(differs)}. Are there files that git does not know?"
            )
        for wheel in again.glob("*.whl"):
            wheel.unlink()
        wheels_of_sdists(dist, again, date)
        if differs := differences(dist, again):
            raise Failed(f"a wheel built from its sdist differs: {', '.join(differs)}")
    write_papers(dist, date)
    for file in sorted(dist.iterdir()):
        print(f"  {file.name:45} {file.stat().st_size:>9,} bytes", flush=True)
    pythons = found_pythons()
    for version in VERSIONS:
        if version not in pythons:
            print(f"Python {version}: not found here, not tried (install it as python{version}, or with pyenv)")
            continue
        with tempfile.TemporaryDirectory() as place:
            programs = install(pythons[version], Path(place, "environment"), dist)
            count = run_readme(programs, Path(place))
        print(f"Python {version}: installed from the wheels, {count} commands of README.md run", flush=True)
    print(build_image(date, image_options))


if __name__ == "__main__":
    main()
