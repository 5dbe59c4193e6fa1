"""Cancelling what is no longer asleep for the first time: messages that are ready, or wait to be tried again, in every group.

A message that some group holds in reserve, has settled or has among its dead is not cancelled in any: a group either sees a
message through or never sees the end of it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from turtlemq.broker import delivery
from turtlemq.broker.group import Group
from turtlemq.broker.journal import pack
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_id

if TYPE_CHECKING:
    from turtlemq.broker.broker import Broker

CANCELLED = "cancelled"
BEFORE = "cancelled before"  # an answer, not a state: it was cancelled already when somebody asked


def cancel(broker: Broker, ids: Sequence[str], now_ms: int, asleep: Set[tuple[str, str]]) -> dict[str, str | None]:
    """Cancel messages, durably. For each id: `CANCELLED`, `BEFORE`, or the state that does not allow it; None: unknown.

    `asleep`: (group, id) of those that sleep for another attempt. Whoever knows them ends them when this returns."""
    base, own = find(broker, ids), own_retries(broker, ids)
    out: dict[str, str | None] = {}
    ended: dict[int, list[Group]] = {}  # what ends, and the groups that would have seen it
    again: set[int] = set()  # which of these are a group's own retries
    naps: dict[str, list[str]] = {}
    for id_ in dict.fromkeys(ids):
        offset = base.get(id_)
        retries = [(group, own[group.name, id_]) for group in broker.groups.values() if (group.name, id_) in own]
        napping = any((name, id_) in asleep for name in broker.groups)
        if offset is None and not retries and not napping:
            out[id_] = None
            continue
        out[id_] = blocked(broker, id_, offset, {group.name: at for group, at in retries}, asleep)
        if out[id_] == CANCELLED:
            if offset is not None:
                ended[offset] = list(broker.groups.values())
            for name in broker.groups:
                if (name, id_) in asleep:
                    naps.setdefault(name, []).append(id_)
            for group, at in retries:
                if fresh(broker, group, at):
                    ended[at] = [group]
                    again.add(at)
    if ended or naps:
        _journal(broker, ended, again, naps, now_ms)
    return out


def find(broker: Broker, ids: Sequence[str]) -> dict[str, int]:
    """The newest ready offset of each id that has one."""
    usable = [id_ for id_ in ids if id_.isprintable()]
    hashes = np.array([hash_id(id_) for id_ in usable], np.uint64)
    found = broker.ready.find_many([id_.encode() for id_ in usable], hashes) if usable else {}
    return {usable[i]: offset for i, offset in found.items()}


def own_retries(broker: Broker, ids: Sequence[str]) -> dict[tuple[str, str], int]:
    """Where in the ready log the groups' own retries of messages are, as (group, id) → offset, without those that are void."""
    if not broker.specials:
        return {}
    found: dict[tuple[str, str], int] = {}
    for group in broker.groups.values():
        skip = len(group.name) + 1
        for key, offset in find(broker, [f"{group.name}/{id_}" for id_ in ids]).items():
            read, _ = broker.ready.read(np.array([offset]))
            if offset not in broker.cancelled and not delivery.void(group, delivery.document(read, 0)):
                found[group.name, key[skip:]] = offset
    return found


def blocked(broker: Broker, id_: str, offset: int | None, own: dict[str, int], asleep: Set[tuple[str, str]]) -> str:
    """`CANCELLED` if nothing keeps a message from being cancelled; else the state that does."""
    if offset is not None and broker.is_cancelled(offset):
        return BEFORE
    states = set()
    for group in broker.groups.values():
        if id_ in group.ids:
            return "reserve"
        again = (group.name, id_) in asleep or (group.name in own and fresh(broker, group, own[group.name]))
        states.add(again or (offset is not None and (skipped(group, offset) or fresh(broker, group, offset))))
    return CANCELLED if False not in states else "history"


def skipped(group: Group, offset: int) -> bool:
    """Did a group begin behind this document, and was never moved back to it? Then it never had it, and never ended it."""
    return bool(group.moves) and offset < group.moves[0][1]


def fresh(broker: Broker, group: Group, offset: int) -> bool:
    """Is this document still to be delivered to a group?"""
    if offset in group.waiting:
        return True
    if offset < min(group.cursors.values()):
        return False
    if offset >= max(group.cursors.values()):
        return True
    read, _ = broker.ready.read(np.array([offset]))
    level = int(read.heads["flags"][0]) & f.PRIORITY
    return offset >= group.cursors[level]


def _journal(broker: Broker, ended: dict[int, list[Group]], again: set[int], naps: dict[str, list[str]], now_ms: int) -> None:
    """The event names the groups that had not fetched a document yet: it counts for them, and then no more. And those for which
    a message sleeps for another attempt, so that this ends as well if the process does not live to see it."""
    offsets = np.array(sorted(ended), np.int64)
    read, _ = broker.ready.read(offsets)
    unfetched: dict[str, list[int]] = {}
    for offset, groups in ended.items():
        for group in groups:
            if offset not in group.waiting and fresh(broker, group, offset):
                unfetched.setdefault(group.name, []).append(offset)
    fields = {
        "event": "cancel",
        "offsets": pack(offsets),
        "seqs": pack(read.heads["seq"].astype(np.int64)),
        "again": pack(sorted(again)),
        "unfetched": {name: pack(some) for name, some in unfetched.items()},
        "naps": {name: "\0".join(some).encode() for name, some in naps.items()},
    }
    broker.history.append(now_ms, "", fields)
    broker.sync()
    broker.cancelled |= set(ended)
    broker.cancelled_retries |= again
    for name, some in unfetched.items():
        broker.groups[name].unfetched -= len(some)
    for offset, groups in ended.items():
        for group in groups:
            group.waiting.pop(offset, None)
    broker.cancels += len(ended) - len(again)
    broker.recount()
