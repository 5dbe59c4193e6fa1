"""HTTP requests to a running server, for the client verbs: one connection per request, JSON in, JSON out.

A failed request ends the program with an error message; a 429 is tried again for a minute. The verbs do not use
`turtlemq.client`: loading it takes longer than most verbs run.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from turtlemq.cli.connection_errors import connection_error
from turtlemq.cli.credentials import TOKEN, tls_context
from turtlemq.cli.output import fail

URL = "http://127.0.0.1:8878"
TIMEOUT_S = 75
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


@contextmanager
def request(
    url: str, method: str, target: str, body: bytes | None = None, kind: str = "application/json", timeout_s: float = TIMEOUT_S
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and give its response, if that is a success. Waits and tries again on 429; all other errors `fail`."""
    try:
        with asked(url, method, target, body, kind, timeout_s) as response:
            yield response
    except CallFailed as error:
        fail(str(error), error.exit_code)


@contextmanager
def asked(
    url: str, method: str, target: str, body: bytes | None = None, kind: str = "application/json", timeout_s: float = TIMEOUT_S
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and give its response, if that is a success. Waits and tries again on 429; raises `CallFailed` else."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CallFailed(f"{url!r} is no address of a server; it looks like {URL}", 2)
    tls: dict[str, Any] = {"context": tls_context()} if parts.scheme == "https" else {}
    connect = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    headers = auth_headers() | ({"Content-Type": kind} if body is not None else {})
    end = time.monotonic() + RETRY_S_MAX
    while True:
        connection = connect(parts.hostname, parts.port, timeout=timeout_s, **tls)
        response: http.client.HTTPResponse | None = None
        try:
            connection.request(method, parts.path.rstrip("/") + target, body, headers)
            response = connection.getresponse()
            if response.status == 429 and time.monotonic() < end:
                time.sleep(_retry_after_s(response))
                continue
            if response.status >= 300:
                raise _refusal(response)
            yield response
            return
        except BrokenPipeError as error:
            if response is not None:
                raise  # not the server: the reader of our own stdout went away
            raise CallFailed(f"{url} hung up while it was spoken to; its log may say why.") from error
        except (OSError, http.client.HTTPException) as error:
            raise CallFailed(connection_error(url, parts, error)) from error
        finally:
            connection.close()


def _retry_after_s(response: http.client.HTTPResponse) -> float:
    try:
        return min(max(float(json.loads(response.read())["error"]["retry_after_ms"]) / 1000, 0.01), 10.0)
    except (ValueError, KeyError, TypeError):
        return 1.0


def _refusal(response: http.client.HTTPResponse) -> CallFailed:
    """A refusal as an error. Wrong arguments are wrong use of the program: exit code 2."""
    text = response.read().decode(errors="replace")
    code = 2 if response.status == 400 else 1
    try:
        error = json.loads(text)["error"]
        message, index = f"{error['code']}: {error['message']}", error.get("index")
    except (ValueError, KeyError, TypeError, AttributeError):
        return CallFailed(f"HTTP {response.status}: {text[:200]}", code, response.status)
    return CallFailed(f"{message} Put a token into {TOKEN}." if response.status == 401 else message, code, response.status, index)


def call(url: str, method: str, target: str, value: Any = None) -> Any:
    """Send a JSON value, or bytes that are JSON already, and return the decoded answer."""
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    with request(url, method, target, body) as response:
        return json.loads(response.read())


def answered(url: str, method: str, target: str) -> Any:
    """The decoded answer to a request. Raises `CallFailed`."""
    with asked(url, method, target) as response:
        return json.loads(response.read())


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
