"""Fetch, handle, acknowledge: a consumer with threads. The rules are in `desk`; here are the threads that follow them.

One fetches, one sends acks, one extends leases, and `concurrency` of them handle. All share one lock, and each kind waits on a
condition of its own, so that a message that is done wakes nobody who has nothing to do.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from turtlemq.client import calls, sending
from turtlemq.client.consumer_state import AckList, ConsumerOptions, ConsumerState, InHand, Retry, all_failed, fetch_for
from turtlemq.client.errors import ClientError, TimedOut
from turtlemq.client.sending import FOREVER
from turtlemq.client.sync import Client, Connection, stop_sending
from turtlemq.client.wire import Message

log = logging.getLogger("turtlemq.client")
SIGNAL_S = 0.2  # how soon a signal is noticed
Handler = Callable[[Message], object] | Callable[[list[Message]], Mapping[str, BaseException | str] | None]


class Stopping(Exception):
    """The consumer stops, so whatever waits ends."""


class Consumer:
    """Hands the messages of a topic to a handler, and acknowledges them when it returns.

    A handler that raises has failed: the message comes again after the topic's back-off, or after the delay of `Retry(delay=…)`.
    With `batch=n` it gets a list, and may return {id: error} for those that failed. Other arguments are those of `Terms`; without
    a client it makes one of its own from what is left.

    >>> _ = client.put("orders", {"close": 17})
    >>> def handle(message):
    ...     print(message.body)
    ...     consumer.stop(wait=False)
    >>> consumer = Consumer("orders", handle, client, concurrency=1)
    >>> consumer.run()
    {'close': 17}
    """

    def __init__(self, topic: str, handler: Handler, client: Client | None = None, **how: Any) -> None:
        terms = {name: how.pop(name) for name in list(how) if name in ConsumerOptions.__dataclass_fields__}
        if client is not None and how:
            raise TypeError(f"with a client there are no {', '.join(how)}")
        if inspect.iscoroutinefunction(handler):
            raise TypeError("a coroutine function is a handler for AsyncConsumer")
        self.options = ConsumerOptions(topic, **terms)
        self.handler: Callable[[Any], Any] = handler
        self._owned = client is None
        self.client = Client(**how) if client is None else client
        self._rules = self.client.options.rules
        self._state = ConsumerState(self.options)
        self._lock = threading.Lock()
        made = [threading.Condition(self._lock) for _ in range(5)]
        self._room, self._jobs, self._acks, self._leases, self._idle = self._conditions = made
        self._stopped = threading.Event()  # no more fetching
        self._ended = threading.Event()  # no more anything
        self._polling: Connection | None = None
        self._signalled = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many messages were fetched, handled, failed, lost (their lease ended before they were acknowledged)."""
        with self._lock:
            return dict(self._state.counts)

    def holds(self, message: Message) -> bool:
        """Is this message still ours alone? For handlers that want to be sure before they do what cannot be undone."""
        with self._lock:
            return self._state.holds(message, time.monotonic())

    # Life

    def start(self) -> Self:
        """Begin, in threads of its own."""
        if self._threads:
            raise RuntimeError("a consumer starts once; make a new one")
        work = [self._fetch_all, self._ack_all, self._extend_all] + [self._handle_all] * self.options.concurrency
        name = f"turtlemq-{self.options.topic}-{self.options.group}"
        self._threads = [threading.Thread(target=self._guard, args=(one,), name=name, daemon=True) for one in work]
        for thread in self._threads:
            thread.start()
        return self

    def run(self, *, signals: bool = False, timeout: float = 30.0) -> None:
        """Work until somebody calls `stop`, or something is wrong that will not change, which is raised.

        signals: SIGTERM and SIGINT stop it gracefully, within `timeout` seconds. Else Ctrl-C does so, and is raised afterwards.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT) if signals}
        try:
            self.start()
            try:
                while not self._stopped.wait(SIGNAL_S) and not self._signalled:
                    pass
            finally:  # after a KeyboardInterrupt, too: nothing goes on behind the caller's back
                self.stop(timeout=timeout)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True  # nothing more: whoever was interrupted may hold any lock

    def stop(self, *, timeout: float = 30.0, wait: bool = True) -> None:
        """Fetch no more, finish what is in hand, send the acks. After `timeout` seconds, what nobody began is given back.

        A handler that does not end by then is left alone; its message comes again when the lease is over. With `wait=False`, or
        called by a handler, it only begins to stop.
        """
        self._stopped.set()
        end = time.monotonic() + timeout
        with self._lock:
            self._state.stopping = True
            if self._polling is not None and not self.options.auto:
                stop_sending(self._polling)
            self._wake_all()
            if not wait or threading.current_thread() in self._threads:
                return
            self._idle.wait_for(lambda: self._polling is None and self._state.idle, max(0.0, end - time.monotonic()))
            self._state.give_back(time.monotonic())
        for acks in self._take_acks():
            self._send_acks(acks, time.monotonic() + max(1.0, end - time.monotonic()))
        self._ended.set()
        with self._lock:
            self._wake_all()
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        if self._owned:
            self.client.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _guard(self, work: Callable[[], None]) -> None:
        """A thread: what goes wrong in it stops the consumer, and is raised by `stop` or `run`."""
        try:
            work()
        except Stopping:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where somebody sees it
            log.error("event=consumer_failed topic=%s group=%s error=%s", self.options.topic, self.options.group, error)
            self._error = self._error or error
            self._stopped.set()
            with self._lock:
                self._state.stopping = True
                self._wake_all()

    def _wake_all(self) -> None:
        """Everybody looks again at what there is to do. With the lock."""
        for condition in self._conditions:
            condition.notify_all()

    # Fetching

    def _fetch_all(self) -> None:
        while True:
            with self._lock:
                self._room.wait_for(lambda: self._state.stopping or self._state.room() > 0)
                count = self._state.room()
            if self._stopped.is_set():
                return
            self._fetch(count)

    def _fetch(self, count: int) -> None:
        call = fetch_for(self.options, count)
        try:
            steps = sending.exchange(lambda _: call.request, self._rules, FOREVER, patient=True)
            answer = self.client.run(steps, pause=self._pause, watch=self._watch)
            came_s = time.monotonic()
            found = call.parse(answer)
            with self._lock:
                self._state.arrived(found, came_s)
                self._jobs.notify(len(found))
                self._leases.notify()
        finally:
            with self._lock:
                self._polling = None
                if self._state.stopping:
                    self._wake_all()

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Stopping

    def _watch(self, connection: Connection | None) -> None:
        """Know which connection a long poll is on, so that `stop` can end it."""
        with self._lock:
            if connection is not None and self._state.stopping:
                raise Stopping
            self._polling = connection or self._polling  # until what it brought is on the desk

    # Handling

    def _handle_all(self) -> None:
        while True:
            with self._lock:
                while not (job := self._state.next(time.monotonic())):
                    if self._ended.is_set() or (self._state.stopping and self._polling is None and not self._state.queue):
                        return
                    self._jobs.wait()
            errors: Mapping[str, BaseException | str] | None = None
            try:
                errors = self._handle(job)
            finally:  # even if the thread is to end: what was not handled is not acknowledged
                with self._lock:
                    self._state.finished(job, all_failed(job) if errors is None else errors, time.monotonic())
                    if self._state.stopping:
                        self._wake_all()
                    self._acks.notify()
                    self._room.notify()

    def _handle(self, job: list[InHand]) -> Mapping[str, BaseException | str]:
        messages = [held.message for held in job]
        try:
            said = self.handler(messages if self.options.batch else messages[0])
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is for the record of its message
            level = logging.INFO if isinstance(error, Retry) else logging.WARNING  # the one is meant, the other is not
            log.log(level, "event=handler_failed topic=%s id=%s error=%r", self.options.topic, messages[0].id, error)
            return all_failed(job, error)
        return said if self.options.batch and isinstance(said, Mapping) else {}

    # Acks and leases

    def _ack_all(self) -> None:
        while True:
            with self._lock:
                while (due := self._state.acks_due_s()) is None or due > time.monotonic():
                    if self._ended.is_set():
                        return
                    self._acks.wait(None if due is None else due - time.monotonic())
            for acks in self._take_acks():
                self._send_acks(acks, time.monotonic() + self.options.ttr)

    def _take_acks(self) -> list[AckList]:
        with self._lock:
            return self._state.take_acks()

    def _send_acks(self, acks: AckList, deadline_s: float) -> None:
        """Send acks; if that fails for as long as a lease, they come to nothing, and the messages again."""
        terms = self.options
        call = calls.ack(terms.topic, acks.acks, group=terms.group, retry_delay=acks.delay, error=acks.error)
        try:
            call.parse(self.client.run(sending.exchange(call.since(time.monotonic()), self._rules, deadline_s, patient=True)))
        except ClientError as error:
            log.warning("event=ack_failed topic=%s count=%d error=%s", terms.topic, len(acks.acks), error)
        finally:
            with self._lock:
                self._state.acked(len(acks.acks))
                self._idle.notify_all()

    def _extend_all(self) -> None:
        while True:
            with self._lock:
                while (due := self._state.extend_due_s(time.monotonic())) is None or due > time.monotonic():
                    if self._ended.is_set():
                        return
                    self._leases.wait(None if due is None else max(0.0, due - time.monotonic()))
                asked_s = time.monotonic()
                ids = self._state.to_extend(asked_s)
                deadline_s = self._state.first_end_s(ids)
            self._extend(ids, asked_s, deadline_s)

    def _extend(self, ids: list[str], asked_s: float, deadline_s: float) -> None:
        terms = self.options
        call = calls.extend(terms.topic, ids, terms.ttr, group=terms.group)
        unknown: list[str] = []
        try:
            unknown = call.parse(
                self.client.run(sending.exchange(lambda _: call.request, self._rules, deadline_s, patient=True))
            ).unknown
        except TimedOut:  # these leases are over; nothing to note
            return
        except ClientError as error:
            log.warning("event=extend_failed topic=%s count=%d error=%s", terms.topic, len(ids), error)
            unknown = ids
        with self._lock:
            self._state.extended(ids, unknown, asked_s)
