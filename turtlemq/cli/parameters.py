"""Command line parameters that several verbs share: --url, --json, --group, --yes and the topic, with shell completion.

`duration_option` and `time_option` make options whose text is a duration (30m) or a time (+2h); `times` parses it.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr
from typing import Annotated, Any

import typer

from turtlemq.cli.call import URL, path, request
from turtlemq.cli.times import parse_duration, parse_time

Url = Annotated[str, typer.Option("--url", envvar="TURTLEMQ_URL", help="Address of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Group = Annotated[str, typer.Option("--group", help="The consumer group.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def duration_option(help_text: str, *, show_default: bool = False) -> Any:
    """An option that takes seconds, or a number with a unit."""
    return typer.Option(parser=parse_duration, metavar="S", help=help_text, show_default=show_default)


def time_option(help_text: str, *names: str) -> Any:
    """An option that takes a time; its value is in epoch milliseconds."""
    return typer.Option(*names, parser=parse_time, metavar="TIME", help=help_text, show_default=False)


def _complete_topic(incomplete: str) -> list[str]:
    """Topic names for the shell to complete; none if no server answers within a second."""
    url = os.environ.get("TURTLEMQ_URL", URL)
    try:
        with redirect_stderr(io.StringIO()), request(url, "GET", path(), timeout_s=1) as response:
            topics = json.loads(response.read())["topics"]
    except typer.Exit:
        return []
    return [topic["topic"] for topic in topics if topic["topic"].startswith(incomplete)]


Topic = Annotated[str, typer.Argument(help="The topic.", show_default=False, autocompletion=_complete_topic)]
