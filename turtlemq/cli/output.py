"""Terminal output of the verbs: errors, JSON lines, tables, progress bars, confirmation prompts.

Colours appear only on a terminal. Text that comes from messages passes through `printable`, so that it cannot send control
sequences to the terminal. `rich` takes a tenth of a second to load, so the functions that use it import it themselves.
Requests to a server are in `call`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from turtlemq.cli.table import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and end the program with this exit code."""
    print_error(message)
    raise typer.Exit(code)


def print_error(message: str) -> None:
    """Print an error on stderr, after all output that stdout still buffers."""
    sys.stdout.flush()
    console(stderr=True).print(f"turtlemq: {printable(message)}", style="red")


def confirm(question: str, yes: bool) -> None:
    """Ask before an irreversible action. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Say --yes if so.", 2)
    typer.confirm(question, abort=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False))


def console(*, stderr: bool = False) -> Console:
    """A rich console without markup, so brackets are text. No colours if NO_COLOR is set or the output is no terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False)


def new_table(*columns: str, left: int = 1, shrink: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """A table without frames. The first `left` columns are text, the others right-aligned numbers; only those that `shrink`
    names are ever cut, and those that `whole` names are not folded."""
    return Table(columns, left, shrink, whole)


def print_table(table: Table) -> None:
    """Print the rows of a table that are not printed yet."""
    if sys.stdout.isatty():
        console().print(table, soft_wrap=False, crop=False)
        table.printed()
        return
    for line in table.lines():
        print(line)


def progress() -> Progress:
    """A progress bar in bytes, on stderr. Shown only on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def printable(text: str) -> str:
    """Text with its control characters escaped, so that a terminal only shows it.

    >>> printable("a\\tü\\x1b[2J")
    'a\\\\tü\\\\x1b[2J'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def body_text(message: dict[str, Any]) -> str:
    """The body of a message on one line; bytes as base64."""
    if "body_base64" in message:
        return f"base64:{message['body_base64']}"
    body = message.get("body")
    return printable(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit.

    >>> format_bytes(0), format_bytes(1536), format_bytes(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
