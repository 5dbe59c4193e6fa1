"""The table of all verbs, and the typer application made from it.

A verb lives in the module of its kind, which is loaded only when that verb is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from turtlemq import __version__
from turtlemq.cli import credentials
from turtlemq.cli.output import print_json
from turtlemq.cli.parameters import AsJson

VERBS = {  # verb: module.attribute below this package
    "serve": "serve.serve",
    "put": "queue.put",
    "fetch": "queue.fetch",
    "ack": "queue.ack",
    "extend": "queue.extend",
    "work": "work.work",
    "cancel": "queue.cancel",
    "get": "message.get",
    "list": "listing.list_",
    "find": "listing.find",
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
    "import": "importing.app",
    "bench": "bench.bench",
    "report": "report.report",
    "cluster": "cluster.app",
    "config": "config.config",
    "token": "config.token",
    "version": "verbs.version",
}
_TYPER_OPTIONS: dict[str, dict[str, Any]] = {
    "ack": {"context_settings": {"ignore_unknown_options": True}},
    "groups": {"help": "Consumer groups of a topic: list, place, replay, delete."},
    "import": {
        "help": "Copy waiting messages of another queue: redis-zset, bullmq, beanstalkd, sqs-json, csv.",
        "no_args_is_help": True,
    },
    "cluster": {"help": "Several nodes with copies of the same data: make a cluster, look at it, act on it."},
    "dead": {"help": "Dead letters: list, summary, requeue, delete, export.", "no_args_is_help": True},
}


def command_line(verb: str = "") -> typer.Typer:
    """The application with one verb, since each takes milliseconds to load; with all for help, completion and unknown names."""
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
    target = getattr(import_module(f"turtlemq.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, **_TYPER_OPTIONS.get(name, {}))
    else:
        app.command(name, **_TYPER_OPTIONS.get(name, {}))(target)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"turtlemq {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """TurtleMQ: a delayed message queue in plain files."""


def version(as_json: AsJson = False) -> None:
    """Say which version this is, and which file format it reads.

    turtlemq version --json
    """
    import platform

    from turtlemq.segment.format import VERSION

    versions = {"turtlemq": __version__, "format": VERSION, "python": platform.python_version()}
    print_json(versions) if as_json else print(f"turtlemq {__version__}, file format {VERSION}, Python {versions['python']}")
