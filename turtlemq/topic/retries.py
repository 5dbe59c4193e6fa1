"""Sleeping retries: messages in long back-off, and requeued dead letters, that sleep in the topic's Index for one group alone.

Their ids there are group/id, which no producer can use. A retry is void if its group was moved back to the message since, or
is another group of the same name (`standing.is_void`): it still comes due, and delivery passes it over.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.broker.group import Group
from turtlemq.broker.visibility import is_void
from turtlemq.segment import format as f
from turtlemq.topic.stores import Stores


def sleeping(stores: Stores, ids: Sequence[str]) -> dict[tuple[str, str], f.Document]:
    """The valid sleeping retries of these messages in all groups, as (group, id) → document."""
    asleep: dict[tuple[str, str], f.Document] = {}
    for document in stores.index.find_of_groups(ids, stores.broker.groups):
        if not stores.index.is_handed_off(document) and is_valid(stores, document):
            name, _, id_ = document.id.partition("/")
            asleep[name, id_] = document
    return asleep


def sleeping_for(stores: Stores, group: Group, ids: Sequence[str], after_seq: int = -1) -> dict[str, f.Document]:
    """The sleeping retries of these messages for one group, void ones included, by id.

    `after_seq`: those with a newer seq; older ones may be missing from the answer, which saves looking into older parts."""
    if not ids:
        return {}
    documents = stores.index.find_many([f"{group.name}/{id_}" for id_ in ids], after_seq)
    return {ids[i]: document for i, document in documents.items() if not stores.index.is_handed_off(document)}


def is_valid(stores: Stores, retry: f.Document) -> bool:
    """Will the group of a sleeping retry get it?"""
    group = stores.broker.groups.get(retry.id.partition("/")[0])
    return group is not None and not is_void(group, retry)
