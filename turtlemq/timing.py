"""Timers behind one interface, and the rules about beats and timeouts. Pure: `WheelTimer` gets the time as an argument.

A shell runs `TimerService` on its event loop (`server.alarm_timer`); tests and simulations turn a wheel instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from turtlemq.errors import InvalidArgument

EARLIEST, LATEST = 2.5, 5.0  # of a beat: the range of timeouts
UPPER_MIN = 3.0  # of a beat: an upper end below it loses too many that are only slow
SPARE = 2.0  # a budget for a change of leader, in timeouts


def check_timing(beat_ms: float, timeout_ms: tuple[float, float], budget_ms: float | None = None) -> list[str]:
    """Check how beats (each `beat_ms`), the time without a beat until another one takes over (a random one of this range), and
    the budgets of callers fit together. Raises `InvalidArgument`; returns warnings.

    >>> check_timing(600, (1_500, 3_000), 30_000), len(check_timing(600, (1_500, 3_000), 5_000))
    ([], 1)
    >>> check_timing(1_000, (1_000, 4_000))
    Traceback (most recent call last):
    turtlemq.errors.InvalidArgument: a timeout of 1000 to 4000 ms does not fit beats each 1000 ms: 2500 to 5000 ms does
    """
    low, high = timeout_ms
    if not (EARLIEST * beat_ms <= low <= high <= LATEST * beat_ms and high >= UPPER_MIN * beat_ms):
        given, fits = f"{low:.0f} to {high:.0f} ms", f"{EARLIEST * beat_ms:.0f} to {LATEST * beat_ms:.0f} ms"
        raise InvalidArgument(f"a timeout of {given} does not fit beats each {beat_ms:.0f} ms: {fits} does")
    if budget_ms is not None and budget_ms < SPARE * high:
        return [f"callers that wait {budget_ms:.0f} ms may see errors while another takes over, in up to {high:.0f} ms"]
    return []


class Job(Protocol):
    """A call that a timer will make."""

    def cancel(self) -> None:
        """Do not make it (again)."""


class TimerService(Protocol):
    """Makes calls at later times."""

    def after_ms(self, delay_ms: float, call: Callable[[], object]) -> Job:
        """Make a call once, after this time."""

    def every_ms(self, period_ms: float, call: Callable[[], object]) -> Job:
        """Make a call each period. The first one comes after a random part of it, so that servers which were started together do
        not work together. Rounds that were missed are skipped."""


def next_round(due_ms: float, period_ms: float, now_ms: float) -> float:
    """The time of the round behind one that was due; rounds before `now_ms` are left out.

    >>> next_round(100, 50, 110), next_round(100, 50, 275), next_round(100, 50, 300)
    (150, 300, 350)
    """
    return due_ms + (max(0, now_ms - due_ms) // period_ms + 1) * period_ms


@dataclass(eq=False, slots=True)
class _Entry:
    """A job in the wheel."""

    due_ms: float
    call: Callable[[], object]
    period_ms: float  # 0: once
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class WheelTimer:
    """A `TimerService` that stands still until `advance`. Jobs lie in slots of `tick_ms`, so each costs O(1).

    >>> wheel, rang = WheelTimer(), []
    >>> _ = wheel.after_ms(25, lambda: rang.append(("once", wheel.now_ms)))
    >>> _ = wheel.every_ms(40, lambda: rang.append(("each", wheel.now_ms)))
    >>> wheel.advance(100)
    >>> rang
    [('each', 20.0), ('once', 25.0), ('each', 60.0), ('each', 100.0)]
    """

    def __init__(self, tick_ms: int = 10, chance: Callable[[], float] = lambda: 0.5) -> None:
        """`chance`: a random number for the first round of `every_ms`."""
        self.now_ms = 0.0
        self._tick_ms, self._chance = tick_ms, chance
        self._slots: dict[int, list[_Entry]] = {}

    def after_ms(self, delay_ms: float, call: Callable[[], object]) -> Job:
        """Make a call once, after this time."""
        return self._add(_Entry(self.now_ms + max(0, delay_ms), call, 0))

    def every_ms(self, period_ms: float, call: Callable[[], object]) -> Job:
        """Make a call each period, the first time after a random part of it."""
        return self._add(_Entry(self.now_ms + period_ms * self._chance(), call, period_ms))

    def _add(self, entry: _Entry) -> _Entry:
        self._slots.setdefault(int(entry.due_ms // self._tick_ms), []).append(entry)
        return entry

    def advance(self, passed_ms: float) -> None:
        """Let time pass, and make all calls that come due, each at its time."""
        end_ms = self.now_ms + passed_ms
        while self._slots and (slot := min(self._slots)) <= end_ms // self._tick_ms:
            due = [entry for entry in self._slots[slot] if entry.due_ms <= end_ms and not entry.is_cancelled]
            first = min(due, key=lambda entry: entry.due_ms, default=None)
            if first is None:
                left = [entry for entry in self._slots.pop(slot) if not entry.is_cancelled]
                if left:
                    self._slots[slot] = left
                    break
                continue
            self._slots[slot].remove(first)
            self._ring(first)
        self.now_ms = end_ms

    def _ring(self, entry: _Entry) -> None:
        self.now_ms = max(self.now_ms, entry.due_ms)
        if entry.period_ms:
            entry.due_ms = next_round(entry.due_ms, entry.period_ms, self.now_ms)
            self._add(entry)
        entry.call()
