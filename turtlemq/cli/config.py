"""`turtlemq config` and `turtlemq token`: the settings in force for a server, and new access tokens for its configuration."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from turtlemq.cli.output import console, fail, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson, choice
from turtlemq.cli.serve import Data, File, Host, Port, flags_of


def config(data: Data = None, host: Host = None, port: Port = None, config: File = None, as_json: AsJson = False) -> None:
    """Show every setting that is in force here and where its value comes from. Secrets stay hidden."""
    import msgspec

    from turtlemq.errors import InvalidArgument
    from turtlemq.server.config import in_force, resolve

    try:
        settings = in_force(*resolve(flags_of(data, host, port), os.environ, config))
    except InvalidArgument as error:
        fail(str(error), 2)
    values = {name: (msgspec.to_builtins(value), origin) for name, (value, origin) in settings.items()}
    if as_json:
        print_json({name: {"value": value, "from": origin} for name, (value, origin) in values.items()})
        return
    table = new_table("setting", "value", "from", left=3)
    for name, (value, origin) in values.items():
        table.add_row(name, printable(_text(value)), printable(origin))
    print_table(table)


def _text(value: Any) -> str:
    """A value in TOML notation, for the types of settings.

    >>> _text(["a", "b"]), _text(True), _text(5.0)
    ('["a", "b"]', 'true', '5.0')
    """
    return json.dumps(value, ensure_ascii=False)


def token(
    name: Annotated[str, typer.Argument(help="Whose token it is: shop, mailer, prometheus …", show_default=False)],
    right: Annotated[
        list[str] | None,
        typer.Option(
            "--right",
            help="read, produce, consume, operate, admin, or none for one that only reads /metrics; may be repeated. "
            "(default: produce and consume)",
            autocompletion=choice("read", "produce", "consume", "operate", "admin", "none"),
        ),
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="A topic, or a pattern such as 'mail.*'; may be repeated. (default: *)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token: it is printed once, on stderr; on stdout comes the TOML that a server needs to know it.

    turtlemq token shop --right produce --topic 'orders*' >> turtlemq.toml
    """
    import msgspec

    from turtlemq.errors import InvalidArgument
    from turtlemq.server.auth import Token, check_tokens, hash_of, new_token

    secret = new_token()
    rights = ["produce", "consume"] if not right else [] if right == ["none"] else right
    fields = {"name": name, "hash": hash_of(secret), "rights": rights, "topics": topic or ["*"]}
    try:
        check_tokens([msgspec.convert(fields, Token)])
    except msgspec.ValidationError as error:
        fail(
            f"rights are read, produce, consume, operate and admin, a name has up to 100 letters, digits and . _ @ -: {error}", 2
        )
    except InvalidArgument as error:
        fail(str(error), 2)
    if as_json:
        print_json({"token": secret, **fields})
        return
    out = console(stderr=True)
    out.print(f"The token of {name}; it is shown only this once, and only its hash is stored:", markup=False)
    print(secret, file=sys.stderr)
    print("\n[[tokens]]", *(f"{key} = {_text(value)}" for key, value in fields.items()), sep="\n")
