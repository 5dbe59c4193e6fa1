"""Documents of delay, ready and dead logs as Arrow columns: numpy reads the fixed prefixes, the rest is cut out of the file.

A column costs what it reads. Metadata columns touch the first 60 bytes of a document and nothing else; ids, headers and bodies
are read only if asked for. Checksums cover bodies, so they are checked where bodies are read (`verify`: auto), always, or never.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_turtlemq import bodies
from pyspark_turtlemq.parts import EndedDocuments, Part
from pyspark_turtlemq.predicates import Predicates
from turtlemq.errors import Corrupt
from turtlemq.model import DUE_MS_MAX, I64, ORDINAL_BITS, SEQ_COUNTER_BITS, Mask, Progress
from turtlemq.segment import fields as v
from turtlemq.segment import format as f
from turtlemq.segment import table as t

ROWS = 1 << 14  # of one Arrow batch: prefixes of 1 MB stay in the processor's cache
_BYTES = 64 << 20  # of the documents of one batch
_PRIORITIES = pa.array(["normal", "high", "low", "normal"])
_STATES = {  # by what became of a document: it is there, it was handed off, a tombstone ended it, a newer version did
    "delay": pa.array(["sleep", "handed_off", "cancelled", "replaced"]),
    "dead": pa.array(["dead", "dead", "deleted", "replaced"]),
}
_SORTED = {"delay": "due", "dead": "dropped"}  # by which time the keys of a table are sorted
_TIMESTAMP = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class DocumentSplit:
    """Documents [first, last) of a part, and what must be known to tell their state."""

    part: Part
    first: int
    last: int
    bytes: int
    ended: EndedDocuments
    progress: Progress


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """How to read: which columns, which rows, and what to do about damage."""

    columns: tuple[str, ...]
    predicates: Predicates
    body: str = "none"
    mode: str = "PERMISSIVE"
    verify: str = "auto"

    @property
    def verified(self) -> bool:
        return self.verify == "always" or (self.verify == "auto" and "body" in self.columns)


def read(piece: DocumentSplit, how: ReadSpec, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a slice."""
    view, table = piece.part.file.map(), piece.part.open()
    ordinals = np.arange(piece.first, piece.last)
    few = ordinals_by_due(piece.part, table, how.predicates)
    if few is not None:
        ordinals = few[np.searchsorted(few, piece.first) : np.searchsorted(few, piece.last)]
    damaged = at = 0
    while at < len(ordinals):
        last = _step(table, ordinals, at)
        chunk = Chunk(piece, table, view, ordinals[at:last], how)
        if chunk.damage:
            damaged += len(chunk.damage)
            _report(piece, how, chunk.damage)
        if len(chunk.rows) or chunk.broken:
            yield chunk.batch(schema)
        at = last
    if damaged:
        name, topic = piece.part.file.name, piece.part.topic
        print(f"turtlemq: {topic}/{name}: {damaged} damaged documents were left out ({how.mode})", file=sys.stderr)


def due_ranks(part: Part, table: t.Table, wanted: Predicates) -> tuple[int, int] | None:
    """Which ranks among the keys of a table are due when it is wanted. None: all are."""
    low, high = wanted.range(_SORTED.get(part.log, ""))
    if low <= 0 and high >= DUE_MS_MAX:
        return None
    edges = (min(max(due, 0), DUE_MS_MAX + 1) << ORDINAL_BITS for due in (low, high + 1))
    first, last = (table.rank(edge) for edge in edges)
    return first, last


def ordinals_by_due(part: Part, table: t.Table, wanted: Predicates) -> I64 | None:
    """Which documents of a part in the order of arrival may be due when it is wanted, as its table tells: no other is looked at.
    Those without a key, because they end others or had ended when the table was made, may be, too. None: all."""
    ranks = None if part.sealed else due_ranks(part, table, wanted)
    if ranks is None:
        return None
    found = f.key_ordinals(table.slice(*ranks))
    if len(table) < table.cover.documents:
        keyless = np.ones(table.cover.documents, np.bool_)
        keyless[f.key_ordinals(table.slice(0, len(table)))] = False
        found = np.concatenate((found, np.flatnonzero(keyless)))
    return np.sort(found)


def _step(table: t.Table, ordinals: I64, first: int) -> int:
    """Where a batch ends that begins with the document of this index."""
    last = min(first + ROWS, len(ordinals))
    begin = table.span_of(int(ordinals[first]))[0]
    while last - first > 1 and table.span_of(int(ordinals[last - 1]))[1] - begin > _BYTES:
        last = first + (last - first) // 2
    return last


def _report(piece: DocumentSplit, how: ReadSpec, damage: list[tuple[int, str]]) -> None:
    if how.mode == "FAILFAST":
        at, reason = damage[0]
        where = f"{piece.part.topic}/{piece.part.file.name}: {reason} at position {at}"
        raise Corrupt(f"{where}. Restore the file from a backup, or read with mode PERMISSIVE, which leaves such documents out.")


class Chunk:
    """Documents that lie together. Columns are methods of their names; `rows` are the documents that count."""

    def __init__(self, piece: DocumentSplit, table: t.Table, view: memoryview, ordinals: I64, how: ReadSpec) -> None:
        self.piece, self.part, self.view, self.how = piece, piece.part, view, how
        self.log = piece.part.log
        self.codes: np.ndarray[Any, np.dtype[np.int8]] = np.empty(0, np.int8)  # states, by document
        starts, ends = table.spans_of(ordinals)
        self.damage: list[tuple[int, str]] = []
        heads, good = self._judge(starts, ends, int(ordinals[0]))
        rows = self._choose(heads, ordinals, table, good)
        self.table, self.rows, self.starts, self.heads, self.ordinals = table, rows, starts, heads, ordinals
        if len(rows) < len(heads):
            self._pick(rows)
        if how.verified and len(rows):
            same = f.checksums_match(view, self.starts, self.heads)
            if not same.all():
                self.damage += [(at, "checksum does not match") for at in self.starts[~same].tolist()]
                self.rows = rows[same]
                self._pick(np.flatnonzero(same))
        if "id" in how.predicates.texts:
            self._keep(pc.is_in(self.id(), pa.array(sorted(how.predicates.texts["id"]))))
        if "group" in how.predicates.texts:
            self._keep(pc.is_in(self.group(), pa.array(sorted(how.predicates.texts["group"]))))
        self.broken = self.damage if "damage" in how.columns and how.mode == "PERMISSIVE" else []

    def _keep(self, mask: pa.Array) -> None:
        kept = np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))
        self.rows = self.rows[kept]
        self._pick(kept)
        for name in ("fields", "metas", "key"):
            self.__dict__.pop(name, None)

    def _pick(self, kept: I64) -> None:
        """Only these of the documents so far."""
        self.starts, self.ordinals, self.codes = self.starts[kept], self.ordinals[kept], self.codes[kept]
        self.heads = self.heads[kept]

    def _judge(self, starts: I64, ends: I64, first: int) -> tuple[np.ndarray[Any, np.dtype[Any]], Mask]:
        """Prefixes, and which are those of documents. Stretches between documents of sleepers are damage."""
        inside = np.minimum(starts, max(len(self.view) - f.PREFIX_BYTES, 0))
        heads = f.prefixes(self.view, inside)
        stops = starts + heads["len"]
        good = v.plausible(heads, ends - starts)
        if not good.all():
            self.damage += [(at, "no document begins there") for at in starts[~good].tolist()]
        if self.log != "ready":
            gaps = good & (stops < ends)
            if gaps.any():
                self.damage += [(at, "damaged bytes between documents") for at in stops[gaps].tolist()]
            if first == 0 and len(starts) and starts[0] > self.part.cover.start:
                self.damage.append((self.part.cover.start, "damaged bytes between documents"))
        return heads, good

    def _choose(self, heads: np.ndarray[Any, np.dtype[Any]], ordinals: I64, table: t.Table, good: Mask) -> I64:
        """Documents that are messages, and wanted."""
        flags, due, seq = heads["flags"], heads["due"], heads["seq"]
        wanted, mask = self.how.predicates, good
        if self.log != "ready":
            stones = (flags & f.TOMBSTONE) != 0
            mask = mask & ~stones if stones.any() else mask
        limits = [("dropped" if self.log == "dead" else "due", due), ("seq", seq)]
        if self.log == "ready":
            limits.append(("offset", ordinals + self.part.cover.first_seq))
            if "ready" in wanted.ranges:
                limits.append(("ready", self._ready_ms(ordinals, table)))
        for name, values in limits:
            inside = wanted.mask_of(name, values)
            mask = mask if inside is None else mask & inside
        self.codes = self._states(flags, due, seq)
        if "state" in wanted.texts:
            names = _STATES.get(self.log, pa.array(["ready", "notice"])).to_pylist()
            allowed = np.array([name in wanted.texts["state"] for name in names])
            mask = mask & allowed[self.codes]
        return np.arange(len(heads)) if mask.all() else np.flatnonzero(mask)

    def _states(self, flags: Any, due: I64, seq: I64) -> np.ndarray[Any, np.dtype[np.int8]]:
        if self.log == "ready":
            return np.asarray((flags & f.NOTICE) != 0, np.int8)
        codes = self.piece.progress.covers(due, seq).astype(np.int8)
        ended = self.piece.ended
        if len(ended.seqs):
            at = np.minimum(np.searchsorted(ended.seqs, seq), len(ended.seqs) - 1)
            codes = np.where(ended.seqs[at] == seq, 2 + ended.replaced[at], codes).astype(np.int8)
        return codes

    def _ready_ms(self, ordinals: I64, table: t.Table) -> I64:
        first = int(ordinals[0])
        return f.key_dues(table.slice(first, int(ordinals[-1]) + 1)[ordinals - first])

    # The batch

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """All columns, and rows for what is damaged where they are wanted."""
        if not len(self.rows):
            return self._damaged(schema)
        if "body" in schema.names:
            self.body_type = schema.field("body").type
        arrays = [self._column(name) for name in schema.names]
        found = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self.broken:
            joined = pa.Table.from_batches([found, self._damaged(schema)]).combine_chunks()
            return joined.to_batches()[0]
        return found

    def _column(self, name: str) -> pa.Array:
        if name.endswith("_ms") and name != "ttr_ms":
            return self._number(getattr(self, name.removesuffix("_ms"))())
        if name in TIMES:
            values = getattr(self, name)()
            return _timestamps(values)
        make: Callable[[], pa.Array] = getattr(self, f"{name}_" if name in ("json", "damage") else name)
        return make()

    def _number(self, values: I64) -> pa.Array:
        return pa.array(values, mask=values == v.ABSENT) if (values == v.ABSENT).any() else pa.array(values)

    def _damaged(self, schema: pa.Schema) -> pa.RecordBatch:
        count = len(self.broken)
        told: dict[str, Sequence[Any]] = {
            "topic": [self.part.topic] * count,
            "segment": [self.part.file.name] * count,
            "position": [at for at, _ in self.broken],
            "damage": [reason for _, reason in self.broken],
        }
        arrays = [pa.array(told[one.name], one.type) if one.name in told else pa.nulls(count, one.type) for one in schema]
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
        """As the producer asked: of a retry and of a dead letter that stands in its meta."""
        due: I64 = self.heads["due"].copy()
        if self.log == "dead":
            for i, meta in self.metas.items():
                due[i] = int(meta.get("due", due[i]))
        return self._noticeless(due)

    def dropped(self) -> I64:
        return self.heads["due"].copy()

    def created(self) -> I64:
        flags = self.heads["flags"]
        arrived = self.fields.arrived if (flags & (f.KILLS | f.META)).any() else self.heads["seq"]
        return self._noticeless(arrived >> SEQ_COUNTER_BITS)

    def _noticeless(self, times: I64) -> I64:
        """A notice is about a message, and knows nothing of it but its id."""
        if self.log != "ready" or not self.codes.any():
            return times
        return np.where(self.codes == 1, v.ABSENT, times)

    def expires(self) -> I64:
        if not (self.heads["flags"] & f.EXPIRES).any():
            return np.full(len(self.rows), v.ABSENT, np.int64)
        return self.fields.expires

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
        names = _STATES.get(self.log, pa.array(["ready", "notice"]))
        return names.take(pa.array(self.codes)) if self.codes.any() else pa.repeat(names[0], len(self.rows))

    # Variable fields

    @cached_property
    def fields(self) -> v.Fields:
        return v.locate(self.view, self.starts, self.heads)

    @cached_property
    def metas(self) -> dict[int, dict[str, Any]]:
        """What the broker noted with retries and dead letters, by row."""
        which = np.flatnonzero(self.heads["flags"] & f.META)
        return {i: v.subdocument(self.view, int(self.fields.meta[i])) for i in which.tolist()} if len(which) else {}

    def _from_meta(self, name: str, type_: pa.DataType) -> pa.Array:
        if not self.metas:
            return pa.nulls(len(self.rows), type_)
        return pa.array([self.metas.get(i, {}).get(name) for i in range(len(self.rows))], type_)

    def attempt(self) -> pa.Array:
        return self._from_meta("attempt", pa.int32())

    def error(self) -> pa.Array:
        return self._from_meta("error", pa.string())

    @cached_property
    def key(self) -> pa.Array:
        """Ids as they are stored."""
        first = self.starts + f.PREFIX_BYTES
        return bodies.text_column(self.view, first, first + self.heads["idlen"] - 1, pa.string())

    def _split(self, part: int) -> pa.Array:
        """Of `group/id`, one of the two, where a message is one group's own."""
        own = (self.heads["flags"] & f.META) != 0
        if not own.any():
            return self.key if part else pa.nulls(len(self.rows), pa.string())
        pairs = [
            (text.partition("/")[::2] if mine else (None, text)) for text, mine in zip(self.key.to_pylist(), own, strict=True)
        ]
        return pa.array([pair[part] for pair in pairs], pa.string())

    def id(self) -> pa.Array:
        return self._split(1)

    def group(self) -> pa.Array:
        return self._split(0) if (self.heads["flags"] & f.META).any() else pa.nulls(len(self.rows), pa.string())

    def headers(self) -> pa.Array:
        type_ = pa.map_(pa.string(), pa.string())
        which = np.flatnonzero(self.heads["flags"] & f.HEADERS).tolist()
        if not which:
            return pa.nulls(len(self.rows), type_)
        found: list[list[tuple[str, str]] | None] = [None] * len(self.rows)
        for i in which:
            found[i] = list(v.subdocument(self.view, int(self.fields.headers[i])).items())
        return pa.array(found, type_)

    def body_bytes(self) -> pa.Array:
        return pa.array((self.fields.body_end - self.fields.body).astype(np.int32))

    def body(self) -> pa.Array:
        json = (self.heads["flags"] & f.JSON) != 0
        return bodies.body_column(self.view, self.fields.body, self.fields.body_end, self.how.body, json, self.body_type)

    body_type: pa.DataType = pa.binary()


TIMES = ("due", "dropped", "created", "expires", "ready")


def _timestamps(ms: I64) -> pa.Array:
    absent = ms == v.ABSENT
    return pa.array(ms * 1000, mask=absent if absent.any() else None).view(_TIMESTAMP)
