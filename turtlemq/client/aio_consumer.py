"""Consumer for asyncio: `Consumer` with tasks instead of threads. Belongs to one event loop.

The decisions are in `consumer_state`, the requests in `consumer_flows`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from turtlemq.client import clock, consumer_flows, tracing
from turtlemq.client.aio import AsyncClient, wait_until
from turtlemq.client.arguments import CONSUMER_NAMES, ConsumerArguments, check_names
from turtlemq.client.cancel import CancelToken
from turtlemq.client.consumer_state import AckList, ConsumerOptions, ConsumerState, InHand, all_failed
from turtlemq.client.fetched import Message

log = logging.getLogger("turtlemq.client")
BatchHandler = Callable[[list[Message]], Awaitable[Mapping[str, BaseException | str] | None]]
Handler = Callable[[Message], Awaitable[object]] | BatchHandler


class AsyncConsumer:
    """`Consumer` for asyncio: the handler is a coroutine function, `concurrency` of them run at once.

    >>> async def story():
    ...     async def handle(message):
    ...         print(message.body)
    ...         await consumer.stop(wait=False)
    ...     async with AsyncClient(client.options.urls) as async_client:
    ...         await async_client.put("orders", {"close": 17})
    ...         consumer = AsyncConsumer("orders", handle, async_client)
    ...         await consumer.run()
    >>> asyncio.run(story())
    {'close': 17}
    """

    def __init__(
        self,
        topic: str,
        handler: Handler,
        client: AsyncClient | None = None,
        *,
        cancel: CancelToken | None = None,
        **arguments: Unpack[ConsumerArguments],
    ) -> None:
        self.options, own = ConsumerOptions.take_from(arguments, topic)
        check_names(type(self).__name__, CONSUMER_NAMES, own, client)
        self.handler: Callable[[Any], Awaitable[Any]] = handler
        self._owned = client is None
        self.client = AsyncClient(**own) if client is None else client
        self._policy = self.client.options.policy
        self._state = ConsumerState(self.options, clock.now_s)
        self._changed = asyncio.Event()  # set and replaced at each change
        self._stopped = asyncio.Event()
        self._fetcher: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._cancel = cancel
        self._stop_soon: Callable[[], object] = self._begin_stop  # called by the token, in another thread

    @property
    def counts(self) -> dict[str, int]:
        """Messages fetched, handled, failed, lost (their lease ended before their ack), and acked late (another consumer had
        them by then, and its outcome counts)."""
        return dict(self._state.counts)

    def holds(self, message: Message) -> bool:
        """Whether no other consumer can have this message now. For handlers to ask before an effect that cannot be undone."""
        return self._state.holds(message, clock.now_s())

    # Life

    async def start(self) -> Self:
        """Start the tasks and return."""
        if self._tasks:
            raise RuntimeError("a consumer starts once; make a new one")
        self._fetcher = asyncio.create_task(self._guard(self._fetch_loop()))
        loops = [self._ack_loop(), self._extend_loop(), *[self._handle_loop() for _ in range(self.options.concurrency)]]
        self._tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]
        if self._cancel is not None:
            running = asyncio.get_running_loop()
            self._stop_soon = partial(running.call_soon_threadsafe, self._begin_stop)
            self._cancel.on_cancel(self._stop_soon)
        return self

    def _begin_stop(self) -> None:
        """Stop as `stop(wait=False)` does."""
        self._stopped.set()
        self._state.stopping = True
        self._notify()
        if self._fetcher is not None and not self.options.at_most_once:
            self._fetcher.cancel()

    async def run(self, *, signals: bool = False, timeout: float = 30.0) -> None:  # noqa: ASYNC109 - the argument of Consumer.run
        """Work until `stop` is called, or until a permanent error, which is raised.

        signals: SIGTERM and SIGINT stop it gracefully, within `timeout` seconds.
        """
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

    async def stop(self, *, timeout: float = 30.0, wait: bool = True) -> None:  # noqa: ASYNC109 - the argument of Consumer.stop
        """Stop gracefully: fetch no more, finish the messages in hand, send the acks.

        After `timeout` seconds, messages that are not begun are given back and running handlers are cancelled. With
        `wait=False`, or called by a handler, this only begins the stop.
        """
        self._begin_stop()
        if self._cancel is not None:
            self._cancel.forget(self._stop_soon)
        if not wait or asyncio.current_task() in self._tasks:
            return
        end = clock.now_s() + timeout
        if self._fetcher is not None:
            await asyncio.wait([self._fetcher], timeout=timeout)
        while not self._state.idle and await wait_until(self._changed, end):
            pass
        self._state.give_back(clock.now_s())
        for acks in self._state.take_acks():
            await self._send_acks(acks, clock.now_s() + max(1.0, end - clock.now_s()))
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

    async def _guard(self, loop: Coroutine[Any, Any, None]) -> None:
        """Run a task. An exception stops the consumer, and `stop` or `run` raises it."""
        try:
            await loop
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            log.error("event=consumer_failed topic=%s group=%s error=%s", self.options.topic, self.options.group, error)
            self._error = self._error or error
            self._state.stopping = True
            self._stopped.set()
            self._notify()

    def _notify(self) -> None:
        """Wake every task that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Work

    async def _fetch_loop(self) -> None:
        while not self._stopped.is_set():
            count = self._state.fetch_count()
            if not count:
                await self._changed.wait()
                continue
            low, wait_s = self._state.fetch_low(), self._state.full_wait_s()
            flow = consumer_flows.fetch(self.options, count, self._policy, low, wait_s)
            messages, arrived_s = await self.client.run(flow)
            self._state.add_fetched(messages, arrived_s)
            self._notify()

    async def _handle_loop(self) -> None:
        while True:
            job = self._state.next_job(clock.now_s())
            if not job:
                await self._changed.wait()
                continue
            errors: Mapping[str, BaseException | str] | None = None
            try:
                errors = await self._handle(job)
            finally:  # also if it was cancelled: a message that was not handled must not be acked
                self._state.finished(job, all_failed(job) if errors is None else errors, clock.now_s())
                self._notify()

    async def _handle(self, job: list[InHand]) -> Mapping[str, BaseException | str]:
        messages, errors = consumer_flows.messages_of(self.options, job)
        if not messages:
            return errors
        try:
            with consumer_flows.limit(job), tracing.handling(self.options.topic, self.options.group, messages):
                result = await self.handler(messages if self.options.batch else messages[0])
        except (Exception, asyncio.CancelledError) as error:  # any exception of a handler becomes the error of its message
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this task is to end; otherwise it was something that the handler awaited
            return consumer_flows.handler_raised(self.options, job, error) | errors
        return {**result, **errors} if self.options.batch and isinstance(result, Mapping) else errors

    async def _ack_loop(self) -> None:
        while True:
            changed, due = self._changed, self._state.acks_due_s()
            if due is None or due > clock.now_s():
                await wait_until(changed, due)
                continue
            for acks in self._state.take_acks():
                await self._send_acks(acks, clock.now_s() + self.options.ttr)

    async def _send_acks(self, acks: AckList, deadline_s: float) -> None:
        late = 0
        try:
            late = await self.client.run(consumer_flows.send_acks(self.options, acks, self._policy, deadline_s))
        finally:
            self._state.acks_done(len(acks.acks), late)
            self._notify()

    async def _extend_loop(self) -> None:
        while True:
            changed, now = self._changed, clock.now_s()
            due = self._state.extend_due_s(now)
            if due is None or due > now:
                await wait_until(changed, due)
                continue
            ids = self._state.ids_to_extend(now)
            leases, deadline_s = self._state.leases_of(ids), self._state.first_lease_end_s(ids)
            lost = await self.client.run(consumer_flows.extend(self.options, ids, leases, self._policy, deadline_s))
            if lost is not None:
                self._state.extended(ids, lost, now)
                self._notify()
