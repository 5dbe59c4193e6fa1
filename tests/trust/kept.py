"""Figures of cases that passed, kept in `build/trust/` for `--resume`: a long run may be cut into several on the same code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.harness.server_process import ROOT
from tests.trust.model import Figures

FOLDER = ROOT / "build" / "trust"


class Kept:
    """The cases of a part that have passed with this code. Changed code has passed nothing yet."""

    def __init__(self, part: str, folder: Path = FOLDER, root: Path = ROOT) -> None:
        self._path, self._root, self._code = folder / f"{part}.json", root, code_of(root)
        told = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self._passed: dict[str, tuple[float, dict[str, int]]] = told["passed"] if told.get("code") == self._code else {}

    def get(self, first: int, last: int) -> tuple[float, Figures] | None:
        """Seconds and figures of these cases; None if they have not passed, in one go."""
        found = self._passed.get(f"{first} {last}")
        return None if found is None else (found[0], Figures(found[1]))

    def add(self, first: int, last: int, seconds: float, figures: Figures) -> None:
        """Note cases that have passed, unless the code has changed since the run began."""
        self._passed[f"{first} {last}"] = seconds, dict(figures)
        if code_of(self._root) == self._code:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"code": self._code, "passed": self._passed}), encoding="utf-8")


def code_of(root: Path) -> str:
    """A checksum of all modules of the product and of the tests."""
    code = hashlib.sha256()
    for path in sorted(path for folder in ("turtlemq", "tests") for path in (root / folder).rglob("*.py")):
        code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return code.hexdigest()
