"""Naps: messages that sleep for another attempt, for one group alone, in the topic's Index. Their ids there are group/id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turtlemq.broker.delivery import void
from turtlemq.broker.group import Group
from turtlemq.index.mend import mending
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_texts

if TYPE_CHECKING:
    from turtlemq.topic import Topic


def of(topic: Topic, ids: Sequence[str]) -> dict[tuple[str, str], f.Document]:
    """Which of these sleep for another attempt, as (group, id) → document."""
    found = [(group, id_, doc) for group in topic.broker.groups.values() for id_, doc in asleep(topic, group, ids).items()]
    return {(group.name, id_): doc for group, id_, doc in found if not void(group, doc)}


def asleep(topic: Topic, group: Group, ids: Sequence[str], after_seq: int = -1) -> dict[str, f.Document]:
    """Messages of a group that sleep for another attempt; with `after_seq`, all that came to sleep after that, and perhaps
    others."""
    if not ids:
        return {}
    texts = [f"{group.name}/{id_}" for id_ in ids]
    raw, shelf = [text.encode() for text in texts], topic.index.shelf
    hashes = hash_texts(raw)
    hits = mending(shelf, lambda: shelf.find_many(raw, hashes, after_seq))
    found = {ids[i]: topic.index.find(texts[i]) for i in hits}
    return {
        id_: document
        for id_, document in found.items()
        if document is not None and not shelf.progress.covers_one(document.due_ms, document.seq)
    }
