"""The contract with aiohttp: the uses of its private and undocumented names. Read this first when an upgrade
fails. All uses are in turtlemq/server/aiohttp_internals.py, and one is in turtlemq/client/aio.py."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

import turtlemq
from turtlemq.server import aiohttp_internals as internals
from turtlemq.server.accept import Listener, Policy, bind
from turtlemq.server.aiohttp_internals import AiohttpConnection, AiohttpSite, Dispatcher
from turtlemq.server.descriptors import Shares
from turtlemq.server.listen import Connection
from turtlemq.server.metrics.meter import SocketFigures

PACKAGE = Path(turtlemq.__file__).parent
ALLOWED = {
    "server/aiohttp_internals.py",
    "client/aio.py: _retry_connection",
    "server/push/sender.py: aiohttp.abc",  # AbstractResolver, which its documentation names
}


@contextmanager
def contract(name: str, purpose: str) -> Iterator[None]:
    """Turns any failure into one that says what to look at."""
    try:
        yield
    except Exception as error:
        found = f"aiohttp {aiohttp.__version__}: {name} has changed ({type(error).__name__}: {error})."
        raise AssertionError(f"{found} It is needed for: {purpose}. Adapt turtlemq/server/aiohttp_internals.py.") from error


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


async def _hello(request: web.Request) -> web.Response:
    return web.Response(text=request.match_info["name"])


async def listener(factory: Callable[[], asyncio.Protocol]) -> Listener:
    """Listens on a free port for a site."""
    policy = Policy(serve=lambda _: factory(), refuse=lambda _: factory(), tls=None, handshake_s=1, refuse_s=1)
    return Listener(await bind("127.0.0.1", 0, 7), policy, Shares(9, 1, 9), SocketFigures())


def _app() -> web.Application:
    app = web.Application(middlewares=[_counting])
    app.router.add_get("/{name}", _hello)
    return app


@web.middleware
async def _counting(request: web.Request, handler: Any) -> web.StreamResponse:
    request["count"] = request.get("count", 0) + 1
    found: web.StreamResponse = await handler(request)
    return found


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
def test_handle_resolves_the_route_and_leaves_its_match() -> None:
    async def story() -> None:
        with contract("Application._handle and Request._match_info", "remembering the handler of a path"):
            app = _app()
            app.freeze()
            dispatcher = Dispatcher(app)
            first = make_mocked_request("GET", "/a", app=app)
            await dispatcher(first)
            assert isinstance(first._match_info, web.UrlMappingMatchInfo)
            assert list(dispatcher.cache) == [("GET", "/a")]
            with mock.patch.object(type(app.router), "resolve", side_effect=AssertionError("resolved again")):
                second = make_mocked_request("GET", "/a", app=app)
                assert (await dispatcher(second)).text == "a"
            assert (first["count"], second["count"]) == (1, 1), "middlewares run once"

    run(story())


def test_a_connection_calls_its_request_handler_and_reads_only_keep_alive() -> None:
    class Answer:
        """An answer that is no response."""

        keep_alive = True

    class Connection(AiohttpConnection):
        async def finish_response(self, request: web.BaseRequest, resp: Any, start_time: float | None) -> tuple[Any, bool]:
            return Answer(), not await self.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", [b"ok"], 1)

    async def story() -> None:
        app = _app()
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        server = runner.server
        assert server is not None
        asked: list[str] = []

        class Counting(Dispatcher):
            async def __call__(self, request: web.Request) -> Any:
                asked.append(request.path)
                return await super().__call__(request)

        site = AiohttpSite(runner, "127.0.0.1", 0)
        dispatcher = Counting(app)
        await site.listen(await listener(lambda: Connection(server, dispatcher, {"access_log": None})))
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        for _ in range(2):
            writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        assert asked == ["/a", "/a"]
        writer.close()
        await runner.cleanup()

    purpose = "answers that are written as bytes, on a connection that stays open"
    with contract("RequestHandler.finish_response, ._request_handler, and the loop that reads `keep_alive`", purpose):
        run(story())


def test_methods_that_are_overridden_have_their_parameters() -> None:
    with contract("RequestHandler.finish_response", "sending answers"):
        parameters = inspect.signature(web.RequestHandler.finish_response).parameters
        assert list(parameters) == ["self", "request", "resp", "start_time"]
    with contract("RequestHandler.handle_error", "the answer to a head that cannot be read"):
        parameters = inspect.signature(web.RequestHandler.handle_error).parameters
        assert list(parameters) == ["self", "request", "status", "exc", "message"]
        assert isinstance(make_mocked_request("GET", "/").writer.output_size, int | mock.Mock)


def test_a_full_socket_is_seen_and_waited_for() -> None:
    async def story() -> None:
        connection = AiohttpConnection(web.Server(_hello), Dispatcher(_app()), {})  # type: ignore[arg-type]
        connection.transport = mock.Mock(asyncio.Transport)
        states = [connection._paused]
        connection.pause_writing()
        states.append(connection._paused)
        waiting = asyncio.create_task(connection._drain_helper())
        await asyncio.sleep(0)
        assert not waiting.done()
        connection.resume_writing()
        await waiting
        assert [*states, connection._paused] == [False, True, False]
        connection.transport = None
        connection._paused = True
        with pytest.raises(ConnectionError):
            await connection._drain_helper()

    with contract("RequestHandler._paused and ._drain_helper", "waiting until a client has taken an answer"):
        run(story())


def test_a_server_knows_its_connections() -> None:
    async def story() -> None:
        server = web.Server(_hello)  # type: ignore[arg-type]
        found = internals.open_connections(server)
        connection, transport = AiohttpConnection(server, Dispatcher(_app()), {}), mock.Mock(asyncio.Transport)
        assert len(found) == 0
        server.connection_made(connection, transport)
        assert len(found) == 1
        server.connection_lost(connection)
        assert len(found) == 0

    with contract("Server._connections", "the limit on connections"):
        run(story())


def test_a_site_has_an_address_and_closes_its_socket() -> None:
    async def story() -> None:
        runner = web.AppRunner(_app())
        await runner.setup()
        site = AiohttpSite(runner, "127.0.0.1", 0)
        await site.listen(await listener(asyncio.Protocol))
        assert runner.sites == {site}
        address = runner.addresses[0][:2]
        (await asyncio.open_connection(*address))[1].close()
        await runner.cleanup()
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection(*address)

    with contract("TCPSite._server and BaseSite.start", "accepting connections with limits"):
        run(story())


def test_http_date_is_the_date_header() -> None:
    with contract("helpers.rfc822_formatted_time", "the header Date of answers that are written as bytes"):
        assert internals.http_date().endswith(" GMT")
        assert parsedate_to_datetime(internals.http_date()).tzinfo is not None


def test_broken_bodies_raise_the_exceptions_that_are_caught() -> None:
    with contract("http_exceptions.HttpProcessingError", "the answer 400 to a body that cannot be read"):
        from aiohttp.http_exceptions import ContentEncodingError, LineTooLong, TransferEncodingError

        for kind in (ContentEncodingError, LineTooLong, TransferEncodingError):
            assert issubclass(kind, internals.HttpProcessingError)


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


def test_the_client_can_turn_off_aiohttps_own_retry() -> None:
    async def story() -> None:
        async with aiohttp.ClientSession() as session:
            assert session._retry_connection is True
        assert "self._retry_connection" in inspect.getsource(aiohttp.ClientSession._request)

    with contract("ClientSession._retry_connection (in turtlemq/client/aio.py)", "counting every attempt of a request"):
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
    assert len(found - outside) >= 6


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
        Connection.handle_error(mock.Mock(spec=Connection), request, 500, error)
