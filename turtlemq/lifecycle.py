"""The life cycle of a message as a state machine: one table of all transitions, and nothing else changes a state.

`TRANSITIONS` is executed: `standing` derives from it which states may be cancelled and which still lead to a delivery, the engine
refuses operations for which it has no row, and the random walks of the tests accept no other change of state. The diagram in
docs/ARCHITECTURE.md is made from it by `diagram`.

States from `ready` on are per group; `standing` decides from the stores' facts which of them a message is in.
"""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("sleep", "ready", "reserve", "history", "dead", "cancelled")
NOWHERE = ""  # before the first put, and after retention


@dataclass(frozen=True, slots=True)
class Transition:
    """`source` becomes `target` when `event` happens. `cause` is the side that makes it happen, `written` names the files that
    record it."""

    source: str
    event: str
    target: str
    cause: str  # producer | clock | consumer | operator | retention
    written: str


TRANSITIONS = (
    Transition(NOWHERE, "put", "sleep", "producer", "delay log, synced"),
    Transition("sleep", "reschedule", "sleep", "producer", "delay log: a new version that ends the old, synced"),
    Transition("sleep", "due", "ready", "clock", "ready log, synced with the next checkpoint"),
    Transition("sleep", "cancel", "cancelled", "producer", "delay log: a tombstone, synced"),
    Transition("sleep", "replay", "ready", "operator", "reserve journal: the retry that sleeps is void"),
    Transition("sleep", "retry now", "ready", "operator", "delay log: a new version of the retry that is due, synced; ready log"),
    Transition("ready", "retry now", "ready", "operator", "reserve journal: the back-off is over"),
    Transition("ready", "fetch", "reserve", "consumer", "reserve journal"),
    Transition("ready", "cancel", "cancelled", "producer", "history, synced"),
    Transition("ready", "expire", "dead", "clock", "dead letters, synced; history"),
    Transition("ready", "replay", "ready", "operator", "reserve journal"),
    Transition("ready", "skip", "history", "operator", "reserve journal"),
    Transition("reserve", "ack", "history", "consumer", "history"),
    Transition("reserve", "extend", "reserve", "consumer", "reserve journal"),
    Transition("reserve", "fail", "ready", "consumer", "reserve journal"),
    Transition("reserve", "back off", "sleep", "consumer", "delay log, synced; reserve journal"),
    Transition("reserve", "lease ends", "ready", "clock", "reserve journal"),
    Transition("reserve", "give back", "ready", "consumer", "reserve journal; the delivery does not count"),
    Transition("reserve", "last attempt fails", "dead", "consumer", "dead letters, synced; history"),
    Transition("reserve", "replay", "ready", "operator", "reserve journal"),
    Transition("reserve", "skip", "history", "operator", "reserve journal"),
    Transition("dead", "requeue", "sleep", "operator", "delay log, synced; a tombstone in the dead letters"),
    Transition("dead", "retry now", "ready", "operator", "delay log, synced; a tombstone in the dead letters; ready log"),
    Transition("dead", "delete", "history", "operator", "dead letters: a tombstone, synced"),
    Transition("dead", "replay", "ready", "operator", "reserve journal"),
    Transition("history", "replay", "ready", "operator", "reserve journal"),
    Transition("history", "retention", NOWHERE, "retention", "files removed"),
    Transition("cancelled", "retention", NOWHERE, "retention", "files removed"),
)

_TARGETS = {(row.source, row.event): row.target for row in TRANSITIONS}


def target(source: str, event: str) -> str | None:
    """The state that an event leads to, or None if it cannot happen in `source`. O(1).

    >>> target("sleep", "cancel"), target("reserve", "cancel")
    ('cancelled', None)
    """
    return _TARGETS.get((source, event))


def states_with(*, event: str = "", causes: frozenset[str] = frozenset()) -> frozenset[str]:
    """The states that a given event, or any event of the given causes, can leave.

    >>> sorted(states_with(event="cancel"))
    ['ready', 'sleep']
    """
    return frozenset(row.source for row in TRANSITIONS if row.source and (row.event == event or row.cause in causes))


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = [f"    {row.source or '[*]'} --> {row.target or '[*]'}: {row.event}" for row in TRANSITIONS]
    return "\n".join(["stateDiagram-v2", *lines]) + "\n"
