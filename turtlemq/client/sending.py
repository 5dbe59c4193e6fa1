"""Requests with retries, as generators without clock, randomness, sockets and threads ("sans-io"). Pure.

A `Flow` is a generator that yields its next step, `Send` or `Pause`. A shell (`sync`, `aio`) performs the step and sends the
answer back in, or throws the `ClientError` of the step in. So both shells follow one retry policy, and tests can play server and
clock. Batching of single puts is in `batching`, the encoding of messages in `outgoing`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from turtlemq.client.errors import BadAnswer, ClientError, ConnectionFailed, InvalidFireAt, Refused, TimedOut
from turtlemq.client.outgoing import MODES_COUNT, OutgoingMessage, produce_request
from turtlemq.client.results import Outcome, StoredIds
from turtlemq.client.wire import Answer, Request, Seconds, as_seconds, error_of

T = TypeVar("T")
RETRY_STATUSES = (408, 421, 429, 502, 503)  # temporary refusals; after a 503 of a cluster it may be done: ids make it safe
FOREVER = float("inf")
REQUEST_COUNT = 10_000  # messages in one request of `store_all`, unless all go together
REQUEST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Send:
    """A step: send this request and wait `timeout_s` for the answer. `budget_ms`: the remaining time, sent to the server."""

    request: Request
    timeout_s: float
    budget_ms: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A step: wait before the next one."""

    seconds: float


Flow = Generator[Send | Pause, Any, T]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the function that reads its answer.

    already_done: whether a refusal means that an earlier try succeeded, although its answer got lost.
    request_after: makes the request of a try so many seconds after the call, if it differs: a delay counts from the call.
    """

    request: Request
    parse: Callable[[Answer], T]
    already_done: Callable[[Refused], bool] = lambda _: False
    request_after: Callable[[float], Request] | None = None

    def requests_since(self, called_s: float) -> Callable[[float], Request]:
        """A function from the time of a try to its request, for `send_with_retries`."""
        return lambda now: self.request if self.request_after is None else self.request_after(now - called_s)


def delayed_call(delay: Seconds | None, make_request: Callable[[float | None], Request], parse: Callable[[Answer], T]) -> Call[T]:
    """A call whose delay counts from the call: each try subtracts the time that passed since."""
    delay_s = as_seconds(delay)
    if delay_s is None:
        return Call(make_request(None), parse)
    if not 0 <= delay_s < FOREVER:  # JSON would write it as null, which means no delay
        raise InvalidFireAt("delay is a number of seconds or a timedelta, 0 or more")
    return Call(make_request(delay_s), parse, request_after=lambda passed_s: make_request(max(0.0, delay_s - passed_s)))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Clock, random numbers, timeouts, and exponential backoff with full jitter.

    try_timeout_s limits each try, budget_s all tries together. A pause is a random part of base × 2^tries, at most
    `backoff_max_s`, so that clients that lost the server together do not come back together. Retry-After is added to it.
    """

    now: Callable[[], float]
    random: Callable[[], float]
    try_timeout_s: float = 10.0
    budget_s: float = 30.0
    backoff_base_s: float = 0.05
    backoff_max_s: float = 5.0

    def backoff_s(self, tries: int, retry_after_s: float | None = None) -> float:
        """The pause after so many tries.

        >>> policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0)
        >>> [policy.backoff_s(n) for n in (1, 2, 3, 20)], policy.backoff_s(1, retry_after_s=2)
        ([0.05, 0.1, 0.2, 5.0], 2.05)
        """
        limit_s = min(self.backoff_max_s, self.backoff_base_s * 2.0 ** min(tries - 1, 30))
        return (retry_after_s or 0.0) + self.random() * limit_s


def send_with_retries(
    make_request: Callable[[float], Request], policy: RetryPolicy, deadline_s: float, *, patient: bool = False
) -> Flow[Answer]:
    """Send until there is a success, a permanent refusal, or no time left. `make_request` gets the time of each try.

    patient: all errors of the server (5xx) are tried again, too. The deadline may be `FOREVER`.
    """
    tries = 0
    error: ClientError = TimedOut("the time was over before the first")
    pause_s = 0.0
    while True:
        now = policy.now()
        left_s = deadline_s - now
        if left_s <= pause_s:  # no time for a try after this pause
            raise TimedOut(f"no success within the time after {tries} tries; the last: {error}") from error
        if pause_s:
            yield Pause(pause_s)
            pause_s = 0.0
            continue
        request = make_request(now)
        tries += 1
        retry_after_s: float | None = None
        try:
            # without a budget, the server could work on after its caller has given up
            budget_ms = max(1, int(left_s * 1000)) if left_s < FOREVER else None
            answer: Answer = yield Send(request, min(policy.try_timeout_s + request.wait_s, left_s), budget_ms)
            if answer.status < 300:
                return answer
            error = error_of(answer)
            error.tries = tries
            if answer.status not in RETRY_STATUSES and not (patient and answer.status >= 500):
                raise error
            retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
        except ConnectionFailed as failed:
            error = failed
        pause_s = policy.backoff_s(tries, retry_after_s)


def run_call(call: Call[T], policy: RetryPolicy) -> Flow[T]:
    """Send a call and read its answer."""
    now = policy.now()
    try:
        answer = yield from send_with_retries(call.requests_since(now), policy, now + policy.budget_s + call.request.wait_s)
    except Refused as error:
        if error.tries < 2 or not call.already_done(error):
            raise
        answer = Answer(200, {}, b"")
    return call.parse(answer)


# Producing


class _Stored(msgspec.Struct):
    """The answer to a batch. An older server does not say which of the messages are duplicates."""

    ids: list[str]
    duplicates: int = 0
    duplicate_indexes: list[int] = []
    replaced_indexes: list[int] = []
    rescheduled_indexes: list[int] = []


_stored = msgspec.json.Decoder(_Stored)


def parse_stored(answer: Answer, is_first_try: bool) -> StoredIds:
    """The answer to a produce request. A duplicate in the answer to a later try may have been created by an earlier one."""
    try:
        stored = _stored.decode(answer.body)
    except msgspec.DecodeError as wrong:
        raise BadAnswer(f"a batch was answered with something else: {wrong}") from None
    known, count = False if is_first_try else None, len(stored.ids)
    if stored.replaced_indexes or stored.rescheduled_indexes:
        return _with_outcomes(stored, known)
    if not stored.duplicates or stored.duplicates == count:
        return StoredIds(stored.ids, [known if stored.duplicates else True] * count)
    if len(stored.duplicate_indexes) != stored.duplicates:
        return StoredIds(stored.ids, [None] * count)
    duplicates = set(stored.duplicate_indexes)
    return StoredIds(stored.ids, [known if i in duplicates else True for i in range(count)])


def _with_outcomes(stored: _Stored, known: bool | None) -> StoredIds:
    """The answer to a batch that has replaced or rescheduled messages. `known`: as `created` of messages that were not."""
    kinds: list[tuple[Outcome, list[int]]] = [
        ("duplicate", stored.duplicate_indexes),
        ("replaced", stored.replaced_indexes),
        ("rescheduled", stored.rescheduled_indexes),
    ]
    other = {i: kind for kind, indexes in kinds for i in indexes}
    created = [known if i in other else True for i in range(len(stored.ids))]
    outcomes = [None if new is None else other.get(i, "created") for i, new in enumerate(created)]
    return StoredIds(stored.ids, created, outcomes)


def store_batch(
    topic: str, batch: Sequence[OutgoingMessage], policy: RetryPolicy, deadline_s: float | None = None
) -> Flow[StoredIds]:
    """Store a batch in one request: all of it or nothing. Without a deadline it takes at most the budget of the policy."""
    end_s, tries = policy.now() + policy.budget_s if deadline_s is None else deadline_s, 0

    def request(now_s: float) -> Request:
        nonlocal tries
        tries += 1
        return produce_request(topic, batch, now_s)

    answer = yield from send_with_retries(request, policy, end_s)
    return parse_stored(answer, tries == 1)


def store_all(topic: str, batch: Sequence[OutgoingMessage], policy: RetryPolicy, *, together: bool) -> Flow[StoredIds]:
    """Store a list of any length, in one request if `together`. Returns its ids.

    An error has the `index` of the bad message in the list, and `stored`: how many messages earlier requests have stored.
    """
    ids = StoredIds()
    count = MODES_COUNT if any(message.if_exists for message in batch) else REQUEST_COUNT
    for part in [batch] if together and batch else split_batch(batch, count, REQUEST_BYTES):
        try:
            stored = yield from store_batch(topic, part, policy)
        except ClientError as error:
            out = error.at(None if error.index is None else error.index + len(ids))
            out.details["stored"] = len(ids)
            raise out from error
        ids += stored
        ids.created += stored.created
        ids.outcomes += stored.outcomes
    return ids


def split_batch(batch: Sequence[OutgoingMessage], count: int, size: int) -> list[Sequence[OutgoingMessage]]:
    """A batch cut into requests of at most `count` messages and `size` bytes. A larger message goes alone.

    >>> sizes = {"a": 0, "b": 500, "c": 0, "d": 0}
    >>> batch = [OutgoingMessage(id_, bytes(size)) for id_, size in sizes.items()]
    >>> [len(part) for part in split_batch(batch, 2, 600)]
    [1, 1, 2]
    """
    parts: list[Sequence[OutgoingMessage]] = []
    start, bytes_ = 0, 0
    for i, message in enumerate(batch):
        if i > start and (i - start >= count or bytes_ + message.size > size):
            parts.append(batch[start:i])
            start, bytes_ = i, 0
        bytes_ += message.size
    return [*parts, batch[start:]] if len(batch) > start else parts
