"""Who we are and whom we trust: `--token` and `--cacert` on every verb that talks to a server, and TLS for its calls.

Both are better given in the environment, as TURTLEMQ_TOKEN and TURTLEMQ_CACERT: command lines can be read by others.
"""

from __future__ import annotations

import inspect
import os
import ssl
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

TOKEN, CACERT = "TURTLEMQ_TOKEN", "TURTLEMQ_CACERT"
_OPTIONS = {
    "token": Annotated[
        str | None,
        typer.Option("--token", help=f"The token, where the server wants one; better put it into {TOKEN}.", show_default=False),
    ],
    "cacert": Annotated[
        str | None,
        typer.Option("--cacert", help=f"A file of certificates to trust, for https; also {CACERT}.", show_default=False),
    ],
}
_NAMES = {"token": TOKEN, "cacert": CACERT}


def add_to(app: typer.Typer) -> None:
    """Give every verb that has a `url` these options too."""
    whole = app.registered_callback
    if whole is not None and whole.callback is not None and "url" in inspect.signature(whole.callback).parameters:
        whole.callback = _with_options(whole.callback)
    for command in app.registered_commands:
        if command.callback is not None and "url" in inspect.signature(command.callback).parameters:
            command.callback = _with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_to(group.typer_instance)


def _with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same verb with two more options; what they say holds while it runs, as if it stood in the environment."""
    signature = inspect.signature(verb, eval_str=True)
    missing = [name for name in _OPTIONS if name not in signature.parameters]
    if not missing:
        return verb

    @wraps(verb)
    def with_options(*args: Any, **given: Any) -> Any:
        told = {_NAMES[name]: given.pop(name) for name in missing}
        before = dict(os.environ)
        os.environ.update({name: value for name, value in told.items() if value is not None})
        try:
            return verb(*args, **given)
        finally:
            os.environ.clear()
            os.environ.update(before)

    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, kind, default=None, annotation=_OPTIONS[name]) for name in missing]
    with_options.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])  # type: ignore[attr-defined]
    with_options.__annotations__ = {**verb.__annotations__, **{name: _OPTIONS[name] for name in missing}}
    return with_options


def tls() -> ssl.SSLContext:
    """What a call over https trusts: the system's certificates, or those of the file."""
    file = os.environ.get(CACERT) or None
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        from turtlemq.cli.call import fail

        fail(f"{CACERT}: {file} cannot be read as certificates (PEM): {error}", 2)
