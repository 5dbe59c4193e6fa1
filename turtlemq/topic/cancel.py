"""Cancelling in a topic: sleepers in the Index, and messages that are ready or wait for another attempt in every group.

A cancel of a sleeper is a tombstone in the Index, a cancel of any other message an event of the Broker (`broker.cancel`). Here
both are joined: the ready log learns the ids of cancelled sleepers, and sleeping retries of cancelled messages are removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turtlemq.broker.cancel import CANCELLED, cancel
from turtlemq.errors import Exhausted
from turtlemq.index.columns import CancelledSleeper
from turtlemq.segment import format as f
from turtlemq.topic import facts
from turtlemq.topic.stores import Stores


def note_cancelled(stores: Stores, sleepers: Sequence[CancelledSleeper], now_ms: int) -> None:
    """Write notices of cancelled sleepers into the ready log, where a lookup finds them. If it fails, no message is lost, only
    the answer "cancelled" to such a lookup."""
    columns = [s.id.encode() for s in sleepers], [s.due_ms for s in sleepers], [s.first_seq for s in sleepers]
    notices, lengths = f.encode_notices(*columns)
    stores.broker.notice(notices, np.cumsum(lengths) - np.asarray(lengths), now_ms)


def cancel_awake(
    stores: Stores, ids: Sequence[str], now_ms: int, pairs_max: int | None = None
) -> tuple[dict[str, str], list[CancelledSleeper]]:
    """Cancel messages that are ready or wait for another attempt, in every group. Durable.

    Returns for each id `cancelled`, `cancelled before`, the state that does not allow it, or `unknown`; and the cancelled ones
    that the ready log does not hold, because retention has removed all but retries: they are to be noted, as sleepers are.
    `pairs_max`: only the first of the ids are cancelled and answered, at least one, if all of them together have more retries
    and dead letters than that."""
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
    left = [CancelledSleeper(id_, now_ms, 0) for id_ in removed]  # when they were due is not looked up
    return {id_: answer or "unknown" for id_, answer in answers.items()}, left
