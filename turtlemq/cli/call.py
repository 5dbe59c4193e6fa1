"""HTTP requests to a running server, for the client verbs: one connection per request, JSON in, JSON out.

A failed request ends the program with an error message; a 429 is tried again for a minute, nothing else is. The connection is
that of `turtlemq.client`, which is loaded by the first request.
"""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from turtlemq.cli.credentials import TOKEN, tls_context
from turtlemq.cli.output import fail

if TYPE_CHECKING:
    from turtlemq.client.options import Sink
    from turtlemq.client.wire import Answer, Request

URL = "http://127.0.0.1:8878"
TIMEOUT_S = 75
PROBE_S = 3.0  # for a server to show that it is there
RETRY_S_MAX = 60  # a rate-limited request is repeated for so long


def path(*parts: str, **query: Any) -> str:
    """A path below /v1/topics with its query; arguments that are None are left out.

    >>> path("orders", "messages", "a b", limit=3, cursor=None)
    '/v1/topics/orders/messages/a%20b?limit=3'
    """
    given = {name: value for name, value in query.items() if value is not None}
    base = "/".join(["/v1/topics", *(quote(part, safe="") for part in parts)])
    return f"{base}?{urlencode(given)}" if given else base


def auth_headers() -> dict[str, str]:
    """The Authorization header, if there is a token."""
    token = os.environ.get(TOKEN, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


class CallFailed(Exception):
    """A request without a good answer. Its cause is the error of the connection; a refusal has a `status`, and an `index` if it
    names an item of the request. `exit_code`: of a program that cannot go on."""

    def __init__(self, message: str, exit_code: int = 1, status: int = 0, index: int | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.status, self.index = exit_code, status, index


def request(
    url: str,
    method: str,
    target: str,
    body: bytes | None = None,
    timeout_s: float = TIMEOUT_S,
    file: BinaryIO | None = None,
) -> bytes:
    """Send a request and return the body of its answer, as `asked` does. All errors `fail`."""
    try:
        return asked(url, method, target, body, timeout_s=timeout_s, file=file)
    except CallFailed as error:
        fail(str(error), error.exit_code)


def asked(
    url: str,
    method: str,
    target: str,
    body: bytes | None = None,
    kind: str = "application/json",
    timeout_s: float = TIMEOUT_S,
    file: BinaryIO | None = None,
) -> bytes:
    """Send a request and return the body of its answer. With a `file` the body goes there while it comes. Waits and tries again
    on 429; raises `CallFailed` for all else that is no success. `timeout_s`: how long the server may send nothing."""
    from turtlemq.client.options import Sink
    from turtlemq.client.wire import Request

    out = io.BytesIO()
    end = time.monotonic() + RETRY_S_MAX
    while True:
        answer = _answer(url, Request(method, target, body, kind), timeout_s, Sink(out if file is None else file))
        if answer.status < 300:
            return out.getvalue()
        error, retry_after_s = _refusal(answer)
        if answer.status != 429 or time.monotonic() >= end:
            raise error
        time.sleep(min(max(retry_after_s, 0.01), 10.0))


def _answer(url: str, request: Request, timeout_s: float, sink: Sink) -> Answer:
    """Send a request once, over a connection of its own. The body of a success goes to the sink."""
    from turtlemq.client.errors import ConnectionFailed, InvalidArgument
    from turtlemq.client.options import Options
    from turtlemq.client.pool import Pool
    from turtlemq.client.sending import Send

    try:
        options = Options.from_arguments([url], None, None, timeout_s, timeout_s, None)
    except InvalidArgument as error:
        raise CallFailed(str(error), 2) from error
    parts = urlsplit(options.urls[0])
    context = tls_context() if parts.scheme == "https" else None
    try:
        with closing(Pool(options, context)) as pool:
            return pool.send(Send(request, timeout_s, None), sink=sink)
    except ConnectionFailed as error:
        from turtlemq.cli.connection_errors import connection_error

        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise CallFailed(connection_error(url, parts, cause)) from cause


def unreachable(urls: str) -> str:
    """Why none of these servers answers, in words for people; empty if one does. Addresses are separated by commas."""
    why = ""
    for url in urls.split(","):
        try:
            asked(url, "GET", "/healthz", timeout_s=PROBE_S)
        except CallFailed as error:
            why = "" if error.status else str(error)
        else:
            why = ""
        if not why:
            break
    return why


def _refusal(answer: Answer) -> tuple[CallFailed, float]:
    """A refusal as an error, and the seconds to wait before the next try. Wrong arguments are wrong use of the program: exit
    code 2."""
    from turtlemq.client.errors import Refused
    from turtlemq.client.wire import error_of

    error, status = error_of(answer), answer.status
    message, retry_after_s = str(error), 1.0
    if isinstance(error, Refused):
        if not message.startswith(f"HTTP {status}: "):  # of a proxy
            message = f"{error.code}: {message}"
        if status == 401:
            message += f" Put a token into {TOKEN}."
        retry_after_s = 1.0 if error.retry_after_s is None else error.retry_after_s
    return CallFailed(message, 2 if status == 400 else 1, status, error.index), retry_after_s


def call(url: str, method: str, target: str, value: Any = None) -> Any:
    """Send a JSON value, or bytes that are JSON already, and return the decoded answer."""
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    return json.loads(request(url, method, target, body))


def answered(url: str, method: str, target: str) -> Any:
    """The decoded answer to a request. Raises `CallFailed`."""
    return json.loads(asked(url, method, target))


def json_with_body(fields: dict[str, Any], body: str | None, text: bool = False) -> bytes:
    """A JSON object with a `body` from the command line. Valid JSON is copied digit by digit, other text becomes a string,
    as does everything with `text`.

    >>> json_with_body({"id": "a"}, "0.10"), json_with_body({}, "NaN"), json_with_body({"delay": 1}, None)
    (b'{"body": 0.10, "id": "a"}', b'{"body": "NaN"}', b'{"delay": 1}')
    """
    rest = json.dumps(fields)
    if body is None:
        return rest.encode()
    if text or json_error(body):
        body = json.dumps(body)
    return f'{{"body": {body}{", " if fields else ""}{rest[1:]}'.encode()


def json_error(body: str) -> str:
    """Why a text is no JSON; empty if it is.

    >>> json_error("[1]"), json_error("[1")
    ('', "Expecting ',' delimiter: line 1 column 3 (char 2)")
    """
    try:
        json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
