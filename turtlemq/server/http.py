"""Requests in, answers out: reading bodies within their limits, typed decoding, and the one shape of every error."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from turtlemq.engine import GROUP, Engine
from turtlemq.errors import InvalidArgument, TooLarge, TurtleError
from turtlemq.index.validate import check_ids
from turtlemq.server.aiohttp_internals import HttpProcessingError
from turtlemq.server.auth import name_of
from turtlemq.server.config import Config
from turtlemq.server.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidJson,
    RequestTimeout,
    Unauthenticated,
    UnsupportedMediaType,
)
from turtlemq.server.incoming.decompress import ENCODINGS, unpacked
from turtlemq.server.service import Service
from turtlemq.settings import Settings
from turtlemq.storage import names

T = TypeVar("T")

SERVICE = web.AppKey("service", Service)
CONFIG = web.AppKey("config", Config)
BUDGET = "X-Turtlemq-Budget-Ms"
DEADLINE = "deadline"
HELD = "held"
JSON_TYPES = ("application/json", "")
SLOWEST = 64 << 10  # bytes a second: a body may take body_timeout_s, and a second more for each so many that came
_INDEX = re.compile(r"\[(\d+)\]")
encode = msgspec.json.Encoder().encode


# Out


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=encode(value), status=status, content_type="application/json")


def refusal(error: TurtleError, status: int | None = None) -> web.Response:
    """An error as the contract shapes it."""
    body = {"error": {"code": error.code, "message": str(error), **error.details}}
    response = answer(body, status or error.status)
    if isinstance(error, Unauthenticated):
        response.headers["WWW-Authenticate"] = 'Bearer realm="turtlemq"'
    elif isinstance(error, RequestTimeout):
        response.force_close()
    if "retry_after_ms" in error.details:
        response.headers["Retry-After"] = str(-(-int(str(error.details["retry_after_ms"])) // 1000))
    return response


# In


async def read(request: web.Request, types: tuple[str, ...] = JSON_TYPES) -> bytes:
    """The body, unpacked, if it is of one of these types and not too large, and the caller still has time."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    packed = request.headers.get("Content-Encoding", "").strip().lower()
    if packed not in ENCODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {packed!r:.80} is not understood; send zstd, gzip or the plain bytes")
    if kind not in types and request.can_read_body:
        wanted = ", ".join(name for name in types if name)
        raise UnsupportedMediaType(f"Content-Type {kind!r:.80} is not understood here; send {wanted} (curl: --json, or -H)")
    data = await _received(request)
    if packed not in ("", "identity"):
        data = await unpacked(data, packed, request.app[CONFIG].max_body_bytes, partial(_hold, request))
    check_deadline(request)
    return data


async def _received(request: web.Request) -> bytes:
    """The bytes of the body, if they are not too many and come fast enough. Most have come already, with the head."""
    content, config = request.content, request.app[CONFIG]
    if (request.content_length or 0) > config.max_body_bytes:
        raise TooLarge(f"a request body has at most {config.max_body_bytes:,} bytes")
    try:
        if content.is_eof() and not content.exception():
            data = content.read_nowait(-1)
            _hold(request, len(data))
        else:
            data = await _arriving(request, config)
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise InvalidArgument(f"the body cannot be read: {error}") from None
    if len(data) > config.max_body_bytes:
        raise TooLarge(f"a request body has at most {config.max_body_bytes:,} bytes")
    return data


def _hold(request: web.Request, count: int) -> None:
    """Count bytes of this request until it is answered."""
    request.app[SERVICE].flow.bytes_held.take(count)
    request[HELD] = request.get(HELD, 0) + count


def let_go(request: web.Request) -> None:
    """The request was answered: its bytes count no more."""
    request.app[SERVICE].flow.bytes_held.give(request.get(HELD, 0))


async def _arriving(request: web.Request, config: Config) -> bytes:
    """The body, as it comes. A client that sends a byte now and then is not waited for."""
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
        if clock.when() == budget:  # not by the time: a clock of the loop may ring a little early
            raise DeadlineExceeded from None
        content.feed_eof()  # the rest is not waited for either
        raise RequestTimeout(f"the body came too slowly: {size:,} bytes in {config.body_timeout_s:g} s and more") from None
    return b"".join(parts)


def refuse_other_sites(request: web.Request) -> None:
    """Browsers say where a page is from that sends something; other clients say nothing. A page of ours has our own address."""
    origin = request.headers.get("Origin")
    if origin is not None and request.method not in ("GET", "HEAD") and origin.partition("://")[2] != request.host:
        raise Forbidden


def set_deadline(request: web.Request) -> None:
    """Note until when the caller waits."""
    text = request.headers.get(BUDGET)
    if text is None:
        return
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InvalidArgument(f"{BUDGET} is a whole number of milliseconds, not {text!r:.80}")
    request[DEADLINE] = asyncio.get_running_loop().time() + int(text) / 1000
    if int(text) == 0:
        raise DeadlineExceeded


def check_deadline(request: web.Request) -> None:
    """Refuse to begin what its caller does not wait for any more."""
    if DEADLINE in request and time_left(request) <= 0:
        raise DeadlineExceeded


def time_left(request: web.Request) -> float:
    """Seconds until the caller gives up; infinite if it did not say."""
    return float(request.get(DEADLINE, float("inf"))) - asyncio.get_running_loop().time()


def check_text(data: bytes) -> None:
    """JSON is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not UTF-8 text (byte {error.start})") from None


def decode(data: bytes, kind: type[T], error: type[TurtleError] = InvalidArgument) -> T:
    """The typed value in a JSON body; an empty body is an empty object. What does not fit raises `error`, with its index."""
    check_text(data)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as met:
        wrong = whole_or(data, met)
        if not isinstance(wrong, msgspec.ValidationError):
            raise InvalidJson(str(wrong)) from None
        raise error(str(wrong), **index_in(str(wrong))) from None


def whole_or(data: bytes, wrong: Exception) -> Exception:
    """`wrong`, said of JSON that does not fit; but if it is not even JSON, what is wrong with that."""
    try:
        msgspec.json.decode(data or b"{}", type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as broken:
        return broken
    return wrong


async def read_as(request: web.Request, kind: type[T]) -> T:
    """`read`, then `decode`."""
    return decode(await read(request), kind)


def index_in(message: str) -> dict[str, int]:
    """Which item a message of msgspec is about.

    >>> index_in("Expected `str`, got `int` - at `$.messages[3].id`")
    {'index': 3}
    """
    found = _INDEX.search(message.rpartition(" - at ")[2])
    return {"index": int(found[1])} if found else {}


def query(request: web.Request, kind: type[T]) -> T:
    """The typed query string."""
    given = {name: value for name, value in request.query.items() if value != ""}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as wrong:
        raise InvalidArgument(f"query: {wrong}") from None


# What the path names


def engine_of(request: web.Request) -> Engine:
    """The engine, if it serves."""
    return request.app[SERVICE].engine


def topic_of(request: web.Request, use: bool = False) -> str:
    """The topic of the path, which must be there; with `use`, one that is not appears, where the server allows that."""
    name = names.check_topic(request.match_info["topic"])
    engine = engine_of(request)
    if name not in engine.topics and not (use and request.app[CONFIG].auto_create_topics):
        engine.topic(name)  # it says why not
    check_topics(request, name)
    return name


def check_topics(request: web.Request, name: str) -> None:
    """A topic that is there, or one for which there is room."""
    topics, most = engine_of(request).topics, request.app[CONFIG].max_topics
    if name not in topics and len(topics) >= most:
        raise InvalidArgument(f"there are {len(topics):,} topics already, as many as max_topics allows; delete some first")


def settings_of(request: web.Request, topic: str) -> Settings:
    """The settings of a topic, or those that it would have."""
    engine = engine_of(request)
    found = engine.topics.get(topic)
    return engine.settings if found is None else found.settings


def throttle(request: web.Request, topic: str, count: int) -> None:
    """Let so many messages of this client into a topic, or raise `RateLimited`. Free where no rate is set."""
    flow, settings = request.app[SERVICE].flow, settings_of(request, topic)
    if settings.rate_produce_per_s or flow.client_rate:
        flow.produce(topic, settings, name_of(request), count, asyncio.get_running_loop().time())


def group_of(request: web.Request, use: bool = False) -> str:
    """The group of the path, or the default one; with `use`, one that is there or for which there is room."""
    name = names.check_group(request.match_info.get("group", GROUP))
    topic = engine_of(request).topics.get(request.match_info["topic"]) if use else None
    if topic is not None and topic.group_count >= request.app[CONFIG].max_groups and not topic.has_group(name):
        raise InvalidArgument(f"the topic has {topic.group_count:,} groups already, as many as max_groups allows")
    return name


def id_of(request: web.Request) -> str:
    """The message id of the path."""
    id_ = request.match_info["id"]
    check_ids([id_])
    return id_
