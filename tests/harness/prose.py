"""Habits of prose that tire a reader, found in comments and docstrings.

Three habits are counted, each a rule for the words of this project:

- people: an indefinite pronoun for a person (`PEOPLE`), where a component acts;
- clauses: a clause that begins with "what" (`CLAUSES`), where a noun would do: "due messages";
- leaning: a docstring that begins with "The same", or only says "See …": it does not stand alone.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

PEOPLE = re.compile(r"\b(?:some|no|any|every)(?:body|one)\b|\bno one\b|\bwho(?:ever|mever|m)?\b", re.IGNORECASE)
CLAUSES = re.compile(
    r"\bwhat(?:ever)? (?:is|was|are|were|has|have|had|comes?|came|goes|went|lies|lay|stands?|stood|sleeps?|slept|waits?|waited"
    r"|must|may|can|could|cannot|would|should|does|did|happens?|happened|follows|they|it|an?|the|its)\b",
    re.IGNORECASE,
)
LEANING = re.compile(r"the same\b|see\b.{0,50}$", re.IGNORECASE)
_EXAMPLE = re.compile(r"^(?:>>>|\.\.\.) .*$", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, examples left out, on one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(_EXAMPLE.sub("", text).split())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def habits(source: str) -> Iterator[tuple[str, int, str]]:
    """Every habit in a source file: its name, the line, and the words around it."""
    documented = list(docstrings(source))
    for line, text in [*documented, *comments(source)]:
        for name, pattern in (("people", PEOPLE), ("clauses", CLAUSES)):
            for match in pattern.finditer(text):
                yield name, line, text[max(0, match.start() - 40) : match.end() + 40]
    for line, text in documented:
        if LEANING.match(text):
            yield "leaning", line, text[:100]
