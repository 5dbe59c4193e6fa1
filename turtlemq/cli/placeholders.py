"""What help shows for the value of a parameter: a word for it, such as URL or DURATION, instead of a type.

`name_values` goes through an application and its groups. By itself typer shows the types of arguments and of its own options,
and braces in usage lines; the classes of commands here leave both out.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ParameterInfo

# Placeholders of parameters, by the end of their names
_VALUE_NAMES = {
    "port": "PORT",
    "hours": "HOURS",
    "bytes": "BYTES",
    "data": "DIR",
    "out": "DIR",
    "scratch": "DIR",
    "config": "FILE",
    "error": "TEXT",
    "consumer": "NAME",
    "lease": "LEASE",
    "ids": "ID…",
}


def _value_name(name: str, kind: Any) -> str:
    """The placeholder of a parameter in help: a word for the values that it takes, and nothing for a flag.

    >>> _value_name("grpc_port", int), _value_name("limit", int), _value_name("keep", int | None), _value_name("url", str)
    ('PORT', 'N', 'N', 'URL')
    >>> _value_name("dead", bool), _value_name("error", str | None)
    ('', 'TEXT')
    """
    kinds = {kind, *get_args(kind)}
    if bool in kinds:
        return ""
    known = next((value for end, value in _VALUE_NAMES.items() if name.strip("_").endswith(end)), None)
    return known or ("N" if kinds & {int, float} else name.strip("_").upper())


def _without_type(parameter: Any) -> Any:
    """A parameter whose help has no type."""
    if isinstance(parameter, TyperArgument):
        parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # its placeholder stands beside it already
    elif parameter.metavar is None:
        parameter.metavar = ""  # an option of typer's own, all of which are flags
    return parameter


def _usage(piece: str) -> str:
    """A piece of a usage line, without braces around required arguments, and with one sign for repeated ones.

    >>> [_usage(piece) for piece in ("[OPTIONS]", "{TOPIC}", "{ID…}...", "[ID…]...")]
    ['[OPTIONS]', 'TOPIC', 'ID…', '[ID…]']
    """
    return re.sub(r"…(\]?)\.\.\.$", r"…\1", re.sub(r"[{}]", "", piece))


class _PlainHelp:
    """A command whose help has placeholders, and no types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_type(parameter) for parameter in super().get_params(ctx)]  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_usage(piece) for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class Verb(_PlainHelp, TyperCommand):
    """A command without commands of its own."""


class Verbs(_PlainHelp, TyperGroup):
    """A group of commands: the `cls` of each `typer.Typer`."""


def name_values(app: typer.Typer) -> None:
    """Give every parameter without a metavar a placeholder for its value. Types say little to people."""
    main = app.registered_callback
    for command in app.registered_commands:
        command.cls = Verb
    callbacks = [main.callback if main else None, *(command.callback for command in app.registered_commands)]
    for callback in filter(None, callbacks):
        signature = inspect.signature(callback, eval_str=True)
        callback.__signature__ = signature  # type: ignore[attr-defined]  # typer must find these objects, not others
        for name, parameter in signature.parameters.items():
            kind, *infos = get_args(parameter.annotation) or (None,)
            for one in infos:
                if isinstance(one, ParameterInfo) and one.metavar is None:
                    one.metavar = _value_name(name, kind)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name_values(group.typer_instance)
