"""Documents of all logs but the journals as Arrow columns: numpy reads the fixed prefixes, the rest is cut from the file.

The cost of a read depends on its columns. Numbers of the prefix touch only the first 60 bytes of a document; ids, headers and
bodies are read only if a column asks for them. A checksum covers the whole document: it is checked if a column shows bytes behind
the prefix (`verify=auto`), always, or never. Not here: the choice of documents for a task (`plan`), and tables over scanned
documents (`parts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import attempts_column, bodies
from pyspark_turtlemq.kinds import DAMAGE, KINDS, TIMES
from pyspark_turtlemq.ordinals import batch_end, ordinals_by_due
from pyspark_turtlemq.part import Part
from pyspark_turtlemq.parts import EndedDocuments
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.table_repair import PartTable
from turtlemq.attempts import of_notes
from turtlemq.errors import Corrupt
from turtlemq.message_fields import FIELDS, Kind, OptionalField
from turtlemq.model import I64, SEQ_COUNTER_BITS, Mask, Progress
from turtlemq.segment import fields as v
from turtlemq.segment import format as f
from turtlemq.segment import table as t

_PRIORITIES = pa.array(["normal", "high", "low", "normal"])
_DEAD = KINDS["dead"].states
_CURRENT = KINDS["schedules"].states
_STATES = {  # by code: 0 present, 1 handed off, 2 ended by a tombstone, 3 ended by a newer version; ready: 0 message, 1 notice
    "delay": pa.array(KINDS["delay"].states),
    "dead": pa.array([_DEAD[0], *_DEAD]),  # dead letters are never handed off
    "ready": pa.array(KINDS["ready"].states),
    "schedules": pa.array([_CURRENT[0], *_CURRENT]),
}
_TIMESTAMP = pa.timestamp("us", "UTC")
_OPTIONAL = {field.element: field for field in FIELDS}
_IN_PREFIX = frozenset(
    "topic state due seq ttr priority json segment position offset ready dropped damage".split()
)  # without _ms
_IN_META = {"dead": frozenset(("due", "offset"))}  # of those: what these logs keep elsewhere


@dataclass(frozen=True, slots=True)
class DocumentSplit:
    """Documents [first, last) of a part, with the facts that decide their state. `bytes` is the estimated cost."""

    part: Part
    first: int
    last: int
    bytes: int
    ended: EndedDocuments
    progress: Progress


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """Columns and rows of a read, the form of bodies, and the treatment of damage."""

    columns: tuple[str, ...]
    predicates: Predicates
    body: str = "none"
    mode: str = "PERMISSIVE"
    verify: str = "auto"

    def checks_sums(self, log: str) -> bool:
        """Are checksums checked? With `auto` they are if anything behind the prefix is shown or compared."""
        needed = {*(name.removesuffix("_ms") for name in self.columns), *(self.predicates.texts.keys() & {"id", "group"})}
        return self.verify == "always" or (self.verify == "auto" and not needed <= _IN_PREFIX - _IN_META.get(log, frozenset()))

    @property
    def reads_ids(self) -> bool:
        return not {"id", "group"}.isdisjoint(self.columns) or not {"id", "group"}.isdisjoint(self.predicates.texts)


def read(split: DocumentSplit, spec: ReadSpec, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The matching rows of a split."""
    view, table = split.part.file.map(), PartTable(split.part)
    ordinals = np.arange(split.first, split.last)
    selected = table.use(partial(ordinals_by_due, split.part, predicates=spec.predicates))
    if selected is not None:
        ordinals = selected[np.searchsorted(selected, split.first) : np.searchsorted(selected, split.last)]
    damaged = at = 0
    while at < len(ordinals):
        last = table.use(partial(batch_end, ordinals=ordinals, first=at))
        damage, batch = table.use(partial(_read_batch, split, view, ordinals[at:last], spec, schema))
        if damage:
            damaged += len(damage)
            _fail_fast(split, spec, damage)
        if batch is not None:
            yield batch
        at = last
    if damaged:
        name, topic = split.part.file.name, split.part.topic
        print(f"turtlemq: {topic}/{name}: {damaged} damaged documents were left out ({spec.mode})", file=sys.stderr)


def _read_batch(
    split: DocumentSplit, view: memoryview, ordinals: I64, spec: ReadSpec, schema: pa.Schema, table: t.Table
) -> tuple[list[tuple[int, str]], pa.RecordBatch | None]:
    """The damage among these documents, and their matching rows; None if there are none."""
    chunk = Chunk(split, table, view, ordinals, spec)
    return chunk.damage, chunk.batch(schema) if len(chunk.rows) or chunk.damage_rows else None


def _fail_fast(split: DocumentSplit, spec: ReadSpec, damage: list[tuple[int, str]]) -> None:
    if spec.mode == "FAILFAST":
        at, reason = damage[0]
        where = f"{split.part.topic}/{split.part.file.name}: {reason} at position {at}"
        raise Corrupt(f"{where}. Restore the file from a backup, or read with mode PERMISSIVE, which leaves such documents out.")


class Chunk:
    """Documents of one Arrow batch. Each column is a method of its name; `rows` are the indexes of the matching documents."""

    def __init__(self, split: DocumentSplit, table: t.Table, view: memoryview, ordinals: I64, spec: ReadSpec) -> None:
        self.split, self.part, self.view, self.spec = split, split.part, view, spec
        self.log = split.part.log
        self.codes: np.ndarray[Any, np.dtype[np.int8]] = np.empty(0, np.int8)  # of states, see _STATES
        starts, ends = table.spans_of(ordinals)
        self.damage: list[tuple[int, str]] = []
        heads, good = self._read_prefixes(starts, ends, int(ordinals[0]))
        rows = self._matching(heads, ordinals, table, good)
        self.table, self.rows, self.starts, self.heads, self.ordinals = table, rows, starts, heads, ordinals
        if len(rows) < len(heads):
            self._narrow(rows)
        if spec.checks_sums(self.log) and len(rows):
            self._leave_out(~f.checksums_match(view, self.starts, self.heads), "checksum does not match")
        if spec.reads_ids and len(self.rows):
            self._leave_out(~bodies.are_text(self.raw_key), "its id is no text")
        for name, column in (("id", self.id), ("group", self.group)):
            if name in spec.predicates.texts:
                self._keep(pc.is_in(column(), pa.array(sorted(spec.predicates.texts[name]))))
        self.damage_rows = self.damage if DAMAGE in spec.columns and spec.mode == "PERMISSIVE" else []

    def _leave_out(self, broken: Mask, reason: str) -> None:
        """Note these rows as damage, and drop them."""
        if broken.any():
            self.damage += [(at, reason) for at in self.starts[broken].tolist()]
            self._keep(pa.array(~broken))

    def _keep(self, mask: pa.Array) -> None:
        """Keep the rows of a mask, and drop the cached columns of the others."""
        kept = np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))
        self.rows = self.rows[kept]
        self._narrow(kept)
        for name in ("fields", "metas", "raw_key", "key"):
            self.__dict__.pop(name, None)

    def _narrow(self, kept: I64) -> None:
        """Keep only these indexes of the per-document arrays."""
        self.starts, self.ordinals, self.codes = self.starts[kept], self.ordinals[kept], self.codes[kept]
        self.heads = self.heads[kept]

    def _read_prefixes(self, starts: I64, ends: I64, first: int) -> tuple[np.ndarray[Any, np.dtype[Any]], Mask]:
        """Prefixes, and a mask of the plausible ones. Notes damage; bytes between documents are damage but in the ready log."""
        inside = np.minimum(starts, max(len(self.view) - f.PREFIX_BYTES, 0))
        heads = f.prefixes(self.view, inside)
        stops = starts + heads["len"]
        good = v.plausible(heads, ends - starts) & (inside == starts)
        if self.log == "ready":
            good &= (heads["flags"] & f.HANDOFF) == 0  # where documents are lost, a table may point to the head of a batch
        if not good.all():
            self.damage += [(at, "no document begins there") for at in starts[~good].tolist()]
        if self.log != "ready":
            gaps = good & (stops < ends)
            if gaps.any():
                self.damage += [(at, "damaged bytes between documents") for at in stops[gaps].tolist()]
            if first == 0 and len(starts) and starts[0] > self.part.cover.start:
                self.damage.append((self.part.cover.start, "damaged bytes between documents"))
        return heads, good

    def _matching(self, heads: np.ndarray[Any, np.dtype[Any]], ordinals: I64, table: t.Table, good: Mask) -> I64:
        """Indexes of the documents that are messages and that match the predicates on prefix fields. Sets `codes`."""
        flags, due, seq = heads["flags"], heads["due"], heads["seq"]
        predicates, mask = self.spec.predicates, good
        if self.log != "ready":
            tombstones = (flags & f.TOMBSTONE) != 0
            mask = mask & ~tombstones if tombstones.any() else mask
        limits = [("dropped" if self.log == "dead" else "due", due), ("seq", seq)]
        if self.log == "ready":
            limits.append(("offset", ordinals + self.part.cover.first_seq))
            if "ready" in predicates.ranges:
                limits.append(("ready", self._ready_ms(ordinals, table)))
        for name, values in limits:
            inside = predicates.mask_of(name, values)
            mask = mask if inside is None else mask & inside
        self.codes = self._states(flags, due, seq)
        if "state" in predicates.texts:
            allowed = np.array([name in predicates.texts["state"] for name in _STATES[self.log].to_pylist()])
            mask = mask & allowed[self.codes]
        return np.arange(len(heads)) if mask.all() else np.flatnonzero(mask)

    def _states(self, flags: Any, due: I64, seq: I64) -> np.ndarray[Any, np.dtype[np.int8]]:
        if self.log == "ready":
            return np.asarray((flags & f.NOTICE) != 0, np.int8)
        codes = self.split.progress.covers(due, seq).astype(np.int8)
        ended = self.split.ended
        if len(ended.seqs):
            at = np.minimum(np.searchsorted(ended.seqs, seq), len(ended.seqs) - 1)
            codes = np.where(ended.seqs[at] == seq, 2 + ended.replaced[at], codes).astype(np.int8)
        return codes

    def _ready_ms(self, ordinals: I64, table: t.Table) -> I64:
        first = int(ordinals[0])
        return f.key_dues(table.slice(first, int(ordinals[-1]) + 1)[ordinals - first])

    # The batch

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """All columns of the schema; with a row for each damage if the column `damage` is asked for."""
        if not len(self.rows):
            return self._damage_batch(schema)
        if "body" in schema.names:
            self.body_type = schema.field("body").type
        arrays = [self._column(name, schema) for name in schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self.damage_rows:
            joined = pa.Table.from_batches([batch, self._damage_batch(schema)]).combine_chunks()
            return joined.to_batches()[0]
        return batch

    def _column(self, name: str, schema: pa.Schema) -> pa.Array:
        base = name.removesuffix("_ms")
        if base in _OPTIONAL:
            return self._optional(_OPTIONAL[base], in_ms=name != base)
        if base in TIMES:
            ms: I64 = getattr(self, base)()
            return _timestamps(ms) if name == base else _nullable(ms)
        if name == attempts_column.NAME:
            return self.attempts().cast(schema.field(name).type)
        make: Callable[[], pa.Array] = getattr(self, f"{name}_" if name in ("json", "damage") else name)
        return make()

    def _damage_batch(self, schema: pa.Schema) -> pa.RecordBatch:
        count = len(self.damage_rows)
        known: dict[str, Sequence[Any]] = {
            "topic": [self.part.topic] * count,
            "segment": [self.part.file.name] * count,
            "position": [at for at, _ in self.damage_rows],
            DAMAGE: [reason for _, reason in self.damage_rows],
        }
        arrays = [
            pa.array(known[column.name], column.type) if column.name in known else pa.nulls(count, column.type)
            for column in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    # Fixed fields

    def topic(self) -> pa.Array:
        return pa.repeat(pa.scalar(self.part.topic), len(self.rows))

    def segment(self) -> pa.Array:
        return pa.repeat(pa.scalar(self.part.file.name), len(self.rows))

    def position(self) -> pa.Array:
        return pa.array(self.starts)

    def damage_(self) -> pa.Array:
        return pa.nulls(len(self.rows), pa.string())

    def due(self) -> I64:
        """The due time that the producer asked for; a dead letter has it in its meta."""
        due: I64 = self.heads["due"].copy()
        if self.log == "dead":
            for i, meta in self.metas.items():
                due[i] = int(meta.get("due", due[i]))
        return self._null_notices(due)

    def dropped(self) -> I64:
        return self.heads["due"].copy()

    def created(self) -> I64:
        flags = self.heads["flags"]
        arrived = self.fields.arrived if (flags & (f.ENDS | f.META)).any() else self.heads["seq"]
        return self._null_notices(arrived >> SEQ_COUNTER_BITS)

    def _null_notices(self, times: I64) -> I64:
        """Null for notices: of the cancelled message they have the id alone."""
        if self.log != "ready" or not self.codes.any():
            return times
        return np.where(self.codes == 1, v.ABSENT, times)

    def ready(self) -> I64:
        return self._ready_ms(self.ordinals, self.table)

    def offset(self) -> pa.Array:
        if self.log == "dead":
            return self._from_meta("offset", pa.int64())
        return pa.array(self.ordinals + self.part.cover.first_seq)

    def seq(self) -> pa.Array:
        return pa.array(self.heads["seq"].copy())

    def ttr_ms(self) -> pa.Array:
        return pa.array(self.heads["ttr"].astype(np.int64))

    def priority(self) -> pa.Array:
        levels = (self.heads["flags"] & f.PRIORITY).astype(np.int8)
        return _PRIORITIES.take(pa.array(levels)) if levels.any() else pa.repeat(pa.scalar("normal"), len(self.rows))

    def json_(self) -> pa.Array:
        return pa.array((self.heads["flags"] & f.JSON) != 0)

    def state(self) -> pa.Array:
        names = _STATES[self.log]
        return names.take(pa.array(self.codes)) if self.codes.any() else pa.repeat(names[0], len(self.rows))

    # Variable fields

    @cached_property
    def fields(self) -> v.Fields:
        return v.locate(self.view, self.starts, self.heads)

    @cached_property
    def metas(self) -> dict[int, dict[str, Any]]:
        """Meta subdocuments of retries, dead letters and schedules, by row."""
        which = np.flatnonzero(self.heads["flags"] & f.META)
        return {i: v.subdocument(self.view, int(self.fields.meta[i])) for i in which.tolist()} if len(which) else {}

    def _from_meta(self, name: str, type_: pa.DataType) -> pa.Array:
        if not self.metas:
            return pa.nulls(len(self.rows), type_)
        return pa.array([self.metas.get(i, {}).get(name) for i in range(len(self.rows))], type_)

    def attempt(self) -> pa.Array:
        return self._from_meta("attempt", pa.int32())

    def attempts(self) -> pa.Array:
        return attempts_column.of_metas(self.metas, len(self.rows))

    # Columns of retries that decide whether they are void; of no kind, for `message_facts` alone

    def left_offset(self) -> pa.Array:
        return self._number_from_meta("offset")

    def epoch(self) -> pa.Array:
        return self._number_from_meta("epoch")

    def message_due(self) -> pa.Array:
        return self._number_from_meta("due")

    def slept_ms(self) -> pa.Array:
        """When a retry began to sleep: the end of the last attempt in its notes. Seqs of retries may be older."""
        values = np.full(len(self.rows), v.ABSENT, np.int64)
        for i, meta in self.metas.items():
            values[i] = max((one.ended_ms or 0 for one in of_notes(meta)), default=0)
        return _nullable(values)

    def order(self) -> pa.Array:
        return pa.array(self.fields.order)

    def _number_from_meta(self, name: str) -> pa.Array:
        """A number of the meta subdocument, null without one. The cost grows with the retries, not with the other documents."""
        values = np.full(len(self.rows), v.ABSENT, np.int64)
        for i, meta in self.metas.items():
            values[i] = int(meta[name])
        return _nullable(values)

    def error(self) -> pa.Array:
        return self._from_meta("error", pa.string())

    @cached_property
    def raw_key(self) -> pa.Array:
        """The bytes of ids as stored: `group/id` for a message that belongs to one group."""
        first = self.starts + f.PREFIX_BYTES
        return bodies.range_column(self.view, first, first + self.heads["idlen"] - 1, pa.binary())

    @cached_property
    def key(self) -> pa.Array:
        """Ids as stored. Rows whose id is no text were left out."""
        return bodies.text(self.raw_key)

    def _key_part(self, part: int) -> pa.Array:
        """The group (0) or the id (1) of the keys. Keys without meta have no group."""
        own = (self.heads["flags"] & f.META) != 0
        if not own.any():
            return self.key if part else pa.nulls(len(self.rows), pa.string())
        keys = zip(self.key.to_pylist(), own, strict=True)
        pairs = [key.partition("/")[::2] if has_group else (None, key) for key, has_group in keys]
        return pa.array([pair[part] for pair in pairs], pa.string())

    def id(self) -> pa.Array:
        return self._key_part(1)

    def group(self) -> pa.Array:
        return self._key_part(0) if (self.heads["flags"] & f.META).any() else pa.nulls(len(self.rows), pa.string())

    def _optional(self, field: OptionalField, in_ms: bool) -> pa.Array:
        """The column of an optional field of messages; a time as timestamps, or in milliseconds."""
        has = (self.heads["flags"] & field.flag) != 0
        if field.kind is Kind.TEXTS:
            return self._texts(field.element, np.flatnonzero(has).tolist())
        type_ = _TIMESTAMP if field.kind is Kind.TIME and not in_ms else pa.int64()
        if not has.any():
            return pa.nulls(len(self.rows), type_)
        values = self.fields.optional[field.element]
        return pa.array(values if type_ == pa.int64() else values * 1000, mask=~has).view(type_)

    def _texts(self, element: str, which: list[int]) -> pa.Array:
        """Maps of texts by name, for the rows `which`."""
        type_ = pa.map_(pa.string(), pa.string())
        if not which:
            return pa.nulls(len(self.rows), type_)
        maps: list[list[tuple[str, str]] | None] = [None] * len(self.rows)
        for i in which:
            maps[i] = list(v.subdocument(self.view, int(self.fields.optional[element][i])).items())
        return pa.array(maps, type_)

    # Schedules

    def cron(self) -> pa.Array:
        return self._from_meta("cron", pa.string())

    def zone(self) -> pa.Array:
        zones = [self.metas[i].get("zone") if "cron" in self.metas[i] else None for i in range(len(self.rows))]
        return pa.array(zones, pa.string())

    def delays_ms(self) -> pa.Array:
        return self._from_meta("delays_ms", pa.list_(pa.int64()))

    def paused(self) -> pa.Array:
        return pa.array([bool(self.metas[i].get("paused")) for i in range(len(self.rows))])

    def catch_up(self) -> pa.Array:
        return self._from_meta("catch_up", pa.string())

    def overlap(self) -> pa.Array:
        return self._from_meta("overlap", pa.string())

    def every_ms(self) -> pa.Array:
        return self._from_meta("every_ms", pa.int64())

    def count(self) -> pa.Array:
        return self._from_meta("count", pa.int64())

    def jitter_ms(self) -> pa.Array:
        return _nullable(self._numbers_of("jitter_ms", 0))

    def fired(self) -> pa.Array:
        return _nullable(self._numbers_of("fired", 0))

    def start(self) -> I64:
        return self._numbers_of("start_ms")

    def end(self) -> I64:
        return self._numbers_of("end_ms")

    def next(self) -> I64:
        return self._numbers_of("next_ms")

    def last(self) -> I64:
        return self._numbers_of("last_ms")

    def ended(self) -> I64:
        return self._numbers_of("ended_ms")

    def _numbers_of(self, name: str, default: int = v.ABSENT) -> I64:
        """A number of the meta subdocument of every row."""
        return np.array([int(self.metas[i].get(name, default)) for i in range(len(self.rows))], np.int64)

    def body_bytes(self) -> pa.Array:
        return pa.array((self.fields.body_end - self.fields.body).astype(np.int32))

    def body(self) -> pa.Array:
        json = (self.heads["flags"] & f.JSON) != 0
        return bodies.body_column(self.view, self.fields.body, self.fields.body_end, self.spec.body, json, self.body_type)

    body_type: pa.DataType = pa.binary()


def _nullable(values: I64) -> pa.Array:
    absent = values == v.ABSENT
    return pa.array(values, mask=absent if absent.any() else None)


def _timestamps(ms: I64) -> pa.Array:
    absent = ms == v.ABSENT
    return pa.array(ms * 1000, mask=absent if absent.any() else None).view(_TIMESTAMP)
