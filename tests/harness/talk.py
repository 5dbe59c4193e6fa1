"""A connection whose bytes a test writes itself, and requests as bytes."""

from __future__ import annotations

import socket
import time

from tests.harness.server_process import Server


class Talk:
    """A connection, and answers read from it one by one."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes, pause_s: float = 0) -> None:
        for piece in pieces:
            self.socket.sendall(piece)
            time.sleep(pause_s)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(self._data) < size:
            self._more()
        body, self._data = self._data[:size], self._data[size:]
        return int(status.split()[1]), headers, body

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"closed behind {self._data!r}"
        self._data += data


def post(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """A request with a body in chunks, which the front leaves to aiohttp."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked", *headers]
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return "\r\n".join([*lines, "", ""]).encode() + chunk + b"0\r\n\r\n"
