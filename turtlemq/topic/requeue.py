"""Dead letters leave: requeued letters sleep again in the Index for their group, deleted ones are gone.

The intent is journaled first, so recovery can finish it (`recover`); if the disk is full, a second event withdraws it. The stores
themselves are in `dead_letters` and `retries`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turtlemq.attempts import of_notes
from turtlemq.broker.failures import EndedDelivery
from turtlemq.broker.results import DeadRemoval
from turtlemq.errors import Exhausted, InvalidFireAt
from turtlemq.model import DUE_MS_MAX
from turtlemq.segment import format as f
from turtlemq.standing import is_pending
from turtlemq.topic import facts
from turtlemq.topic.dead_letters import DeadLetter
from turtlemq.topic.group_documents import retry_columns
from turtlemq.topic.stores import Stores


def requeue(
    stores: Stores,
    letters: Sequence[DeadLetter],
    now_ms: int,
    due_ms: int | None,
    reset_attempts: bool,
    per_s: float | None,
    expires_ms: int | None = None,
) -> int:
    """Let dead letters sleep until `due_ms` (None: now), `per_s` of them a second (None: all at once). They expire anew at
    `expires_ms` (None: never): the old expiry would end them at once. Returns how many left.

    A letter sleeps, durably, before it is removed: after a crash in between it may be there twice, never not at all. A letter
    whose message its group gets in any case, because it was moved back, is only removed: the group must not have a message
    twice."""
    start = now_ms if due_ms is None else due_ms
    last = start + (int(max(0, len(letters) - 1) * 1000 / per_s) if per_s else 0)
    if not 0 <= start <= last <= DUE_MS_MAX:
        raise InvalidFireAt(f"dead letters come again from 0 to {DUE_MS_MAX} (May 2109); these would until {last}")
    check_new_expiry(expires_ms, last)
    letters = _still_dead(stores, letters)
    _restore_groups(stores, {letter.group for letter in letters}, now_ms)
    pending = _pending(stores, letters)
    if pending:
        stores.broker.sync()  # a move that gives the message back is durable before the letter is removed
        delete(stores, [letter for letter in letters if (letter.group, letter.id) in pending], now_ms)
        letters = [letter for letter in letters if (letter.group, letter.id) not in pending]
    if letters:
        dues = [start + (int(i * 1000 / per_s) if per_s else 0) for i in range(len(letters))]
        _sleep(stores, letters, dues, reset_attempts, expires_ms, now_ms)
    return len(letters) + len(pending)


def check_new_expiry(expires_ms: int | None, last_due_ms: float) -> None:
    """Refuse a new expiry that is not after the last due time: such a message could only die."""
    if expires_ms is not None and not last_due_ms < expires_ms <= DUE_MS_MAX:
        raise InvalidFireAt(
            f"expires_ms {expires_ms} is not after the time when the last of them is due, {int(last_due_ms)}, or after May 2109"
        )


def _sleep(
    stores: Stores,
    letters: Sequence[DeadLetter],
    dues: Sequence[int],
    reset_attempts: bool,
    expires_ms: int | None,
    now_ms: int,
) -> None:
    """Letters become sleeping retries of their groups."""
    ended = [
        EndedDelivery(
            letter.group,
            letter.id,
            _expiring(letter.document, expires_ms),
            letter.attempts,
            letter.error,
            due,
            letter.due_ms,
            int(letter.document.meta["offset"]),
            stores.broker.groups[letter.group].epoch,
            of_notes(letter.document.meta),
        )
        for letter, due in zip(letters, dues, strict=True)
    ]
    attempts = [1 if reset_attempts else letter.attempts + 1 for letter in letters]
    with stores.taking_over(stores.index):
        first = stores.index.next_seq(now_ms)
        noted = _note_removal(stores, letters, now_ms, range(first, first + len(letters)))
        try:
            stores.index.store(retry_columns(ended, attempts, renewed=expires_ms is not None), first)
        except Exhausted:
            _undo_removal(stores, noted, now_ms)
            raise
    stores.dead_letters.requeued += len(letters)
    stores.requeued_letters += [letter.document for letter in letters]
    try:
        stores.remove_superseded()
    except Exhausted:
        pass  # they sleep, and that counts; the letters are removed by a later tick, when there is room


def _expiring(document: f.Document, expires_ms: int | None) -> f.Document:
    """A document with another expiry, or with none."""
    if document.expires_ms == expires_ms:
        return document
    flag = 0 if expires_ms is None else f.EXPIRES
    return replace(document, expires_ms=expires_ms, flags=document.flags & ~f.EXPIRES | flag)


def _restore_groups(stores: Stores, names: set[str], now_ms: int) -> None:
    """Create groups again that are gone but get letters, durably, at the end of the ready log: a cancel must see that the message
    is to be delivered."""
    gone = sorted(names - stores.broker.groups.keys())
    for name in gone:
        stores.broker.move_group(name, stores.broker.ready.next_offset, now_ms)
    if gone:
        stores.broker.sync()


def _pending(stores: Stores, letters: Sequence[DeadLetter]) -> set[tuple[str, str]]:
    """The pairs of group and id that the group gets, or has, whatever becomes of the letter. Only letters from before the last
    move of their group can be such, so the facts of all others are not gathered."""
    moved = [letter for letter in letters if letter.document.meta["epoch"] != stores.broker.groups[letter.group].epoch]
    if not moved:
        return set()
    ids = list(dict.fromkeys(letter.id for letter in moved))
    known = facts.facts_of(stores, ids, facts.gather(stores, ids))
    return {(letter.group, letter.id) for letter in moved if is_pending(known.of(letter.group, letter.id))}


def delete(stores: Stores, letters: Sequence[DeadLetter], now_ms: int) -> int:
    """Remove dead letters, durably. Returns how many were still there."""
    letters = _still_dead(stores, letters)
    noted = _note_removal(stores, letters, now_ms, [0] * len(letters))
    try:
        stores.dead_letters.remove([letter.document for letter in letters])
    except Exhausted:  # all are still there
        _undo_removal(stores, noted, now_ms)
        raise
    return len(letters)


def _still_dead(stores: Stores, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
    """Each letter once, with its document as it is now: it may have left, or compaction may have copied it, since it was read."""
    given = {(letter.group, letter.id): letter for letter in letters}
    requeued = {document.seq for document in stores.requeued_letters}
    held = stores.dead_letters.find_many(list(given))
    still = {i: document for i, document in held.items() if document.seq not in requeued}
    return [_with_document(letter, still[i]) for i, letter in enumerate(given.values()) if i in still]


def _with_document(letter: DeadLetter, document: f.Document) -> DeadLetter:
    return letter if letter.document.seq == document.seq else replace(letter, document=document)


def _note_removal(stores: Stores, letters: Sequence[DeadLetter], now_ms: int, requeued_seqs: Sequence[int]) -> list[DeadRemoval]:
    """Journal that letters are about to be removed, all of them with one sync. `requeued_seqs`: of the documents as which they
    sleep again, 0 for those that are deleted."""
    pairs = zip(letters, requeued_seqs, strict=True)
    removals = [DeadRemoval(letter.group, letter.id, letter.document.seq, seq) for letter, seq in pairs]
    if removals:
        stores.broker.note_dead_removed(removals, now_ms)
    return removals


def _undo_removal(stores: Stores, noted: Sequence[DeadRemoval], now_ms: int) -> None:
    """Journal that letters stay after all."""
    if noted:
        stores.broker.note_dead_removed(noted, now_ms, withdrawn=True)
