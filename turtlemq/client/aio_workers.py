"""Producer and consumer for asyncio: tasks in place of threads, the same rules (`flow`, `desk`). One event loop each."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from turtlemq.client import calls, sending
from turtlemq.client.aio import AsyncClient
from turtlemq.client.consumer_state import AckList, ConsumerOptions, ConsumerState, InHand, Retry, all_failed, fetch_for
from turtlemq.client.errors import BufferFull, ClientError, Closed, TimedOut
from turtlemq.client.options import new_id
from turtlemq.client.sending import FOREVER, BatchBuffer, Entry
from turtlemq.client.wire import Message, Priority, outgoing

log = logging.getLogger("turtlemq.client")
Batched = Callable[[list[Message]], Awaitable[Mapping[str, BaseException | str] | None]]
Handler = Callable[[Message], Awaitable[object]] | Batched


async def _wait(event: asyncio.Event, until_s: float | None) -> bool:
    """Wait for an event until a time. Returns whether it came."""
    try:
        async with asyncio.timeout(None if until_s is None else max(0.0, until_s - time.monotonic())):
            await event.wait()
        return True
    except TimeoutError:
        return False


class AsyncPut(asyncio.Future[str]):
    """A put on its way: `id` is known at once; await it to know that it is durable."""

    id: str


class AsyncProducer:
    """`Producer` for asyncio: the same arguments. `await put(…)` waits for room, and gives a handle to await.

    >>> async def story():
    ...     async with AsyncClient(client.options.urls) as mine, AsyncProducer("orders", mine) as producer:
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
        **options: Any,
    ) -> None:
        if senders < 1:
            raise ValueError("senders is 1 or more")
        if client is not None and options:
            raise TypeError(f"with a client there are no {', '.join(options)}")
        self.topic = topic
        self._buffer = BatchBuffer(count, bytes, linger, held_count, held_bytes)
        self._owned = client is None
        self.client = AsyncClient(**options) if client is None else client
        self._rules = self.client.options.rules
        self._senders = senders
        self._tasks: list[asyncio.Task[None]] = []
        self._work, self._settled = asyncio.Event(), asyncio.Event()
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
        delay: float | None = None,
        due: int | datetime | None = None,
        ttr: float | None = None,
        priority: Priority | None = None,
        expires: int | datetime | None = None,
        headers: Mapping[str, str] | None = None,
        block: float | None = None,
    ) -> AsyncPut:
        """Take a message in; fields and `block` as of `Producer.put`."""
        now = time.monotonic()
        more = {"delay": delay, "due": due, "ttr": ttr, "priority": priority, "expires": expires}
        out = outgoing(body, new_id() if id is None else id, **more, headers=headers, put_s=now)  # type: ignore[arg-type]
        put = AsyncPut()
        put.id = out.id
        entry = Entry(out, put, now + self._rules.budget_s)
        end = now + (self._rules.budget_s if block is None else block)
        if not self._tasks and not self._closed:
            self._tasks = [asyncio.create_task(self._send_all()) for _ in range(self._senders)]
            await asyncio.sleep(0)  # they begin: a task that never began is cancelled without a word
        while not self._closed and not self._buffer.fits(entry.size):
            self._buffer.flush_now()  # what is held back for company would wait for room that it takes itself
            self._work.set()
            self._settled.clear()
            if not await _wait(self._settled, end):
                raise BufferFull
        if self._closed:
            raise Closed("this producer was closed; make a new one")
        self._buffer.add(entry)
        self._work.set()
        return put

    async def put_many(self, messages: Iterable[Any], *, together: bool = False) -> list[str]:
        """Store many at once and wait until they are durable; see `Client.put_many`. They do not wait behind single puts."""
        return await self.client.put_many(self.topic, messages, together=together)

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the same as of Producer
        """Send what lingers, and wait until everything that was put before is settled; `TimedOut` if that takes longer."""
        mark, end = self._buffer.flush_now(), None if timeout is None else time.monotonic() + timeout
        self._work.set()
        while not self._buffer.past(mark):
            self._settled.clear()
            if not await _wait(self._settled, end):
                raise TimedOut(f"{len(self._buffer.held):,} messages are not confirmed yet; they are still being sent")

    async def close(self) -> None:
        """Send all there is, then end. Takes at most the timeout of the client. Puts that come later are a `Closed`."""
        self._take_no_more()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._owned:
            await self.client.close()

    def _take_no_more(self) -> None:
        self._closed = True
        self._buffer.flush_now()
        self._work.set()
        self._settled.set()

    async def _send_all(self) -> None:
        """A sender. If it is cancelled, as at the end of `asyncio.run`, what was taken in goes first, within the time it has."""
        try:
            await self._send_until_closed()
        except asyncio.CancelledError:
            self._take_no_more()
            try:
                await self._send_until_closed()
            finally:
                self._drop()
            if self._owned and not self._buffer.held:  # the last one of them
                await self.client.close()
            raise

    async def _send_until_closed(self) -> None:
        """Batch after batch, until all is sent and the producer is closed."""
        while batch := await self._next():
            try:
                await self.client.run(sending.deliver(self.topic, batch, self._rules))
            except asyncio.CancelledError:
                self._buffer.put_back(batch)  # ids make it safe to send it twice
                raise
            except Exception as error:  # noqa: BLE001 - nobody may wait for ever because of something unforeseen
                for entry in batch:
                    entry.fail(error if isinstance(error, ClientError) else ClientError(f"not sent: {error!r}"))
            self._done_with(batch)

    def _drop(self) -> None:
        """It was cancelled once more: who waits for what is left is told. Nothing is left otherwise."""
        while left := self._buffer.take():
            for entry in left:
                entry.fail(Closed("its sender was cancelled"))
            self._done_with(left)

    def _done_with(self, batch: list[Entry]) -> None:
        failed = [entry.error for entry in batch if entry.error is not None]
        if failed:
            log.warning("event=puts_failed topic=%s count=%d first=%s", self.topic, len(failed), failed[0])
        self._buffer.settled(batch)
        self._settled.set()

    async def _next(self) -> list[Entry]:
        """The next batch, when it is time; empty at the end."""
        while True:
            due = self._buffer.due_s()
            if due is None and self._closed:
                return []
            if due is not None and due <= time.monotonic():
                return self._buffer.take()
            self._work.clear()
            await _wait(self._work, due)


class AsyncConsumer:
    """`Consumer` for asyncio: the handler is a coroutine function, `concurrency` of them run at once.

    >>> async def story():
    ...     async def handle(message):
    ...         print(message.body)
    ...         await consumer.stop(wait=False)
    ...     async with AsyncClient(client.options.urls) as mine:
    ...         await mine.put("orders", {"close": 17})
    ...         consumer = AsyncConsumer("orders", handle, mine)
    ...         await consumer.run()
    >>> asyncio.run(story())
    {'close': 17}
    """

    def __init__(self, topic: str, handler: Handler, client: AsyncClient | None = None, **how: Any) -> None:
        terms = {name: how.pop(name) for name in list(how) if name in ConsumerOptions.__dataclass_fields__}
        if client is not None and how:
            raise TypeError(f"with a client there are no {', '.join(how)}")
        self.options = ConsumerOptions(topic, **terms)
        self.handler: Callable[[Any], Awaitable[Any]] = handler
        self._owned = client is None
        self.client = AsyncClient(**how) if client is None else client
        self._rules = self.client.options.rules
        self._state = ConsumerState(self.options)
        self._changed = asyncio.Event()  # set and replaced at each change
        self._stopped = asyncio.Event()
        self._fetcher: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many messages were fetched, handled, failed, lost (their lease ended before they were acknowledged)."""
        return dict(self._state.counts)

    def holds(self, message: Message) -> bool:
        """Is this message still ours alone? For handlers that want to be sure before they do what cannot be undone."""
        return self._state.holds(message, time.monotonic())

    # Life

    async def start(self) -> Self:
        """Begin, in tasks of its own."""
        if self._tasks:
            raise RuntimeError("a consumer starts once; make a new one")
        self._fetcher = asyncio.create_task(self._guard(self._fetch_all()))
        work = [self._ack_all(), self._extend_all(), *[self._handle_all() for _ in range(self.options.concurrency)]]
        self._tasks = [asyncio.create_task(self._guard(one)) for one in work]
        return self

    async def run(self, *, signals: bool = False, timeout: float = 30.0) -> None:  # noqa: ASYNC109 - the same as of Consumer
        """Work until somebody calls `stop`, or something is wrong that will not change, which is raised. See `Consumer.run`."""
        numbers = (signal.SIGTERM, signal.SIGINT) if signals else ()
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self._stopped.set)
        try:
            await self.start()
            await self._stopped.wait()
        finally:
            await self.stop(timeout=timeout)
            for number in numbers:
                loop.remove_signal_handler(number)

    async def stop(self, *, timeout: float = 30.0, wait: bool = True) -> None:  # noqa: ASYNC109 - the same as of Consumer
        """Fetch no more, finish what is in hand, send the acks. See `Consumer.stop`."""
        self._stopped.set()
        self._state.stopping = True
        self._notify()
        if self._fetcher is not None and not self.options.auto:
            self._fetcher.cancel()
        if not wait or asyncio.current_task() in self._tasks:
            return
        end = time.monotonic() + timeout
        if self._fetcher is not None:
            await asyncio.wait([self._fetcher], timeout=timeout)
        while not self._state.idle and await _wait(self._changed, end):
            pass
        self._state.give_back(time.monotonic())
        for acks in self._state.take_acks():
            await self._send_acks(acks, time.monotonic() + max(1.0, end - time.monotonic()))
        tasks = [*self._tasks, *([self._fetcher] if self._fetcher is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._owned:
            await self.client.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A task: what goes wrong in it stops the consumer, and is raised by `stop` or `run`."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again where somebody sees it
            log.error("event=consumer_failed topic=%s group=%s error=%s", self.options.topic, self.options.group, error)
            self._error = self._error or error
            self._state.stopping = True
            self._stopped.set()
            self._notify()

    def _notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Work

    async def _fetch_all(self) -> None:
        while not self._stopped.is_set():
            count = self._state.room()
            if not count:
                await self._changed.wait()
                continue
            call = fetch_for(self.options, count)
            steps = sending.exchange(lambda _, call=call: call.request, self._rules, FOREVER, patient=True)  # type: ignore[misc]
            answer = await self.client.run(steps)
            self._state.arrived(call.parse(answer), time.monotonic())
            self._notify()

    async def _handle_all(self) -> None:
        while True:
            job = self._state.next(time.monotonic())
            if not job:
                await self._changed.wait()
                continue
            errors: Mapping[str, BaseException | str] | None = None
            try:
                errors = await self._handle(job)
            finally:  # even if it was cancelled: what was not handled is not acknowledged
                self._state.finished(job, all_failed(job) if errors is None else errors, time.monotonic())
                self._notify()

    async def _handle(self, job: list[InHand]) -> Mapping[str, BaseException | str]:
        messages = [held.message for held in job]
        try:
            said = await self.handler(messages if self.options.batch else messages[0])
        except (Exception, asyncio.CancelledError) as error:  # whatever a handler raises is for the record of its message
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # it is this worker who is to end, not something that its handler waited for
            level = logging.INFO if isinstance(error, Retry) else logging.WARNING  # the one is meant, the other is not
            log.log(level, "event=handler_failed topic=%s id=%s error=%r", self.options.topic, messages[0].id, error)
            return all_failed(job, error)
        return said if self.options.batch and isinstance(said, Mapping) else {}

    async def _ack_all(self) -> None:
        while True:
            changed, due = self._changed, self._state.acks_due_s()
            if due is None or due > time.monotonic():
                await _wait(changed, due)
                continue
            for acks in self._state.take_acks():
                await self._send_acks(acks, time.monotonic() + self.options.ttr)

    async def _send_acks(self, acks: AckList, deadline_s: float) -> None:
        """Send acks; if that fails for as long as a lease, they come to nothing, and the messages again."""
        terms = self.options
        call = calls.ack(terms.topic, acks.acks, group=terms.group, retry_delay=acks.delay, error=acks.error)
        try:
            call.parse(
                await self.client.run(sending.exchange(call.since(time.monotonic()), self._rules, deadline_s, patient=True))
            )
        except ClientError as error:
            log.warning("event=ack_failed topic=%s count=%d error=%s", terms.topic, len(acks.acks), error)
        finally:
            self._state.acked(len(acks.acks))
            self._notify()

    async def _extend_all(self) -> None:
        while True:
            changed, now = self._changed, time.monotonic()
            due = self._state.extend_due_s(now)
            if due is None or due > now:
                await _wait(changed, due)
                continue
            ids = self._state.to_extend(now)
            await self._extend(ids, now, self._state.first_end_s(ids))

    async def _extend(self, ids: list[str], asked_s: float, deadline_s: float) -> None:
        call = calls.extend(self.options.topic, ids, self.options.ttr, group=self.options.group)
        try:
            answer = await self.client.run(sending.exchange(lambda _: call.request, self._rules, deadline_s, patient=True))
            unknown = call.parse(answer).unknown
        except TimedOut:  # these leases are over; nothing to note
            return
        except ClientError as error:
            log.warning("event=extend_failed topic=%s count=%d error=%s", self.options.topic, len(ids), error)
            unknown = ids
        self._state.extended(ids, unknown, asked_s)
        self._notify()
