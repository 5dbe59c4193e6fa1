"""Reading append-only files forward: their documents from a position on, and the position of the first document of a time.

A position counts the bytes of all files of a log since it began: the base of a file, and the place in it. So it stays valid when
files are rolled or removed. Damaged bytes are passed over. Pure: files are given as mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from turtlemq.segment import format as f

NEAR_BYTES = 64 << 10  # a bisection ends when so few bytes are left
_STEP_BYTES = 4 << 10  # that are read at once for the next document
_SEARCH_BYTES = 256 << 10  # that one step searches: 1 ms
_LENGTH, _MARK_AT = Struct("<i"), 4  # the first field of a document, and the position of `MARK` behind it


class Found(NamedTuple):
    """An undamaged document of a file, and where it stands."""

    at: int
    due_ms: int
    seq: int
    raw: bytes

    @property
    def end(self) -> int:
        return self.at + len(self.raw)


class File(NamedTuple):
    """One file of a log: its base, where its documents begin and end, and its bytes."""

    base: int
    start: int
    end: int
    open: Callable[[], memoryview]


def next_document(view: memoryview, at: int, end: int) -> Found | None:
    """The first undamaged document at or behind `at`. None if there is none before `end`."""
    while at < end:
        data = bytes(view[at : min(at + _STEP_BYTES, end)])
        mark = data.find(f.MARK, _MARK_AT)
        while mark >= 0:
            start, room = mark - _MARK_AT, len(data)
            length = _LENGTH.unpack_from(data, start)[0]
            if start + length > room and at + start + length <= end and length <= f.DOCUMENT_BYTES_MAX:
                data = bytes(view[at : at + start + length])
            if 0 < length <= len(data) - start and (read := f.read_one(data, start, start + length)) is not None:
                return Found(at + start, read[0], read[1], read[3])
            mark = data.find(f.MARK, mark + 1)
        at += max(1, len(data) - len(f.MARK) - _MARK_AT)
    return None


def first_from(view: memoryview, first: int, end: int, is_before: Callable[[Found], bool]) -> int:
    """A position in a file before all documents that are not `is_before`, with few others behind it. Required: no document that
    is stands behind one that is not. 20 reads of a file with a gigabyte."""
    low, high = first, end
    while high - low > NEAR_BYTES:
        middle = (low + high) // 2
        found = next_document(view, middle, high)
        if found is not None and is_before(found):
            low = found.at
        else:
            high = middle
    return low


def documents_from(files: Sequence[File], position: int) -> Iterator[tuple[int, bytes]]:
    """The documents of files from a position on, oldest first, each with the position behind it. Required: bases rise."""
    for i, (base, start, end, open_) in enumerate(files):
        at = max(start, position - base)
        if at >= end or (i + 1 < len(files) and files[i + 1].base <= position):
            continue
        view = open_()
        while at < end and (found := next_document(view, at, end)) is not None:
            yield base + found.end, found.raw
            at = found.end


def documents_with(files: Sequence[File], position: int, end: int, parts: Sequence[bytes]) -> Iterator[tuple[int, bytes] | None]:
    """The documents in [position, end) that contain one of `parts`, oldest first, each with its position; None between steps.
    Required: bases rise. 4 ms for a megabyte and part: no other document is decoded."""
    overlap = max(map(len, parts)) - 1
    for base, start, size, open_ in files:
        at, last = max(start, position - base), min(size, end - base)
        view = open_() if at < last else memoryview(b"")
        while at < last:
            data = bytes(view[at : min(at + _SEARCH_BYTES + overlap, last)])
            hit = min((found for part in parts if (found := data.find(part)) >= 0), default=-1)
            around = None if hit < 0 else _around(view, start, at + hit, last)
            if around is not None and around.at >= position - base:
                yield base + around.at, around.raw
            at += len(data) - overlap if hit < 0 else hit + 1
            at = at if around is None else max(at, around.end)
            at = last if len(data) <= overlap else at
            yield None


def _around(view: memoryview, first: int, at: int, end: int) -> Found | None:
    """The undamaged document with the byte at `at`. None: the bytes around it are damaged."""
    size = _STEP_BYTES
    while True:
        low = max(first, at - size)
        data = bytes(view[low:at])
        mark = data.rfind(f.MARK)
        while mark >= _MARK_AT:
            begin = low + mark - _MARK_AT
            stop = min(end, begin + f.DOCUMENT_BYTES_MAX)
            length = _LENGTH.unpack_from(view, begin)[0]
            if at - begin < length <= stop - begin:
                raw = bytes(view[begin : begin + length])
                if (read := f.read_one(raw, 0, length)) is not None:
                    return Found(begin, read[0], read[1], read[3])
            mark = data.rfind(f.MARK, 0, mark)
        if low == first or size > f.DOCUMENT_BYTES_MAX:
            return None
        size *= 16


def lacks(files: Sequence[File], position: int) -> bool:
    """Whether documents behind a position are in no file any more."""
    before = [file for file in files if file.base <= position]
    if before:
        return position > before[-1].base + before[-1].end
    return bool(files) and position < files[0].base
