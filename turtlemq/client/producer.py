"""Producer with threads: single puts are buffered and sent in batches by sender threads. Thread-safe.

Buffer and delivery of batches are in `batching`; the asyncio producer is in `aio_producer`.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, Unpack

from turtlemq.client import clock, tracing
from turtlemq.client.arguments import PRODUCER_NAMES, ClientArguments, check_names
from turtlemq.client.batching import BatchBuffer, PendingPut, deliver_batch, fail_batch, log_failed_puts
from turtlemq.client.errors import BufferFull, Closed, TimedOut
from turtlemq.client.options import new_id
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.pool import fork_aware
from turtlemq.client.results import Outcome, StoredIds
from turtlemq.client.sync import Client


class Put:
    """The handle of a put: `id` is known at once; `result()` waits until the message is durable and returns the id.

    created, outcome: after that, as of `StoredId`: whether the topic knew the id already, and the outcome; None if unknown,
    because an answer got lost and the message was sent again.
    Costs a tenth of a Future of the standard library: all puts of a producer wait on one shared condition.
    """

    __slots__ = ("id", "created", "outcome", "_done", "_error", "_changed")

    def __init__(self, id_: str, changed: threading.Condition) -> None:
        self.id = id_
        self.created: bool | None = None
        self.outcome: Outcome | None = None
        self._done = False
        self._error: BaseException | None = None
        self._changed = changed

    def done(self) -> bool:
        """Whether the message is confirmed or has failed."""
        return self._done

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome: None if the message is durable, else the error. Raises `TimedOut` if there is none in time."""
        if not self._done:
            with self._changed:
                if not self._changed.wait_for(self.done, timeout):
                    raise TimedOut(f"message {self.id!r} is not confirmed yet; it is still being sent")
        return self._error

    def result(self, timeout: float | None = None) -> str:
        """Wait until the message is durable and return its id. Raises the error of the put."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.id

    def set_result(self, result: str, /) -> None:
        """For the producer: the message is durable."""
        self._done = True

    def set_exception(self, exception: BaseException, /) -> None:
        """For the producer: the message has failed."""
        self._error, self._done = exception, True


class Producer:
    """Puts messages into one topic, in batches.

    client: the client whose connections it uses; without, it makes its own from the arguments of `Client`.
    count, bytes, linger: a batch is sent at so many messages or bytes, or when its first message has waited so many seconds.
    held_count, held_bytes: limits of the unconfirmed messages; at a limit `put` waits.
    senders: batches in flight at once. With one, messages are stored in the order in which they were put.

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
        **arguments: Unpack[ClientArguments],
    ) -> None:
        if senders < 1:
            raise ValueError("senders is 1 or more")
        check_names(type(self).__name__, PRODUCER_NAMES, arguments, client)
        self.topic = topic
        self._limits = (count, bytes, linger, held_count, held_bytes)
        self._senders = senders
        self._owned = client is None
        self.client = Client(**arguments) if client is None else client
        self._policy = self.client.options.policy
        self._closed = False
        self._reset()
        self._start_senders()
        fork_aware.add(self)
        atexit.register(self.close)

    def _reset(self) -> None:
        """An empty buffer, new locks, no threads."""
        self._buffer = BatchBuffer(*self._limits)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for senders: there may be a batch
        self._room = threading.Condition(self._lock)  # for put, flush and results: puts were released
        self._threads: list[threading.Thread] = []

    def _start_senders(self) -> None:
        """Start the sender threads."""
        names = [f"turtlemq-put-{self.topic}-{i}" for i in range(self._senders)]
        self._threads = [threading.Thread(target=self._send_batches, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def reset_after_fork(self) -> None:
        """In a forked child: earlier puts belong to the parent, whose threads send them; here they fail."""
        puts = list(self._buffer.unconfirmed.values())
        self._reset()
        fail_batch(puts, Closed("it was put before this process was forked; the one that put it sends it"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def put(
        self,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        block: float | None = None,
        **fields: Unpack[MessageFields],
    ) -> Put:
        """Buffer a message and return a handle at once. An invalid message raises here. Fields as in `Client.put`.

        block: seconds to wait for room if the buffer is full, then `BufferFull`; 0: do not wait; None: the timeout of the
        client, which begins with this call and covers all tries.
        """
        now = clock.now_s()
        out = outgoing_message(body, new_id() if id is None else id, put_s=now, **fields)
        if tracing.active is not None:
            tracing.note_put(self.topic, out)
        put = Put(out.id, self._room)
        pending = PendingPut(out, put, now + self._policy.budget_s)
        wait = self._policy.budget_s if block is None else block
        buffer = self._buffer
        with self._lock:
            if not buffer.fits(pending.size) and not self._closed:
                buffer.flush_now()  # lingering puts occupy the room that this put waits for
                self._work.notify()
                if not self._room.wait_for(lambda: self._closed or buffer.fits(pending.size), wait):
                    raise BufferFull
            if self._closed:
                raise Closed("this producer was closed; make a new one")
            if not self._threads:  # the first put after a fork
                self._start_senders()
            buffer.add(pending)
            waiting = len(buffer.waiting)
            if waiting == 1 or waiting == buffer.count or buffer.waiting_bytes >= buffer.size:
                self._work.notify()
        return put

    def put_many(self, messages: Iterable[Any], *, together: bool = False, if_exists: IfExists | None = None) -> StoredIds:
        """Store many messages and wait until they are durable, as `Client.put_many`. They do not wait behind single puts."""
        return self.client.put_many(self.topic, messages, together=together, if_exists=if_exists)

    def flush(self, timeout: float | None = None) -> None:
        """Send lingering puts, and wait until all puts so far are confirmed or failed; `TimedOut` if that takes longer."""
        with self._lock:
            last_seq = self._buffer.flush_now()
            self._work.notify_all()
            if not self._room.wait_for(lambda: self._buffer.flushed(last_seq), timeout):
                raise TimedOut(f"{len(self._buffer.unconfirmed):,} messages are not confirmed yet; they are still being sent")

    def close(self) -> None:
        """Send all buffered puts, then end; takes at most the timeout of the client. Later puts raise `Closed`."""
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

    def _send_batches(self) -> None:
        """A sender thread: batch after batch, until the producer is closed and the buffer empty."""
        while batch := self._next_batch():
            try:
                self.client.run(deliver_batch(self.topic, batch, self._policy, self.client.chooser(self.topic)))
            except Exception as error:  # noqa: BLE001 - no caller may wait for ever, whatever failed
                fail_batch(batch, error)
            log_failed_puts(self.topic, batch)
            with self._lock:
                self._buffer.release(batch)
                self._room.notify_all()

    def _next_batch(self) -> list[PendingPut]:
        """Wait for the next batch to be due and take it. Empty at the end."""
        with self._lock:
            while True:
                send_at_s = self._buffer.send_at_s()
                if send_at_s is None and self._closed:
                    return []
                now = clock.now_s()
                if send_at_s is not None and send_at_s <= now:
                    batch = self._buffer.take_batch()
                    if self._buffer.waiting:
                        self._work.notify()  # another sender can take the next one
                    return batch
                self._work.wait(None if send_at_s is None else send_at_s - now)
