"""Requests with retries, as generators without clock, randomness, sockets and threads ("sans-io"). Pure.

A `Flow` is a generator that yields its next step, `Send` or `Pause`. A shell (`sync`, `aio`) performs the step and sends the
answer back in, or throws the `ClientError` of the step in. So both shells follow one retry policy, and tests can play server and
clock. Batching of single puts is in `batching`, the encoding of messages in `outgoing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from turtlemq.client.errors import BadAnswer, ClientError, ConnectionFailed, InvalidFireAt, Refused, TimedOut
from turtlemq.client.outgoing import MODES_COUNT, OutgoingMessage, produce_request
from turtlemq.client.results import Outcome, StoredIds
from turtlemq.client.retry_budget import Allowance, RetryBudget
from turtlemq.client.time_limit import time_limit
from turtlemq.client.wire import Answer, Request, Seconds, as_seconds, error_of

T = TypeVar("T")
RETRY_STATUSES = (408, 421, 429, 502, 503)  # temporary refusals; after a 503 of a cluster it may be done: ids make it safe
FREE_CODES = ("NOT_LEADER", "NO_LEADER")  # refusals of a cluster that elects: a retry costs nothing of the budget
FOREVER = float("inf")
TRY_S_MIN = 0.01  # a try with less time is not worth sending
REQUEST_COUNT = 10_000  # messages in one request of `store_all`, unless all go together
REQUEST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Send:
    """A step: send this request and wait `timeout_s` for the answer. `budget_ms`: that time, sent to the server."""

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

    try_timeout_s limits each try, budget_s all tries together. A try gets the part `alpha` of the time until then: another
    one fits. A pause is a random part of base × 2^tries, at most `backoff_max_s`, so that clients that lost the
    server together do not come back together. Retry-After is added to it. `retries`: the budget of all calls of a client.
    """

    now: Callable[[], float]
    random: Callable[[], float]
    try_timeout_s: float = 10.0
    budget_s: float = 30.0
    backoff_base_s: float = 0.05
    backoff_max_s: float = 5.0
    alpha: float = 0.7
    retries: RetryBudget | None = None

    def backoff_s(self, tries: int, retry_after_s: float | None = None) -> float:
        """The pause after so many tries.

        >>> policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0)
        >>> [policy.backoff_s(n) for n in (1, 2, 3, 20)], policy.backoff_s(1, retry_after_s=2)
        ([0.05, 0.1, 0.2, 5.0], 2.05)
        """
        return (retry_after_s or 0.0) + self.random() * self._pause_s_max(tries)

    def _pause_s_max(self, tries: int) -> float:
        return min(self.backoff_max_s, self.backoff_base_s * 2.0 ** min(tries - 1, 30))

    def timeout_s(self, left_s: float, tries: int, wait_s: float = 0.0) -> float:
        """The timeout of a try with `left_s` left, after `tries` others. All of it, if a pause and a further try would not fit
        behind. `wait_s`: for which the server may hold the answer back.

        >>> policy = RetryPolicy(now=lambda: 0.0, random=lambda: 1.0)
        >>> [policy.timeout_s(left_s, 0) for left_s in (30, 10, 0.1)], policy.timeout_s(30, 0, wait_s=20)
        ([10.0, 7.0, 0.1], 27.0)
        """
        share_s = self.alpha * max(0.0, left_s - wait_s)
        if left_s - wait_s - share_s < self._pause_s_max(tries + 1) + TRY_S_MIN:
            share_s = left_s - wait_s
        return min(left_s, wait_s + min(self.try_timeout_s, share_s)) if left_s > wait_s else left_s


def send_with_retries(
    make_request: Callable[[float], Request],
    policy: RetryPolicy,
    deadline_s: float,
    *,
    patient: bool = False,
    probing: bool = False,
) -> Flow[Answer]:
    """Send until there is a success, a permanent refusal, or no time left. `make_request` gets the time of each try.

    Raises the last error, with `retries_exhausted`, when the retry budget is empty. The deadline may be `FOREVER`.
    patient: all errors of the server (5xx) are tried again, too, with or without a budget: for loops that send one at a time.
    probing: with an empty budget, go on as soon as no other such request is under way: for senders that may not give up.
    """
    allowance = Allowance(policy.retries, "go on" if patient else "probe" if probing else "give up", policy.random)
    try:
        return (yield from _tries(make_request, policy, deadline_s, allowance, patient=patient))
    finally:
        allowance.end()


def _tries(
    make_request: Callable[[float], Request], policy: RetryPolicy, deadline_s: float, allowance: Allowance, *, patient: bool
) -> Flow[Answer]:
    tries, is_free = 0, False
    error: ClientError = TimedOut("the time was over before the first")
    pause_s: float | None = 0.0
    while True:
        now = policy.now()
        left_s = deadline_s - now
        pause_s = pause_s or allowance.pause_s(now, not tries, is_free)
        if pause_s is None:
            error.retries_exhausted = True
            raise error
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
            timeout_s = policy.timeout_s(left_s, tries - 1, request.wait_s)
            # without a budget, the server could work on after its caller has given up
            budget_ms = max(1, int(timeout_s * 1000)) if left_s < FOREVER else None
            answer: Answer = yield Send(request, timeout_s, budget_ms)
            if answer.status < 300:
                return answer
            error = error_of(answer)
            error.tries = tries
            if answer.status not in RETRY_STATUSES and not (patient and answer.status >= 500):
                raise error
            retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
            is_free = error.code in FREE_CODES
        except ConnectionFailed as failed:
            error, is_free = failed, not failed.was_sent
        pause_s = policy.backoff_s(tries, retry_after_s)


def run_call(call: Call[T], policy: RetryPolicy) -> Flow[T]:
    """Send a call and read its answer."""
    now = policy.now()
    end_s = min(now + policy.budget_s + call.request.wait_s, time_limit())
    try:
        answer = yield from send_with_retries(call.requests_since(now), policy, end_s)
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


Choose = Callable[[Sequence[str]], Sequence[int]]  # the partitions of ids


def store_batch(
    topic: str,
    batch: Sequence[OutgoingMessage],
    policy: RetryPolicy,
    deadline_s: float | None = None,
    *,
    of_one_place: bool = False,
) -> Flow[StoredIds]:
    """Store a batch in one request: all of it or nothing. Without a deadline it takes at most the budget of the policy; with one
    it does not give up before. `of_one_place`: all lie in one partition."""
    end_s, tries = min(policy.now() + policy.budget_s, time_limit()) if deadline_s is None else deadline_s, 0

    def request(now_s: float) -> Request:
        nonlocal tries
        tries += 1
        return produce_request(topic, batch, now_s, of_one_place=of_one_place)

    answer = yield from send_with_retries(request, policy, end_s, probing=deadline_s is not None)
    return parse_stored(answer, tries == 1)


def rows_by_place(ids: Sequence[str], choose: Choose | None) -> list[Sequence[int]]:
    """The rows of ids that lie in one partition each; all of them in one list without partitions.

    >>> rows_by_place(["a", "bb", "c"], lambda ids: [len(id_) for id_ in ids]), rows_by_place(["a", "bb"], None)
    ([[0, 2], [1]], [range(0, 2)])
    """
    if choose is None:
        return [range(len(ids))]
    found = defaultdict[int, list[int]](list)
    for row, partition in enumerate(choose(ids)):
        found[partition].append(row)
    return list(found.values())


def store_all(
    topic: str, batch: Sequence[OutgoingMessage], policy: RetryPolicy, *, together: bool, choose: Choose | None = None
) -> Flow[StoredIds]:
    """Store a list of any length, in one request if `together`; else in one at least for each partition that `choose` names.
    Returns its ids.

    An error has the `index` of the bad message in the list, and `stored`: how many messages earlier requests have stored.
    """
    groups = rows_by_place([message.id for message in batch], None if together else choose)
    if len(groups) == 1:
        return (yield from _store_all(topic, batch, policy, together=together, of_one_place=choose is not None and not together))
    stored, places = StoredIds(), [0] * len(batch)  # `places`: of each message in `stored`
    for rows in groups:
        for place, row in enumerate(rows, len(stored)):
            places[row] = place
        try:
            part = yield from _store_all(topic, [batch[row] for row in rows], policy, together=False, of_one_place=True)
        except ClientError as error:
            error.details["stored"] = len(stored) + error.details.get("stored", 0)
            raise error.at(None if error.index is None else rows[error.index]) from error
        if len(part) != len(rows):
            raise BadAnswer(f"{len(rows)} messages were answered with {len(part)} ids")
        _append(stored, part)
    ids, created, outcomes = stored, stored.created, stored.outcomes
    return StoredIds([ids[at] for at in places], [created[at] for at in places], [outcomes[at] for at in places])


def _append(stored: StoredIds, part: StoredIds) -> None:
    stored += part
    stored.created += part.created
    stored.outcomes += part.outcomes


def _store_all(
    topic: str, batch: Sequence[OutgoingMessage], policy: RetryPolicy, *, together: bool, of_one_place: bool
) -> Flow[StoredIds]:
    ids = StoredIds()
    count = MODES_COUNT if any(message.if_exists for message in batch) else REQUEST_COUNT
    for part in [batch] if together and batch else split_batch(batch, count, REQUEST_BYTES):
        try:
            stored = yield from store_batch(topic, part, policy, of_one_place=of_one_place)
        except ClientError as error:
            out = error.at(None if error.index is None else error.index + len(ids))
            out.details["stored"] = len(ids)
            raise out from error
        _append(ids, stored)
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
