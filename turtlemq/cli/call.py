"""Calls to a running server, with what every client verb shares: its address, its errors, its output."""

from __future__ import annotations

import http.client
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import typer

from turtlemq.cli.identity import TOKEN, tls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

URL = "http://127.0.0.1:8878"
TIMEOUT_S = 75
PATIENCE_S = 60  # how long to go on where the server says "later"

Url = Annotated[str, typer.Option("--url", envvar="TURTLEMQ_URL", help="Address of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Group = Annotated[str, typer.Option("--group", help="The consumer group.")]


def _topics(incomplete: str) -> list[str]:
    """Names for the shell to complete; none where there is no server."""
    try:
        with (
            redirect_stderr(io.StringIO()),
            answered(os.environ.get("TURTLEMQ_URL", URL), "GET", path(), timeout_s=1) as response,
        ):
            found = json.loads(response.read())["topics"]
    except typer.Exit:
        return []
    return [one["topic"] for one in found if one["topic"].startswith(incomplete)]


Topic = Annotated[str, typer.Argument(help="The topic.", show_default=False, autocompletion=_topics)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong, and end."""
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Say what is wrong."""
    sys.stdout.flush()
    console(stderr=True).print(f"turtlemq: {plain(message)}", style="red")


def path(*parts: str, **query: Any) -> str:
    """A path below /v1/topics.

    >>> path("orders", "messages", "a b", limit=3, cursor=None)
    '/v1/topics/orders/messages/a%20b?limit=3'
    """
    given = {name: value for name, value in query.items() if value is not None}
    base = "/".join(["/v1/topics", *(quote(part, safe="") for part in parts)])
    return f"{base}?{urlencode(given)}" if given else base


def headers() -> dict[str, str]:
    """What goes with every request."""
    token = os.environ.get(TOKEN, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def answered(
    url: str, method: str, target: str, body: bytes | None = None, kind: str = "application/json", timeout_s: float = TIMEOUT_S
) -> Iterator[http.client.HTTPResponse]:
    """The server's answer, if it is a good one. Where it says "later", we come later."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        fail(f"{url!r} is no address of a server; it looks like {URL}", 2)
    secure: dict[str, Any] = {"context": tls()} if parts.scheme == "https" else {}
    made = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    sent = headers() | ({"Content-Type": kind} if body is not None else {})
    end = time.monotonic() + PATIENCE_S
    while True:
        connection = made(parts.hostname, parts.port, timeout=timeout_s, **secure)
        response: http.client.HTTPResponse | None = None
        try:
            connection.request(method, parts.path.rstrip("/") + target, body, sent)
            response = connection.getresponse()
            if response.status == 429 and time.monotonic() < end:
                time.sleep(_later_s(response))
                continue
            if response.status >= 300:
                fail(_said(response))
            yield response
            return
        except BrokenPipeError:
            if response is not None:
                raise  # it is our own reader who went away
            fail(f"{url} hung up while it was spoken to; its log may say why.")
        except (OSError, http.client.HTTPException) as error:
            fail(
                f"no answer from {url}: {str(error) or type(error).__name__}. Is the server running? "
                "Start one with 'turtlemq serve', or say where it is with --url or TURTLEMQ_URL."
            )
        finally:
            connection.close()


def _later_s(response: http.client.HTTPResponse) -> float:
    try:
        return min(max(float(json.loads(response.read())["error"]["retry_after_ms"]) / 1000, 0.01), 10.0)
    except (ValueError, KeyError, TypeError):
        return 1.0


def _said(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        said = f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:200]}"
    return f"{said} Put a token into {TOKEN}." if response.status == 401 else said


def call(url: str, method: str, target: str, value: Any = None) -> Any:
    """Ask the server: JSON in, JSON out."""
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    with answered(url, method, target, body) as response:
        return json.loads(response.read())


def with_body(fields: dict[str, Any], body: str | None) -> bytes:
    """A JSON object with a body as a person wrote it: what is JSON is sent to the digit, all else as text.

    >>> with_body({"id": "a"}, "0.10"), with_body({}, "NaN"), with_body({"delay": 1}, None)
    (b'{"body": 0.10, "id": "a"}', b'{"body": "NaN"}', b'{"delay": 1}')
    """
    rest = json.dumps(fields)
    if body is None:
        return rest.encode()
    try:
        json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        body = json.dumps(body)
    return f'{{"body": {body}{", " if fields else ""}{rest[1:]}'.encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Output


def show(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False))


def console(*, stderr: bool = False) -> Console:
    """Where people look: colours only on a terminal, and not where NO_COLOR is set. Brackets in texts mean nothing."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False)


def table(*columns: str, left: int = 1) -> Table:
    """A table without frames; the first columns are text, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    class Plain(Table):
        def add_row(self, *cells: Any, **how: Any) -> None:
            super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **how)

    made = Plain(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        made.add_column(
            Text(name), justify="left" if number < left else "right", no_wrap=True, style="cyan" if number == 0 else None
        )
    return made


def print_table(made: Table) -> None:
    """As wide as it is, however narrow the terminal: no figure is cut."""
    out = console()
    out.print(made, width=max(out.measure(made).maximum, 1) if not out.is_terminal else None, crop=False)


def sure(question: str, yes: bool) -> None:
    """Ask before something is gone for good."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Say --yes if so.", 2)
    typer.confirm(question, abort=True)


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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def amount(count: float) -> str:
    """Bytes for people.

    >>> amount(0), amount(1536), amount(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
