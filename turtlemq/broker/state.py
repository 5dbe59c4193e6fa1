"""The state of a Broker, and its changes that are journaled from more than one place.

`Broker` serves consumers with it, `failures` ends unacknowledged deliveries, `retention` removes old files, `save` writes a
checkpoint of it, `opening` builds it, `check` compares it with the files. An event is journaled before the state changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turtlemq.broker import events
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.broker.logs import Logs
from turtlemq.broker.results import DeadRemoval
from turtlemq.broker.visibility import Visibility
from turtlemq.errors import UnknownGroup
from turtlemq.model import I64
from turtlemq.settings import Settings
from turtlemq.standing import add_move


@dataclass(slots=True)
class BrokerState:
    """Logs, groups and counts of one topic's Broker."""

    logs: Logs
    visibility: Visibility
    settings: Settings
    newest_seq: Callable[[], int]  # of the Index
    groups: dict[str, Group] = field(default_factory=dict)
    dead_counts: Counter[str] = field(default_factory=Counter)  # dead letters by group, also of groups that were deleted

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self.logs.configure(settings)

    # Groups

    def group(self, name: str) -> Group:
        """An existing group. Raises `UnknownGroup`."""
        group = self.groups.get(name)
        if group is None:
            raise UnknownGroup(f"there is no group {name!r}")
        return group

    def move_group(self, name: str, offset: int, now_ms: int) -> Group:
        """Create a group at a ready offset, or move it there. It gets every message from there on that is retained, again or for
        the first time."""
        ready, reserve = self.logs.ready, self.logs.reserve
        offset = max(ready.first_offset, min(offset, ready.next_offset))
        epoch, newest = reserve.number + 1, self.newest_seq()
        reserve.append(now_ms, name, events.group(epoch, offset, newest))
        group = self.groups.get(name) or Group(name, born=epoch)
        group.start(offset)
        group.epoch, group.moves, group.changed_ms = epoch, add_move(group.moves, newest, offset), now_ms
        group.use(now_ms)
        group.unfetched = self.visibility.count(name, group, offset, ready.next_offset)
        self.groups[name] = group
        return group

    def forget_group(self, name: str, now_ms: int) -> None:
        """Delete a group, so that it holds no message back from retention. Raises `UnknownGroup`."""
        self.group(name)
        self.logs.reserve.append(now_ms, name, events.forget())
        del self.groups[name]

    # Settlements

    def ack(self, group: Group, messages: MessageColumns, reserved_ms: I64, consumers: str | Sequence[str], now_ms: int) -> None:
        """Journal that messages were handled. `consumers`: one for all, or one for each. Raises `DiskFull`, and changes nothing
        then."""
        pieces = events.settle(group, messages, reserved_ms, events.ACKED, "", 0, consumers)
        self.logs.history.append(now_ms, group.name, *pieces)
        group.forget_attempts(messages.offsets)
        group.changed_ms = now_ms
        group.settled += len(messages)
        group.tally.acked += len(messages)

    def bury(
        self,
        group: Group,
        messages: MessageColumns,
        reserved_ms: I64,
        consumers: Sequence[str],
        outcome: str,
        error: str,
        now_ms: int,
        replaced: int,
    ) -> None:
        """Journal that messages have become dead letters, which are stored already. `replaced`: so many took the place of an
        older letter, and are not counted."""
        pieces = events.settle(group, messages, reserved_ms, outcome, error, replaced, consumers)
        self.logs.write_or_defer(self.logs.history, now_ms, group.name, pieces)
        group.changed_ms = now_ms
        group.tally.dead += len(messages)
        self.dead_counts[group.name] += len(messages) - replaced

    # Cancelled messages and dead letters

    def cancel(
        self,
        documents: Sequence[int],
        retries: Mapping[int, str],
        sleeping: Mapping[str, list[str]],
        now_ms: int,
        superseded: bool = False,
    ) -> None:
        """Cancel documents of the ready log, durably. `documents`: offsets of messages. `retries`: offsets of retries, each with
        its group. `sleeping`: by group, ids whose sleeping retries end as well. `superseded`: a newer message of the same id is
        stored already, so this cannot be refused: if the disk is full, the event is written later."""
        ended = {*documents, *retries}
        offsets = np.array(sorted(ended), np.int64)
        seqs = self.visibility.heads(offsets)["seq"].astype(np.int64)
        unfetched = self._unfetched(documents, retries)
        uncounted = ended if superseded else {*retries}
        pieces = events.cancel(offsets, seqs, uncounted, unfetched, sleeping, self.newest_seq())
        if superseded:
            self.logs.write_or_defer(self.logs.history, now_ms, "", pieces)
        else:
            self.logs.history.append(now_ms, "", *pieces)
        self.visibility.cancel(ended, uncounted)
        for name, count in unfetched.items():
            self.groups[name].unfetched -= count
        for group in self.groups.values():
            for offset in ended & group.retries.keys():
                del group.retries[offset]
            group.forget_attempts(offsets)
        if superseded:
            self.logs.sync()  # before the newer message can be handed off
        else:
            self.logs.sync_for_answer()

    def _unfetched(self, documents: Sequence[int], retries: Mapping[int, str]) -> Counter[str]:
        """By group, how many of these messages and of its own retries it has not fetched yet."""
        groups, offsets = list(self.groups.values()), np.array(sorted(documents), np.int64)
        counts = self.visibility.are_unfetched(groups, offsets).sum(axis=0).tolist()
        unfetched = Counter({group.name: count for group, count in zip(groups, counts, strict=True) if count})
        for offset, name in retries.items():
            unfetched[name] += self.visibility.is_counted(self.groups[name], offset)
        return unfetched

    def note_dead_removed(self, removals: Sequence[DeadRemoval], now_ms: int, withdrawn: bool, superseded: bool = False) -> None:
        """Journal, durably, that dead letters are about to be removed. All of it or nothing. `withdrawn`: they stay after all,
        which is written later if there is no room. `superseded`: as for `cancel`."""
        by_group: dict[str, list[DeadRemoval]] = {}
        for removal in removals:
            by_group.setdefault(removal.group, []).append(removal)
        pieces = {name: events.remove_dead(own, withdrawn) for name, own in by_group.items()}
        if withdrawn or superseded:
            for name, own_pieces in pieces.items():
                self.logs.write_or_defer(self.logs.history, now_ms, name, own_pieces)
        else:
            self.logs.history.append_many(now_ms, [(name, fields) for name, own in pieces.items() for fields in own])
        self.logs.history.sync()
        for name, own in by_group.items():
            self.dead_counts[name] += len(own) if withdrawn else -len(own)
