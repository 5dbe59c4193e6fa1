"""Calls about dead letters, each as a request and a parser of its answer: methods of `Client` and `AsyncClient`. Pure.

The examples run as doctests, each with a `client` of an empty server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from turtlemq.client.errors import InvalidArgument
from turtlemq.client.results import DeadLetterPage, Summary
from turtlemq.client.sending import Call, delayed_call
from turtlemq.client.wire import Request, Seconds, Time, json_request, list_of_ids, parser_of, path, to_ms, without_none


class _Count(Struct):
    requeued: int = 0
    deleted: int = 0


_parse_page = parser_of(DeadLetterPage)
_parse_summary = parser_of(Summary)
_parse_count = parser_of(_Count)


def _filter(group: str | None, from_: Time | None, to: Time | None, error: str | None) -> dict[str, Any]:
    return without_none(group=group, from_ms=to_ms(from_), to_ms=to_ms(to), error=error)


def _request(topic: str, verb: str, ids: Sequence[str] | None, everything: bool, **fields: Any) -> Request:
    """A request on dead letters by ids, or by a filter taken out of `fields`."""
    filters: dict[str, Any] = {name: fields.pop(name) for name in ("from_ms", "to_ms", "error") if name in fields}
    if ids is not None:
        if filters:
            raise InvalidArgument("give ids, or from_, to and error")
        return json_request(path(topic, "dead", verb), {"ids": list_of_ids(ids), **fields})
    if "group" in fields:
        filters["group"] = fields.pop("group")
    if not filters and not everything:
        raise InvalidArgument(f"say which dead letters to {verb}: ids, group, from_, to, error, or everything=True")
    return json_request(path(topic, "dead", verb), {"filter": filters, **fields})


def dead_page(
    topic: str,
    *,
    group: str | None = None,
    from_: Time | None = None,
    to: Time | None = None,
    error: str | None = None,
    newest: bool = False,
    limit: int = 1000,
    cursor: str | None = None,
) -> Call[DeadLetterPage]:
    """One page of dead letters in the order of their deaths, or the last ones first if `newest`; `dead` goes through all pages.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> [(letter.id, letter.error, letter.body) for letter in client.dead_page("jobs").messages]
    [('j4', 'no such customer', b'?')]
    """
    filters = _filter(group, from_, to, error) | {"newest": "true" if newest else None}
    return Call(Request("GET", path(topic, "dead", **filters, limit=limit, cursor=cursor)), _parse_page)


def dead_summary(topic: str, *, group: str | None = None, from_: Time | None = None, to: Time | None = None) -> Call[Summary]:
    """Dead letters counted by error.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.dead_summary("jobs")
    Summary(total=1, errors={'no such customer': 1})
    """
    return Call(Request("GET", path(topic, "dead", "summary", **_filter(group, from_, to, None))), _parse_summary)


def requeue_dead(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    everything: bool = False,
    group: str | None = None,
    from_: Time | None = None,
    to: Time | None = None,
    error: str | None = None,
    delay: Seconds | None = None,
    due: Time | None = None,
    per_s: float | None = None,
    reset_attempts: bool = True,
    expires: Time | None = None,
) -> Call[int]:
    """Let dead letters sleep and be delivered again, spread to `per_s` a second, and expire at `expires` (None: never). Returns
    their number.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.requeue_dead("jobs", ["j4"], delay=3600)
    1
    """
    fields = without_none(due_ms=to_ms(due), per_s=per_s, reset_attempts=reset_attempts, expires_ms=to_ms(expires))
    fields |= _filter(group, from_, to, error)
    return delayed_call(
        delay,
        lambda left: _request(topic, "requeue", ids, everything, **fields, **without_none(delay=left)),
        lambda answer: _parse_count(answer).requeued,
    )


def delete_dead(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    everything: bool = False,
    group: str | None = None,
    from_: Time | None = None,
    to: Time | None = None,
    error: str | None = None,
) -> Call[int]:
    """Delete dead letters. Returns their number.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.delete_dead("jobs", everything=True)
    1
    """
    request = _request(topic, "delete", ids, everything, **_filter(group, from_, to, error))
    return Call(request, lambda answer: _parse_count(answer).deleted)
