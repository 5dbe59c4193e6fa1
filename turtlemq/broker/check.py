"""`check`: read the ready log again, count what each group must have, and compare with what the Broker says. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from turtlemq.broker import checkpoint, replay
from turtlemq.broker.broker import Broker
from turtlemq.broker.group import Group
from turtlemq.broker.journal import Journal
from turtlemq.broker.ready_batches import Batches, read_batches
from turtlemq.broker.ready_log import ReadyLog, Segment, tabulate
from turtlemq.broker.ready_tail import Rows
from turtlemq.broker.results import Interrupted
from turtlemq.errors import TurtleError
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan


def check(broker: Broker, folder: Path) -> Iterator[str]:
    """Every broken invariant, a line each. Costs a scan of the ready log, and another for each group."""
    yield from _check_log(broker.ready)
    for group in broker.groups.values():
        for line in _check_group(broker, group):
            yield f"group {group.name}: {line}"
    for offset in broker.cancelled:
        if not broker.ready.first_offset <= offset < broker.ready.next_offset:
            yield f"{offset} is cancelled, but not in the ready log"
    yield from _check_checkpoint(broker, folder)
    for journal in (broker.reserve_log, broker.history):
        yield from map(str, journal.verify())
    yield from _check_journals(broker, folder)


def _check_log(ready: ReadyLog) -> Iterator[str]:
    expected = ready.first_offset
    for segment in ready.segments:
        name = segment.path.name
        if segment.first_offset != expected:
            yield f"{name}: begins with offset {segment.first_offset}, {expected} was to come"
        view = ready.door.map(segment.path)
        if len(view) != segment.size:
            yield f"{name}: {len(view)} bytes long, {segment.size} are known"
        found = scan(view, segment.data_start, segment.size, sealed=True)
        last = segment is ready.segments[-1]
        expected += segment.tabled + (ready.tail.count if last else 0)
        batches = read_batches(view, found, segment.data_start, segment.first_offset, (segment.size, expected))
        yield from _check_documents(ready, segment, batches, last)
    if expected != ready.next_offset:
        yield f"ready log: {expected} would be the next offset, but {ready.next_offset} is"


def _check_documents(ready: ReadyLog, segment: Segment, batches: Batches, last: bool) -> Iterator[str]:
    """Tables and tail say of each document what the file says."""
    at = 0
    for table in segment.tables:
        stop = at + table.cover.documents
        try:
            table.verify()
            starts, _ = table.spans_of(np.arange(table.cover.documents))
            keys = table.slice(0, len(table))
        except t.Damaged as error:
            yield str(error)
            at = stop
            continue
        if not np.array_equal(starts, batches.positions[at:stop]):
            yield f"{table.path.name}: documents are not where it says"
        elif not np.array_equal(f.key_dues(keys), batches.ready_ms[at:stop]):
            yield f"{table.path.name}: ready times are not those of the batches"
        elif batches.hashes[at:stop].all():
            low, high = np.searchsorted(batches.special, (at, stop)).tolist()
            special, owners = batches.special[low:high] - at, batches.owners[low:high]
            rows = Rows(starts, batches.ready_ms[at:stop], batches.hashes[at:stop], special, owners)
            if not table.is_made_of(tabulate(table.cover, rows)):
                yield f"{table.path.name}: it is not what its documents make. Remove it: it is made again."
        else:  # some are damaged
            yield from _check_ids(table, batches, at, stop)
            yield from _check_special(table, batches, at, stop)
        at = stop
    if last:
        tail, low = ready.tail.rows(0, ready.tail.count), int(np.searchsorted(batches.special, at))
        if not (np.array_equal(tail.starts, batches.positions[at:]) and np.array_equal(tail.ready_ms, batches.ready_ms[at:])):
            yield f"{segment.path.name}: its last documents are not what is known of them"
        if not np.array_equal(tail.special + at, batches.special[low:]) or not np.array_equal(tail.owners, batches.owners[low:]):
            yield f"{segment.path.name}: which of its last documents are special is not what is known of them"


def _check_special(table: t.Table, batches: Batches, at: int, stop: int) -> Iterator[str]:
    """What has become damaged since the table was made is not missed."""
    low, high = np.searchsorted(batches.special, (at, stop)).tolist()
    known = dict(
        zip(table.ending_ordinals().tolist(), [] if (owners := table.owners()) is None else owners.tolist(), strict=True)
    )
    for ordinal, owner in zip((batches.special[low:high] - at).tolist(), batches.owners[low:high].tolist(), strict=True):
        if known.pop(ordinal, None) != owner:
            yield f"{table.path.name}: whose document {ordinal} is, is not what it says"
    if any(batches.hashes[at + ordinal] for ordinal in known):
        yield f"{table.path.name}: it takes a message for a special document"


def _check_ids(table: t.Table, batches: Batches, at: int, stop: int) -> Iterator[str]:
    hashes = batches.hashes[at:stop]
    good = np.flatnonzero(hashes)
    if table.lacks(hashes[good], good):
        yield f"{table.path.name}: an id is missing"
    if not table.may_hold(hashes[good]).all():
        yield f"{table.path.name}: the prints deny an id"


def _check_group(broker: Broker, group: Group) -> Iterator[str]:
    ready = broker.ready
    unfetched = replay.count_unfetched(broker, group.name, group, group.cursors)
    if unfetched != group.unfetched:
        yield f"{group.unfetched} are said to be unfetched, {unfetched} are"
    if not all(ready.first_offset <= cursor <= ready.next_offset for cursor in group.cursors.values()):
        yield f"cursors {group.cursors} are outside of the log, {ready.first_offset} to {ready.next_offset}"
    held = _held(group)
    if len(held) != group.in_flight or any(int(lease.open.sum()) != lease.left for lease in group.leases.values()):
        yield f"{group.in_flight} are said to be in flight, {len(held)} are"
    for id_, number in group.ids.items():
        lease, i = group.slot(number)
        if not lease.open[i] or lease.messages.ids[i] != id_:
            yield f"{id_} is said to be reserved and is not"
    offsets = np.array(sorted([*held, *group.waiting]), np.int64)
    if len(np.unique(offsets)) < len(offsets):
        yield "an offset is held twice"
    yield from _check_held(ready, group, offsets, held)


def _held(group: Group) -> dict[int, int]:
    """Reserved offsets and the seqs of their documents."""
    found: dict[int, int] = {}
    for lease in group.leases.values():
        rows = np.flatnonzero(lease.open)
        found.update(zip(lease.messages.offsets[rows].tolist(), lease.messages.seqs[rows].tolist(), strict=True))
    return found


def _check_held(ready: ReadyLog, group: Group, offsets: I64, held: dict[int, int]) -> Iterator[str]:
    if not len(offsets):
        return
    if offsets[0] < ready.first_offset or offsets[-1] >= ready.next_offset:
        yield f"it holds offsets from {offsets[0]} to {offsets[-1]}, the log has {ready.first_offset} to {ready.next_offset}"
        return
    if offsets[-1] >= max(group.cursors.values()):
        yield f"it holds offset {offsets[-1]}, which no cursor has passed"
    read, _ = ready.read(offsets)
    for offset, seq, good in zip(offsets.tolist(), read.heads["seq"].tolist(), read.good.tolist(), strict=True):
        if good and held.get(offset, seq) != seq:
            yield f"offset {offset} is document {seq}, it was reserved as {held[offset]}"


def _check_checkpoint(broker: Broker, folder: Path) -> Iterator[str]:
    saved = checkpoint.read(broker.ready.door, folder)
    if saved is None:
        return
    if saved.ready_offset > broker.ready.durable_offset:
        yield f"{checkpoint.FILE}: speaks of offset {saved.ready_offset}, {broker.ready.durable_offset} is durable"
    for journal, position in ((broker.reserve_log, saved.reserve), (broker.history, saved.history)):
        if not journal.holds(position):
            yield f"{checkpoint.FILE}: speaks of {position} in the {journal.kind} journal, which is not there"


def _check_journals(broker: Broker, folder: Path) -> Iterator[str]:
    """What every group has is what the journals tell, without the checkpoint."""
    try:
        told = _derive(broker, folder)
    except (TurtleError, OSError) as error:  # an old file of theirs is gone, or another's
        yield str(error)
        return
    if told is None:  # documents are gone, or damaged: what is known is all there is
        return
    if told.groups.keys() != broker.groups.keys():
        yield f"groups: there are {sorted(broker.groups)}, the journals tell of {sorted(told.groups)}"
    for name in told.groups.keys() & broker.groups.keys():
        mark, group = told.groups[name], broker.groups[name]
        known: dict[str, object] = {
            "messages not fetched": group.unfetched,
            "messages in hand": sorted([*_held(group), *group.waiting]),
            "messages settled": group.settled,
        }
        there: dict[str, object] = {
            "messages not fetched": mark.unfetched,
            "messages in hand": sorted(mark.open),
            "messages settled": mark.settled,
        }
        for what in known:
            if known[what] != there[what]:
                yield f"group {name}: {what}: {known[what]}, but by the journals {there[what]}"
    if set(told.cancelled) != set(broker.cancelled):
        yield f"cancelled: {sorted(broker.cancelled)[:5]} …, by the journals {sorted(told.cancelled)[:5]} …"


def _derive(broker: Broker, folder: Path) -> checkpoint.Checkpoint | None:
    """What the journals tell of all groups, from the oldest state in them on and without the checkpoint; None if they, or the
    documents that they speak of, are not whole."""
    ready = broker.ready
    reserve, history = (Journal(ready.door, folder, ready.topic, kind, broker.settings) for kind in ("reserve", "history"))
    reserve.bases, history.bases = list(broker.reserve_log.bases), list(broker.history.bases)  # looking for them may remove some
    leases = reserve.open((0, 0))
    again = Broker(ready, reserve, history, broker.settings, broker.store_dead, broker.schedule_retries, broker.newest_seq)
    saved = checkpoint.Checkpoint(specials=ready.next_offset > 0, levels=ready.next_offset > 0)
    states = [i for i, event in enumerate(leases) if event.fields["event"] == "state"]
    noted = [i for i in states if not leases[i].at_ms or (i == 0 and leases[0].number)]
    if noted:  # what was before was retained long enough; or opening found out more than the journals had to tell
        last = noted[-1]
        saved = checkpoint.decode(leases[last].fields["state"])
        saved.numbers, leases = (leases[last].number + 1, saved.numbers[1]), leases[last + 1 :]
    torn = replay.apply_events(again, saved, leases, history.open(saved.history), Interrupted())
    replay.tidy(again, saved, recount=True)
    saved.cancelled = set(again.cancelled)
    return None if torn or reserve.damage or history.damage or ready.damage else saved
