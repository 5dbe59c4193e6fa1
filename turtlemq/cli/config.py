"""`turtlemq config` and `turtlemq token`: what a server would be told, and tokens to tell it."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from turtlemq.cli.output import console, fail, new_table, print_json, print_table, printable
from turtlemq.cli.parameters import AsJson
from turtlemq.cli.serve import Data, File, Host, Port, flags_of


def config(data: Data = None, host: Host = None, port: Port = None, config: File = None, as_json: AsJson = False) -> None:
    """Show every setting that is in force here and where its value comes from. What is secret stays hidden."""
    import msgspec

    from turtlemq.errors import InvalidArgument
    from turtlemq.server.config import in_force, resolve

    try:
        found = in_force(*resolve(flags_of(data, host, port), os.environ, config))
    except InvalidArgument as error:
        fail(str(error), 2)
    values = {name: (msgspec.to_builtins(value), origin) for name, (value, origin) in found.items()}
    if as_json:
        print_json({name: {"value": value, "from": origin} for name, (value, origin) in values.items()})
        return
    made = new_table("setting", "value", "from", left=3)
    for name, (value, origin) in values.items():
        made.add_row(name, *(_cell(text) for text in (_text(value), origin)))
    print_table(made)


def _cell(text: str) -> Any:
    from rich.text import Text

    return Text(printable(text))


def _text(value: Any) -> str:
    """A value as TOML has it, about.

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
            help="produce, consume, admin, or none for one that only reads /metrics; may be repeated. (default: the first two)",
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
        fail(f"rights are produce, consume and admin, a name has up to 100 letters, digits and . _ @ -: {error}", 2)
    except InvalidArgument as error:
        fail(str(error), 2)
    if as_json:
        print_json({"token": secret, **fields})
        return
    out = console(stderr=True)
    out.print(f"The token of {name}; it is shown only this once, and only its hash is stored:", markup=False)
    print(secret, file=sys.stderr)
    print("\n[[tokens]]", *(f"{key} = {_text(value)}" for key, value in fields.items()), sep="\n")
