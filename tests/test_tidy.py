"""Style, kept by a test instead of a reviewer: import arrows and cycles, banned calls, public faces, docstrings, habits of prose,
size ratchets, and words that must not be in any text file.

The rules are in tests/harness/tidy.py; the second half of this file shows that every one of them is able to fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.prose import habits
from tests.harness.tidy import (
    ELSEWHERE,
    FACES,
    FILE_LINES_MAX,
    FUNCTION_LINES_MAX,
    HABITS_MAX,
    HEAVY,
    HOST,
    PRIVATE_PATH,
    ROOT,
    TEST_WORDS_MAX,
    UNFINISHED,
    Source,
    assert_none,
    banned_names,
    cycles,
    import_graph,
    imports_of_tests,
    long_test_names,
    matching_lines,
    missing_docstring,
    package_graph,
    package_sources,
    reaches_inside,
    text_files,
    too_long,
    wider_faces,
    wrong_arrows,
)

# ── the repository is tidy ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("checker", [wrong_arrows, banned_names, missing_docstring, too_long, reaches_inside, wider_faces])
def test_the_package_keeps_its_rules(checker: Callable[[Source], list[str]]) -> None:
    sources = package_sources()
    assert any(source.module == "turtlemq" for source in sources), "the package was not found"
    assert_none([offence for source in sources for offence in checker(source)])


def test_packages_of_spark_reach_inside_no_other() -> None:
    assert_none([offence for source in package_sources("spark") for offence in reaches_inside(source)])


def test_every_class_with_a_face_is_there() -> None:
    nodes = [(source.module, node) for source in package_sources() for node in ast.walk(source.tree)]
    classes = {(module, node.name) for module, node in nodes if isinstance(node, ast.ClassDef)}
    assert FACES.keys() <= classes


def test_no_module_imports_itself_through_others() -> None:
    folders = ("turtlemq", "spark", "tests", "benchmarks", "examples")
    graph = import_graph([source for folder in folders for source in package_sources(folder)])
    assert {"turtlemq.engine", "pyspark_turtlemq.source", "tests.harness.doors", "benchmarks.run"} <= graph.keys()
    assert "turtlemq.topic.topic" in graph["turtlemq.engine"]
    assert_none(cycles(graph))
    assert_none(cycles(package_graph(graph)))


@pytest.mark.parametrize("checker", [imports_of_tests, long_test_names])
def test_tests_keep_their_rules(checker: Callable[[Source], list[str]]) -> None:
    assert_none([offence for source in package_sources("tests") for offence in checker(source)])


def test_every_package_links_the_glossary() -> None:
    packages = [source for folder in ("turtlemq", "spark") for source in package_sources(folder) if "__init__" in source.path]
    assert len(packages) > 10
    assert_none([package.path for package in packages if "docs/GLOSSARY.md" not in (ast.get_docstring(package.tree) or "")])


@pytest.mark.parametrize("folder", HABITS_MAX)
def test_habits_of_prose_only_go_down(folder: str) -> None:
    sources = package_sources(folder)
    found = [(name, f"{source.path}:{line}: {words}") for source in sources for name, line, words in habits(source.text)]
    for name, most in zip(("people", "clauses", "leaning"), HABITS_MAX[folder], strict=True):
        places = [place for habit, place in found if habit == name]
        assert len(places) <= most, f"{name}: {len(places)}, {most} are the most:\n" + "\n".join(places)
        assert len(places) == most, f"{name}: {len(places)} are left; lower HABITS_MAX[{folder!r}], so that it stays so"


@pytest.mark.parametrize(
    "pattern", [PRIVATE_PATH, ELSEWHERE, UNFINISHED], ids=["private paths", "files from elsewhere", "unfinished work"]
)
def test_text_files_are_free_of(pattern: re.Pattern[str]) -> None:
    files = dict(text_files(ROOT))
    assert "tests/test_tidy.py" in files, "the listing is broken"
    assert_none([offence for path, text in files.items() for offence in matching_lines(path, text, pattern)])


def test_locks_name_no_host() -> None:
    locks = sorted(ROOT.glob("requirements*.lock"))
    assert locks
    assert_none([offence for lock in locks for offence in matching_lines(lock.name, lock.read_text("utf-8"), HOST)])


def test_importing_the_package_alone_loads_nothing_heavy() -> None:
    program = f"import sys, turtlemq; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ── and every checker can fail ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("turtlemq/index.py", "import turtlemq.broker"),
        ("turtlemq/index/tree.py", "from turtlemq.broker.group import Group"),
        ("turtlemq/broker.py", "from turtlemq import index"),
        ("turtlemq/broker.py", "def f():\n    from turtlemq.index import Index"),
        ("turtlemq/broker.py", "import importlib\nimportlib.import_module('turtlemq.index')"),
        ("turtlemq/engine.py", "from turtlemq.server import app"),
        ("turtlemq/segment/log.py", "from turtlemq.index import Index"),
        ("turtlemq/segment/__init__.py", "from ..engine import Engine"),
        ("turtlemq/segment/scan.py", "from . import log"),
        ("turtlemq/segment/format.py", "from turtlemq.storage.door import Door"),
        ("turtlemq/storage/door.py", "from turtlemq.segment.log import Log"),
        ("turtlemq/model.py", "from turtlemq.segment import log"),
        ("turtlemq/not_listed_so_pure.py", "import turtlemq.storage.door"),
        ("turtlemq/client/sync.py", "from turtlemq.engine import Engine"),
        ("turtlemq/client/sending.py", "from turtlemq.client import sync"),
    ],
)
def test_an_outward_import_is_an_offence(path: str, text: str) -> None:
    (offence,) = wrong_arrows(Source(path, text))
    assert offence.startswith(f"{path}:{len(text.splitlines())}: ")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("turtlemq/cli.py", "import turtlemq.server, turtlemq.engine, turtlemq.model"),
        ("turtlemq/cli.py", "import turtlemq.client"),
        ("turtlemq/client/sync.py", "from turtlemq.client import sending, options"),
        ("turtlemq/engine.py", "from turtlemq import broker, index, door\nfrom turtlemq.segment.log import Log"),
        ("turtlemq/index/tree.py", "from turtlemq.index.run import Run\nfrom turtlemq.segment import names"),
        ("turtlemq/segment/log.py", "from turtlemq.storage.door import Door\nfrom . import format"),
        ("turtlemq/segment/scan.py", "from .format import HEADER\nfrom turtlemq.errors import Corrupt"),
        ("turtlemq/model.py", "import numpy\nfrom turtlemq import __version__"),
    ],
)
def test_an_inward_import_is_none(path: str, text: str) -> None:
    assert wrong_arrows(Source(path, text)) == []


@pytest.mark.parametrize(
    ("text", "offences"),
    [
        ("def f(topic): return topic._index.commit()", 1),
        ("def f(index): index._writer = None", 1),
        ("def f(index): return index._segments", 1),
        ("def f(topic): return topic.stores.broker", 1),
        ("class A:\n    def __init__(self): self._x = 1\n    def same(self, other): return self._x == other._x", 0),
        ("class A:\n    def f(self): return self._writer", 0),
        ("def f(topic): return topic.__class__, topic.stats()", 0),
    ],
)
def test_reaching_inside_another_module_is_an_offence(text: str, offences: int) -> None:
    assert len(reaches_inside(Source("turtlemq/server/x.py", text))) == offences


def test_a_topic_may_reach_its_own_stores() -> None:
    assert reaches_inside(Source("turtlemq/topic/x.py", "def f(topic): return topic.stores")) == []


def test_a_new_public_field_of_a_face_is_an_offence() -> None:
    text = "class Broker:\n    def __init__(self):\n        self.wait, self._ready = 1, 2\n        self.groups: int = 3"
    (offence,) = wider_faces(Source("turtlemq/broker/broker.py", text))
    assert offence == "turtlemq/broker/broker.py:4: Broker.groups is not in its face"
    assert wider_faces(Source("turtlemq/broker/other.py", text)) == []


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        ("from turtlemq.b import x", "turtlemq.a → turtlemq.b → turtlemq.c → turtlemq.a"),
        ("def f():\n    import turtlemq.b", "turtlemq.a → turtlemq.b → turtlemq.c → turtlemq.a"),
        ("if TYPE_CHECKING:\n    from turtlemq import b", "turtlemq.a → turtlemq.b → turtlemq.c → turtlemq.a"),
        ("from turtlemq.d import x", ""),
    ],
)
def test_an_import_that_closes_a_cycle_is_an_offence(text: str, cycle: str) -> None:
    others = {"b": "from turtlemq import c", "c": "import turtlemq.a", "d": "import os"}
    sources = [Source(f"turtlemq/{name}.py", body) for name, body in (others | {"a": text}).items()]
    found = cycles(import_graph(sources))
    assert [_rotated(line) for line in found] == ([cycle] if cycle else [])


def _rotated(cycle: str) -> str:
    """A cycle from its first module on."""
    *names, _ = cycle.split(" → ")
    at = names.index(min(names))
    return " → ".join([*names[at:], *names[:at], names[at]])


def test_a_cycle_of_packages_is_an_offence() -> None:
    texts = {
        "index/a.py": "import turtlemq.topic.b",
        "topic/b.py": "",
        "topic/c.py": "from turtlemq.index.d import e",
        "index/d.py": "",
    }
    graph = import_graph([Source(f"turtlemq/{path}", text) for path, text in texts.items()])
    assert cycles(graph) == []
    assert len(cycles(package_graph(graph))) == 1


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("import time", "time"),
        ("from time import monotonic", "time"),
        ("import concurrent.futures as cf", "concurrent"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now"),
        ("import datetime as dt\ndt.datetime.now(dt.UTC)", "datetime.datetime.now"),
        ("import numpy as np\nnp.random.rand(3)", "numpy.random"),
        ("import os.path", "os"),
        ("from os import fsync", "os"),
        ("import mmap", "mmap"),
        ("import numpy as np\nnp.memmap('f')", "numpy.memmap"),
        ("x = 1\nopen('f')", "open()"),
        ("from pathlib import Path\nPath('f').open()", "Path.open()"),
        ("import pathlib\npathlib.Path('f').read_text()", "Path.read_text()"),
        ("from pathlib import Path\n(Path('d') / 'f').with_suffix('.tmp').unlink()", "Path.unlink()"),
        ("from pathlib import Path\ndef f(folder: Path | None): folder.parent.mkdir()", "Path.mkdir()"),
        ("from pathlib import Path\ndef f(self, p: 'Path'): self.q = p / 'x'; self.q.exists()", "Path.exists()"),
    ],
)
def test_a_banned_name_is_an_offence_in_the_core(text: str, banned: str) -> None:
    path = "turtlemq/index.py"
    line = len(text.splitlines())
    assert banned_names(Source(path, text)) == [f"{path}:{line}: {banned} is not for turtlemq.index (index)"]


def test_shells_may_do_all_and_the_door_reads_no_clock() -> None:
    text = "import os, time\nopen('f')"
    assert banned_names(Source("turtlemq/server/app.py", text)) == []
    (clock,) = banned_names(Source("turtlemq/storage/door.py", text))
    assert clock == "turtlemq/storage/door.py:1: time is not for turtlemq.storage.door (door)"


@pytest.mark.parametrize(
    "text",
    [
        "from datetime import UTC, datetime\ndatetime.fromtimestamp(0, UTC)",
        "from pathlib import Path, PurePath\nname = (Path('d') / 'f').with_suffix('.tmp').name",
        "from pathlib import Path\ndef f(door, path: Path): door.open(path); door.rename(path, path); door.stat(path)",
        "def f(time, random): return time.time, random.random()",
        "'a'.replace('a', 'b')",
    ],
)
def test_path_arithmetic_and_the_door_are_no_offence(text: str) -> None:
    assert banned_names(Source("turtlemq/index.py", text)) == []


@pytest.mark.parametrize("text", ["", "x = 1", '"""Too short."""', "# a comment, however long, is no docstring\n"])
def test_a_file_without_a_real_docstring_is_an_offence(text: str) -> None:
    assert len(missing_docstring(Source("turtlemq/x.py", text))) == 1


def test_a_file_or_function_over_its_ratchet_is_an_offence() -> None:
    body = "    x = 1\n"
    assert too_long(Source("turtlemq/x.py", "def f():\n" + body * (FUNCTION_LINES_MAX - 1))) == []
    (function,) = too_long(Source("turtlemq/x.py", "\nasync def f():\n" + body * FUNCTION_LINES_MAX))
    assert function.startswith("turtlemq/x.py:2: f has 61 lines")
    assert too_long(Source("turtlemq/x.py", "x = 1\n" * FILE_LINES_MAX)) == []
    (file,) = too_long(Source("turtlemq/x.py", "x = 1\n" * (FILE_LINES_MAX + 1)))
    assert file.startswith("turtlemq/x.py:451: file of 451 lines")


@pytest.mark.parametrize("folder", ["work", "root", "home", "farm"])
def test_a_private_path_is_an_offence(folder: str) -> None:
    slashed = f"/{folder}/"
    text = f"fine\ncd {slashed}x\n{slashed}\n'{slashed}y'\nsrc{slashed}x\n.{slashed}x\n"
    offences = matching_lines("README.md", text, PRIVATE_PATH)
    assert [offence.split(": ")[0] for offence in offences] == ["README.md:2", "README.md:3", "README.md:4"]


def test_a_file_from_elsewhere_is_an_offence() -> None:
    place = "../" + "shared"
    assert matching_lines("a.md", f"see {place}/api.md\nsee shared/x", ELSEWHERE) == [f"a.md:1: see {place}/api.md"]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" * 3])
def test_unfinished_work_is_an_offence(word: str) -> None:
    assert matching_lines("a.py", f"x = 1\n# {word}: later", UNFINISHED) == [f"a.py:2: # {word}: later"]
    assert matching_lines("a.py", f"template = '{word}{word}'", UNFINISHED) == []


def test_files_are_found_where_git_knows_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "d.md").write_text("text")
    assert dict(text_files(tmp_path)) == {"a.md": "text"}


def test_an_import_of_a_test_module_is_an_offence() -> None:
    assert imports_of_tests(Source("tests/test_a.py", "from tests.test_b import helper")) != []
    assert imports_of_tests(Source("tests/test_a.py", "from tests.harness.doors import Failing")) == []


def test_a_long_test_name_is_an_offence() -> None:
    name = "test_" + "_".join(["word"] * (TEST_WORDS_MAX + 1))
    assert long_test_names(Source("tests/test_a.py", f"def {name}(): ...")) != []
    assert long_test_names(Source("tests/test_a.py", "def test_short(): ...")) == []


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ('"""Whoever opens this takes its number."""', "people"),
        ("x = 1  # nobody knows", "people"),
        ('"""Finds what is due."""', "clauses"),
        ('def f():\n    """The same, for many."""', "leaning"),
        ('def f():\n    """See `g`."""', "leaning"),
    ],
)
def test_a_habit_of_prose_is_counted(text: str, habit: str) -> None:
    assert [name for name, _, _ in habits(text)] == [habit]


def test_plain_prose_has_no_habits() -> None:
    assert (
        list(habits('"""Hands due messages to the Broker. See docs/GLOSSARY.md for the words."""\nx = "nobody"  # a cache')) == []
    )
