"""Sleeping retries: messages in long back-off, and requeued dead letters, that sleep in the topic's Index for one group alone.

Their ids there are group/id, which no producer can use. A retry is void if its group was moved back to the message since, or
is another group of the same name (`standing.is_void`): it still comes due, and delivery passes it over.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.broker.group import Group
from turtlemq.broker.visibility import is_void
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.segment import format as f
from turtlemq.topic.stores import Stores


def sleeping(
    stores: Stores, ids: Sequence[str], count_max: int | None = None
) -> tuple[dict[tuple[str, str], GroupDocument], int]:
    """The valid sleeping retries of these messages in all groups, as (group, id) → document. Also for how many of the ids, from
    the first on: fewer than all if there may be more than `count_max` retries."""
    documents, count = stores.index.find_of_groups(ids, stores.broker.groups, count_max)
    return {document.pair: document for document in documents if is_valid(stores, document)}, count


def sleeping_for(stores: Stores, group: Group, ids: Sequence[str], after_seq: int = -1) -> dict[str, f.Document]:
    """The sleeping retries of these messages for one group, void ones included, by id.

    `after_seq`: those with a newer seq; older ones may be missing from the answer, which saves looking into older parts."""
    if not ids:
        return {}
    documents = stores.index.find_many([f"{group.name}/{id_}" for id_ in ids], after_seq)
    return {ids[i]: document for i, document in documents.items() if not stores.index.is_handed_off(document)}


def is_valid(stores: Stores, retry: f.Document | GroupDocument) -> bool:
    """Will the group of a sleeping retry get it?"""
    group = stores.broker.groups.get(retry.id.partition("/")[0])
    if group is None:
        return False
    if group.moves and retry.seq > group.moves[-1][0] and not retry.flags & f.MOVED:
        return True  # written after the last move: its notes need not be decoded
    return not is_void(group, retry)
