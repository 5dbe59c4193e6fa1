"""Retention: removes files of the three logs, and idle groups. `policy.droppable` decides which files.

A file of the ready log goes only if every group has settled all of it. Journals may lose their oldest files at any time, since a
new file of the reserve journal begins with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise

from turtlemq.broker.policy import Extent, droppable
from turtlemq.broker.save import save
from turtlemq.broker.state import BrokerState
from turtlemq.errors import Exhausted

IDLE_STEP_MS = 120_000  # the most that one run adds to a group's idle time: the runs of a serving topic are a minute apart


def retain(state: BrokerState, now_ms: int, waiting: Collection[str] = (), save_first: Callable[[], None] = lambda: None) -> int:
    """Delete idle groups, and remove files that are settled and too old or too many. `waiting`: groups for which a fetch waits.
    `save_first`: called before files are removed, so that no checkpoint needs them. Returns how many were deleted."""
    count = _forget_groups(state, now_ms, waiting)
    ready, total = state.logs.ready, state.logs.bytes_total
    settled = min((group.committed for group in state.groups.values()), default=0)
    dropped = droppable(_ready_extents(state, settled), state.settings, now_ms, total)
    if dropped:
        save_first()
    for _ in range(dropped):
        total -= ready.segments[0].size
        ready.drop_first()
    if dropped:
        state.visibility.forget_removed()
        _note_state(state)
    return count + dropped + _drop_journals(state, now_ms, total, save_first)


def may_retain(state: BrokerState) -> bool:
    """Whether time alone can give `retain` work. The newest file of each log always stays."""
    logs = state.logs
    files = (logs.ready.segments, logs.reserve.bases, logs.history.bases)
    return any(len(bases) > 1 for bases in files) or bool(state.settings.group_expire_hours and state.groups)


def _note_state(state: BrokerState) -> None:
    """Write a checkpoint into the journal: recovery from the journals alone could not read the removed documents any more."""
    try:
        state.logs.reserve.write_checkpoint()
    except Exhausted:
        return  # the file `offset` has it


def _drop_journals(state: BrokerState, now_ms: int, total: int, save_first: Callable[[], None]) -> int:
    """Remove old files of the journals, after a new file that begins with a checkpoint. Returns how many."""
    journals, settings = state.logs.journals, state.settings
    if not any(droppable(journal.extents(), settings, now_ms, total) for journal in journals):
        return 0
    save_first()
    state.logs.reserve.roll(now_ms)
    save(state)
    count = 0
    for journal in journals:
        for _ in range(droppable(journal.extents(), settings, now_ms, total)):
            total -= journal.drop_first()
            count += 1
    return count


def _forget_groups(state: BrokerState, now_ms: int, waiting: Collection[str]) -> int:
    """Delete groups whose idle time has reached the limit. A group with messages in flight or with a waiting fetch is in use.

    Idle time is the sum of the times between runs, and a long one counts for little: no fetch was possible while the topic was
    closed or the machine slept, and a clock that jumps ahead for a moment makes no group old. So a group is deleted in its
    second idle run at the earliest."""
    limit_ms = state.settings.group_expire_hours * 3_600_000
    if not limit_ms:
        return 0
    for group in state.groups.values():
        if group.in_flight or group.seen_ms is None or group.name in waiting:
            group.use(now_ms)
        else:
            group.idle_ms += max(0, min(now_ms - group.seen_ms, IDLE_STEP_MS, math.ceil(limit_ms / 2)))
            group.seen_ms = now_ms
    idle = [group.name for group in state.groups.values() if group.idle_ms >= limit_ms]
    for name in idle:
        state.forget_group(name, now_ms)
    return len(idle)


def _ready_extents(state: BrokerState, settled: int) -> list[Extent]:
    ready = state.logs.ready
    extents = []
    for segment, following in pairwise(ready.segments):
        extents.append(Extent(segment.size, ready.last_ready_ms(segment), following.first_offset <= settled))
    if ready.segments:
        extents.append(Extent(ready.segments[-1].size, 0, False))
    return extents
