"""Packed request bodies: gzip, deflate and zstd, unpacked a slice at a time so that a small bomb stays small and nobody waits.

A body may hold several members or frames one behind the other, as both formats allow, but it must be whole: of one that was cut
off nothing is taken. Frames of zstd may ask for a window of 8 MiB, as RFC 9659 has it for HTTP.
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

FEED_BYTES = 64 << 10  # packed bytes at once: what is left over of them is copied
SLICE_BYTES = 1 << 20  # unpacked bytes at once, about a millisecond
MEMBERS_MAX = 10_000  # each costs as much as a small body
WINDOW_LOG_MAX = 23
_BROKEN = (cast(type[Exception], zlib_ng.error), zstd.ZstdError, EOFError)


def _members() -> Iterator[None]:
    yield from repeat(None, MEMBERS_MAX)
    raise InvalidArgument(f"the body cannot be unpacked: it is put together from more than {MEMBERS_MAX:,} parts")


def _inflated(data: bytes, wbits: int) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    for _ in _members():
        if at >= len(view):
            return
        one = zlib_ng.decompressobj(wbits)
        while not one.eof:
            feed: bytes | memoryview = one.unconsumed_tail
            if not feed:
                feed = view[at : at + FEED_BYTES]
                at += len(feed)
            piece = one.decompress(feed, SLICE_BYTES)
            if not feed and not piece and not one.eof:
                raise InvalidArgument("the body cannot be unpacked: its end is missing")
            yield piece
        at -= len(one.unused_data)


def _gunzip(data: bytes) -> Iterator[bytes]:
    return _inflated(data, 31)


def _inflate(data: bytes) -> Iterator[bytes]:
    """With the head of zlib, as the standard says, or bare, as some send it."""
    return _inflated(data, 15 if data[:1] and data[0] & 15 == 8 else -15)


def _unzstd(data: bytes) -> Iterator[bytes]:
    view, at = memoryview(data), 0
    for _ in _members():
        if at >= len(view):
            return
        one = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
        while not one.eof:
            feed = view[at : at + FEED_BYTES] if one.needs_input else b""
            at += len(feed)
            if one.needs_input and not feed:
                raise InvalidArgument("the body cannot be unpacked: its end is missing")
            yield one.decompress(feed, SLICE_BYTES)
        at -= len(one.unused_data)


_HOW: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gunzip, "deflate": _inflate, "zstd": _unzstd}
ENCODINGS = ("", "identity", *_HOW)


async def decompressed(data: bytes, how: str, limit: int, hold: Callable[[int], None]) -> bytes:
    """The bytes that were packed, at most `limit`; `hold` is told of each slice, and may refuse. Others get their turns."""
    out: list[bytes] = []
    size = 0
    try:
        for count, piece in enumerate(_HOW[how](data)):
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
