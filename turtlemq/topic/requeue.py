"""Dead letters go: they sleep again, or are deleted. Noted by the Broker before it is done, so that a crash between leaves
nothing half done (see `unfinished`); and noted again where a full disk lets nobody go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turtlemq.broker import cancel
from turtlemq.broker.failures import EndedDelivery
from turtlemq.broker.results import DeadRemoval
from turtlemq.errors import DiskFull, InvalidFireAt
from turtlemq.model import DUE_MS_MAX
from turtlemq.topic import retries
from turtlemq.topic.dead_letters import DeadLetter, for_group
from turtlemq.topic.stores import Stores


def requeue(
    stores: Stores, letters: Sequence[DeadLetter], now_ms: int, due_ms: int | None, reset_attempts: bool, per_s: float | None
) -> int:
    """They sleep again first, and are removed from the dead then: a crash between brings one back, it loses none. One that its
    group has again in any case, since it was moved, is only removed: nobody gets it twice at once."""
    start = now_ms if due_ms is None else due_ms
    last = start + (int(max(0, len(letters) - 1) * 1000 / per_s) if per_s else 0)
    if not 0 <= start <= last <= DUE_MS_MAX:
        raise InvalidFireAt(f"dead letters come again from 0 to {DUE_MS_MAX} (May 2109); these would until {last}")
    letters = _still_dead(stores, letters)
    _bring_back(stores, {letter.group for letter in letters}, now_ms)
    still = [(letter, _goes_on(stores, letter)) for letter in letters]
    letters, moved = ([letter for letter, goes_on in still if goes_on is which] for which in (False, True))
    if moved:
        stores.broker.sync()  # that its group has it is durable before the letter goes
        delete(stores, moved, now_ms)
    if not letters:
        return len(moved)
    ended = [
        EndedDelivery(
            letter.group,
            letter.id,
            letter.document,
            letter.attempts,
            letter.error,
            start + (int(i * 1000 / per_s) if per_s else 0),
            letter.due_ms,
            int(letter.document.meta["offset"]),
            stores.broker.groups[letter.group].epoch,
        )
        for i, letter in enumerate(letters)
    ]
    attempts = [1 if reset_attempts else letter.attempts + 1 for letter in letters]
    with stores.taking_over(stores.index):
        first = stores.index.next_seq(now_ms)
        leaving = _note_removal(stores, letters, now_ms, range(first, first + len(letters)))
        try:
            stores.index.store(for_group(ended, attempts), first)
        except DiskFull:
            _undo_removal(stores, leaving, now_ms)
            raise
    stores.dead_letters.requeued += len(letters)
    stores.requeued_letters += [letter.document for letter in letters]
    try:
        stores.remove_superseded()
    except DiskFull:
        pass  # they sleep, and that counts; the letters go with a later tick, when there is room
    return len(letters) + len(moved)


def _bring_back(stores: Stores, names: set[str], now_ms: int) -> None:
    """A group that is gone, but is to get letters, is there again, durably, and begins at the end: whoever cancels such a message
    sees that it is to come."""
    gone = sorted(names - stores.broker.groups.keys())
    for name in gone:
        stores.broker.move_group(name, stores.broker.ready.next_offset, now_ms)
    if gone:
        stores.broker.sync()


def _goes_on(stores: Stores, letter: DeadLetter) -> bool:
    """Is its group to get this message again, or has it, whatever becomes of the letter?"""
    group, offset = stores.broker.groups[letter.group], int(letter.document.meta["offset"])
    if letter.id in group.ids or cancel.fresh(stores.broker, group, offset):
        return True
    if letter.document.meta["epoch"] == group.epoch:
        return False  # it was not moved since
    key = (letter.group, letter.id)
    again = cancel.own_retries(stores.broker, [letter.id]).get(key)
    return key in retries.sleeping(stores, [letter.id]) or (again is not None and cancel.fresh(stores.broker, group, again))


def delete(stores: Stores, letters: Sequence[DeadLetter], now_ms: int) -> int:
    """Remove them, durably."""
    letters = _still_dead(stores, letters)
    leaving = _note_removal(stores, letters, now_ms, [0] * len(letters))
    try:
        stores.dead_letters.remove([letter.document for letter in letters])
    except DiskFull:  # all are still there
        _undo_removal(stores, leaving, now_ms)
        raise
    return len(letters)


def dead_in_any_group(stores: Stores, ids: Sequence[str]) -> set[str]:
    """Which of these are dead in some group, be it one that was moved or forgotten since: a requeue would deliver them, so they
    cannot be over."""
    asked = [(name, id_) for name in stores.broker.groups_with_dead_letters for id_ in ids]
    gone = {document.seq for document in stores.requeued_letters}
    return {asked[i][1] for i, letter in stores.dead_letters.holds(asked).items() if letter.seq not in gone}


def _still_dead(stores: Stores, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
    """They may have gone, or been copied by compaction, since somebody looked."""
    found = {(letter.group, letter.id): letter for letter in letters}
    gone, held = {document.seq for document in stores.requeued_letters}, stores.dead_letters.holds(list(found))
    still = {i: document for i, document in held.items() if document.seq not in gone}
    return [replace(letter, document=still[i]) for i, letter in enumerate(found.values()) if i in still]


def _note_removal(
    stores: Stores, letters: Sequence[DeadLetter], now_ms: int, became: Sequence[int]
) -> dict[str, list[DeadRemoval]]:
    """Note that letters are about to go, by group."""
    found: dict[str, list[DeadRemoval]] = {}
    for letter, seq in zip(letters, became, strict=True):
        found.setdefault(letter.group, []).append(DeadRemoval(letter.group, letter.id, letter.document.seq, seq))
    noted: dict[str, list[DeadRemoval]] = {}
    try:
        for group, some in found.items():
            stores.broker.note_dead_removed(group, some, now_ms)
            noted[group] = some
    except DiskFull:
        _undo_removal(stores, noted, now_ms)
        raise
    return found


def _undo_removal(stores: Stores, leaving: dict[str, list[DeadRemoval]], now_ms: int) -> None:
    """Note that these letters do not go after all."""
    for group, some in leaving.items():
        stores.broker.note_dead_removed(group, some, now_ms, stay=True)
