"""Naps: messages that sleep for another attempt, for one group alone, in the topic's Index. Their ids there are group/id."""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.broker import cancel
from turtlemq.broker.delivery import void
from turtlemq.broker.group import Group
from turtlemq.model import U64
from turtlemq.segment import format as f
from turtlemq.topic.stores import Stores


def sleeping(stores: Stores, ids: Sequence[str]) -> dict[tuple[str, str], f.Document]:
    """Which of these sleep for another attempt, as (group, id) → document."""
    groups = stores.broker.groups.values()
    found = [(group, id_, doc) for group in groups for id_, doc in sleeping_for(stores, group, ids).items()]
    return {(group.name, id_): doc for group, id_, doc in found if not void(group, doc)}


def sleeping_for(stores: Stores, group: Group, ids: Sequence[str], after_seq: int = -1) -> dict[str, f.Document]:
    """Messages of a group that sleep for another attempt; with `after_seq`, all that came to sleep after that, and perhaps
    others."""
    if not ids:
        return {}
    texts = [f"{group.name}/{id_}" for id_ in ids]
    found = stores.index.find_many(texts, after_seq)
    return {ids[i]: document for i, document in found.items() if not stores.index.is_handed_off(document)}


def known_ids(stores: Stores, ids: Sequence[bytes], hashes: U64) -> set[int]:
    """Which of these the ready log knows; and those that retention has removed from it, but that a group still tries or has among
    its dead: a second message of that id would be taken for the first. Then 0.7 µs for each new one and group."""
    found = set(stores.broker.ready.find_many(ids, hashes))
    if stores.broker.ready.first_offset and len(found) < len(ids):
        rest = {i: id_.decode() for i, id_ in enumerate(ids) if i not in found}
        known = _outlived_ids(stores, list(rest.values()))
        found |= {i for i, id_ in rest.items() if id_ in known} if known else set()
    return found


def _outlived_ids(stores: Stores, ids: Sequence[str]) -> set[str]:
    """Which of these some group sleeps on, is to try again, has in reserve or among its dead."""
    broker, groups = stores.broker, stores.broker.groups
    found = {id_ for _, id_ in sleeping(stores, ids)} | {id_ for group in groups.values() for id_ in group.ids.keys() & {*ids}}
    own = cancel.own_retries(broker, ids)
    found |= {id_ for (name, id_), at in own.items() if cancel.fresh(broker, groups[name], at)}
    asked = [(name, id_) for name in broker.groups_with_dead_letters for id_ in ids]
    return found | {asked[i][1] for i in stores.dead_letters.holds(asked)}
