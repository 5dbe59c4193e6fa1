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
import shlex
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
    return {name: value for name, value in os.environ.items() if not name.startswith(("TURTLEMQ_", "PYTHON"))} | more


def source_date() -> str:
    """The time that all files in the archives get: SOURCE_DATE_EPOCH, or that of the last commit."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").strip()


# Building


def build(tree: Path, into: Path, date: str) -> None:
    """Build sdist and wheel of both distributions."""
    for project in PROJECTS:
        command: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-d", into.resolve()]
        run(*command, cwd=tree / project, SOURCE_DATE_EPOCH=date, TURTLEMQ_KERNEL="off")  # for any platform


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
                TURTLEMQ_KERNEL="off",
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


class NoEngine(Failed):
    """There is no container engine with the base image. The text says what would bring it."""


def engine(base: str, *run_options: str, pull: bool = False) -> tuple[str, str]:
    """A container engine that starts containers of a base image, and the name that the image has there."""
    for name in ("docker", "podman"):
        with contextlib.suppress(Failed, OSError):
            run(name, "info")
            break
    else:
        raise NoEngine("there is no container engine (docker or podman) here: `sh packages/base_image.sh` installs podman")
    image = local_image(name, base)
    if image is None and pull:
        with contextlib.suppress(Failed):
            run(name, "pull", base)
            image = base
    if image is None:
        raise NoEngine(
            f"{name} has no {base}: `{name} pull {base}`, or `sh packages/base_image.sh`, which makes one of Debian's packages"
        )
    try:
        run(name, "run", "--rm", *run_options, image, "true")
    except Failed as failed:
        raise NoEngine(f"{name} starts no container here; `sh packages/base_image.sh` gives podman settings: {failed}") from None
    return name, image


def base_image(options: Sequence[str]) -> str:
    """The image that ours is built on: of the options, or of the Dockerfile."""
    texts = [*options, (ROOT / "deploy/Dockerfile").read_text("utf-8")]
    return next(match[1] for text in texts if (match := re.search(r"\bBASE=(\S+)", text)))


def local_image(name: str, image: str) -> str | None:
    """The name with which `FROM` finds an image that an engine has, if it has it.

    Podman looks for a short name in registries alone, so an image that was made here is found as `localhost/` only."""
    with contextlib.suppress(Failed):
        tags: list[str] = json.loads(run(name, "image", "inspect", "--format", "{{json .RepoTags}}", image))
        made_here = name == "podman" and all(tag.startswith("localhost/") for tag in tags if tag.endswith(f"/{image}"))
        return f"localhost/{image}" if made_here and f"localhost/{image}" in tags else image
    return None


def image_options(name: str, date: str) -> list[str]:
    """Options of `build`: podman sets the times of all files, keeps the health check, and trusts what this machine trusts."""
    if name != "podman":
        return []
    network = ["--network=host", "--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]
    return ["--format=docker", f"--timestamp={date}", *network]


def build_image(name: str, base: str, date: str, options: Sequence[str], tag: str = IMAGE) -> None:
    """Build the image on a base image that the engine has."""
    ours = [*image_options(name, date), *options, f"--build-arg=BASE={base}", "--tag", tag]
    run(name, "build", *ours, "--file", "deploy/Dockerfile", ".", SOURCE_DATE_EPOCH=date)


def layers(name: str, image: str) -> list[str]:
    """Checksums of the layers of an image."""
    found: list[str] = json.loads(run(name, "image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    return found


def health_check() -> list[str]:
    """The command of the health check in the Dockerfile."""
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    command: list[str] = json.loads(re.findall(r"HEALTHCHECK .*\\\n +CMD (.*)$", text, re.MULTILINE)[0])
    return command


def printed(name: str, called: str) -> str:
    """Everything that a container has printed."""
    logs = subprocess.run(
        [name, "logs", called], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return logs.stdout.decode(errors="replace")


@contextlib.contextmanager
def container(name: str, image: str, *options: str) -> Iterator[list[str]]:
    """A container with a read-only root, without capabilities. Yields the command that runs others in it, once it is healthy."""
    called = f"turtlemq-try-{os.getpid()}"
    try:
        run(name, "run", "-d", "--name", called, "-v", f"{called}:/data", "--read-only", "--cap-drop", "ALL", *options, image)
        inside = [name, "exec", called]
        check = f"n=0; until {shlex.join(health_check())} 2>/dev/null; do n=$((n+1)); [ $n -lt 150 ] || exit 1; sleep 0.2; done"
        try:
            run(*inside, "sh", "-c", check)
        except Failed as failed:
            raise Failed(f"{failed}\n{printed(name, called)}") from None
        yield inside
    finally:
        for end in (("rm", "--force", called), ("volume", "rm", called)):
            subprocess.run([name, *end], env=environment(), capture_output=True, timeout=60, check=False)


def try_image(name: str, image: str, *options: str) -> str:
    """Run a container of an image as an operator does; it must end well. Returns the version of its Python."""
    with container(name, image, *options) as inside:
        if name == "podman":
            run(name, "healthcheck", "run", inside[-1])
        run(*inside, "turtlemq", "put", "orders", "1", "--id", "o1")
        if not run(*inside, "turtlemq", "fetch", "orders", "--wait", "10").startswith("o1\t"):
            raise Failed(f"{image}: the message did not come")
        if run(*inside, "id", "-u").strip() == "0":
            raise Failed(f"{image} runs as root")
        run(*inside, "sh", "-c", "! touch /opt/turtlemq/x 2>/dev/null")
        python = run(*inside, "python", "-c", "import platform; print(platform.python_version())").strip()
        run(name, "stop", "--time", "20", inside[-1])
        code = run(name, "inspect", "--format", "{{.State.ExitCode}}", inside[-1]).strip()
        if code != "0":
            raise Failed(f"{image}: the server ended with exit code {code}\n{printed(name, inside[-1])}")
    return python


def release_image(date: str, options: Sequence[str], run_options: Sequence[str]) -> str:
    """Build the image twice, compare the layers, and run it, where there is an engine. Returns a sentence about it."""
    try:
        name, base = engine(base_image(options), *run_options, pull=True)
    except NoEngine as why:
        return f"No image: {why}"
    build_image(name, base, date, ["--no-cache", *options])
    first = layers(name, IMAGE)
    build_image(name, base, date, ["--no-cache", *options])
    same = "twice, with equal layers" if layers(name, IMAGE) == first else "twice, and the layers differ"
    if name == "podman" and layers(name, IMAGE) != first:
        raise Failed("two builds of the image have different layers")
    return f"Image {IMAGE}: built {same}, with {name} on {base}; runs with Python {try_image(name, IMAGE, *run_options)}"


def try_other_pythons(versions: Sequence[str], date: str, options: Sequence[str], run_options: Sequence[str]) -> dict[str, str]:
    """Build and run the image on `python:{version}-slim`, where an engine has it. Returns the full versions, by version."""
    found = {}
    for version in versions:
        with contextlib.suppress(NoEngine):
            name, base = engine(f"python:{version}-slim", *run_options)
            tag = f"{IMAGE}-python{version}"
            build_image(name, base, date, options, tag)
            found[version] = try_image(name, tag, *run_options)
    return found


def main() -> None:
    """Build and try a release in dist/."""
    parser = argparse.ArgumentParser(prog="make release", description=main.__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--image-option", action="append", default=[], help="for `docker build`, such as --build-arg=BASE=…")
    parser.add_argument("--run-option", action="append", default=[], help="for `docker run`, such as --network=host")
    asked = parser.parse_args()
    try:
        release(asked.into, asked.image_option, asked.run_option)
    except Failed as failed:
        sys.exit(f"No release: {failed}")


def release(dist: Path, build_options: Sequence[str], run_options: Sequence[str]) -> None:
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
    for version in pythons:
        with tempfile.TemporaryDirectory() as place:
            programs = install(pythons[version], Path(place, "environment"), dist)
            count = run_readme(programs, Path(place))
        print(f"Python {version}: installed from the wheels, {count} commands of README.md run", flush=True)
    missing = [version for version in VERSIONS if version not in pythons]
    others = try_other_pythons(missing, date, build_options, run_options)
    for version in missing:
        if version in others:
            print(f"Python {version}: not found here; an image built on python:{version}-slim serves, with {others[version]}")
        else:
            print(f"Python {version}: not tried; install it as python{version} or with pyenv, or pull python:{version}-slim")
    print("Building the image twice, a few minutes", flush=True)
    print(release_image(date, build_options, run_options))


if __name__ == "__main__":
    main()
