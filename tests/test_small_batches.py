"""Every step with two implementations, loops for small batches and arrays for large ones, gives one result by both.

One table lists the pairs, by the threshold in `turtlemq.small_batches` that chooses. Each pair runs on batches just below, at and
above its threshold, by loops, by arrays, and as the threshold says. Random histories of a whole engine by both ways are in
test_broker_small_batches.py, of a whole Index in test_firing.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import bson
import msgspec
import numpy as np
import pytest

from tests.harness.engine_disk import SameSecret
from tests.harness.index_world import TOPIC, abandon
from tests.harness.kernels import with_kernel
from turtlemq import small_batches
from turtlemq.broker.group import Group, MessageColumns
from turtlemq.engine import Engine
from turtlemq.errors import TurtleError
from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.index.columns import may_repeat
from turtlemq.index.filters import FilterBuild
from turtlemq.index.firing_small import SmallBatch
from turtlemq.index.index import Index
from turtlemq.index.lookup import find_many
from turtlemq.index.memtable import Memtable
from turtlemq.index.parts import IdQuery, TablePart
from turtlemq.index.recover import open_index
from turtlemq.index.segments import Segments
from turtlemq.model import U64, Batch, Message, Progress
from turtlemq.segment import bulk_crc, kernel, log
from turtlemq.segment import format as f
from turtlemq.segment.buffers import gather
from turtlemq.segment.id_map import IdMap
from turtlemq.segment.ids import hash_texts
from turtlemq.segment.scan import scan
from turtlemq.server.incoming.batches import DueRules, decode_slices
from turtlemq.server.media_types import BSON, JSON
from turtlemq.server.outgoing.fetch import fetched_bson, fetched_json
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

LOOPS = 1 << 40  # no batch is that large
NOW = 1_000_000


def plain(value: Any) -> Any:
    """Arrays as lists, buffers as bytes, all the way down, to compare values instead of types."""
    match value:
        case np.ndarray() | np.generic():
            return value.tolist()
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple() | range():
            return [plain(item) for item in value]
        case _:
            return value


@contextmanager
def index_at(settings: Settings = Settings()) -> Iterator[Index]:  # noqa: B008 - frozen
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(Door(), Path(folder), TOPIC, settings, Progress())
        yield index
        abandon(index)


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "LOCK"}


def bodies(count: int) -> list[bytes]:
    return [b"%d" % n * (n % 3) for n in range(count)]


# Documents


def encoded(count: int) -> object:
    even = f.encode([b"order-%03d" % n for n in range(count)], [b"x" * 9] * count, range(count), 7, 5, [f.JSON] * count)
    uneven = f.encode([b"%d" % n for n in range(count)], bodies(count), range(count), 7, range(count), [0] * count)
    return [even[0], list(even[1]), uneven[0], list(uneven[1])]


def batch_of(count: int, own: bool) -> Batch:
    ids = [f"own-{n}" for n in range(count)] if own else None
    return Batch(bodies(count), [NOW + n % 5 for n in range(count)], ids, flags=[n % 2 * f.JSON for n in range(count)])


def staged(count: int, own: bool) -> object:
    """A batch through checks, columns, writer and memtable. Returns receipts, the file, found documents and the handoff."""
    with index_at() as index:
        receipt = index.append(batch_of(count, own), NOW)
        again = index.append(batch_of(count, own), NOW + 1)
        ids = receipt.ids
        found = {i: astuple(document) for i, document in index.find_many(list(ids)).items()} if own else None
        due = index.due(NOW + 9)
        assert due is not None
        written = index._segments.active.path.read_bytes()
        return [ids, receipt.created, again.created, found, due.raw, due.starts, due.due_ms, due.seq, due.progress, written]


def refused(count: int) -> object:
    """The error for a bad number at the end of a batch."""
    with index_at() as index, pytest.raises(TurtleError) as caught:
        index.append(Batch([b""] * count, [1] * (count - 1) + [-1]), NOW)
    return [type(caught.value), str(caught.value), caught.value.details]


def places(segments: Segments, raw: list[bytes], hashes: U64) -> dict[int, tuple[int, int, int]]:
    return {i: (place.due_ms, place.seq, place.ordinal) for i, place in find_many(segments, raw, hashes).items()}


def ids_looked_up(count: int) -> object:
    """Every second id is held: in the memtable, in a table, and behind a Bloom filter."""
    raw = [b"own-%d" % n for n in range(count)]
    with index_at() as index:
        index.append(Batch([b""] * count, [NOW] * count, [f"own-{2 * n}" for n in range(count)]), NOW)
        segments, hashes = index._segments, hash_texts(raw, 0)
        in_memory = places(segments, raw, hashes)
        index.maintenance.flush()
        in_table = places(segments, raw, hashes)
        part = segments.parts[0]
        assert isinstance(part, TablePart)
        making = FilterBuild(Door(), segments.folder / "filter", [part])
        filter_ = making.step()
        assert filter_ is not None
        part.filter = filter_
        behind_filter = places(segments, raw, hashes)
        candidates = sorted(part.find_many(IdQuery(hashes).through(filter_)))
        making.close()
        assert len(in_memory) == len(in_table) == len(behind_filter) == -(-count // 2)
        return [in_memory, in_table, behind_filter, candidates]


def repeats(count: int) -> object:
    raw = [b"%d" % n for n in range(count)]
    return [may_repeat(raw, hash_texts(raw, 0)), may_repeat([*raw, raw[0]], hash_texts([*raw, raw[0]], 0))]


def consumed(count: int) -> object:
    """Hand off, fetch, acknowledge. Returns all answers and every byte on disk."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.open(Path(folder), door=SameSecret())
        engine.move_group("t", "g", "earliest", NOW)
        engine.submit("t", [Message(body, NOW + 1) for body in bodies(count)], NOW)
        engine.tick(NOW + 2)
        out = engine.reserve("t", "g", count, NOW + 3)
        columns = [astuple(piece.messages) for piece in out.pieces]
        acked = engine.ack("t", "g", [*out.ids[::2], *(f"-{id_}" for id_ in out.ids[1::2])], NOW + 4)
        waits, topic = engine.topic("t").stores.broker.wait.counts, engine.topic("t")
        said = [
            out.ids,
            columns,
            out.until_ms,
            acked,
            waits,
            topic.view.lateness.counts,
            topic.view.lateness.total,
            engine.check(),
        ]
        engine.close()
        return [*said, files(Path(folder))]


def sought(count: int) -> object:
    """Slots of ids in two leases of a group, in another order than they were handed out."""
    group = Group("g")
    group.start(0)
    for first, last in ((0, count // 2), (count // 2, count + 1)):
        if first < last:
            column = np.arange(first, last)
            group.lease(MessageColumns(column, column, column, column, column, [str(n) for n in range(first, last)]), 0, 9, "")
    taken, unknown = group.locate([str(n) for n in reversed(range(count))])
    return [[(lease.number, which) for lease, which in taken], unknown]


def decoded(data: bytes, kind: str) -> object:
    steps = decode_slices(data, kind, NOW, DueRules())
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return astuple(done.value)


def json_read(count: int) -> object:
    rows = [{"body": n, "delay": n / 8} for n in range(count)]
    times = [{"body": n, "due_ms": 10**12 + n} for n in range(count)]
    return [decoded(msgspec.json.encode({"messages": messages}), JSON) for messages in (rows, times)]


# Other thresholds


def id_map_filled(count: int) -> object:
    """Hashes that share slots, repeat, or are 0, in two rounds."""
    column = np.array([n % (count - 2) * 64 + n % 3 for n in range(2 * count)], np.uint64)
    ids = IdMap()
    ids.add(column, 0, count)
    ids.add(column, count, 2 * count)
    older = {hash_: sorted({*ordinals, int(ids.find(column, hash_) or 0)}) for hash_, ordinals in ids.older.items()}
    return [ids.find_many(column, column), ids.find_many(column, np.arange(1, 1 + count, dtype=np.uint64)), older]


def values_counted(count: int) -> object:
    spread, alike = Histogram(LATENESS_MS), Histogram(LATENESS_MS)
    spread.add_many(np.arange(count) * 7 % 301)
    alike.add_many(np.full(count, 6))
    return [spread.counts, spread.total, alike.counts, alike.total]


def handed_off(count: int) -> object:
    """A part of the messages lies in a run, one is cancelled, a small budget cuts the second handoff."""
    out: list[object] = []
    with index_at() as index:
        index.append(Batch(bodies(count - 1), [NOW - n % 3 for n in range(count - 1)]), NOW - 9)
        index.maintenance.flush()
        index.append(Batch([b"z", b"y"], [NOW - 1, NOW - 2], ["a", "b"]), NOW - 8)
        index.cancel(["b"])
        for limit in ({}, {"bytes_max": 1 << 10}, {"count_max": count - 5}):
            due = index.due(NOW, **limit)
            assert due is not None
            moves = [(cursor.pos, pos, passed) for cursor, pos, passed in due.moves]
            out.append([due.raw, due.starts, due.due_ms, due.seq, due.progress, due.more, moves])
    return out


def single_messages(count: int) -> object:
    """One put for each message, so that their keys are gathered one by one."""
    with index_at() as index:
        for n in range(count):
            index.stage(Batch([b""], [NOW + n * 37 % 101]), NOW)
            index.commit(sync=False)
        index.cancel(index.append(Batch([b""], [NOW + 5]), NOW).ids)
        due = index.due(NOW + 60)
        assert due is not None
        index.advance(due)
        return [due.raw, due.due_ms, due.seq, index.stats(), index.next_due(), index.forecast(NOW, bucket_ms=9, buckets=20)]


def ties_found(count: int) -> object:
    """Each of many documents with one due time, by its seq."""
    with index_at() as index:
        index.append(Batch([b""] * count, [NOW] * count), NOW)
        index.maintenance.flush()
        part, first = index._segments.parts[0], index._segments.parts[0].first_seq
        assert isinstance(part, TablePart)
        return [part.locate(Door(), NOW, first + n) for n in range(-1, count + 1)]


def retries_fetched(count: int) -> object:
    """Sleeping retries of a fetch, some with headers and an expiry, that the ready log holds."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.open(Path(folder))
        engine.configure("t", backoff_base_ms=3_600_000, backoff_jitter="none")
        more: list[dict[str, Any]] = [{}, {"headers": {"a": "b"}}, {"expires_ms": NOW + 9_000_000}]
        engine.submit("t", [Message(b"%d" % n, NOW - n, f"{n}", **more[n % 3]) for n in range(count)], NOW)
        engine.tick(NOW)
        ids = engine.reserve("t", "g", count, NOW).ids
        engine.ack("t", "g", [f"-{id_}" for id_ in ids], NOW)
        engine.tick(NOW + 3_600_000)
        out = engine.reserve("t", "g", count, NOW + 3_600_000)
        engine.close()
        assert len(out) == count
        messages = [piece.messages for piece in out.pieces]
        return sorted(
            (id_, *row) for m in messages for id_, *row in zip(m.ids, m.due_ms.tolist(), m.attempts.tolist(), strict=True)
        )


def bytes_read(count: int) -> object:
    """A fetch of the last messages, `count` bytes together, that are no longer in memory."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.open(Path(folder))
        engine.submit("t", [Message(b"x" * (count // 2), NOW), Message(b"y" * (count - count // 2), NOW)], NOW)
        engine.tick(NOW)
        engine.topic("t").checkpoint()
        engine.move_group("t", "g", "earliest", NOW)
        said = engine.reserve("t", "g", 5, NOW).documents()
        engine.close()
        return said


def checksums(count: int) -> object:
    """Documents of one length, with gaps and without, and of two lengths; one bit is wrong in each."""
    out = []
    for sizes, gap in (([9] * count, 0), ([9] * count, 3), ([9, 5] * count, 0)):
        data, lengths = f.encode([b"a"] * len(sizes), [b"x" * n for n in sizes], [1] * len(sizes), 1, 0, [0] * len(sizes))
        ends = np.cumsum(lengths).astype(np.int64)
        pieces = [bytes(data)[a:b] for a, b in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        spread = bytearray((b"." * gap).join(pieces))
        starts = ends - lengths + gap * np.arange(len(sizes))
        spread[int(starts[1]) + f.PREFIX_BYTES] ^= 1
        out.append(f.checksums_match(memoryview(spread), starts, f.prefixes(spread, starts)))
    return out


def verified(count: int) -> object:
    """Documents read from a file, as they were written and with one bit wrong."""
    data, lengths = f.encode([b"a"] * count, [b"x" * 9] * count, [1] * count, 1, 0, [0] * count)
    ends = np.cumsum(lengths).astype(np.int64)
    broken = bytearray(data)
    broken[-3] ^= 1
    out = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(bulk_crc, "_TRIES", 0):
        for content in (bytes(data), bytes(broken)):
            path = Path(folder) / "file"
            path.write_bytes(content)
            out.append(log.read_documents(Door(), path, ends - lengths, ends).good)
    return out


def gathered(count: int) -> object:
    sizes = np.array([3, 4] * count)
    at = np.arange(2 * count) * 5
    return gather(bytes(range(200)) * 3, at, sizes)


def walked(count: int) -> object:
    """Documents of one length, then one of another, then again of that length."""
    even, _ = f.encode([b"a"] * count, [b"x" * 9] * count, [1] * count, 1, 0, [0] * count)
    odd, _ = f.encode([b"a"], [b"y"], [1], 1 + count, 0, [0])
    more, _ = f.encode([b"a"] * count, [b"x" * 9] * count, [1] * count, 2 + count, 0, [0] * count)
    data = bytes(even) + bytes(odd) + bytes(more)
    return [astuple(scan(data, 0, size)) for size in (len(even), len(data), len(data) - 5)]


def bson_read(count: int) -> object:
    even = [{"id": f"own-{n}", "body": b"x" * (n % 3), "due_ms": bson.Int64(10**12 + n)} for n in range(count)]
    mixed = [{"body": "text", "delay": 1.5} if n % 7 else {"body": {"a": n}, "priority": "high"} for n in range(count)]
    return [decoded(b"".join(map(bson.encode, documents)), BSON) for documents in (even, mixed)]


def answered(count: int) -> object:
    """Plain messages, and others with headers between them. JSON is compared as a value: numbers may be padded with blanks."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.open(Path(folder))
        mixed = [
            Message(b'{"a":1}' * (n % 2), NOW, json=bool(n % 2), headers={"h": "1"} if n % 9 == 8 else {}) for n in range(count)
        ]
        out = []
        for name, messages in (("t", [Message(body, NOW) for body in bodies(count)]), ("u", mixed)):
            engine.submit(name, messages, NOW)
            engine.tick(NOW)
            engine.move_group(name, "g", "earliest", NOW)
            reserved = engine.reserve(name, "g", count, NOW)
            out.append([msgspec.json.decode(b"".join(fetched_json(reserved))), bson.decode_all(b"".join(fetched_bson(reserved)))])
        engine.close()
        return out


@dataclass(frozen=True)
class Pair:
    """A step with two implementations: its threshold, the step on a batch of some size, and settings that force either way."""

    threshold: str
    step: Callable[[int], object]
    arrays: int = 0
    only_small: tuple[object, str] | None = None  # owner and name of a function that only the loops call

    def run(self, count: int, threshold: int) -> object:
        with mock.patch.object(small_batches, self.threshold, threshold):
            return plain(self.step(count))

    def by_kernel(self, count: int) -> object:
        with with_kernel():
            return plain(self.step(count))


@pytest.fixture(name="without_kernel", autouse=True)
def no_kernel() -> Iterator[None]:
    """Loops and arrays are compared with each other; `by_kernel` compares them with the kernel."""
    with mock.patch.object(kernel, "compiled", None):
        yield


PAIRS = {
    "encode": Pair("DOCUMENTS", encoded, only_small=(f, "_encode_small")),
    "encode by the kernel": Pair("KERNEL", encoded),
    "put with server-given ids": Pair("DOCUMENTS", lambda count: staged(count, own=False)),
    "put with own ids": Pair("DOCUMENTS", lambda count: staged(count, own=True), only_small=(Memtable, "_add_small")),
    "refuse a batch": Pair("DOCUMENTS", refused),
    "look up ids": Pair("DOCUMENTS", ids_looked_up),
    "notice repeated ids": Pair("DOCUMENTS", repeats),
    "hand off, fetch, acknowledge": Pair("DOCUMENTS", consumed),
    "fetch sleeping retries": Pair("DOCUMENTS", retries_fetched),
    "find leases": Pair("DOCUMENTS", sought),
    "read JSON": Pair("DOCUMENTS", json_read),
    "fill and ask an id map": Pair("ID_MAP", id_map_filled, arrays=1),
    "count values": Pair("HISTOGRAM", values_counted, only_small=(Histogram, "add")),
    "note lateness and waiting": Pair("HISTOGRAM", consumed),
    "find due messages": Pair("HANDOFF", handed_off, arrays=-1, only_small=(SmallBatch, "read")),
    "gather single keys": Pair("SINGLE_KEYS", single_messages, arrays=1),
    "find one among equal due times": Pair("TIES", ties_found),
    "read the last messages": Pair("READ_BYTES", bytes_read),
    "compute checksums": Pair("EQUAL_CHECKSUMS", checksums, arrays=2),
    "verify documents": Pair("BULK_CHECKSUM", verified, arrays=1),
    "gather pieces": Pair("EQUAL_WIDTHS", gathered),
    "weave an answer": Pair("EQUAL_WIDTHS", answered),
    "walk documents": Pair("EVEN_WALK", walked),
    "read BSON": Pair("BSON_LAYOUT", bson_read, arrays=1),
    "answer a fetch": Pair("ANSWER", answered, arrays=1),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_loops_and_arrays_give_the_same_result(pair: Pair) -> None:
    threshold = getattr(small_batches, pair.threshold)
    for count in (threshold - 1, threshold, threshold + 1):
        by_arrays = pair.run(count, pair.arrays)
        assert pair.run(count, LOOPS) == by_arrays, count
        assert pair.run(count, threshold) == by_arrays, count


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_kernel_gives_the_same_result(pair: Pair) -> None:
    for threshold in {getattr(small_batches, pair.threshold), small_batches.KERNEL, small_batches.DOCUMENTS}:
        for count in (threshold - 1, threshold, 2 * threshold):
            assert pair.by_kernel(count) == pair.run(count, pair.arrays), count


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.only_small])
def test_threshold_chooses_the_implementation(name: str) -> None:
    pair = PAIRS[name]
    owner, function = pair.only_small or (None, "")
    for setting, wanted in ((LOOPS, True), (pair.arrays, False)):
        with mock.patch.object(owner, function, side_effect=getattr(owner, function), autospec=True) as small:
            pair.run(getattr(small_batches, pair.threshold), setting)
        assert small.called == wanted


def test_every_threshold_has_a_pair() -> None:
    thresholds = {name for name in vars(small_batches) if name.isupper()}
    assert thresholds == {pair.threshold for pair in PAIRS.values()}
