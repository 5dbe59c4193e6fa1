"""The Broker of one topic: it holds due messages, hands them out to consumer groups under leases, and takes acks and failures.

Every change is journaled before the caller gets an answer. `Broker` is the face of the package and joins its parts: picking
messages is in `delivery`, the state of a group in `group`, acks and extends in `settling`, ends without an ack in `failures`,
cancelled messages in `cancel`, removing old files in `retention`, checkpoints in `save`, opening in `opening`. They share a
`BrokerState`; nothing outside this package reaches into it.

No clock and no threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import numpy as np

from turtlemq import small_batches
from turtlemq.broker import check, delivery, events, failures, lookup, retention, save, settling
from turtlemq.broker.delivery import Picked, Piece
from turtlemq.broker.failures import LEASE_EXPIRED, Failures
from turtlemq.broker.group import NO_EVENT, NO_MESSAGES, Group, Lease, MessageColumns
from turtlemq.broker.lookup import Settlement
from turtlemq.broker.ready_view import ReadyView
from turtlemq.broker.results import Acked, BrokerStats, DeadRemoval, Extended, Reserved, ReserveTerms
from turtlemq.broker.state import BrokerState
from turtlemq.broker.visibility import retries_by_group, visible
from turtlemq.errors import OutOfFiles
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.model import I64, Damage, Due, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.settings import Settings

LEASE_MESSAGES_MAX = 100_000  # of one fetch, so that its event stays below `events.EVENT_BYTES`


class Broker:
    """Due messages of one topic and its consumer groups. Made by `opening.open_broker`."""

    def __init__(self, state: BrokerState, failing: Failures) -> None:
        self._state, self._logs, self._visibility = state, state.logs, state.visibility
        self._ready_log, self._groups = state.logs.ready, state.groups
        self._failures = failing
        self.ready, self.journals = ReadyView(state), state.logs.journals  # for reading
        self.wait = Histogram(LATENESS_MS)  # from ready to the first delivery, over all groups
        self.cancel_count = 0  # ready messages cancelled since the topic was opened

    @property
    def settings(self) -> Settings:
        return self._state.settings

    def configure(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self._state.configure(settings)

    # From the Index

    def accept(self, due: Due, now_ms: int) -> None:
        """Store a handoff. It is durable with the next checkpoint; until then the Index keeps the messages."""
        starts = due.starts
        if due.flags & f.META:  # the event that put a retry to sleep is durable before the retry is back, or a power cut could
            self._logs.reserve.sync()  # leave the message in two places
        self._ready_log.accept(due.raw, starts, due.progress, now_ms, due.hashes)
        restricted = self._visibility.note_arrivals(due.raw, starts, due.flags)
        unrestricted = len(starts) if restricted is None else len(starts) - len(restricted[1])
        for group in self._groups.values():
            group.unfetched += unrestricted
        if restricted is not None:
            self._count_retries(*restricted)

    def notice(self, documents: bytes, starts: I64, now_ms: int) -> None:
        """Store notices of cancelled sleepers, so that their ids stay known. No group sees or counts them."""
        self._ready_log.accept(documents, starts, self._ready_log.progress, now_ms)
        self._visibility.note_notices(len(starts))

    def _count_retries(self, read: log.Documents, offsets: I64) -> None:
        """Count retries that came due for their groups."""
        for name, rows in retries_by_group(read).items():
            if name in self._groups:
                group, own = self._groups[name], log.Documents(read.buffer, read.starts[rows], read.heads[rows], read.good[rows])
                group.unfetched += int(visible(self._ready_log, name, group, own, offsets[rows], frozenset()).sum())

    # Groups

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups by name. Read only."""
        return self._groups

    def move_group(self, name: str, offset: int, now_ms: int) -> Group:
        """Create a group at a ready offset, or move it there. It gets every message from there on that is retained, again or for
        the first time."""
        return self._state.move_group(name, offset, now_ms)

    def forget_group(self, name: str, now_ms: int) -> None:
        """Delete a group, so that it holds no message back from retention. Raises `UnknownGroup`."""
        self._state.forget_group(name, now_ms)

    def has_ready(self, name: str, now_ms: int) -> bool:
        """Whether a fetch of a group, existing or new, may find a message. O(1)."""
        group = self._groups.get(name)
        return self._ready_log.next_offset > self._ready_log.first_offset if group is None else group.has_ready(now_ms)

    # Consuming

    def reserve(self, name: str, count: int, now_ms: int, **terms: Unpack[ReserveTerms]) -> Reserved:
        """Hand out up to `count` messages under a lease. A group that does not exist is created at the oldest message."""
        ttr_ms, consumer = terms.get("ttr_ms"), terms.get("consumer", "")
        state = self._state
        known = state.groups.get(name)
        group = state.move_group(name, self._ready_log.first_offset, now_ms) if known is None else known
        group.use(now_ms)
        room = min(count, state.settings.in_flight_share - group.in_flight, LEASE_MESSAGES_MAX)
        if room <= 0 or not group.has_ready(now_ms):
            return Reserved(idle=known is not None)
        picked = delivery.pick(self._visibility, group, room, now_ms, state.settings, terms.get("low"))
        if picked.is_empty and picked.cursors == group.cursors:
            group.carry, group.preemption = picked.carry, picked.preemption
            return Reserved(idle=known is not None)
        out = Reserved(picked.pieces, [now_ms + self._ttr(piece, ttr_ms) for piece in picked.pieces], picked.bytes)
        out.more = not picked.pieces and picked.is_cut_short
        messages = MessageColumns.join([piece.messages for piece in picked.pieces])
        expired = MessageColumns.join(picked.expired) if picked.expired else NO_MESSAGES
        until = out.until_ms[0] if len(out.until_ms) == 1 else np.concatenate([np.empty(0, np.int64), *out.until_ms])
        event = self._journal_lease(group, messages, expired, until, consumer, picked, now_ms)
        group.cursors, group.carry, group.preemption = picked.cursors, picked.carry, picked.preemption
        group.retries.remove(picked.retries)
        group.unfetched -= picked.passed
        leases = self._lease(group, messages, until, consumer, event, now_ms) if len(messages) else []
        out.lease = leases[0].token if leases else ""
        if len(expired):
            self._failures.expire(group, expired, now_ms)
        if len(messages) and (terms.get("auto") or state.settings.delivery == "at-most-once"):
            state.ack(group, messages, np.full(len(messages), now_ms), consumer, now_ms)
            group.close([(lease, np.arange(len(lease.messages))) for lease in leases])
            self.sync()
            out.until_ms, out.lease = [np.zeros_like(until) for until in out.until_ms], ""  # there is no lease any more
        return out

    def _journal_lease(
        self,
        group: Group,
        messages: MessageColumns,
        expired: MessageColumns,
        until: I64,
        consumer: str,
        picked: Picked,
        now_ms: int,
    ) -> int:
        """Journal a fetch; expired messages stand in it with a lease that ends at once. If that fails, the fetch has not taken
        place, and its retries stay due. Returns the number of the event."""
        if not (len(messages) or len(expired) or picked.passed):
            return NO_EVENT
        if len(expired):
            messages = MessageColumns.join([messages, expired])
            until = np.concatenate([until, np.full(len(expired), now_ms)])
        group.changed_ms = now_ms
        fields = events.lease(group, messages, until, consumer, picked.cursors, picked.passed)
        try:
            return self._logs.write_lease(now_ms, group.name, fields)
        except BaseException:
            group.retries.put_back(picked.retries)
            raise

    def _lease(self, group: Group, messages: MessageColumns, until: I64, consumer: str, event: int, now_ms: int) -> list[Lease]:
        """Lease messages: one lease for each end time among them."""
        small = len(messages) < small_batches.DOCUMENTS
        same = not small and bool((until == until[0]).all())
        ends = [int(until[0])] if same else sorted(set(until.tolist())) if small else np.unique(until).tolist()
        leases = []
        for end in ends:
            same_end = messages if len(ends) == 1 else messages.pick(np.flatnonzero(until == end))
            leases.append(group.lease(same_end, now_ms, end, consumer, event))
        group.tally.delivered += len(messages)
        if not small:
            self.wait.add_many(now_ms - messages.ready_ms[messages.attempts == 1])
            return leases
        for ready_ms, attempt in zip(messages.ready_ms.tolist(), messages.attempts.tolist(), strict=True):
            if attempt == 1:
                self.wait.add(now_ms - ready_ms)
        return leases

    def _ttr(self, piece: Piece, ttr_ms: int | None) -> I64:
        """Lease times: `ttr_ms` if the consumer asked for it, else each message's own, else the topic's."""
        if ttr_ms is not None:
            return np.full(len(piece.which), ttr_ms)
        own = piece.read.heads["ttr"][piece.which].astype(np.int64)
        own[own == 0] = self._state.settings.ttr_ms
        return own

    def ack(
        self,
        name: str,
        acks: Sequence[str],
        now_ms: int,
        *,
        leases: str | Sequence[str] | None = None,
        retry_delay_ms: int | None = None,
        error: str = "",
    ) -> Acked:
        """End deliveries: `id` was handled, `-id` failed, in any order. Ids that are not in flight are returned as unknown.
        `leases`: the token of each message's lease, or one for all; a message under another lease is late, and left alone.
        `retry_delay_ms`: instead of the back-off; `failures.NO_RETRY`: failed messages die."""
        return settling.ack(self._state, self._failures, name, acks, now_ms, leases, retry_delay_ms, error)

    def extend(
        self, name: str, ids: Sequence[str], ttr_ms: int, now_ms: int, leases: str | Sequence[str] | None = None
    ) -> Extended:
        """Let leases end `ttr_ms` from now. `leases`: as for `ack`."""
        return settling.extend(self._state, name, ids, ttr_ms, now_ms, leases)

    def give_back(self, name: str, ids: Sequence[str], now_ms: int, lease: str | None = None) -> tuple[int, list[str]]:
        """Undo deliveries that never reached their consumer: the messages are due again at once, and the delivery does not count.
        `lease`: the token of the delivery; a message under another lease by now, another consumer's, is left alone. Returns how
        many were given back, and the ids that are not in flight."""
        return settling.give_back(self._state, self._failures, name, ids, now_ms, lease)

    def retry_now(self, name: str, offset: int, now_ms: int) -> None:
        """End the back-off of a message that waits in memory, at this ready offset."""
        self._failures.retry_now(self._state.group(name), offset, now_ms)

    def end_leases(self, name: str, ids: Sequence[str]) -> int:
        """End leases of messages that another store has taken over, during recovery; nothing is journaled. Returns how many."""
        group = self._state.group(name)
        leased, _ = group.locate(ids)
        for lease, which in leased:
            group.forget_attempts(lease.messages.offsets[which])
        group.close(leased)
        return sum(len(which) for _, which in leased)

    # Time

    def tick(self, now_ms: int) -> None:
        """End leases that have run out, one slice of messages. `next_wake` tells when to call this again: at once if there are
        more."""
        left = failures.SLICE_MESSAGES
        for group in self._groups.values():
            if leased := group.expired(now_ms, left):
                self._failures.fail(group, leased, 0, LEASE_EXPIRED, now_ms)
                left -= sum(len(rows) for _, rows in leased)

    def next_wake(self, now_ms: int, name: str | None = None) -> int | None:
        """When the next lease ends or the next back-off is over, in all groups or in one. No lists: called for each fetch."""
        first: int | None = None
        groups = self._groups
        for group in groups.values() if name is None else (groups[name],) if name in groups else ():
            for at in (group.next_deadline(), group.retries.next_time(now_ms)):
                if at is not None and (first is None or at < first):
                    first = at
        return first

    # Cancelled messages and dead letters

    def cancel(
        self, documents: Sequence[int], retries: Mapping[int, str], sleeping: Mapping[str, list[str]], now_ms: int
    ) -> None:
        """Cancel documents of the ready log, durably. `documents`: offsets of messages. `retries`: offsets of retries, each with
        its group. `sleeping`: by group, ids whose sleeping retries the caller removes from the Index afterwards; the event names
        them, so that recovery completes this after a crash."""
        self._state.cancel(documents, retries, sleeping, now_ms)
        self.cancel_count += len(documents)

    def supersede(self, documents: Sequence[int], retries: Mapping[int, str], ids: Collection[str], now_ms: int) -> bool:
        """Cancel documents and leases of messages because newer ones with these `ids` are stored. Returns whether any were."""
        if documents or retries:
            self._state.cancel(documents, retries, {}, now_ms, superseded=True)
        leased = [(group.name, sorted(group.reserved_ids & {*ids})) for group in self._groups.values() if group.in_flight]
        return sum(self.end_leases(name, own) for name, own in leased if own) > 0 or bool(documents or retries)

    @property
    def dead_counts(self) -> Mapping[str, int]:
        """Dead letters by group, also of groups that were deleted. May hold zeros."""
        return self._state.dead_counts

    @property
    def dead_total(self) -> int:
        """Dead letters of all groups."""
        return self._state.dead_counts.total()

    @property
    def groups_with_dead_letters(self) -> list[str]:
        """Names of groups that have dead letters, also of groups that were deleted."""
        return [name for name, count in self._state.dead_counts.items() if count > 0]

    def note_dead_removed(
        self, removals: Sequence[DeadRemoval], now_ms: int, *, withdrawn: bool = False, superseded: bool = False
    ) -> None:
        """Journal, durably, that dead letters of a group are about to be removed, so that recovery can finish it; or that this is
        `withdrawn`, since the disk was full."""
        self._state.note_dead_removed(removals, now_ms, withdrawn, superseded)

    def count_dead(self, name: str, change: int) -> None:
        self._state.dead_counts[name] += change

    def recount_dead(self, counts: Mapping[str, int]) -> None:
        self._state.dead_counts = Counter(counts)

    # Durability

    @property
    def progress(self) -> Progress:
        """How far the Index has handed off its messages."""
        return self._ready_log.progress

    @property
    def durable_progress(self) -> Progress:
        """How far these handoffs are durable: the Index may drop their documents."""
        return self._ready_log.durable_progress

    def sync(self) -> None:
        """Make everything so far durable."""
        self._logs.sync()

    def deferring_syncs(self) -> AbstractContextManager[None]:
        """In the body of a `with`, requests that promise durability only note that they need a sync: see `owes_sync`."""
        return self._logs.deferring_syncs()

    @property
    def owes_sync(self) -> bool:
        """Whether a request waits for a sync that was deferred."""
        return self._logs.owes_sync

    def begin_sync(self) -> save.LogSync:
        """A sync of everything so far. `LogSync.run` does it, on any thread; then call `end_sync`. If no file can be opened for
        it, it is done here."""
        try:
            return save.begin_sync(self._state)
        except OutOfFiles:
            self.sync()
            return save.begin_sync(self._state)

    def end_sync(self, done: save.LogSync) -> None:
        """The sync has run. Raises if it failed."""
        save.end_sync(self._state, done)

    def write_deferred(self) -> None:
        """Write the events that a full disk has deferred. Required before a handoff. Raises `DiskFull` if some are left."""
        self._logs.write_deferred()

    @property
    def has_deferred(self) -> bool:
        """Whether a full disk has deferred events."""
        return self._logs.has_deferred

    @property
    def event_count(self) -> int:
        """Events that the journals have had since the topic began."""
        return self._logs.event_count

    def on_disk_full(self, make_room: Callable[[], bool]) -> None:
        """Before an event is refused for a full disk, call `make_room`, and try once more if it returns true."""
        self._logs.on_disk_full(make_room)

    @property
    def unsaved(self) -> bool:
        """Whether so much was written since the last checkpoint that replaying it would take long."""
        return self._logs.unsaved

    def begin_save(self) -> save.Save:
        """A checkpoint of this moment. `Save.run` writes it, on any thread; then call `end_save`."""
        return save.begin_save(self._state)

    def end_save(self, done: save.Save) -> None:
        """A checkpoint was written, and its files are synced. Raises if that failed."""
        save.end_sync(self._state, done.logs)

    def write_state(self) -> None:
        """Write a checkpoint into the reserve journal, so that no event before it need be replayed."""
        self._logs.reserve.write_checkpoint()

    def retain(self, now_ms: int, waiting: Collection[str] = (), save_first: Callable[[], None] = lambda: None) -> int:
        """Delete idle groups, and remove files that are settled and too old or too many. `waiting`: groups for which a fetch
        waits. `save_first`: called before files are removed, so that no checkpoint needs them. Returns how many were deleted."""
        return retention.retain(self._state, now_ms, waiting, save_first)

    @property
    def may_retain(self) -> bool:
        """Whether time alone can give `retain` work."""
        return retention.may_retain(self._state)

    # Stopping

    @property
    def stopped(self) -> BaseException | None:
        """The error after which one of the logs accepts no more writes, if there was one."""
        return self._logs.stopped

    def refuse_if_journals_stopped(self) -> None:
        """Raise `Stopped` if the journals accept no more events."""
        self._logs.refuse_if_journals_stopped()

    def stop_journals(self, error: BaseException) -> None:
        """Accept no more events until the topic is opened again: it is unknown whether another store took messages over."""
        self._logs.stop_journals(error)

    def close(self) -> dict[str, Any]:
        """Close the files, without a sync. Returns the entry of the clean-shutdown mark."""
        self._logs.close()
        return save.clean_mark(self._logs)

    # Figures and history

    def find_settlements(self, groups: Mapping[str, int], id_: str, first: int) -> dict[str, Settlement]:
        """The newest settlement of a message in each of these groups, given with the time at which each got it; without those
        that no searched event tells. `first`: the first ready offset of the message."""
        return lookup.find_settlements(self._logs.history, groups, id_, first)

    def find_cancellation(self, offset: int) -> int | None:
        """When the message at a ready offset was cancelled; None: no event tells it among the newest ones."""
        return lookup.find_cancellation(self._logs.history, offset)

    def stats(self) -> BrokerStats:
        """Figures of all groups together. Without any group, all messages are ready."""
        groups = self._groups.values()
        return BrokerStats(
            ready=sum(group.ready for group in groups) if groups else self._visibility.unclaimed,
            reserve=sum(group.in_flight for group in groups),
            history=sum(group.settled for group in groups),
            cancelled=self._visibility.cancelled_messages,
            bytes=self._logs.bytes_total,
            segments=len(self._ready_log.segments),
        )

    def oldest_ready_ms(self) -> int | None:
        """When the oldest message that some group has not fetched became ready. Read from its file."""
        cursors, ready = [at for group in self._groups.values() for at in group.cursors.values()], self._ready_log
        first = max(min(cursors, default=ready.first_offset), ready.first_offset)
        return None if first >= ready.next_offset else int(ready.read(np.array([first]))[1][0])

    @property
    def unsynced_documents(self) -> int:
        """Documents of the ready log that are not durable yet."""
        return self._ready_log.next_offset - self._ready_log.durable_offset

    @property
    def damage(self) -> list[Damage]:
        """All damage found so far."""
        return self._logs.damage

    def check(self) -> Iterator[str]:
        """Every broken invariant, one line each. Costs a scan of the ready log, and another for each group."""
        return check.check(self._state)
