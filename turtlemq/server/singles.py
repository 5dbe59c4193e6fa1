"""Requests with one message each, staged together: they gather while a commit of their topic is under way, or until the end of
this turn of the event loop, and become one batch. A message in a batch of thirty costs a tenth of a message alone.

Only plain messages travel so: a body, a due time, an id, a priority. If the batch is refused, each message is staged alone, so
that its own request gets the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from turtlemq.index.writer import CommitGroup
from turtlemq.message_fields import NAMES
from turtlemq.model import Batch, Receipt
from turtlemq.topic.topic import Topic

TOGETHER_MAX = 256  # messages that are staged at once: 2 ms
_ALONE = ("ttr_ms", "spread_ms", "if_exists", *NAMES)  # columns with which a message is staged alone

Waiting = tuple[Batch, "asyncio.Future[Receipt]"]
Stage = Callable[[Topic, Batch], Receipt]


def is_plain(batch: Batch) -> bool:
    """Whether a batch is one message with nothing special."""
    return len(batch.bodies) == 1 and all(getattr(batch, name) is None for name in _ALONE)


class Singles:
    """Messages that wait to be staged, by topic. `stage` stages a batch, and raises if it is refused."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._waiting: dict[Topic, list[Waiting]] = {}

    def add(self, topic: Topic, batch: Batch) -> asyncio.Future[Receipt]:
        """Let a plain message wait. The future is done when it is durable and visible, or refused. `stage` must follow."""
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, []).append((batch, future))
        return future

    def stage(self, topic: Topic) -> None:
        """Stage the waiting messages of a topic, TOGETHER_MAX at most; the rest waits for the next commit."""
        waiting = self._waiting.pop(topic, None)
        if waiting is None:
            return
        if len(waiting) > TOGETHER_MAX:
            self._waiting[topic], waiting = waiting[TOGETHER_MAX:], waiting[:TOGETHER_MAX]
        waiting = [one for one in waiting if not one[1].done()]  # else its client is gone
        if len(waiting) > 1:
            try:
                receipt = self._stage(topic, _joined([batch for batch, _ in waiting]))
            except Exception:  # noqa: BLE001 - of one of them; it is raised again below
                pass
            else:
                receipts = [Receipt([id_], [new]) for id_, new in zip(receipt.ids, receipt.created, strict=True)]
                _tell(topic, [(future, one) for (_, future), one in zip(waiting, receipts, strict=True)])
                return
        told: list[tuple[asyncio.Future[Receipt], Receipt]] = []
        for batch, future in waiting:
            try:
                told.append((future, self._stage(topic, batch)))
            except Exception as error:  # noqa: BLE001 - the request gets it
                future.set_exception(error)
        _tell(topic, told)


def _joined(batches: Sequence[Batch]) -> Batch:
    """One batch of plain messages."""
    ids = [None if batch.ids is None else batch.ids[0] for batch in batches]
    flags = [batch.flags if isinstance(batch.flags, int) else batch.flags[0] if batch.flags else 0 for batch in batches]
    same = flags.count(flags[0]) == len(flags)
    return Batch(
        bodies=[batch.bodies[0] for batch in batches],
        due_ms=[int(batch.due_ms[0]) for batch in batches],
        ids=ids if any(id_ is not None for id_ in ids) else None,
        flags=(flags[0] or None) if same else flags,
    )


def _tell(topic: Topic, told: list[tuple[asyncio.Future[Receipt], Receipt]]) -> None:
    """Give their receipts to requests when the commit of the topic has landed."""
    group = topic.pending_commit
    if group is None:
        _landed(None, told)  # all are duplicates of durable messages
    elif told:
        group.then.append(partial(_landed, group, told))


def _landed(group: CommitGroup | None, told: list[tuple[asyncio.Future[Receipt], Receipt]]) -> None:
    error = None if group is None else group.error
    for future, receipt in told:
        if future.done():  # its client is gone
            continue
        if error is None:
            future.set_result(receipt)
        else:
            future.set_exception(error)
