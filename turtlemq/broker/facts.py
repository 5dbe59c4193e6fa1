"""Facts about messages in the groups of a Broker, for the decisions of `turtlemq.standing`.

Here is the I/O: looking up the documents of a message in the ready log, and comparing them with a group's cursors, leases and
back-offs. Retries that sleep in the Index and dead letters belong to the topic (`topic.facts`) and are passed in. No decisions
here."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from turtlemq import standing
from turtlemq.broker import delivery
from turtlemq.broker.broker import Broker
from turtlemq.broker.group import Group
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_id

Pairs = Set[tuple[str, str]]  # of group and id


@dataclass(frozen=True, slots=True)
class Located:
    """Where documents of messages lie in the ready log."""

    documents: dict[str, int]  # id → offset of the message itself, or of the notice that it was cancelled while it slept
    retries: dict[tuple[str, str], int]  # (group, id) → offset of the group's newest valid retry


def locate(broker: Broker, ids: Sequence[str]) -> Located:
    """The documents of messages; ids that the ready log does not hold are left out."""
    return Located(find(broker, ids), valid_retries(broker, ids))


def find(broker: Broker, ids: Sequence[str]) -> dict[str, int]:
    """The newest ready offset of each id that has one."""
    usable = [id_ for id_ in ids if id_.isprintable()]
    hashes = np.array([hash_id(id_) for id_ in usable], np.uint64)
    found = broker.ready.find_many([id_.encode() for id_ in usable], hashes) if usable else {}
    return {usable[i]: offset for i, offset in found.items()}


def valid_retries(broker: Broker, ids: Sequence[str]) -> dict[tuple[str, str], int]:
    """The newest retry of each message for each group that is neither void nor cancelled, as (group, id) → ready offset."""
    if not broker.specials:
        return {}
    retries: dict[tuple[str, str], int] = {}
    for group in broker.groups.values():
        skip = len(group.name) + 1
        for key, offset in find(broker, [f"{group.name}/{id_}" for id_ in ids]).items():
            valid = _newest_valid(broker, group, key, offset)
            if valid is not None and valid not in broker.cancelled:
                retries[group.name, key[skip:]] = valid
    return retries


def _newest_valid(broker: Broker, group: Group, key: str, offset: int) -> int | None:
    """The newest retry that is not void, from the newest of all at `offset` back. Each retry names the offset that its message
    had left, which is that of the retry before it: after a move between two of them the newer is void, and the older comes
    again."""
    while offset >= broker.ready.first_offset:
        read, _ = broker.ready.read(np.array([offset]))
        if not read.good[0]:
            return None
        retry = delivery.document(read, 0)
        if retry.id != key:  # the message itself
            return None
        if not delivery.void(group, retry):
            return offset
        offset = min(int(retry.meta["offset"]), offset - 1)
    return None


def facts(broker: Broker, group: Group, id_: str, located: Located, asleep: Pairs, letters: Pairs, cancelled: bool) -> int:
    """The facts of a message and a group, as bits of `standing`. Facts that cannot change the decision may be left out.

    `asleep`, `letters`: pairs for which a valid retry sleeps, and for which there is a dead letter."""
    if cancelled:
        return standing.CANCELLED
    if id_ in group.ids:
        return standing.LEASED
    pair = (group.name, id_)
    bits = standing.LETTER if pair in letters else 0
    if pair in asleep:
        return bits | standing.ASLEEP
    offset = located.documents.get(id_)
    for at in (located.retries.get(pair), offset):
        if at is not None and at in group.waiting:
            return bits | standing.WAITING
        if at is not None and is_unfetched(broker, group, at):
            return bits | standing.UNFETCHED
    if offset is None:
        offset = broker.ready.first_offset - 1  # removed by retention: it lay here at the latest
    return bits | standing.SKIPPED if offset < standing.first_had(group.moves) else bits


def is_unfetched(broker: Broker, group: Group, offset: int) -> bool:
    """Does the cursor of a document's priority stand at or before it? Reads the document only if it lies between cursors."""
    if offset < min(group.cursors.values()):
        return False
    if offset >= max(group.cursors.values()):
        return True
    read, _ = broker.ready.read(np.array([offset]))
    level = int(read.heads["flags"][0]) & f.PRIORITY
    return offset >= group.cursors[level]
