"""Retention: only what every group has settled is removed, and only when it is old enough or too much. Decided by `policy`."""

from __future__ import annotations

from itertools import pairwise

from turtlemq.broker import save
from turtlemq.broker.broker import Broker
from turtlemq.broker.policy import Extent, droppable
from turtlemq.errors import DiskFull


def keep_house(broker: Broker, now_ms: int) -> int:
    """Forget groups that nobody uses any more, and remove files that nobody needs. Returns how many things went."""
    count = _forget_groups(broker, now_ms)
    total = sum(segment.size for segment in broker.ready.segments) + broker.reserve_log.bytes_total + broker.history.bytes_total
    settled = min((group.committed for group in broker.groups.values()), default=0)
    dropped = droppable(_ready_extents(broker, settled), broker.settings, now_ms, total)
    for _ in range(dropped):
        total -= broker.ready.segments[0].size
        broker.ready.drop_first()
    if dropped:
        broker.forget_cancelled()
        _note_state(broker)
    return count + dropped + _drop_journals(broker, now_ms, total)


def may_go(broker: Broker) -> bool:
    """Is there anything that grows too old by itself? The newest file of each log always stays."""
    logs = (broker.ready.segments, broker.reserve_log.bases, broker.history.bases)
    return any(len(files) > 1 for files in logs) or bool(broker.settings.group_expire_hours and broker.groups)


def _note_state(broker: Broker) -> None:
    """What the removed files had to tell must not have to be found out from journals alone."""
    try:
        broker.reserve_log.note_state()
    except DiskFull:
        return  # the checkpoint has it


def _drop_journals(broker: Broker, now_ms: int, total: int) -> int:
    """A new file of the reserve journal says where everything stands, so that nothing before it is needed."""
    old = sum(droppable(journal.extents(), broker.settings, now_ms, total) for journal in (broker.reserve_log, broker.history))
    if not old:
        return 0
    broker.reserve_log.roll(now_ms)
    save.save(broker, broker.ready.folder)
    count = 0
    for journal in (broker.reserve_log, broker.history):
        for _ in range(droppable(journal.extents(), broker.settings, now_ms, total)):
            total -= journal.drop_first()
            count += 1
    return count


def _forget_groups(broker: Broker, now_ms: int) -> int:
    hours = broker.settings.group_expire_hours
    if not hours:
        return 0
    for group in broker.groups.values():
        if group.seen_ms is None:
            group.seen_ms = now_ms  # nobody can have asked while the topic was closed
    limit_ms = now_ms - hours * 3_600_000
    idle = [g.name for g in broker.groups.values() if not g.in_flight and max(g.changed_ms, g.seen_ms or 0) < limit_ms]
    for name in idle:
        broker.forget(name, now_ms)
    return len(idle)


def _ready_extents(broker: Broker, settled: int) -> list[Extent]:
    extents = []
    segments = broker.ready.segments
    for segment, following in pairwise(segments):
        extents.append(Extent(segment.size, broker.ready.newest_ms(segment), following.first_offset <= settled))
    if segments:
        extents.append(Extent(segments[-1].size, 0, False))
    return extents
