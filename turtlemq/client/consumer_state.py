"""State of a consumer: the messages in hand, their leases, and the acks to send. No clock, no threads. Pure.

Leases are measured on the clock of this side. A new one counts from the arrival of the answer and a tenth shorter than granted,
since the answer was on its way for a while; an extended one counts from the moment of the request. A message whose lease ended in
the queue is not handled: another consumer may have it. Acks and extends name the lease, so that a late one does not touch the
lease of another consumer. An older server gives leases no names: then, after a lost lease, an ack of success is still sent, since
the work is done; a failure is not, since it would fail the attempt of the other consumer. Messages that were acked on delivery
(at-most-once) have no lease and cannot be lost. The requests are in `consumer_flows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from turtlemq.client.arguments import CONSUMER_NAMES
from turtlemq.client.calls import GROUP
from turtlemq.client.desk import Desk, desk_size, low_most, new_mean
from turtlemq.client.fetched import Message
from turtlemq.client.time_limit import NO_LIMIT
from turtlemq.client.wire import Seconds, as_seconds, seconds_of

FETCH_MAX = 10_000
FULL_WAIT_S, FULL_WAIT_S_MIN = 0.1, 0.01  # of a poll that asks for none of low priority
ERROR_CHARS_MAX = 4_000  # the limit of the server
FRAMES_MAX, FRAMES_CHARS_MAX = 5, 1_500  # of a traceback, in the text of an error
RETRY_S_MAX = 1e9  # the server refuses a delay beyond its latest due time, and the whole ack list with it
LEASE_USED = 0.9  # part of a granted lease that is relied on
EXTEND_BELOW = 2 / 3  # leases are extended when less than this part is left
STOPPED_ERROR = "the consumer stopped before it came to this message"


class Retry(Exception):
    """Raised by a handler: this message failed, and is to be tried again after `delay`, in seconds or a timedelta (None: the
    topic's back-off)."""

    def __init__(self, error: str = "", *, delay: Seconds | None = None) -> None:
        super().__init__(error or "the handler asked for another attempt")
        self.delay = as_seconds(delay)
        if self.delay is not None and not 0 <= self.delay <= RETRY_S_MAX:
            raise ValueError(f"delay is a number of seconds or a timedelta, from 0 to {RETRY_S_MAX:,.0f}, not {delay!r:.80}")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The options of a consumer.

    ttr: seconds of a lease. It is extended while a handler runs, so it limits how long the messages of a killed consumer wait.
    batch: 0: the handler gets one message; else a list of at most so many.
    prefetch: messages in hand at most, those being handled included; None: as many as the handlers need for a tenth of a second.
    limit_s: no lease is extended beyond this many seconds of handling; None: no limit.
    body: a type that the bodies are converted to, as by `Message.as_type`; a message that does not fit fails.
    """

    topic: str
    group: str = GROUP
    concurrency: int = 4
    batch: int = 0
    prefetch: int | None = None
    ttr: float = 30.0
    wait: float = 20.0
    mode: Literal["at-least-once", "at-most-once"] = "at-least-once"
    ack_count: int = 500
    ack_linger_s: float = 0.01
    limit_s: float | None = None
    name: str = ""
    wire: Literal["json", "bson"] = "json"
    body: Any = None

    def __post_init__(self) -> None:
        prefetch = self.handlers if self.prefetch is None else self.prefetch
        if min(self.concurrency, prefetch, self.ack_count) < 1 or self.batch < 0 or self.ack_linger_s < 0:
            raise ValueError("concurrency, prefetch and ack_count are 1 or more, batch and ack_linger_s 0 or more")
        if self.ack_linger_s > self.ttr / 3:
            raise ValueError("ack_linger_s is a third of ttr or less: what is done is held until it is acknowledged")
        if self.ttr < 0.05 or not 0 <= self.wait <= 60 or prefetch < self.batch:
            raise ValueError("ttr is 0.05 or more, wait 0 to 60, prefetch not smaller than batch")
        if self.mode not in ("at-least-once", "at-most-once"):
            raise ValueError("mode is at-least-once or at-most-once")

    @staticmethod
    def take_from(arguments: Mapping[str, Any], topic: str) -> tuple[ConsumerOptions, dict[str, Any]]:
        """Options from the keyword arguments of a consumer, and the other arguments, which are for its client."""
        own = {name: given for name, given in arguments.items() if name in CONSUMER_NAMES}
        own |= {name: seconds_of(name, own[name]) for name in ("ttr", "wait", "limit_s") if name in own}
        return ConsumerOptions(topic, **own), {name: given for name, given in arguments.items() if name not in own}

    @property
    def handlers(self) -> int:
        """How many messages can be handled at once."""
        return self.concurrency * max(1, self.batch)

    @property
    def at_most_once(self) -> bool:
        """Whether messages are acked on delivery."""
        return self.mode == "at-most-once"


@dataclass(eq=False, slots=True)
class InHand:
    """A fetched message: the end of its lease, its expiry, and the time at which its handler began. Its handler sees it as
    `Message.hand`."""

    message: Message
    lease_end_s: float
    state: ConsumerState
    expires_s: float = NO_LIMIT
    started_s: float | None = None
    lost: bool = False  # the lease, while its handler goes on
    done: bool = False  # its handler has ended; tasks that it began may go on

    def budget_s(self) -> float:
        """The time until the message expires or its lease ends; 0: it is over."""
        end_s = self.expires_s if self.lease_end_s == NO_LIMIT else min(self.expires_s, self.lease_end_s)
        return max(0.0, end_s - self.state.now())

    def limit_s(self) -> float:
        """When calls of the handler should end: at the expiry, once the lease is lost, or when it is extended no more."""
        if self.done:
            return NO_LIMIT
        if self.is_called_off:
            return 0.0
        limit = self.state.options.limit_s
        if limit is None or self.started_s is None or self.lease_end_s == NO_LIMIT:
            return self.expires_s
        return min(self.expires_s, max(self.lease_end_s, self.started_s + limit))

    @property
    def is_lost(self) -> bool:
        """Whether another consumer may have the message."""
        return self.lost or self.lease_end_s <= self.state.now()

    @property
    def is_called_off(self) -> bool:
        """Whether its handler should end: the lease is lost, or the time for stopping is over."""
        return self.is_lost or self.state.ended


@dataclass(frozen=True, slots=True)
class AckList:
    """One ack request: ids, with "-" before each failed one. Delay and error apply to all failed ones in it. `lease`: one for
    all, or one for each; None: the server has named none."""

    acks: list[str]
    delay: float | None = None
    error: str | None = None
    lease: str | list[str] | None = None


def all_failed(
    job: Sequence[InHand], error: BaseException | str = "the handler was interrupted"
) -> dict[str, BaseException | str]:
    """The errors of a job in which every message failed."""
    return {item.message.id: error for item in job}


class ConsumerState:
    """Decides the next actions of a consumer. Its caller holds the lock, if there is one, and passes the time."""

    def __init__(self, options: ConsumerOptions, now: Callable[[], float]) -> None:
        self.options, self.now = options, now
        self.queue = Desk[InHand]()  # not begun
        self.ended = False  # handlers that go on are waited for no longer
        self.in_hand: dict[str, InHand] = {}  # all with a lease, by id
        self.handling = self.acks_in_flight = 0
        self._handling_low, self._has_low = 0, False  # messages of low priority, and whether there ever was one
        self._mean_s: float | None = None  # of handling a message
        self.stopping = False
        self.counts = dict.fromkeys(("fetched", "handled", "failed", "lost", "late"), 0)
        self._handled_acks: list[tuple[str, str]] = []  # ack and lease
        self._failed_acks: dict[tuple[float | None, str], list[tuple[str, str]]] = {}  # by delay and error
        self._lingering = 0
        self._oldest_ack_s = 0.0  # when the first lingering ack was added

    # Fetching

    @property
    def prefetch(self) -> int:
        """How many messages should be in hand."""
        given = self.options.prefetch
        return max(desk_size(self.options.concurrency, self._mean_s), self.options.handlers) if given is None else given

    def fetch_count(self) -> int:
        """How many messages to fetch now; 0 until half of the prefetched ones are begun, so that fetches stay large. Where there
        is low priority, the quarter that is not for it is fetched for earlier: it must not wait behind the rest."""
        prefetch, waiting = self.prefetch, len(self.queue)
        room = max(0, min(FETCH_MAX, prefetch - waiting - self.handling))
        if self.stopping or (self._is_early and (not self._has_low or room < prefetch // 4)):
            return 0
        return room

    @property
    def _is_early(self) -> bool:
        """Whether more than half of the prefetched messages are not begun."""
        return len(self.queue) > self.prefetch // 2

    def fetch_low(self) -> int | None:
        """How many of them may be of low priority; None: any number, while no message has had that."""
        if not self._has_low:
            return None
        if self._is_early:
            return 0
        return max(0, low_most(self.prefetch, self.options.handlers) - self.queue.count("low") - self._handling_low)

    def full_wait_s(self) -> float:
        """How long a fetch that takes none of low priority may wait: until half of the messages are begun, for then more of low
        priority are needed."""
        left = len(self.queue) - self.prefetch // 2
        if left <= 0 or self._mean_s is None:
            return FULL_WAIT_S
        return min(FULL_WAIT_S, max(FULL_WAIT_S_MIN, left * self._mean_s / self.options.concurrency))

    def add_fetched(self, messages: Sequence[Message], arrived_s: float) -> None:
        """Queue the messages of a fetch whose answer arrived at this time."""
        self.counts["fetched"] += len(messages)
        lease_end_s = arrived_s + self.options.ttr * LEASE_USED
        for message in messages:
            known = self.in_hand.get(message.id)
            if known is not None and known.started_s is not None:  # lost its lease and got it back: it is not handled twice
                known.lease_end_s, known.message.lease, known.lost = lease_end_s, message.lease, False
                continue
            item = InHand(message, lease_end_s, self)
            if self._without_lease(message):
                item.lease_end_s = NO_LIMIT
            else:
                self.in_hand[message.id] = item
                if message.expires_ms is not None:  # by the server's clock, as the end of its lease is
                    item.expires_s = arrived_s + self.options.ttr + (message.expires_ms - message.lease_until_ms) / 1000
            self._has_low = self._has_low or message.priority == "low"
            self.queue.add(item, message.priority)

    # Handling

    def next_job(self, now_s: float) -> list[InHand]:
        """The next messages for a handler: one, or a batch. Empty if there are none."""
        job: list[InHand] = []
        while self.queue and len(job) < max(1, self.options.batch):
            item = self.queue.take()
            leased = self.in_hand.get(item.message.id) is item and item.lease_end_s > now_s
            if not leased and not self._without_lease(item.message):
                self._drop_lost(item)
                continue
            item.started_s, item.message.hand = now_s, item
            job.append(item)
        self.handling += len(job)
        self._handling_low += _count_low(job)
        return job

    def _drop_lost(self, item: InHand) -> None:
        if self.in_hand.get(item.message.id) is item:
            del self.in_hand[item.message.id]
        self.counts["lost"] += 1

    def finished(self, job: Sequence[InHand], errors: Mapping[str, BaseException | str], now_s: float) -> None:
        """Note the end of a job; `errors` holds the failed messages, by id."""
        self.handling -= len(job)
        self._handling_low -= _count_low(job)
        started_s = job[0].started_s if job else None
        if started_s is not None:
            self._mean_s = new_mean(self._mean_s, (now_s - started_s) / len(job))
        for item in job:
            item.done = True
            id_ = item.message.id
            error = errors.get(id_)
            self.counts["handled" if error is None else "failed"] += 1
            if self._without_lease(item.message):
                continue
            leased = self.in_hand.get(id_) is item and item.lease_end_s > now_s
            if self.in_hand.get(id_) is item:
                del self.in_hand[id_]
            if error is None:
                self._add_ack(now_s, self._handled_acks, id_, item.message.lease)
            elif leased or item.message.lease:
                delay = error.delay if isinstance(error, Retry) else None
                key = (delay, error_text(error)[:ERROR_CHARS_MAX])
                self._add_ack(now_s, self._failed_acks.setdefault(key, []), f"-{id_}", item.message.lease)
            self.counts["lost"] += not leased

    def _add_ack(self, now_s: float, acks: list[tuple[str, str]], ack: str, lease: str) -> None:
        if not self._lingering:
            self._oldest_ack_s = now_s
        self._lingering += 1
        acks.append((ack, lease))

    # Acknowledging

    def acks_due_s(self) -> float | None:
        """When to send the lingering acks: 0 if there are `ack_count`, or no handler will add more; None if there are none."""
        if not self._lingering:
            return None
        if self._lingering >= self.options.ack_count or (self.stopping and not self.handling):
            return 0.0
        return self._oldest_ack_s + self.options.ack_linger_s

    def take_acks(self) -> list[AckList]:
        """All lingering acks: a list for each kind of failure, the first of them with the handled messages. Acks without the name
        of a lease are in lists of their own."""
        out: list[AckList] = []
        handled = self._handled_acks
        for (delay, error), failed in self._failed_acks.items() or [((None, None), [])]:
            for named in (True, False):
                chosen = [entry for entry in handled + failed if bool(entry[1]) == named]
                if chosen:
                    acks, leases = (list(column) for column in zip(*chosen, strict=True))
                    lease = (leases[0] if len(set(leases)) == 1 else leases) if named else None
                    out.append(AckList(acks, delay, error, lease))
            handled = []
        self.acks_in_flight += self._lingering
        self._handled_acks, self._failed_acks, self._lingering = [], {}, 0
        return out

    def acks_done(self, count: int, late: int = 0) -> None:
        """Note that so many acks were sent, or given up; `late` of them came when another consumer had the message."""
        self.acks_in_flight -= count
        self.counts["late"] += late

    # Leases

    def extend_due_s(self, now_s: float) -> float | None:
        """When to extend leases; None if there are none. O(messages in hand)."""
        ends = [item.lease_end_s for item in self.in_hand.values() if item.lease_end_s > now_s and self._may_extend(item, now_s)]
        return min(ends) - self.options.ttr * EXTEND_BELOW if ends else None

    def first_lease_end_s(self, ids: Sequence[str]) -> float:
        """The end of the first of these leases to end."""
        return min((self.in_hand[id_].lease_end_s for id_ in ids if id_ in self.in_hand), default=0.0)

    def ids_to_extend(self, now_s: float) -> list[str]:
        """The ids of the next extend request: all leases but brand-new ones, so that one request serves them together. Leases
        without a name, of an older server, are served when there is no other."""
        new_s = now_s + self.options.ttr * 0.9
        ids = [id_ for id_, item in self.in_hand.items() if now_s < item.lease_end_s <= new_s and self._may_extend(item, now_s)]
        return [id_ for id_ in ids if self.in_hand[id_].message.lease] or ids

    def leases_of(self, ids: Sequence[str]) -> list[str] | None:
        """The names of the leases of messages in hand, which `ids_to_extend` returned; None if they have none."""
        leases = [self.in_hand[id_].message.lease for id_ in ids]
        return leases if all(leases) else None

    def _may_extend(self, item: InHand, now_s: float) -> bool:
        limit = self.options.limit_s
        return limit is None or item.started_s is None or now_s - item.started_s < limit

    def extended(self, ids: Sequence[str], unknown: Sequence[str], asked_s: float) -> None:
        """Note the answer of an extend request of this time; the leases of `unknown` ids, late ones included, are lost."""
        lost = set(unknown)
        for id_ in ids:
            item = self.in_hand.get(id_)
            if item is None:
                continue
            if id_ not in lost:
                item.lease_end_s = max(item.lease_end_s, asked_s + self.options.ttr)
            elif item.started_s is None:
                del self.in_hand[id_]  # `next_job` will pass over it in the queue
            else:
                item.lease_end_s, item.lost = asked_s, True  # its handler goes on; `finished` decides about the ack

    def holds(self, message: Message, now_s: float) -> bool:
        """Whether no other consumer can have this message: its lease lasts, or it was acked on delivery."""
        item = self.in_hand.get(message.id)
        return self._without_lease(message) or (item is not None and item.lease_end_s > now_s)

    def _without_lease(self, message: Message) -> bool:
        """Whether it was acked on delivery. The topic may be at-most-once even if this consumer is not."""
        return self.options.at_most_once or message.lease_until_ms == 0

    # Stopping

    def give_back(self, now_s: float) -> None:
        """Fail all messages that are not begun, without a delay, so that other consumers get them at once. Call off handlers
        that still run."""
        self.ended = True
        while self.queue:
            item = self.queue.take()
            if self.in_hand.get(item.message.id) is item:
                del self.in_hand[item.message.id]
                acks = self._failed_acks.setdefault((0.0, STOPPED_ERROR), [])
                self._add_ack(now_s, acks, f"-{item.message.id}", item.message.lease)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to handle or to acknowledge."""
        return not self.queue and not self.handling and not self._lingering and not self.acks_in_flight


def _count_low(job: Sequence[InHand]) -> int:
    return sum(item.message.priority == "low" for item in job)


def error_text(error: BaseException | str) -> str:
    """The text of an error for the server's record of the message, with the last frames of its traceback below.

    >>> error_text(ValueError("no such customer")), error_text(Retry("later"))
    ('ValueError: no such customer', 'later')
    """
    try:
        text = str(error) if isinstance(error, str | Retry) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error whose __str__ raises must not end the consumer
        text = type(error).__name__
    frames = "" if isinstance(error, str | Retry) else _last_frames(error)
    return (text[: ERROR_CHARS_MAX - len(frames)] + frames).encode(errors="replace").decode()


def _last_frames(error: BaseException) -> str:
    """The last frames of the traceback of an error, the innermost last, without those of this client. Empty if it has none."""
    if error.__traceback__ is None:
        return ""
    import traceback  # not at the top: slow to load, and rarely needed

    try:
        frames = [f"\n{frame.rstrip()}" for frame in traceback.format_tb(_in_handler(error.__traceback__), -FRAMES_MAX)]
    except Exception:  # noqa: BLE001 - a source file that cannot be read must not end the consumer
        return ""
    while sum(map(len, frames)) > FRAMES_CHARS_MAX:
        del frames[0]
    return "".join(frames)


def _in_handler(trace: TracebackType) -> TracebackType:
    """A traceback from the first frame on that is not of this package."""
    here: TracebackType | None = trace
    while here is not None and here.tb_frame.f_globals.get("__package__") == __package__:
        here = here.tb_next
    return here or trace
