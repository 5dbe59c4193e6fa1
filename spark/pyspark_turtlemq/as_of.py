"""Tables of a topic as they were at a past moment, for kind `messages` with the option `asOf`.

Documents say when they were written and when they became ready, so those of a moment are chosen by time: the last version of each
sleeper up to it, if nothing in the ready log had taken its place by then. Dead letters follow from the events that made and
removed them. Positions of groups at the moment are replayed by `group_marks`. Moments before the kept journals are refused.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq.group_marks import Event, events
from pyspark_turtlemq.journals import packed_column
from pyspark_turtlemq.parts import TopicLogs
from turtlemq.broker import events as kinds
from turtlemq.errors import InvalidArgument
from turtlemq.model import SEQ_COUNTER_BITS

_SLEEP = ("id", "group", "created_ms", "left_offset")  # names one sleep: the first of a message, or one of a group's retries


def check_known(logs: TopicLogs, at_ms: int) -> None:
    """Raise `InvalidArgument` for a moment whose journals are gone."""
    for kind in ("reserve", "history"):
        if any(base == 0 for base, _ in logs.files.segments(kind)):
            continue
        first = next((event.at_ms for event in events(logs, kind) if event.at_ms), 0)
        if first > at_ms:
            text = f"topic {logs.files.topic!r}: the journals of {at_ms} are gone; messages are known from {first} on"
            raise InvalidArgument(text)


def ready_then(ready: pa.Table, at_ms: int) -> pa.Table:
    """The documents of the ready log at the moment."""
    return ready.filter(pc.less_equal(ready["ready_ms"], at_ms))


def sleepers_then(sleepers: pa.Table, ready: pa.Table, at_ms: int) -> pa.Table:
    """The sleepers of the moment, messages and retries. `ready`: all documents of the ready log, later ones included: some of
    these slept then, and are in no segment of the delay log any more."""
    first_ms = pc.shift_right(ready["seq"], SEQ_COUNTER_BITS)  # a notice has the first seq of its message
    number = ready.schema.get_field_index("created_ms")
    ready = ready.set_column(number, "created_ms", pc.coalesce(ready["created_ms"], first_ms))
    names, is_later = sleepers.column_names, pc.greater(ready["ready_ms"], at_ms)
    candidates = pa.concat_tables([sleepers, ready.filter(is_later).select(names)])
    written = pc.shift_right(pc.coalesce(candidates["order"], candidates["seq"]), SEQ_COUNTER_BITS)
    written = pc.max_element_wise(written, candidates["slept_ms"])
    version = pc.less_equal(written, at_ms)
    first_sleep = pc.and_(pc.is_null(candidates["group"]), pc.less_equal(candidates["created_ms"], at_ms))
    number = candidates.schema.get_field_index("due_ms")
    unknown = pc.if_else(version, candidates["due_ms"], None)  # the version of the moment is gone
    candidates = candidates.set_column(number, "due_ms", unknown).append_column("written", pc.if_else(version, written, -1))
    found = _newest(candidates.filter(pc.or_(version, first_sleep)), _SLEEP, "written")
    found = _newest(found, ("id", "group", "left_offset"), "created_ms")  # of messages with one id the last
    due = ready_then(ready, at_ms)
    own = pc.is_null(due["group"])
    came = _highest(due.filter(own), ("id",), "created_ms")
    retried = _key(due.filter(pc.invert(own)))
    first, again = found.filter(pc.is_null(found["group"])), found.filter(pc.is_valid(found["group"]))
    newest = _one(came["created_ms"]).take(pc.index_in(first["id"], came["id"]))
    first = first.filter(pc.fill_null(pc.greater(first["created_ms"], newest), True))
    again = again.filter(pc.invert(pc.is_in(_key(again), retried)))
    both = pa.concat_tables([first, again]).select(names)
    return both.set_column(names.index("state"), "state", pa.array(["sleep"] * both.num_rows, pa.string()))


def _key(retries: pa.Table) -> pa.Array:
    """Group, message and the offset that it had left, as one text: the name of one sleep."""
    return _one(pc.binary_join_element_wise(retries["group"], retries["id"], retries["left_offset"].cast(pa.string()), "/"))


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def left_then(logs: TopicLogs, at_ms: int) -> dict[str, set[int]]:
    """By group, the ready offsets that messages had left by then for another sleep: a long back-off, or the requeue of a dead
    letter. The retry may be in no file any more."""
    left, died = dict[str, set[int]](), dict[tuple[str, str], int]()
    for event in sorted((one for kind in ("reserve", "history") for one in events(logs, kind)), key=lambda one: one.at_ms):
        if event.at_ms > at_ms:
            break
        kind, fields, own = event.fields["event"], event.fields, left.setdefault(event.group, set())
        if kind == kinds.MOVED:
            own.update(packed_column(fields, "offsets").tolist())
        elif kind in (kinds.GROUP, kinds.FORGET):
            place = int(fields["offset"]) if kind == kinds.GROUP else 0
            left[event.group] = {offset for offset in own if offset < place}
        elif kind == kinds.SETTLE and fields["outcome"] != kinds.ACKED:
            offsets = packed_column(fields, "offsets").tolist()
            died |= {(event.group, id_): at for id_, at in zip(kinds.split_ids(fields["ids"]), offsets, strict=True)}
        elif kind == kinds.REMOVE_DEAD:
            pairs = zip(kinds.split_ids(fields["ids"]), packed_column(fields, "became").tolist(), strict=True)
            own.update(died[event.group, id_] for id_, became in pairs if became and (event.group, id_) in died)
    return left


def letters_then(letters: pa.Table, logs: TopicLogs, at_ms: int) -> pa.Table:
    """The dead letters of the moment. `letters`: the documents that the dead letters still hold, removed ones included."""
    told = sorted((event for event in events(logs, "history") if event.at_ms <= at_ms), key=lambda event: event.at_ms)
    held = dict[tuple[str, str], int]()
    rows = zip(letters["group"].to_pylist(), letters["id"].to_pylist(), letters["dropped_ms"].to_pylist(), strict=True)
    made = {(group, id_): dropped_ms for group, id_, dropped_ms in rows if dropped_ms <= at_ms}
    gone = {pair for event in told for pair in _removed(event)}
    held |= {pair: at for pair, at in made.items() if pair not in gone}
    for event in told:
        kind = event.fields["event"]
        if (kind == kinds.SETTLE and event.fields["outcome"] != kinds.ACKED) or kind == kinds.KEEP_DEAD:
            held |= dict.fromkeys(((event.group, id_) for id_ in kinds.split_ids(event.fields["ids"])), event.at_ms)
        for pair in _removed(event):
            held.pop(pair, None)
    known = {"id": [id_ for _, id_ in held], "group": [group for group, _ in held], "state": ["dead"] * len(held)}
    nothing = [pa.nulls(len(held), one.type) for one in letters.schema]
    columns = [pa.array(known.get(one.name, none), one.type) for one, none in zip(letters.schema, nothing, strict=True)]
    return pa.Table.from_arrays(columns, schema=letters.schema)


def _removed(event: Event) -> list[tuple[str, str]]:
    """The dead letters that an event removes."""
    if event.fields["event"] != kinds.REMOVE_DEAD:
        return []
    return [(event.group, id_) for id_ in kinds.split_ids(event.fields["ids"])]


def _newest(table: pa.Table, keys: tuple[str, ...], by: str) -> pa.Table:
    """Of the rows with equal keys the one with the highest value."""
    order = pc.sort_indices(table, [(by, "ascending")])
    rows = table.take(order).append_column("row", pa.array(np.arange(table.num_rows)))
    last = rows.group_by(list(keys)).aggregate([("row", "max")])
    return rows.take(last["row_max"]).drop_columns(["row"])


def _highest(table: pa.Table, keys: tuple[str, ...], column: str) -> pa.Table:
    """The highest value of a column for each key."""
    found = table.group_by(list(keys)).aggregate([(column, "max")])
    return found.rename_columns([column if name == f"{column}_max" else name for name in found.column_names])
