"""Facts about messages in the groups of a Broker, for the decisions of `turtlemq.standing`.

Documents of messages in the ready log are compared with the groups' cursors, leases and retries in memory. Retries that sleep in
the Index and dead letters belong to the topic (`topic.facts`) and are passed in. No decisions here.

Facts are gathered for many messages and all groups at once. Most groups have nothing of their own to say about a message, only
where their cursors stand: these are compared as arrays, and only leases, retries and letters that exist are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from turtlemq import standing
from turtlemq.broker.broker import Broker
from turtlemq.broker.group import Group
from turtlemq.model import I64
from turtlemq.standing import FactTable

Pairs = Set[tuple[str, str]]  # of group and id


@dataclass(frozen=True, slots=True)
class Located:
    """Where documents of messages lie in the ready log."""

    documents: dict[str, int]  # id → offset of the message itself, or of the notice that it was cancelled while it slept
    retries: dict[tuple[str, str], int]  # (group, id) → offset of the group's newest valid retry


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of messages: a row for each, a column for each group, and a last column for everything outside of groups: dead
    letters of groups that are gone, and ready messages of a topic without any group."""

    rows: dict[str, int]  # by id
    columns: dict[str, int]  # by name of a group
    table: FactTable

    def of(self, name: str, id_: str) -> int:
        """The facts of one message and one group."""
        return int(self.table[self.rows[id_], self.columns[name]])


def locate(broker: Broker, ids: Sequence[str], retries_max: int | None = None) -> tuple[Located, int]:
    """The documents of messages; ids that the ready log does not hold are left out. Also for how many of the ids, from the first
    on, this is: fewer than all if there may be more than `retries_max` retries."""
    retries, count = broker.ready.valid_retries(ids, retries_max)
    return Located(broker.ready.find_ids(ids[:count]), retries), count


def facts(broker: Broker, ids: Sequence[str], located: Located, asleep: Pairs, letters: Pairs, cancelled: Set[str]) -> Facts:
    """The facts of messages in all groups, as bits of `standing`. Facts that cannot change a decision may be left out. 10 ns for
    each pair of message and group.

    `asleep`, `letters`: pairs for which a valid retry sleeps, and for which there is a dead letter. `cancelled`: ids."""
    groups = list(broker.groups.values())
    rows, columns = {id_: i for i, id_ in enumerate(dict.fromkeys(ids))}, {group.name: j for j, group in enumerate(groups)}
    outside, documents = len(groups), located.documents
    offsets = np.array([documents.get(id_, -1) for id_ in rows], np.int64)
    table = _by_position(broker, groups, offsets)
    for id_, j, fact in _own_facts(broker, groups, rows.keys(), located):
        table[rows[id_], j] |= fact
    for name, id_ in asleep:
        table[rows[id_], columns[name]] |= standing.ASLEEP
    for name, id_ in letters:
        table[rows[id_], columns.get(name, outside)] |= standing.LETTER
    if not groups:
        table[offsets >= 0, outside] |= standing.UNCLAIMED
    table[[rows[id_] for id_ in cancelled]] = standing.CANCELLED
    return Facts(rows, columns, table)


def _by_position(broker: Broker, groups: Sequence[Group], offsets: I64) -> FactTable:
    """Facts that follow from the offsets of messages (-1: not in the ready log) and the positions of groups alone."""
    first_had = np.array([standing.first_had(group.moves) for group in groups], np.int64)
    there = offsets >= 0
    at = np.where(there, offsets, broker.ready.first_offset - 1)  # removed by retention: it lay here at the latest
    table = np.full((len(offsets), len(groups) + 1), standing.PREDATES, np.uint8)
    table[:, :-1] = np.where(at[:, None] < first_had, standing.PREDATES, 0)
    table[there, :-1] |= np.where(broker.ready.are_unfetched(groups, offsets[there]), np.uint8(standing.UNFETCHED), np.uint8(0))
    return table


def _own_facts(broker: Broker, groups: Sequence[Group], ids: Set[str], located: Located) -> Iterator[tuple[str, int, int]]:
    """Facts that one group alone has about a message: leases, and retries in memory and in the ready log."""
    wanted, at = {*ids}, {offset: id_ for id_, offset in located.documents.items()}
    offsets = {*at}
    for j, group in enumerate(groups):
        if group.in_flight:
            for id_ in wanted & group.reserved_ids:
                yield id_, j, standing.LEASED
        if group.retries:
            for offset in offsets & group.retries.keys():
                yield at[offset], j, standing.WAITING
    columns = {group.name: j for j, group in enumerate(groups)}
    for (name, id_), offset in located.retries.items():
        group = broker.groups[name]
        if offset in group.retries:
            yield id_, columns[name], standing.WAITING
        elif broker.ready.is_unfetched(group, offset):
            yield id_, columns[name], standing.UNFETCHED
