"""Requests about messages in flight: acks, extends, and deliveries that are given back.

A request may name the lease that it means, by the token that the fetch returned. A message that is in flight under another lease
by now is late: another consumer has it, and nothing is changed. Without a token, the id alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import not_

import numpy as np

from turtlemq.broker import events
from turtlemq.broker.failures import Failures
from turtlemq.broker.group import Group, Leased, messages_of, names_only
from turtlemq.broker.results import Acked, Extended, split_acks
from turtlemq.broker.state import BrokerState
from turtlemq.errors import InvalidArgument
from turtlemq.model import DUE_MS_MAX

Leases = str | Sequence[str] | None  # tokens: one for all ids, or one for each; None: none is named


def ack(
    state: BrokerState,
    failures: Failures,
    name: str,
    acks: Sequence[str],
    now_ms: int,
    leases: Leases,
    retry_delay_ms: int | None,
    error: str,
) -> Acked:
    """End deliveries of a group, handled and failed ones. Every argument is as in `Broker.ack`."""
    if retry_delay_ms is not None and not 0 <= now_ms + retry_delay_ms <= DUE_MS_MAX:
        raise InvalidArgument(f"a retry comes by {DUE_MS_MAX} (May 2109) at the latest, {retry_delay_ms} ms are too long")
    group = state.groups.get(name)
    if group is None:
        return Acked(0, 0, 0, [ack.removeprefix("-") for ack in acks])
    group.use(now_ms)
    whole = group.whole_lease(acks)  # the usual case: acknowledged as it was handed out
    late: list[str] = []
    if leases is not None and (whole is None or not names_only(leases, whole[0].token)):
        acks, late = _without_late(group, acks, [ack.removeprefix("-") for ack in acks], leases)
        whole = group.whole_lease(acks)
    handled, failed = split_acks(acks) if whole is None else (acks, [])
    leased, unknown = group.locate(handled) if whole is None else ([whole], [])
    acked = sum(len(which) for _, which in leased)
    if acked:
        if whole is not None:
            messages, reserved = whole[0].messages, np.full(acked, whole[0].reserved_ms)
        else:
            messages, reserved = messages_of(leased, handled if acked == len(handled) else None)
        state.ack(group, messages, reserved, _consumers_of(leased), now_ms)
        group.close(leased)
    fsync = state.settings.ack_durability == "fsync"
    if not failed and not unknown and not fsync:
        return Acked(acked, 0, 0, unknown, late)
    leased, missing = group.locate(failed)
    retried, dead = failures.fail(group, leased, retry_delay_ms, error, now_ms)
    if fsync and acked + retried + dead:
        state.logs.sync_for_answer()
    return Acked(acked, retried, dead, unknown + missing, late)


def extend(state: BrokerState, name: str, ids: Sequence[str], ttr_ms: int, now_ms: int, leases: Leases) -> Extended:
    """Let leases of a group end `ttr_ms` from now."""
    group = state.groups.get(name)
    if group is None:
        return Extended(0, list(ids))
    group.use(now_ms)
    ids, late = (ids, []) if leases is None else _without_late(group, ids, ids, leases)
    leased, unknown = group.locate(ids)
    if leased:
        offsets = np.concatenate([lease.messages.offsets[which] for lease, which in leased])
        state.logs.reserve.append(now_ms, name, *events.extend(group, offsets, now_ms + ttr_ms))
        group.extend(leased, now_ms + ttr_ms)
    return Extended(sum(len(which) for _, which in leased), unknown, late)


def give_back(
    state: BrokerState, failures: Failures, name: str, ids: Sequence[str], now_ms: int, lease: str | None
) -> tuple[int, list[str]]:
    """Undo deliveries of a group that never reached their consumer. Returns how many, and the ids that are not in flight."""
    group = state.groups.get(name)
    if group is None:
        return 0, list(ids)
    if lease is not None:
        ids, _ = _without_late(group, ids, ids, lease)
    leased, unknown = group.locate(ids)
    for held, which in leased:
        failures.give_back(group, held, which, now_ms)
    return sum(len(which) for _, which in leased), unknown


def _without_late(
    group: Group, entries: Sequence[str], ids: Sequence[str], leases: str | Sequence[str]
) -> tuple[list[str], list[str]]:
    """Entries of a list whose ids are not late, see `Group.late`; and the late ids, which are counted."""
    late = group.late(ids, leases)
    group.tally.late += sum(late)
    return list(compress(entries, map(not_, late))), list(compress(ids, late))


def _consumers_of(leased: Leased) -> str | list[str]:
    """The consumer of all these messages; or of each, if there are several."""
    if len(leased) == 1 or len({lease.consumer for lease, _ in leased}) == 1:
        return leased[0][0].consumer
    return [lease.consumer for lease, which in leased for _ in range(len(which))]
