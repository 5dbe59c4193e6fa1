"""A limit on bytes a second, for work beside that of clients. Pure: the caller sleeps."""

from __future__ import annotations


class Pace:
    """When the next bytes may be sent or read, so that there are at most so many a second.

    >>> pace = Pace(1_000)
    >>> pace.wait_s(500, now_s=10.0), pace.wait_s(500, now_s=10.1), pace.wait_s(500, now_s=20.0)
    (0.0, 0.4, 0.0)
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_s = bytes_per_s, 0.0

    def wait_s(self, size: int, now_s: float) -> float:
        """The pause before the next `size` bytes."""
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + size / self._bytes_per_s
        return round(start_s - now_s, 6)
