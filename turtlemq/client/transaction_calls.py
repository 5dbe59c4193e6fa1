"""Transactions as calls of a client: several operations on one topic, all of them or none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from turtlemq.client.errors import InvalidArgument
from turtlemq.client.outgoing import OutgoingMessage, json_messages
from turtlemq.client.results import Transacted
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, json_request, list_of_ids, parser_of, path, seconds_of, to_ms


class _Put(Struct):
    ids: list[str]
    duplicate_indexes: list[int] = []


class _Answer(Struct):
    put: _Put
    cancelled: int = 0
    rescheduled: int = 0


_parse = parser_of(_Answer)


def transaction(
    topic: str,
    put: Sequence[OutgoingMessage],
    cancel: Sequence[str],
    reschedule: Mapping[str, Any],
    conditions: Mapping[str, str],
    put_s: float,
) -> Call[Transacted]:
    """The call of a transaction. `put_s`: when it was asked for; the delays of messages count from then."""
    moves = [{"id": id_, **_when(id_, when)} for id_, when in reschedule.items()]
    states = [{"id": id_, "state": state} for id_, state in conditions.items()]
    ids, target = list_of_ids(cancel), path(topic, "transaction")

    def request(passed_s: float) -> Request:
        messages = json_messages(put, put_s + passed_s)
        return json_request(target, {"put": messages, "cancel": ids, "reschedule": moves, "if": states})

    def parse(answer: Any) -> Transacted:
        found = _parse(answer)
        return Transacted(found.put.ids, found.cancelled, found.rescheduled, found.put.duplicate_indexes)

    return Call(request(0.0), parse, request_after=request)


def _when(id_: str, when: Any) -> dict[str, Any]:
    """A due time, or a delay: an aware datetime is a time, a number of seconds or a timedelta a delay."""
    if when is None:
        raise InvalidArgument(f"{id_!r} needs a datetime, or a delay")
    return {"due_ms": to_ms(when)} if hasattr(when, "tzinfo") else {"delay": seconds_of("reschedule", when)}
