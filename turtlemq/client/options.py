"""Options of a client and helpers that both shells share: addresses, headers, timeouts, new ids, messages for `put_many`.

Unlike the pure modules it reads the environment, the clock and random numbers.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from turtlemq import __version__
from turtlemq.client import clock, tracing
from turtlemq.client.errors import ClientError, InvalidArgument
from turtlemq.client.outgoing import IfExists, MessageFields, OutgoingMessage, Priority, check_mode, outgoing_message
from turtlemq.client.partitions import PARTITION_HEADER
from turtlemq.client.retry_budget import RETRIES, RetryBudget
from turtlemq.client.sending import RetryPolicy, Send
from turtlemq.client.topology import DIRECT_HEADER, TOPOLOGY, Servers
from turtlemq.client.wire import BUDGET_HEADER, Answer, Seconds, Time

URL = "http://127.0.0.1:8878"
_FIELDS = tuple(MessageFields.__annotations__)
_counter = itertools.count()
CONNECT_S = 3.0  # if there is another server to ask: a machine that is gone does not refuse connections
IDLE_S_MAX = 50.0  # older idle connections may be closed by the server at any moment
QUESTION_S = 1.0  # for the topology of a cluster


@dataclass(frozen=True)
class Options:
    """The options of a client: addresses of its servers, credentials, retry policy."""

    urls: tuple[str, ...]
    token: str | None
    cacert: str | None
    user_agent: str
    policy: RetryPolicy

    @staticmethod
    def from_arguments(
        url: str | Sequence[str] | None,
        token: str | None,
        cacert: str | None,
        timeout: float,
        try_timeout: float,
        user_agent: str | None,
        retries: int = RETRIES,
    ) -> Options:
        """Options from arguments. TURTLEMQ_URL, TURTLEMQ_TOKEN and TURTLEMQ_CACERT replace those that are None."""
        given = url if url is not None else os.environ.get("TURTLEMQ_URL") or URL
        urls = tuple(_full_url(part) for part in (given.split(",") if isinstance(given, str) else given))
        if timeout <= 0 or try_timeout <= 0 or not urls:
            raise InvalidArgument("timeouts are above 0, and there is at least one address")
        if retries < 0:
            raise InvalidArgument("retries is 0 or more")
        token = token if token is not None else os.environ.get("TURTLEMQ_TOKEN", "").strip() or None
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidArgument("a token is printable ASCII")
        cacert = cacert if cacert is not None else os.environ.get("TURTLEMQ_CACERT") or None
        rules = RetryPolicy(
            now=clock.now_s,
            random=random.random,
            try_timeout_s=try_timeout,
            budget_s=timeout,
            retries=RetryBudget(retries, threading.Lock()),
        )
        return Options(urls, token, cacert, user_agent or f"turtlemq-python/{__version__}", rules)

    def servers(self) -> Servers:
        """The servers to ask, with nothing learned about them yet."""
        return Servers(self.urls, self.policy.random)

    def headers(self, send: Send, direct: bool = False, partition: str = "") -> dict[str, str]:
        """The headers of a request. `direct`: it goes to the leader of a cluster, or a process with its topic, or `partition`."""
        out = {"Accept": send.request.accept, "User-Agent": self.user_agent}
        if send.request.body is not None:
            out["Content-Type"] = send.request.content_type
        if self.token is not None:
            out["Authorization"] = f"Bearer {self.token}"
        if send.budget_ms is not None:
            out[BUDGET_HEADER] = str(send.budget_ms)
        if direct:
            out[DIRECT_HEADER] = "1"
        if partition:
            out[PARTITION_HEADER] = partition
        if tracing.active is not None:
            tracing.active.inject(out)
        return out


def _full_url(url: str) -> str:
    """A URL with its scheme and without a trailing slash.

    >>> _full_url("queue.example:8878/"), _full_url("https://queue.example")
    ('http://queue.example:8878', 'https://queue.example')
    """
    full = (url if "://" in url else f"http://{url}").strip().rstrip("/")
    try:
        parts = urlsplit(full)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        is_address = False
    if not is_address:
        raise InvalidArgument(f"{url!r} is no address of a server; it looks like {URL}")
    return full


@functools.lru_cache(100)
def prefix_of(url: str) -> str:
    """The path of a server's address, before that of each request.

    >>> prefix_of("http://queue.example/queues")
    '/queues'
    """
    return urlsplit(url).path


class Sink:
    """A file for the body of an answer. Keeps the error of the file, so that it is not taken for one of the connection."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = file
        self.error: Exception | None = None

    def write(self, piece: bytes) -> None:
        """Write all bytes: one `write` of an unbuffered file may take only some of them."""
        try:
            while piece:
                written = self._file.write(piece)
                if written == 0:
                    raise OSError("the file takes nothing")
                piece = b"" if written is None else piece[written:]
        except Exception as error:
            self.error = error
            raise


def question_of(step: Send) -> Send:
    """The question for the topology before a step, in a part of its time."""
    return Send(TOPOLOGY, min(QUESTION_S, step.timeout_s / 2), None)


def at_once(step: Send) -> Send:
    """A fetch that does not wait."""
    request = replace(step.request, body=step.request.at_once, wait_s=0.0)
    return Send(request, max(0.001, step.timeout_s - step.request.wait_s), step.budget_ms)


def has_messages(answer: Answer) -> bool:
    """Whether the answer to a fetch has messages."""
    return answer.status == 200 and bool(answer.body) and not answer.body.startswith(b'{"messages":[]')


def later(step: Send, seconds: float) -> Send:
    """A step that begins so many seconds late.

    >>> from turtlemq.client.wire import Request
    >>> later(Send(Request("GET", "/"), 10.0, 9_000), 0.5)
    Send(request=Request(method='GET', path='/', body=None, content_type='application/json', accept='application/json', \
wait_s=0.0), timeout_s=9.5, budget_ms=8500)
    """
    budget_ms = None if step.budget_ms is None else max(1, step.budget_ms - int(seconds * 1000))
    return Send(step.request, max(0.001, step.timeout_s - seconds), budget_ms)


def new_id() -> str:
    """A new message id: 48 bits of time, a counter of 16, 64 random bits, in hexadecimal. Sorts by time.

    The client makes it, not the server, so that a batch that is sent again after a broken connection is stored once.

    >>> len(new_id()), new_id() < new_id()
    (32, True)
    """
    return f"{time.time_ns() // 1_000_000:012x}{next(_counter) & 0xFFFF:04x}{os.urandom(8).hex()}"


def new_ids(count: int) -> list[str]:
    """So many new ids, as `new_id` makes them. 0.3 µs each."""
    now, random_hex = f"{time.time_ns() // 1_000_000:012x}", os.urandom(8 * count).hex()
    return [f"{now}{next(_counter) & 0xFFFF:04x}{random_hex[at : at + 16]}" for at in range(0, 16 * count, 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A message for `put_many`, with the fields of `put`."""

    body: Any
    id: str | None = None
    delay: Seconds | None = None
    due: Time | None = None
    ttr: Seconds | None = None
    priority: Priority | None = None
    expires: Time | None = None
    headers: Mapping[str, str] | None = None
    spread: Seconds | None = None
    if_exists: IfExists | None = None


def outgoing_messages(messages: Iterable[Any], now_s: float, if_exists: IfExists | None = None) -> list[OutgoingMessage]:
    """The messages of a `put_many`, checked. An error has the index of the bad one. 1 µs each if all are bytes. `if_exists`: of
    those that do not say it."""
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidArgument(f"put_many takes a list of messages, not one {type(messages).__name__}; put takes one")
    if if_exists is not None:
        check_mode(if_exists)
    given = list(messages)
    ids = new_ids(len(given))
    if set(map(type, given)) == {bytes}:
        return [OutgoingMessage(id_, body, put_s=now_s) for id_, body in zip(ids, given, strict=True)]
    out: list[OutgoingMessage] = []
    for index, m in enumerate(given):
        try:
            if isinstance(m, NewMessage):
                id_ = ids[index] if m.id is None else m.id
                out.append(outgoing_message(m.body, id_, put_s=now_s, **{name: getattr(m, name) for name in _FIELDS}))
            else:
                out.append(outgoing_message(m, ids[index], put_s=now_s))
        except ClientError as error:
            raise error.at(index) from None
    for message in out if if_exists is not None else ():
        message.if_exists = message.if_exists or if_exists
    return out
