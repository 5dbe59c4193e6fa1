"""Puts under ids that the topic knows already: the modes of `if_exists`, and one table that decides. Pure.

A cancelled id counts as unknown. A message that a consumer holds never gives way: two messages of one id would be alive, and an
ack could mean either.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

MODES: Final = ("keep", "replace", "reschedule", "error")  # a mode's number is its index


class IfExists(IntEnum):
    """A mode, as the column of a batch has it."""

    KEEP = 0
    REPLACE = 1
    RESCHEDULE = 2
    ERROR = 3


class Outcome(StrEnum):
    """The result for one message of a batch."""

    CREATED = "created"
    DUPLICATE = "duplicate"
    REPLACED = "replaced"
    RESCHEDULED = "rescheduled"
    CONFLICT = "conflict"


def decide(mode: int, state: str | None, sleeps: bool) -> Outcome:
    """The outcome of a put. `state`: of the message that has the id, None if it is unknown or cancelled. `sleeps`: that message
    has not come due; in long back-off its state is `sleep`, too, but it was delivered before.

    >>> decide(IfExists.KEEP, "ready", False), decide(IfExists.REPLACE, "history", False)
    (<Outcome.DUPLICATE: 'duplicate'>, <Outcome.REPLACED: 'replaced'>)
    >>> decide(IfExists.RESCHEDULE, "sleep", True), decide(IfExists.RESCHEDULE, "ready", False)
    (<Outcome.RESCHEDULED: 'rescheduled'>, <Outcome.CREATED: 'created'>)
    >>> decide(IfExists.RESCHEDULE, "reserve", False), decide(IfExists.ERROR, "dead", False)
    (<Outcome.CONFLICT: 'conflict'>, <Outcome.CONFLICT: 'conflict'>)
    """
    if state is None:
        return Outcome.CREATED
    if mode == IfExists.KEEP:
        return Outcome.DUPLICATE
    if mode == IfExists.ERROR or state == "reserve":
        return Outcome.CONFLICT
    if mode == IfExists.REPLACE:
        return Outcome.REPLACED
    return Outcome.RESCHEDULED if sleeps else Outcome.CREATED
