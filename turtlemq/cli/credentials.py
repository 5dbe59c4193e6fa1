"""`--token` and `--cacert` for every verb that talks to a server, and the TLS context of its requests.

The environment variables TURTLEMQ_TOKEN and TURTLEMQ_CACERT are the better place for both: other users of the machine can read
command lines.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.output import fail

if TYPE_CHECKING:
    import ssl

TOKEN, CACERT = "TURTLEMQ_TOKEN", "TURTLEMQ_CACERT"
CONNECTION = "Connection"  # the panel of --url, --token and --cacert in the help
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help=f"The token, where the server wants one; better put it into {TOKEN}.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
Cacert = Annotated[
    str | None,
    typer.Option(
        "--cacert",
        metavar="FILE",
        help=f"A file of certificates to trust, for https; also {CACERT}.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
_OPTIONS = {"token": Token, "cacert": Cacert}
VARIABLES = {"token": TOKEN, "cacert": CACERT}


def add_options(app: typer.Typer) -> None:
    """Add both options to every verb of an app that has a `url` parameter."""
    main = app.registered_callback
    if main is not None and main.callback is not None and "url" in inspect.signature(main.callback).parameters:
        main.callback = _with_options(main.callback)
    for command in app.registered_commands:
        if command.callback is not None and "url" in inspect.signature(command.callback).parameters:
            command.callback = _with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_options(group.typer_instance)


def _with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a verb so that it takes both options. While it runs, their values stand in the environment."""
    signature = inspect.signature(verb, eval_str=True)
    missing = [name for name in _OPTIONS if name not in signature.parameters]
    if not missing:
        return verb

    @wraps(verb)
    def with_options(*args: Any, **given: Any) -> Any:
        variables = {VARIABLES[name]: given.pop(name) for name in missing}
        restore = set_variables(variables)
        try:
            return verb(*args, **given)
        finally:
            restore()

    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None, annotation=_OPTIONS[name]) for name in missing]
    with_options.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    with_options.__annotations__ = {**verb.__annotations__, **{name: _OPTIONS[name] for name in missing}}
    return with_options


def set_variables(variables: Mapping[str, str | None]) -> Callable[[], None]:
    """Set those variables of the environment that have a value. Returns a function that restores the environment."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if value is not None})

    def restore() -> None:
        os.environ.clear()
        os.environ.update(before)

    return restore


def tls_context() -> ssl.SSLContext:
    """The TLS context of an https request: trusts the certificates of the file in TURTLEMQ_CACERT, else those of the system."""
    import ssl  # not at the top: most requests need none

    file = os.environ.get(CACERT) or None
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        fail(f"{CACERT}: {file} cannot be read as certificates (PEM): {error}", 2)
