"""Every call of a client beside produce, as a request and a way to read the answer: methods of `Client` and `AsyncClient`. Pure.

The examples run, each with a `client` of a server that is empty at first; an `AsyncClient` has an `await` before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from turtlemq.client.errors import BadAnswer, Conflict, InvalidArgument, Refused, UnknownGroup, UnknownTopic
from turtlemq.client.results import (
    Acked,
    Cancelled,
    Compacted,
    DeadLetters,
    Extended,
    Forecast,
    Group,
    Look,
    Looks,
    Stats,
    Summary,
    Topic,
)
from turtlemq.client.sending import Call, delayed
from turtlemq.client.wire import BSON, JSON, Answer, Message, Request, from_json, outgoing, parse_fetched, path, to_json, to_ms

T = TypeVar("T")
GROUP = "default"


class _Topics(Struct):
    topics: list[Topic]


class _Due(Struct):
    due_ms: int


class _Count(Struct):
    requeued: int = 0
    deleted: int = 0


def _into(kind: type[T]) -> Callable[[Answer], T]:
    """Reads JSON answers of one kind."""
    decoder = msgspec.json.Decoder(kind)

    def parse(answer: Answer) -> T:
        try:
            return from_json(answer.body, decoder)
        except msgspec.DecodeError as wrong:
            raise BadAnswer(f"no {kind.__name__} in the answer: {wrong}") from None

    return parse


_acked, _extended, _cancelled, _look, _looks = _into(Acked), _into(Extended), _into(Cancelled), _into(Look), _into(Looks)
_letters, _topics, _topic, _group = _into(DeadLetters), _into(_Topics), _into(Topic), _into(Group)
_forecast, _summary, _compacted, _due, _count = _into(Forecast), _into(Summary), _into(Compacted), _into(_Due), _into(_Count)


def _post(target: str, value: Any, method: str = "POST") -> Request:
    return Request(method, target, to_json(value))


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# Consuming


def fetch(
    topic: str,
    *,
    group: str = GROUP,
    max: int = 100,  # noqa: A002 - the contract's word
    wait: float = 0.0,
    ttr: float | None = None,
    consumer: str = "",
    ack: Literal["manual", "auto"] = "manual",
    wire: Literal["json", "bson"] = "json",
) -> Call[list[Message]]:
    """Lease what is ready, or becomes ready within `wait` seconds. `ack="auto"` settles it at once: at most once.

    >>> client.put("jobs", {"work": 1}, id="j1")
    'j1'
    >>> [(m.id, m.body, m.attempt) for m in client.fetch("jobs", wait=5, ttr=60)]
    [('j1', {'work': 1}, 1)]
    """
    asked = _given(max=max, wait=wait, ttr=ttr, consumer=consumer or None, ack=ack)
    accept = BSON if wire == "bson" else JSON
    request = Request("POST", path(topic, "groups", group, "fetch"), to_json(asked), accept=accept, wait_s=wait)

    def parse(answer: Answer) -> list[Message]:
        out = parse_fetched(answer)
        for message in out:
            message.topic, message.group = topic, group
        return out

    return Call(request, parse)


def ack(
    topic: str, acks: Sequence[str], *, group: str = GROUP, retry_delay: float | None = None, error: str | None = None
) -> Call[Acked]:
    """Acknowledge a list of ids, `-` before each that failed; `retry_delay` and `error` are about these.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["j1", "nobody"])
    Acked(acked=1, failed=0, dead=0, unknown=['nobody'])
    """
    target, ids = path(topic, "groups", group, "ack"), list(acks)

    def request(delay: float | None) -> Request:
        more = _given(retry_delay=delay, error=error)
        return _post(target, {"acks": ids, **more} if more else ids)

    return delayed(retry_delay, request, _acked)


def extend(topic: str, ids: Sequence[str], ttr: float | None = None, *, group: str = GROUP) -> Call[Extended]:
    """Hold these for `ttr` more seconds from now on.

    >>> _ = client.put("jobs", b"work", id="j1")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.extend("jobs", ["j1", "nobody"], 60)
    Extended(extended=1, unknown=['nobody'])
    """
    return Call(_post(path(topic, "groups", group, "extend"), _given(ids=list(ids), ttr=ttr)), _extended)


# Messages


def get(topic: str, id: str) -> Call[Look]:  # noqa: A002 - the contract's word
    """Everything about one message.

    >>> _ = client.put("jobs", {"work": 1}, id="j1", delay=3600)
    >>> found = client.get("jobs", "j1")
    >>> found.state, found.body
    ('sleep', {'work': 1})
    """
    return Call(Request("GET", path(topic, "messages", id)), _look)


def cancel(topic: str, id: str) -> Call[None]:  # noqa: A002 - the contract's word
    """Cancel a message that nobody has fetched; else it is a `Conflict`, whose `state` says why.

    >>> _ = client.put("jobs", b"later", id="j2", delay=3600)
    >>> client.cancel("jobs", "j2")
    >>> client.get("jobs", "j2").state
    'cancelled'
    """
    return Call(Request("DELETE", path(topic, "messages", id)), lambda answer: None, _is_cancelled)


def _is_cancelled(error: Refused) -> bool:
    return isinstance(error, Conflict) and error.state == "cancelled"


def cancel_many(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    due_from: int | datetime | None = None,
    due_to: int | datetime | None = None,
) -> Call[Cancelled]:
    """Cancel by ids, or all that sleep until a time between two.

    >>> _ = client.put("jobs", b"later", id="j1", delay=3600)
    >>> client.cancel_many("jobs", ["j1", "nobody"])
    Cancelled(cancelled=1, missed={'nobody': 'unknown'})
    """
    given = _given(ids=None if ids is None else list(ids), due_from_ms=to_ms(due_from), due_to_ms=to_ms(due_to))
    return Call(_post(path(topic, "cancel"), given), _cancelled)


def reschedule(
    topic: str,
    id: str,  # noqa: A002 - the contract's word
    *,
    delay: float | None = None,
    due: int | datetime | None = None,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> Call[int]:
    """Change a sleeper: when it is due, its headers, its `body=…`. Returns when it is due, in epoch milliseconds.

    >>> _ = client.put("jobs", {"n": 1}, id="j3", delay=3600)
    >>> client.reschedule("jobs", "j3", due=4_000_000_000_000, body={"n": 2})
    4000000000000
    >>> client.get("jobs", "j3").body
    {'n': 2}
    """
    if body.keys() - {"body"}:
        raise TypeError(f"reschedule has no {', '.join(body.keys() - {'body'})}")
    given = _given(due_ms=to_ms(due), headers=None if headers is None else dict(headers))
    if body:
        made = outgoing(body["body"], id)
        given |= {"body": Raw(made.body)} if made.is_json else {"body_base64": made.body}
    target = path(topic, "messages", id)
    return delayed(delay, lambda left: _post(target, given | _given(delay=left), "PATCH"), lambda answer: _due(answer).due_ms)


def browse_page(
    topic: str,
    *,
    state: str = "sleep",
    from_: int | datetime | None = None,
    to: int | datetime | None = None,
    limit: int = 1000,
    cursor: str | None = None,
) -> Call[Looks]:
    """One page of messages by due time; `browse` goes through all pages.

    >>> _ = client.put("jobs", b"later", id="j3", delay=3600)
    >>> [found.id for found in client.browse_page("jobs").messages]
    ['j3']
    """
    asked = path(topic, "messages", state=state, from_ms=to_ms(from_), to_ms=to_ms(to), limit=limit, cursor=cursor)
    return Call(Request("GET", asked), _looks)


def forecast(topic: str, *, bucket: float = 60, hours: float = 24) -> Call[Forecast]:
    """How many messages come due when.

    >>> _ = client.put("jobs", b"tomorrow", delay=86_400)
    >>> found = client.forecast("jobs", bucket=3600, hours=2)
    >>> len(found.counts), found.beyond
    (2, 1)
    """
    return Call(Request("GET", path(topic, "forecast", bucket=bucket, hours=hours)), _forecast)


# Topics and groups


def topics() -> Call[list[Topic]]:
    """All topics.

    >>> _ = client.put("jobs", b"work")
    >>> [topic.topic for topic in client.topics()]
    ['jobs']
    """
    return Call(Request("GET", "/v1/topics"), lambda answer: _topics(answer).topics)


def topic(topic: str) -> Call[Topic]:
    """One topic, with its settings, figures and groups.

    >>> _ = client.put("jobs", b"work")
    >>> client.topic("jobs").settings["max_attempts"] > 1
    True
    """
    return Call(Request("GET", path(topic)), _topic)


def stats(topic: str) -> Call[Stats]:
    """The figures of a topic.

    >>> _ = client.put("jobs", b"later", delay=3600)
    >>> client.stats("jobs").sleep
    1
    """
    return Call(Request("GET", path(topic)), lambda answer: _topic(answer).stats)


def configure(topic: str, **settings: Any) -> Call[Topic]:
    """Make a topic, or change the settings that are named; the others stay.

    >>> client.configure("jobs", max_attempts=1, backoff={"base": 0.5}).settings["backoff"]["base"]
    0.5
    """
    return Call(_post(path(topic), settings, "PUT"), _topic)


def compact(topic: str) -> Call[Compacted]:
    """Give disk space back, now.

    >>> _ = client.put("jobs", b"work")
    >>> client.compact("jobs").outcome
    'compacted'
    """
    return Call(Request("POST", path(topic, "compact"), wait_s=30), _compacted)


def place_group(topic: str, group: str, start: Literal["earliest", "latest"] | int | datetime = "earliest") -> Call[Group]:
    """Make a group, or move it, which replays: to the oldest message, behind the newest, or to what became ready at a time.

    >>> _ = client.put("jobs", b"work")
    >>> client.place_group("jobs", "audit", "latest").stats.lag
    0
    """
    at: Any = start if isinstance(start, str) else {"ready_ms": to_ms(start)}
    return Call(_post(path(topic, "groups", group), {"start": at}, "PUT"), _group)


def group(topic: str, group: str = GROUP) -> Call[Group]:
    """A group and its figures.

    >>> _ = client.place_group("jobs", "audit")
    >>> client.group("jobs", "audit").stats.reserve
    0
    """
    return Call(Request("GET", path(topic, "groups", group)), _group)


def drop_group(topic: str, group: str) -> Call[None]:
    """Forget a group and how far it came.

    >>> _ = client.place_group("jobs", "audit")
    >>> client.drop_group("jobs", "audit")
    """
    return Call(
        Request("DELETE", path(topic, "groups", group)), lambda answer: None, lambda error: isinstance(error, UnknownGroup)
    )


def drop_topic(topic: str) -> Call[None]:
    """Delete a topic with everything in it.

    >>> _ = client.configure("old")
    >>> client.drop_topic("old")
    """
    return Call(Request("DELETE", path(topic)), lambda answer: None, lambda error: isinstance(error, UnknownTopic))


# Dead letters


def _which(group: str | None, from_: int | datetime | None, to: int | datetime | None, error: str | None) -> dict[str, Any]:
    return _given(group=group, from_ms=to_ms(from_), to_ms=to_ms(to), error=error)


def _chosen(topic: str, verb: str, ids: Sequence[str] | None, everything: bool, **more: Any) -> Request:
    which: dict[str, Any] = {name: more.pop(name) for name in ("from_ms", "to_ms", "error") if name in more}
    if ids is not None:
        if which:
            raise InvalidArgument("give ids, or from_, to and error")
        return _post(path(topic, "dead", verb), {"ids": list(ids), **more})
    if "group" in more:
        which["group"] = more.pop("group")
    if not which and not everything:
        raise InvalidArgument(f"say which dead letters to {verb}: ids, group, from_, to, error, or everything=True")
    return _post(path(topic, "dead", verb), {"filter": which, **more})


def dead_page(
    topic: str,
    *,
    group: str | None = None,
    from_: int | datetime | None = None,
    to: int | datetime | None = None,
    error: str | None = None,
    limit: int = 1000,
    cursor: str | None = None,
) -> Call[DeadLetters]:
    """One page of dead letters in the order in which they died; `dead` goes through all pages.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> [(letter.id, letter.error, letter.body) for letter in client.dead_page("jobs").messages]
    [('j4', 'no such customer', b'?')]
    """
    asked = _which(group, from_, to, error)
    return Call(Request("GET", path(topic, "dead", **asked, limit=limit, cursor=cursor)), _letters)


def dead_summary(
    topic: str, *, group: str | None = None, from_: int | datetime | None = None, to: int | datetime | None = None
) -> Call[Summary]:
    """Dead letters counted by error.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.dead_summary("jobs")
    Summary(total=1, errors={'no such customer': 1})
    """
    return Call(Request("GET", path(topic, "dead", "summary", **_which(group, from_, to, None))), _summary)


def requeue_dead(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    everything: bool = False,
    group: str | None = None,
    from_: int | datetime | None = None,
    to: int | datetime | None = None,
    error: str | None = None,
    delay: float | None = None,
    due: int | datetime | None = None,
    per_s: float | None = None,
    reset_attempts: bool = True,
) -> Call[int]:
    """Let dead letters sleep again, `per_s` of them a second. Returns how many.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.requeue_dead("jobs", ["j4"], delay=3600)
    1
    """
    more = _given(due_ms=to_ms(due), per_s=per_s, reset_attempts=reset_attempts) | _which(group, from_, to, error)
    return delayed(
        delay,
        lambda left: _chosen(topic, "requeue", ids, everything, **more, **_given(delay=left)),
        lambda answer: _count(answer).requeued,
    )


def delete_dead(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    everything: bool = False,
    group: str | None = None,
    from_: int | datetime | None = None,
    to: int | datetime | None = None,
    error: str | None = None,
) -> Call[int]:
    """Delete dead letters. Returns how many.

    >>> _ = client.configure("jobs", max_attempts=1)
    >>> _ = client.put("jobs", b"?", id="j4")
    >>> _ = client.fetch("jobs", wait=5)
    >>> client.ack("jobs", ["-j4"], error="no such customer").dead
    1
    >>> client.delete_dead("jobs", everything=True)
    1
    """
    request = _chosen(topic, "delete", ids, everything, **_which(group, from_, to, error))
    return Call(request, lambda answer: _count(answer).deleted)
