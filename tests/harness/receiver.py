"""A receiver of callbacks on a free port of 127.0.0.1: it notes every request, verifies it, and answers as a test wants."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks import Webhook

from tests.harness.server_process import PATIENCE_S


@dataclass
class Request:
    """A request that came in."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"].partition(":")[2]


@dataclass
class Reply:
    """An answer. `write`: writes to the open connection, instead of a plain answer."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    write: Callable[[BaseHTTPRequestHandler], None] | None = None


Respond = Callable[[Request], Reply]


class Receiver:
    """A running receiver. `respond` answers messages; challenges are answered by themselves while `is_willing`."""

    def __init__(self, respond: Respond | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.respond: Respond = respond or (lambda _: Reply())
        self.requests: list[Request] = []
        self.challenges: list[Request] = []
        self.is_willing = True
        self.secrets: list[str] = []  # if there are any, a request must verify with each of them
        self.broken: list[str] = []  # requests that did not verify
        self.sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.sockets.append(self.connection)

            def do_POST(self) -> None:
                outer.handle(self)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        with self._lock:
            return [request.id for request in self.requests]

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", "0")))
        request = Request(handler.path, {name.lower(): value for name, value in handler.headers.items()}, body)
        self._verify(request)
        challenge = request.headers.get("turtlemq-challenge")
        with self._lock:
            (self.requests if challenge is None else self.challenges).append(request)
        if challenge is not None:
            reply = Reply(200, challenge.encode()) if self.is_willing else Reply(404)
        else:
            reply = self.respond(request)
        with contextlib.suppress(OSError):
            _write(handler, reply)

    def _verify(self, request: Request) -> None:
        for secret in self.secrets:
            try:
                Webhook(secret).verify(request.body, request.headers, json_parse=False)
            except Exception as error:  # noqa: BLE001 - the test reads it
                self.broken.append(repr(error))

    def stop(self) -> None:
        """End all connections, and refuse new ones."""
        self.server.shutdown()
        self.server.server_close()
        for one in self.sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)


def _write(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    handler.send_response(reply.status)
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    if reply.write is not None:
        handler.close_connection = True
        handler.end_headers()
        reply.write(handler)
        return
    handler.send_header("Content-Length", str(len(reply.body)))
    handler.end_headers()
    handler.wfile.write(reply.body)


@contextmanager
def receiving(respond: Respond | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver for a while."""
    receiver = Receiver(respond, tls)
    try:
        yield receiver
    finally:
        receiver.stop()
