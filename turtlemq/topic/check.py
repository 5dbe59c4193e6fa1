"""`check` of a whole topic: Index, dead letters and Broker, each on its own and against each other. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.model import Mark
from turtlemq.topic.stores import Stores


def check_topic(stores: Stores) -> list[str]:
    """Every broken invariant, a line each. Costs a scan of all files."""
    found = stores.index.check()
    found += [f"dead letters of {line}" for line in stores.dead_letters.index.check()]
    found += [f"{stores.name}/{line}" for line in stores.broker.check()]
    return found + [f"{stores.name}: {line}" for line in _check_together(stores)]


def _check_together(stores: Stores) -> Iterator[str]:
    letters = stores.dead_letters.by_group()
    counted = {name: count for name, count in stores.broker.dead_counts.items() if count > 0}
    if letters != counted:
        yield f"there are dead letters of {dict(letters)}, but {dict(counted)} are counted"
    known = stores.index.progress.marks
    ahead = [m for m in stores.broker.progress.marks if not any(_implies(other, m) for other in known)]
    if ahead and stores.stopped is None:
        yield f"the ready log was handed {ahead}, of which the index does not know"


def _implies(one: Mark, other: Mark) -> bool:
    return one.seq_max >= other.seq_max and (one.due_ms, one.seq) >= (other.due_ms, other.seq)
