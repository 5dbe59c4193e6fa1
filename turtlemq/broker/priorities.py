"""Policies of priorities, pure functions: shares of a fetch, retries among fresh messages, pre-emption, dynamic weights.

A fetch of n messages is dealt out in two steps. In `shares` each priority gets a quota of n by its weight, and `preempted` moves
quotas to high priority while its messages wait too long. In `allot` each takes up to its quota, and leftovers of one go to high,
normal, low. Half of the messages of a priority at most are retries while fresh ones wait.

Fractions are carried over from fetch to fetch (`Carry`), so fetches of one message are as fair as large ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from turtlemq.model import Priority
from turtlemq.settings import Settings

HIGH, NORMAL, LOW = int(Priority.HIGH), int(Priority.NORMAL), int(Priority.LOW)
LEVELS = (HIGH, NORMAL, LOW)  # in order of delivery
EMPTY_MS = 1_000  # pre-emption ends when no message of high priority was ready for so long
BOOST, BOOST_MAX = 1.5, 8.0  # a raise of the weight of high, and all raises together
RAISE_AFTER, FALL_AFTER = 2, 10  # looks, one a second, above the goal before a raise, and far below it before the way back
FALL_BELOW, FALL_STEPS = 0.6, 10  # far below: this part of the goal; steps of the way back
Levels = dict[int, int]  # numbers by priority


@dataclass(slots=True)
class Carry:
    """Fractions of messages that a group owes to its priorities."""

    shares: dict[int, float] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)  # while high pre-empts
    retries: dict[int, float] = field(default_factory=dict)  # of each half

    def copy(self) -> Carry:
        return Carry(dict(self.shares), dict(self.floors), dict(self.retries))


def shares(count: int, carry: dict[int, float], weights: Mapping[int, float]) -> Levels:
    """How many of `count` messages each priority gets. Fractions are carried over, so a weight above 0 is never starved.

    >>> base = {HIGH: 6, NORMAL: 3, LOW: 1}
    >>> shares(10, {}, base)
    {1: 6, 0: 3, 2: 1}
    >>> carry: dict[int, float] = {}
    >>> [next(level for level, n in shares(1, carry, base).items() if n) for _ in range(10)].count(2)
    1
    >>> shares(10, {}, dict.fromkeys(base, 0))
    {1: 0, 0: 0, 2: 0}
    """
    total = sum(weights.values())
    if not total:
        return dict.fromkeys(weights, 0)
    for level, weight in weights.items():
        carry[level] = carry.get(level, 0.0) + count * weight / total if weight else 0.0
    given = {level: max(0, int(carry[level] + 1e-9)) for level in weights}
    spare = count - sum(given.values())
    for level in sorted(given, key=lambda level: -(carry[level] - given[level])):
        extra = 1 if spare > 0 and weights[level] else 0
        given[level] += extra
        spare -= extra
    for level, n in given.items():
        carry[level] -= n
    return given


def allot(
    count: int, quotas: Mapping[int, int], fresh: Levels, due: Levels, carry: dict[int, float]
) -> dict[int, tuple[int, int]]:
    """How many due retries and how many fresh messages of each priority a fetch of `count` takes, where so many wait. Takes
    `count` if as many wait.

    >>> allot(10, {HIGH: 6, NORMAL: 3, LOW: 1}, {HIGH: 2, NORMAL: 50, LOW: 50}, {HIGH: 0, NORMAL: 9, LOW: 0}, {})
    {1: (0, 2), 0: (4, 3), 2: (0, 1)}
    """
    waiting = {level: fresh.get(level, 0) + due.get(level, 0) for level in LEVELS}
    taken = {level: min(quotas.get(level, 0), waiting[level]) for level in LEVELS}
    left = count - sum(taken.values())
    for level in LEVELS:
        more = min(left, waiting[level] - taken[level])
        taken[level] += more
        left -= more
    out = {}
    for level, n in taken.items():
        retries = _half(level, n, fresh.get(level, 0), due.get(level, 0), carry)
        out[level] = retries, n - retries
    return out


def _half(level: int, count: int, fresh: int, due: int, carry: dict[int, float]) -> int:
    """How many of the `count` messages that a priority gets are due retries."""
    if not (fresh and due):
        return count if due else 0
    exact = count / 2 + carry.get(level, 0.0)
    retries = max(min(int(exact + 0.5), due, count), count - fresh)
    carry[level] = max(-0.5, min(0.5, exact - retries))
    return retries


# Pre-emption


@dataclass(frozen=True, slots=True)
class Preemption:
    """Whether high pre-empts the others in a group, and when a message of high priority was ready there last."""

    active: bool = False
    ready_ms: int = 0


def preempt(state: Preemption, waiting: int, wait_ms: int, room: int, after_ms: int, now_ms: int) -> Preemption:
    """The state at a fetch with `room` for messages, where `waiting` ones of high priority are ready, the first for `wait_ms`.
    Begins when that is above `after_ms`, or when they are more than the room; ends when there were none for `EMPTY_MS`.

    >>> begun = preempt(Preemption(), 5, 51, 10, 50, 1_000)
    >>> begun, preempt(begun, 0, 0, 10, 50, 1_999).active, preempt(begun, 0, 0, 10, 50, 2_000).active
    (Preemption(active=True, ready_ms=1000), True, False)
    """
    if not after_ms:
        return Preemption()
    lasts = state.active and now_ms - state.ready_ms < EMPTY_MS
    if not waiting:
        return replace(state, active=lasts)
    return Preemption(lasts or wait_ms > after_ms or waiting > room, now_ms)


def preempted(count: int, quotas: Levels, waiting: int, floor: float, carry: dict[int, float]) -> Levels:
    """Quotas while high pre-empts: for the `waiting` messages of high priority, low gives way first, then normal. Each of them
    keeps `floor` of the `count` messages.

    >>> quotas = {HIGH: 60, NORMAL: 30, LOW: 10}
    >>> preempted(100, quotas, 80, 0.05, {}), preempted(100, quotas, 500, 0.05, {})
    ({1: 80, 0: 15, 2: 5}, {1: 90, 0: 5, 2: 5})
    """
    quotas = dict(quotas)
    for level in (LOW, NORMAL):
        owed = carry.get(level, 0.0) + count * floor
        kept = min(int(owed + 1e-9), quotas[level])
        given = max(0, min(waiting - quotas[HIGH], quotas[level] - kept))
        quotas[level] -= given
        quotas[HIGH] += given
        carry[level] = max(0.0, min(1.0, owed - quotas[level]))
    return quotas


# Dynamic weights


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of high, as a factor of the topic's setting, and how it changes."""

    factor: float = 1.0
    above: int = 0  # looks in a row with the p95 above the goal, since the last raise
    below: int = 0  # looks in a row with the p95 far below it
    step: float = 0.0  # of the way back; 0: not on it


def weights_of(settings: Settings, weight: Weight) -> dict[int, float]:
    """The weights of a topic by priority. `weight`: of the group, which counts only if the topic has a goal for high.

    >>> weights_of(Settings(), Weight(2.0)), weights_of(Settings(priority_high_p95_ms=50), Weight(2.0))[HIGH]
    ({1: 6.0, 0: 3, 2: 1}, 12.0)
    """
    factor = weight.factor if settings.priority_high_p95_ms else 1.0
    return {HIGH: settings.priority_high * factor, NORMAL: settings.priority_normal, LOW: settings.priority_low}


def weigh(state: Weight, p95_ms: float | None, goal_ms: float) -> Weight:
    """The weight after a look, one a second, at the p95 of the waits of high; None: too few waited to tell, which counts as far
    below the goal. Above the goal twice in a row: it is raised. Far below for ten seconds: it goes back in ten steps. Between:
    it stays.

    >>> state = Weight()
    >>> for _ in range(4):
    ...     state = weigh(state, 90, 50)
    >>> state.factor, weigh(state, 40, 50).factor
    (2.25, 2.25)
    >>> for _ in range(19):
    ...     state = weigh(state, 10, 50)
    >>> state.factor
    1.0
    """
    if p95_ms is not None and p95_ms > goal_ms:
        if state.above + 1 < RAISE_AFTER:
            return Weight(state.factor, state.above + 1)
        return Weight(min(state.factor * BOOST, BOOST_MAX))
    if p95_ms is not None and p95_ms >= FALL_BELOW * goal_ms:
        return Weight(state.factor)
    below = min(state.below + 1, FALL_AFTER)
    if below < FALL_AFTER:
        return Weight(state.factor, below=below)
    step = state.step or (state.factor - 1) / FALL_STEPS
    factor = state.factor - step
    return Weight(factor if factor > 1 + step / 2 else 1.0, below=below, step=step if factor > 1 + step / 2 else 0.0)
