"""The standing of a message: the state that it is in for one group, decided from facts by one ordered table.

A fact is one bit; the facts of a message and a group are an `int`, those of many pairs an integer array. `TABLE` gives the
state for the first fact that holds. It is unrolled once into a lookup table over all combinations, which answers for one pair
(`decide`) and for an array of pairs (`decide_all`) alike, so the two cannot disagree. Facts of many messages in many groups are a
table, a row for each message and a column for each group: `standings_in` gives the standings in each row as a set, for the rules
over all groups, so that their cost does not multiply.

Everything else that follows from a standing is here as well: the state over all groups, whether a message may be cancelled,
whether a group still gets a dead letter's message, whether an id is known, and which retries a move of the group has made void.

Pure: no files, no clock. Facts are gathered by `broker.facts` and `topic.facts`, and from files alone by Spark's kind `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from turtlemq import lifecycle

if TYPE_CHECKING:
    from turtlemq.model import I64, Mask

# Facts about a message and a group

CANCELLED: Final = 1  # the message was cancelled: this holds for every group
LEASED: Final = 2  # a consumer of the group holds it
ASLEEP: Final = 4  # a valid retry of the group sleeps in the Index: long back-off, or a requeued dead letter
WAITING: Final = 8  # a failed or expired delivery waits in memory for the next attempt
UNFETCHED: Final = 16  # its document, or a valid retry of the group, lies in the ready log at or after the group's cursor
LETTER: Final = 32  # the dead letters hold it for the group
PREDATES: Final = 64  # its document lies before the place where the group began, and the group was never moved back to it
RETAINED: Final = 128  # its document, or a valid retry of the group, is in the ready log: the id is known

NEVER_HAD = "never had"  # the standing in a group that the message predates; shown as `history`
STANDINGS = (*lifecycle.STATES, NEVER_HAD)  # the code of a standing is its index here

# The first fact that holds decides. A lease outranks a letter, and so do retries and unfetched documents: the letter may be from
# before a move of the group. It outranks `history` for the same reason: as long as it exists, a requeue can deliver the message.
TABLE: tuple[tuple[int, str], ...] = (
    (CANCELLED, "cancelled"),
    (LEASED, "reserve"),
    (ASLEEP, "sleep"),
    (WAITING, "ready"),
    (UNFETCHED, "ready"),
    (LETTER, "dead"),
    (PREDATES, NEVER_HAD),
    (0, "history"),
)

_ALL = 2 * RETAINED


def _first(facts: int) -> str:
    """The table, read from top to bottom."""
    return next(standing for fact, standing in TABLE if facts & fact == fact)


_LOOKUP = tuple(map(_first, range(_ALL)))
_CODES = np.array([STANDINGS.index(standing) for standing in _LOOKUP], np.int8)


def decide(facts: int) -> str:
    """The standing of one message in one group. O(1).

    >>> decide(LETTER), decide(LETTER | UNFETCHED), decide(0)
    ('dead', 'ready', 'history')
    """
    return _LOOKUP[facts]


def decide_all(facts: I64) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """The standings of many pairs of message and group, as indexes into `STANDINGS`. 1 ns each."""
    return _CODES[facts]


FactTable = np.ndarray[tuple[int, int], np.dtype[np.uint8]]  # a row for each message, a column for each group


def standings_in(facts: FactTable) -> list[frozenset[str]]:
    """The standings in each row. 2 ns for each pair of message and group.

    >>> [sorted(row) for row in standings_in(np.array([[0, LEASED], [UNFETCHED, UNFETCHED]], np.uint8))]
    [['history', 'reserve'], ['ready']]
    """
    present = np.bitwise_or.reduce(np.uint8(1) << _CODES[facts].view(np.uint8), axis=1)
    return [_set_of(mask) for mask in present.tolist()]


@cache
def _set_of(mask: int) -> frozenset[str]:
    return frozenset(standing for code, standing in enumerate(STANDINGS) if mask >> code & 1)


def shown(standing: str) -> str:
    """The state that a standing is shown as: a group that never had a message has nothing to do with it any more."""
    return "history" if standing == NEVER_HAD else standing


# Over all groups

_ORDER = ("cancelled", "reserve", "sleep", "ready", "dead", "history", NEVER_HAD)
UNCLAIMED: Final = UNFETCHED  # the facts of a ready message for the first group to come, where there is no group yet


def over_groups(standings: Set[str]) -> str:
    """The state of a message with these standings, of which there must be one at least: the one that is furthest from the end.

    >>> over_groups({"history", "ready"}), over_groups({NEVER_HAD})
    ('ready', 'history')
    """
    return shown(next(standing for standing in _ORDER if standing in standings))


# Operations

CANCELLED_BEFORE = "cancelled before"  # an answer, not a state: the message had been cancelled before this request
_CANCELLABLE = lifecycle.states_with(event="cancel") | {NEVER_HAD}
_PENDING = lifecycle.states_with(causes=frozenset({"clock", "consumer"}))
_TRACES = RETAINED | ASLEEP | LETTER


def cancel_answer(standings: Set[str], has_letter: bool = False) -> str:
    """`cancelled` if a message with these standings in its groups may be cancelled; otherwise the state that forbids it.

    A message is cancelled in all groups or in none. A dead letter forbids it even if its group is gone or was moved back,
    because a requeue would deliver the message.

    >>> cancel_answer({"ready", NEVER_HAD}), cancel_answer({"ready", "reserve"}), cancel_answer({"ready"}, has_letter=True)
    ('cancelled', 'reserve', 'dead')
    """
    if has_letter:
        return "dead"
    blocking = standings - _CANCELLABLE
    if "cancelled" in blocking:
        return CANCELLED_BEFORE
    return over_groups(blocking) if blocking else "cancelled"


def is_pending(facts: int) -> bool:
    """Does the group get the message, or has it, whatever becomes of a dead letter? Then a requeue only removes the letter.

    >>> is_pending(LETTER), is_pending(LETTER | ASLEEP)
    (False, True)
    """
    return decide(facts & ~LETTER) in _PENDING


def is_known(facts: int) -> bool:
    """Is an id with these facts, over all groups, still known? Then a second message of that id would be taken for the first,
    so a put is a duplicate.

    >>> is_known(RETAINED), is_known(LETTER), is_known(PREDATES)
    (True, True, False)
    """
    return bool(facts & _TRACES)


# Moves of a group make retries void


def add_move(moves: list[tuple[int, int]], newest_seq: int, offset: int) -> list[tuple[int, int]]:
    """The moves of a group after one more, to `offset`, at a time when `newest_seq` was the newest seq of the Index. They rise in
    both; a move further back replaces those that it implies.

    >>> add_move([(5, 0), (9, 70)], 12, 50)
    [(5, 0), (12, 50)]
    """
    return [*((seq, first) for seq, first in moves if first < offset), (newest_seq, offset)]


def is_void(born: int, moves: Sequence[tuple[int, int]], epoch: int, order: int, left: int) -> bool:
    """Is a retry void? It is if it belongs to an earlier group of the same name, or if the group was moved after the retry was
    written (`order`: its seq) to or before the ready offset that the message had left (`left`): that document comes again itself.

    >>> is_void(3, [(100, 7)], epoch=2, order=200, left=1), is_void(1, [(100, 7)], 2, 50, 7), is_void(1, [(100, 7)], 2, 50, 6)
    (True, True, False)
    """
    return epoch < born or any(order <= seq and first <= left for seq, first in moves)


def are_void(born: int, moves: Sequence[tuple[int, int]], epoch: I64, order: I64, left: I64) -> Mask:
    """`is_void` for columns of retries. O(moves) array operations."""
    void: Mask = epoch < born
    for seq, first in moves:
        void = void | ((order <= seq) & (left >= first))
    return void


def first_had(moves: Sequence[tuple[int, int]]) -> int:
    """The lowest offset that a group was ever placed at: documents before it predate the group.

    >>> first_had([(5, 30), (9, 70)])
    30
    """
    return moves[0][1] if moves else 0
