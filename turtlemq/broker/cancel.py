"""Cancelling messages that have come due: those that are ready, or wait for another attempt, in every group.

`standing.cancel_answer` decides; a message is cancelled in all groups or in none. Sleepers that no group has seen yet are
cancelled by the Index. The journal has the cancellation before anything else changes, and it is synced before the answer, and
before retries that sleep in the Index end. They are named there, so that recovery can end them if the topic did not get so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from turtlemq import standing
from turtlemq.broker.broker import Broker
from turtlemq.broker.facts import Facts, Located, Pairs, facts

CANCELLED = "cancelled"


@dataclass(slots=True)
class Cancellation:
    """Documents and retries that a cancellation ends."""

    documents: list[int] = field(default_factory=list)  # ready offsets of messages
    retries: dict[int, str] = field(default_factory=dict)  # ready offsets of retries of one group, and its name
    asleep: dict[str, list[str]] = field(default_factory=dict)  # group → ids for which its retry sleeps in the Index
    removed: list[str] = field(default_factory=list)  # ids whose own document retention has removed: only retries are left


def cancel(
    broker: Broker, ids: Sequence[str], now_ms: int, located: Located, asleep: Pairs, letters: Pairs
) -> tuple[dict[str, str | None], list[str]]:
    """Cancel messages, durably. Returns the answer for each id: `CANCELLED`, `standing.CANCELLED_BEFORE`, the state that
    forbids it, None if the id is unknown; and the cancelled ids that the ready log does not hold.

    `located`: the documents of these ids. `asleep`: pairs of group and id for which a valid retry sleeps in the Index; the caller
    ends those of cancelled ids when this returns. `letters`: pairs that have a dead letter, even of groups that are gone."""
    before = broker.ready.cancelled_among(located.documents.values())
    ended = {id_ for id_, offset in located.documents.items() if offset in before}
    answers = _answers(facts(broker, ids, located, asleep, letters, ended))
    for id_ in answers.keys() - located.documents.keys() - {id_ for _, id_ in {*located.retries, *asleep, *letters}}:
        answers[id_] = None
    ending = _ending(broker, {id_ for id_, answer in answers.items() if answer == CANCELLED}, located, asleep)
    if ending.documents or ending.retries or ending.asleep:
        broker.cancel(ending.documents, ending.retries, ending.asleep, now_ms)
    return answers, ending.removed


def _answers(gathered: Facts) -> dict[str, str | None]:
    facts_of_any = np.bitwise_or.reduce(gathered.table, axis=1).tolist()
    rows = zip(gathered.rows, standing.standings_in(gathered.table), facts_of_any, strict=True)
    return {id_: standing.cancel_answer(standings, bool(facts & standing.LETTER)) for id_, standings, facts in rows}


def _ending(broker: Broker, ids: set[str], located: Located, asleep: Pairs) -> Cancellation:
    """Everything that a cancellation of these messages ends."""
    ending = Cancellation()
    for id_ in sorted(ids):
        if id_ in located.documents:
            ending.documents.append(located.documents[id_])
        else:
            ending.removed.append(id_)
    for name, id_ in sorted(asleep):
        if id_ in ids:
            ending.asleep.setdefault(name, []).append(id_)
    for (name, id_), offset in located.retries.items():
        group = broker.groups[name]
        if id_ in ids and (offset in group.retries or broker.ready.is_unfetched(group, offset)):
            ending.retries[offset] = name
    return ending
