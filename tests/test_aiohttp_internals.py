"""The contract with aiohttp: methods that are overridden, and facts beyond its documentation. Read this first when an upgrade
fails. No private name is used."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

import turtlemq
from turtlemq.server.passed import PassedConnection

PACKAGE = Path(turtlemq.__file__).parent
ALLOWED = {
    "server/listen.py: web.AppRunner",  # two documented methods are overridden
    "server/passed.py: web.RequestHandler",  # two public methods are overridden
    "server/push/sender.py: aiohttp.abc",  # AbstractResolver, which its documentation names
}


@contextmanager
def contract(name: str, purpose: str) -> Iterator[None]:
    """Turns any failure into one that says what to look at."""
    try:
        yield
    except Exception as error:
        found = f"aiohttp {aiohttp.__version__}: {name} has changed ({type(error).__name__}: {error})."
        raise AssertionError(f"{found} It is needed for: {purpose}. Adapt the file that uses it.") from error


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def test_methods_that_are_overridden_have_their_parameters() -> None:
    with contract("RequestHandler.finish_response", "sending answers"):
        parameters = inspect.signature(web.RequestHandler.finish_response).parameters
        assert list(parameters) == ["self", "request", "resp", "start_time"]
    with contract("RequestHandler.handle_error", "the answer to a head that cannot be read"):
        parameters = inspect.signature(web.RequestHandler.handle_error).parameters
        assert list(parameters) == ["self", "request", "status", "exc", "message"]
        assert isinstance(make_mocked_request("GET", "/").writer.output_size, int | mock.Mock)


def test_a_body_that_has_come_is_read_at_once() -> None:
    async def story() -> None:
        content = aiohttp.StreamReader(mock.Mock(), 1 << 16)
        content.feed_data(b"ab")
        assert not content.is_eof()
        content.feed_eof()
        assert (content.is_eof(), content.exception()) == (True, None)
        assert content.read_nowait(-1) == b"ab"

    with contract("StreamReader.is_eof, .exception, .read_nowait and .feed_eof", "reading bodies without a wait"):
        run(story())


def test_a_broken_contract_names_its_purpose() -> None:
    wanted = r"Server\._x has changed .*needed for: this test\. Adapt"
    with pytest.raises(AssertionError, match=wanted), contract("Server._x", "this test"):
        assert web.Server._x  # type: ignore[attr-defined]


# Nothing else uses them


def private_uses(text: str) -> list[str]:
    """Private attributes of other objects, and imports of aiohttp's modules, in a source file that imports aiohttp."""
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    if not any(module.partition(".")[0] == "aiohttp" for module in modules):
        return []
    out = [module for module in modules if module.startswith("aiohttp.")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                out.append(node.attr)
        elif isinstance(node, ast.ClassDef):
            out += [found for base in node.bases if (found := ast.unparse(base)).startswith(("web.", "aiohttp."))]
    return out


def test_private_names_are_used_in_their_place_only() -> None:
    texts = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in PACKAGE.rglob("*.py")}
    found = {f"{path}: {name}" for path, text in texts.items() for name in private_uses(text)}
    outside = {use for use in found if use.partition(":")[0] not in ALLOWED} - ALLOWED
    assert outside == set()
    assert len(found - outside) >= 3


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("from aiohttp import web\ndef f(request): return request._match_info", "_match_info"),
        ("from aiohttp.helpers import rfc822_formatted_time", "aiohttp.helpers"),
        ("from aiohttp import web\nclass Site(web.TCPSite): pass", "web.TCPSite"),
    ],
)
def test_a_private_name_elsewhere_is_noticed(text: str, use: str) -> None:
    assert private_uses(text) == [use]
    assert private_uses(text.replace("aiohttp", "other")) == []


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), RuntimeError("unable to write; the handler is closed")])
def test_a_client_that_is_gone_is_no_failed_request(error: Exception) -> None:
    """aiohttp asks for a body (100 Continue) outside of our handlers; uvloop refuses that with a RuntimeError if the connection
    was lost. `RequestHandler.start` takes a ConnectionError for the end of a connection, and logs nothing."""
    request = make_mocked_request("POST", "/")
    with pytest.raises(ConnectionResetError):
        PassedConnection.handle_error(mock.Mock(spec=PassedConnection), request, 500, error)
