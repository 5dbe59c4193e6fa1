"""Single puts gathered into batches by count, bytes and linger, sent by threads of their own. Thread-safe."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from turtlemq.client import sending
from turtlemq.client.errors import BufferFull, ClientError, Closed, TimedOut
from turtlemq.client.options import new_id
from turtlemq.client.sending import BatchBuffer, Entry
from turtlemq.client.sync import Client, forked
from turtlemq.client.wire import Priority, outgoing

log = logging.getLogger("turtlemq.client")


class Put:
    """A put on its way: `id` is known at once, `result()` waits until it is durable and returns the id, or raises why not.

    A tenth of what a Future of the standard library costs: all puts of a producer share the condition that they wait on.
    """

    __slots__ = ("id", "_settled", "_error", "_changed")

    def __init__(self, id_: str, changed: threading.Condition) -> None:
        self.id = id_
        self._settled = False
        self._error: BaseException | None = None
        self._changed = changed

    def done(self) -> bool:
        """Is it known what became of it?"""
        return self._settled

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; why it is not durable, or None if it is. `TimedOut` if it is not known in time."""
        if not self._settled:
            with self._changed:
                if not self._changed.wait_for(self.done, timeout):
                    raise TimedOut(f"message {self.id!r} is not confirmed yet; it is still being sent")
        return self._error

    def result(self, timeout: float | None = None) -> str:
        """Wait until it is durable."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.id

    def set_result(self, result: str, /) -> None:
        """For the producer: it is durable."""
        self._settled = True

    def set_exception(self, exception: BaseException, /) -> None:
        """For the producer: it is not."""
        self._error, self._settled = exception, True


class Producer:
    """Puts messages into one topic, many at a time.

    client: whose connections it uses; else one of its own, made from `options` as `Client` takes them.
    count, bytes, linger: a batch goes when it has so many messages or bytes, or its first message has waited so many seconds.
    held_count, held_bytes: how much it holds that is not confirmed; then `put` waits.
    senders: how many batches are on the wire at once. With one, messages are stored in the order in which they were put.

    >>> with Producer("orders", client) as producer:
    ...     puts = [producer.put({"close": n}, id=f"order-{n}", delay=1800) for n in range(3)]
    >>> [put.result() for put in puts]
    ['order-0', 'order-1', 'order-2']
    """

    def __init__(
        self,
        topic: str,
        client: Client | None = None,
        *,
        count: int = 1000,
        bytes: int = 1 << 20,  # noqa: A002 - reads best
        linger: float = 0.005,
        held_count: int = 20_000,
        held_bytes: int = 64 << 20,
        senders: int = 1,
        **options: Any,
    ) -> None:
        if senders < 1:
            raise ValueError("senders is 1 or more")
        if client is not None and options:
            raise TypeError(f"with a client there are no {', '.join(options)}")
        self.topic = topic
        self._limits = (count, bytes, linger, held_count, held_bytes)
        self._senders = senders
        self._owned = client is None
        self.client = Client(**options) if client is None else client
        self._rules = self.client.options.rules
        self._closed = False
        self._begin()
        self._start()
        forked.add(self)
        atexit.register(self.close)

    def _begin(self) -> None:
        """Nothing is held, and nobody sends yet."""
        self._buffer = BatchBuffer(*self._limits)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for senders: there may be a batch
        self._room = threading.Condition(self._lock)  # for those who put or flush: something was settled
        self._threads: list[threading.Thread] = []

    def _start(self) -> None:
        """Make the senders."""
        names = [f"turtlemq-put-{self.topic}-{i}" for i in range(self._senders)]
        self._threads = [threading.Thread(target=self._send_all, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def begin_anew(self) -> None:
        """In a forked child: what was put before is the parent's, which has the threads that send it, and hears of it."""
        held = list(self._buffer.held.values())
        self._begin()
        for entry in held:
            entry.fail(Closed("it was put before this process was forked; the one that put it sends it"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def put(
        self,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        delay: float | None = None,
        due: int | datetime | None = None,
        ttr: float | None = None,
        priority: Priority | None = None,
        expires: int | datetime | None = None,
        headers: Mapping[str, str] | None = None,
        block: float | None = None,
    ) -> Put:
        """Take a message in and return at once; what is wrong with it is raised here. See `Client.put` for the fields.

        block: seconds to wait for room where the producer holds all it may, else `BufferFull`; 0: do not wait; None: as long as
        the timeout of the client, which begins with this call and covers all tries.
        """
        now = time.monotonic()
        more = {"delay": delay, "due": due, "ttr": ttr, "priority": priority, "expires": expires}
        out = outgoing(body, new_id() if id is None else id, **more, headers=headers, put_s=now)  # type: ignore[arg-type]
        put = Put(out.id, self._room)
        entry = Entry(out, put, now + self._rules.budget_s)
        wait = self._rules.budget_s if block is None else block
        gather = self._buffer
        with self._lock:
            if not gather.fits(entry.size) and not self._closed:
                gather.flush_now()  # what is held back for company would wait for room that it takes itself
                self._work.notify()
                if not self._room.wait_for(lambda: self._closed or gather.fits(entry.size), wait):
                    raise BufferFull
            if self._closed:
                raise Closed("this producer was closed; make a new one")
            if not self._threads:  # the first put of a forked child
                self._start()
            gather.add(entry)
            waiting = len(gather.waiting)
            if waiting == 1 or waiting == gather.count or gather.waiting_bytes >= gather.size:
                self._work.notify()
        return put

    def put_many(self, messages: Iterable[Any], *, together: bool = False) -> list[str]:
        """Store many at once and wait until they are durable; see `Client.put_many`. They do not wait behind single puts."""
        return self.client.put_many(self.topic, messages, together=together)

    def flush(self, timeout: float | None = None) -> None:
        """Send what lingers, and wait until everything that was put before is settled; `TimedOut` if that takes longer."""
        with self._lock:
            mark = self._buffer.flush_now()
            self._work.notify_all()
            if not self._room.wait_for(lambda: self._buffer.past(mark), timeout):
                raise TimedOut(f"{len(self._buffer.held):,} messages are not confirmed yet; they are still being sent")

    def close(self) -> None:
        """Send all there is, then end. Takes at most the timeout of the client. Puts that come later are a `Closed`."""
        with self._lock:
            self._closed = True
            self._buffer.flush_now()
            self._work.notify_all()
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)
        if self._owned:
            self.client.close()

    def _send_all(self) -> None:
        """A sender: batch after batch, until all is sent and the producer is closed."""
        while batch := self._next():
            try:
                self.client.run(sending.deliver(self.topic, batch, self._rules))
            except Exception as error:  # noqa: BLE001 - nobody may wait for ever because of something unforeseen
                for entry in batch:
                    entry.fail(error if isinstance(error, ClientError) else ClientError(f"not sent: {error!r}"))
            failed = [entry.error for entry in batch if entry.error is not None]
            if failed:
                log.warning("event=puts_failed topic=%s count=%d first=%s", self.topic, len(failed), failed[0])
            with self._lock:
                self._buffer.settled(batch)
                self._room.notify_all()

    def _next(self) -> list[Entry]:
        """The next batch, when it is time; empty at the end."""
        with self._lock:
            while True:
                due = self._buffer.due_s()
                if due is None and self._closed:
                    return []
                now = time.monotonic()
                if due is not None and due <= now:
                    batch = self._buffer.take()
                    if self._buffer.waiting:
                        self._work.notify()  # there is more, for another sender
                    return batch
                self._work.wait(None if due is None else due - now)
