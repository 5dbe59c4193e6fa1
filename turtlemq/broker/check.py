"""Checking a Broker: read its files again, count what each group must have, and compare with its state. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turtlemq.broker import checkpoint, events
from turtlemq.broker.group import Group
from turtlemq.broker.journal import Event, Journal
from turtlemq.broker.ready_batches import Batches, read_batches
from turtlemq.broker.ready_log import ReadyLog, Segment
from turtlemq.broker.ready_tail import Rows, encode_table
from turtlemq.broker.replay import Replay
from turtlemq.broker.state import BrokerState
from turtlemq.broker.visibility import Visibility
from turtlemq.errors import TurtleError
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan


def check(state: BrokerState) -> Iterator[str]:
    """Every broken invariant, one line each. Costs a scan of the ready log, and another for each group."""
    ready, cancelled = state.logs.ready, state.visibility.cancelled
    yield from _check_log(ready)
    for group in state.groups.values():
        for line in _check_group(state, group):
            yield f"group {group.name}: {line}"
    for offset in cancelled:
        if not ready.first_offset <= offset < ready.next_offset:
            yield f"{offset} is cancelled, but not in the ready log"
    yield from _check_checkpoint(state)
    for journal in state.logs.journals:
        yield from map(str, journal.verify())
    yield from _check_journals(state)


def _check_log(ready: ReadyLog) -> Iterator[str]:
    expected = ready.first_offset
    for segment in ready.segments:
        name = segment.path.name
        if segment.first_offset != expected:
            yield f"{name}: begins with offset {segment.first_offset}, {expected} was to come"
        view = ready.door.map(segment.path)
        if len(view) != segment.size:
            yield f"{name}: {len(view)} bytes long, {segment.size} are known"
        scanned = scan(view, segment.data_start, segment.size, sealed=True)
        last = segment is ready.segments[-1]
        expected += segment.tabled + (ready.tail.count if last else 0)
        place = (segment.data_start, segment.first_offset, (segment.size, expected))
        seeds = {ready.seed, *(table.seed for table in segment.tables)}
        yield from _check_documents(
            ready, segment, {seed: read_batches(view, scanned, *place, seed=seed) for seed in seeds}, last
        )
    if expected != ready.next_offset:
        yield f"ready log: {expected} would be the next offset, but {ready.next_offset} is"


def _check_documents(ready: ReadyLog, segment: Segment, by_seed: dict[int, Batches], last: bool) -> Iterator[str]:
    """Tables and tail agree with the documents in the file. `by_seed`: its batches, with hashes of each seed in use."""
    at = 0
    for table in segment.tables:
        stop, batches = at + table.cover.documents, by_seed[table.seed]
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
            low, high = np.searchsorted(batches.restricted, (at, stop)).tolist()
            restricted, owners = batches.restricted[low:high] - at, batches.owners[low:high]
            rows = Rows(starts, batches.ready_ms[at:stop], batches.hashes[at:stop], restricted, owners, batches.levels[at:stop])
            if not table.is_made_of(encode_table(table.cover, rows, table.seed, table.has_levels)):
                yield f"{table.path.name}: it is not what its documents make. Remove it: it is made again."
        else:  # documents are damaged
            yield from _check_ids(table, batches, at, stop)
            yield from _check_restricted(table, batches, at, stop)
            good = np.flatnonzero(batches.hashes[at:stop])
            if table.has_levels and (table.levels(0, stop - at)[good] != batches.levels[at:stop][good]).any():
                yield f"{table.path.name}: priorities are not those of its documents"
        at = stop
    if last:
        batches = by_seed[ready.seed]
        tail, low = ready.tail.rows(0, ready.tail.count), int(np.searchsorted(batches.restricted, at))
        if not (np.array_equal(tail.starts, batches.positions[at:]) and np.array_equal(tail.ready_ms, batches.ready_ms[at:])):
            yield f"{segment.path.name}: its last documents are not what is known of them"
        restricted, owners = batches.restricted[low:], batches.owners[low:]
        if not (np.array_equal(tail.restricted + at, restricted) and np.array_equal(tail.owners, owners)):
            yield f"{segment.path.name}: which of its last documents are special is not what is known of them"
        if not np.array_equal(tail.levels, batches.levels[at:]):
            yield f"{segment.path.name}: priorities of its last documents are not what is known of them"


def _check_restricted(table: t.Table, batches: Batches, at: int, stop: int) -> Iterator[str]:
    """Restricted documents of a table, except those that were damaged since it was written."""
    low, high = np.searchsorted(batches.restricted, (at, stop)).tolist()
    known = dict(
        zip(table.ending_ordinals().tolist(), [] if (owners := table.owners()) is None else owners.tolist(), strict=True)
    )
    for ordinal, owner in zip((batches.restricted[low:high] - at).tolist(), batches.owners[low:high].tolist(), strict=True):
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


def _check_group(state: BrokerState, group: Group) -> Iterator[str]:
    ready = state.logs.ready
    unfetched = state.visibility.count_ahead(group.name, group, [group.cursors[level] for level in sorted(group.cursors)])
    if unfetched != group.unfetched:
        yield f"{group.unfetched} are said to be unfetched, {unfetched} are"
    if not all(ready.first_offset <= cursor <= ready.next_offset for cursor in group.cursors.values()):
        yield f"cursors {group.cursors} are outside of the log, {ready.first_offset} to {ready.next_offset}"
    reserved = _reserved(group)
    if len(reserved) != group.in_flight or any(int(lease.open.sum()) != lease.left for lease in group.leases.values()):
        yield f"{group.in_flight} are said to be in flight, {len(reserved)} are"
    for id_ in group.reserved_ids:
        leased = group.lease_of(id_)
        if leased is None or not leased[0].open[leased[1]] or leased[0].messages.ids[leased[1]] != id_:
            yield f"{id_} is said to be reserved and is not"
    offsets = np.array(sorted([*reserved, *group.retries]), np.int64)
    if len(np.unique(offsets)) < len(offsets):
        yield "an offset is held twice"
    yield from _check_open(ready, group, offsets, reserved)


def _reserved(group: Group) -> dict[int, int]:
    """Offsets in flight, and the seqs of their documents."""
    seqs: dict[int, int] = {}
    for lease in group.leases.values():
        rows = np.flatnonzero(lease.open)
        seqs.update(zip(lease.messages.offsets[rows].tolist(), lease.messages.seqs[rows].tolist(), strict=True))
    return seqs


def _check_open(ready: ReadyLog, group: Group, offsets: I64, reserved: dict[int, int]) -> Iterator[str]:
    """Offsets of leases and retries are passed by a cursor, and those of leases are of the documents that were leased."""
    if not len(offsets):
        return
    if offsets[0] < ready.first_offset or offsets[-1] >= ready.next_offset:
        yield f"it holds offsets from {offsets[0]} to {offsets[-1]}, the log has {ready.first_offset} to {ready.next_offset}"
        return
    if offsets[-1] >= max(group.cursors.values()):
        yield f"it holds offset {offsets[-1]}, which no cursor has passed"
    read, _ = ready.read(offsets)
    for offset, seq, good in zip(offsets.tolist(), read.heads["seq"].tolist(), read.good.tolist(), strict=True):
        if good and reserved.get(offset, seq) != seq:
            yield f"offset {offset} is document {seq}, it was reserved as {reserved[offset]}"


def _check_checkpoint(state: BrokerState) -> Iterator[str]:
    """The checkpoint file must not run ahead of the logs."""
    logs = state.logs
    saved = checkpoint.read(logs.ready.door.beside(), logs.ready.folder)  # replaced through another Door
    if saved is None:
        return
    if saved.ready_offset > logs.ready.durable_offset:
        yield f"{checkpoint.FILE}: speaks of offset {saved.ready_offset}, {logs.ready.durable_offset} is durable"
    for journal, position in zip(logs.journals, (saved.reserve, saved.history), strict=True):
        if not journal.holds(position):
            yield f"{checkpoint.FILE}: speaks of {position} in the {journal.kind} journal, which is not there"


def _check_journals(state: BrokerState) -> Iterator[str]:
    """A replay of the journals without the checkpoint file leads to the same state."""
    try:
        replayed = _replay(state)
    except (TurtleError, OSError) as error:  # a file of theirs is gone, or another topic's
        yield str(error)
        return
    if replayed is None:
        return
    groups, expected = state.groups, replayed.saved.groups
    if expected.keys() != groups.keys():
        yield f"groups: there are {sorted(groups)}, the journals tell of {sorted(expected)}"
    for name in expected.keys() & groups.keys():
        mark, group = expected[name], groups[name]
        figures: dict[str, tuple[object, object]] = {
            "messages not fetched": (group.unfetched, mark.unfetched),
            "messages in hand": (sorted([*_reserved(group), *group.retries]), sorted(mark.open)),
            "messages settled": (group.settled, mark.settled),
        }
        for label, (known, derived) in figures.items():
            if known != derived:
                yield f"group {name}: {label}: {known}, but by the journals {derived}"
    cancelled, derived_cancelled = set(state.visibility.cancelled), set(replayed.visibility.cancelled)
    if derived_cancelled != cancelled:
        yield f"cancelled: {sorted(cancelled)[:5]} …, by the journals {sorted(derived_cancelled)[:5]} …"


def _replay(state: BrokerState) -> Replay | None:
    """Replay the journals from the oldest checkpoint in them that is needed. None: journals or documents are damaged or lost."""
    ready, logs = state.logs.ready, state.logs
    reserve, history = (Journal(ready.door, ready.folder, ready.topic, kind, state.settings) for kind in ("reserve", "history"))
    reserve.bases, history.bases = list(logs.reserve.bases), list(logs.history.bases)  # `find_files` may remove some
    leases = reserve.open((0, 0))
    saved = checkpoint.Checkpoint(has_restricted=ready.next_offset > 0, has_priorities=ready.next_offset > 0)
    if (found := _needed(leases, history.bases[0] if history.bases else 0)) is not None:
        last, saved = found
        saved.numbers, leases = (leases[last[-1]].number + 1, saved.numbers[1]), leases[last.stop :]
    settlements = history.open(saved.history)
    replay = Replay(saved, Visibility(ready), reserve.number)
    replay.run(leases, settlements)
    replay.finish(recount=True)
    return None if replay.torn or reserve.damage or history.damage or ready.damage else replay


def _needed(leases: list[Event], history_base: int) -> tuple[range, checkpoint.Checkpoint] | None:
    """The oldest checkpoint of the reserve journal with a complete record behind it, and its place; None: all events are there.
    Retention may have removed older events of this journal, or those of the history before `history_base`; and opening writes a
    checkpoint, without a time, if it has found out more than the events tell."""
    states = events.find_states([(event.number, event.fields) for event in leases])
    told = [i for i, state in enumerate(states) if not leases[state[0]].at_ms or (i == 0 and leases[0].number)]
    if not told and not history_base:
        return None
    for state in states[told[-1] if told else 0 :]:
        saved = checkpoint.decode(events.join_state([leases[i].fields for i in state]))
        if saved.history[0] >= history_base:
            return state, saved
    return None
