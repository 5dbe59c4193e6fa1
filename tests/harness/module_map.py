"""The map of modules in docs/ARCHITECTURE.md, made from the first sentence of each module's docstring.

`python -m tests.harness.module_map` writes it anew; a test compares the page with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules:begin -->", "<!-- modules:end -->"
SENTENCE_CHARS_MAX = 200
PACKAGES = (
    "turtlemq",
    "turtlemq/topic",
    "turtlemq/index",
    "turtlemq/broker",
    "turtlemq/segment",
    "turtlemq/storage",
    "turtlemq/replica",
    "turtlemq/server",
    "turtlemq/server/handlers",
    "turtlemq/server/incoming",
    "turtlemq/server/outgoing",
    "turtlemq/server/grpc",
    "turtlemq/client",
    "turtlemq/integrations",
    "turtlemq/integrations/django",
    "turtlemq/importing",
    "turtlemq/cli",
    "spark/pyspark_turtlemq",
    "spark/turtlemq_report",
)
_SENTENCE = re.compile(r"(.+?\.)(?=\s|$)")


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring.

    >>> first_sentence(Path(__file__)).startswith("The map of modules")
    True
    """
    text = " ".join((ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").split())
    match = _SENTENCE.match(text)
    return (match[1] if match else text).rstrip(":.")


def module_map() -> str:
    """The whole section: a table for each package."""
    lines = [BEGIN, ""]
    for package in PACKAGES:
        folder = ROOT / package
        lines += [
            f"### `{package}/`",
            "",
            first_sentence(folder / "__init__.py") + ".",
            "",
            "| module | contents |",
            "| --- | --- |",
        ]
        modules = sorted(file for file in folder.glob("*.py") if not file.name.startswith("__"))
        lines += [f"| `{file.stem}` | {first_sentence(file)} |" for file in modules]
        lines.append("")
    return "\n".join([*lines, END])


def written(page: str) -> str:
    """A page with the section made anew."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: module_map(), page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
