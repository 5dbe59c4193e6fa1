"""Requests of a consumer as flows (fetch, ack, extend), and the failure of its handler. No clock, no threads. Pure.

They are patient: broken connections and restarts of the server are waited out. Both shells run them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from turtlemq.client import calls
from turtlemq.client.consumer_state import FULL_WAIT_S, AckList, ConsumerOptions, InHand, Retry, all_failed, error_text
from turtlemq.client.errors import BodyMismatch, ClientError, TimedOut
from turtlemq.client.fetched import Message
from turtlemq.client.sending import FOREVER, Flow, RetryPolicy, send_with_retries
from turtlemq.client.time_limit import limited

log = logging.getLogger("turtlemq.client")
AT_MOST_ONCE_WAIT_S = 2.0  # a long poll that acks on delivery must not be cut off by a stop, so it is short


def fetch(
    options: ConsumerOptions, count: int, policy: RetryPolicy, low: int | None = None, full_wait_s: float = FULL_WAIT_S
) -> Flow[tuple[list[Message], float]]:
    """Fetch up to `count` messages by long polling, `low` of low priority at most. Returns them and the time at which the answer
    arrived. While none of low priority may come, the poll ends after `full_wait_s`: there may be room by then."""
    wait_s = min(options.wait, AT_MOST_ONCE_WAIT_S) if options.at_most_once else options.wait
    call = calls.fetch(
        options.topic,
        group=options.group,
        max=count,
        wait=min(wait_s, full_wait_s) if low == 0 else wait_s,
        ttr=None if options.at_most_once else options.ttr,
        consumer=options.name,
        ack="auto" if options.at_most_once else "manual",
        wire=options.wire,
        low=low,
    )
    answer = yield from send_with_retries(lambda _: call.request, policy, FOREVER, patient=True)
    arrived_s = policy.now()
    return call.parse(answer), arrived_s


def send_acks(options: ConsumerOptions, acks: AckList, policy: RetryPolicy, deadline_s: float) -> Flow[int]:
    """Send an ack list. If that fails until the deadline, the messages come again when their leases end. Returns how many acks
    were late: another consumer has the message, and will have its own outcome."""
    call = calls.ack(options.topic, acks.acks, group=options.group, retry_delay=acks.delay, error=acks.error, lease=acks.lease)
    try:
        requests = call.requests_since(policy.now())
        late = call.parse((yield from send_with_retries(requests, policy, deadline_s, patient=True))).late
    except ClientError as error:
        log.warning("event=ack_failed topic=%s count=%d error=%s", options.topic, len(acks.acks), error)
        return 0
    if late:
        log.warning("event=ack_late topic=%s group=%s count=%d id=%s", options.topic, options.group, len(late), late[0])
    return len(late)


def extend(
    options: ConsumerOptions, ids: list[str], leases: list[str] | None, policy: RetryPolicy, deadline_s: float
) -> Flow[list[str] | None]:
    """Extend leases. Returns the ids whose leases are lost; None if the deadline, the end of the first lease, passed before."""
    call = calls.extend(options.topic, ids, options.ttr, group=options.group, lease=leases)
    try:
        answer = call.parse((yield from send_with_retries(lambda _: call.request, policy, deadline_s, patient=True)))
        return [*answer.unknown, *answer.late]
    except TimedOut:
        return None
    except ClientError as error:
        log.warning("event=extend_failed topic=%s count=%d error=%s", options.topic, len(ids), error)
        return ids


def limit(job: Sequence[InHand]) -> AbstractContextManager[None]:
    """Limit the calls that the handler of a job makes to the time that all its messages have."""
    return limited(lambda: min(item.limit_s() for item in job))


def messages_of(options: ConsumerOptions, job: Sequence[InHand]) -> tuple[list[Message], dict[str, BaseException | str]]:
    """The messages of a job for its handler, with bodies of the type `options.body`, and the errors of those that do not fit."""
    messages: list[Message] = []
    errors: dict[str, BaseException | str] = {}
    for message in [item.message for item in job]:
        try:
            if options.body is not None:
                message.value, message.data = message.as_type(options.body), None
            messages.append(message)
        except BodyMismatch as error:
            log.warning("event=body_mismatch topic=%s id=%s error=%s", options.topic, message.id, error)
            errors[message.id] = str(error)
    return messages, errors


def handler_raised(options: ConsumerOptions, job: Sequence[InHand], error: BaseException) -> dict[str, BaseException | str]:
    """Log the exception of a handler: a warning with its traceback, or a `Retry` without. Returns the error of every message."""
    if isinstance(error, Retry):
        log.info("event=handler_failed topic=%s id=%s error=%r", options.topic, job[0].message.id, error)
        return all_failed(job, error)
    log.warning("event=handler_failed topic=%s id=%s error=%r", options.topic, job[0].message.id, error, exc_info=error)
    return all_failed(job, error_text(error))  # once for all of them, and outside of any lock
