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
from turtlemq.cli.placeholders import Verbs, name_values

VERBS = {  # verb: module.attribute below this package
    "put": "queue.put",
    "fetch": "queue.fetch",
    "ack": "queue.ack",
    "extend": "queue.extend",
    "work": "work.work",
    "cancel": "queue.cancel",
    "get": "message.get",
    "list": "listing.list_",
    "find": "listing.find",
    "tail": "tail.tail",
    "reschedule": "message.reschedule",
    "retry": "message.retry",
    "transaction": "transaction.transaction",
    "replay": "replay.replay",
    "schedules": "schedules.app",
    "import": "importing.app",
    "topics": "topics.app",
    "groups": "topics.groups",
    "pause": "topics.pause",
    "resume": "topics.resume",
    "clients": "clients.app",
    "stats": "stats.stats",
    "forecast": "stats.forecast",
    "dead": "dead.app",
    "check": "files.check",
    "inspect": "files.inspect",
    "compact": "files.compact",
    "backup": "backup.backup",
    "restore": "backup.restore",
    "shards": "shards.app",
    "serve": "serve.serve",
    "status": "overview.status",
    "top": "overview.top",
    "audit": "audit.audit",
    "tenants": "tenants.tenants",
    "clock": "clock.clock",
    "bench": "bench.bench",
    "report": "report.report",
    "cluster": "cluster.app",
    "config": "config.config",
    "token": "config.token",
    "version": "verbs.version",
    "help": "verbs.help_",
}
_MESSAGES, _TOPICS, _DEAD, _FILES, _SERVER = "Messages", "Topics", "Dead letters", "Files", "Server"
_PANELS = {  # of the help; other verbs are about messages
    **dict.fromkeys(("topics", "groups", "clients", "pause", "resume", "stats", "forecast", "top"), _TOPICS),
    "dead": _DEAD,
    **dict.fromkeys(("check", "inspect", "compact", "backup", "restore", "shards", "report"), _FILES),
    **dict.fromkeys("serve status audit tenants clock bench cluster config token version help".split(), _SERVER),
}
_TYPER_OPTIONS: dict[str, dict[str, Any]] = {
    "ack": {"context_settings": {"ignore_unknown_options": True}},
    "clients": {"help": "Clients to which the server delivers by itself: list, register, pause, delete."},
    "groups": {"help": "Consumer groups of a topic: list, place, replay, delete."},
    "import": {
        "help": "Copy waiting messages of another queue: redis-zset, bullmq, beanstalkd, sqs-json, csv.",
        "no_args_is_help": True,
    },
    "cluster": {"help": "Several nodes with copies of the same data: make a cluster, look at it, act on it."},
    "shards": {"help": "The data folder of a server with several processes: split one into shards.", "no_args_is_help": True},
    "schedules": {"help": "Recurring schedules: list, put, next, trigger, pause, delete.", "no_args_is_help": True},
    "dead": {"help": "Dead letters: list, summary, requeue, delete, export.", "no_args_is_help": True},
}


class _InOrder(Verbs):
    """Lists verbs, and so the panels of the help, in the order of VERBS."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in VERBS if name in self.commands]


def command_line(verb: str = "") -> typer.Typer:
    """The application with one verb, since each takes milliseconds to load; with all for help, completion and unknown names."""
    app = typer.Typer(
        name="turtlemq",
        cls=_InOrder,
        help="TurtleMQ: a delayed message queue in plain files.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help"]},
    )
    app.callback()(options)
    for name in [verb] if verb in VERBS else VERBS:
        _add(app, name)
    credentials.add_options(app)
    name_values(app)
    return app


def _add(app: typer.Typer, name: str) -> None:
    module, _, attribute = VERBS[name].partition(".")
    target = getattr(import_module(f"turtlemq.cli.{module}"), attribute)
    how = {"rich_help_panel": _PANELS.get(name, _MESSAGES), **_TYPER_OPTIONS.get(name, {})}
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, **how)
    else:
        app.command(name, **how)(target)


def _print_version(requested: bool) -> None:
    if requested:
        from turtlemq.segment import kernel

        print(f"turtlemq {__version__} (kernel: {kernel.status})")
        raise typer.Exit


def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Address of the server, for any verb.", rich_help_panel=credentials.CONNECTION),
    ] = None,
    token: credentials.Token = None,
    cacert: credentials.Cacert = None,
) -> None:
    """TurtleMQ: a delayed message queue in plain files."""
    given = {"TURTLEMQ_URL": url, credentials.TOKEN: token, credentials.CACERT: cacert}
    context.call_on_close(credentials.set_variables(given))


def help_(
    verbs: Annotated[
        list[str] | None, typer.Argument(metavar="VERB…", help="A verb, or none for all.", show_default=False)
    ] = None,
) -> None:
    """Explain a verb, or list all.

    turtlemq help dead requeue
    """
    words = verbs or []
    command_line(*words[:1])([*words, "--help"], prog_name="turtlemq")


def version(as_json: AsJson = False) -> None:
    """Say which version this is, which file format it reads, and whether the kernel is compiled.

    turtlemq version --json
    """
    import platform

    from turtlemq.segment import kernel
    from turtlemq.segment.format import VERSION

    versions = {"turtlemq": __version__, "format": VERSION, "python": platform.python_version(), "kernel": kernel.status}
    line = f"turtlemq {__version__}, file format {VERSION}, Python {versions['python']}, kernel: {kernel.status}"
    print_json(versions) if as_json else print(line)
