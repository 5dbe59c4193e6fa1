"""Cancelling messages that have come due: those that are ready, or wait for another attempt, in every group.

`standing.cancel_answer` decides; a message is cancelled in all groups or in none. Sleepers that no group has seen yet are
cancelled by the Index. The journal has the cancellation, synced, before anything else changes; retries that sleep in the Index
are named there, so that recovery can end them if the topic did not come to it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from turtlemq import standing
from turtlemq.broker.broker import Broker
from turtlemq.broker.facts import Located, Pairs, facts, locate
from turtlemq.broker.group import Group

CANCELLED = "cancelled"


@dataclass(slots=True)
class Cancellation:
    """Documents and retries that a cancellation ends."""

    documents: dict[int, list[Group]] = field(default_factory=dict)  # ready offset → the groups that would have seen it
    retries: set[int] = field(default_factory=set)  # those of `documents` that are a group's own retry
    asleep: dict[str, list[str]] = field(default_factory=dict)  # group → ids for which its retry sleeps in the Index
    removed: list[str] = field(default_factory=list)  # ids whose own document retention has removed: only retries are left


def cancel(
    broker: Broker, ids: Sequence[str], now_ms: int, asleep: Pairs, dead: Set[str]
) -> tuple[dict[str, str | None], list[str]]:
    """Cancel messages, durably. Returns the answer for each id: `CANCELLED`, `standing.CANCELLED_BEFORE`, the state that
    forbids it, None if the id is unknown; and the cancelled ids that the ready log does not hold.

    `asleep`: pairs of group and id for which a valid retry sleeps in the Index; the caller ends those of cancelled ids when this
    returns. `dead`: ids with a dead letter in any group, even one that is gone."""
    located = locate(broker, ids)
    cancelled = broker.ready.cancelled_among(located.documents.values())
    answers: dict[str, str | None] = {}
    ending = Cancellation()
    for id_ in dict.fromkeys(ids):
        answers[id_] = _answer(broker, id_, located, asleep, dead, cancelled)
        if answers[id_] == CANCELLED:
            _collect(broker, id_, located, asleep, ending)
    if ending.documents or ending.asleep:
        broker.cancel(ending.documents, ending.retries, ending.asleep, now_ms)
    return answers, ending.removed


def _answer(broker: Broker, id_: str, located: Located, asleep: Pairs, dead: Set[str], cancelled: Set[int]) -> str | None:
    offset, names = located.documents.get(id_), broker.groups
    retried = any((name, id_) in located.retries or (name, id_) in asleep for name in names)
    if offset is None and not retried and id_ not in dead:
        return None
    before = offset in cancelled
    every = [facts(broker, group, id_, located, asleep, frozenset(), before) for group in names.values()]
    if id_ in dead:
        every.append(standing.LETTER)
    elif not names:
        every.append(standing.CANCELLED if before else standing.UNCLAIMED)
    return standing.cancel_answer(every)


def _collect(broker: Broker, id_: str, located: Located, asleep: Pairs, ending: Cancellation) -> None:
    """Note everything of a message that its cancellation ends."""
    offset = located.documents.get(id_)
    if offset is None:
        ending.removed.append(id_)
    else:
        ending.documents[offset] = list(broker.groups.values())
    for group in broker.groups.values():
        pair = (group.name, id_)
        if pair in asleep:
            ending.asleep.setdefault(group.name, []).append(id_)
        retry = located.retries.get(pair)
        if retry is not None and (retry in group.retries or broker.ready.is_unfetched(group, retry)):
            ending.documents[retry] = [group]
            ending.retries.add(retry)
