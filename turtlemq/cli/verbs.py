"""All verbs, put together. What a verb does is in the module of its kind, which is loaded when the verb is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from turtlemq import __version__
from turtlemq.cli import credentials
from turtlemq.cli.output import print_json
from turtlemq.cli.parameters import AsJson

VERBS = {  # where each lives, below this package
    "serve": "serve.serve",
    "put": "queue.put",
    "fetch": "queue.fetch",
    "ack": "queue.ack",
    "extend": "queue.extend",
    "cancel": "queue.cancel",
    "get": "message.get",
    "list": "message.list_",
    "reschedule": "message.reschedule",
    "topics": "topics.app",
    "groups": "topics.groups",
    "stats": "stats.stats",
    "forecast": "stats.forecast",
    "dead": "dead.app",
    "check": "files.check",
    "inspect": "files.inspect",
    "compact": "files.compact",
    "backup": "backup.backup",
    "restore": "backup.restore",
    "bench": "bench.bench",
    "report": "report.report",
    "config": "config.config",
    "token": "config.token",
    "version": "verbs.version",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "ack": {"context_settings": {"ignore_unknown_options": True}},
    "groups": {"help": "Consumer groups of a topic: list, place, replay, delete."},
    "dead": {"help": "Dead letters: list, count, requeue, delete, export.", "no_args_is_help": True},
}


def command_line(verb: str = "") -> typer.Typer:
    """The one verb that was asked for, for each takes a few milliseconds; all of them for help, completion and what is none."""
    app = typer.Typer(
        name="turtlemq",
        help="TurtleMQ: a delayed message queue in plain files.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help"]},
    )
    app.callback()(options)
    for name in [verb] if verb in VERBS else VERBS:
        _add(app, name)
    credentials.add_options(app)
    return app


def _add(app: typer.Typer, name: str) -> None:
    module, _, attribute = VERBS[name].partition(".")
    found = getattr(import_module(f"turtlemq.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name, **_SETTINGS.get(name, {}))
    else:
        app.command(name, **_SETTINGS.get(name, {}))(found)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"turtlemq {__version__}")
        raise typer.Exit


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
    print_json(told) if as_json else print(f"turtlemq {__version__}, file format {VERSION}, Python {told['python']}")
