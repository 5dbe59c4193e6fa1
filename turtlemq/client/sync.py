"""Blocking client: every call as a method. Thread-safe: a program needs only one.

The requests themselves are in `calls`, retries in `sending`, connections in `pool`; the asyncio client is in `aio`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, ParamSpec, Self, TypeVar, Unpack

from turtlemq.client import (
    calls,
    client_calls,
    dead_calls,
    operator_calls,
    past_calls,
    schedule_calls,
    sending,
    topic_calls,
    tracing,
    transaction_calls,
)
from turtlemq.client.arguments import describe_method
from turtlemq.client.cancel import Guarded, current_token
from turtlemq.client.errors import ClientError
from turtlemq.client.options import Options, Sink, new_id, outgoing_messages
from turtlemq.client.outgoing import IfExists, MessageFields, outgoing_message
from turtlemq.client.pool import ConnectionCallback, Pool
from turtlemq.client.results import DeadLetter, MessageView, StoredId, StoredIds, Transacted
from turtlemq.client.retry_budget import RETRIES
from turtlemq.client.schedule_results import Schedule
from turtlemq.client.sending import Call, Flow, Pause, Send
from turtlemq.client.wire import Request, Seconds, error_of, path

T = TypeVar("T")
P = ParamSpec("P")


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method that sends a call and waits for its result."""

    @functools.wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(sending.run_call(build(*args, **kwargs), self.options.policy))

    describe_method(method, build)
    return method


class Client:
    """A client of one server, or of several: after a failure it asks the next.

    url: the address of the server, or several; default TURTLEMQ_URL, else this machine. token: default TURTLEMQ_TOKEN.
    cacert: a file with the certificates to trust, default TURTLEMQ_CACERT. timeout: seconds for a call with all its tries.
    try_timeout: seconds for each try; a long poll adds its wait. retries: in 10 s, beside a fifth of the calls; then errors
    are raised at once.

    >>> client.put("orders", {"close": 17}, id="order-17")
    'order-17'
    >>> [message.body for message in client.fetch("orders", wait=5)]
    [{'close': 17}]
    >>> client.ack("orders", ["order-17"]).acked
    1
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        cacert: str | None = None,
        timeout: float = 30.0,
        try_timeout: float = 10.0,
        user_agent: str | None = None,
        retries: int = RETRIES,
    ) -> None:
        self.options = Options.from_arguments(url, token, cacert, timeout, try_timeout, user_agent, retries)
        self.pool = Pool(self.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections. Later calls raise `Closed`."""
        self.pool.close()

    def chooser(self, topic: str) -> sending.Choose | None:
        """For producers: a function from ids to partitions of a topic; None if it has none, as far as is known."""
        return self.pool.partitions.chooser(topic)

    def run(
        self,
        flow: Flow[T],
        *,
        sleep: Callable[[float], object] = time.sleep,
        on_connection: ConnectionCallback | None = None,
    ) -> T:
        """Perform the steps of a flow. Returns its result."""
        if (token := current_token()) is not None:
            on_connection, sleep = Guarded(token, on_connection), token.sleep
        try:
            step = next(flow)
            while True:
                if token is not None:
                    token.check()
                try:
                    answer = sleep(step.seconds) if isinstance(step, Pause) else self.pool.send(step, on_connection=on_connection)
                except ClientError as error:
                    if token is not None:
                        token.check()
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    # Producing

    def put(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002 - the contract's word
        **fields: Unpack[MessageFields],
    ) -> StoredId:
        """Store one message durably. Returns its id, whose `created` is False if the topic knew it already, and whose `outcome`
        tells whether it was replaced. A `Producer` sends single puts in batches, which is much faster.

        body: bytes, or a JSON value, a dataclass, a pydantic model. fields: `delay` (seconds from now, or a timedelta) or `due`
        (an aware datetime or epoch milliseconds), `ttr`, `priority`, `expires`, `headers`, `if_exists`; see `MessageFields`.

        >>> client.put("orders", {"close": 17}, id="order-17").created
        True
        >>> client.put("orders", {"close": 17}, id="order-17").created
        False
        >>> client.put("orders", {"close": 17}, id="order-17", delay=60, if_exists="replace").outcome
        'replaced'
        """
        now = self.options.policy.now()
        out = outgoing_message(body, new_id() if id is None else id, put_s=now, **fields)
        with tracing.sending(topic, [out]):
            stored = self.run(sending.store_batch(topic, [out], self.options.policy))
        return StoredId(stored[0], stored.created[0], stored.outcomes[0])

    def put_many(
        self, topic: str, messages: Iterable[Any], *, together: bool = False, if_exists: IfExists | None = None
    ) -> StoredIds:
        """Store many messages, bodies or `NewMessage`s, and return their ids; `created` of that list says which are new.

        They go in requests of 16 MiB and 10,000 messages, or 1,000 if one has `if_exists`; with `together` in a single one: all
        are stored, or none. An error has the `index` of the bad message, and `stored`, the number of messages that earlier
        requests have stored. `if_exists`: of the messages that do not say it.

        >>> client.put_many("orders", [b"a", NewMessage(body={"b": 1}, id="b", delay=60)])[1]
        'b'
        """
        batch = outgoing_messages(messages, self.options.policy.now(), if_exists)
        with tracing.sending(topic, batch):
            return self.run(sending.store_all(topic, batch, self.options.policy, together=together, choose=self.chooser(topic)))

    def transaction(
        self,
        topic: str,
        put: Iterable[Any] = (),
        *,
        cancel: Sequence[str] = (),
        reschedule: Mapping[str, Seconds | datetime] | None = None,
        conditions: Mapping[str, str] | None = None,
    ) -> Transacted:
        """Put messages, cancel and reschedule sleepers of a topic: all of it, or nothing. Returns the outcome.

        reschedule: by id, an aware datetime or a delay. conditions: by id, the state that the message must be in, `unknown` for
        an id that the topic does not know. A `Conflict` has in its `details` the index of the first `condition` that is not met,
        and the `state`. After a lost answer it may mean that an earlier try was done.

        >>> _ = client.put("orders", b"remind", id="reminder-17", delay=3600)
        >>> client.transaction("orders", [NewMessage(body=b"paid", id="paid-17")], cancel=["reminder-17"]).cancelled
        1
        >>> client.transaction("orders", [b"again"], conditions={"reminder-17": "sleep"})
        Traceback (most recent call last):
        turtlemq.client.errors.Conflict: condition 0: 'reminder-17' is in state cancelled, not sleep; nothing was done
        """
        now = self.options.policy.now()
        batch = outgoing_messages(put, now)
        call = transaction_calls.transaction(topic, batch, cancel, reschedule or {}, conditions or {}, now)
        return self.run(sending.run_call(call, self.options.policy))

    # Calls

    fetch = _method(calls.fetch)
    ack = _method(calls.ack)
    fail = _method(calls.fail)
    extend = _method(calls.extend)
    get = _method(past_calls.get)
    find = _method(calls.find)
    cancel = _method(calls.cancel)
    cancel_many = _method(calls.cancel_many)
    reschedule = _method(calls.reschedule)
    retry = _method(calls.retry)
    browse_page = _method(calls.browse_page)
    events = _method(past_calls.events)
    replay = _method(past_calls.replay)
    replays = _method(past_calls.replays)
    replay_state = _method(past_calls.replay_state)
    cancel_replay = _method(past_calls.cancel_replay)
    forecast = _method(topic_calls.forecast)
    topics = _method(topic_calls.topics)
    topic = _method(topic_calls.topic)
    stats = _method(topic_calls.stats)
    configure = _method(topic_calls.configure)
    compact = _method(topic_calls.compact)
    drop_topic = _method(topic_calls.drop_topic)
    place_group = _method(topic_calls.place_group)
    group = _method(topic_calls.group)
    drop_group = _method(topic_calls.drop_group)
    pause = _method(operator_calls.pause)
    resume = _method(operator_calls.resume)
    audit = _method(operator_calls.audit)
    tenants = _method(operator_calls.tenants)
    clock = _method(operator_calls.clock)
    move_clock = _method(operator_calls.move_clock)
    put_schedule = _method(schedule_calls.put_schedule)
    get_schedule = _method(schedule_calls.get_schedule)
    schedule_page = _method(schedule_calls.schedule_page)
    next_times = _method(schedule_calls.next_times)
    trigger_schedule = _method(schedule_calls.trigger_schedule)
    pause_schedule = _method(schedule_calls.pause_schedule)
    resume_schedule = _method(schedule_calls.resume_schedule)
    drop_schedule = _method(schedule_calls.drop_schedule)
    dead_page = _method(dead_calls.dead_page)
    dead_summary = _method(dead_calls.dead_summary)
    requeue_dead = _method(dead_calls.requeue_dead)
    delete_dead = _method(dead_calls.delete_dead)
    register_client = _method(client_calls.register_client)
    registered_clients = _method(client_calls.registered_clients)
    beat_client = _method(client_calls.beat_client)
    rotate_secret = _method(client_calls.rotate_secret)
    drop_client = _method(client_calls.drop_client)

    def browse(self, topic: str, **filters: Any) -> Iterator[MessageView]:
        """All sleepers by due time, fetched page by page; arguments as of `browse_page`.

        >>> _ = client.put_many("orders", [NewMessage(body=i, id=str(i), delay=60 + i) for i in range(5)])
        >>> [message.id for message in client.browse("orders", limit=2)]
        ['0', '1', '2', '3', '4']
        """
        cursor: str | None = ""
        while cursor is not None:
            page = self.browse_page(topic, **filters, cursor=cursor or None)
            yield from page.messages
            cursor = page.cursor

    def schedules(self, topic: str, *, limit: int = 1000) -> Iterator[Schedule]:
        """All schedules, those that fire next first, fetched in pages of `limit`."""
        cursor: str | None = ""
        while cursor is not None:
            page = self.schedule_page(topic, limit=limit, cursor=cursor or None)
            yield from page.schedules
            cursor = page.cursor

    def dead(self, topic: str, **filters: Any) -> Iterator[DeadLetter]:
        """All dead letters in the order of their deaths, fetched page by page; arguments as of `dead_page`."""
        cursor: str | None = ""
        while cursor is not None:
            page = self.dead_page(topic, **filters, cursor=cursor or None)
            yield from page.messages
            cursor = page.cursor

    def export_dead(self, topic: str, file: BinaryIO) -> None:
        """Write all dead letters into a file, a JSON object a line. They are streamed, so memory stays small; not tried again."""
        step = Send(Request("GET", path(topic, "dead", "export")), self.options.policy.try_timeout_s, None)
        answer = self.pool.send(step, sink=Sink(file))
        if answer.status >= 300:
            raise error_of(answer)
