"""`check` of a whole topic: Index, dead letters and Broker, each on its own and against each other. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from turtlemq.broker.check import check as check_broker
from turtlemq.index.check import check as check_index
from turtlemq.model import Mark
from turtlemq.topic.topic import Topic


def check_topic(topic: Topic) -> list[str]:
    """Every broken invariant, a line each. Costs a scan of all files."""
    found = [*check_index(topic.index), *(f"dead letters of {line}" for line in check_index(topic.dead.index))]
    found += [f"{topic.name}/{line}" for line in check_broker(topic.broker, topic.folder)]
    return found + [f"{topic.name}: {line}" for line in _check_together(topic)]


def _check_together(topic: Topic) -> Iterator[str]:
    letters = topic.dead.by_group()
    counted = +topic.broker.dead_counts
    if letters != counted:
        yield f"there are dead letters of {dict(letters)}, but {dict(counted)} are counted"
    known = topic.index.progress.marks
    ahead = [m for m in topic.broker.ready.progress.marks if not any(_implies(other, m) for other in known)]
    if ahead and topic.stopped is None:
        yield f"the ready log was handed {ahead}, of which the index does not know"


def _implies(one: Mark, other: Mark) -> bool:
    return one.seq_max >= other.seq_max and (one.due_ms, one.seq) >= (other.due_ms, other.seq)
