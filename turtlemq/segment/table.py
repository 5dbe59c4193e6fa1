"""A table: a static B+tree file over a sealed segment, or over a run of one that still grows. Mapped, read with numpy.

A table is a cache. Its header names the bytes and the generation of the segment that it covers. Each 4 KiB block has a checksum
that is verified when the block is first used. A table that does not fit, or is damaged, is built again from the segment.

    block 0            a BSON document: `Cover`, positions of the sections, checksum
    keys               due_ms << 22 | ordinal, sorted: the leaves, 512 keys each
    inner levels       the first key of every node below, until one node is left
    positions          byte offset of every document by ordinal, and where the last one ends
    buckets            where the ids of each bucket begin: the first bits of a hash choose its bucket
    prints             fingerprints: the next 16 bits of the hash of each id, sorted in each bucket. 1 of 1,000 unknown ids passes
    ordinals           more bits of the hash, and the ordinal, in the same order
    kills              ordinals of the documents that end others; in the ready log, of those that not every group sees
    owners             in the ready log only: for each item of `kills`, the hash of its group's name
    levels             in the ready log only: the priority of each document, 1 B; empty if all have normal priority
    checksums          one CRC-32 for each block before

An ordinal counts the documents of the covered bytes; in a sealed segment it is the rank in due order. `kills` and the field
`killed_seq` keep their old names on disk: documents that end others, and `ended_by`.
Costs: 8 + 4 + 6.2 B a message on disk; a search reads one block a level.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bson.int64 import Int64
from zlib_ng.zlib_ng import crc32

from turtlemq import small_batches
from turtlemq.errors import Corrupt
from turtlemq.model import I64, ORDINAL_BITS, U8, U32, U64, Mask
from turtlemq.segment import format as f
from turtlemq.segment.ids import GROUP_BITS
from turtlemq.storage.door import Door

BLOCK = 4096
FANOUT = BLOCK // 8
_VERSION = 2  # with seed 0
_SEEDED_VERSION = 3  # with another seed: programs that know no seed must not look ids up in it
HASH_BITS = 64 - ORDINAL_BITS  # upper bits of a hash that are stored
_BUCKET_IDS = 32  # in a bucket at most, on average; at least half of that
_BUCKET_WINDOW = 64  # fingerprints of a bucket that are compared at once
_PRINT_BITS = 16
_LOW = (1 << ORDINAL_BITS) - 1
_ALL = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Cover:
    """The documents of a segment that a table covers. Written with these field names."""

    base: int
    generation: int
    first: int  # the number of its first document among all of the segment; 0 in a sealed one
    documents: int
    start: int  # byte of the segment where its documents begin
    end: int  # and behind the last one
    first_seq: int
    last_seq: int
    killed_seq: int  # documents ended up to this seq have no key and no id in the table


class Damaged(Corrupt):
    """An index file is damaged. It is built again from its segment."""


def build(
    cover: Cover, keys: U64, positions: I64, hashes: U64, hashed: I64, ending: I64, *, seed: int = 0, **more: U64 | U8
) -> list[bytes]:
    """The bytes of a table, as buffers. Requires: `keys` sorted. `hashes[i]` is the hash of the id of ordinal `hashed[i]`;
    `ending` are the ordinals for the section `kills`; `seed` is that of all hashes; `more` are the sections that only the ready
    log has. 60 ns a message, mostly sorting."""
    sections: dict[str, np.ndarray[Any, Any]] = {"keys": keys}
    for depth, level in enumerate(_inner_levels(keys)):
        sections[f"inner{depth}"] = level
    sections["positions"] = positions.astype(np.uint32)
    sections |= _ids(hashes, hashed, cover.documents)
    sections["kills"] = ending.astype(np.uint32)
    sections |= more
    buffers: list[bytes] = []
    offsets: dict[str, list[int]] = {}
    at = BLOCK
    for name, array in sections.items():
        data = array.tobytes()
        offsets[name] = [at, len(array)]
        buffers.append(data + b"\0" * (-len(data) % BLOCK))
        at += len(buffers[-1])
    blocks = [memoryview(data)[i : i + BLOCK] for data in buffers for i in range(0, len(data), BLOCK)]
    sums = np.array([crc32(block) for block in blocks], dtype=np.uint32).tobytes()
    fields = {
        "turtlemq_index": _SEEDED_VERSION if seed else _VERSION,
        **{k: Int64(v) for k, v in asdict(cover).items()},
        **({"seed": Int64(seed)} if seed else {}),
        "sections": offsets,
        "checksums": [at, len(sums) // 4, crc32(sums)],
    }
    header = f.encode_checked(fields)
    return [header + b"\0" * (BLOCK - len(header)), *buffers, sums]


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
    """The sections for lookups by id."""
    ids = np.sort((hashes & np.uint64(_ALL ^ _LOW)) | hashed.astype(np.uint64))
    bits, low = _bucket_bits(len(ids)), np.uint64(_ordinal_bits(documents))
    edges = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits) if bits else np.zeros(1, np.uint64)
    buckets = np.append(np.searchsorted(ids, edges), len(ids)).astype(np.uint32)
    upper = ids & np.uint64(_ALL ^ _LOW)
    prints = (upper >> np.uint64(64 - bits - _PRINT_BITS)).astype(np.uint16)
    marks = upper << np.uint64(bits + _PRINT_BITS) >> (np.uint64(32) + low) << low
    return {"buckets": buckets, "prints": prints, "ordinals": (marks | ids & np.uint64(_LOW)).astype(np.uint32)}


class Table:
    """An open table. A block is verified at its first use; `Damaged` is raised if it is bad. In memory is only the mapping."""

    def __init__(
        self, path: Path, data: memoryview, cover: Cover, sections: dict[str, list[int]], sums: U32, seed: int = 0
    ) -> None:
        self.path = path
        self.cover = cover
        self.seed = seed  # of the hashes by which its ids are found
        self._data = data
        self._sums = sums.tolist() if len(sums) < 4096 else sums
        self._verified = bytearray(len(sums))
        self._sections = sections
        self.keys = self._array("keys", "<u8")
        self._levels = [self._array(name, "<u8") for name in sections if name.startswith("inner")]
        self._level_names = [name for name in sections if name.startswith("inner")]
        self._positions = self._array("positions", "<u4")
        self._buckets = self._array("buckets", "<u4")
        self._prints = self._array("prints", "<u2")
        self._ordinals = self._array("ordinals", "<u4")
        self._bits, self._ordinal_bits = _bucket_bits(len(self._prints)), _ordinal_bits(cover.documents)
        self._bucket_shift, self._print_shift = 64 - self._bits, 64 - self._bits - _PRINT_BITS
        self._print_windows: np.ndarray[Any, Any] | None = None  # made at the first lookup of many ids
        # For single entries: an item of a memoryview costs a third of one of an array.
        self._print_item, self._ordinal_item = self._items("prints", "H"), self._items("ordinals", "I")
        self._bucket_item, self._position_item = self._items("buckets", "I"), self._items("positions", "I")
        self._prints_verified = False  # and all buckets
        self.levels_present: frozenset[int] | None = None  # priorities of its documents, once a search has asked for them

    def _array(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        at, count = self._sections[name]
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=at)

    def _items(self, name: str, kind: Literal["H", "I"]) -> memoryview:
        at, count = self._sections[name]
        return self._data[at : at + count * (2 if kind == "H" else 4)].cast(kind)

    def _ensure_verified(self, name: str, first: int, last: int, width: int) -> None:
        """Verify the blocks with entries [first, last) of a section, unless they were verified before."""
        base = self._sections[name][0] // BLOCK - 1
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
            rank = self._in_node(name, level, node, key)
            if rank == 0:
                return 0
            node = rank - 1
        return self._in_node("keys", self.keys, node, key)

    def _in_node(self, name: str, level: U64, node: int, key: int) -> int:
        first = node * FANOUT
        last = min(first + FANOUT, len(level))
        self._ensure_verified(name, first, last, 8)
        return first + int(np.searchsorted(level[first:last], np.uint64(key)))

    def ranks(self, keys: U64) -> I64:
        """How many keys are smaller than each of these. The leaves in question are verified, then all are searched at once."""
        if not self._levels:
            self._ensure_verified("keys", 0, len(self.keys), 8)
            return np.searchsorted(self.keys, keys)
        firsts = self._levels[0]
        self._ensure_verified(self._level_names[0], 0, len(firsts), 8)
        low = np.maximum(np.searchsorted(firsts, keys) - 1, 0) * FANOUT
        for leaf in np.unique(low).tolist():
            self._ensure_verified("keys", leaf, min(leaf + FANOUT, len(self.keys)), 8)
        high = np.minimum(low + FANOUT, len(self.keys))
        while (open_ := low < high).any():
            middle = np.where(open_, (low + high) >> 1, 0)
            below = open_ & (self.keys[middle] < keys)
            low, high = np.where(below, middle + 1, low), np.where(open_ & ~below, middle, high)
        return low

    def slice(self, first: int, last: int) -> U64:
        """Keys of ranks [first, last), verified."""
        if first < last:
            self._ensure_verified("keys", first, last, 8)
        return self.keys[first:last]

    def keys_at(self, ranks: I64) -> U64:
        """Keys of these ranks, verified."""
        if len(ranks):
            self._ensure_verified("keys", int(ranks.min()), int(ranks.max()) + 1, 8)
        return self.keys[ranks]

    def spans_of(self, ordinals: I64) -> tuple[I64, I64]:
        """Byte ranges of documents in the segment: starts and ends. A damaged stretch counts to the document before it."""
        if len(ordinals):
            self._ensure_verified("positions", int(ordinals.min()), int(ordinals.max()) + 2, 4)
        starts, ends = self._positions[ordinals].astype(np.int64), self._positions[ordinals + 1].astype(np.int64)
        if len(starts) and ((ends < starts).any() or ends.max() > self.cover.end):  # a wrong table with right checksums
            raise Damaged(f"{self.path.name}: it places documents where none can be. {Damaged.__doc__}", table=self)
        return starts, ends

    def span_of(self, ordinal: int) -> tuple[int, int]:
        """Byte range of one document in the segment."""
        self._ensure_verified("positions", ordinal, ordinal + 2, 4)
        return self._position_item[ordinal], self._position_item[ordinal + 1]

    def may_hold(self, hashes: U64) -> Mask:
        """Which ids may be in the table, by their fingerprints. False is certain. 60 ns each in a batch."""
        if not len(hashes) or not len(self._prints):
            return np.zeros(len(hashes), np.bool_)
        if self._print_windows is None:
            self.verify_prints()
            width = min(int(np.diff(self._buckets.astype(np.int64)).max()), _BUCKET_WINDOW)
            count = len(self._prints) - width + 1
            self._print_windows = np.ndarray((count,), f"V{2 * width}", self._data, self._sections["prints"][0], (2,))
        at = (hashes >> np.uint64(self._bucket_shift)).astype(np.int64) if self._bits else np.zeros(len(hashes), np.int64)
        first = self._buckets[at].astype(np.int64)
        width = self._print_windows.itemsize // 2
        prints = (hashes >> np.uint64(self._print_shift)).astype(np.uint16)
        # A window may include fingerprints of a neighbouring bucket: that only lets more ids pass.
        near = self._print_windows[np.minimum(first, len(self._print_windows) - 1)].view("<u2").reshape(len(hashes), width)
        maybe: Mask = (near == prints[:, None]).any(axis=1)
        if width == _BUCKET_WINDOW:
            maybe |= self._buckets[at + 1] - first > width
        return maybe

    def find(self, hash_: int) -> list[int]:
        """Ordinals of the documents whose id has this hash, newest first in a run. Usually none (0.8 µs) or one. Candidates: the
        id must be compared."""
        bucket = hash_ >> self._bucket_shift
        if not self._prints_verified:
            self._ensure_bucket_verified(bucket)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        if first == last:
            return []
        print_ = hash_ >> self._print_shift & 0xFFFF
        i = bisect_left(self._print_item, print_, first, last)
        if i == last or self._print_item[i] != print_:
            return []
        return self._with_mark(hash_, print_, i, last)

    def find_groups(self, shared: U64) -> list[int]:
        """Ordinals of the documents whose hashes agree with one of these in all but the low GROUP_BITS: of ids like group/id, for
        any group. Requires: a table with a seed. Candidates: the id must be compared."""
        if len(shared) >= small_batches.DOCUMENTS:  # all bits that choose bucket and fingerprint are shared
            shared = shared[self.may_hold(shared)]
        return [ordinal for hash_ in np.unique(shared).tolist() for ordinal in self._find_shared(hash_)]

    def _find_shared(self, shared: int) -> list[int]:
        bucket, print_, low = shared >> self._bucket_shift, shared >> self._print_shift & 0xFFFF, self._ordinal_bits
        if not self._prints_verified:
            self._ensure_bucket_verified(bucket)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        first, last = bisect_left(self._print_item, print_, first, last), bisect_right(self._print_item, print_, first, last)
        if first == last:
            return []
        self._ensure_verified("ordinals", first, last, 4)
        other = max(0, GROUP_BITS - (self._print_shift - 32 + low))  # bits of the mark that depend on the group
        mark, ordinals = self._mark(shared) >> other, self._ordinal_item
        return [ordinals[i] & (1 << low) - 1 for i in range(first, last) if ordinals[i] >> low + other == mark]

    def holds(self, hash_: int, ordinal: int) -> bool:
        """Is this ordinal one of `find`? 1 µs, however many ids have this hash."""
        if self.id_bits < HASH_BITS:  # bits that are not stored come before the ordinal in the order
            return ordinal in self.find(hash_)
        bucket, print_, low = hash_ >> self._bucket_shift, hash_ >> self._print_shift & 0xFFFF, self._ordinal_bits
        self._ensure_bucket_verified(bucket)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        first, last = bisect_left(self._print_item, print_, first, last), bisect_right(self._print_item, print_, first, last)
        if first == last:
            return False
        self._ensure_verified("ordinals", first, last, 4)
        entry = self._mark(hash_) << low | ordinal
        i = bisect_left(self._ordinal_item, entry, first, last)
        return i < last and self._ordinal_item[i] == entry

    def _mark(self, hash_: int) -> int:
        """The bits of a hash that stand above the ordinal."""
        return (hash_ & ~_LOW & (1 << self._print_shift) - 1) >> self._print_shift - 32 + self._ordinal_bits

    def _ensure_bucket_verified(self, bucket: int) -> None:
        self._ensure_verified("buckets", bucket, bucket + 2, 4)
        first, last = self._bucket_item[bucket], self._bucket_item[bucket + 1]
        if first < last:
            self._ensure_verified("prints", first, last, 2)

    def verify_prints(self) -> None:
        """Verify all buckets and fingerprints, so that later lookups need not."""
        if not self._prints_verified and len(self._prints):
            self._ensure_verified("buckets", 0, len(self._buckets), 4)
            self._ensure_verified("prints", 0, len(self._prints), 2)
        self._prints_verified = True

    def _with_mark(self, hash_: int, print_: int, first: int, last: int) -> list[int]:
        """Ordinals of the ids from `first` on with this fingerprint whose other stored bits match, too."""
        prints, ordinals, low, mark = self._print_item, self._ordinal_item, self._ordinal_bits, self._mark(hash_)
        stop = bisect_right(prints, print_, first, last)
        self._ensure_verified("ordinals", first, stop, 4)
        return [ordinals[i] & (1 << low) - 1 for i in range(stop - 1, first - 1, -1) if ordinals[i] >> low == mark]

    @property
    def id_count(self) -> int:
        """How many ids it has."""
        return len(self._prints)

    @property
    def id_bits(self) -> int:
        """How many bits of each hash it has: HASH_BITS, or fewer if most documents have no id."""
        return min(HASH_BITS, self._bits + _PRINT_BITS + 32 - self._ordinal_bits)

    def ids(self, low: int = 0, high: int = 1 << 64) -> U64:
        """All ids with hashes in [low, high), sorted: the stored bits of the hash above, the ordinal in the low 22 bits.
        Verified."""
        first, last = low >> self._bucket_shift, (high - 1 >> self._bucket_shift) + 1
        self._ensure_verified("buckets", first, last + 1, 4)
        edges = self._buckets[first : last + 1].astype(np.int64)
        start, stop = int(edges[0]), int(edges[-1])
        if start == stop:
            return np.empty(0, np.uint64)
        self._ensure_verified("prints", start, stop, 2)
        self._ensure_verified("ordinals", start, stop, 4)
        bucket = np.repeat(np.arange(first, last, dtype=np.uint64), np.diff(edges))
        ordinals, bits = self._ordinals[start:stop].astype(np.uint64), np.uint64(self._ordinal_bits)
        upper = (bucket << np.uint64(_PRINT_BITS) | self._prints[start:stop]) << np.uint64(self._print_shift)
        marks = ordinals >> bits << np.uint64(32 - _PRINT_BITS + self._ordinal_bits - self._bits)
        ids: U64 = upper | marks | ordinals & np.uint64((1 << self._ordinal_bits) - 1)
        end = len(ids) if high > _ALL else int(np.searchsorted(ids, np.uint64(high)))
        return ids[int(np.searchsorted(ids, np.uint64(low))) : end]

    def lacks(self, hashes: U64, ordinals: I64 | None = None) -> bool:
        """Is one of these hashes missing? With `ordinals`: or stored with another ordinal?"""
        rest = np.uint64(64 - self.id_bits)
        if ordinals is None:
            return not np.isin(hashes >> rest, self.ids() >> rest).all()
        return not np.isin((hashes >> rest << rest) | ordinals.astype(np.uint64), self.ids()).all()

    def ending_ordinals(self) -> I64:
        """Ordinals of the documents that end others."""
        count = self._sections["kills"][1]
        if not count:
            return np.empty(0, np.int64)
        self._ensure_verified("kills", 0, count, 4)
        return self._array("kills", "<u4").astype(np.int64)

    def owners(self) -> U64 | None:
        """In the ready log: the hash of the group's name for each of `ending_ordinals`. None in a table without that section."""
        if "owners" not in self._sections:
            return None
        owners: U64 = self._array("owners", "<u8")
        if len(owners):
            self._ensure_verified("owners", 0, len(owners), 8)
        return owners

    @property
    def has_levels(self) -> bool:
        """Whether it knows priorities: a table of the ready log, unless it was made by an older version."""
        return "levels" in self._sections

    def levels(self, first: int, last: int) -> U8:
        """In the ready log: the priorities of documents [first, last). Raises `Damaged` unless `has_levels`."""
        if not self.has_levels:
            raise Damaged(f"{self.path.name}: it knows no priorities. {Damaged.__doc__}", table=self)
        if first >= last or not self._sections["levels"][1]:
            return np.zeros(max(last - first, 0), np.uint8)
        self._ensure_verified("levels", first, last, 1)
        return self._array("levels", "u1")[first:last]

    def is_made_of(self, buffers: list[bytes]) -> bool:
        """Does it equal these buffers of `build`, byte for byte? The unused bytes of block 0 are ignored."""
        made = b"".join(buffers)
        head = int.from_bytes(made[:4], "little")
        return bool(self._data[:head] == made[:head] and self._data[BLOCK:] == made[BLOCK:])

    def verify(self) -> None:
        """Verify every block."""
        for name in self._sections:
            at, _ = self._sections[name]
            following = [other for other, _ in self._sections.values() if other > at]
            end = min(following, default=(len(self._verified) + 1) * BLOCK)
            self._ensure_verified(name, 0, end - at, 1)
        self._prints_verified = True


def open_table(door: Door, path: Path) -> Table | None:
    """The table in `path`, or None if there is no file. Raises `Damaged` if it cannot be used."""
    return parse_table(path, door.map(path)) if door.exists(path) else None


def parse_table(path: Path, data: memoryview) -> Table:
    """The table in `data`. Its header and its list of checksums are verified here, its blocks at their first use."""
    try:
        fields, _ = f.decode_checked(data[:BLOCK])
        version = fields["turtlemq_index"]
        if version not in (_VERSION, _SEEDED_VERSION):
            raise ValueError("it is of another version")
        seed = int(fields["seed"]) if version == _SEEDED_VERSION else 0
        at, count, sums_check = fields["checksums"]
        sums = data[at : at + 4 * count]
        if len(data) != at + 4 * count or crc32(sums) != sums_check:
            raise ValueError("its checksums are damaged")
        cover = Cover(**{name: int(fields[name]) for name in Cover.__dataclass_fields__})
        return Table(path, data, cover, fields["sections"], np.frombuffer(sums, np.uint32), seed)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name}: {error}. {Damaged.__doc__}") from error
