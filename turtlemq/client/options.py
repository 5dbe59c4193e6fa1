"""What both shells share: where the server is, who asks, how patiently, on whose clock, with which ids."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from turtlemq import __version__
from turtlemq.client.errors import ClientError, InvalidArgument
from turtlemq.client.sending import Rules, Send
from turtlemq.client.wire import BUDGET, Out, Priority, outgoing

URL = "http://127.0.0.1:8878"
REQUEST_COUNT = 10_000  # messages in one request of put_many, unless all are asked to go together
REQUEST_BYTES = 16 * 1024 * 1024
_counter = itertools.count()


@dataclass(frozen=True)
class Options:
    """Where and how to ask. Of several addresses the next is tried when one fails."""

    urls: tuple[str, ...]
    token: str | None
    cacert: str | None
    user_agent: str
    rules: Rules

    @staticmethod
    def of(
        url: str | Sequence[str] | None,
        token: str | None,
        cacert: str | None,
        timeout: float,
        try_timeout: float,
        user_agent: str | None,
    ) -> Options:
        """Options from arguments; what is None comes from TURTLEMQ_URL, TURTLEMQ_TOKEN and TURTLEMQ_CACERT, or is the default."""
        given = url if url is not None else os.environ.get("TURTLEMQ_URL") or URL
        urls = tuple(_address(one) for one in (given.split(",") if isinstance(given, str) else given))
        if timeout <= 0 or try_timeout <= 0 or not urls:
            raise InvalidArgument("timeouts are above 0, and there is at least one address")
        token = token if token is not None else os.environ.get("TURTLEMQ_TOKEN") or None
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidArgument("a token is printable ASCII")
        cacert = cacert if cacert is not None else os.environ.get("TURTLEMQ_CACERT") or None
        rules = Rules(now=time.monotonic, roll=random.random, try_s=try_timeout, budget_s=timeout)
        return Options(urls, token, cacert, user_agent or f"turtlemq-python/{__version__}", rules)

    def headers(self, send: Send) -> dict[str, str]:
        """The headers of a request."""
        out = {"Accept": send.request.accept, "User-Agent": self.user_agent}
        if send.request.body is not None:
            out["Content-Type"] = send.request.kind
        if self.token is not None:
            out["Authorization"] = f"Bearer {self.token}"
        if send.budget_ms is not None:
            out[BUDGET] = str(send.budget_ms)
        return out


def _address(url: str) -> str:
    """An address in full.

    >>> _address("queue.example:8878/"), _address("https://queue.example")
    ('http://queue.example:8878', 'https://queue.example')
    """
    found = (url if "://" in url else f"http://{url}").strip().rstrip("/")
    parts = urlsplit(found)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"{url!r} is no address of a server; it looks like {URL}")
    return found


class Sink:
    """A file that an answer goes into. Remembers its error, which says nothing of the connection."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = file
        self.error: Exception | None = None

    def write(self, piece: bytes) -> None:
        """Write all of it: a file without a buffer may take less than it is given."""
        try:
            while piece:
                taken = self._file.write(piece)
                if taken == 0:
                    raise OSError("the file takes nothing")
                piece = b"" if taken is None else piece[taken:]
        except Exception as error:
            self.error = error
            raise


def new_id() -> str:
    """An id for a message that has none: 48 bits of time, 16 of a counter, 64 of chance, in hexadecimal. Sorts by time.

    It is given here and not by the server, so that a batch that is sent again after a broken connection is stored once.

    >>> len(new_id()), new_id() < new_id()
    (32, True)
    """
    return f"{time.time_ns() // 1_000_000:012x}{next(_counter) & 0xFFFF:04x}{os.urandom(8).hex()}"


def new_ids(count: int) -> list[str]:
    """Many of them. 0.3 µs each."""
    now, chance = f"{time.time_ns() // 1_000_000:012x}", os.urandom(8 * count).hex()
    return [f"{now}{next(_counter) & 0xFFFF:04x}{chance[at : at + 16]}" for at in range(0, 16 * count, 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A message for `put_many`, with the fields of `put`."""

    body: Any
    id: str | None = None
    delay: float | None = None
    due: int | datetime | None = None
    ttr: float | None = None
    priority: Priority | None = None
    expires: int | datetime | None = None
    headers: Mapping[str, str] | None = None


def outgoing_all(messages: Iterable[Any], now_s: float) -> list[Out]:
    """The messages of a `put_many`. An error says which of them is bad. 1 µs each where they are bytes."""
    some = list(messages)
    ids = new_ids(len(some))
    if set(map(type, some)) == {bytes}:
        return [Out(id_, body, put_s=now_s) for id_, body in zip(ids, some, strict=True)]
    out: list[Out] = []
    for index, m in enumerate(some):
        try:
            if isinstance(m, NewMessage):
                more = {"delay": m.delay, "due": m.due, "ttr": m.ttr, "priority": m.priority, "expires": m.expires}
                id_ = ids[index] if m.id is None else m.id
                out.append(outgoing(m.body, id_, **more, headers=m.headers, put_s=now_s))  # type: ignore[arg-type]
            else:
                out.append(outgoing(m, ids[index], put_s=now_s))
        except ClientError as error:
            raise error.at(index) from None
    return out
