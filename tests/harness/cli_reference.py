"""The tables at the end of docs/CLI.md, made from the verbs. `python -m tests.harness.cli_reference` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from turtlemq.cli.verbs import command_line

PAGE = Path(__file__).resolve().parents[2] / "docs" / "CLI.md"
BEGIN, END = "<!-- reference:begin -->", "<!-- reference:end -->"
_EVERYWHERE = {"--url", "--json", "--token", "--cacert", "--help"}


def verbs(command: Any = None, name: str = "turtlemq") -> Iterator[tuple[str, Any]]:
    """Every verb by its full name, the groups of verbs too."""
    command = command or typer.main.get_command(command_line())
    for one, inner in command.commands.items():
        full = f"{name} {one}"
        yield full, inner
        if hasattr(inner, "commands"):
            yield from verbs(inner, full)


def options(command: Any) -> Iterator[tuple[str, str]]:
    """Arguments and options of a verb with their help, but those that nearly all have."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield parameter.metavar or parameter.name.rstrip("_").upper(), parameter.help or ""
        elif not parameter.hidden and not _EVERYWHERE.intersection(parameter.opts):
            yield _option(parameter), _help(parameter)


def _option(parameter: Any) -> str:
    name = parameter.opts[0]
    if parameter.is_flag:
        return str(name)
    return f"{name} {parameter.metavar or name.strip('-').upper()}"


def _help(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    known = default is not None and default != "" and not callable(default) and not parameter.is_flag and not parameter.required
    return f"{text} Default: `{default}`." if known and isinstance(default, int | float | str | Path) else text


def reference() -> str:
    """The whole section."""
    out = [BEGIN, ""]
    for name, command in verbs():
        kinds = {kind for parameter in command.params for kind in parameter.opts}
        shared = [f"`{kind}`" for kind in ("--json", "--url") if kind in kinds]
        summary = (command.help or "").strip().partition("\n\n")[0].replace("\n", " ")
        out += [f"### `{name}`", "", summary + (f" Also {' and '.join(shared)}." if shared else ""), ""]
        rows = [(option.replace("|", "\\|"), text.replace("|", "\\|")) for option, text in options(command)]
        if rows:
            out += ["| | |", "| --- | --- |", *(f"| `{option}` | {text} |" for option, text in rows), ""]
    return "\n".join([*out, END])


def written(page: str) -> str:
    """A page with the section made anew."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: reference(), page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
