"""The leader's side of replication, on an event loop: it sends records to standbys, and answers wait until they have them.

Threads that write call `wake` through the stream, once for many records; the event loop then gives each standby the next piece of
the ring. `covered` waits until all required members have applied a record. Which members are required is decided elsewhere
(`required`), and may change at any time; so is the right to answer (`check_may_answer`). The decider hears of standbys through
the callbacks of `Lead`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count
from threading import get_ident

from msgspec.structs import replace

from turtlemq.errors import NotEnoughReplicas, NotReplicated
from turtlemq.replica import frames
from turtlemq.replica.clock_skew import Clocks
from turtlemq.replica.copy_source import CopySource
from turtlemq.replica.frames import Ack, BadPeer, Beat, Broken, Done, Full, Hello, Pull, Refused, Sync, Welcome
from turtlemq.replica.lead_types import NO_RECORDS, Attached, LeadOptions, Refusals, refusal
from turtlemq.replica.link import SHAKE_S, Identity, Items, Link, prove_to_standby
from turtlemq.replica.stream import Stream

PIECE_BYTES = 1 << 20  # of records that a standby gets in one turn of the event loop
STRANGERS_MAX = 64  # connections whose peer has proved nothing yet
SILENT_BEATS = 5  # a standby that is silent for so many heartbeats, and for `lag_max_s`, is given up
_BEATS_MAX = 64  # whose times are remembered
Log = Callable[..., None]


def boot_s() -> float:
    """Seconds since the machine was started; they count while it is suspended, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _nothing(*_: object, **__: object) -> None:
    return


class Lead:
    """Sends the records of a stream, and knows for each standby which of them it has. All methods run on the event loop.

    `required`: the members whose copies an answer needs; `own`, the leader, may be among them. `member_of`: the name under
    which a standby counts, by default its replica."""

    def __init__(
        self,
        stream: Stream,
        me: Identity,
        options: LeadOptions,
        required: Callable[[], Collection[str]],
        *,
        own: str = "",
        member_of: Callable[[Hello], str] = lambda hello: hello.replica,
        clock_s: Callable[[], float] = boot_s,
        log: Log = _nothing,
    ) -> None:
        self.stream, self.options = stream, options
        self.standbys: dict[str, Attached] = {}  # by member
        self.copying: dict[str, Attached] = {}  # standbys whose files are made equal to the leader's: none of them counts
        self.source: CopySource | None = None  # of their files; without it they are refused
        self.ending: list[Callable[[], None]] = []  # called by `close`
        self.may_sync: Callable[[str], bool] = lambda _: True  # whether a member's files may be replaced
        self.check_may_answer: Callable[[], None] = _nothing  # raises if another process may lead
        self.asks_promise: Callable[[], bool] = bool  # whether the next heartbeat asks for a promise
        self.promised: Callable[[str, float], None] = _nothing  # a member has given one, to a heartbeat that was sent then
        self.higher_epoch: Callable[[int], None] = _nothing  # a standby has heard of a later leader
        self.unfit: Callable[[str], None] = _nothing  # a member's files must be compared: it has nothing that can be relied on
        self.attached: Callable[[str, int], None] = _nothing  # a member that has applied everything up to an LSN
        self.detached: Callable[[str], None] = _nothing
        self.acked: Callable[[str, int], None] = _nothing  # a member has applied everything up to an LSN
        self.refuses: Callable[[Hello], str] = lambda _: ""  # why a standby is not taken; empty: it is
        self.ready: Callable[[str, frames.Ready], None] = _nothing  # a member takes over (`frames.Handover`)
        self.heard: Callable[[str, frames.Frame], object] = _nothing  # an answer of a member about its files (`replica.verify`)
        self.bulk: Callable[[str, Link], None] = _refuse_bulk  # the second connection of a member that is attached
        self.caught_up: Callable[[], None] = _nothing  # called when members are no longer far behind
        self._me, self._required, self._own, self._member_of = me, required, own, member_of
        self._clock_s, self._log, self._refusals = clock_s, log, Refusals(log, clock_s)
        self.ferried_bytes = 0  # of files that were sent beside the stream
        self.behind_bytes = 0  # that the required member lacks which is behind the most; any thread may read it
        self._applied: dict[str, int] = {}  # by member, also of those that are away
        self._seen_s: dict[str, float] = {}  # when a member was last heard of
        self._began_s = clock_s()
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        self._woken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap of answers that wait for an LSN
        self._numbers = count()
        self._beats: dict[int, tuple[float, bool, int]] = {}  # by number: when it was sent, whether for a promise, wall clock
        self.clocks = Clocks(own)
        self._marks: deque[tuple[int, float]] = deque(maxlen=_BEATS_MAX)  # LSN of the stream at a time
        self._strangers = 0
        self._far = False  # members were far behind when it was last asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.TimerHandle | None = None
        self._closed = False
        self._beat_number = 0
        stream.wake = self._wake

    # Life

    def begin(self) -> None:
        """Send heartbeats from now on. Standbys come through `accept`."""
        self._beat()

    async def finish(self, timeout_s: float) -> None:
        """Wait until the standbys that are attached have everything, or the time is over."""
        end = self._loop.time() + timeout_s
        while any(each.acked < self.stream.lsn for each in self.standbys.values()) and self._loop.time() < end:
            self._ship()
            await asyncio.sleep(0.01)

    def close(self, why: str = "the leader stops") -> None:
        """End all connections. Answers that wait are refused."""
        self._closed = self._woken = True  # no further wake
        if self._beating is not None:
            self._beating.cancel()
        for task in self._tasks:
            task.cancel()
        for each in self._connected():
            each.link.close(why)
        for _, _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
        if self.source is not None:
            self.source.close()
        for end in self.ending:
            end()

    # Answers

    async def covered(self, lsn: int, timeout_s: float) -> None:
        """Return when all required members have applied everything up to a record. Raises `NotReplicated` at the end of the
        time."""
        if not self.has(lsn):
            end = self._loop.time() + min(timeout_s, self.options.answer_s)
            while not self.has(lsn):
                if self._closed or self._loop.time() >= end:
                    raise NotReplicated
                future: asyncio.Future[None] = self._loop.create_future()
                heappush(self._waiting, (lsn, next(self._numbers), future))
                timer = self._loop.call_at(end, _wake, future)
                try:
                    await future
                finally:
                    timer.cancel()
        self.check_may_answer()

    def has(self, lsn: int) -> bool:
        """Have all required members applied everything up to a record?"""
        applied = self._applied
        return all(applied.get(member, -1) >= lsn for member in self._others())

    @property
    def covered_lsn(self) -> int:
        """The last record that all required members have applied."""
        return min((self._applied.get(member, 0) for member in self._others()), default=self.stream.lsn)

    def changed(self) -> None:
        """The required members are others now: answers may have waited for one that is gone."""
        covered = self.covered_lsn
        while self._waiting and self._waiting[0][0] <= covered:
            _wake(heappop(self._waiting)[2])
        was_far = self._far
        if not self.is_far_behind() and was_far:
            self.caught_up()

    def copies(self, lsn: int) -> int:
        """How many copies have everything up to a record, this one included."""
        return 1 + sum(self._applied.get(member, -1) >= lsn for member in self.standbys)

    def check_writable(self) -> None:
        """Raise `NotEnoughReplicas` if fewer copies than `min_isr` are in sync."""
        if self.options.acks == "isr" and self.in_sync() < self.options.min_isr:
            raise NotEnoughReplicas(in_sync=self.in_sync(), min_isr=self.options.min_isr)

    def in_sync(self) -> int:
        """How many copies are in sync: this one, and required members that were heard of lately."""
        now = self._clock_s()
        return 1 + sum(
            member in self.standbys or now - self._seen_s.get(member, self._began_s) < self.options.lag_max_s
            for member in self._others()
        )

    def is_far_behind(self) -> bool:
        """Is a required member behind by half the ring? Then no more may be written: it could not catch up from the ring."""
        stream, applied = self.stream, self._applied
        self.behind_bytes = max((stream.bytes_behind(applied.get(member, -1)) for member in self._others()), default=0)
        self._far = self.behind_bytes > stream.ring_bytes // 2
        return self._far

    @property
    def members(self) -> set[str]:
        """Required members, and standbys that are attached."""
        return {*self._others(), *self.standbys}

    def is_required(self, member: str) -> bool:
        """Do answers need this member's copy?"""
        return member in self._required()

    def _others(self) -> list[str]:
        return [member for member in self._required() if member != self._own]

    def lag_bytes(self, member: str) -> int:
        """Bytes of records that a member lacks."""
        return self.stream.bytes_behind(self._applied.get(member, -1))

    def lag_s(self, member: str) -> float:
        """For how long a member has lacked records."""
        standby = self.standbys.get(member)
        since = self._seen_s.get(member, self._began_s) if standby is None else standby.caught_up_s
        behind = standby is None or standby.acked < self.stream.lsn
        return max(0.0, self._clock_s() - since) if behind else 0.0

    # Records

    def _wake(self) -> None:
        """Records were made, by any thread. Requires: the stream's lock is held."""
        if not self._woken:
            self._woken = True
            if get_ident() == self._thread:
                self._loop.call_soon(self._ship)
            else:
                self._loop.call_soon_threadsafe(self._ship)

    def _ship(self) -> None:
        self._woken = self._closed  # before the stream is read: records from now on wake again
        self.is_far_behind()
        for standby in self._connected():
            self._send(standby)

    def _connected(self) -> list[Attached]:
        return [*self.standbys.values(), *self.copying.values()]

    def _send(self, standby: Attached) -> None:
        """Send the next piece of the ring; the rest has its turn after other work of the event loop."""
        if standby.link.paused or standby.sent >= self.stream.lsn:
            return
        entries = self.stream.after(standby.sent, PIECE_BYTES)
        if entries is None:
            standby.link.close("it is behind by more than the ring: its files must be compared with the leader's")
            return
        standby.send(entries)
        if standby.sent < self.stream.lsn:
            self._loop.call_soon(self._send, standby)

    # Standbys

    def accept(self) -> Link:
        """The protocol of a connection that is being made to this leader."""
        link = Link(self._ship)
        if self._closed:
            link.close("the leader stops")
            return link
        task = self._loop.create_task(self._attach(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _attach(self, link: Link) -> None:
        """A new connection: proof, HELLO, and records until it ends."""
        await asyncio.sleep(0)  # it is being made
        if self._strangers >= STRANGERS_MAX:
            link.close("too many connections that have proved nothing")
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(SHAKE_S):
                await prove_to_standby(link, self._me)
                hello = await link.frame(Hello)
        except (BadPeer, TimeoutError) as error:
            self._refusals.tell(link.peer, str(error) or "it was silent")
            link.close("refused")
            return
        finally:
            self._strangers -= 1
        if hello.bulk:
            self._attach_bulk(link, hello)
            return
        if (standby := self._greet(link, hello)) is None:
            return
        why = await link.closed
        if standby.copying is not None:
            self.copying = {member: each for member, each in self.copying.items() if each is not standby}
            await standby.copying.end()
        if self.standbys.get(standby.member) is standby:
            del self.standbys[standby.member]
            self._seen_s[standby.member] = self._clock_s()
            self.clocks.forget(standby.member)
            self._log("standby_detached", node=hello.node, replica=hello.replica, why=why, lsn=standby.acked)
            self.detached(standby.member)

    def _attach_bulk(self, link: Link, hello: Hello) -> None:
        """Take the second connection of a standby, which ends with the first."""
        member = self._member_of(hello)
        standby = self.standbys.get(member) or self.copying.get(member)
        if standby is None or standby.hello.replica != hello.replica:
            link.close("a second connection, and there is no first one")
            return
        standby.link.closed.add_done_callback(lambda _: link.close("its other connection has ended", at_once=True))
        self.bulk(member, link)

    def _greet(self, link: Link, hello: Hello) -> Attached | None:
        """Take a standby, whose position is in the ring, or refuse it."""
        self._close_older(self._member_of(hello))  # acknowledgements of an older connection count no more
        refused = self._refusal(hello)
        if refused is not None:
            if refused.sync:
                self._applied.pop(self._member_of(hello), None)
                self.unfit(self._member_of(hello))
                if self.source is not None and self.may_sync(self._member_of(hello)):
                    return self._copy(self.source, link, hello)
            link.send(refused)
            link.close("refused")
            self._refusals.tell(link.peer, refused.why, node=hello.node, replica=hello.replica)
            return None
        assert hello.lsn is not None
        standby = Attached(self._member_of(hello), hello, link, hello.lsn, hello.lsn, self._clock_s())
        self._welcome(link, hello.lsn)
        link.receive(lambda items: self._received(standby, items))
        self._send(standby)
        self._count(standby)
        return standby

    def _count(self, standby: Attached) -> None:
        """A standby is complete: from now on its acknowledgements count."""
        member, hello = standby.member, standby.hello
        self.standbys[member], self._applied[member] = standby, standby.acked
        self._log("standby_attached", node=hello.node, replica=hello.replica, lsn=standby.acked, behind=self.lag_bytes(member))
        self.attached(member, standby.acked)
        self.changed()

    def _close_older(self, member: str) -> None:
        for each in [each for each in self._connected() if each.member == member]:
            each.link.close("it has a newer connection", at_once=True)

    def _welcome(self, link: Link, lsn: int | None) -> None:
        beat_ms = round(1000 * self.options.heartbeat_s)
        link.send(Welcome(self.stream.epoch, "sync" if lsn is None else "resume", lsn or 0, beat_ms))

    def _copy(self, source: CopySource, link: Link, hello: Hello) -> Attached:
        """Let a standby make its files equal to the leader's. It gets no records before."""
        member = self._member_of(hello)
        standby = self.copying[member] = Attached(member, hello, link, NO_RECORDS, 0, self._clock_s())
        standby.copying = source.begin(link, lambda lsn: self._copied(standby, lsn))
        self._log("standby_copies", node=hello.node, replica=hello.replica)
        self._welcome(link, None)
        link.receive(lambda items: self._received(standby, items))
        return standby

    def _copied(self, standby: Attached, lsn: int | None) -> None:
        """A standby has the files: it goes on with records, or compares again."""
        self._welcome(standby.link, lsn)
        if lsn is not None:
            standby.sent = lsn
            self._send(standby)

    def _refusal(self, hello: Hello) -> Refused | None:
        stream, shard = self.stream, self._me.shard
        if hello.shard == shard and hello.epoch > stream.epoch:
            self.higher_epoch(hello.epoch)
            return Refused(f"this leader is of epoch {stream.epoch}, and there was one of {hello.epoch}", stream.epoch)
        if why := self.refuses(hello):
            return Refused(why, stream.epoch)
        return refusal(stream, hello, shard, self.options.format)

    def _received(self, standby: Attached, items: Items) -> None:
        for item in items:
            match item:
                case Ack():
                    self._take_ack(standby, item)
                case Sync() | Pull() | Done() if standby.copying is not None:
                    standby.copying.take(item)
                case frames.Ready():
                    self.ready(standby.member, item)
                case frames.Verified() | frames.Examine() | frames.Examined():
                    self.heard(standby.member, item)
                case Full(why=why, file=file) | Broken(why=why, file=file):
                    self._log("standby_stopped", node=standby.hello.node, why=why, file=file)
                    standby.link.close(why)
                case _:
                    standby.link.close(f"{type(item).__name__} is not for a leader")
                    return

    def _take_ack(self, standby: Attached, ack: Ack) -> None:
        if not standby.acked <= ack.lsn <= standby.sent:
            standby.link.close(f"it acknowledged record {ack.lsn:,}, and {standby.sent:,} was the last that it got")
            return
        now = self._clock_s()
        standby.acked, standby.copied, standby.to_copy = ack.lsn, ack.copied, ack.to_copy
        if ack.lsn and self.copying.get(standby.member) is standby:
            del self.copying[standby.member]
            self._count(standby)
        if self.standbys.get(standby.member) is not standby:
            return
        self._take_beat(standby, ack)
        if ack.lsn >= self.stream.lsn:
            standby.caught_up_s = now
        else:
            had = next((at for lsn, at in reversed(self._marks) if lsn <= ack.lsn), 0.0)
            standby.caught_up_s = max(standby.caught_up_s, had)
        if ack.lsn > self._applied[standby.member]:
            self._applied[standby.member] = ack.lsn
            self.changed()
        self.acked(standby.member, ack.lsn)

    def _take_beat(self, standby: Attached, ack: Ack) -> None:
        sent_s, promise, wall_ms = self._beats.get(ack.beat, (0.0, False, 0))
        if sent_s > standby.beat_s:
            standby.beat_s = sent_s
            self.clocks.heard(standby.member, wall_ms, 1000 * (self._clock_s() - sent_s), ack.clock_ms)
            if promise:
                self.promised(standby.member, sent_s)

    def _beat(self) -> None:
        """Send a heartbeat to all standbys, again and again."""
        self._beat_number += 1
        now, promise, wall_ms = self._clock_s(), self.asks_promise(), time.time_ns() // 1_000_000
        self._beats[self._beat_number] = now, promise, wall_ms
        self._beats.pop(self._beat_number - _BEATS_MAX, None)
        self._marks.append((self.stream.lsn, now))
        lsns = self.stream.lsn, self.covered_lsn
        beat, skews = Beat(self.stream.epoch, self._beat_number, *lsns, wall_ms, promise), self.clocks.skews()
        silent_s = max(self.options.lag_max_s, SILENT_BEATS * self.options.heartbeat_s)
        for standby in self._connected():
            if self._loop.time() - standby.link.heard_s > silent_s:
                standby.link.close("it is silent", at_once=True)
            else:
                skew = skews.get(standby.member)
                standby.link.send(beat if skew is None else replace(beat, skew_ms=skew.ms, skew_error_ms=skew.error_ms))
        self._waiting = [each for each in self._waiting if not each[2].done()]  # those whose time was over are left out
        heapify(self._waiting)
        self._beating = self._loop.call_later(self.options.heartbeat_s, self._beat)


def _refuse_bulk(_: str, link: Link) -> None:
    link.close("no files are sent here")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
