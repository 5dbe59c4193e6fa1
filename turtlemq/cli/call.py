"""Calls to a running server, with what every client verb shares: its address, its errors, its output."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

URL = "http://127.0.0.1:8878"
TIMEOUT_S = 75

Url = Annotated[str, typer.Option("--url", envvar="TURTLEMQ_URL", help="Address of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Group = Annotated[str, typer.Option("--group", help="The consumer group.")]
Topic = Annotated[str, typer.Argument(help="The topic.")]


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong, and end."""
    print(f"turtlemq: {message}", file=sys.stderr)
    raise typer.Exit(code)


def path(*parts: str, **query: Any) -> str:
    """A path below /v1/topics.

    >>> path("orders", "messages", "a b", limit=3, cursor=None)
    '/v1/topics/orders/messages/a%20b?limit=3'
    """
    given = {name: value for name, value in query.items() if value is not None}
    base = "/".join(["/v1/topics", *(quote(part, safe="") for part in parts)])
    return f"{base}?{urlencode(given)}" if given else base


@contextmanager
def answered(
    url: str, method: str, target: str, body: bytes | None = None, kind: str = "application/json"
) -> Iterator[http.client.HTTPResponse]:
    """The server's answer, if it is a good one."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        fail(f"{url!r} is no address of a server; it looks like {URL}", 2)
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = made(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, parts.path.rstrip("/") + target, body, {"Content-Type": kind} if body is not None else {})
        response = connection.getresponse()
        if response.status >= 300:
            fail(_said(response))
        yield response
    except (OSError, http.client.HTTPException) as error:
        fail(f"no answer from {url}: {str(error) or type(error).__name__}. Is the server running (turtlemq serve)?")
    finally:
        connection.close()


def _said(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"


def call(url: str, method: str, target: str, value: Any = None) -> Any:
    """Ask the server: JSON in, JSON out."""
    body = None if value is None else json.dumps(value).encode()
    with answered(url, method, target, body) as response:
        return json.loads(response.read())


def show(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False))


def body_text(message: dict[str, Any]) -> str:
    """A body on one line."""
    if "body_base64" in message:
        return f"base64:{message['body_base64']}"
    body = message.get("body")
    return plain(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))


def plain(text: str) -> str:
    """Text that does nothing to a terminal.

    >>> plain("a\\tü\\x1b[2J")
    'a\\\\tü\\\\x1b[2J'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def progress() -> Progress:
    """A bar for long work, on stderr, where a person looks at it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def when(at_ms: int | None) -> str:
    """A time for people, in their own zone."""
    from datetime import datetime

    return "-" if at_ms is None else datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(" ", "milliseconds")
