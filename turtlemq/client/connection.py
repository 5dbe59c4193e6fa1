"""One connection to a server: HTTP/1.1 as far as a client of TurtleMQ needs it, on a blocking socket.

A request is sent with one system call, head and body together. `http.client` sends them in two, parses answers with the parser of
e-mails, and took four fifths of the processor time of a put.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

HEAD_BYTES = 64 << 10  # of an answer's head
READ_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # read for a head and the small body behind it
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


class BrokenAnswer(ConnectionError):
    """The bytes that came are no answer of HTTP, or end too early."""


class Head:
    """The status and the headers of an answer, with names in lower case. `length`: of its body; None: chunks, or all up to the
    end. `keeps`: the connection can be used again when the body was read."""

    __slots__ = ("status", "headers", "length", "is_chunked", "keeps")

    def __init__(self, status: int, headers: dict[str, str], minor: bytes) -> None:
        self.status, self.headers = status, headers
        wish = headers.get("connection", "").lower()
        self.keeps = "close" not in wish if minor == b"1" else "keep-alive" in wish
        self.is_chunked = "transfer-encoding" in headers
        self.length: int | None = None
        if self.is_chunked:
            if headers["transfer-encoding"].strip().lower() != "chunked":
                raise BrokenAnswer("an answer in an encoding that is not known here")
        elif status in (204, 304):
            self.length = 0
        elif (given := headers.get("content-length")) is not None:
            if not _LENGTH.fullmatch(given):
                raise BrokenAnswer(f"an answer of the length {given!r:.40}")
            self.length = int(given)
        else:
            self.keeps = False


class Connection:
    """A connection, made by `connect`. Not thread-safe; but another thread may shut its socket down."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self._address, self._context = (host, port), context
        name = f"[{host}]" if ":" in host else host
        self.host = name if port == (80 if context is None else 443) else f"{name}:{port}"
        self.sock: socket.socket | None = None
        self._data = b""  # that came, and is not read yet
        self._timeout_s: float | None = None

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

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float) -> None:
        """Send a request. Raises `ValueError` for a path or a header that would be more than one line."""
        sock = self._open()
        if timeout_s != self._timeout_s:
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        elif method not in ("GET", "HEAD"):
            lines.append("Content-Length: 0")
        text = "\r\n".join(lines)
        if " " in path or text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
            raise ValueError("a path or a header has a space or a line end in it")
        head = f"{text}\r\n\r\n".encode("latin-1")
        if body is None:
            sock.sendall(head)
        elif len(body) <= _SMALL_BYTES:
            sock.sendall(head + body)
        else:
            sock.sendall(head)
            sock.sendall(body)

    def head(self) -> Head:
        """Read the head of the answer."""
        while True:
            end = self._data.find(b"\r\n\r\n")
            while end < 0:
                if len(self._data) > HEAD_BYTES:
                    raise BrokenAnswer("an answer with a head that is too long")
                start = max(0, len(self._data) - 3)
                self._data += self._received(_SMALL_BYTES)
                end = self._data.find(b"\r\n\r\n", start)
            lines, self._data = self._data[:end].decode("latin-1").split("\r\n"), self._data[end + 4 :]
            found = _STATUS.fullmatch(lines[0].encode("latin-1"))
            if found is None:
                raise BrokenAnswer(f"no answer of HTTP: {lines[0]!r:.80}")
            if found[2][:1] != b"1":  # else only an interim answer
                return Head(int(found[2]), _headers(lines[1:]), found[1])

    def body(self, head: Head) -> Iterator[bytes]:
        """The body of the answer, in pieces."""
        if head.is_chunked:
            yield from self._chunks()
        elif head.length is None:
            yield from self._rest()
        else:
            yield from self._bytes(head.length)
        if self._data:
            head.keeps = False  # more than the answer

    def _open(self) -> socket.socket:
        if self.sock is None:
            raise BrokenAnswer("the connection is not open")
        return self.sock

    def _received(self, most: int) -> bytes:
        data = self._open().recv(most)
        if not data:
            raise BrokenAnswer("the server has closed the connection")
        return data

    def _bytes(self, left: int) -> Iterator[bytes]:
        while left:
            data, self._data = self._data or self._received(min(READ_BYTES, left)), b""
            piece, self._data = data[:left], data[left:]
            left -= len(piece)
            yield piece

    def _rest(self) -> Iterator[bytes]:
        data, self._data = self._data, b""
        while data:
            yield data
            data = self._open().recv(READ_BYTES)

    def _chunks(self) -> Iterator[bytes]:
        while True:
            found = _SIZE.fullmatch(self._line())
            if found is None:
                raise BrokenAnswer("an answer with a broken chunk")
            size = int(found[1], 16)
            if not size:
                break
            yield from self._bytes(size)
            if self._line():
                raise BrokenAnswer("an answer with a broken chunk")
        while self._line():
            pass  # a trailer

    def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > HEAD_BYTES:
                raise BrokenAnswer("an answer with a line that is too long")
            self._data += self._received(_SMALL_BYTES)
        line, self._data = self._data[:end], self._data[end + 2 :]
        return line


def _headers(lines: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name[0] in " \t":
            raise BrokenAnswer(f"an answer with a broken header: {line!r:.80}")
        out[name.lower()] = value.strip()
    return out
