"""Rules of style as functions from source text to a list of offences, `file:line: what`. `tests/test_tidy.py` applies them.

To change a rule, change its constant. A module of `turtlemq` that no ring lists is pure: the strictest ring.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────

# Ring of a module: its longest listed prefix counts; an unlisted module is "pure".
RINGS = {
    "turtlemq.__main__": "shell",
    "turtlemq.cli": "shell",
    "turtlemq.server": "shell",
    "turtlemq.server.advance": "engine",
    "turtlemq.testing": "shell",
    **{f"turtlemq.server.{name}": "engine" for name in "fetches long_polls".split()},
    **{f"turtlemq.server.{name}": "pure" for name in "clients errors pace rate_limit supervision tenants topic_patterns".split()},
    **{f"turtlemq.server.push.{name}": "pure" for name in "endpoint hosts policy signature".split()},
    **{f"turtlemq.server.grpc.{name}": "pure" for name in "framing http2 statuses window".split()},
    **{f"turtlemq.server.shards.{name}": "pure" for name in "merge siblings unite".split()},
    "turtlemq.storage.process_worker": "shell",
    "turtlemq.client": "client",
    **{
        f"turtlemq.client.{name}": "pure"
        for name in (
            "arguments batching calls client_calls consumer_flows consumer_state dead_calls errors fetched http_answers outgoing "
            "partitions past_calls results "
            "retry_budget desk lateness_results sending time_limit topic_calls topology tracing transaction_calls wire"
        ).split()
    },
    "turtlemq.importing": "client",
    "turtlemq.importing.fields": "pure",
    "turtlemq.integrations": "client",
    "turtlemq.engine": "engine",
    "turtlemq.backup": "engine",
    "turtlemq.data_folder": "engine",
    **{f"turtlemq.shard_{name}": "engine" for name in "backup folders split".split()},
    "turtlemq.topic": "engine",
    "turtlemq.topic.wake_queue": "pure",
    "turtlemq.index": "index",
    "turtlemq.broker": "broker",
    "turtlemq.segment": "segment",
    **{f"turtlemq.segment.{name}": "pure" for name in "_kernel buffers bulk_crc fields format id_map ids kernel scan".split()},
    "turtlemq.replica": "door",
    "turtlemq.replica.good_pieces": "segment",
    **{
        f"turtlemq.replica.{name}": "shell"
        for name in """
            arrivals
            cluster_init
            copy_source
            copy_target
            etcd
            examine_process
            examiner
            ferry
            follow_figures
            healing
            inspector
            intervene
            lead
            lead_types
            link
            names_view
            pictures
            scrub
            session
            standby
            standby_care
            verify
        """.split()
    },
    **{
        f"turtlemq.replica.{name}": "pure"
        for name in """
            clock_skew
            cluster_state
            cluster_view
            differences
            frames
            interventions
            manifest
            member
            member_events
            membership
            pace
            records
            shard_view
            shared_files
            stream
            tenure
            topology
        """.split()
    },
    "turtlemq.storage": "door",
    "turtlemq.storage.names": "pure",
    "turtlemq.storage.workers": "pure",
}

# Imports point inwards only; index and broker do not know each other.
MAY_IMPORT = {
    "shell": {"shell", "client", "engine", "index", "broker", "segment", "door", "pure"},
    "engine": {"engine", "index", "broker", "segment", "door", "pure"},
    "index": {"index", "segment", "door", "pure"},
    "broker": {"broker", "segment", "door", "pure"},
    "segment": {"segment", "door", "pure"},
    "door": {"door", "pure"},
    "client": {"client", "pure"},  # modules that applications import know nothing of the engine
    "pure": {"pure"},
}

# Dotted names, with all that is below them. Only shells read a clock, roll dice, or run anything beside themselves.
SHELL_ONLY = (
    "asyncio concurrent multiprocessing random secrets socket subprocess threading time "
    "datetime.date.today datetime.datetime.now datetime.datetime.today datetime.datetime.utcnow numpy.random"
).split()

# Only the door (and shells) touch files, so that tests can record, tear and refuse every write.
DOOR_ONLY = (
    "fcntl glob mmap os shutil tempfile io.open io.FileIO numpy.fromfile numpy.load numpy.memmap numpy.save numpy.savez"
).split()
PATH_CLASSES = {"pathlib.Path", "pathlib.PosixPath"}
PATH_ARITHMETIC = set("absolute expanduser joinpath relative_to resolve with_name with_stem with_suffix".split())
PATH_TOUCHES = set(
    "chmod exists glob hardlink_to is_dir is_file iterdir lstat mkdir open read_bytes read_text rename replace "
    "rglob rmdir stat symlink_to touch unlink write_bytes write_text".split()
)

# Public faces: the fields of these classes that others may read; every other field begins with an underscore.
FACES = {
    ("turtlemq.index.index", "Index"): {"arrivals", "maintenance"},
    ("turtlemq.broker.broker", "Broker"): {"journals", "ready", "wait", "cancel_count"},
    ("turtlemq.topic.topic", "Topic"): {"name", "scheduler", "stores", "view"},
}
STORES_ONLY = "turtlemq.topic"  # Index, Broker and dead letters of a topic are for its own package

# Private names of libraries, for which there is no public one. They have tests of their own.
PRIVATE_OF_LIBRARIES = {
    "turtlemq.storage.process_worker": {"_exit"},
    "pyspark_turtlemq.session": {"_gateway"},
}

# Loaded by `import turtlemq` alone, these would slow every Spark executor down.
HEAVY = ("aiohttp", "asyncio", "bson", "msgspec", "numpy", "pymongo", "rich", "typer", "uvloop")

# Ratchets: lower them when the code allows it, do not raise them.
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60
DOCSTRING_CHARS_MIN = 40
TEST_WORDS_MAX = 11  # in the name of a test
HABITS_MAX = {  # habits of prose (tests/harness/prose.py): people, clauses, leaning docstrings
    "turtlemq": (0, 3, 0),  # error texts that users see
    "spark": (0, 0, 0),
    "benchmarks": (0, 0, 0),
    "examples": (0, 0, 0),
    "tests": (0, 0, 0),
}

# Put together from pieces, so that this file does not match itself.
PRIVATE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:" + "|".join(("work", "root", "home", "farm")) + ")/")
ELSEWHERE = re.compile(re.escape("../" + "shared"))  # a file outside of the repository cannot be read by its users
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
HOST = re.compile(r"://|--(?:extra-)?index-url|--find-links")

# Where git cannot list the files, these folders are left out by name.
NOT_OURS = set(".git .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis __pycache__ data results".split())


# ── contents of a source file ────────────────────────────────────────────────────────────────────────────


class Imported(NamedTuple):
    """One import: `import a.b` has full `a.b`, and binds name `a` with the meaning `a`."""

    line: int
    full: str
    name: str
    meaning: str


@dataclass(frozen=True)
class Source:
    """One Python file: where it is, as a path relative to the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """The dotted name: `turtlemq/segment/__init__.py` is `turtlemq.segment`."""
        path = self.path.removeprefix("spark/")
        return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def imports(self) -> list[Imported]:
        """Every import in the file, wherever it stands."""
        return [found for node in ast.walk(self.tree) for found in self._imports_of(node)]

    def _imports_of(self, node: ast.AST) -> Iterator[Imported]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.split(".")[0]
                    yield Imported(node.lineno, alias.name, alias.asname or top, alias.name if alias.asname else top)
            case ast.ImportFrom(names=names):
                for alias in names:
                    full = f"{self._absolute(node)}.{alias.name}".removesuffix(".*")
                    yield Imported(node.lineno, full, alias.asname or alias.name, full)
            case ast.Call(func=func, args=[ast.Constant(value=str(full)), *_]):
                if ast.unparse(func) in ("__import__", "import_module", "importlib.import_module"):
                    yield Imported(node.lineno, full, "", full)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        up = node.level - self.path.endswith("/__init__.py")
        return ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))

    @cached_property
    def bound(self) -> dict[str, str]:
        """The full name of each imported name."""
        return {found.name: found.meaning for found in self.imports}

    def dotted(self, node: ast.expr) -> str:
        """The full name of `a.b.c` where `a` was imported, else ''."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""

    @cached_property
    def path_names(self) -> set[str]:
        """Variables, arguments and attributes that hold a pathlib.Path, as far as annotations and assignments tell."""
        names: set[str] = set()
        while True:
            before = len(names)
            for node in ast.walk(self.tree):
                names.update(self._path_targets(node, names))
            if len(names) == before:
                return names

    def _path_targets(self, node: ast.AST, names: set[str]) -> Iterator[str]:
        if isinstance(node, ast.arg) and node.annotation and self._says_path(node.annotation):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and self._says_path(node.annotation):
            yield _last_name(node.target)
        elif isinstance(node, ast.Assign) and self.is_path(node.value, names):
            yield from (_last_name(target) for target in node.targets)

    def _says_path(self, annotation: ast.expr) -> bool:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self._says_path(ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.BinOp):
            return self._says_path(annotation.left) or self._says_path(annotation.right)
        return self.dotted(annotation) in PATH_CLASSES

    def is_path(self, node: ast.expr, names: set[str]) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                if self.dotted(node.func) in PATH_CLASSES:
                    return True
                if attr in ("cwd", "home"):
                    return self.dotted(value) in PATH_CLASSES
                return attr in PATH_ARITHMETIC and self.is_path(value, names)
            case ast.Call(func=func):
                return self.dotted(func) in PATH_CLASSES
            case ast.BinOp(left=left, op=ast.Div()):
                return self.is_path(left, names)
            case ast.Attribute(value=value, attr="parent"):
                return self.is_path(value, names)
            case ast.Name() | ast.Attribute():
                return _last_name(node) in names
        return False


def _last_name(node: ast.expr) -> str:
    """`folder` of both `folder` and `self.folder`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def ring_of(dotted: str) -> str:
    """Cost: O(depth of the name)."""
    while dotted:
        if dotted in RINGS:
            return RINGS[dotted]
        dotted = dotted.rpartition(".")[0]
    return "pure"


# ── the checkers: source in, offences out ────────────────────────────────────────────────────────────────


def wrong_arrows(source: Source) -> list[str]:
    ring = ring_of(source.module)
    return [
        f"{source.path}:{line}: {source.module} ({ring}) must not import {full} ({ring_of(full)})"
        for line, full, _, _ in source.imports
        if (full == "turtlemq" or full.startswith("turtlemq.")) and ring_of(full) not in MAY_IMPORT[ring]
    ]


def banned_names(source: Source) -> list[str]:
    """Clock, chance, concurrency outside the shells; the operating system outside door and shells."""
    ring = ring_of(source.module)
    if ring in ("shell", "client"):
        return []
    bans = SHELL_ONLY if ring == "door" else SHELL_ONLY + DOOR_ONLY
    named = [(found.line, found.full) for found in source.imports]
    named += [(node.lineno, source.dotted(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    offences = {(line, ban) for line, full in named for ban in bans if full == ban or full.startswith(f"{ban}.")}
    if ring != "door":
        offences |= set(_file_calls(source))
    return [f"{source.path}:{line}: {ban} is not for {source.module} ({ring})" for line, ban in sorted(offences)]


def _file_calls(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="open")) if "open" not in source.bound:
                yield node.lineno, "open()"
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in PATH_TOUCHES:
                if source.is_path(value, source.path_names):
                    yield node.lineno, f"Path.{attr}()"


def missing_docstring(source: Source) -> list[str]:
    chars = len(ast.get_docstring(source.tree) or "")
    if chars >= DOCSTRING_CHARS_MIN:
        return []
    return [f"{source.path}:1: docstring of {chars} characters; {DOCSTRING_CHARS_MIN} are the least"]


def too_long(source: Source) -> list[str]:
    offences = []
    lines = len(source.text.splitlines())
    if lines > FILE_LINES_MAX:
        offences.append(f"{source.path}:{lines}: file of {lines} lines; {FILE_LINES_MAX} are the most")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                place = f"{source.path}:{node.lineno}"
                offences.append(f"{place}: {node.name} has {length} lines; {FUNCTION_LINES_MAX} are the most")
    return offences


def reaches_inside(source: Source) -> list[str]:
    """Private names of another module's objects, and the stores of a topic outside its package."""
    allowed = PRIVATE_OF_LIBRARIES.get(source.module, set()) | _private_names(source)
    offences = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            continue
        private = node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in allowed
        if private or (node.attr == "stores" and not source.module.startswith(STORES_ONLY)):
            offences.append(f"{source.path}:{node.lineno}: {ast.unparse(node)} is not for {source.module}")
    return offences


def _private_names(source: Source) -> set[str]:
    """Names that the module itself gives: to functions and classes, and by assignment."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {node.name for node in ast.walk(source.tree) if isinstance(node, kinds)}
    names |= {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {field.attr for field in _own_fields(source.tree)}


def _own_fields(tree: ast.AST) -> list[ast.Attribute]:
    """Every `self.x` that is assigned to."""
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return [node for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"]


def wider_faces(source: Source) -> list[str]:
    """Public fields of a class whose face does not list them."""
    offences = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and (source.module, node.name) in FACES:
            face = FACES[source.module, node.name]
            offences += [
                f"{source.path}:{field.lineno}: {node.name}.{field.attr} is not in its face"
                for field in _own_fields(node)
                if not field.attr.startswith("_") and field.attr not in face
            ]
    return offences


def import_graph(sources: list[Source]) -> dict[str, set[str]]:
    """Which module imports which, among those given. Imports inside functions and under TYPE_CHECKING count: a reader follows
    them, too. A package is not imported by an import of one of its modules."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {source.module: set() for source in sources}
    for source in sources:
        for found in source.imports:
            imported = found.full if found.full in modules else found.full.rpartition(".")[0]
            if imported in modules and imported != source.module:
                graph[source.module].add(imported)
    return graph


def package_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which package of turtlemq imports which; a module at its root counts as one."""
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if module.startswith("turtlemq."):
            above = packages.setdefault(_package(module), set())
            above |= {_package(name) for name in imported if name.startswith("turtlemq.")} - {_package(module)}
    return packages


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """The first cycle of a graph, as a line; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" → ".join(reversed(error.args[1]))]
    return []


def imports_of_tests(source: Source) -> list[str]:
    """A test module is no library: shared helpers live in tests/harness."""
    return [
        f"{source.path}:{line}: imports the test module {full}"
        for line, full, _, _ in source.imports
        if re.match(r"tests\.test_", full)
    ]


def long_test_names(source: Source) -> list[str]:
    """The name of a test is a fact, in few words."""
    tests = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{source.path}:{test.lineno}: {test.name} has {words} words; {TEST_WORDS_MAX} are the most"
        for test in tests
        if test.name.startswith("test_") and (words := test.name.count("_")) > TEST_WORDS_MAX
    ]


def matching_lines(path: str, text: str, pattern: re.Pattern[str]) -> list[str]:
    return [f"{path}:{n}: {line.strip()[:120]}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


# ── the files they look at ───────────────────────────────────────────────────────────────────────────────


def package_sources(folder: str = "turtlemq") -> list[Source]:
    files = sorted(file for file in (ROOT / folder).rglob("*.py") if "node_modules" not in file.parts)
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def listed_files(root: Path) -> list[Path]:
    """Tracked files and those that could be added; all but the known scratch folders where git cannot tell."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set inside git hooks
    try:
        listing = subprocess.run(command, env=env, capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        found = (file for file in root.rglob("*") if not NOT_OURS.intersection(file.relative_to(root).parts))
    else:
        found = (root / name for name in listing.decode().split("\0") if name)
    return sorted({file for file in found if file.is_file()})


def text_files(root: Path) -> Iterator[tuple[str, str]]:
    """Relative path and text of every listed file that is text: UTF-8 without a zero byte."""
    for file in listed_files(root):
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            yield file.relative_to(root).as_posix(), text


def assert_none(offences: list[str]) -> None:
    assert not offences, f"{len(offences)} offence(s):\n" + "\n".join(offences)
