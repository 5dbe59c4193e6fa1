"""HTTP/1.1 as far as a client of TurtleMQ needs it: the bytes of a request, and answers from the bytes that come. Pure.

A connection feeds an `AnswerReader` and asks it for the head, then for pieces of the body; None means that more bytes must come
first. So the blocking client and the one for asyncio read answers by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HEAD_BYTES = 64 << 10  # of an answer's head
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


def host_header(host: str, port: int, is_tls: bool) -> str:
    """The header `Host` for an address.

    >>> host_header("queue.example", 80, False), host_header("::1", 8878, False)
    ('queue.example', '[::1]:8878')
    """
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if is_tls else 80) else f"{name}:{port}"


def request_head(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The head of a request. Raises `ValueError` for a path or a header that would be more than one line.

    >>> request_head("GET", "/v1", "localhost", {"Accept": "*/*"}, None)
    b'GET /v1 HTTP/1.1\\r\\nHost: localhost\\r\\nAccept-Encoding: identity\\r\\nAccept: */*\\r\\n\\r\\n'
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    elif method not in ("GET", "HEAD"):
        lines.append("Content-Length: 0")
    text = "\r\n".join(lines)
    if " " in path or text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a path or a header has a space or a line end in it")
    return f"{text}\r\n\r\n".encode("latin-1")


class AnswerReader:
    """Reads the answers of one connection, one after the other: `head`, then `piece` until it is empty.

    >>> reader = AnswerReader()
    >>> reader.feed(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nab")
    >>> head = reader.head()
    >>> head.status, reader.piece(), reader.piece()
    (200, b'ab', None)
    >>> reader.feed(b"c")
    >>> reader.piece(), reader.piece()
    (b'c', b'')
    """

    __slots__ = ("has_ended", "interims", "_data", "_head", "_left", "_expected")

    def __init__(self) -> None:
        self.has_ended = False  # no more bytes will come
        self.interims = 0  # answers before the answer, such as 100 Continue, that came so far
        self._data = b""  # that came, and is not read yet
        self._head: Head | None = None  # of the answer that is being read
        self._left = 0  # bytes of the body, or of a chunk
        self._expected = ""  # behind that, if the body is in chunks: the line with a "size", "end" of a chunk, or a "trailer"

    @property
    def waiting(self) -> int:
        """The number of bytes that came, and are not read yet."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        self._data = self._data + data if self._data else data

    def head(self) -> Head | None:
        """The head of the next answer, or None."""
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            lines, self._data = self._data[:end].decode("latin-1").split("\r\n"), self._data[end + 4 :]
            found = _STATUS.fullmatch(lines[0].encode("latin-1"))
            if found is None:
                raise BrokenAnswer(f"no answer of HTTP: {lines[0]!r:.80}")
            if found[2][:1] != b"1":  # else only an interim answer
                self._head = head = Head(int(found[2]), _headers(lines[1:]), found[1])
                self._left, self._expected = head.length or 0, "size" if head.is_chunked else ""
                return head
            self.interims += 1
        self._check_waiting(len(self._data), "head")
        return None

    def piece(self) -> bytes | None:
        """The next bytes of the body; empty behind the last ones; None: more must come first. Requires: its head was read."""
        head = self._head
        assert head is not None, "a head comes first"
        while True:
            if head.length is None and not head.is_chunked:
                data, self._data = self._data, b""
                return data if data or self.has_ended else None
            if self._left:
                data, self._data = self._data[: self._left], self._data[self._left :]
                self._left -= len(data)
                if not data:
                    self._check_waiting(0, "body")
                return data or None
            if not self._expected:
                if self._data:
                    head.keeps = False  # more than the answer
                return b""
            if not self._read_line():
                return None

    def _read_line(self) -> bool:
        """Read the line that is expected. False: more bytes must come first."""
        end = self._data.find(b"\r\n")
        if end < 0:
            self._check_waiting(len(self._data), "line")
            return False
        line, self._data = self._data[:end], self._data[end + 2 :]
        if self._expected == "size":
            found = _SIZE.fullmatch(line)
            if found is None:
                raise BrokenAnswer("an answer with a broken chunk")
            self._left = int(found[1], 16)
            self._expected = "end" if self._left else "trailer"
        elif self._expected == "end":
            if line:
                raise BrokenAnswer("an answer with a broken chunk")
            self._expected = "size"
        elif not line:
            self._expected = ""
        return True

    def _check_waiting(self, size: int, name: str) -> None:
        """Refuse to wait for more of a head or a line that is too long, or of a connection that has ended."""
        if size > HEAD_BYTES:
            raise BrokenAnswer(f"an answer with a {name} that is too long")
        if self.has_ended:
            raise BrokenAnswer("the server has closed the connection")


def _headers(lines: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name[0] in " \t":
            raise BrokenAnswer(f"an answer with a broken header: {line!r:.80}")
        out[name.lower()] = value.strip()
    return out
