"""The planted bugs fit the code as it is, so that a whole run does not end at one that does not."""

from __future__ import annotations

import pytest

from tests.trust.bugs import BUGS, Bug
from tests.trust.planted import ROOT, planted


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_can_be_planted(bug: Bug) -> None:
    text = (ROOT / "turtlemq" / bug.file).read_text(encoding="utf-8")
    assert text.count(bug.old) == 1, "it stands there once"
    changed = planted(bug, text)
    assert changed != text
    compile(changed, bug.file, "exec")


def test_its_tests_are_there() -> None:
    names = {name for bug in BUGS for name in bug.tests.split() if not name.startswith("trust:")}
    assert [name for name in sorted(names) if not (ROOT / "tests" / f"test_{name}.py").exists()] == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)
