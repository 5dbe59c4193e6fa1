"""Flow control: how much may come in and go out. Pure: time is an argument, in seconds of a clock that never goes back.

One bucket does both jobs. As a **token bucket** it lets producers save up a burst; as a **leaky bucket** with next to no room it
lets deliveries drip out evenly. All of it is O(1), and a topic without a rate costs one comparison.

A request for more than a burst is not refused for ever: it passes when the bucket is full, and those who come after it wait until
the debt is paid. So over a long time the mean is the rate, and a batch is never split.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.settings import Settings

DRIP_S = (
    0.1  # deliveries that nobody took are saved up for so long: a consumer that fetches ten times a second gets all of its rate
)
CLIENTS_MAX = (
    10_000  # buckets that are kept; beyond, the one unused for the longest is forgotten, and starts full when it is seen again
)
TOPICS_MAX = 100_000


class Bucket:
    """Fills with `rate` a second up to `burst`.

    >>> bucket = Bucket(rate=10, burst=5, now=0)
    >>> bucket.wait(5, 0), bucket.spend(5, 0), bucket.wait(1, 0)
    (0.0, None, 0.1)
    >>> bucket.wait(8, 0.5), bucket.spend(8, 0.5), round(bucket.wait(1, 0.5), 3)  # into debt by 3
    (0.0, None, 0.4)
    """

    __slots__ = ("rate", "burst", "_level", "_at")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, now

    def _fill(self, now: float) -> float:
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait(self, count: float, now: float) -> float:
        """Seconds until so many may pass; 0: now. More than a burst may pass when the bucket is full."""
        short = min(count, self.burst) - self._fill(now)
        return short / self.rate if short > 1e-9 else 0.0

    def spend(self, count: float, now: float) -> None:
        """So many have passed."""
        self._level = self._fill(now) - count

    def room(self, now: float) -> int:
        """How many whole ones may pass now.

        >>> Bucket(rate=10, burst=2.5, now=0).room(0)
        2
        """
        return max(0, math.floor(self._fill(now) + 1e-9))

    def adjust(self, rate: float, burst: float, now: float) -> None:
        """Go on with another rate: what was saved up is kept as far as it fits."""
        self._level = min(self._fill(now), burst)
        self.rate, self.burst = rate, burst


class BucketTable:
    """Buckets by key, at most `limit`: the one that was not used for the longest goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Hashable, rate: float, burst: float, now: float) -> Bucket:
        """The bucket of `key`, as its settings say by now."""
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = Bucket(rate, burst, now)
            if len(self._buckets) > self._limit:
                self._buckets.popitem(last=False)
            return found
        self._buckets.move_to_end(key)
        if (found.rate, found.burst) != (rate, burst):
            found.adjust(rate, burst, now)
        return found


class ByteBudget:
    """Bytes in memory: of requests from when they arrive until they are answered, of answers until somebody has taken them.

    >>> held = ByteBudget(100); held.take(80); held.give(50); held.take(70); held.bytes
    100
    """

    __slots__ = ("most", "bytes", "_what")

    def __init__(self, most: int, what: str = "requests") -> None:
        self.most, self.bytes, self._what = most, 0, what

    def take(self, count: int) -> None:
        """Make room for so many more, or raise `Overloaded`."""
        if self.bytes + count > self.most:
            raise Overloaded(
                f"{self._what} of {self.bytes:,} bytes are under way, and {self.most:,} are the most", retry_after_ms=1_000
            )
        self.bytes += count

    @property
    def full(self) -> bool:
        """Is there no room at all?"""
        return self.bytes >= self.most

    def refuse_if_full(self) -> None:
        """Raise `Overloaded` where others do not take their answers."""
        if self.full:
            self.take(1)

    def add(self, count: int) -> None:
        """So many are there already, room or not."""
        self.bytes += count

    def give(self, count: int) -> None:
        """So many are gone."""
        self.bytes -= count


class FlowControl:
    """Every bucket of a server, and what it holds."""

    def __init__(self, client_per_s: float = 0, client_burst: int = 0, held_bytes_max: int = 512 << 20) -> None:
        self.request_bytes = ByteBudget(held_bytes_max)
        self.answer_bytes = ByteBudget(held_bytes_max, "answers")  # apart: unread answers must not block acks
        self.client_rate, self._client_burst = client_per_s, burst_of(client_per_s, client_burst)
        self._topics, self._clients, self._groups = BucketTable(TOPICS_MAX), BucketTable(CLIENTS_MAX), BucketTable(TOPICS_MAX)

    def admit_produced(self, topic: str, settings: Settings, client: str, count: int, now: float) -> None:
        """Let `count` messages of a client into a topic, or raise `RateLimited` and let none in."""
        buckets: list[tuple[str, Bucket]] = []
        rate = settings.rate_produce_per_s
        if rate:
            bucket = self._topics.get(topic, rate, burst_of(rate, settings.rate_burst), now)
            buckets.append((f"topic {topic!r} takes", bucket))
        if self.client_rate:
            bucket = self._clients.get(client, self.client_rate, self._client_burst, now)
            buckets.append(("a client may send", bucket))
        for said, bucket in buckets:
            if wait := bucket.wait(count, now):
                raise RateLimited(
                    f"{said} {bucket.rate:g} messages a second, and {bucket.burst:g} at once; nothing was stored",
                    retry_after_ms=math.ceil(wait * 1000),
                )
        for _, bucket in buckets:
            bucket.spend(count, now)

    def deliverable(self, topic: str, group: str, settings: Settings, count: int, now: float) -> int:
        """How many of `count` messages a group may be given now."""
        rate = settings.rate_deliver_per_s
        return count if not rate else min(count, self._drip(topic, group, rate, now).room(now))

    def delivered(self, topic: str, group: str, settings: Settings, count: int, now: float) -> None:
        """A group was given `count` messages."""
        rate = settings.rate_deliver_per_s
        if rate and count:
            self._drip(topic, group, rate, now).spend(count, now)

    def delivery_pause(self, topic: str, group: str, settings: Settings, now: float) -> float:
        """Seconds until a group may be given its next message."""
        rate = settings.rate_deliver_per_s
        return self._drip(topic, group, rate, now).wait(1, now) if rate else 0.0

    def _drip(self, topic: str, group: str, rate: float, now: float) -> Bucket:
        return self._groups.get((topic, group), rate, max(1.0, rate * DRIP_S), now)


def burst_of(rate: float, burst: int) -> float:
    """What may be saved up: as told, else what comes in one second, and at least one message.

    >>> burst_of(50, 0), burst_of(0.5, 0), burst_of(50, 200)
    (50, 1, 200)
    """
    return burst or max(rate, 1)
