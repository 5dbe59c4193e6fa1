"""Pieces of bytes of many messages at once: cut, chosen, made from numbers, and joined message by message, with numpy.

`fetch` builds answers from them. A `Spans` has one piece for each message; `join` copies all pieces into one buffer.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from turtlemq import small_batches
from turtlemq.model import I64, U8
from turtlemq.segment import kernel
from turtlemq.segment.buffers import Buffer, windows


@dataclass(slots=True)
class Spans:
    """A piece of `buffer` for each message, which may be empty. `sizes` is one number if all have the same size."""

    buffer: Buffer
    at: I64
    sizes: I64 | int


def spans_of(buffer: Buffer, at: I64, sizes: I64) -> Spans:
    """Pieces of one buffer. Requires: at least one message."""
    first = int(sizes[0])
    return Spans(buffer, at, first if (sizes == first).all() else sizes)


def rows_of(matrix: U8) -> Spans:
    """The rows of a matrix, one for each message."""
    count, width = matrix.shape
    return Spans(matrix.reshape(-1).data, np.arange(0, count * width, width), width)


def choice(texts: Sequence[bytes], which: I64) -> Spans:
    """One of a few texts for each message: texts[which[i]]."""
    if (which == which[0]).all():
        return Spans(texts[int(which[0])], np.zeros(len(which), np.int64), len(texts[int(which[0])]))
    sizes = np.array([len(text) for text in texts])
    return Spans(b"".join(texts), (np.cumsum(sizes) - sizes)[which], sizes[which])


def listed(texts: list[bytes]) -> Spans:
    """A text of its own for each message."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    return spans_of(b"".join(texts), np.cumsum(sizes) - sizes, sizes)


def join(parts: Sequence[Spans]) -> tuple[Buffer, I64]:
    """All parts of the first message, then all of the second, …; and the position where each message ends."""
    if kernel.compiled is not None:
        made = kernel.compiled.interleave([(part.buffer, part.at, part.sizes) for part in parts])
        if made is not None:
            return made[0], np.frombuffer(made[1], np.int64)
    many = [_has_many_widths(part.sizes) for part in parts]
    if not any(many):
        out = _copy(parts)
        return out.buffer, out.at + out.sizes
    joined: list[Spans] = []
    for is_many, run in groupby(zip(many, parts, strict=True), key=itemgetter(0)):
        neighbours = [part for _, part in run]
        joined += neighbours if is_many or len(neighbours) == 1 else [_copy(neighbours)]
    pieces: list[Buffer] = [b""] * (len(joined) * len(parts[0].at))
    for i, part in enumerate(joined):
        pieces[i :: len(joined)] = _split(part)
    return b"".join(pieces), np.cumsum(sum(part.sizes for part in parts))


def _has_many_widths(sizes: I64 | int) -> bool:
    """Whether sizes differ so much that copying each piece alone is faster than copying width by width."""
    return not isinstance(sizes, int) and bool(np.count_nonzero(np.bincount(sizes)) * small_batches.EQUAL_WIDTHS > len(sizes))


def _copy(parts: Sequence[Spans]) -> Spans:
    """Copy part by part and width by width, all messages of one width at once."""
    count, sizes = len(parts[0].at), sum(part.sizes for part in parts)
    if isinstance(sizes, int):
        return _side_by_side(parts, count, sizes)
    at = np.cumsum(sizes) - sizes
    data = bytearray(int(at[-1] + sizes[-1]))
    out = Spans(data, at, sizes)
    for part in parts:
        if isinstance(part.sizes, int):
            if part.sizes:
                windows(data, part.sizes)[at] = windows(part.buffer, part.sizes)[part.at]
        else:
            for width in np.flatnonzero(np.bincount(part.sizes)[1:]).tolist():
                which = np.flatnonzero(part.sizes == width + 1)
                windows(data, width + 1)[at[which]] = windows(part.buffer, width + 1)[part.at[which]]
        at = at + part.sizes
    return out


def _side_by_side(parts: Sequence[Spans], count: int, width: int) -> Spans:
    """Copy parts of one width each, as the columns of a matrix. Pieces at equal distances need not be gathered first."""
    data, at = bytearray(count * width), 0
    for part in parts:
        assert isinstance(part.sizes, int), "of one width"
        size, first, step = part.sizes, int(part.at[0]), int(part.at[1] - part.at[0]) if count > 1 else 0
        if not size:
            continue
        column = np.ndarray((count,), f"V{size}", data, at, (width,))  # whole pieces as items are copied faster than bytes
        if (part.at[1:] - part.at[:-1] == step).all():
            column[:] = np.ndarray((count,), f"V{size}", part.buffer, first, (step,))
        else:
            column[:] = windows(part.buffer, size)[part.at]
        at += size
    return Spans(data, np.arange(count) * width, width)


def _split(part: Spans) -> list[Buffer]:
    """The pieces as a list. 0.04 µs each where all have one width, 0.1 µs otherwise."""
    buffer = part.buffer
    if isinstance(part.sizes, int):
        pieces: list[Buffer] = windows(buffer, part.sizes)[part.at].tolist() if part.sizes else [b""] * len(part.at)
        return pieces
    return [buffer[a:b] for a, b in zip(part.at.tolist(), (part.at + part.sizes).tolist(), strict=True)]


def numbers(columns: Sequence[tuple[bytes, I64]], end: bytes) -> Spans:
    """For each message the numbers of its row, each behind its text, and `end` behind all of them."""
    digits = [(text, _digits(values)) for text, values in columns]
    blank = b"".join(text + (value if isinstance(value, bytes) else bytes(value.shape[1])) for text, value in digits) + end
    rows = np.empty((len(columns[0][1]), len(blank)), np.uint8)
    rows[:] = np.frombuffer(blank, np.uint8)
    at = 0
    for text, value in digits:
        at += len(text)
        if isinstance(value, bytes):
            at += len(value)
        else:
            rows[:, at : at + value.shape[1]] = value
            at += value.shape[1]
    return rows_of(rows)


_FOUR_DIGITS = np.frombuffer(b"".join(b"%04d" % n for n in range(10_000)), "<u4")
_DIGITS_MAX = 16


def _digits(values: I64) -> U8 | bytes:
    """Numbers from 0 on as text: a row for each, shorter ones padded with blanks; one text if all are equal.

    >>> [bytes(row) for row in _digits(np.array([7, 1234567890123, 0]))]
    [b'            7', b'1234567890123', b'            0']
    """
    first, last = int(values.min()), int(values.max())
    if first == last:
        return b"%d" % last
    words = np.empty((len(values), _DIGITS_MAX // 4), "<u4")
    rest = values
    for i in range(_DIGITS_MAX // 4 - 1, -1, -1):
        more = rest // 10_000
        words[:, i] = _FOUR_DIGITS[rest - more * 10_000]
        rest = more
    width = len(str(last))
    text = words.view(np.uint8)[:, _DIGITS_MAX - width :]
    if len(str(first)) < width:
        blank = np.logical_and.accumulate(text == ord("0"), axis=1)
        blank[:, -1] = False
        text[blank] = ord(" ")
    return text


def base64_of(bodies: Spans) -> Spans:
    """Base64 of all bodies in one call: each is padded to a multiple of three bytes, and `=` replaces the padding afterwards."""
    sizes = np.broadcast_to(bodies.sizes, len(bodies.at))
    short = -sizes % 3
    filled, ends = join((bodies, spans_of(b"\0\0", np.zeros(len(short), np.int64), short)))
    text = bytearray(b2a_base64(filled, newline=False))
    letters = np.frombuffer(text, np.uint8)
    ends = ends // 3 * 4
    for missing in (1, 2):
        letters[ends[short >= missing] - missing] = ord("=")
    sizes = (sizes + short) // 3 * 4
    return spans_of(text, ends - sizes, sizes)
