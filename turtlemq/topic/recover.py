"""Opening a topic after a crash that came between two of its parts: what one of them had taken over, the other lets go of now.

Whoever takes a message over has it durably before the one who gave it lets go, so after a crash both may have it: a message
that was put to sleep for another attempt or buried while the Broker still holds it in reserve, a retry that still sleeps though
its message was cancelled, a dead letter that was about to go.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.broker.group import Group
from turtlemq.broker.results import DeadRemoval, Interrupted
from turtlemq.broker.visibility import is_void
from turtlemq.model import Damage
from turtlemq.segment import format as f
from turtlemq.topic import retries
from turtlemq.topic.stores import Stores


def resolve(stores: Stores, interrupted: Interrupted) -> bool:
    """A crash may have come after a message was put to sleep or buried, and before the Broker noted it: note it now. Returns
    whether there was any. Both say at which ready offset they met the message."""
    count = 0
    for group in stores.broker.groups.values():
        asleep = retries.sleeping_for(stores, group, list(group.reserved_ids), interrupted.noted_seq)
        count += stores.broker.end_leases(group.name, _in_hands(group, asleep))
        ids = list(group.reserved_ids)
        held = stores.dead_letters.holds([(group.name, id_) for id_ in ids])
        letters = {ids[i]: document for i, document in held.items()}
        buried = _in_hands(group, letters)
        count += stores.broker.end_leases(group.name, buried)
        new = sum(not letters[id_].flags & f.REPLACES for id_ in buried)  # the others replaced a letter that was counted
        stores.broker.count_dead(group.name, new)
    ended = interrupted.cancelled_retry_ids
    groups = stores.broker.groups
    left = {name: retries.sleeping_for(stores, groups[name], ids) for name, ids in ended.items() if name in groups}
    stores.superseded_retries = [doc for name, found in left.items() for doc in found.values() if not is_void(groups[name], doc)]
    count += len(stores.superseded_retries)
    return _finish_removals(stores, interrupted.removals) or count > 0


def count_letters(stores: Stores) -> None:
    """A power cut may take the note of a burial, never a letter that was noted: what is there tells how many there are."""
    counted, there = stores.broker.dead_total, len(stores.dead_letters)
    if counted > there:
        stores.missing.append(Damage("dead/", 0, 0, f"{counted} dead letters were noted, {there} are there"))
    if counted != there:
        stores.broker.recount_dead(stores.dead_letters.by_group())


def _finish_removals(stores: Stores, removals: Sequence[DeadRemoval]) -> bool:
    """Dead letters that were about to go when the process ended: they go now, unless they were to sleep and do not."""
    held = stores.dead_letters.holds([(letter.group, letter.id) for letter in removals])
    gone = []
    for i, document in held.items():
        letter = removals[i]
        if document.seq != letter.seq:
            continue
        asleep = stores.index.find(f"{letter.group}/{letter.id}") if letter.requeued_seq else None
        if not letter.requeued_seq or (asleep is not None and asleep.seq == letter.requeued_seq):
            gone.append(document)
        else:
            stores.broker.count_dead(letter.group, 1)
    stores.dead_letters.remove(gone)
    return len(held) > 0


def _in_hands(group: Group, left: dict[str, f.Document]) -> list[str]:
    """Ids that a group holds in reserve although they have left it: what they left for names the group's epoch and the offset."""
    found = []
    for id_, document in left.items():
        leased = group.lease_of(id_)
        if leased is not None and document.meta["epoch"] == group.epoch:
            lease, i = leased
            if document.meta["offset"] == int(lease.messages.offsets[i]):
                found.append(id_)
    return found
