"""`turtlemq transaction`: several operations on one topic, all of them or none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from turtlemq.cli.call import URL, call, path
from turtlemq.cli.output import fail, print_json
from turtlemq.cli.parameters import AsJson, Topic, Url


def transaction(
    topic: Topic,
    file: Annotated[str, typer.Argument(help="A file with the operations as JSON; '-' for stdin.", show_default=False)],
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Put, cancel and reschedule messages of a topic together, under conditions: all of it is done, or nothing.

    The file: {"put": [{"id": "b", "body": 1}], "cancel": ["a"], "reschedule": [{"id": "c", "delay": "3d"}],
    "if": [{"id": "a", "state": "sleep"}]}

    turtlemq transaction orders operations.json
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    answer = call(url, "POST", path(topic, "transaction"), data)
    if as_json:
        print_json(answer)
        return
    put = answer["put"]
    counts = (put["created"], put["duplicates"], answer["cancelled"], answer["rescheduled"])
    print("{} created, {} duplicates, {} cancelled, {} rescheduled".format(*counts))
