"""Command line parameters that several verbs share: --url, --json, --group, --yes, topics, ids and settings, with completion.

`duration_option` and `time_option` make options whose text is a duration (30m) or a time (+2h); `times` parses it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, path, request
from turtlemq.cli.credentials import CONNECTION, VARIABLES, set_variables
from turtlemq.cli.times import parse_duration, parse_time

STATES = ("sleep", "ready", "reserve", "history", "dead", "cancelled")


def duration_option(help_text: str, *, show_default: bool = False) -> Any:
    """An option that takes seconds, or a number with a unit."""
    return typer.Option(parser=parse_duration, metavar="DURATION", help=help_text, show_default=show_default)


def time_option(help_text: str, *names: str) -> Any:
    """An option that takes a time; its value is in epoch milliseconds."""
    return typer.Option(*names, parser=parse_time, metavar="TIME", help=help_text, show_default=False)


# Completion by the shell: from the server, if one answers within a second


def asked(context: typer.Context, *parts: str) -> Any:
    """An answer of the server for the shell to complete from; None if there is none. The line that is completed, or else the
    environment, says which server it is, and has its token and certificates."""
    given = _connection(context)
    url = given.pop("TURTLEMQ_URL", "") or os.environ.get("TURTLEMQ_URL", URL)
    restore = set_variables(dict(given))
    try:
        with redirect_stderr(io.StringIO()):
            return json.loads(request(url, "GET", path(*parts), timeout_s=1))
    except typer.Exit:
        return None
    finally:
        restore()


def _connection(context: Any) -> dict[str, str]:
    """Values of `--url`, `--token` and `--cacert` on a line, by variables of the environment. Those behind the verb win."""
    found: dict[str, str] = {}
    while context is not None:
        for name, variable in (("url", "TURTLEMQ_URL"), *VARIABLES.items()):
            is_given = str(getattr(context.get_parameter_source(name), "name", "")) == "COMMANDLINE"
            if is_given and context.params.get(name):
                found.setdefault(variable, str(context.params[name]))
        context = context.parent
    return found


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    """Names of topics."""
    answer = asked(context) or {"topics": []}
    return [topic["topic"] for topic in answer["topics"] if topic["topic"].startswith(incomplete)]


def _complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """Groups of the topic that the line names already."""
    words = [word for word in context.args if not word.startswith("-")]  # of a line that is not parsed: an option has no value
    topic = context.params.get("topic") or (words[0] if words else None)
    answer = asked(context, topic) if topic else None
    return [group for group in answer["groups"] if group.startswith(incomplete)] if answer else []


def _complete_setting(incomplete: str) -> list[str]:
    """Names of settings of a topic with the sign that follows them, and the values of those that take a word."""
    from turtlemq.settings import TABLE

    words = [(f"{'.'.join(row.path)}=", row.limits.words) for row in TABLE if row.path]
    valued = "=" in incomplete
    lines = [name + word for name, values in words for word in values] if valued else [name for name, _ in words]
    return [line for line in lines if line.startswith(incomplete)]


def choice(*values: str) -> Callable[[str], list[str]]:
    """A completion from fixed values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="TURTLEMQ_URL", metavar="URL", help="Address of the server.", rich_help_panel=CONNECTION, show_envvar=True
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Topic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC", show_default=False, autocompletion=complete_topic)]
Id = Annotated[str, typer.Argument(metavar="ID", help="Its id.", show_default=False)]
Group = Annotated[str, typer.Option("--group", metavar="GROUP", help="The consumer group.", autocompletion=_complete_group)]
GroupName = Annotated[
    str, typer.Argument(metavar="GROUP", help="The consumer group.", show_default=False, autocompletion=_complete_group)
]
OneGroup = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="GROUP", help="One consumer group alone.", show_default=False, autocompletion=_complete_group
    ),
]
InGroup = Annotated[
    str | None,
    typer.Option("--in-group", metavar="GROUP", help="Only of this group.", show_default=False, autocompletion=_complete_group),
]
Newest = Annotated[bool, typer.Option("--newest", help="The newest first.")]
State = Annotated[
    str,
    typer.Option("--state", metavar="STATE", help=f"In which state: {', '.join(STATES)}.", autocompletion=choice(*STATES)),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE…",
        help="Settings, such as ttr=30 or backoff.base=2.",
        show_default=False,
        autocompletion=_complete_setting,
    ),
]
