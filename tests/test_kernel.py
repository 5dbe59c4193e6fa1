"""The compiled kernel: each function gives the result of its reference, refuses odd arguments, and stays inside its buffers.

Steps of the engine with and without it are compared in test_small_batches.py. All tests here run once more under the address
and the undefined behaviour sanitizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages import build_kernel
from tests.harness.clean_environment import clean_environment
from tests.harness.kernels import OPTIONS, built, with_kernel
from tests.harness.server_process import ROOT, running
from turtlemq.errors import InvalidId, TooLarge
from turtlemq.index.validate import check_ids
from turtlemq.model import BODY_BYTES_MAX, I64, ID_BYTES_MAX, U32
from turtlemq.segment import format as f
from turtlemq.segment import kernel
from turtlemq.segment.buffers import checksums, gather
from turtlemq.segment.id_map import IdMap
from turtlemq.server.outgoing.spans import Spans, join

WAYS = {"folding": (), "tables": ("-DTABLES_ONLY",)}  # of computing checksums
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"


@pytest.fixture(name="c", params=WAYS)
def compiled(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with with_kernel(*WAYS[request.param]) as module:
        yield module


def reference(function: Any, *args: Any) -> Any:
    """The result of a function without the kernel."""
    with mock.patch.object(kernel, "compiled", None):
        return function(*args)


def column(values: list[int]) -> I64:
    return np.array(values, np.int64)


# Documents

SEQS = st.integers(0, 1 << 62)
NUMBERS = st.integers(0, (1 << 32) - 1)
ROWS = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=40), st.binary(max_size=300), st.integers(0, 1 << 62), NUMBERS, NUMBERS, st.binary()
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(ROWS, SEQS, st.sampled_from(("lists", "arrays", "matrix", "one ttr", "extras")))
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_documents_are_the_bytes_of_the_reference(way: tuple[str, ...], rows: list[Any], seq: int, form: str) -> None:
    ids, bodies, due, ttr, flags, extras = map(list, zip(*rows, strict=True))
    given: list[Any] = [ids, bodies, due, seq, ttr, flags, extras if form == "extras" else None]
    if form == "arrays":
        given[2], given[5] = column(due), np.array(flags, np.uint32)
    elif form == "matrix":
        given[0] = np.frombuffer(b"".join(id_.ljust(8)[:8] for id_ in ids), np.uint8).reshape(len(ids), 8)
    elif form == "one ttr":
        given[4] = ttr[0]
    data, lengths = reference(f.encode, *given)
    with with_kernel(*way):
        made, sizes = f.encode(*given)
        assert (bytes(made), list(sizes)) == (bytes(data), list(lengths))
        assert f.lengths_of(given[0], bodies, given[6]).tolist() == list(lengths)


def test_many_documents_are_encoded_in_slices(c: ModuleType) -> None:
    count = 2 * kernel._AT_ONCE + 3
    columns: Any = ([b"%d" % n for n in range(count)], [b"x" * (n % 90) for n in range(count)], range(count), 7, 0, [4] * count)
    columns = (*columns[:2], list(columns[2]), *columns[3:])
    with mock.patch.object(kernel, "encode", wraps=kernel.encode) as used:
        data, lengths = f.encode(*columns)
    assert used.call_count == 1
    by_reference = reference(f.encode, *columns)
    assert (bytes(data), list(lengths)) == (bytes(by_reference[0]), list(by_reference[1]))


def test_a_document_that_is_too_long_is_refused(c: ModuleType) -> None:
    bodies = [b"", b"x" * f.DOCUMENT_BYTES_MAX, b"", b""]
    with pytest.raises(TooLarge):
        f.encode([b"a"] * 4, bodies, [1] * 4, 1, 0, [0] * 4)
    with pytest.raises(TooLarge):
        f.lengths_of([b"a"] * 4, bodies, None)


# Pieces of buffers

SPANS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=30)


@settings(deadline=None)
@given(st.binary(max_size=400), SPANS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_checksums_are_those_of_zlib(way: tuple[str, ...], data: bytes, spans: list[tuple[int, int]]) -> None:
    starts, ends = (column(list(ends)) for ends in zip(*spans, strict=True))
    with with_kernel(*way):
        sums = checksums(memoryview(data), starts, ends)
    assert list(sums) == [zlib.crc32(data[a:b]) for a, b in spans]


def test_checksums_of_all_lengths_up_to_some_kilobytes(c: ModuleType) -> None:
    data = bytes(n * n % 251 for n in range(5000))
    ends = column([*range(300), 1000, 4095, 4096, 5000])
    assert list(checksums(memoryview(data), np.zeros(len(ends), np.int64), ends)) == [zlib.crc32(data[:n]) for n in ends.tolist()]


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_pieces_are_gathered_and_woven_alike(data: bytes, draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, 40))
    parts = []
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.lists(st.integers(0, len(data)), min_size=count, max_size=count))
        alike = min(len(data) - one for one in at)
        sizes = [draw.draw(st.integers(0, len(data) - one)) for one in at] if draw.draw(st.booleans()) else alike
        parts.append(Spans(data, column(at), sizes if isinstance(sizes, int) else column(sizes)))
    lengths = [np.broadcast_to(part.sizes, count).astype(np.int64) for part in parts]
    with with_kernel():
        woven, ends = join(parts)
        pieces = [gather(data, part.at, size) for part, size in zip(parts, lengths, strict=True)]
    other, other_ends = reference(join, parts)
    assert (bytes(woven), ends.tolist()) == (bytes(other), np.broadcast_to(other_ends, count).tolist())
    assert pieces == [
        b"".join(data[a : a + n] for a, n in zip(part.at.tolist(), size.tolist(), strict=True))
        for part, size in zip(parts, lengths, strict=True)
    ]


# Ids


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=50), min_size=1, max_size=5))
def test_a_hash_map_is_filled_alike(batches: list[list[int]]) -> None:
    hashes = np.array([n << 40 | n % 5 for batch in batches for n in batch], np.uint64)
    hashes[hashes == 0] = 0
    wanted = np.unique(hashes[hashes > 0])

    def fill() -> object:
        ids, first = IdMap(), 0
        for batch in batches:
            ids.add(hashes, first, first + len(batch))
            first += len(batch)
        older = {one: sorted({*ordinals, ids.find(hashes, one) or 0}) for one, ordinals in ids.older.items()}
        return [ids.find_many(hashes, wanted).tolist(), ids.find_many(hashes, wanted + np.uint64(7)).tolist(), older]

    with with_kernel():
        by_kernel = fill()
    assert by_kernel == reference(fill)


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(max_size=8), st.text("ab-/ ~\x7f\0é", max_size=250), st.none()), max_size=5))
def test_plain_ids_are_valid_ids(ids: list[str | None]) -> None:
    plain = built().are_plain_ids(ids, ID_BYTES_MAX)
    is_ascii = all(id_ is not None and id_.isascii() for id_ in ids)
    try:
        reference(check_ids, ids)
        assert plain == is_ascii
    except InvalidId:
        assert not plain


def test_sizes_of_bodies(c: ModuleType) -> None:
    assert c.sizes([b"", b"abc", b"d"]) == (4, 3)
    assert c.sizes([]) is None
    assert c.sizes([b"", "text"]) is None
    assert c.sizes((b"",)) is None
    assert c.sizes([b"", bytearray(1)]) is None
    assert BODY_BYTES_MAX < 1 << 62, "a sum of sizes cannot overflow"


# Anything else is left to the reference


def odd_calls() -> list[tuple[str, tuple[Any, ...]]]:
    """Arguments that no caller should give: of other types and lengths, out of range, or not in a row."""
    ids, bodies, due, flags = [b"a"] * 4, [b"b"] * 4, [1] * 4, [0] * 4
    slots, hashes, entries = np.zeros(8, np.uint32), np.arange(1, 9, dtype=np.uint64), np.arange(1, 5, dtype=np.uint32)
    out, data = bytearray(400), bytes(50)
    good = [out, 0, 0, 4, ids, bodies, due, 1, 0, flags, None]
    instead: list[tuple[int, Any]] = [
        *((0, into) for into in (bytes(400), bytearray(5), bytearray(0), "x", None, bytearray(399)[::2])),
        *((1, at) for at in (-1, 401, 1 << 62)),
        *((2, first) for first in (-1, -(1 << 62))),
        *((3, last) for last in (5, 1 << 62)),
        *(
            (4, odd)
            for odd in (["a"] * 4, [None] * 4, [b"a"], (b"a",) * 4, None, np.zeros((4, 3), np.int64), np.zeros(12, np.uint8))
        ),
        *((5, odd) for odd in ([memoryview(b"b")] * 4, [b"b"] * 3, np.zeros((2, 5), np.uint8))),
        *((6, odd) for odd in ([1.5] * 4, [1 << 64] * 4, [True] * 4, np.zeros(4, np.int16), np.zeros(8, np.int64)[::2], "abcd")),
        *((7, seq) for seq in (((1 << 63) - 1),)),
        *((8, ttr) for ttr in (-1, 1 << 32, 1 << 64, [0] * 3, [-1] * 4)),
        *((9, odd) for odd in ([-1] * 4, [1 << 32] * 4, np.zeros(3, np.uint32), None)),
        *((10, odd) for odd in ([b"e"] * 3, ["e"] * 4, 5)),
    ]
    calls: list[tuple[str, tuple[Any, ...]]] = [("encode", (*good[:i], odd, *good[i + 1 :])) for i, odd in instead]
    calls += [
        ("document_lengths", given) for given in ((ids, bodies[1:], None), (ids, bodies, ids[1:]), (ids, None, None), (1, 2, 3))
    ]
    one = column([0])
    for name in ("gather", "checksums"):
        calls += [
            (name, given) for given in ((data, one, column([0, 1])), (None, one, one), (data, [0], [1]), (data[::-1], 5, one))
        ]
        calls += [(name, (data, column([-1]), one)), (name, (data, np.zeros(2, np.int32), np.zeros(2, np.int32)))]
    calls += [("gather", (data, column([at]), column([size]))) for at, size in ((50, 1), (0, 51), (1 << 62, 1 << 62), (0, -1))]
    odd_parts: list[Any] = [[], (), [1], [(data, one)], [(data, one, 51)], [(data, one, -1)], [(data, column([50]), 1)], "x"]
    odd_parts += [
        [(data, one, 1), (data, column([0, 0]), 1)],
        [(data, one, column([1, 1]))],
        [(data, one, 0)] * 33,
        [("x", one, 0)],
    ]
    calls += [("interleave", (parts,)) for parts in odd_parts]
    for name, last in (("enter", entries), ("find", hashes)):
        calls += [(name, (slots[:7], hashes, last)), (name, (slots[::2], hashes, last)), (name, (None, hashes, last))]
        calls += [
            (name, (slots, hashes.astype(np.uint32), last)),
            (name, (slots, hashes, "x")),
            (name, (slots[:0], hashes, last)),
        ]
    calls += [("enter", (bytes(slots), hashes, entries)), ("enter", (slots, hashes, hashes)), ("find", (slots, hashes, entries))]
    return [*calls, ("are_plain_ids", (("a",), 200)), ("are_plain_ids", (["\ud800"], 200)), ("are_plain_ids", (None, 200))]


@pytest.mark.parametrize("call", odd_calls(), ids=lambda call: str(call[0]))
def test_odd_arguments_are_left_to_the_reference(call: tuple[str, tuple[Any, ...]], c: ModuleType) -> None:
    assert getattr(c, call[0])(*call[1]) in (None, False)


def test_a_damaged_map_ends_with_an_error(c: ModuleType) -> None:
    full: U32 = np.full(8, 3, np.uint32)
    hashes = np.arange(1, 5, dtype=np.uint64)
    elsewhere: U32 = np.full(8, 900, np.uint32)
    for slots in (full, elsewhere):
        with pytest.raises(IndexError):
            c.find(slots, hashes, np.array([99], np.uint64))
        with pytest.raises(IndexError):
            c.enter(slots, hashes, np.array([1], np.uint32))
    for entry in (0, 5):
        with pytest.raises(IndexError):
            c.enter(np.zeros(8, np.uint32), hashes, np.array([entry], np.uint32))
    for name in ("encode", "gather", "checksums", "enter", "find", "document_lengths", "are_plain_ids"):
        with pytest.raises(TypeError):
            getattr(c, name)(1)


# The choice


def says(*command: str, **more: str) -> str:
    env = {name: text for name, text in os.environ.items() if not name.startswith("TURTLEMQ_")} | more
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_the_version_tells_of_the_kernel() -> None:
    assert json.loads(says("-m", "turtlemq", "version", "--json"))["kernel"] == kernel.status or kernel.status == "off"
    assert says("-m", "turtlemq", "--version", TURTLEMQ_KERNEL="off").endswith(
        "(kernel: off)" if (ROOT / "turtlemq/segment" / build_kernel.MODULE).exists() else "(kernel: not built)"
    )


@pytest.mark.parametrize(("version", "status"), [(0, "of another version"), (1, "compiled")])
def test_a_kernel_of_another_version_is_not_used(version: int, status: str) -> None:
    module = SimpleNamespace(VERSION=version)
    with (
        mock.patch("turtlemq.segment._kernel", module, create=True),
        mock.patch.dict(
            sys.modules,
            {"turtlemq.segment._kernel": module},
        ),
    ):
        assert kernel._load() == (module if version else None, status)


def test_the_kernel_is_of_the_version_that_is_wanted() -> None:
    assert built().VERSION == kernel._VERSION


def test_a_metric_tells_of_the_kernel(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        text = server.call("GET", "/metrics").data.decode()
    assert f'kernel="{kernel.status}"' in next(line for line in text.splitlines() if line.startswith("turtlemq_info{"))


def test_a_server_without_it_reads_the_files_of_one_with_it(tmp_path: Path) -> None:
    for way in ("on", "off"):
        with running(tmp_path / "data", TURTLEMQ_KERNEL=way) as server:
            server.call(
                "POST",
                "/v1/topics/t/messages",
                {"messages": [{"id": f"{way}-{n}", "body": "x" * n, "delay": 9e6} for n in range(99)]},
            )
    with running(tmp_path / "data", TURTLEMQ_KERNEL="off") as server:
        fetched = server.call("GET", "/v1/topics/t/messages?state=sleep&limit=500").json
        assert len(fetched["messages"]) == 198


# Building


def wheel_of(place: Path, **more: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **more}
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def test_a_wheel_built_with_a_compiler_has_the_kernel(tmp_path: Path) -> None:
    built()
    wheel = wheel_of(tmp_path / "wheel")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert f"turtlemq/segment/{build_kernel.MODULE}" in archive.namelist()
        assert "Root-Is-Purelib: false" in archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode()
    python = clean_environment(tmp_path / "clean", "numpy", "msgspec")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    program = "from turtlemq.segment import kernel; print(kernel.status)"
    assert subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True).stdout.strip() == "compiled"


@pytest.mark.parametrize("more", [{"CC": "no-such-compiler"}, {"CC": "false"}, {"TURTLEMQ_KERNEL": "off"}], ids=str)
def test_a_wheel_built_without_one_is_for_any_platform(tmp_path: Path, more: dict[str, str]) -> None:
    wheel = wheel_of(tmp_path, **more)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_a_failed_build_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    assert "no-such-compiler" in (reason_of(tmp_path, "no-such-compiler") or "")
    assert "false ends with 1" in (reason_of(tmp_path, "false") or "")
    assert list(tmp_path.iterdir()) == []


def reason_of(place: Path, compiler: str) -> str | None:
    with mock.patch.dict(os.environ, CC=compiler):
        return build_kernel.build(place)


# Sanitizers


def library(name: str) -> str:
    done = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(OPTIONS in os.environ, reason="this is the run under the sanitizers")
def test_all_this_under_the_sanitizers(tmp_path: Path) -> None:
    built()
    asan = library("libasan.so")
    if not os.path.isabs(asan) or build_kernel.build(tmp_path, SANITIZED.split()):
        pytest.skip("this compiler has no sanitizers")
    env = {
        **os.environ,
        OPTIONS: SANITIZED,
        "LD_PRELOAD": f"{asan} {library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees little at its end
        "PYTHONMALLOC": "malloc",  # so that the end of each object is known
    }
    chosen = "documents or checksums or pieces or map or ids or sizes or odd or too_long"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", f"({chosen}) and not sanitizers"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
