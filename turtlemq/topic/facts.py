"""Facts about messages over all stores of a topic, for `turtlemq.standing`: the Broker's, retries that sleep, dead letters.

Gathered for many ids at once, because each store is asked once for all of them. Here is the I/O; `standing` decides.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from turtlemq import standing
from turtlemq.broker import facts as broker_facts
from turtlemq.broker.facts import Facts, Located
from turtlemq.index.duplicates import KnownIds
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.model import U64
from turtlemq.topic import retries
from turtlemq.topic.stores import Stores


@dataclass(frozen=True, slots=True)
class Gathered:
    """Documents of some messages in all stores. Pairs are of group and id."""

    ids: Sequence[str]  # of the messages
    located: Located
    asleep: dict[tuple[str, str], GroupDocument]  # valid retries that sleep in the Index
    letters: dict[tuple[str, str], GroupDocument]  # dead letters, also of groups that are gone


def gather(stores: Stores, ids: Sequence[str], pairs_max: int | None = None) -> Gathered:
    """Look messages up in all stores: all of them, or from the first on as many as have no more than about `pairs_max` retries
    and dead letters, at least one."""
    asleep, count = retries.sleeping(stores, ids, pairs_max)
    letters, count = dead_letters(stores, ids[:count], pairs_max)
    located, count = broker_facts.locate(stores.broker, ids[:count], pairs_max)
    if count < len(ids):
        ids, chosen = ids[:count], {*ids[:count]}
        asleep, letters = ({pair: own[pair] for pair in own if pair[1] in chosen} for own in (asleep, letters))
    return Gathered(ids, located, asleep, letters)


def dead_letters(
    stores: Stores, ids: Sequence[str], count_max: int | None = None
) -> tuple[dict[tuple[str, str], GroupDocument], int]:
    """The dead letters of messages, also those of groups that are gone; without letters that were requeued and whose removal
    waits for room on the disk. Also for how many of the ids, from the first on: fewer if there may be more than `count_max`."""
    requeued = {document.seq for document in stores.requeued_letters}
    letters, count = stores.dead_letters.find_of_groups(ids, stores.broker.groups_with_dead_letters, count_max)
    return {pair: letter for pair, letter in letters.items() if letter.seq not in requeued}, count


def facts_of(stores: Stores, ids: Sequence[str], gathered: Gathered, cancelled: Set[str] = frozenset()) -> Facts:
    """The facts of messages in all groups. `cancelled`: ids of those that were. Requires: all these ids were gathered."""
    located, asleep, letters = gathered.located, gathered.asleep, gathered.letters
    return broker_facts.facts(stores.broker, ids, located, asleep.keys(), letters.keys(), cancelled)


def standings(stores: Stores, id_: str, gathered: Gathered, facts: Facts) -> dict[str, str]:
    """The standing of a message in every group, and in groups that are gone but have a dead letter of it."""
    row = facts.table[facts.rows[id_]].tolist()
    by_group = {name: standing.decide(row[j]) for name, j in facts.columns.items()}
    outside = standing.decide(row[-1] & ~standing.UNCLAIMED)  # a group that is gone has nothing to wait for
    return by_group | {name: outside for name, other in gathered.letters if other == id_ and name not in by_group}


def states(facts: Facts) -> dict[str, str]:
    """The state of each message over all groups. Without any group, one that the ready log holds waits for the first to come."""
    return dict(zip(facts.rows, map(standing.over_groups, standing.standings_in(facts.table)), strict=True))


# Ids that are known


def traces(stores: Stores, ids: Sequence[str]) -> dict[str, int]:
    """Facts over all groups about ids whose own document is not in the ready log; only ids with a fact are listed. 0.7 µs for
    each id and group."""
    found = {id_: standing.RETAINED for _, id_ in stores.broker.ready.valid_retries(ids)[0]}
    for _, id_ in retries.sleeping(stores, ids)[0]:
        found[id_] = found.get(id_, 0) | standing.ASLEEP
    for _, id_ in dead_letters(stores, ids)[0]:
        found[id_] = found.get(id_, 0) | standing.LETTER
    return found


def known_elsewhere(stores: Stores) -> KnownIds | None:
    """Finds the ids that count as held although the Index does not hold them; None if there is none."""
    return partial(known_ids, stores) if stores.broker.ready.next_offset else None


def known_ids(stores: Stores, ids: Sequence[bytes], hashes: U64 | None = None) -> set[int]:
    """Indexes of the ids that are known behind the Index: the ready log holds them, or retention has removed them from it, but a
    retry or a dead letter is left. The id of a cancelled message is free again. `hashes`: of the ids, if the caller has them."""
    offsets = stores.broker.ready.find_many(ids, hashes)
    known = set(offsets)
    if offsets and (cancelled := stores.broker.ready.cancelled_among(offsets.values())):
        known = {i for i, offset in offsets.items() if offset not in cancelled}
        secure_cancels(stores)
    if stores.broker.ready.first_offset and len(known) < len(ids):
        rest = {id_.decode(): i for i, id_ in enumerate(ids) if i not in known}
        known |= {rest[id_] for id_, facts in traces(stores, list(rest)).items() if standing.is_known(facts)}
    return known


def known(stores: Stores, ids: Sequence[str]) -> list[str]:
    """Those of the ids that are known behind the Index."""
    if not ids or not stores.broker.ready.next_offset:
        return []
    return [ids[i] for i in sorted(known_ids(stores, [id_.encode() for id_ in ids]))]


def secure_cancels(stores: Stores) -> None:
    """Sync a cancel that waits for it. Required before a message is put under the id of a cancelled one: if a power cut took the
    cancel back, both would be there."""
    if stores.broker.owes_sync:
        stores.broker.sync()
