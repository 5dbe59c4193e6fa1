"""Cancellation: a token that calls off the calls of other threads, and stops consumers. Thread-safe.

Calls made inside `with token:` belong to it, by a context variable. `cancel` closes their connections, so that they raise
`Cancelled` at once: the server sees a client that has gone, stops waiting for it, and makes fetched messages ready again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

from turtlemq.client.connection import Connection
from turtlemq.client.errors import Cancelled

_current: ContextVar[CancelToken | None] = ContextVar("turtlemq_cancel_token", default=None)


class CancelToken:
    """Calls off the calls made under it, and stops consumers. A token that was cancelled stays so.

    >>> token = CancelToken()
    >>> with token:
    ...     token.cancel()
    ...     client.topics()
    Traceback (most recent call last):
    turtlemq.client.errors.Cancelled: The call was cancelled by its token. Whether a request under way was done is not known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._calls: set[Callable[[], object]] = set()
        self._entered = threading.local()  # by thread: how to leave each `with`

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Call off all calls under way, and all later ones; stop the consumers. Returns at once."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, set()
        for call in calls:
            call()

    def check(self) -> None:
        """Raise `Cancelled` if the token was cancelled."""
        if self.cancelled:
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until the token is cancelled; then raise `Cancelled`."""
        self._cancelled.wait(seconds)
        self.check()

    def on_cancel(self, call: Callable[[], object]) -> None:
        """Make this call when the token is cancelled, in that thread; at once if it was already."""
        with self._lock:
            if not self.cancelled:
                self._calls.add(call)
                return
        call()

    def forget(self, call: Callable[[], object]) -> None:
        """Do not make that call."""
        with self._lock:
            self._calls.discard(call)

    def __enter__(self) -> Self:
        entered: list[Token[CancelToken | None]] = self._entered.__dict__.setdefault("tokens", [])
        entered.append(_current.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _current.reset(self._entered.tokens.pop())


def current_token() -> CancelToken | None:
    """The token of the calls that are made here."""
    return _current.get()


class Guarded:
    """The connection of a call, which its token may close. Also passes it on to another callback."""

    def __init__(self, token: CancelToken, then: Callable[[Connection | None], None] | None) -> None:
        self._token, self._then = token, then
        self._connection: Connection | None = None

    def __call__(self, connection: Connection | None) -> None:
        if connection is None:
            self._token.forget(self.close)
            self._connection = None
        else:
            self._connection = connection
            self._token.on_cancel(self.close)
        if self._then is not None:
            self._then(connection)

    def close(self) -> None:
        """End the connection, from another thread."""
        if (connection := self._connection) is not None:
            connection.abort()
