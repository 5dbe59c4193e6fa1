"""Putting messages under ids that may be known: `if_exists` decides whether each is stored, replaces, reschedules or fails.

Messages of one batch take effect one after the other, so the second of two with one id meets the first as a sleeper. Nothing is
changed here but by the last step, which stages all documents at once: all of the batch is stored or none. Messages that give way
although they have come due are returned; they end when the commit lands (`superseded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turtlemq.errors import Conflict
from turtlemq.if_exists import MODES, IfExists, Outcome, decide
from turtlemq.index.columns import CancelledSleeper
from turtlemq.index.duplicates import NewIds, check_not_given
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.index.lookup import Place
from turtlemq.index.validate import check_batch, check_expiry, with_due_column
from turtlemq.index.versions import KEPT, NO_DOCUMENT, Beside, Version, check_expiry_of
from turtlemq.model import Batch, CheckedBatch, Receipt
from turtlemq.topic import facts
from turtlemq.topic.stores import Stores


@dataclass(frozen=True, slots=True)
class Awake:
    """A message that has come due: its state over all groups, seq and due time of its document, and its sleeping retries."""

    state: str
    document: tuple[int, int]
    retries: list[GroupDocument]


@dataclass(slots=True)
class Plan:
    """The documents that a batch becomes, and the outcome of each message."""

    sleepers: Mapping[str, Place]
    awake: dict[str, Awake]
    versions: list[Version] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    _by_id: dict[str, Version] = field(default_factory=dict)

    def add(self, id_: str | None, mode: int, due_ms: int, i: int) -> None:
        """Add message `i` of the batch. Raises `Conflict` if its mode does not allow it."""
        if id_ is None:
            self.versions.append(Version(None, i, due_ms, i))
            self.outcomes.append(Outcome.CREATED)
            return
        made, sleeper, awake = self._by_id.get(id_), self.sleepers.get(id_), self.awake.get(id_)
        sleeps = made is not None or sleeper is not None
        state = "sleep" if sleeps else None if awake is None else awake.state
        outcome = decide(mode, state, sleeps)
        if outcome is Outcome.CONFLICT:
            wanted = MODES[mode]
            raise Conflict(f"message {i}: {id_!r} is in state {state}; if_exists is {wanted!r}", index=i, state=state)
        self.outcomes.append(outcome)
        if outcome is Outcome.DUPLICATE:
            return
        content = KEPT if outcome is Outcome.RESCHEDULED else i
        if made is None:
            made = Version(id_, content, due_ms, i, sleeper, None if awake is None else awake.document)
            self._by_id[id_] = made
            self.versions.append(made)
            return
        made.due_ms, made.asked = due_ms, i
        if content != KEPT:
            made.content = i

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the documents, for the counters of the Index."""
        stored = sum(version.content != KEPT for version in self.versions)
        moved, replaced = self.outcomes.count(Outcome.RESCHEDULED), self.outcomes.count(Outcome.REPLACED)
        return {"appended": stored, "replaced": replaced, "rescheduled": moved}

    @property
    def superseded(self) -> list[str]:
        """Ids of messages that have come due and give way."""
        return [str(version.id) for version in self.versions if version.awake is not None]

    @property
    def retries(self) -> list[GroupDocument]:
        """Sleeping retries of these messages."""
        return [retry for id_ in self.superseded for retry in self.awake[id_].retries]


def stage(stores: Stores, batch: Batch, now_ms: int) -> tuple[Receipt, list[str]]:
    """Stage the messages of a batch with `if_exists`: all or none. Also returns the ids of messages that have come due and give
    way, for `superseded.end_awake`. Raises `Conflict` with index and state of the first message that does not allow it."""
    if not isinstance(batch, CheckedBatch):
        batch = with_due_column(batch)
        check_batch(batch)
    check_expiry(batch, now_ms)
    ids = batch.ids if batch.ids is not None else [None] * len(batch)
    check_not_given(ids, stores.index.next_seq(now_ms))
    receipt, awake, _ = stage_with(stores, batch, ids, now_ms)
    return receipt, awake


def stage_with(
    stores: Stores,
    batch: Batch,
    ids: Sequence[str | None],
    now_ms: int,
    moved: Sequence[Version] = (),
    cancelled: Sequence[Place] = (),
    sleepers: Mapping[str, Place] | None = None,
    new: NewIds | None = None,
) -> tuple[Receipt, list[str], list[CancelledSleeper]]:
    """Stage a checked batch together with other versions of sleepers and with cancels: all or none. Also returns the ids of
    messages that have come due and give way, and the notices of the cancelled. Requires: no id stands in two of the three.
    `sleepers`: the places of all sleepers among the ids, if the caller has them. `new`: the ids, if all messages are new."""
    if new is not None:
        counts = {"appended": len(batch), "rescheduled": len(moved), "cancelled": len(cancelled)}
        given, noted = stores.index.stage_versions(batch, moved, Beside((), counts, cancelled, new), now_ms)
        return Receipt(given[: len(batch)], [True] * len(batch)), [], noted
    plan = _plan(stores, batch, ids, sleepers)
    _check_moved(batch, plan.versions, now_ms)
    versions = sorted((*plan.versions, *moved), key=lambda version: (version.content == KEPT, version.content))
    counts = plan.counts
    counts["rescheduled"] += len(moved)
    if cancelled:
        counts["cancelled"] = len(cancelled)
    given, noted = list[str](), list[CancelledSleeper]()
    if versions or cancelled:
        given, noted = stores.index.stage_versions(batch, versions, Beside(plan.retries, counts, cancelled), now_ms)
    by_content = {version.content: id_ for version, id_ in zip(versions, given, strict=True)}
    stores.index.counters.duplicates += plan.outcomes.count(Outcome.DUPLICATE)
    receipt = _receipt([by_content[i] if id_ is None else id_ for i, id_ in enumerate(ids)], plan.outcomes)
    return receipt, plan.superseded, noted


def _plan(stores: Stores, batch: Batch, ids: Sequence[str | None], sleepers: Mapping[str, Place] | None) -> Plan:
    own = dict.fromkeys(id_ for id_ in ids if id_ is not None)
    sleepers = stores.index.sleepers(own) if sleepers is None else sleepers
    plan = Plan(sleepers, _awake(stores, [id_ for id_ in own if id_ not in sleepers]))
    given = batch.if_exists
    modes = [IfExists.KEEP if given is None else given] * len(batch) if given is None or isinstance(given, int) else given
    dues = batch.due_ms.tolist() if isinstance(batch.due_ms, np.ndarray) else batch.due_ms
    for i, (id_, mode, due_ms) in enumerate(zip(ids, modes, dues, strict=True)):
        plan.add(id_, mode, due_ms, i)
    return plan


def _awake(stores: Stores, ids: Sequence[str]) -> dict[str, Awake]:
    """Those of the messages that have come due and were not cancelled."""
    ids = facts.known(stores, ids)
    if not ids:
        return {}
    gathered, ready = facts.gather(stores, ids), stores.broker.ready
    offsets = gathered.located.documents
    pairs = (*gathered.located.retries, *gathered.asleep, *gathered.letters)
    known = list(dict.fromkeys([*offsets, *(id_ for _, id_ in pairs)]))
    before = ready.cancelled_among(offsets.values())
    cancelled = {id_ for id_, offset in offsets.items() if offset in before}
    if cancelled:
        facts.secure_cancels(stores)
    states = facts.states(facts.facts_of(stores, known, gathered, cancelled))
    at = np.array(sorted(offsets.values()), np.int64)
    heads = ready.heads(at)
    documents = dict(zip(at.tolist(), zip(heads["seq"].tolist(), heads["due"].tolist(), strict=True), strict=True))
    retries: dict[str, list[GroupDocument]] = {}
    for (_, id_), retry in gathered.asleep.items():
        retries.setdefault(id_, []).append(retry)
    return {
        id_: Awake(state, documents[offsets[id_]] if id_ in offsets else NO_DOCUMENT, retries.get(id_, []))
        for id_, state in states.items()
        if id_ not in cancelled
    }


def _check_moved(batch: Batch, versions: Sequence[Version], now_ms: int) -> None:
    """Refuse a due time that one message of the batch gives to another one that has expired by then."""
    for version in versions:
        if version.content not in (KEPT, version.asked) and batch.expires_ms is not None:
            check_expiry_of(version, batch.expires_ms[version.content], now_ms)


def _receipt(given: list[str], outcomes: Sequence[Outcome]) -> Receipt:
    replaced = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.REPLACED]
    rescheduled = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.RESCHEDULED]
    return Receipt(given, [outcome is Outcome.CREATED for outcome in outcomes], replaced, rescheduled)
