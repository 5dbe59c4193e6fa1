"""Reading request bodies: within their limits of size, time and memory, decompressed, and decoded into a type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from turtlemq.errors import InvalidArgument, TooLarge, TurtleError
from turtlemq.server.config import Config
from turtlemq.server.errors import DeadlineExceeded, Overloaded, RequestTimeout, UnsupportedMediaType
from turtlemq.server.incoming.decode import decode
from turtlemq.server.incoming.decompress import ENCODINGS, decompressed
from turtlemq.server.media_types import JSON
from turtlemq.server.request import CONFIG, DEADLINE, SERVICE, check_deadline

T = TypeVar("T")

JSON_TYPES = (JSON, "")
HELD = "held"  # bytes of a request that count against the byte budget
KEPT = "kept"  # the body of a request that was read before its handler runs
_LARGE_BYTES = 256 << 10  # of a body that is decoded on a thread
_LARGE_BODY = 4 << 20  # of a body whose pieces are joined on a thread
SLOWEST = 64 << 10  # bytes a second: a body may take body_timeout_s, and a second more for each SLOWEST bytes


async def read(request: web.Request, types: tuple[str, ...] = JSON_TYPES) -> bytes:
    """The body, decompressed. Raises if its type is none of `types`, it is too large or too slow, or the deadline has passed."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r:.80} is not understood; send zstd, gzip or the plain bytes")
    if kind not in types and request.can_read_body:
        wanted = ", ".join(name for name in types if name)
        raise UnsupportedMediaType(f"Content-Type {kind!r:.80} is not understood here; send {wanted} (curl: --json, or -H)")
    data = await _received(request)
    if encoding not in ("", "identity"):
        data = await decompressed(data, encoding, request.app[CONFIG].max_body_bytes, partial(_hold, request))
    check_deadline(request)
    return data


async def keep(request: web.Request) -> bytes:
    """The bytes of the body as they were sent, read before the handler runs: `read` gives them again."""
    if KEPT not in request:
        request[KEPT] = await _received(request)
    return bytes(request[KEPT])


async def _received(request: web.Request) -> bytes:
    """The bytes of the body as they were sent. Small bodies have arrived together with the head."""
    if KEPT in request:
        return bytes(request[KEPT])
    content, config = request.content, request.app[CONFIG]
    if (request.content_length or 0) > config.max_body_bytes:
        raise TooLarge(f"a request body has at most {config.max_body_bytes:,} bytes")
    try:
        if content.is_eof() and not content.exception():
            data = content.read_nowait(-1)
            _hold(request, len(data))
        else:
            data = await _arriving(request, config)
    except Exception as error:
        if error is not content.exception():  # of a stream that is broken
            raise
        raise InvalidArgument(f"the body cannot be read: {error}") from None
    if len(data) > config.max_body_bytes:
        raise TooLarge(f"a request body has at most {config.max_body_bytes:,} bytes")
    return data


def _hold(request: web.Request, count: int) -> None:
    """Count bytes of this request against the byte budget, until it is answered."""
    service, own = request.app[SERVICE], request.get(HELD, 0)
    tenants, budget = service.tenants, service.flow.request_bytes
    budget.take(count)
    if tenants is not None:
        try:
            tenants.hold(request.match_info.get("topic", ""), count, own, budget.bytes - count)
        except Overloaded:
            budget.give(count)
            raise
    request[HELD] = own + count


def release(request: web.Request) -> None:
    """Release the counted bytes of a request that was answered."""
    service, own = request.app[SERVICE], request.get(HELD, 0)
    service.flow.request_bytes.give(own)
    if own and service.tenants is not None:
        service.tenants.release(request.match_info.get("topic", ""), own)


async def _arriving(request: web.Request, config: Config) -> bytes:
    """The body, read while it arrives. Raises if the client sends more slowly than SLOWEST allows, or the deadline passes."""
    content, parts, size = request.content, [], 0
    end = asyncio.get_running_loop().time() + config.body_timeout_s
    budget = float(request.get(DEADLINE, float("inf")))
    clock = asyncio.timeout_at(min(end, budget))
    try:
        async with clock:
            while size <= config.max_body_bytes and (part := await content.readany()):
                _hold(request, len(part))
                parts.append(part)
                size += len(part)
                clock.reschedule(min(end + size / SLOWEST, budget))
    except TimeoutError:
        if clock.when() == budget:  # the time itself would not tell: timers of the loop may ring a little early
            raise DeadlineExceeded from None
        content.feed_eof()  # the rest of the body is not read either
        raise RequestTimeout(f"the body came too slowly: {size:,} bytes in {config.body_timeout_s:g} s and more") from None
    return b"".join(parts) if size < _LARGE_BODY else await asyncio.to_thread(b"".join, parts)  # 64 MiB: 50 ms


async def read_as(request: web.Request, kind: type[T], error: type[TurtleError] = InvalidArgument) -> T:
    """The body as a type; raises `error` if it does not fit. A large one is decoded on a thread: 100,000 ids take 50 ms."""
    return await read_with(request, lambda data: decode(data, kind, error))


async def read_with(request: web.Request, decoded: Callable[[bytes], T]) -> T:
    """The body, decoded by a function, which is called on a thread if the body is large."""
    data = await read(request)
    return decoded(data) if len(data) < _LARGE_BYTES else await asyncio.to_thread(decoded, data)
