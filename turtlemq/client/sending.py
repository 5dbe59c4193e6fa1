"""How requests are sent, tried again and gathered, as values and generators without clock, chance, sockets and threads. Pure.

A generator here yields what is to be done, `Send` or `Pause`; a shell does it, blocking or not, and sends the answer back in (or
throws `ConnectionFailed` in). So there is one set of rules for both shells, and tests can play every part of the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from turtlemq.client.errors import BadAnswer, ClientError, ConnectionFailed, InvalidFireAt, Refused, TimedOut
from turtlemq.client.wire import Answer, Out, Request, error_of, produce, seconds

T = TypeVar("T")
AGAIN = (408, 429, 502, 503)  # refused for now: nothing was done
WHOLE = ("INVALID_TOPIC", "UNSUPPORTED_MEDIA_TYPE")  # said of the request, whatever is in it
FOREVER = float("inf")
DEADLINE_GRID_S = 0.1  # puts share deadlines, so that those of a batch run out together


@dataclass(frozen=True, slots=True)
class Send:
    """Send this and wait so long for the answer; the server is told how much time is left."""

    request: Request
    timeout_s: float
    budget_ms: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next step."""

    seconds: float


Flow = Generator[Send | Pause, Any, T]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how its answer is read. `done`: a refusal that says that an earlier try, whose answer got lost, did it.

    `later`: the request of a try so many seconds after the call, where that is another: a delay counts from the call.
    """

    request: Request
    parse: Callable[[Answer], T]
    done: Callable[[Refused], bool] = lambda _: False
    later: Callable[[float], Request] | None = None

    def since(self, called_s: float) -> Callable[[float], Request]:
        """Makes the request of each try, for `exchange`."""
        return lambda now: self.request if self.later is None else self.later(now - called_s)


def delayed(delay: float | None, make: Callable[[float | None], Request], parse: Callable[[Answer], T]) -> Call[T]:
    """A call whose delay counts from the call: what its tries take is taken off."""
    whole = seconds(delay)
    if whole is None:
        return Call(make(None), parse)
    if not 0 <= whole < FOREVER:  # JSON would say null, which is no delay at all
        raise InvalidFireAt("delay is a number of seconds, 0 or more")
    return Call(make(whole), parse, later=lambda passed_s: make(max(0.0, whole - passed_s)))


@dataclass(frozen=True, slots=True)
class Rules:
    """Clock and dice, and how patient a client is: each try, everything together, and the pauses between tries.

    A pause is anything between nothing and base × 2^tries, up to `pause_max_s` ("full jitter"), so that clients that were cut off
    together do not come back together. Where the server says Retry-After, that comes first.
    """

    now: Callable[[], float]
    roll: Callable[[], float]
    try_s: float = 10.0
    budget_s: float = 30.0
    pause_base_s: float = 0.05
    pause_max_s: float = 5.0

    def pause(self, tries: int, after_s: float | None = None) -> float:
        """How long to wait after so many tries.

        >>> rules = Rules(now=lambda: 0.0, roll=lambda: 1.0)
        >>> [rules.pause(n) for n in (1, 2, 3, 20)], rules.pause(1, after_s=2)
        ([0.05, 0.1, 0.2, 5.0], 2.05)
        """
        return (after_s or 0.0) + self.roll() * min(self.pause_max_s, self.pause_base_s * 2.0 ** min(tries - 1, 30))


def exchange(make: Callable[[float], Request], rules: Rules, deadline_s: float, *, patient: bool = False) -> Flow[Answer]:
    """Send until there is a good answer, a refusal that will not change, or no time left. `make` gets the time of each try.

    A patient caller tries again whatever is wrong with the server, and has all the time of the world if the deadline is infinite.
    """
    tries = 0
    error: ClientError = TimedOut("the time was over before the first")
    wait = 0.0
    while True:
        now = rules.now()
        left = deadline_s - now
        if left <= wait:  # a pause that nothing can follow is not made
            raise TimedOut(f"no success within the time after {tries} tries; the last: {error}") from error
        if wait:
            yield Pause(wait)
            wait = 0.0
            continue
        request = make(now)
        tries += 1
        after: float | None = None
        try:
            # a server that has more time than its caller would work for nobody
            budget_ms = max(1, int(left * 1000)) if left < FOREVER else None
            answer: Answer = yield Send(request, min(rules.try_s + request.wait_s, left), budget_ms)
            if answer.status < 300:
                return answer
            error = error_of(answer)
            error.tries = tries
            if answer.status not in AGAIN and not (patient and answer.status >= 500):
                raise error
            after = error.retry_after_s if isinstance(error, Refused) else None
        except ConnectionFailed as failed:
            error = failed
        wait = rules.pause(tries, after)


def ask(call: Call[T], rules: Rules) -> Flow[T]:
    """Send a call, and read its answer."""
    now = rules.now()
    try:
        answer = yield from exchange(call.since(now), rules, now + rules.budget_s + call.request.wait_s)
    except Refused as error:
        if error.tries < 2 or not call.done(error):
            raise
        answer = Answer(200, {}, b"")
    return call.parse(answer)


# Producing


class Stored(msgspec.Struct):
    """The answer to a batch."""

    ids: list[str]
    created: int = 0
    duplicates: int = 0


_stored = msgspec.json.Decoder(Stored)


def parse_stored(answer: Answer) -> Stored:
    """What a produce request was answered with."""
    try:
        return _stored.decode(answer.body)
    except msgspec.DecodeError as wrong:
        raise BadAnswer(f"a batch was answered with something else: {wrong}") from None


def store(topic: str, batch: Sequence[Out], rules: Rules) -> Flow[Stored]:
    """Store a batch, all of it or none."""
    answer = yield from exchange(lambda now: produce(topic, batch, now), rules, rules.now() + rules.budget_s)
    return parse_stored(answer)


def chunks(batch: Sequence[Out], count: int, size: int) -> list[Sequence[Out]]:
    """A batch cut into requests of at most so many messages and bytes.

    >>> [len(part) for part in chunks([Out("a", b""), Out("b", b"x" * 500), Out("c", b""), Out("d", b"")], 2, 600)]
    [1, 1, 2]
    """
    out: list[Sequence[Out]] = []
    start, bytes_ = 0, 0
    for i, message in enumerate(batch):
        if i > start and (i - start >= count or bytes_ + message.size > size):
            out.append(batch[start:i])
            start, bytes_ = i, 0
        bytes_ += message.size
    return [*out, batch[start:]] if len(batch) > start else out


def after(error: ClientError, stored: int) -> ClientError:
    """An error of a later request of many, for a caller who counts from the first: `index` and `stored` say how far it came."""
    out = error.at(None if error.index is None else error.index + stored)
    out.details["stored"] = stored
    return out


class Promise(Protocol):
    """Whom to tell what became of a put: a future of either kind."""

    def done(self) -> bool:
        """Whether nobody waits for it any more."""

    def set_result(self, result: str, /) -> None:
        """It is durable."""

    def set_exception(self, exception: BaseException, /) -> None:
        """It is not."""


class Entry:
    """A put that waits in a producer."""

    __slots__ = ("out", "promise", "deadline_s", "seq", "size", "error")

    def __init__(self, out: Out, promise: Promise, deadline_s: float) -> None:
        self.out, self.promise = out, promise
        self.deadline_s = -(-deadline_s // DEADLINE_GRID_S) * DEADLINE_GRID_S
        self.seq, self.size = 0, out.size
        self.error: ClientError | None = None

    def succeed(self) -> None:
        """Tell that it is durable."""
        if not self.promise.done():
            self.promise.set_result(self.out.id)

    def fail(self, error: ClientError) -> None:
        """Tell why it is not. An index that counted in the gathered batch would say nothing to who put one message."""
        if not self.promise.done():
            self.error = error
            self.promise.set_exception(error.at(None if error.index is None else 0))


def deliver(topic: str, entries: list[Entry], rules: Rules) -> Flow[None]:
    """Store what was gathered and tell everybody; one bad message does not take the others with it."""
    parts = [entries]
    while parts:
        part = parts.pop()
        deadline = min(entry.deadline_s for entry in part)
        outs = [entry.out for entry in part]
        try:
            parse_stored((yield from exchange(lambda now, outs=outs: produce(topic, outs, now), rules, deadline)))  # type: ignore[misc]
        except TimedOut as error:
            late = [entry for entry in part if entry.deadline_s <= deadline]
            rest = [entry for entry in part if entry.deadline_s > deadline]
            parts += [rest] if rest else []
            for entry in late:
                entry.fail(error)
        except ClientError as error:
            parts += _apart(part, error)
        else:
            for entry in part:
                entry.succeed()


def _apart(part: list[Entry], error: ClientError) -> list[list[Entry]]:
    """What to send again after a refusal: all but the message it is about; halves if it does not say which."""
    bad = error.index
    if len(part) > 1 and error.status in (400, 413) and error.code not in WHOLE:
        if bad is not None and 0 <= bad < len(part):
            part[bad].fail(error)
            return [part[:bad] + part[bad + 1 :]]
        half = len(part) // 2
        return [part[half:], part[:half]]
    for entry in part:
        entry.fail(error)
    return []


class BatchBuffer:
    """Puts on their way into batches. Holds at most so many messages and bytes, those on the wire included. Not thread-safe."""

    def __init__(self, count: int, size: int, linger_s: float, held_count_max: int, held_bytes_max: int) -> None:
        if count < 1 or size < 1 or linger_s < 0 or held_count_max < 1 or held_bytes_max < 1:
            raise ValueError("counts and bytes are 1 or more, linger is 0 or more")
        self.count, self.size, self.linger_s = count, size, linger_s
        self.held_count_max, self.held_bytes_max = held_count_max, held_bytes_max
        self.waiting: deque[Entry] = deque()
        self.held: dict[int, Entry] = {}
        self.held_bytes = self.waiting_bytes = 0
        self._last = self._urgent = 0

    def fits(self, size: int) -> bool:
        """Is there room for one more? There is always room for one alone."""
        return not self.held or (len(self.held) < self.held_count_max and self.held_bytes + size <= self.held_bytes_max)

    def add(self, entry: Entry) -> None:
        """Take one in. O(1)."""
        self._last += 1
        entry.seq = self._last
        self.held[entry.seq] = entry
        self.waiting.append(entry)
        self.waiting_bytes += entry.size
        self.held_bytes += entry.size

    def flush_now(self) -> int:
        """What is here now lingers no more. Returns a mark for `past`."""
        self._urgent = self._last
        return self._last

    def past(self, mark: int) -> bool:
        """Has everything up to this mark been settled? O(1): what came first is first."""
        return not self.held or next(iter(self.held)) > mark

    def due_s(self) -> float | None:
        """When a batch is to go: long ago if it is full or hurried; None if nothing waits."""
        if not self.waiting:
            return None
        first = self.waiting[0]
        if first.seq <= self._urgent or len(self.waiting) >= self.count or self.waiting_bytes >= self.size:
            return 0.0
        return first.out.put_s + self.linger_s

    def take(self) -> list[Entry]:
        """The next batch. At least one message, however large."""
        out: list[Entry] = []
        size = 0
        while self.waiting and len(out) < self.count and (not out or size + self.waiting[0].size <= self.size):
            out.append(self.waiting.popleft())
            size += out[-1].size
        self.waiting_bytes -= size
        return out

    def put_back(self, batch: list[Entry]) -> None:
        """What was taken was not sent, or nobody knows whether it was: it is the next again."""
        self.waiting.extendleft(reversed(batch))
        self.waiting_bytes += sum(entry.size for entry in batch)

    def settled(self, entries: list[Entry]) -> None:
        """These are done, one way or the other: room for others."""
        for entry in entries:
            if self.held.pop(entry.seq, None) is not None:
                self.held_bytes -= entry.size
