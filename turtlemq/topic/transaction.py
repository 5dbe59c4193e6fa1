"""Transactions: puts, cancels and reschedules of one topic under conditions, all of them or none.

All documents of a transaction are one batch in the delay log, which a crash leaves as a whole or not at all. That is why only
sleepers can be cancelled: to end a message that has come due is a record of another log. Conditions are decided when the
documents are staged; requests take effect in that order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from turtlemq.errors import Conflict, InvalidArgument, TooLarge
from turtlemq.index.columns import CancelledSleeper
from turtlemq.index.duplicates import check_not_given
from turtlemq.index.lookup import Place
from turtlemq.index.validate import check_batch, check_expiry, check_ids, with_due_column
from turtlemq.index.versions import KEPT, Version
from turtlemq.model import DUE_MS_MAX, Batch, Receipt
from turtlemq.topic import facts, message_view, put
from turtlemq.topic.stores import Stores

OPERATIONS_MAX = 10_000
UNKNOWN = "unknown"  # as the state of a condition: the topic does not know the id


class Condition(NamedTuple):
    """A message must be in this state, as `GET …/messages/{id}` shows it."""

    id: str
    state: str


class Reschedule(NamedTuple):
    """A sleeper gets another due time."""

    id: str
    due_ms: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """Operations that are done together. No id may stand in two of them, but a condition may name any."""

    put: Batch = field(default_factory=lambda: Batch([], []))
    cancel: Sequence[str] = ()
    reschedule: Sequence[Reschedule] = ()
    conditions: Sequence[Condition] = ()


@dataclass(frozen=True, slots=True)
class TransactionReceipt:
    """The outcome: the receipt of the puts, and numbers of the other operations."""

    put: Receipt
    cancelled: int
    rescheduled: int


def stage(stores: Stores, given: Transaction, now_ms: int) -> tuple[TransactionReceipt, list[str], list[CancelledSleeper]]:
    """Stage all operations with the next commit, or raise and stage none. Also returns the ids of messages that have come due and
    give way, for `superseded.end_awake`, and the cancelled sleepers, for their notices in the ready log."""
    check(given)
    batch = with_due_column(given.put)
    if len(batch):
        check_batch(batch)
        check_expiry(batch, now_ms)
    new = stores.index.new_ids(batch, facts.known_elsewhere(stores)) if len(batch) and batch.if_exists is None else None
    ids = batch.ids if batch.ids is not None else [None] * len(batch)
    moves = [one.id for one in given.reschedule]
    named = [*given.cancel, *moves, *(one.id for one in given.conditions)]
    if new is None:
        check_not_given(ids, stores.index.next_seq(now_ms))
        named += [id_ for id_ in ids if id_ is not None]  # staged documents of them land before places are looked up
    sleepers = stores.index.sleepers(dict.fromkeys(named), kept={*moves})
    _check_conditions(stores, given.conditions, sleepers)
    ended = [_sleeper(stores, sleepers, id_, "cancel", i) for i, id_ in enumerate(given.cancel)]
    moved = [
        Version(one.id, KEPT, one.due_ms, i, _sleeper(stores, sleepers, one.id, "reschedule", i))
        for i, one in enumerate(given.reschedule)
    ]
    receipt, superseded, cancelled = put.stage_with(stores, batch, ids, now_ms, moved, ended, sleepers, new)
    return TransactionReceipt(receipt, len(ended), len(moved)), superseded, cancelled


def check(given: Transaction) -> None:
    """Raise for a transaction that is none: too large, a bad id or time, an id in two operations."""
    count = len(given.put) + len(given.cancel) + len(given.reschedule) + len(given.conditions)
    if count > OPERATIONS_MAX:
        raise TooLarge(f"a transaction has at most {OPERATIONS_MAX:,} operations and conditions, this one {count:,}")
    ended = [*given.cancel, *(one.id for one in given.reschedule)]
    check_ids([*ended, *(one.id for one in given.conditions)])
    ids = [*(id_ for id_ in given.put.ids or () if id_ is not None), *ended]
    met = set[str]()
    for id_ in ids if len(set(ids)) < len(ids) else ():
        if id_ in met:
            raise InvalidArgument(f"{id_!r} stands in two operations of the transaction: their order would matter")
        met.add(id_)
    for one in given.reschedule:
        if not 0 <= one.due_ms <= DUE_MS_MAX:
            raise InvalidArgument(f"{one.id!r}: due times lie between 1970 and May 2109")


def check_new_topic(given: Transaction) -> None:
    """Raise `Conflict` for a transaction on a topic that does not exist, if it needs any message. So it creates no topic."""
    for i, one in enumerate(given.conditions):
        if one.state != UNKNOWN:
            text = f"condition {i}: {one.id!r} is in state {UNKNOWN}, not {one.state}; nothing was done"
            raise Conflict(text, condition=i, state=UNKNOWN)
    ids = [*given.cancel, *(one.id for one in given.reschedule)]
    if ids:
        raise Conflict(f"{ids[0]!r} is in state {UNKNOWN}; nothing was done", state=UNKNOWN)


def _check_conditions(stores: Stores, conditions: Sequence[Condition], sleepers: Collection[str]) -> None:
    for i, one in enumerate(conditions):
        state = "sleep" if one.id in sleepers else _state(stores, one.id)
        if state != one.state:
            text = f"condition {i}: {one.id!r} is in state {state}, not {one.state}; nothing was done"
            raise Conflict(text, condition=i, state=state)


def _sleeper(stores: Stores, sleepers: dict[str, Place], id_: str, operation: str, i: int) -> Place:
    place = sleepers.get(id_)
    if place is None:
        state = _state(stores, id_)
        text = f"{operation} {i}: {id_!r} is in state {state}: a transaction can {operation} sleepers only; nothing was done"
        raise Conflict(text, operation=operation, index=i, state=state)
    return place


def _state(stores: Stores, id_: str) -> str:
    view = message_view.message(stores, id_)
    return UNKNOWN if view is None else view.state
