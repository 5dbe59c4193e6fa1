"""All verbs, put together. What a verb does is in the module of its kind."""

from __future__ import annotations

from typing import Annotated

import typer

from turtlemq import __version__
from turtlemq.cli import dead, files, look, queue, serve

app = typer.Typer(
    name="turtlemq",
    help="TurtleMQ: a delayed message queue in plain files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"turtlemq {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """TurtleMQ: a delayed message queue in plain files."""


app.command()(serve.serve)
app.command()(queue.put)
app.command()(queue.fetch)
app.command(context_settings={"ignore_unknown_options": True})(queue.ack)
app.command()(queue.cancel)
app.command()(look.topics)
app.command()(look.stats)
app.command()(look.forecast)
app.add_typer(dead.app, name="dead", help="Dead letters: list, count, requeue, delete, export.", no_args_is_help=True)
app.command()(files.check)
app.command()(files.inspect)
app.command()(files.compact)
