"""Consumer with threads: one fetches, one sends acks, one extends leases, and `concurrency` of them run the handler.

All share one lock. Each kind of thread waits on its own condition, so that a finished message wakes only threads with work to do.
The decisions are in `consumer_state`, the requests in `consumer_flows`; the asyncio consumer is in `aio_consumer`.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

from turtlemq.client import clock, consumer_flows, tracing
from turtlemq.client.arguments import CONSUMER_NAMES, ConsumerArguments, check_names
from turtlemq.client.cancel import CancelToken
from turtlemq.client.connection import Connection
from turtlemq.client.consumer_state import AckList, ConsumerOptions, ConsumerState, InHand, all_failed
from turtlemq.client.fetched import Message
from turtlemq.client.pool import end_long_poll
from turtlemq.client.sync import Client

log = logging.getLogger("turtlemq.client")
SIGNAL_S = 0.2  # signals are noticed within this time
Handler = Callable[[Message], object] | Callable[[list[Message]], Mapping[str, BaseException | str] | None]


class Stopping(Exception):
    """Ends a wait of the fetching thread: the consumer stops."""


class Consumer:
    """Hands the messages of a topic to a handler, and acknowledges them when it returns.

    A handler that raises has failed: the message comes again after the topic's back-off, or after the delay of `Retry(delay=…)`.
    With `batch=n` it gets a list, and may return {id: error} for those that failed. With `body=Order` bodies are of that type.
    cancel: a token that stops it.
    Other arguments are those of `ConsumerOptions`; without a `client` it makes its own from the arguments of `Client`.

    >>> _ = client.put("orders", {"close": 17})
    >>> def handle(message):
    ...     print(message.body)
    ...     consumer.stop(wait=False)
    >>> consumer = Consumer("orders", handle, client, concurrency=1)
    >>> consumer.run()
    {'close': 17}
    """

    def __init__(
        self,
        topic: str,
        handler: Handler,
        client: Client | None = None,
        *,
        cancel: CancelToken | None = None,
        **arguments: Unpack[ConsumerArguments],
    ) -> None:
        self.options, own = ConsumerOptions.take_from(arguments, topic)
        check_names(type(self).__name__, CONSUMER_NAMES, own, client)
        if inspect.iscoroutinefunction(handler):
            raise TypeError("a coroutine function is a handler for AsyncConsumer")
        self.handler: Callable[[Any], Any] = handler
        self._owned = client is None
        self.client = Client(**own) if client is None else client
        self._policy = self.client.options.policy
        self._state = ConsumerState(self.options, clock.now_s)
        self._lock = threading.Lock()
        conditions = [threading.Condition(self._lock) for _ in range(5)]
        self._room, self._jobs, self._acks, self._leases, self._idle = self._conditions = conditions
        self._stopped = threading.Event()  # fetching ends
        self._ended = threading.Event()  # all threads end
        self._polling: Connection | None = None  # of the long poll, until its messages are queued
        self._signalled = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._cancel = cancel

    @property
    def counts(self) -> dict[str, int]:
        """Messages fetched, handled, failed, lost (their lease ended before their ack), and acked late (another consumer had
        them by then, and its outcome counts)."""
        with self._lock:
            return dict(self._state.counts)

    def holds(self, message: Message) -> bool:
        """Whether no other consumer can have this message now. For handlers to ask before an effect that cannot be undone."""
        with self._lock:
            return self._state.holds(message, clock.now_s())

    # Life

    def start(self) -> Self:
        """Start the threads and return."""
        if self._threads:
            raise RuntimeError("a consumer starts once; make a new one")
        loops = [self._fetch_loop, self._ack_loop, self._extend_loop] + [self._handle_loop] * self.options.concurrency
        name = f"turtlemq-{self.options.topic}-{self.options.group}"
        self._threads = [threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        if self._cancel is not None:
            self._cancel.on_cancel(self._begin_stop)
        return self

    def _begin_stop(self) -> None:
        self.stop(wait=False)

    def run(self, *, signals: bool = False, timeout: float = 30.0) -> None:
        """Work until `stop` is called, or until a permanent error, which is raised.

        signals: SIGTERM and SIGINT stop it gracefully, within `timeout` seconds. Without, Ctrl-C does so and is then raised.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT) if signals}
        try:
            self.start()
            try:
                while not self._stopped.wait(SIGNAL_S) and not self._signalled:
                    pass
            finally:  # after a KeyboardInterrupt, too: no thread may work on after the return
                self.stop(timeout=timeout)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True  # nothing more: the interrupted code may hold any lock

    def stop(self, *, timeout: float = 30.0, wait: bool = True) -> None:
        """Stop gracefully: fetch no more, finish the messages in hand, send the acks.

        After `timeout` seconds, messages that are not begun are given back. A handler that still runs then is left alone; its
        message comes again when the lease ends. With `wait=False`, or called by a handler, this only begins the stop.
        """
        self._stopped.set()
        if self._cancel is not None:
            self._cancel.forget(self._begin_stop)
        end = clock.now_s() + timeout
        with self._lock:
            self._state.stopping = True
            if self._polling is not None and not self.options.at_most_once:
                end_long_poll(self._polling)
            self._wake_all()
            if not wait or threading.current_thread() in self._threads:
                return
            self._idle.wait_for(lambda: self._polling is None and self._state.idle, max(0.0, end - clock.now_s()))
            self._state.give_back(clock.now_s())
        for acks in self._take_acks():
            self._send_acks(acks, clock.now_s() + max(1.0, end - clock.now_s()))
        self._ended.set()
        with self._lock:
            self._wake_all()
        for thread in self._threads:
            thread.join(max(0.1, end - clock.now_s()))
        if self._owned:
            self.client.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread. An exception stops the consumer, and `stop` or `run` raises it."""
        try:
            loop()
        except Stopping:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            log.error("event=consumer_failed topic=%s group=%s error=%s", self.options.topic, self.options.group, error)
            self._error = self._error or error
            self._stopped.set()
            with self._lock:
                self._state.stopping = True
                self._wake_all()

    def _wake_all(self) -> None:
        """Wake every thread, so that it checks its condition again. Requires the lock."""
        for condition in self._conditions:
            condition.notify_all()

    # Fetching

    def _fetch_loop(self) -> None:
        while True:
            with self._lock:
                self._room.wait_for(lambda: self._state.stopping or self._state.fetch_count() > 0)
                count, low, wait_s = self._state.fetch_count(), self._state.fetch_low(), self._state.full_wait_s()
            if self._stopped.is_set():
                return
            self._fetch(count, low, wait_s)

    def _fetch(self, count: int, low: int | None, full_wait_s: float) -> None:
        flow = consumer_flows.fetch(self.options, count, self._policy, low, full_wait_s)
        try:
            messages, arrived_s = self.client.run(flow, sleep=self._sleep, on_connection=self._note_polling)
            with self._lock:
                self._state.add_fetched(messages, arrived_s)
                self._jobs.notify(len(messages))
                self._leases.notify()
        finally:
            with self._lock:
                self._polling = None
                if self._state.stopping:
                    self._wake_all()

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Stopping

    def _note_polling(self, connection: Connection | None) -> None:
        """Note the connection of a long poll, so that `stop` can end it."""
        with self._lock:
            if connection is not None and self._state.stopping:
                raise Stopping
            self._polling = connection or self._polling  # `_fetch` clears it when the messages are queued

    # Handling

    def _handle_loop(self) -> None:
        while True:
            with self._lock:
                while not (job := self._state.next_job(clock.now_s())):
                    if self._ended.is_set() or (self._state.stopping and self._polling is None and not self._state.queue):
                        return
                    self._jobs.wait()
            errors: Mapping[str, BaseException | str] | None = None
            try:
                errors = self._handle(job)
            finally:  # also if the thread is to end: a message that was not handled must not be acked
                with self._lock:
                    self._state.finished(job, all_failed(job) if errors is None else errors, clock.now_s())
                    if self._state.stopping:
                        self._wake_all()
                    self._acks.notify()
                    self._room.notify()

    def _handle(self, job: list[InHand]) -> Mapping[str, BaseException | str]:
        messages, errors = consumer_flows.messages_of(self.options, job)
        if not messages:
            return errors
        try:
            with consumer_flows.limit(job), tracing.handling(self.options.topic, self.options.group, messages):
                result = self.handler(messages if self.options.batch else messages[0])
        except Exception as error:  # noqa: BLE001 - any exception of a handler becomes the error of its message
            return consumer_flows.handler_raised(self.options, job, error) | errors
        return {**result, **errors} if self.options.batch and isinstance(result, Mapping) else errors

    # Acks and leases

    def _ack_loop(self) -> None:
        while True:
            with self._lock:
                while (due := self._state.acks_due_s()) is None or due > clock.now_s():
                    if self._ended.is_set():
                        return
                    self._acks.wait(None if due is None else due - clock.now_s())
            for acks in self._take_acks():
                self._send_acks(acks, clock.now_s() + self.options.ttr)

    def _take_acks(self) -> list[AckList]:
        with self._lock:
            return self._state.take_acks()

    def _send_acks(self, acks: AckList, deadline_s: float) -> None:
        late = 0
        try:
            late = self.client.run(consumer_flows.send_acks(self.options, acks, self._policy, deadline_s))
        finally:
            with self._lock:
                self._state.acks_done(len(acks.acks), late)
                self._idle.notify_all()

    def _extend_loop(self) -> None:
        while True:
            with self._lock:
                while (due := self._state.extend_due_s(clock.now_s())) is None or due > clock.now_s():
                    if self._ended.is_set():
                        return
                    self._leases.wait(None if due is None else max(0.0, due - clock.now_s()))
                asked_s = clock.now_s()
                ids = self._state.ids_to_extend(asked_s)
                leases, deadline_s = self._state.leases_of(ids), self._state.first_lease_end_s(ids)
            lost = self.client.run(consumer_flows.extend(self.options, ids, leases, self._policy, deadline_s))
            if lost is not None:
                with self._lock:
                    self._state.extended(ids, lost, asked_s)
