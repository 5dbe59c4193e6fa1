"""Facts about bytes: the verdict of a scan on files that were cut, flipped or zeroed, or that hold documents inside documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.model import DUE_MS_MAX, Batch, Progress
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment.scan import Scan, Verdict, scan
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

steady = settings(derandomize=True, deadline=None, max_examples=100, database=None)
MASKS = (0x01, 0x80)


class Quick(Door):
    """A door without syncs: only a power cut would show the difference."""

    def _call(self, name: str, path: Path | None, action: Any, *args: Any) -> Any:
        return None if name in ("fdatasync", "fsync_dir") else action(*args)


def batch(first_seq: int, *bodies: bytes, barrier: bool = True, extras: Sequence[bytes] | None = None) -> bytes:
    """One batch, the first one of its sync if `barrier`."""
    flags = [f.CONTINUES] * (len(bodies) - 1) + [0]
    flags[0] |= f.BARRIER * barrier
    ids = [b"id-%d" % (first_seq + i) for i in range(len(bodies))]
    due_ms = [1_000 + 10 * i for i in range(len(bodies))]
    return bytes(f.encode(ids, bodies, due_ms, first_seq, 0, flags, extras)[0])


def tombstone(seq: int, of: int) -> bytes:
    return bytes(f.encode([b"id-%d" % of], [b""], [1_000], seq, 0, [f.TOMBSTONE | f.BARRIER], [f.extra_elements((of, 1_000))])[0])


INSIDE = batch(2_000_000, b"x") + batch(2_000_001, b"yy", b"z")  # newer than all around them, each of the two with a BARRIER
_HEADERS = {"kind": "order", "empty": ""}
RICH = f.extra_elements((1 << 62, 1 << 41), (1 << 63) - 1, 0xFFFFFFF0, expires_ms=DUE_MS_MAX, headers=_HEADERS)
LOGS = {
    "one document": batch(1, b"alone"),
    "batches of several sizes": batch(1, b"a") + batch(2, b"", b"b" * 40, b"c") + batch(5, b"d", b"e"),
    "with tombstones": batch(1, b"a", b"b") + tombstone(3, 1) + batch(4, b"c") + tombstone(5, 2),
    "with all fields": batch(1, b"a", b"b", extras=[RICH, b""]) + batch(3, b"", extras=[RICH]),
    "one sync for several batches": batch(1, b"a", b"b") + batch(3, b"c", barrier=False) + batch(4, b"d", b"e", barrier=False),
    "documents of 128 bytes": batch(1, *[b"x" * 51] * 4),  # a flipped bit of a length leads to another document
    "many of one length, then others": batch(10, *[b"x"] * 18) + batch(28, b"longer", b"x") + batch(30, b"x", b""),
    "documents in bodies": batch(1, b"a", INSIDE, b"b") + batch(4, INSIDE),
    "a body that the NUL behind it makes a document": batch(1, INSIDE[:-1]) + batch(2, b"a", INSIDE[:-1]),
    "documents amid a body": batch(1, b"before" + INSIDE + b"behind", b"a") + batch(3, INSIDE + b"\0" * 9) + batch(4, b"b"),
}


def documents(data: bytes, found: Scan) -> dict[int, bytes]:
    """The bytes of each document, by position."""
    return {at: data[at : at + n] for at, n in zip(found.positions.tolist(), found.lengths.tolist(), strict=True)}


def written(data: bytes) -> dict[int, bytes]:
    found = scan(data, 0, len(data))
    assert found.verdict is Verdict.END
    return documents(data, found)


def batch_ends(data: bytes) -> list[int]:
    found = scan(data, 0, len(data))
    ends = (found.positions + found.lengths).tolist()
    return [0, *(end for end, flags in zip(ends, found.flags.tolist(), strict=True) if not flags & f.CONTINUES)]


def flips(data: bytes, masks: Sequence[int] = MASKS) -> Iterator[tuple[int, bytes]]:
    """Every single changed byte."""
    for i in range(len(data)):
        for mask in masks:
            yield i, data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :]


def zeroed(data: bytes, first: int, last: int) -> bytes:
    return data[:first] + b"\0" * (last - first) + data[last:]


@pytest.fixture(params=LOGS, name="data")
def data_of(request: pytest.FixtureRequest) -> bytes:
    return LOGS[request.param]


# ── cut ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_a_whole_file() -> None:
    found = scan(b"", 0, 0)
    assert (found.verdict, len(found), found.end) == (Verdict.END, 0, 0)


@pytest.mark.parametrize("tail", [b"", b"\0" * 100])
def test_every_prefix_is_cut_to_whole_batches(data: bytes, tail: bytes) -> None:
    everything = written(data)
    ends = batch_ends(data)
    for size in range(len(data) + 1):
        cut = data[:size] + tail
        found = scan(cut, 0, len(cut))
        end = max(end for end in ends if cut[:end] == data[:end])  # the tail may be the very NUL that was missing
        assert documents(cut, found) == {at: raw for at, raw in everything.items() if at < end}, size
        assert (found.end, found.damaged) == (end, ()), size
        assert found.verdict is (Verdict.END if end == len(cut) else Verdict.TORN), size


def test_a_torn_document_is_no_place_to_look_for_documents() -> None:
    """A document in its body has a BARRIER, as single messages have, but proves nothing."""
    data = batch(1, b"a") + batch(2, INSIDE * 3)
    for size in range(len(data)):
        found = scan(data[:size], 0, size)
        assert found.seq.tolist() in ([], [1])
        assert not found.damaged


def test_a_sealed_file_is_never_cut() -> None:
    data = batch(1, b"a", b"b")
    found = scan(data[:-1], 0, len(data) - 1, sealed=True)
    assert (found.verdict, found.seq.tolist(), found.end) == (Verdict.CORRUPT, [1], len(data) - 1)
    assert found.damaged[0].reason == "the file ends inside a document"


# ── flipped ──────────────────────────────────────────────────────────────────────────────────────────────


def test_every_flipped_byte_is_found_and_no_changed_document_returned(data: bytes) -> None:
    everything = written(data)
    for i, bad in flips(data):
        found = scan(bad, 0, len(bad))
        assert found.verdict is not Verdict.END, i
        assert documents(bad, found).items() <= everything.items(), i


def test_a_flipped_byte_of_a_sealed_file_costs_one_document(data: bytes) -> None:
    everything = written(data)
    for i, bad in flips(data, masks=(0x01,)):
        found = scan(bad, 0, len(bad), sealed=True)
        (hit,) = (at for at, raw in everything.items() if at <= i < at + len(raw))
        assert documents(bad, found) == {at: raw for at, raw in everything.items() if at != hit}, i
        assert [(hole.position, hole.length) for hole in found.damaged] == [(hit, len(everything[hit]))], i


def test_a_flipped_byte_before_a_barrier_is_damage(data: bytes) -> None:
    more = data + batch(3_000_000, b"last")
    everything = written(more)
    for i, bad in flips(more, masks=(0xFF,)):
        found = scan(bad, 0, len(bad))
        (hit,) = (at for at, raw in everything.items() if at <= i < at + len(raw))
        if i < len(data):
            assert found.verdict is Verdict.CORRUPT, i
            assert documents(bad, found) == {at: raw for at, raw in everything.items() if at != hit}, i
        else:
            assert (found.verdict, found.end) == (Verdict.TORN, len(data)), i


def test_a_wrong_length_that_leads_to_another_document_costs_none_between() -> None:
    data = LOGS["documents of 128 bytes"]
    assert data[:4] == b"\x80\0\0\0"
    bad = b"\x80\x01" + data[2:]  # 384: exactly three of them
    found = scan(bad, 0, len(bad), sealed=True)
    assert found.seq.tolist() == [2, 3, 4]
    assert found.damaged[0].reason == "the first bytes of a document are damaged"


def test_two_damaged_heads_cost_two_documents_and_none_between() -> None:
    data = batch(1, *[b"body"] * 9)
    everything = written(data)
    starts = list(everything)
    for field in (f.AT_LEN, f.AT_LEN + 1, 5, f.AT_IDLEN, f.AT_SEQ - 2):
        bad = bytearray(data)
        for k in (2, 6):
            bad[starts[k] + field] ^= 0x7F
        found = scan(bytes(bad), 0, len(bad), sealed=True)
        assert found.seq.tolist() == [1, 2, 4, 5, 6, 8, 9], field
        assert [hole.position for hole in found.damaged] == [starts[2], starts[6]]


# ── documents in bodies ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("body", [INSIDE, INSIDE[:-1], INSIDE * 5, b"head" + INSIDE, INSIDE + b"tail", batch(9, INSIDE)])
@pytest.mark.parametrize("sealed", [False, True])
def test_documents_in_a_body_are_never_found(body: bytes, sealed: bool) -> None:
    before, behind = batch(5, b"before"), batch(7, b"behind")
    data = before + batch(6, body) + behind
    at = len(before)
    for first in range(at, at + f.PREFIX_BYTES, 4):
        for last in range(first + 1, at + f.PREFIX_BYTES + 1, 5):
            for bad in (zeroed(data, first, last), data[:first] + b"\xff" * (last - first) + data[last:]):
                found = scan(bad, 0, len(bad), sealed=sealed)
                assert set(found.seq.tolist()) <= {5, 6, 7}, (first, last)
                assert {5, 7} <= set(found.seq.tolist()), (first, last)
                assert bad == data or found.verdict is Verdict.CORRUPT


def test_older_documents_in_a_headless_body_are_not_found() -> None:
    """Nothing is left of the head around them, but in a growing file later documents stand behind earlier ones."""
    older = batch(1, b"x") + batch(2, b"yy", b"z")
    data = batch(500, b"before") + batch(501, older[:-1]) + batch(502, b"behind")
    start = len(batch(500, b"before"))
    for size in range(f.PREFIX_BYTES, f.PREFIX_BYTES + 60):
        found = scan(zeroed(data, start, start + size), 0, len(data))
        assert found.seq.tolist() == [500, 502], size


# ── pages that were never written, and pages that went bad ───────────────────────────────────────────────


def groups() -> tuple[bytes, list[int]]:
    """Five syncs of three batches each, and where each begins."""
    data, starts = b"", []
    for group in range(5):
        starts.append(len(data))
        for k in range(3):
            seq = 100 * group + 10 * k
            data += batch(seq, *[b"%d" % seq * 5] * (k + 1), barrier=k == 0)
    return data, starts


def test_a_hole_within_the_last_sync_is_torn() -> None:
    data, starts = groups()
    everything = written(data)
    ends = batch_ends(data)
    for first in range(starts[-1], len(data) - 1):
        for size in (5, 90):
            bad = zeroed(data, first, min(first + size, len(data)))
            if bad == data:
                continue
            found = scan(bad, 0, len(bad))
            touched = next(i for i in range(len(bad)) if bad[i] != data[i])
            end = max(end for end in ends if end <= touched)
            assert (found.verdict, found.end) == (Verdict.TORN, end), (first, size)
            assert documents(bad, found) == {at: raw for at, raw in everything.items() if at < end}, (first, size)


def test_a_hole_before_a_barrier_is_damage() -> None:
    data, starts = groups()
    everything = written(data)
    for first in range(starts[2], starts[3] - 1):
        for size in (40,):
            bad = zeroed(data, first, min(first + size, starts[3]))
            untouched = {at: raw for at, raw in everything.items() if bad[at : at + len(raw)] == raw}
            found = scan(bad, 0, len(bad))
            assert documents(bad, found) == untouched, (first, size)
            assert found.end == len(data)
            assert found.verdict is (Verdict.END if bad == data else Verdict.CORRUPT)


def test_both_holes_at_once_are_told_apart() -> None:
    data, starts = groups()
    everything = written(data)
    ends = batch_ends(data)
    random = Random(7)
    for _ in range(200):
        first, last = random.randrange(starts[1], starts[2]), random.randrange(starts[4], len(data) - 30)
        bad = zeroed(zeroed(data, first, first + random.choice((5, 60, 200))), last, last + 20)
        touched = min((i for i in range(starts[4], len(bad)) if bad[i] != data[i]), default=len(data))
        end = max(end for end in ends if end <= touched)
        untouched = {at: raw for at, raw in everything.items() if bad[at : at + len(raw)] == raw and at < end}
        found = scan(bad, 0, len(bad))
        assert documents(bad, found) == untouched, (first, last)
        assert found.end == end
        assert all(hole.position < starts[3] for hole in found.damaged)


def test_a_torn_barrier_still_separates_damage_from_a_torn_tail() -> None:
    before, last = batch(1, b"a", b"bb", b"c") + batch(4, b"d"), batch(5, b"e" * 20, b"f")
    data = before + last
    everything = written(data)
    second = list(everything)[1]
    for i, bad in flips(data, masks=(0x40,)):
        if i < len(before) + f.PREFIX_BYTES or i >= list(everything)[5]:
            continue
        bad = bad[: second + 70] + b"\xff" + bad[second + 71 :]
        found = scan(bad, 0, len(bad))
        assert found.seq.tolist() == [1, 3, 4], i
        assert [hole.position for hole in found.damaged] == [second]
        assert found.end == len(before)


@given(st.data())
@steady
def test_whatever_is_destroyed_all_else_that_was_synced_is_kept(draw: st.DataObject) -> None:
    sizes = draw.draw(st.lists(st.lists(st.sampled_from([0, 1, 30, 300]), min_size=1, max_size=4), min_size=2, max_size=5))
    data, starts = b"", []
    for group, bodies in enumerate(sizes):
        starts.append(len(data))
        data += batch(1 + 10 * group, *[b"\x05body\0\x10crc\0"[: size % 7] + b"b" * size for size in bodies])
    bad = data
    for _ in range(draw.draw(st.integers(1, 3))):
        first = draw.draw(st.integers(0, starts[-1] - 1))
        last = min(first + draw.draw(st.sampled_from([1, 4, 30, 100, 400])), starts[-1])
        filler = draw.draw(st.sampled_from([b"\0", b"\xff", b"\x10crc\0", b"\x05body\0", b"%\0\0\0"]))
        bad = bad[:first] + (filler * 400)[: last - first] + bad[last:]
    everything = written(data)
    untouched = {at: raw for at, raw in everything.items() if bad[at : at + len(raw)] == raw}
    for sealed in (False, True):
        found = scan(bad, 0, len(bad), sealed=sealed)
        assert documents(bad, found) == untouched
        assert (found.verdict is Verdict.CORRUPT) == (bad != data)
        holes = sum(hole.length for hole in found.damaged)
        assert holes + sum(map(len, untouched.values())) == len(bad), "every byte is in a document or in a hole"


@given(st.binary(max_size=400), st.booleans())
@steady
def test_a_scan_of_anything_ends_and_finds_nothing_in_it(noise: bytes, sealed: bool) -> None:
    found = scan(noise, 0, len(noise), sealed=sealed)
    assert not len(found)
    assert sealed or (found.end, found.damaged) == (0, ())


def test_a_hundred_holes_cost_no_more_than_the_file() -> None:
    """Walking on from every document between two holes would take minutes here."""
    data = b"".join(batch(1 + 1_000 * i, *[b"x" * 30] * 1_000) for i in range(20))
    length = len(batch(1_000, b"x" * 30))
    bad = bytearray(data)
    for k in range(100):
        bad[k * 15_000 : k * 15_000 + 150] = bytes(150)
    found = scan(bytes(bad), 0, len(bad), sealed=True)
    assert len(found) >= 20_000 - 100 * (150 // length + 2)
    assert len(found.damaged) >= 100


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────


def sealed_file(path: Path, said: int, data: bytes) -> None:
    header = f.FileHeader("delay", "t", 0, 1, True, 2, said)
    path.write_bytes(f.encode_header(header) + data)


@pytest.mark.parametrize(("cut", "reason"), [(-1, "shorter"), (+9, "longer")])
def test_a_sealed_file_of_the_wrong_length_is_damaged(tmp_path: Path, cut: int, reason: str) -> None:
    data = batch(1, b"a") + batch(2, b"b")
    path = tmp_path / "delay_0000000000.bson"
    sealed_file(path, len(data), data[:cut] if cut < 0 else data + batch(3, b"c")[:cut])
    _, found = log.scan_file(Door(), path)
    assert found.seq.tolist() == ([1] if cut < 0 else [1, 2])
    assert found.verdict is Verdict.CORRUPT
    assert reason in found.damaged[-1].reason
    assert str(log.damage_of(path, found)[-1]).startswith("delay_0000000000.bson: ")


# ── the same through an Index ────────────────────────────────────────────────────────────────────────────


def opened(folder: Path) -> Index:
    return open_index(Quick(), folder, "t", Settings(), Progress())


def reopened(path: Path, data: bytes) -> Index:
    """An Index in a folder that holds this segment and nothing else."""
    path.parent.mkdir(exist_ok=True)
    for file in path.parent.iterdir():
        file.unlink()
    path.write_bytes(data)
    return opened(path.parent)


def asleep(index: Index) -> dict[str, tuple[int, bytes]]:
    return {found.id: (found.due_ms, found.body) for found in index.browse(limit=1_000)[0]}


def story(folder: Path) -> tuple[bytes, list[tuple[int, dict[str, tuple[int, bytes]]]]]:
    """A segment written by an Index, and the sleepers after each batch."""
    index = opened(folder)
    path = index._segments.active.path
    states = [(path.stat().st_size, asleep(index))]
    index.append(Batch([b"one"], [50], ["a"]), 1)
    states.append((path.stat().st_size, asleep(index)))
    index.append(Batch([b"two", b"", batch(1, b"x")], [70, 60, 60], ["b", "c", None]), 2)
    states.append((path.stat().st_size, asleep(index)))
    index.cancel(["a", "c"])
    states.append((path.stat().st_size, asleep(index)))
    index.reschedule("b", 3, due_ms=10, body=b"three")
    states.append((path.stat().st_size, asleep(index)))
    index.close()
    return path.read_bytes(), states


def test_an_index_over_every_prefix_knows_whole_batches_and_no_phantom(tmp_path: Path) -> None:
    data, states = story(tmp_path / "whole")
    path = tmp_path / "cut" / "delay_0000000000.bson"
    for size in (*range(0, states[0][0], 20), *range(states[0][0], len(data) + 1)):
        index = reopened(path, data[:size])
        expected = max((state for state in states if state[0] <= size), key=lambda state: state[0], default=(0, {}))
        assert asleep(index) == expected[1], size
        assert index.stats().damaged == 0
        assert path.stat().st_size == max(expected[0], states[0][0])
        due = index.due(DUE_MS_MAX)
        assert (0 if due is None else len(due)) == len(expected[1])
        if size % 16 == 0:
            assert index.check() == []
        index.close()


def test_an_index_over_every_flipped_byte_serves_only_written_bytes(tmp_path: Path) -> None:
    data, states = story(tmp_path / "whole")
    path = tmp_path / "flipped" / "delay_0000000000.bson"
    known = {item for _, state in states for item in state.items()}
    for _, bad in flips(data, masks=(0x41,)):
        index = reopened(path, bad)
        assert set(asleep(index).items()) <= known
        due = index.due(DUE_MS_MAX)
        assert due is None or all(raw in data for raw in _split(due.raw, due.starts.tolist()))
        assert index.stats().damaged or path.stat().st_size < len(data)
        index.close()


def _split(raw: bytes, starts: list[int]) -> list[bytes]:
    return [raw[a:b] for a, b in zip(starts, [*starts[1:], len(raw)], strict=True)]
