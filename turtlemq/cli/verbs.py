"""All verbs, put together. What a verb does is in the module of its kind."""

from __future__ import annotations

from typing import Annotated

import typer

from turtlemq import __version__
from turtlemq.cli import backup, bench, config, dead, files, identity, look, message, queue, report, serve, topics
from turtlemq.cli.call import AsJson, show

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


def version(as_json: AsJson = False) -> None:
    """Say which version this is, and which file format it reads.

    turtlemq version --json
    """
    import platform

    from turtlemq.segment.format import VERSION

    told = {"turtlemq": __version__, "format": VERSION, "python": platform.python_version()}
    show(told) if as_json else print(f"turtlemq {__version__}, file format {VERSION}, Python {told['python']}")


app.command()(serve.serve)
app.command()(queue.put)
app.command()(queue.fetch)
app.command(context_settings={"ignore_unknown_options": True})(queue.ack)
app.command()(queue.extend)
app.command()(queue.cancel)
app.command()(message.get)
app.command("list")(message.list_)
app.command()(message.reschedule)
app.add_typer(topics.app, name="topics")
app.add_typer(topics.groups, name="groups", help="Consumer groups of a topic: list, place, replay, delete.")
app.command()(look.stats)
app.command()(look.forecast)
app.add_typer(dead.app, name="dead", help="Dead letters: list, count, requeue, delete, export.", no_args_is_help=True)
app.command()(files.check)
app.command()(files.inspect)
app.command()(files.compact)
app.command()(backup.backup)
app.command()(backup.restore)
app.command()(bench.bench)
app.command()(report.report)
app.command()(config.config)
app.command()(config.token)
app.command()(version)
identity.add_to(app)
