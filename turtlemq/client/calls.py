"""Calls of a client: consuming and messages, each as a request and a parser of its answer. Pure.

`Client` and `AsyncClient` have a method for each. Calls about topics are in `topic_calls`, about dead letters in `dead_calls`,
about one message and the events of a topic in `past_calls`; produce requests in `outgoing`.

The examples run as doctests, each with a `client` of an empty server; with an `AsyncClient`, each call has an `await`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from msgspec import Raw, Struct

from turtlemq.client.errors import Conflict, Refused
from turtlemq.client.fetched import Message, parse_fetched
from turtlemq.client.outgoing import outgoing_message
from turtlemq.client.results import (
    Acked,
    Cancelled,
    Extended,
    FoundMessage,
    MessagePage,
)
from turtlemq.client.sending import Call, delayed_call
from turtlemq.client.wire import (
    BSON,
    JSON,
    Answer,
    Request,
    Seconds,
    Time,
    json_request,
    list_of_ids,
    parser_of,
    path,
    seconds_of,
    to_json,
    to_ms,
    without_none,
)

T = TypeVar("T")
GROUP = "default"


class _Found(Struct):
    found: list[FoundMessage]


class _Due(Struct):
    due_ms: int


_parse_acked = parser_of(Acked)
_parse_extended = parser_of(Extended)
_parse_cancelled = parser_of(Cancelled)
_parse_page = parser_of(MessagePage)
_parse_due = parser_of(_Due)
_parse_found = parser_of(_Found)


# Consuming


def fetch(
    topic: str,
    *,
    group: str = GROUP,
    max: int = 100,  # noqa: A002 - the contract's word
    wait: Seconds = 0.0,
    ttr: Seconds | None = None,
    consumer: str = "",
    ack: Literal["manual", "auto"] = "manual",
    wire: Literal["json", "bson"] = "json",
    low: int | None = None,
) -> Call[list[Message]]:
    """Lease messages that are ready, or become ready within `wait` seconds. `ack="auto"` acks them on delivery: at most once.
    `low`: how many of them may be of low priority.

    >>> client.put("jobs", {"work": 1}, id="j1")
    'j1'
    >>> [(m.id, m.body, m.attempt) for m in client.fetch("jobs", wait=5, ttr=60)]
    [('j1', {'work': 1}, 1)]
    """
    wait_s = seconds_of("wait", wait) or 0.0
    fields = without_none(max=max, wait=wait_s, ttr=seconds_of("ttr", ttr), consumer=consumer or None, ack=ack, low=low)
    accept = BSON if wire == "bson" else JSON
    at_once = to_json({**fields, "wait": 0})
    request = Request(
        "POST", path(topic, "groups", group, "fetch"), to_json(fields), accept=accept, wait_s=wait_s, at_once=at_once
    )

    def parse(answer: Answer) -> list[Message]:
        out = parse_fetched(answer)
        for message in out:
            message.topic, message.group = topic, group
        return out

    return Call(request, parse)


def ack(
    topic: str,
    acks: Sequence[str],
    *,
    group: str = GROUP,
    retry_delay: Seconds | None = None,
    error: str | None = None,
    lease: str | Sequence[str] | None = None,
) -> Call[Acked]:
    """Acknowledge a list of ids, `-` before each that failed; `retry_delay` and `error` apply to the failed ones. `lease`: the
    `lease` of the messages, one for all or one for each; a message that another consumer holds by now is left alone.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j1"], lease="of-another-fetch")
    Acked(acked=0, failed=0, dead=0, unknown=[], late=['j1'])
    >>> client.ack("jobs", ["j1", "missing"])
    Acked(acked=1, failed=0, dead=0, unknown=['missing'], late=[])
    """
    target, ids = path(topic, "groups", group, "ack"), list_of_ids(acks)

    def request(delay: float | None) -> Request:
        options = without_none(retry_delay=delay, error=error, lease=_lease(lease))
        request = json_request(target, {"acks": ids, **options} if options else ids)
        return replace(request, ids=[id_.removeprefix("-") for id_ in ids]) if _is_of_one_place(lease) else request

    return delayed_call(retry_delay, request, _parse_acked)


def fail(
    topic: str,
    ids: Sequence[str],
    *,
    group: str = GROUP,
    retry_delay: Seconds | None = None,
    error: str | None = None,
    lease: str | Sequence[str] | None = None,
) -> Call[Acked]:
    """Report messages as failed: they come again after the topic's back-off, or after `retry_delay`, until their attempts are
    used up. `error` is kept with them. `lease`: as for `ack`.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.fail("jobs", ["j1"], error="no such customer", retry_delay=60).failed
    1
    """
    acks = [f"-{id_}" for id_ in list_of_ids(ids)]
    return ack(topic, acks, group=group, retry_delay=retry_delay, error=error, lease=lease)


def extend(
    topic: str,
    ids: Sequence[str],
    ttr: Seconds | None = None,
    *,
    group: str = GROUP,
    lease: str | Sequence[str] | None = None,
) -> Call[Extended]:
    """Extend the leases of these messages to `ttr` seconds from now. `lease`: as for `ack`.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.extend("jobs", ["j1", "missing"], 60)
    Extended(extended=1, unknown=['missing'], late=[])
    """
    fields = without_none(ids=list_of_ids(ids), ttr=seconds_of("ttr", ttr), lease=_lease(lease))
    request = json_request(path(topic, "groups", group, "extend"), fields)
    return Call(replace(request, ids=fields["ids"]) if _is_of_one_place(lease) else request, _parse_extended)


def _is_of_one_place(lease: str | Sequence[str] | None) -> bool:
    """Whether leases are such as one process gives: that of a fetch from several partitions has dots."""
    return not any("." in one for one in ([lease] if isinstance(lease, str) else lease or ()))


def _lease(given: str | Sequence[str] | None) -> str | list[str] | None:
    return given if given is None or isinstance(given, str) else list(given)


# Messages


def find(id: str) -> Call[list[FoundMessage]]:  # noqa: A002 - the contract's word
    """The topics that know an id, with its state in each. Only topics that the token may read.

    >>> _ = client.put("jobs", {"work": 1}, id="j1", due=4_000_000_000_000)
    >>> client.find("j1")
    [FoundMessage(topic='jobs', id='j1', state='sleep', due_ms=4000000000000, next_ms=None)]
    """
    return Call(Request("GET", f"/v1/find?{urlencode({'id': id})}"), lambda answer: _parse_found(answer).found)


def cancel(topic: str, id: str) -> Call[None]:  # noqa: A002 - the contract's word
    """Cancel a message that is not fetched yet. Otherwise a `Conflict` with its `state`.

    >>> _ = client.put("jobs", b"later", id="j2", delay=3600)
    >>> client.cancel("jobs", "j2")
    >>> client.get("jobs", "j2").state
    'cancelled'
    """
    return Call(Request("DELETE", path(topic, "messages", id), ids=[id]), lambda answer: None, _is_cancelled)


def _is_cancelled(error: Refused) -> bool:
    return isinstance(error, Conflict) and error.state == "cancelled"


def cancel_many(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    due_from: Time | None = None,
    due_to: Time | None = None,
) -> Call[Cancelled]:
    """Cancel by ids, or all sleepers that are due in a range of times.

    >>> _ = client.put("jobs", b"later", id="j1", delay=3600)
    >>> client.cancel_many("jobs", ["j1", "missing"])
    Cancelled(cancelled=1, missed={'missing': 'unknown'})
    """
    fields = without_none(ids=None if ids is None else list_of_ids(ids), due_from_ms=to_ms(due_from), due_to_ms=to_ms(due_to))
    return Call(json_request(path(topic, "cancel"), fields), _parse_cancelled)


def reschedule(
    topic: str,
    id: str,  # noqa: A002 - the contract's word
    *,
    delay: Seconds | None = None,
    due: Time | None = None,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> Call[int]:
    """Change the due time, the headers or the body (`body=…`) of a sleeper. Returns its due time in epoch milliseconds.

    >>> _ = client.put("jobs", {"n": 1}, id="j3", delay=3600)
    >>> client.reschedule("jobs", "j3", due=4_000_000_000_000, body={"n": 2})
    4000000000000
    >>> client.get("jobs", "j3").body
    {'n': 2}
    """
    if body.keys() - {"body"}:
        raise TypeError(f"reschedule has no {', '.join(body.keys() - {'body'})}")
    fields = without_none(due_ms=to_ms(due), headers=None if headers is None else dict(headers))
    if body:
        out = outgoing_message(body["body"], id)
        fields |= {"body": Raw(out.body)} if out.is_json else {"body_base64": out.body}
    target = path(topic, "messages", id)
    return delayed_call(
        delay,
        lambda left: json_request(target, fields | without_none(delay=left), "PATCH"),
        lambda answer: _parse_due(answer).due_ms,
    )


def retry(topic: str, id: str, *, group: str | None = None) -> Call[None]:  # noqa: A002 - the contract's word
    """Try a message again now that waits for its next attempt, or is dead: in one group, or in each of which this is so.
    Otherwise a `Conflict` with its `state`.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> _ = client.fail("jobs", ["j1"], error="no connection", retry_delay=3600)
    >>> client.retry("jobs", "j1")
    >>> [(m.id, m.attempt) for m in client.fetch("jobs", wait=5)]
    [('j1', 2)]
    """
    request = replace(json_request(path(topic, "messages", id, "retry"), without_none(group=group)), ids=[id])
    return Call(request, lambda answer: None, _is_ready)


def _is_ready(error: Refused) -> bool:
    return isinstance(error, Conflict) and error.state == "ready"


def browse_page(
    topic: str,
    *,
    state: str = "sleep",
    from_: Time | None = None,
    to: Time | None = None,
    prefix: str | None = None,
    newest: bool = False,
    limit: int = 1000,
    cursor: str | None = None,
) -> Call[MessagePage]:
    """One page of messages by time, backwards if `newest`; `browse` goes through all pages. `prefix`: how their ids begin.

    >>> _ = client.put("jobs", b"later", id="j3", delay=3600)
    >>> [message.id for message in client.browse_page("jobs").messages]
    ['j3']
    """
    filters = {"state": state, "from_ms": to_ms(from_), "to_ms": to_ms(to), "prefix": prefix}
    order = "true" if newest else None
    return Call(Request("GET", path(topic, "messages", **filters, newest=order, limit=limit, cursor=cursor)), _parse_page)
