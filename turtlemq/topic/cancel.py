"""Cancelling in a topic: sleepers in the Index, and messages that are ready or wait for another attempt in every group.

A cancel of a sleeper is a tombstone in the Index, a cancel of any other message an event of the Broker (`broker.cancel`). Here
both are joined: the ready log learns the ids of cancelled sleepers, and sleeping retries of cancelled messages are removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turtlemq.broker.cancel import CANCELLED, cancel
from turtlemq.errors import Exhausted
from turtlemq.segment import format as f
from turtlemq.topic import facts
from turtlemq.topic.stores import Stores


def note_cancelled_ids(stores: Stores, ids: Sequence[str], now_ms: int) -> None:
    """Write the ids of cancelled sleepers into the ready log, where a lookup finds them. If it fails, no message is lost, only
    the answer "cancelled" to such a lookup."""
    count = len(ids)
    texts = [id_.encode() for id_ in ids]
    raw, lengths = f.encode(texts, [b""] * count, [now_ms] * count, 0, 0, [f.NOTICE] * count)
    stores.broker.notice(bytes(raw), np.cumsum(lengths) - np.asarray(lengths), now_ms)


def cancel_awake(
    stores: Stores, ids: Sequence[str], now_ms: int, pairs_max: int | None = None
) -> tuple[dict[str, str], list[str]]:
    """Cancel messages that are ready or wait for another attempt, in every group. Durable.

    Returns for each id `cancelled`, `cancelled before`, the state that does not allow it, or `unknown`; and the cancelled ids
    that the ready log does not hold, because retention has removed all but retries: they are to be noted, as those of
    sleepers. `pairs_max`: only the first of the ids are cancelled and answered, at least one, if all of them together have more
    retries and dead letters than that."""
    if not ids:
        return {}, []
    gathered = facts.gather(stores, ids, pairs_max)
    asleep = gathered.asleep
    answers, removed = cancel(stores.broker, gathered.ids, now_ms, gathered.located, asleep.keys(), gathered.letters.keys())
    stores.superseded_retries += [document for (_, id_), document in asleep.items() if answers[id_] == CANCELLED]
    try:
        stores.remove_superseded()
    except Exhausted:
        pass  # done before the next handoff, which needs room, too
    return {id_: answer or "unknown" for id_, answer in answers.items()}, removed
