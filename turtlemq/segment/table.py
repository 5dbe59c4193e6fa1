"""A table: the static B+tree file over a sealed segment, or over a run of one that still grows. Mapped, read with numpy.

A table is a cache. It says which bytes of which generation of a segment it covers, each 4 KiB block has a checksum that is
verified when the block is first used, and whatever does not fit is thrown away and built again from the segment.

    block 0            a BSON document: what is covered, where the sections are, checksum
    keys               due_ms << 22 | ordinal, sorted: the leaves, 512 keys each
    inner levels       the first key of every node below, until one node is left
    positions          byte offset of every document by ordinal, and where the last one ends
    buckets            where the ids of each bucket begin: the first bits of a hash tell its bucket
    prints             the next 16 bits of the hash of each id, sorted in each bucket: 1 of 1,000 foreign ids passes
    ordinals           still more bits of the hash, and the ordinal, in the same order
    kills              ordinals of the documents that end others; in the ready log, of those that not every group sees
    owners             in the ready log: for each of these, the hash of its group's name
    checksums          one CRC-32 for each block before

`ordinal` counts documents of the covered bytes; in a sealed segment it is the rank in due order.
Costs: 8 + 4 + 6.2 B a message on disk; a search touches one block a level.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bson.int64 import Int64
from zlib_ng.zlib_ng import crc32

from turtlemq.errors import Corrupt
from turtlemq.model import I64, ORDINAL_BITS, U32, U64, Mask
from turtlemq.segment import format as f
from turtlemq.storage.door import Door

BLOCK = 4096
FANOUT = BLOCK // 8
_VERSION = 2
HASH_BITS = 64 - ORDINAL_BITS  # of a hash that ids are sorted by
_BUCKET_IDS = 32  # at most, on average; half of it at least
_BUCKET_WINDOW = 64  # ids of a bucket that are looked at in one go
_PRINT_BITS = 16
_LOW = (1 << ORDINAL_BITS) - 1
_ALL = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Cover:
    """Which documents of which segment a table speaks of."""

    base: int
    generation: int
    first: int  # the number of its first document in the segment; 0 in a sealed one
    documents: int
    start: int  # bytes of the segment, from
    end: int  # to
    first_seq: int
    last_seq: int
    killed_seq: int  # documents ended by tombstones up to this seq are left out of `keys` and `ids`


class Damaged(Corrupt):
    """An index file is damaged. It is built again from its segment."""


def build(
    cover: Cover, keys: U64, positions: I64, hashes: U64, hashed: I64, kills: I64, owners: U64 | None = None
) -> list[bytes]:
    """The file as buffers. `keys` are sorted; `hashes[i]` belongs to ordinal `hashed[i]`. 60 ns a message, mostly sorting."""
    sections: dict[str, np.ndarray[Any, Any]] = {"keys": keys}
    for depth, level in enumerate(_inner_levels(keys)):
        sections[f"inner{depth}"] = level
    sections["positions"] = positions.astype(np.uint32)
    sections |= _ids(hashes, hashed, cover.documents)
    sections["kills"] = kills.astype(np.uint32)
    if owners is not None:
        sections["owners"] = owners
    buffers: list[bytes] = []
    places: dict[str, list[int]] = {}
    at = BLOCK
    for name, array in sections.items():
        data = array.tobytes()
        places[name] = [at, len(array)]
        buffers.append(data + b"\0" * (-len(data) % BLOCK))
        at += len(buffers[-1])
    sums = np.array([crc32(block) for block in _blocks(buffers)], dtype=np.uint32).tobytes()
    fields = {
        "turtlemq_index": _VERSION,
        **{k: Int64(v) for k, v in asdict(cover).items()},
        "sections": places,
        "checksums": [at, len(sums) // 4, crc32(sums)],
    }
    header = f.encode_checked(fields)
    return [header + b"\0" * (BLOCK - len(header)), *buffers, sums]


def _blocks(buffers: list[bytes]) -> Iterator[memoryview]:
    for data in buffers:
        view = memoryview(data)
        for i in range(0, len(data), BLOCK):
            yield view[i : i + BLOCK]


def _inner_levels(keys: U64) -> list[U64]:
    levels = []
    while len(keys) > FANOUT:
        keys = keys[::FANOUT]
        levels.append(keys)
    return levels


def _bucket_bits(ids: int) -> int:
    return (ids // _BUCKET_IDS).bit_length()


def _ordinal_bits(documents: int) -> int:
    return max(0, documents - 1).bit_length()


def _ids(hashes: U64, hashed: I64, documents: int) -> dict[str, np.ndarray[Any, Any]]:
    """The sections by which ids are found."""
    ids = np.sort((hashes & np.uint64(_ALL ^ _LOW)) | hashed.astype(np.uint64))
    bits, low = _bucket_bits(len(ids)), np.uint64(_ordinal_bits(documents))
    edges = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits) if bits else np.zeros(1, np.uint64)
    buckets = np.append(np.searchsorted(ids, edges), len(ids)).astype(np.uint32)
    upper = ids & np.uint64(_ALL ^ _LOW)
    prints = (upper >> np.uint64(64 - bits - _PRINT_BITS)).astype(np.uint16)
    marks = upper << np.uint64(bits + _PRINT_BITS) >> (np.uint64(32) + low) << low
    return {"buckets": buckets, "prints": prints, "ordinals": (marks | ids & np.uint64(_LOW)).astype(np.uint32)}


class Table:
    """An open table. Reads verify blocks on first use and raise `Damaged`; nothing is resident but the mapping."""

    def __init__(self, path: Path, data: memoryview, cover: Cover, sections: dict[str, list[int]], sums: U32) -> None:
        self.path = path
        self.cover = cover
        self._data = data
        self._sums = sums.tolist() if len(sums) < 4096 else sums
        self._verified = bytearray(len(sums))
        self._places = sections
        self.keys = self._array("keys", "<u8")
        self._levels = [self._array(name, "<u8") for name in sections if name.startswith("inner")]
        self._level_names = [name for name in sections if name.startswith("inner")]
        self._positions = self._array("positions", "<u4")
        self._buckets = self._array("buckets", "<u4")
        self._prints = self._array("prints", "<u2")
        self._ordinals = self._array("ordinals", "<u4")
        self._bits, self._ordinal_bits = _bucket_bits(len(self._prints)), _ordinal_bits(cover.documents)
        self._bucket_shift, self._print_shift = 64 - self._bits, 64 - self._bits - _PRINT_BITS
        self._windows: np.ndarray[Any, Any] | None = None  # of prints, made when many ids are first asked for
        # Single entries: an item of a memoryview costs a third of an array's.
        self._print_item, self._ordinal_item = self._items("prints", "H"), self._items("ordinals", "I")
        self._bucket_item, self._position_item = self._items("buckets", "I"), self._items("positions", "I")
        self._sure = False  # all buckets and prints are verified

    def _array(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        at, count = self._places[name]
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=at)

    def _items(self, name: str, kind: Literal["H", "I"]) -> memoryview:
        at, count = self._places[name]
        return self._data[at : at + count * (2 if kind == "H" else 4)].cast(kind)

    def _touch(self, name: str, first: int, last: int, width: int) -> None:
        """Verify the blocks that hold entries [first, last) of a section."""
        base = self._places[name][0] // BLOCK - 1
        block, stop = base + first * width // BLOCK, base + (max(last, first + 1) * width - 1) // BLOCK + 1
        if stop - block == 1 and block < len(self._verified) and self._verified[block]:
            return
        block = self._verified.find(0, block, stop)
        while block >= 0:
            at = (block + 1) * BLOCK
            if crc32(self._data[at : at + BLOCK]) != self._sums[block]:
                raise Damaged(f"{self.path.name}: the block at {at} is damaged. {Damaged.__doc__}", table=self)
            self._verified[block] = 1
            block = self._verified.find(0, block, stop)

    def __len__(self) -> int:
        return len(self.keys)

    def rank(self, key: int) -> int:
        """How many keys are smaller. O(log n): one block a level."""
        if not len(self.keys):
            return 0
        node = 0
        for name, level in zip(reversed(self._level_names), reversed(self._levels), strict=True):
            found = self._in_node(name, level, node, key)
            if found == 0:
                return 0
            node = found - 1
        return self._in_node("keys", self.keys, node, key)

    def _in_node(self, name: str, level: U64, node: int, key: int) -> int:
        first = node * FANOUT
        last = min(first + FANOUT, len(level))
        self._touch(name, first, last, 8)
        return first + int(np.searchsorted(level[first:last], np.uint64(key)))

    def ranks(self, keys: U64) -> I64:
        """`rank` of many keys, as arrays: each leaf that holds one is verified, then all are bisected at once."""
        if not self._levels:
            self._touch("keys", 0, len(self.keys), 8)
            return np.searchsorted(self.keys, keys)
        firsts = self._levels[0]
        self._touch(self._level_names[0], 0, len(firsts), 8)
        low = np.maximum(np.searchsorted(firsts, keys) - 1, 0) * FANOUT
        for leaf in np.unique(low).tolist():
            self._touch("keys", leaf, min(leaf + FANOUT, len(self.keys)), 8)
        high = np.minimum(low + FANOUT, len(self.keys))
        while (open_ := low < high).any():
            middle = np.where(open_, (low + high) >> 1, 0)
            below = open_ & (self.keys[middle] < keys)
            low, high = np.where(below, middle + 1, low), np.where(open_ & ~below, middle, high)
        return low

    def slice(self, first: int, last: int) -> U64:
        """Keys of ranks [first, last), verified."""
        if first < last:
            self._touch("keys", first, last, 8)
        return self.keys[first:last]

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        """Where documents begin and end in the segment (the end may lie behind a damaged stretch)."""
        if len(ordinals):
            self._touch("positions", int(ordinals.min()), int(ordinals.max()) + 2, 4)
        starts, ends = self._positions[ordinals].astype(np.int64), self._positions[ordinals + 1].astype(np.int64)
        if len(starts) and ((ends < starts).any() or ends.max() > self.cover.end):  # whatever its checksums say
            raise Damaged(f"{self.path.name}: it places documents where none can be. {Damaged.__doc__}", table=self)
        return starts, ends

    def span_of(self, ordinal: int) -> tuple[int, int]:
        """`places` of one document."""
        self._touch("positions", ordinal, ordinal + 2, 4)
        return self._position_item[ordinal], self._position_item[ordinal + 1]

    def may_hold(self, hashes: U64) -> Mask:
        """Which ids may be here, by their prints. 60 ns each in a batch."""
        if not len(hashes) or not len(self._prints):
            return np.zeros(len(hashes), np.bool_)
        if self._windows is None:
            self.verify_prints()
            width = min(int(np.diff(self._buckets.astype(np.int64)).max()), _BUCKET_WINDOW)
            count = len(self._prints) - width + 1
            self._windows = np.ndarray((count,), f"V{2 * width}", self._data, self._places["prints"][0], (2,))
        at = (hashes >> np.uint64(self._bucket_shift)).astype(np.int64) if self._bits else np.zeros(len(hashes), np.int64)
        first = self._buckets[at].astype(np.int64)
        width = self._windows.itemsize // 2
        prints = (hashes >> np.uint64(self._print_shift)).astype(np.uint16)
        # A window may hold prints of the next bucket, or of the one before the last, too.
        near = self._windows[np.minimum(first, len(self._windows) - 1)].view("<u2").reshape(len(hashes), width)
        found: Mask = (near == prints[:, None]).any(axis=1)
        if width == _BUCKET_WINDOW:
            found |= self._buckets[at + 1] - first > width
        return found

    def find(self, hash_: int) -> list[int]:
        """Ordinals of the documents whose id has this hash, newest first in a run. Usually none (0.8 µs) or one; verify it."""
        bucket = hash_ >> self._bucket_shift
        if not self._sure:
            self._touch_bucket(bucket)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        if first == last:
            return []
        mine = hash_ >> self._print_shift & 0xFFFF
        i = bisect_left(self._print_item, mine, first, last)
        if i == last or self._print_item[i] != mine:
            return []
        return self._marked(hash_, mine, i, last)

    def _touch_bucket(self, bucket: int) -> None:
        self._touch("buckets", bucket, bucket + 2, 4)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        if first < last:
            self._touch("prints", first, last, 2)

    def verify_prints(self) -> None:
        """Verify everything that tells strangers, so that nothing more need be when they are asked for."""
        if not self._sure and len(self._prints):
            self._touch("buckets", 0, len(self._buckets), 4)
            self._touch("prints", 0, len(self._prints), 2)
        self._sure = True

    def _marked(self, hash_: int, mine: int, first: int, last: int) -> list[int]:
        """Of the ids from `first` on that have this print, those whose other bits are right as well."""
        prints, ordinals, low = self._print_item, self._ordinal_item, self._ordinal_bits
        mark = (hash_ & ~_LOW & (1 << self._print_shift) - 1) >> self._print_shift - 32 + low
        stop = bisect_right(prints, mine, first, last)
        self._touch("ordinals", first, stop, 4)
        return [ordinals[i] & (1 << low) - 1 for i in range(stop - 1, first - 1, -1) if ordinals[i] >> low == mark]

    @property
    def id_count(self) -> int:
        """How many ids it holds."""
        return len(self._prints)

    @property
    def id_bits(self) -> int:
        """How many bits of their hashes it knows: HASH_BITS, but where most documents have no id."""
        return min(HASH_BITS, self._bits + _PRINT_BITS + 32 - self._ordinal_bits)

    def ids(self, low: int = 0, high: int = 1 << 64) -> U64:
        """What it knows of hashes, from `low` up to, but not with, `high`, sorted, and below that their ordinals; verified."""
        first, last = low >> self._bucket_shift, (high - 1 >> self._bucket_shift) + 1
        self._touch("buckets", first, last + 1, 4)
        edges = self._buckets[first : last + 1].astype(np.int64)
        start, stop = int(edges[0]), int(edges[-1])
        if start == stop:
            return np.empty(0, np.uint64)
        self._touch("prints", start, stop, 2)
        self._touch("ordinals", start, stop, 4)
        bucket = np.repeat(np.arange(first, last, dtype=np.uint64), np.diff(edges))
        ordinals, bits = self._ordinals[start:stop].astype(np.uint64), np.uint64(self._ordinal_bits)
        upper = (bucket << np.uint64(_PRINT_BITS) | self._prints[start:stop]) << np.uint64(self._print_shift)
        marks = ordinals >> bits << np.uint64(32 - _PRINT_BITS + self._ordinal_bits - self._bits)
        found: U64 = upper | marks | ordinals & np.uint64((1 << self._ordinal_bits) - 1)
        end = len(found) if high > _ALL else int(np.searchsorted(found, np.uint64(high)))
        return found[int(np.searchsorted(found, np.uint64(low))) : end]

    def lacks(self, hashes: U64, ordinals: I64 | None = None) -> bool:
        """Is one of these not here? With ordinals: or is another's."""
        rest = np.uint64(64 - self.id_bits)
        if ordinals is None:
            return not np.isin(hashes >> rest, self.ids() >> rest).all()
        return not np.isin((hashes >> rest << rest) | ordinals.astype(np.uint64), self.ids()).all()

    def ending_ordinals(self) -> I64:
        """Ordinals of the documents that end others."""
        count = self._places["kills"][1]
        if not count:
            return np.empty(0, np.int64)
        self._touch("kills", 0, count, 4)
        return self._array("kills", "<u4").astype(np.int64)

    def owners(self) -> U64 | None:
        """Whose the documents in `kills` are, in the ready log; None in a table that does not say."""
        if "owners" not in self._places:
            return None
        owners: U64 = self._array("owners", "<u8")
        if len(owners):
            self._touch("owners", 0, len(owners), 8)
        return owners

    def is_made_of(self, buffers: list[bytes]) -> bool:
        """Is it, byte for byte, what `build` made here? But for zeros behind its document, which nobody reads."""
        made = b"".join(buffers)
        head = int.from_bytes(made[:4], "little")
        return bool(self._data[:head] == made[:head] and self._data[BLOCK:] == made[BLOCK:])

    def verify(self) -> None:
        """Check every block."""
        for name in self._places:
            at, _ = self._places[name]
            following = [other for other, _ in self._places.values() if other > at]
            end = min(following, default=(len(self._verified) + 1) * BLOCK)
            self._touch(name, 0, end - at, 1)
        self._sure = True


def open_table(door: Door, path: Path) -> Table | None:
    """The table in `path`, or None where there is none. Raises `Damaged` for one that cannot be used."""
    return parse_table(path, door.map(path)) if door.exists(path) else None


def parse_table(path: Path, data: memoryview) -> Table:
    """The table in `data`. Its header and its list of checksums are verified here, its blocks when they are used."""
    try:
        fields, _ = f.decode_checked(data[:BLOCK])
        if fields["turtlemq_index"] != _VERSION:
            raise ValueError("it is of another version")
        at, count, sums_check = fields["checksums"]
        sums = data[at : at + 4 * count]
        if len(data) != at + 4 * count or crc32(sums) != sums_check:
            raise ValueError("its checksums are damaged")
        cover = Cover(**{name: int(fields[name]) for name in Cover.__dataclass_fields__})
        return Table(path, data, cover, fields["sections"], np.frombuffer(sums, np.uint32))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name}: {error}. {Damaged.__doc__}") from error
