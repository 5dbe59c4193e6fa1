"""The end of opening a topic: resolve the copies of messages that a crash left in two stores.

A store that takes a message over has it durably before the other store removes it, so a crash in between leaves it in both:
- a retry sleeps, or a dead letter exists, while the Broker still has the message in flight: the lease ends;
- a retry sleeps although its message was cancelled: the retry ends (`Stores.superseded_retries`);
- a message is awake although a newer one of the same id is stored: it ends (`superseded`);
- a dead letter exists although its removal was journaled: the removal is finished, or withdrawn if its retry was not stored.
Reading the files of each store is not done here but by `open_broker` and `open_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from turtlemq.broker.group import Group
from turtlemq.broker.opening import Opened
from turtlemq.broker.results import DeadRemoval
from turtlemq.broker.visibility import is_void
from turtlemq.model import SEQ_COUNTER_BITS, Damage
from turtlemq.segment import format as f
from turtlemq.topic import retries, superseded
from turtlemq.topic.stores import Stores


def resolve(stores: Stores, opened: Opened) -> bool:
    """Resolve all copies. Returns whether the state is odd: the journals alone do not tell it, so it must be written into them.
    `opened`: the steps that the journals name and that may be half done."""
    interrupted = opened.interrupted
    ended = sum(_end_leases(stores, group, interrupted.noted_seq) for group in list(stores.broker.groups.values()))
    stores.superseded_retries = [*_cancelled_retries(stores, interrupted.cancelled_retry_ids)]
    removed = _finish_removals(stores, interrupted.removals)
    _count_letters(stores)
    replaced = _end_replaced(stores, interrupted.noted_seq)
    return opened.torn or ended > 0 or bool(stores.superseded_retries) or removed or replaced


def _end_replaced(stores: Stores, noted_seq: int) -> bool:
    """End messages that a newer one of the same id has replaced, where the crash came between the two. Returns whether there were
    any. Those with a document up to `noted_seq` had ended before the last checkpoint; others had if a still newer message of that
    id was handed off."""
    seqs = stores.index.superseding_seqs(noted_seq)
    offsets = stores.broker.ready.find_ids(list(seqs)) if seqs else {}
    at = np.array(sorted(offsets.values()), np.int64)
    handed_off = dict(zip(at.tolist(), stores.broker.ready.heads(at)["seq"].tolist(), strict=True))
    ids = [id_ for id_, seq in seqs.items() if id_ not in offsets or handed_off[offsets[id_]] < seq]
    return superseded.end_awake(stores, ids, stores.index.last_seq >> SEQ_COUNTER_BITS)


def _end_leases(stores: Stores, group: Group, noted_seq: int) -> int:
    """End leases of messages that sleep as retries, or have become dead letters. Returns how many. Retries up to `noted_seq` are
    older than the last checkpoint, which knows them."""
    asleep = retries.sleeping_for(stores, group, list(group.reserved_ids), noted_seq)
    ended = stores.broker.end_leases(group.name, _moved(group, asleep))
    ids = list(group.reserved_ids)
    letters = {ids[i]: letter for i, letter in stores.dead_letters.find_many([(group.name, id_) for id_ in ids]).items()}
    dead = _moved(group, letters)
    stores.broker.count_dead(group.name, sum(not letters[id_].flags & f.REPLACES for id_ in dead))  # a replaced one was counted
    return ended + stores.broker.end_leases(group.name, dead)


def _moved(group: Group, copies: Mapping[str, f.Document]) -> list[str]:
    """Ids whose copy was made from the delivery that is still in flight: it names the group's epoch and the ready offset."""
    moved = []
    for id_, document in copies.items():
        leased = group.lease_of(id_)
        if leased is not None and document.meta["epoch"] == group.epoch:
            lease, i = leased
            if document.meta["offset"] == int(lease.messages.offsets[i]):
                moved.append(id_)
    return moved


def _cancelled_retries(stores: Stores, cancelled: Mapping[str, Mapping[str, int]]) -> list[f.Document]:
    """Sleeping retries of cancelled messages, given as ids by group, each with the newest seq at its cancel: a later retry
    belongs to a new message with the same id."""
    groups = stores.broker.groups
    return [
        document
        for name, ids in cancelled.items()
        if name in groups
        for id_, document in retries.sleeping_for(stores, groups[name], list(ids)).items()
        if document.order <= ids[id_] and not is_void(groups[name], document)
    ]


def _finish_removals(stores: Stores, removals: Sequence[DeadRemoval]) -> bool:
    """Delete dead letters whose removal was journaled. A letter that was to be requeued stays if its retry was not stored.
    Returns whether there were any."""
    held = stores.dead_letters.find_many([(removal.group, removal.id) for removal in removals])
    pending = [(letter, removals[i]) for i, letter in held.items() if letter.seq == removals[i].seq]  # no newer letters
    asleep = stores.index.find_many([f"{removal.group}/{removal.id}" for _, removal in pending])
    removed = []
    for i, (letter, removal) in enumerate(pending):
        if not removal.requeued_seq or (i in asleep and asleep[i].seq == removal.requeued_seq):
            removed.append(letter)
        else:
            stores.broker.count_dead(removal.group, 1)
    stores.dead_letters.remove(removed)
    return len(held) > 0


def _count_letters(stores: Stores) -> None:
    """Correct the Broker's counts of dead letters. A power cut may take the event of a new letter, so the letters are right; but
    a counted letter was durable, so fewer letters than counted are damage."""
    counted, there = stores.broker.dead_total, len(stores.dead_letters)
    if counted > there:
        stores.missing.append(Damage("dead/", 0, 0, f"{counted} dead letters were noted, {there} are there"))
    if counted != there:
        stores.broker.recount_dead(stores.dead_letters.by_group())
