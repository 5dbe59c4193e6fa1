"""Producer for asyncio: `Producer` with tasks instead of threads. Belongs to one event loop.

Buffer and delivery of batches are those of `batching`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, Unpack

from turtlemq.client import clock, tracing
from turtlemq.client.aio import AsyncClient, wait_until
from turtlemq.client.arguments import PRODUCER_NAMES, ClientArguments, check_names
from turtlemq.client.batching import BatchBuffer, PendingPut, deliver_batch, fail_batch, log_failed_puts
from turtlemq.client.errors import BufferFull, Closed, TimedOut
from turtlemq.client.options import new_id
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.results import Outcome, StoredIds


class AsyncPut(asyncio.Future[str]):
    """The handle of a put: `id` is known at once; awaiting it waits until the message is durable and returns the id.
    `created`, `outcome`: as of `Put`."""

    id: str
    created: bool | None = None
    outcome: Outcome | None = None


class AsyncProducer:
    """`Producer` for asyncio, with its arguments. `await put(…)` waits for room and returns a handle to await.

    >>> async def story():
    ...     async with AsyncClient(client.options.urls) as async_client, AsyncProducer("orders", async_client) as producer:
    ...         puts = [await producer.put({"close": n}, id=f"order-{n}") for n in range(3)]
    ...         return [await put for put in puts]
    >>> asyncio.run(story())
    ['order-0', 'order-1', 'order-2']
    """

    def __init__(
        self,
        topic: str,
        client: AsyncClient | None = None,
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
        self._buffer = BatchBuffer(count, bytes, linger, held_count, held_bytes)
        self._owned = client is None
        self.client = AsyncClient(**arguments) if client is None else client
        self._policy = self.client.options.policy
        self._senders = senders
        self._tasks: list[asyncio.Task[None]] = []
        self._work = asyncio.Event()  # for senders: there may be a batch
        self._released = asyncio.Event()  # for put and flush: there may be room
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def put(
        self,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        block: float | None = None,
        **fields: Unpack[MessageFields],
    ) -> AsyncPut:
        """Buffer a message; arguments and errors are those of `Producer.put`."""
        now = clock.now_s()
        out = outgoing_message(body, new_id() if id is None else id, put_s=now, **fields)
        if tracing.active is not None:
            tracing.note_put(self.topic, out)
        put = AsyncPut()
        put.id = out.id
        pending = PendingPut(out, put, now + self._policy.budget_s)
        end = now + (self._policy.budget_s if block is None else block)
        if not self._tasks and not self._closed:
            self._tasks = [asyncio.create_task(self._send_batches()) for _ in range(self._senders)]
            await asyncio.sleep(0)  # let them begin: a task cancelled before its first step could not send the rest
        while not self._closed and not self._buffer.fits(pending.size):
            self._buffer.flush_now()  # lingering puts occupy the room that this put waits for
            self._work.set()
            self._released.clear()
            if not await wait_until(self._released, end):
                raise BufferFull
        if self._closed:
            raise Closed("this producer was closed; make a new one")
        self._buffer.add(pending)
        self._work.set()
        return put

    async def put_many(self, messages: Iterable[Any], *, together: bool = False, if_exists: IfExists | None = None) -> StoredIds:
        """Store many messages and wait until they are durable, as `Client.put_many`. They do not wait behind single puts."""
        return await self.client.put_many(self.topic, messages, together=together, if_exists=if_exists)

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the argument of Producer.flush
        """Send lingering puts, and wait until all puts so far are confirmed or failed; `TimedOut` if that takes longer."""
        last_seq, end = self._buffer.flush_now(), None if timeout is None else clock.now_s() + timeout
        self._work.set()
        while not self._buffer.flushed(last_seq):
            self._released.clear()
            if not await wait_until(self._released, end):
                raise TimedOut(f"{len(self._buffer.unconfirmed):,} messages are not confirmed yet; they are still being sent")

    async def close(self) -> None:
        """Send all buffered puts, then end; takes at most the timeout of the client. Later puts raise `Closed`."""
        self._stop_accepting()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._owned:
            await self.client.close()

    def _stop_accepting(self) -> None:
        self._closed = True
        self._buffer.flush_now()
        self._work.set()
        self._released.set()

    async def _send_batches(self) -> None:
        """A sender task. If cancelled, as at the end of `asyncio.run`, it first sends the buffered puts, until they time out."""
        try:
            await self._send_until_closed()
        except asyncio.CancelledError:
            self._stop_accepting()
            try:
                await self._send_until_closed()
            finally:
                self._fail_unsent()
            if self._owned and not self._buffer.unconfirmed:  # the last sender
                await self.client.close()
            raise

    async def _send_until_closed(self) -> None:
        """Send batch after batch until the producer is closed and the buffer empty."""
        while batch := await self._next_batch():
            try:
                await self.client.run(deliver_batch(self.topic, batch, self._policy, self.client.chooser(self.topic)))
            except asyncio.CancelledError:
                self._buffer.put_back(batch)  # ids make it safe to send it twice
                raise
            except Exception as error:  # noqa: BLE001 - no caller may wait for ever, whatever failed
                fail_batch(batch, error)
            self._finish_batch(batch)

    def _fail_unsent(self) -> None:
        """After a second cancel: fail the puts that are still buffered."""
        while batch := self._buffer.take_batch():
            fail_batch(batch, Closed("its sender was cancelled"))
            self._finish_batch(batch)

    def _finish_batch(self, batch: list[PendingPut]) -> None:
        log_failed_puts(self.topic, batch)
        self._buffer.release(batch)
        self._released.set()

    async def _next_batch(self) -> list[PendingPut]:
        """Wait for the next batch to be due and take it. Empty at the end."""
        while True:
            send_at_s = self._buffer.send_at_s()
            if send_at_s is None and self._closed:
                return []
            if send_at_s is not None and send_at_s <= clock.now_s():
                return self._buffer.take_batch()
            self._work.clear()
            await wait_until(self._work, send_at_s)
