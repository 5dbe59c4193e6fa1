"""The window of a consumer's stream: how many deliveries may be unacknowledged. Pure: time is an argument, in seconds.

It adapts to the client: a client with one slow handler must not hold messages that another client could begin at once.
"""

from __future__ import annotations

FIRST = 16
FAST_S = 1.0  # a full window that was acknowledged so fast grows to the acks of this time, by the pace of the last ones,
GROWTH = 2, 8  # but at least and at most by these factors
SLOW_S = 5.0  # a window whose oldest delivery is so old is halved


class Window:
    """One adaptive window, between 1 and `most`.

    >>> window = Window(100)
    >>> window.fill(16, now=0.0), window.acknowledge(16, now=0.5), window.size
    (None, None, 32)
    >>> window.fill(32, now=1.0), window.acknowledge(32, now=1.4), window.size
    (None, None, 80)
    >>> window.fill(80, now=2.0), window.acknowledge(80, now=2.0), window.size
    (None, None, 100)
    >>> window.review(oldest_s=6.0, now=7.0), window.size
    (None, 50)
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.size = min(FIRST, self.most)
        self._acknowledged = 0
        self._full: tuple[float, int] | None = None  # when it was full, and the count of acks that empties it
        self._halved_at = float("-inf")

    def limit(self, most: int) -> None:
        """Use another upper bound from now on."""
        self.most = max(1, most)
        self.size = min(self.size, self.most)

    def fill(self, unacknowledged: int, now: float) -> None:
        """Note how many deliveries are unacknowledged after some were added."""
        if unacknowledged >= self.size and self._full is None:
            self._full = now, self._acknowledged + unacknowledged

    def acknowledge(self, count: int, now: float) -> None:
        """Note acknowledged deliveries."""
        self._acknowledged += count
        if self._full is not None and self._acknowledged >= self._full[1]:
            taken = now - self._full[0]
            if taken <= FAST_S:
                least, most = GROWTH
                factor = most if taken * most <= FAST_S else max(least, FAST_S / taken)
                self.size = min(int(factor * self.size), self.most)
            self._full = None

    def review(self, oldest_s: float, now: float) -> None:
        """Look at the age of the oldest unacknowledged delivery, about once a second."""
        if oldest_s >= SLOW_S and now - self._halved_at >= SLOW_S:
            self.size, self._halved_at, self._full = max(1, self.size // 2), now, None
