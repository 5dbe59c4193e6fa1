"""`check` of a whole topic: each of its stores on its own, then the stores against each other. Changes nothing.

The invariants of one store are checked in its own package (`index.check`, `broker.check`).
"""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.model import Mark
from turtlemq.topic.stores import Stores


def check_topic(stores: Stores) -> list[str]:
    """Every broken invariant, a line each. Costs a scan of all files."""
    found = stores.index.check()
    found += [f"dead letters of {line}" for line in stores.dead_letters.index.check()]
    if stores.schedules is not None:
        found += [f"schedules of {line}" for line in stores.schedules.check()]
    found += [f"{stores.name}/{line}" for line in stores.broker.check()]
    return found + [f"{stores.name}: {line}" for line in _check_together(stores)]


def _check_together(stores: Stores) -> Iterator[str]:
    """The Broker's counts of dead letters are right, and the Index knows every handoff that the ready log has."""
    letters = stores.dead_letters.by_group()
    counted = {name: count for name, count in stores.broker.dead_counts.items() if count > 0}
    if letters != counted:
        yield f"there are dead letters of {dict(letters)}, but {dict(counted)} are counted"
    known = stores.index.progress.marks
    ahead = [mark for mark in stores.broker.progress.marks if not any(_implies(other, mark) for other in known)]
    if ahead and stores.stopped is None:
        yield f"the ready log was handed {ahead}, of which the index does not know"


def _implies(mark: Mark, other: Mark) -> bool:
    """Does `mark` cover every message that `other` covers?"""
    return mark.seq_max >= other.seq_max and (mark.due_ms, mark.seq) >= (other.due_ms, other.seq)
