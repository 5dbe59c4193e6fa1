"""Flow control: rates of messages in and out, and budgets for bytes in memory. Pure: time is an argument, in monotonic seconds.

One class serves both directions. As a **token bucket** it lets producers save up a burst; with next to no room it is a **leaky
bucket** from which deliveries drip evenly. Everything is O(1); a topic without a rate costs one comparison.

A batch larger than the burst is never refused for ever, and never split: it passes when the bucket is full and leaves a debt, for
which later requests wait. So the long-term mean is the rate.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.pace import Pace
from turtlemq.settings import Settings

DRIP_S = 0.1  # unused deliveries of so many seconds are saved up: a consumer that fetches ten times a second gets its full rate
KEPT_FROM_LOW, KEPT_BURST_MIN = 0.2, 10  # the part of a bucket that is not for low priority, and the least burst that has it
CLIENTS_MAX = 10_000  # buckets; beyond it, the least recently used one is dropped, and starts full when its client comes again
TOPICS_MAX = 100_000


class Bucket:
    """A token bucket: fills with `rate` a second up to `burst`; may go into debt.

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

    def wait(self, count: float, now: float, kept: float = 0) -> float:
        """Seconds until `count` may pass and leave `kept`; 0: now. More than a burst may pass when the bucket is full."""
        short = min(count + kept, self.burst) - self._fill(now)
        return short / self.rate if short > 1e-9 else 0.0

    def spend(self, count: float, now: float) -> None:
        """Take out `count`; the level may become negative."""
        self._level = self._fill(now) - count

    def room(self, now: float) -> int:
        """How many whole messages may pass now.

        >>> Bucket(rate=10, burst=2.5, now=0).room(0)
        2
        """
        return max(0, math.floor(self._fill(now) + 1e-9))

    def adjust(self, rate: float, burst: float, now: float) -> None:
        """Go on with another rate, and keep the present level as far as it fits."""
        self._level = min(self._fill(now), burst)
        self.rate, self.burst = rate, burst


class BucketTable:
    """Buckets by key, at most `limit`; the least recently used one is dropped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Hashable, rate: float, burst: float, now: float) -> Bucket:
        """The bucket of `key`, with the rate and burst that its settings have now."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(rate, burst, now)
            if len(self._buckets) > self._limit:
                self._buckets.popitem(last=False)
            return bucket
        self._buckets.move_to_end(key)
        if (bucket.rate, bucket.burst) != (rate, burst):
            bucket.adjust(rate, burst, now)
        return bucket


class ByteBudget:
    """A limit on bytes in memory: of requests until they are answered, or of answers until clients have read them.

    >>> held = ByteBudget(100); held.take(80); held.give(50); held.take(70); held.bytes
    100
    """

    __slots__ = ("most", "bytes", "_what")

    def __init__(self, most: int, what: str = "requests") -> None:
        self.most, self.bytes, self._what = most, 0, what

    def take(self, count: int) -> None:
        """Count `count` more bytes, or raise `Overloaded` if they exceed the limit."""
        if self.bytes + count > self.most:
            raise Overloaded(
                f"{self._what} of {self.bytes:,} bytes are under way, and {self.most:,} are the most", retry_after_ms=1_000
            )
        self.bytes += count

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.bytes >= self.most

    def refuse_if_full(self) -> None:
        """Raise `Overloaded` if the limit is reached."""
        if self.full:
            self.take(1)

    def add(self, count: int) -> None:
        """Count `count` more bytes, even beyond the limit."""
        self.bytes += count

    def give(self, count: int) -> None:
        """Count `count` bytes less."""
        self.bytes -= count


class FlowControl:
    """All rates and byte budgets of a server, and the pace of storing."""

    def __init__(self, client_per_s: float = 0, client_burst: int = 0, held_bytes_max: int = 512 << 20) -> None:
        self.pace = Pace()
        self.request_bytes = ByteBudget(held_bytes_max)
        self.answer_bytes = ByteBudget(held_bytes_max, "answers")  # apart: unread answers must not block acks
        self.client_rate, self._client_burst = client_per_s, burst_of(client_per_s, client_burst)
        self._topics, self._clients = BucketTable(TOPICS_MAX), BucketTable(CLIENTS_MAX)
        self._groups, self._group_bytes = BucketTable(TOPICS_MAX), BucketTable(TOPICS_MAX)

    def admit_produced(
        self,
        topic: str,
        settings: Settings,
        client: str,
        count: int,
        now: float,
        first: Callable[[], object] = int,
        is_low: bool = False,
    ) -> None:
        """Admit `count` messages of a client into a topic, or raise `RateLimited` and admit none. `first`: called before anything
        is taken out of a bucket; it may raise, too. Low priority leaves a part of each bucket to others."""
        buckets: list[tuple[str, Bucket]] = []
        rate = settings.rate_produce_per_s / settings.partitions
        if rate:
            bucket = self._topics.get(topic, rate, burst_of(rate, -(-settings.rate_burst // settings.partitions)), now)
            buckets.append((f"topic {topic!r} takes", bucket))
        if self.client_rate:
            bucket = self._clients.get(client, self.client_rate, self._client_burst, now)
            buckets.append(("a client may send", bucket))
        for subject, bucket in buckets:
            if wait := bucket.wait(count, now, _kept(bucket) if is_low else 0):
                raise RateLimited(
                    f"{subject} {bucket.rate:g} messages a second, and {bucket.burst:g} at once; nothing was stored",
                    retry_after_ms=math.ceil(wait * 1000),
                )
        first()
        for _, bucket in buckets:
            bucket.spend(count, now)

    def deliverable(self, topic: str, group: str, settings: Settings, count: int, now: float) -> int:
        """How many of `count` messages a group may be given now. One answer may bring more bytes than the rate allows, and leaves
        a debt."""
        rate = settings.rate_deliver_per_s / settings.partitions
        if settings.rate_deliver_bytes_per_s and not self._byte_drip(topic, group, settings, now).room(now):
            return 0
        return count if not rate else min(count, self._drip(topic, group, rate, now).room(now))

    def deliverable_low(self, topic: str, group: str, settings: Settings, now: float) -> int | None:
        """How many of low priority a group may be given now, so that a part of the bucket is left to others; None: any number."""
        rate = settings.rate_deliver_per_s / settings.partitions
        if not rate:
            return None
        bucket = self._drip(topic, group, rate, now)
        return max(0, bucket.room(now) - math.ceil(_kept(bucket)))

    def delivered(self, topic: str, group: str, settings: Settings, count: int, now: float, size: int = 0) -> None:
        """Count messages that a group was given, of `size` bytes."""
        rate = settings.rate_deliver_per_s / settings.partitions
        if rate and count:
            self._drip(topic, group, rate, now).spend(count, now)
        if settings.rate_deliver_bytes_per_s and size:
            self._byte_drip(topic, group, settings, now).spend(size, now)

    def delivery_pause(self, topic: str, group: str, settings: Settings, now: float) -> float:
        """Seconds until a group may be given its next message; 0: now."""
        rate = settings.rate_deliver_per_s / settings.partitions
        pause = self._drip(topic, group, rate, now).wait(1, now) if rate else 0.0
        if settings.rate_deliver_bytes_per_s:
            pause = max(pause, self._byte_drip(topic, group, settings, now).wait(1, now))
        return pause

    def _drip(self, topic: str, group: str, rate: float, now: float) -> Bucket:
        return self._groups.get((topic, group), rate, max(1.0, rate * DRIP_S), now)

    def _byte_drip(self, topic: str, group: str, settings: Settings, now: float) -> Bucket:
        rate = settings.rate_deliver_bytes_per_s / settings.partitions
        return self._group_bytes.get((topic, group), rate, max(1.0, rate * DRIP_S), now)


def _kept(bucket: Bucket) -> float:
    """The part of a bucket that is not for low priority; a small bucket has none, or low priority would never pass."""
    return bucket.burst * KEPT_FROM_LOW if bucket.burst >= KEPT_BURST_MIN else 0.0


def burst_of(rate: float, burst: int) -> float:
    """The size of a bucket: `burst`, or by default the messages of one second, and at least one.

    >>> burst_of(50, 0), burst_of(0.5, 0), burst_of(50, 200)
    (50, 1, 200)
    """
    return burst or max(rate, 1)
