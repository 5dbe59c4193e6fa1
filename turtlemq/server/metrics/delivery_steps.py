"""Where the time between due and the consumer's socket goes, for messages that a waiting fetch gets: one histogram for each step.

Times are monotonic seconds. A delivery adds one value to each step, about 3 µs in all; nothing is added while nothing waits.
"""

from __future__ import annotations

from time import perf_counter

from turtlemq.histogram import FINE_SECONDS, Histogram

STEPS = {
    "timer": "from the due time until the timer rings and the tick begins",
    "handoff": "until the due messages are in the ready log",
    "reserve": "until the messages of all waiting fetches are leased",
    "wake": "until the fetch goes on",
    "encode": "until the answer is made",
    "send": "until the system has it",
}
DELIVERED = "delivered_s"  # of a request: when its answer was made, if it had waited


class DeliverySteps:
    """The histograms. Used on the event loop."""

    def __init__(self) -> None:
        self.seconds = {step: Histogram(FINE_SECONDS) for step in STEPS}
        self._tick = (0.0, 0.0, 0.0)  # seconds of its steps
        self._ended_s = 0.0  # the end of the last tick
        self._woken_s: float | None = None

    def ticked(self, late_s: float, begun_s: float, handed_off_s: float) -> None:
        """Note a tick that ends now: how late its timer rang, when it began, and when the messages were in the ready log."""
        self._ended_s = perf_counter()
        self._tick = max(0.0, late_s), handed_off_s - begun_s, self._ended_s - handed_off_s

    def woken(self) -> None:
        """A waiting fetch goes on, with messages of the last tick."""
        self._woken_s = perf_counter()
        for step, seconds in zip(STEPS, (*self._tick, self._woken_s - self._ended_s), strict=False):
            self.seconds[step].add(seconds)

    def take_woken(self) -> float | None:
        """When the fetch that goes on was woken; None if it did not wait. Requires: no await since."""
        woken_s, self._woken_s = self._woken_s, None
        return woken_s

    def encoded(self, woken_s: float) -> float:
        """The answer is made. Returns the time."""
        now_s = perf_counter()
        self.seconds["encode"].add(now_s - woken_s)
        return now_s

    def sent(self, encoded_s: float) -> None:
        """The system has the answer."""
        self.seconds["send"].add(perf_counter() - encoded_s)
