"""The Broker of one topic: ready documents are reserved by groups of consumers, acknowledged, tried again, and end as history.

What a consumer did is in the journal before it is answered. What becomes of deliveries that nobody acknowledged is in `ends`.

No clock, no threads. Made by `replay.open_broker`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from bson.int64 import Int64
from sortedcontainers import SortedSet

from turtlemq import small_batches
from turtlemq.broker import delivery, failures
from turtlemq.broker.delivery import Picked, Piece
from turtlemq.broker.failures import EndedDelivery
from turtlemq.broker.group import NO_MESSAGES, Group, Lease, MessageColumns
from turtlemq.broker.journal import Journal, pack
from turtlemq.broker.ready_log import ReadyLog
from turtlemq.broker.results import Acked, DeadRemoval, Reserved, split_acks
from turtlemq.errors import DiskFull, InvalidArgument, UnknownGroup
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.model import DUE_MS_MAX, I64, U64, Due
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.settings import Settings
from turtlemq.standing import add_move

_UNSAVED_BYTES_MAX = 32 << 20  # of journals between two checkpoints: replaying them takes half a second
_UNSAVED_DOCUMENTS_MAX = 500_000  # of the ready log: counting them takes as long


class Broker:
    """See the module."""

    def __init__(
        self,
        ready: ReadyLog,
        reserve: Journal,
        history: Journal,
        settings: Settings,
        bury: Callable[[Sequence[EndedDelivery]], int],
        resleep: Callable[[Sequence[EndedDelivery]], None],
        newest_seq: Callable[[], int],
    ) -> None:
        self.ready, self.reserve_log, self.history, self.settings = ready, reserve, history, settings
        self.groups: dict[str, Group] = {}
        self.cancelled: SortedSet[int] = SortedSet()  # offsets cancelled while ready
        self.cancelled_retries: set[int] = (
            set()
        )  # those of them that are a group's own retry of a message, which is counted elsewhere
        self.saved = (0, 0)  # bytes of the journals, documents of the ready log, at the last checkpoint
        self.levels = False  # the topic has used priorities
        self.specials = False  # the ready log holds documents that not every group sees
        self.notices = 0  # cancelled messages that are not in `cancelled`
        self.store_dead, self.schedule_retries = bury, resleep  # `bury` tells how many took the place of an older letter
        self.newest_seq = newest_seq  # of the Index
        self.dead_counts: Counter[str] = Counter()  # dead letters by the name of their group, which may be gone
        self.deferred: list[tuple[Journal, int, str, dict[str, Any]]] = []  # see `note`
        self.wait = Histogram(LATENESS_MS)  # from ready to the first delivery, in every group
        self.cancels = 0  # ready messages cancelled, since the topic was opened
        self._leased = 0  # events before this number say what is in consumers' hands
        self._unclaimed: int | None = 0  # messages that no group has been made for yet; None: to be counted

    # From the Index

    def accept(self, due: Due, now_ms: int) -> None:
        """Store a handoff. Durable with the next beat; until then the Index keeps it."""
        self._store(due.raw, due.starts, now_ms, due.progress, due.hashes)

    def notice(self, documents: bytes, starts: I64, now_ms: int) -> None:
        """Note that sleepers were cancelled, so that their ids stay known."""
        self._store(documents, starts, now_ms, self.ready.progress)

    def _store(self, raw: bytes, starts: I64, now_ms: int, progress: Any, hashes: U64 | None = None) -> None:
        heads = f.prefixes(raw, starts)
        some = int(np.bitwise_or.reduce(heads["flags"]))
        if some & f.META:  # that a message left for a sleep is durable before it is back: no power cut leaves it in two places
            self.reserve_log.sync()
        self.ready.accept(raw, starts, progress, now_ms, hashes)
        self.levels |= bool(some & f.PRIORITY)
        own = self._special(raw, starts, heads) if some & (f.META | f.NOTICE) else None
        plain = len(starts) if own is None else len(starts) - len(own[1])
        for name, group in self.groups.items():
            group.unfetched += plain
            if own is not None:
                group.unfetched += int(delivery.visible(self.ready, name, group, *own, frozenset()).sum())
        if self._unclaimed is not None:
            self._unclaimed += plain

    def _special(self, raw: bytes, starts: I64, heads: np.ndarray[Any, np.dtype[Any]]) -> tuple[log.Documents, I64]:
        """Those documents of the last batch that not every group sees, and their offsets."""
        special = np.flatnonzero(heads["flags"] & (f.META | f.NOTICE))
        self.specials = True
        self.notices += int(((heads["flags"] & f.NOTICE) != 0).sum())
        own = log.Documents(raw, starts[special], heads[special], np.ones(len(special), np.bool_))
        return own, special + (self.ready.next_offset - len(starts))

    # Groups

    def group(self, name: str, now_ms: int, create: bool = True) -> Group:
        """A group that is there, or a new one at the oldest message."""
        found = self.groups.get(name)
        if found is None:
            if not create:
                raise UnknownGroup(f"there is no group {name!r}")
            found = self.move_group(name, self.ready.first_offset, now_ms)
        return found

    def move_group(self, name: str, offset: int, now_ms: int) -> Group:
        """Create a group at an offset, or move it there: what is retained behind it comes (again)."""
        offset = max(self.ready.first_offset, min(offset, self.ready.next_offset))
        epoch, newest = self.reserve_log.number + 1, self.newest_seq()
        fields = {"event": "group", "epoch": Int64(epoch), "offset": Int64(offset), "since": Int64(newest)}
        self.reserve_log.append(now_ms, name, fields)
        group = self.groups.get(name) or Group(name, born=epoch)
        group.start(offset)
        group.epoch, group.moves, group.changed_ms = epoch, add_move(group.moves, newest, offset), now_ms
        group.seen_ms = now_ms
        group.unfetched = self.count_visible(name, group, offset, self.ready.next_offset)
        self.groups[name] = group
        return group

    def forget(self, name: str, now_ms: int) -> None:
        """Delete a group: it holds nothing back any more."""
        self.group(name, now_ms, create=False)
        self.reserve_log.append(now_ms, name, {"event": "forget"})
        del self.groups[name]

    def count_visible(self, name: str, place: delivery.Position, first: int, last: int) -> int:
        """How many messages for a group lie in [first, last). Only its own retries are read."""
        total: int = last - first - (self.cancelled.bisect_left(last) - self.cancelled.bisect_left(first))
        if not self.specials:
            return total
        special, own = self.ready.special(first, last, name, self.cancelled)
        for some in np.split(own, range(65_536, len(own), 65_536)):
            read, _ = self.ready.read(some)
            total += int(delivery.visible(self.ready, name, place, read, some, self.cancelled).sum())
        return total - special

    @property
    def unclaimed(self) -> int:
        """Messages that wait for the first group to come."""
        if self._unclaimed is None:
            self._unclaimed = self.count_visible("", Group(""), self.ready.first_offset, self.ready.next_offset)
        return self._unclaimed

    def forget_cancelled(self) -> None:
        """Files of the ready log have gone, or it was opened: what was cancelled in them only counts."""
        gone = set(self.cancelled[: self.cancelled.bisect_left(self.ready.first_offset)])
        self.notices += len(gone) - len(gone & self.cancelled_retries)
        self.cancelled -= gone
        self.cancelled_retries -= gone
        self.recount()

    def recount(self) -> None:
        """Files of the ready log have gone, or it was opened: count anew when somebody asks."""
        self._unclaimed = None

    # Consuming

    def reserve(
        self, name: str, count: int, now_ms: int, *, ttr_ms: int | None = None, consumer: str = "", auto: bool = False
    ) -> Reserved:
        """Hand out up to `count` messages under a lease; with `auto` they are settled, durably, before they are handed out."""
        known = name in self.groups
        group = self.group(name, now_ms)
        group.seen_ms = now_ms
        room = min(count, self.settings.max_in_flight - group.in_flight)
        if room <= 0:
            return Reserved(idle=known)
        picked = delivery.pick(self.ready, group, self.cancelled, self.levels, room, now_ms)
        if picked.nothing and picked.cursors == group.cursors:
            group.credits = picked.credits
            return Reserved(idle=known)
        out = Reserved(picked.pieces, [now_ms + self._ttr(piece, ttr_ms) for piece in picked.pieces])
        out.more = not picked.pieces and picked.full
        held = MessageColumns.join([piece.messages for piece in picked.pieces])
        late = MessageColumns.join(picked.expired) if picked.expired else NO_MESSAGES
        until = out.until_ms[0] if len(out.until_ms) == 1 else np.concatenate([np.empty(0, np.int64), *out.until_ms])
        try:
            if len(held) or len(late) or picked.passed:
                both = MessageColumns.join([held, late]) if len(late) else held
                self._journal_lease(group, both, until, consumer, picked, now_ms)
        except BaseException:
            group.put_back(picked.retries)
            raise
        group.cursors, group.credits = picked.cursors, picked.credits
        group.wait_no_more(picked.retries)
        group.unfetched -= picked.passed
        made = self._lease(group, held, until, consumer, now_ms) if len(held) else []
        if len(late):
            failures.expire(self, group, late, now_ms)
        if len(held) and (auto or self.settings.delivery == "at-most-once"):
            self.journal_settlement(group, held, np.full(len(held), now_ms), "acked", now_ms)
            group.close([(lease, np.arange(len(lease.messages))) for lease in made])
            self.sync()
            out.until_ms = [np.zeros_like(until) for until in out.until_ms]  # there is no lease: it is settled
        return out

    def _lease(self, group: Group, held: MessageColumns, until: I64, consumer: str, now_ms: int) -> list[Lease]:
        """A lease for all of them, or one for each moment at which some end."""
        few = len(held) < small_batches.DOCUMENTS
        one = not few and bool((until == until[0]).all())
        moments = [int(until[0])] if one else sorted(set(until.tolist())) if few else np.unique(until).tolist()
        made = []
        for moment in moments:
            mine = held if len(moments) == 1 else held.pick(np.flatnonzero(until == moment))
            made.append(group.lease(mine, now_ms, moment, consumer))
        group.tally.delivered += len(held)
        if not few:
            self.wait.add_many(now_ms - held.ready_ms[held.attempts == 1])
            return made
        for ready_ms, attempt in zip(held.ready_ms.tolist(), held.attempts.tolist(), strict=True):
            if attempt == 1:
                self.wait.add(now_ms - ready_ms)
        return made

    def _ttr(self, piece: Piece, ttr_ms: int | None) -> I64:
        if ttr_ms is not None:
            return np.full(len(piece.which), ttr_ms)
        own = piece.read.heads["ttr"][piece.which].astype(np.int64)
        own[own == 0] = self.settings.ttr_ms
        return own

    def _journal_lease(self, group: Group, held: MessageColumns, until: I64, consumer: str, picked: Picked, now_ms: int) -> None:
        """What is behind `until` is too late for a consumer: its lease ends at once."""
        group.changed_ms = now_ms
        ending = until if len(until) == len(held) else np.concatenate([until, np.full(len(held) - len(until), now_ms)])
        self.reserve_log.append(
            now_ms,
            group.name,
            {
                "event": "lease",
                "epoch": Int64(group.epoch),
                "consumer": consumer,
                "cursors": [Int64(picked.cursors[level]) for level in sorted(picked.cursors)],
                "passed": Int64(picked.passed),
                "offsets": pack(held.offsets),
                "seqs": pack(held.seqs),
                "attempts": pack(held.attempts),
                "until": pack(ending),
            },
        )
        self._leased = self.reserve_log.number

    def ack(self, name: str, acks: Sequence[str], now_ms: int, *, retry_delay_ms: int | None = None, error: str = "") -> Acked:
        """A grouped list: `id` was handled, `-id` failed. Any order, any mix; ids not held in reserve are reported."""
        if retry_delay_ms is not None and not 0 <= now_ms + retry_delay_ms <= DUE_MS_MAX:
            raise InvalidArgument(f"a retry comes by {DUE_MS_MAX} (May 2109) at the latest, {retry_delay_ms} ms are too long")
        group = self.groups.get(name)
        if group is None:
            return Acked(0, 0, 0, [ack.removeprefix("-") for ack in acks])
        whole = group.whole(acks)  # as it was handed out, as most are
        handled, failed = split_acks(acks) if whole is None else (acks, [])
        done, unknown = group.seek(handled) if whole is None else ([whole], [])
        acked = sum(len(which) for _, which in done)
        if acked:
            if len(done) == 1:
                lease, which = done[0]
                held = (
                    lease.messages
                    if whole is not None
                    else lease.messages.pick(which, handled if acked == len(handled) else None)
                )
                reserved = np.full(acked, lease.reserved_ms)
            else:
                held = MessageColumns.join([lease.messages.pick(which) for lease, which in done])
                reserved = np.concatenate([np.full(len(which), lease.reserved_ms) for lease, which in done])
            self.journal_settlement(group, held, reserved, "acked", now_ms)
            group.close(done)
        if not failed and not unknown and self.settings.ack_durability != "fsync":
            return Acked(acked, 0, 0, unknown)
        lost, missing = group.seek(failed)
        outcome = [failures.fail(self, group, lease, which, retry_delay_ms, error, now_ms) for lease, which in lost]
        again, dead = sum(n for n, _ in outcome), sum(n for _, n in outcome)
        if self.settings.ack_durability == "fsync" and acked + again + dead:
            self.sync()
        return Acked(acked, again, dead, unknown + missing)

    def extend(self, name: str, ids: Sequence[str], ttr_ms: int, now_ms: int) -> tuple[int, list[str]]:
        """Give consumers more time. Returns how many leases were extended, and ids not held in reserve."""
        if name not in self.groups:
            return 0, list(ids)
        group = self.groups[name]
        taken, unknown = group.seek(ids)
        if taken:
            offsets = np.concatenate([lease.messages.offsets[which] for lease, which in taken])
            until = Int64(now_ms + ttr_ms)
            self.reserve_log.append(
                now_ms, name, {"event": "extend", "epoch": Int64(group.epoch), "offsets": pack(offsets), "until": until}
            )
            group.extend(taken, now_ms + ttr_ms)
        return sum(len(which) for _, which in taken), unknown

    def give_back(
        self, name: str, ids: Sequence[str], now_ms: int, until_ms: Sequence[int] | None = None
    ) -> tuple[int, list[str]]:
        """A consumer was never told of these: they come again at once, and that delivery does not count. Returns how many, and
        ids not held in reserve."""
        if name not in self.groups:
            return 0, list(ids)
        group = self.groups[name]
        if until_ms is not None:  # by now somebody else may have them, under another lease; after a replay at the same attempt
            slots = {id_: group.slot(number) for id_ in ids if (number := group.ids.get(id_)) is not None}
            still = {id_: lease.until_ms for id_, (lease, _) in slots.items()}
            ids = [id_ for id_, end in zip(ids, until_ms, strict=True) if still.get(id_) == end]
        taken, unknown = group.seek(ids)
        for lease, which in taken:
            failures.wait(self, group, lease.messages.pick(which), np.full(len(which), now_ms), "", now_ms, counted=0)
            group.close([(lease, which)])
        return sum(len(which) for _, which in taken), unknown

    # Ends of leases

    def tick(self, now_ms: int) -> int | None:
        """Take back what was held too long. Returns when something ends or comes again next; what waits to be fetched does not
        count."""
        for group in self.groups.values():
            for lease in group.expired(now_ms):
                failures.fail(self, group, lease, np.flatnonzero(lease.open), 0, failures.LEASE_EXPIRED, now_ms)
        times = [t for group in self.groups.values() for t in (group.next_deadline(), group.next_retry(now_ms))]
        return min((t for t in times if t is not None), default=None)

    def journal_settlement(
        self, group: Group, held: MessageColumns, reserved: I64, outcome: str, now_ms: int, error: str = "", replaced: int = 0
    ) -> None:
        """The settlement record: one document for all of them. `replaced`: so many make no new dead letter."""
        write = self.history.append if outcome == "acked" else partial(self.write_or_defer, self.history)
        write(
            now_ms,
            group.name,
            {
                "event": "settle",
                "epoch": Int64(group.epoch),
                "replaced": Int64(replaced),
                "outcome": outcome,
                "offsets": pack(held.offsets),
                "seqs": pack(held.seqs),
                "due": pack(held.due_ms),
                "ready": pack(held.ready_ms),
                "reserved": pack(reserved),
                "attempts": pack(held.attempts),
                "ids": "\0".join(held.ids).encode(),
                "error": error,
            },
        )
        group.changed_ms = now_ms
        if outcome == "acked":
            group.settled += len(held)
            group.tally.acked += len(held)
        else:
            group.tally.dead += len(held)
            self.dead_counts[group.name] += len(held) - replaced

    # One message

    def is_cancelled(self, offset: int) -> bool:
        """Was the message at this ready offset cancelled, here or while it slept?"""
        return offset in self.cancelled or bool(int(self.ready.read(np.array([offset]))[0].heads["flags"][0]) & f.NOTICE)

    @property
    def groups_with_dead_letters(self) -> list[str]:
        """Names of groups that have dead letters; they may be gone themselves."""
        return [name for name, count in self.dead_counts.items() if count > 0]

    def note_dead_removed(self, name: str, leaving: Sequence[DeadRemoval], now_ms: int, *, stay: bool = False) -> None:
        """Dead letters of a group are about to go, requeued, deleted or too old; or `stay` after all. Noted before it is done,
        and durably, so that a crash between leaves nothing half done: see `leaving`."""
        fields: dict[str, Any] = {
            "event": "redead" if stay else "undead",
            "ids": "\0".join(letter.id for letter in leaving).encode(),
            "letters": pack([letter.seq for letter in leaving]),
            "became": pack([letter.requeued_seq for letter in leaving]),
        }
        self.history.append(now_ms, name, fields)
        self.history.sync()
        self.dead_counts[name] += len(leaving) if stay else -len(leaving)

    # Durability

    def write_or_defer(self, journal: Journal, now_ms: int, name: str, fields: dict[str, Any]) -> None:
        """Write of something that cannot be undone: somebody has taken messages over. Where there is no room, it is owed."""
        try:
            self.write_deferred()
            journal.append(now_ms, name, fields)
        except DiskFull:
            self.deferred.append((journal, now_ms, name, fields))

    def write_deferred(self) -> None:
        """Write what is owed: before anything is handed off, and before a checkpoint."""
        while self.deferred:
            journal, now_ms, name, fields = self.deferred[0]
            journal.append(now_ms, name, fields)
            del self.deferred[0]

    def stop_journals(self, error: BaseException) -> None:
        """Nobody knows whether messages were taken over: nothing more is said of any until the topic is opened again."""
        for journal in (self.reserve_log, self.history):
            journal.stop(error)

    def secure_leases(self) -> None:
        """What is in consumers' hands is known after a power cut, too: whoever takes one of these messages over, durably, must
        not find it unfetched again then."""
        if self._leased > self.reserve_log.durable:
            self.sync()

    @property
    def events(self) -> int:
        """How many events the journals have had."""
        return self.reserve_log.number + self.history.number

    @property
    def unsaved(self) -> bool:
        """Has so much happened since the last checkpoint that replaying it would take long?"""
        events, documents = self._journaled - self.saved[0], self.ready.next_offset - self.saved[1]
        return events > _UNSAVED_BYTES_MAX or documents > _UNSAVED_DOCUMENTS_MAX

    @property
    def _journaled(self) -> int:
        return self.reserve_log.end + self.history.end

    def note_saved(self) -> None:
        """There is a checkpoint of everything so far."""
        self.saved = (self._journaled, self.ready.next_offset)

    def sync(self) -> None:
        """Everything so far is safe: the documents first, then what was done with them."""
        self.ready.sync()
        self.reserve_log.sync()
        self.history.sync()
