"""Stories in which messages are spread, several operations are one transaction, and a virtual clock is moved.

The place of a spread message is worked out here a second time, from its id alone, so the auditor knows its due time. A
transaction that was not answered is looked at after the next start: all of its operations were done, or none. A clock that is
moved jumps over many ticks, and all that lies on the way is done at its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.trust.simulation_ledger import Sent
from tests.trust.simulation_review import Review
from tests.trust.simulation_scenes import StoryWithScenes
from tests.trust.simulation_story import Step
from turtlemq.errors import Conflict
from turtlemq.index.columns import as_batch
from turtlemq.model import Batch, Message
from turtlemq.segment.ids import hash_texts
from turtlemq.server.advance import advance
from turtlemq.topic.transaction import Condition, Reschedule, Transaction

_LONG_MS = 1_000  # a step of time so long is a move of the clock


class StoryWithTimes(StoryWithScenes):
    """A run in which some stories spread, some do several things at once, some move a clock."""

    def __init__(self, root: Path, case: str, seed: int, **settings: Any) -> None:
        self.moves_clock, self.spreads, self.transacts = seed % 4 == 2, seed % 4 == 1, seed % 3 == 1
        self._moved_from: int | None = None
        self._widths: dict[str, tuple[int, int]] = {}  # by id: the due time before the spread, and how far it may be
        self._is_spreading = False
        self.places = Random(seed + 1)
        super().__init__(root, case, seed, **settings)

    def rare_scenes(self) -> list[Step]:
        return [*super().rare_scenes(), *([self.transact] * 8 if self.transacts else [])]

    # A clock that is moved

    def pass_time(self, step: int) -> None:
        self._moved_from = self.now if self.moves_clock and step >= _LONG_MS else None
        super().pass_time(step)
        self._moved_from = None

    def _until_rest(self) -> bool:
        if self._moved_from is not None:
            advance(self.engine, self.fetches, self._moved_from, self.now)
            self.seen["clock moves"] += 1
        return super()._until_rest()

    def drain(self) -> None:
        self.moves_clock = False  # so that the last tick takes over the results of jobs that have finished
        super().drain()

    # Spread

    def submit(self, name: str, audit: Review) -> None:
        self._is_spreading = self.spreads
        super().submit(name, audit)
        self._is_spreading = False

    def compose(self, dues: Sequence[int], sizes: Sequence[int]) -> list[Sent]:
        batch = super().compose(dues, sizes)
        for sent in batch if self._is_spreading and self.places.random() < 0.5 else ():
            if sent.expires_ms is None:
                width = self.places.choice([1, 100, 5_000, 60_000])
                self._widths[sent.id] = sent.due_ms, width
                sent.due_ms += place_of(sent.id, width)
                sent.versions = {(sent.due_ms, sent.body)}
                self.seen["spread messages"] += 1
        return batch

    def messages_of(self, batch: Sequence[Sent], body: bytes | None) -> list[Message] | Batch:
        messages = super().messages_of(batch, body)
        if isinstance(messages, Batch) or not any(sent.id in self._widths for sent in batch):
            return messages
        out = as_batch(messages)
        given = [self._widths.get(sent.id, (sent.due_ms, 0)) for sent in batch]
        out.due_ms, out.spread_ms = [due for due, _ in given], [width for _, width in given]
        return out

    # Transactions

    def transact(self, name: str, audit: Review) -> None:
        """New messages, ends and new times of sleepers, together or not at all."""
        asleep = [s for s in audit.sent.values() if s.accepted and not s.ready and s.cancelled is False and len(s.versions) == 1]
        chosen = self.some(asleep, 6)
        ended, moved = chosen[::2], [(s, self._later(s)) for s in chosen[1::2]]
        dues = [self.now + self.chance.choice([0, 500, 30_000]) for _ in range(self.chance.choice([0, 1, 4]))]
        batch = self.compose(dues, [0, 100])
        conditions = [Condition(s.id, "sleep") for s in self.some(chosen, 2)]
        put = self.messages_of(batch, None) if batch else Batch([], [])
        put = put if isinstance(put, Batch) else as_batch(put)
        moves = [Reschedule(sent.id, due) for sent, due in moved]
        given = Transaction(put, [sent.id for sent in ended], moves, conditions)
        sure = all(audit.asleep(sent) for sent in chosen)
        if self.ends and self.chance.random() < 0.3:
            self.process.ends_in = self.chance.randint(0, 8)  # most likely in the midst of it
        try:
            told = self.ask(audit, lambda: self._transact(name, given), lambda _: None)
        except Conflict as error:
            if sure:
                audit.fail("sleepers take part in a transaction", given, error)
            return
        self.seen["transactions"] += 1
        done = True if told is not None else self._found(name, audit, given) if sure else None
        if done is False:
            return
        if batch:
            audit.submitted(batch, None if done is None else [True] * len(batch))
        audit.cancelled(given.cancel, None if done is None else dict.fromkeys(given.cancel, "cancelled"))
        for sent, due in moved:
            ((_, body),) = sent.versions
            audit.rescheduled(sent.id, (due, body), done)

    def _found(self, name: str, audit: Review, given: Transaction) -> bool:
        """Whether a transaction that was not answered was done, as a look after the next start shows."""
        ids = [str(id_) for id_ in given.put.ids or ()]
        asked = [*ids, *given.cancel, *(one.id for one in given.reschedule)]
        views = None
        while views is None:
            views = self.ask(audit, lambda: [self.engine.message(name, id_) for id_ in asked], lambda _: None)
        rest = iter(views)
        done = {next(rest) is not None for _ in ids}
        done |= {view is None or view.state == "cancelled" for _, view in zip(given.cancel, rest, strict=False)}
        done |= {view is not None and view.due_ms == one.due_ms for one, view in zip(given.reschedule, rest, strict=True)}
        if len(done) > 1:
            audit.fail("a transaction is done as a whole or not at all", given, views)
        self.seen["transactions found"] += 1
        return done == {True}

    def _later(self, sent: Sent) -> int:
        due = self.now + self.chance.choice([10, 500, 30_000])
        return due if sent.expires_ms is None else min(due, sent.expires_ms - 1)

    def _transact(self, name: str, given: Transaction) -> list[bool]:
        topic = self.engine.topic(name)
        receipt = topic.stage_transaction(given, self.now)
        topic.commit()
        self.engine.changed(topic, self.now)
        return receipt.put.created


def place_of(id_: str, width: int) -> int:
    """How much later a message with this id is due, of so many milliseconds."""
    return (int(hash_texts([id_.encode()], 0)[0]) >> 32) * (width + 1) >> 32
