"""What a consumer has in hand, and what is to be done about it: fetch, handle, acknowledge, extend. No clock, no threads. Pure.

Leases are counted on this side's clock, from the moment in which the answer came, and a tenth shorter than they are, for the
answer was on its way for a while; extended ones from when that was asked for. What has waited in the queue until its lease ran
out is not handled: another consumer may have it. An ack of success is sent even then, for the work is done; one of failure is
not, for it would fail the other's attempt. What was settled before it came has no lease, and cannot be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turtlemq.client.calls import GROUP, fetch
from turtlemq.client.sending import Call
from turtlemq.client.wire import Message, seconds

FETCH_MAX = 10_000
ERROR_CHARS_MAX = 4_000
RETRY_S_MAX = 1e9  # a server refuses what reaches beyond its calendar, and all acks of that list with it
SURE = 0.9  # of a lease
RENEW = 2 / 3  # a lease is extended when this much of it is left
AUTO_WAIT_S = 2.0  # a long poll whose messages would be lost with it is not cut off, so it is short
STOPPED = "the consumer stopped before it came to this message"


class Retry(Exception):
    """Raised by a handler: this message failed, and is to be tried again after `delay` seconds (None: the topic's back-off)."""

    def __init__(self, error: str = "", *, delay: float | None = None) -> None:
        super().__init__(error or "the handler asked for another attempt")
        self.delay = seconds(delay)
        if self.delay is not None and not 0 <= self.delay <= RETRY_S_MAX:
            raise ValueError(f"delay is a number of seconds from 0 to {RETRY_S_MAX:,.0f}, not {delay!r:.80}")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a consumer works.

    ttr: a lease; it is extended while a handler runs, so it says how soon another gets what a killed consumer held.
    batch: 0: the handler gets a message; else a list of at most so many.
    prefetch: how many messages are in hand at most, those that are being handled included.
    limit_s: no lease is extended beyond this many seconds of handling; None: as long as it takes.
    """

    topic: str
    group: str = GROUP
    concurrency: int = 4
    batch: int = 0
    prefetch: int = 100
    ttr: float = 30.0
    wait: float = 20.0
    mode: Literal["at-least-once", "at-most-once"] = "at-least-once"
    ack_count: int = 500
    ack_linger_s: float = 0.01
    limit_s: float | None = None
    name: str = ""
    wire: Literal["json", "bson"] = "json"

    def __post_init__(self) -> None:
        if min(self.concurrency, self.prefetch, self.ack_count) < 1 or self.batch < 0 or self.ack_linger_s < 0:
            raise ValueError("concurrency, prefetch and ack_count are 1 or more, batch and ack_linger_s 0 or more")
        if self.ack_linger_s > self.ttr / 3:
            raise ValueError("ack_linger_s is a third of ttr or less: what is done is held until it is acknowledged")
        if self.ttr < 0.05 or not 0 <= self.wait <= 60 or self.prefetch < self.batch:
            raise ValueError("ttr is 0.05 or more, wait 0 to 60, prefetch not smaller than batch")
        if self.mode not in ("at-least-once", "at-most-once"):
            raise ValueError("mode is at-least-once or at-most-once")

    @property
    def auto(self) -> bool:
        """Are messages settled before they come?"""
        return self.mode == "at-most-once"


def fetch_for(terms: ConsumerOptions, count: int) -> Call[list[Message]]:
    """A fetch as these terms want it."""
    return fetch(
        terms.topic,
        group=terms.group,
        max=count,
        wait=min(terms.wait, AUTO_WAIT_S) if terms.auto else terms.wait,
        ttr=None if terms.auto else terms.ttr,
        consumer=terms.name,
        ack="auto" if terms.auto else "manual",
        wire=terms.wire,
    )


@dataclass(eq=False, slots=True)
class InHand:
    """A message in hand. `until_s`: the end of its lease, `started_s`: when its handler began."""

    message: Message
    until_s: float
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class AckList:
    """An ack to send. Delay and error are about the failed ones in it."""

    acks: list[str]
    delay: float | None = None
    error: str | None = None


def all_failed(
    job: Sequence[InHand], error: BaseException | str = "the handler was interrupted"
) -> dict[str, BaseException | str]:
    """None of these was handled."""
    return {held.message.id: error for held in job}


class ConsumerState:
    """See the module. Its caller holds the lock, if there is one, and says what time it is."""

    def __init__(self, terms: ConsumerOptions) -> None:
        self.options = terms
        self.queue: deque[InHand] = deque()
        self.held: dict[str, InHand] = {}
        self.running = self.sending = 0
        self.stopping = False
        self.counts = dict.fromkeys(("fetched", "handled", "failed", "lost"), 0)
        self._done: list[str] = []
        self._failed: dict[tuple[float | None, str], list[str]] = {}
        self._pending = 0
        self._since_s = 0.0  # when the oldest ack began to linger

    # Fetching

    def room(self) -> int:
        """How many messages to ask for now; 0: not now. It asks when half of them are gone, so that it does not ask for each."""
        if self.stopping or len(self.queue) > self.options.prefetch // 2:
            return 0
        return max(0, min(FETCH_MAX, self.options.prefetch - len(self.queue) - self.running))

    def arrived(self, messages: Sequence[Message], came_s: float) -> None:
        """These came."""
        self.counts["fetched"] += len(messages)
        until_s = came_s + self.options.ttr * SURE
        for message in messages:
            known = self.held.get(message.id)
            if known is not None and known.started_s is not None:  # its lease was lost and is ours again: do not do it twice
                known.until_s = until_s
                continue
            held = InHand(message, until_s)
            if not self._settled(message):
                self.held[message.id] = held
            self.queue.append(held)

    # Handling

    def next(self, now_s: float) -> list[InHand]:
        """What a worker is to handle: one message or a batch of them; empty if there is nothing."""
        out: list[InHand] = []
        while self.queue and len(out) < max(1, self.options.batch):
            held = self.queue.popleft()
            ours = self.held.get(held.message.id) is held and held.until_s > now_s
            if not ours and not self._settled(held.message):
                self._lose(held)
                continue
            held.started_s = now_s
            out.append(held)
        self.running += len(out)
        return out

    def _lose(self, held: InHand) -> None:
        if self.held.get(held.message.id) is held:
            del self.held[held.message.id]
        self.counts["lost"] += 1

    def finished(self, job: Sequence[InHand], errors: Mapping[str, BaseException | str], now_s: float) -> None:
        """A handler is done with these; `errors` has those that failed, by id."""
        self.running -= len(job)
        for held in job:
            id_ = held.message.id
            error = errors.get(id_)
            self.counts["handled" if error is None else "failed"] += 1
            if self._settled(held.message):
                continue
            ours = self.held.get(id_) is held and held.until_s > now_s
            if self.held.get(id_) is held:
                del self.held[id_]
            if error is None:
                self._note(now_s, self._done, id_)
            elif ours:
                delay = error.delay if isinstance(error, Retry) else None
                key = (delay, error_text(error)[:ERROR_CHARS_MAX])
                self._note(now_s, self._failed.setdefault(key, []), f"-{id_}")
            self.counts["lost"] += not ours

    def _note(self, now_s: float, where: list[str], ack: str) -> None:
        if not self._pending:
            self._since_s = now_s
        self._pending += 1
        where.append(ack)

    # Acknowledging

    def acks_due_s(self) -> float | None:
        """When acks are to be sent: long ago if there are many, or nothing else is to be waited for; None if there are none."""
        if not self._pending:
            return None
        if self._pending >= self.options.ack_count or (self.stopping and not self.running):
            return 0.0
        return self._since_s + self.options.ack_linger_s

    def take_acks(self) -> list[AckList]:
        """All that linger: those handled together with the first kind of failure, a list for each other kind."""
        done = self._done
        out = [AckList(ids, delay, error) for (delay, error), ids in self._failed.items()]
        if out:
            out[0] = AckList(done + out[0].acks, out[0].delay, out[0].error)
        elif done:
            out = [AckList(done)]
        self.sending += self._pending
        self._done, self._failed, self._pending = [], {}, 0
        return out

    def acked(self, count: int) -> None:
        """So many acks are through, or given up."""
        self.sending -= count

    # Leases

    def extend_due_s(self, now_s: float) -> float | None:
        """When leases are to be extended. O(messages in hand)."""
        times = [held.until_s for held in self.held.values() if held.until_s > now_s and self._may_extend(held, now_s)]
        return min(times) - self.options.ttr * RENEW if times else None

    def first_end_s(self, ids: Sequence[str]) -> float:
        """When the first of these leases ends."""
        return min((self.held[id_].until_s for id_ in ids if id_ in self.held), default=0.0)

    def to_extend(self, now_s: float) -> list[str]:
        """Ids to extend, in one call: all that are not quite new."""
        soon = now_s + self.options.ttr * 0.9
        return [id_ for id_, held in self.held.items() if now_s < held.until_s <= soon and self._may_extend(held, now_s)]

    def _may_extend(self, held: InHand, now_s: float) -> bool:
        limit = self.options.limit_s
        return limit is None or held.started_s is None or now_s - held.started_s < limit

    def extended(self, ids: Sequence[str], unknown: Sequence[str], asked_s: float) -> None:
        """These are held longer; `unknown` are not ours any more."""
        lost = set(unknown)
        for id_ in ids:
            held = self.held.get(id_)
            if held is None:
                continue
            if id_ not in lost:
                held.until_s = max(held.until_s, asked_s + self.options.ttr)
            elif held.started_s is None:
                del self.held[id_]  # its place in the queue counts for nothing, which `next` finds out
            else:
                held.until_s = asked_s  # its handler goes on; whether that still counts is seen at its end

    def holds(self, message: Message, now_s: float) -> bool:
        """Is this message still ours alone? What was settled before it came is nobody else's."""
        held = self.held.get(message.id)
        return self._settled(message) or (held is not None and held.until_s > now_s)

    def _settled(self, message: Message) -> bool:
        """Was it settled before it came, without a lease? A topic may be at-most-once, whatever this consumer asks for."""
        return self.options.auto or message.lease_until_ms == 0

    # Stopping

    def give_back(self, now_s: float) -> None:
        """What nobody has begun comes again at once, to others."""
        while self.queue:
            held = self.queue.popleft()
            if self.held.get(held.message.id) is held:
                del self.held[held.message.id]
                self._note(now_s, self._failed.setdefault((0.0, STOPPED), []), f"-{held.message.id}")

    @property
    def idle(self) -> bool:
        """Is nothing left to handle or to acknowledge?"""
        return not self.queue and not self.running and not self._pending and not self.sending


def error_text(error: BaseException | str) -> str:
    """An error for the record.

    >>> error_text(ValueError("no such customer")), error_text(Retry("later"))
    ('ValueError: no such customer', 'later')
    """
    try:
        text = str(error) if isinstance(error, str | Retry) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - one that cannot say what it is must not end the consumer
        text = type(error).__name__
    return text.encode(errors="replace").decode()
