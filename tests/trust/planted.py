"""Does the suite notice? Each bug of `bugs` goes into a copy of the project, and the tests that should find it are run there.

Failed tests are run again without the bug, in the same copy, and must pass: else it was not the bug that was noticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.trust.bugs import BUGS, Bug
from tests.trust.model import Broken, Figures, Part, figures

ROOT = Path(__file__).resolve().parent.parent.parent
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "results", "node_modules")
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120")
_FAILED = 1  # exit code of pytest and the trust suite when something failed; anything else is no verdict
_SECONDS_MAX = 900
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)  # in pytest's summary
SHARE_MIN = 0.95
_SURVIVED = "survived: "


def _run(cases: range, folder: Path) -> Figures:
    seen = Figures()
    for number in cases:
        caught = _caught(BUGS[number], folder)
        seen += figures(**({f"{_SURVIVED}{BUGS[number].name}": 1} if caught is None else {"caught": 1, f"caught by {caught}": 1}))
    return seen


def share(seen: Figures) -> str:
    """How many of the bugs were noticed; too few are a failure.

    >>> share(figures(caught=41, **{"survived: a commit is not synced": 1}))
    '98 % caught'
    """
    survivors = sum(count for name, count in seen.items() if name.startswith(_SURVIVED))
    part = seen["caught"] / max(1, seen["caught"] + survivors)
    if part < SHARE_MIN:
        raise Broken(f"{part:.0%} of the planted bugs are caught, {SHARE_MIN:.0%} are the least")
    return f"{part:.0%} caught".replace("%", " %")


def planted(bug: Bug, text: str) -> str:
    """A file with the bug in it."""
    if text.count(bug.old) != 1:
        raise Broken(f"{bug.name}: its text stands {text.count(bug.old)} times in {bug.file}; it must stand there once")
    return text.replace(bug.old, bug.new)


def _caught(bug: Bug, folder: Path) -> str | None:
    """The finder of a bug: a hand-written test, another part of this suite, or nothing."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=_left_out)
    path = copy / "turtlemq" / bug.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(planted(bug, sound), encoding="utf-8")
    for name in (*bug.tests.split(), ""):
        part = name.removeprefix("trust:")
        trust = part != name
        command = ("-m", "tests.trust", part, "--quick") if trust else (*_PYTEST, *_which(name))
        failed = _fails(copy, command)
        if failed is not None:
            path.write_text(sound, encoding="utf-8")
            _control(copy, failed, bug)
            return part if trust else "tests"
    return None


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Names that a copy does not need. Of the folders named `data`, golden files of tests are needed, a server's data is not."""
    return {*_LEFT_OUT(folder, names), *(["data"] if Path(folder) == ROOT else [])}


def _which(name: str) -> tuple[str, ...]:
    """The tests of a file, or all that are fast."""
    return (f"tests/test_{name}.py",) if name else ("-m", "not slow")


def _control(copy: Path, command: tuple[str, ...], bug: Bug) -> None:
    """Tests that failed with the bug pass without it."""
    if _fails(copy, command) is not None:
        raise Broken(f"{bug.name}: this fails without it, too: {' '.join(command)}")


def _fails(copy: Path, command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The command that fails here: the one test, if it is named, else this one. None: it passes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TURTLEMQ_", "PYTEST_"))}
    environment |= {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'spark'}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            (sys.executable, *command), cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        return command  # the tests hang with it: no review would let that pass
    if done.returncode not in (0, _FAILED):
        raise Broken(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if not done.returncode:
        return None
    test = _FAILED_TEST.search(done.stdout)
    return command if test is None else (*_PYTEST, test[1])


PART = Part(
    name="planted",
    unit="planted bugs",
    about="Mistakes made on purpose, one at a time, in a copy of the code: the suite must notice each.",
    run=_run,
    quick=0,
    full=len(BUGS),
    chunk=1,
    sum_up=share,
    must=("caught",),
)
