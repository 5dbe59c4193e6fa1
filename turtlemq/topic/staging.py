"""Staging documents that end others: puts with `if_exists`, transactions, and cancels of sleepers.

Each call stages one batch of documents with the next commit. What else follows from it takes place when that commit has landed:
messages that gave way although they had come due end in the Broker, and the ready log learns the ids of cancelled sleepers.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.errors import TurtleError
from turtlemq.index.columns import CancelledSleeper
from turtlemq.model import Batch, Receipt, State
from turtlemq.topic import cancel, put, superseded, transaction
from turtlemq.topic.checkpoints import Checkpoints
from turtlemq.topic.stores import Stores
from turtlemq.topic.transaction import Transaction, TransactionReceipt


class Staging:
    """Stages versions and tombstones of one topic. Called by one thread."""

    def __init__(self, stores: Stores, checkpoints: Checkpoints) -> None:
        self._stores, self._checkpoints = stores, checkpoints

    def put(self, batch: Batch, now_ms: int) -> Receipt:
        """Stage a batch that may replace or reschedule messages."""
        self._prepare()
        receipt, awake = put.stage(self._stores, batch, now_ms)
        self._end_when_landed(awake, now_ms)
        return receipt

    def transact(self, given: Transaction, now_ms: int) -> TransactionReceipt:
        """Stage all operations of a transaction, or raise and stage none. Raises `Conflict` for the first that cannot be done."""
        self._prepare()
        receipt, awake, ended = transaction.stage(self._stores, given, now_ms)
        self._end_when_landed(awake, now_ms)
        self._note_when_landed(ended, now_ms)
        return receipt

    def cancel(self, ids: Sequence[str], now_ms: int) -> dict[str, State]:
        """Stage the ends of sleepers. For each id: see `Index.stage_cancel`."""
        ended: list[CancelledSleeper] = []
        outcome = self._stores.index.stage_cancel(ids, ended)
        self._note_when_landed(ended, now_ms)
        return outcome

    def note_cancelled(self, sleepers: Sequence[CancelledSleeper], now_ms: int) -> None:
        """Let the ready log learn the ids of cancelled sleepers, so that a lookup finds them."""
        try:
            cancel.note_cancelled(self._stores, sleepers, now_ms)
        except (TurtleError, OSError):
            return
        self._checkpoints.due_soon(now_ms)

    def _prepare(self) -> None:
        self._stores.refuse_if_stopped()
        if self._stores.has_superseded or self._stores.broker.has_deferred:
            self._stores.remove_superseded()

    def _note_when_landed(self, ended: Sequence[CancelledSleeper], now_ms: int) -> None:
        group = self._stores.index.pending
        if ended and group is not None:
            group.then.append(lambda: self.note_cancelled(ended, now_ms) if group.error is None else None)

    def _end_when_landed(self, awake: Sequence[str], now_ms: int) -> None:
        group = self._stores.index.pending
        if awake and group is not None:
            self._stores.replacing += 1
            group.then.append(lambda: self._end_replaced(group.error, awake, now_ms))

    def _end_replaced(self, error: BaseException | None, ids: Sequence[str], now_ms: int) -> None:
        """The commit of new messages with these ids has landed, or failed."""
        self._stores.replacing -= 1
        if error is not None:
            return
        try:
            superseded.end_awake(self._stores, ids, now_ms)
        except (TurtleError, OSError):
            return  # the journals are stopped: opening the topic ends them
        self._checkpoints.due_soon(now_ms)
