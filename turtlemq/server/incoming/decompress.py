"""Decompression of request bodies: gzip, deflate and zstd, a slice at a time.

Slices keep a compression bomb within the limit, and let other requests run in between. A body may consist of several members
(gzip) or frames (zstd); a truncated one is refused as a whole. Frames of zstd may ask for a window of 8 MiB (RFC 9659).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import cast

from zlib_ng import zlib_ng

from turtlemq.errors import InvalidArgument, TooLarge

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FEED_BYTES = 64 << 10  # compressed bytes at once: the library copies the part that it does not use
SLICE_BYTES = 1 << 20  # decompressed bytes at once, about a millisecond
MEMBERS_MAX = 10_000  # each costs as much as a small body
WINDOW_LOG_MAX = 23
_BROKEN = (cast(type[Exception], zlib_ng.error), zstd.ZstdError, EOFError)


def _limited() -> Iterator[None]:
    """One turn for each member or frame; raises if there are too many."""
    yield from repeat(None, MEMBERS_MAX)
    raise InvalidArgument(f"the body cannot be unpacked: it is put together from more than {MEMBERS_MAX:,} parts")


def _inflated(data: bytes, wbits: int) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    for _ in _limited():
        if at >= len(view):
            return
        member = zlib_ng.decompressobj(wbits)
        while not member.eof:
            feed: bytes | memoryview = member.unconsumed_tail
            if not feed:
                feed = view[at : at + FEED_BYTES]
                at += len(feed)
            piece = member.decompress(feed, SLICE_BYTES)
            if not feed and not piece and not member.eof:
                raise InvalidArgument("the body cannot be unpacked: its end is missing")
            yield piece
        at -= len(member.unused_data)


def _gunzip(data: bytes) -> Iterator[bytes]:
    return _inflated(data, 31)


def _inflate(data: bytes) -> Iterator[bytes]:
    """Deflate with the header of zlib, as the standard says, or without, as some clients send it."""
    return _inflated(data, 15 if data[:1] and data[0] & 15 == 8 else -15)


def _unzstd(data: bytes) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    for _ in _limited():
        if at >= len(view):
            return
        frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
        while not frame.eof:
            feed = view[at : at + FEED_BYTES] if frame.needs_input else b""
            at += len(feed)
            if frame.needs_input and not feed:
                raise InvalidArgument("the body cannot be unpacked: its end is missing")
            yield frame.decompress(feed, SLICE_BYTES)
        at -= len(frame.unused_data)


_DECOMPRESSORS: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gunzip, "deflate": _inflate, "zstd": _unzstd}
ENCODINGS = ("", "identity", *_DECOMPRESSORS)


async def decompressed(data: bytes, encoding: str, limit: int, hold: Callable[[int], None]) -> bytes:
    """The decompressed body; raises `TooLarge` beyond `limit` bytes. `hold` gets the size of each slice, and may raise. The event
    loop runs other tasks between slices."""
    out: list[bytes] = []
    size = 0
    try:
        for count, piece in enumerate(_DECOMPRESSORS[encoding](data)):
            size += len(piece)
            if size > limit:
                raise TooLarge(f"a request body has at most {limit:,} bytes; this one has more when it is unpacked")
            hold(len(piece))
            out.append(piece)
            if len(piece) >= SLICE_BYTES // 2 or count & 63 == 63:
                await asyncio.sleep(0)
    except _BROKEN as error:
        raise InvalidArgument(f"the body cannot be unpacked: {error}") from None
    return b"".join(out)
