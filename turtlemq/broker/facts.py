"""Facts about messages in the groups of a Broker, for the decisions of `turtlemq.standing`.

Documents of a message in the ready log are compared with a group's cursors, leases and retries in memory. Retries that
sleep in the Index and dead letters belong to the topic (`topic.facts`) and are passed in. No decisions here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from turtlemq import standing
from turtlemq.broker.broker import Broker
from turtlemq.broker.group import Group

Pairs = Set[tuple[str, str]]  # of group and id


@dataclass(frozen=True, slots=True)
class Located:
    """Where documents of messages lie in the ready log."""

    documents: dict[str, int]  # id → offset of the message itself, or of the notice that it was cancelled while it slept
    retries: dict[tuple[str, str], int]  # (group, id) → offset of the group's newest valid retry


def locate(broker: Broker, ids: Sequence[str]) -> Located:
    """The documents of messages; ids that the ready log does not hold are left out."""
    return Located(broker.ready.find_ids(ids), broker.ready.valid_retries(ids))


def facts(broker: Broker, group: Group, id_: str, located: Located, asleep: Pairs, letters: Pairs, cancelled: bool) -> int:
    """The facts of a message and a group, as bits of `standing`. Facts that cannot change the decision may be left out.

    `asleep`, `letters`: pairs for which a valid retry sleeps, and for which there is a dead letter."""
    if cancelled:
        return standing.CANCELLED
    if group.lease_of(id_) is not None:
        return standing.LEASED
    pair = (group.name, id_)
    bits = standing.LETTER if pair in letters else 0
    if pair in asleep:
        return bits | standing.ASLEEP
    offset = located.documents.get(id_)
    for at in (located.retries.get(pair), offset):
        if at is not None and at in group.retries:
            return bits | standing.WAITING
        if at is not None and broker.ready.is_unfetched(group, at):
            return bits | standing.UNFETCHED
    if offset is None:
        offset = broker.ready.first_offset - 1  # removed by retention: it lay here at the latest
    return bits | standing.PREDATES if offset < standing.first_had(group.moves) else bits
