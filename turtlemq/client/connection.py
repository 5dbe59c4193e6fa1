"""One connection to a server: requests and answers (`http_answers`) on a blocking socket.

A request is sent with one system call, head and body together. `http.client` sends them in two, parses answers with the parser of
e-mails, and took four fifths of the processor time of a put.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from turtlemq.client.http_answers import AnswerReader, BrokenAnswer, Head, host_header, request_head

if TYPE_CHECKING:
    import ssl

READ_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # read for a head and the small body behind it


class Connection:
    """A connection, made by `connect`. Not thread-safe; but another thread may shut its socket down."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self._address, self._context = (host, port), context
        self.host = host_header(host, port, context is not None)
        self.sock: socket.socket | None = None
        self._reader = AnswerReader()
        self._timeout_s: float | None = None
        self._aborted = False

    def connect(self, timeout_s: float) -> None:
        """Open the connection."""
        plain = socket.create_connection(self._address, timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock = plain if self._context is None else self._context.wrap_socket(plain, server_hostname=self._address[0])
        except BaseException:
            plain.close()
            raise
        self._timeout_s = timeout_s
        if self._aborted:
            raise BrokenAnswer("the call was cancelled")

    def abort(self) -> None:
        """End the connection, from another thread: the one that reads from it, or connects, gets an error."""
        self._aborted = True
        if (sock := self.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float) -> None:
        """Send a request. Raises `ValueError` for a path or a header that would be more than one line."""
        sock = self._open()
        if timeout_s != self._timeout_s:
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s
        head = request_head(method, path, self.host, headers, body)
        if body is None:
            sock.sendall(head)
        elif len(body) <= _SMALL_BYTES:
            sock.sendall(head + body)
        else:
            sock.sendall(head)
            sock.sendall(body)

    def head(self) -> Head:
        """Read the head of the answer."""
        while (head := self._reader.head()) is None:
            self._receive(_SMALL_BYTES)
        return head

    def body(self) -> Iterator[bytes]:
        """The body of the answer, in pieces. Requires: its head was read."""
        while (piece := self._reader.piece()) != b"":
            if piece is None:
                self._receive(READ_BYTES)
            else:
                yield piece

    def _open(self) -> socket.socket:
        if self.sock is None:
            raise BrokenAnswer("the connection is not open")
        return self.sock

    def _receive(self, most: int) -> None:
        data = self._open().recv(most)
        self._reader.has_ended = not data
        self._reader.feed(data)
