"""The life cycle of a message: everything that moves one from state to state is a row of this table, and nothing else does.

States from `ready` on are per group. The picture in docs/ARCHITECTURE.md is made from the table by `diagram`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """`source` becomes `target` when `event` happens; `where` says what is written."""

    source: str
    event: str
    target: str
    where: str


TABLE = (
    Step("", "put", "sleep", "delay log, synced"),
    Step("sleep", "reschedule", "sleep", "delay log: a new version that ends the old, synced"),
    Step("sleep", "due", "ready", "ready log, on the beat"),
    Step("sleep", "cancel", "cancelled", "delay log: a tombstone, synced"),
    Step("ready", "fetch", "reserve", "reserve journal"),
    Step("ready", "cancel", "cancelled", "history, synced"),
    Step("ready", "expire", "dead", "dead letters, synced; history"),
    Step("reserve", "ack", "history", "history"),
    Step("reserve", "fail", "ready", "reserve journal; a long back-off sleeps in the delay log"),
    Step("reserve", "lease ends", "ready", "reserve journal"),
    Step("reserve", "give back", "ready", "reserve journal; the delivery does not count"),
    Step("reserve", "last attempt fails", "dead", "dead letters, synced; history"),
    Step("dead", "requeue", "sleep", "delay log, synced"),
    Step("dead", "delete", "", "dead letters: a tombstone, synced"),
    Step("history", "retention", "", "files removed"),
)

STATES = ("sleep", "ready", "reserve", "history", "dead", "cancelled")


def allowed(source: str, event: str) -> str | None:
    """Where an event leads from a state, or None if it cannot happen there.

    >>> allowed("sleep", "cancel"), allowed("reserve", "cancel")
    ('cancelled', None)
    """
    return next((step.target for step in TABLE if (step.source, step.event) == (source, event)), None)


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = [f"    {step.source or '[*]'} --> {step.target or '[*]'}: {step.event}" for step in TABLE]
    return "\n".join(["stateDiagram-v2", *lines]) + "\n"
