"""Messages that gave way to a newer one of the same id, after they had come due.

The newer message is durable in the Index, and its document says that it replaces another; that decides. Here the older one ends
in the Broker and among the dead letters, in one step with the commit, or when the topic is opened after a crash in between. The
newer message is not handed off before that is durable, so everything of that id in the ready log is of the older one.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.broker.results import DeadRemoval
from turtlemq.errors import Exhausted
from turtlemq.topic import facts
from turtlemq.topic.stores import Stores


def end_awake(stores: Stores, ids: Sequence[str], now_ms: int) -> bool:
    """End everything of these ids that is not in the Index: documents of the ready log, settled ones too, since a group that is
    moved back would get them again; retries, leases that only recovery can meet, and dead letters. Returns whether there was
    anything. Sleeping retries have ended with the commit.

    Stages nothing in the Index, because a commit calls it."""
    if not ids:
        return False
    ready = stores.broker.ready
    offsets = ready.find_ids(ids).values()
    before = ready.cancelled_among(offsets)
    documents, retries = [offset for offset in offsets if offset not in before], ready.all_retries(ids)
    ended = stores.broker.supersede(documents, retries, ids, now_ms)
    pairs = list(facts.dead_letters(stores, ids)[0])
    letters = stores.dead_letters.find_many(pairs)
    if letters:
        removals = [DeadRemoval(*pairs[i], letter.seq, 0) for i, letter in letters.items()]
        stores.broker.note_dead_removed(removals, now_ms, superseded=True)
        stores.requeued_letters += letters.values()
        try:
            stores.remove_requeued_letters()
        except Exhausted:
            pass  # done before the next handoff
    return ended or bool(letters)
