"""Requests in, answers out: reading bodies within their limits, typed decoding, and the one shape of every error."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from turtlemq.engine import GROUP, Engine
from turtlemq.errors import InvalidArgument, TooLarge, TurtleError, UnknownTopic
from turtlemq.index.limits import check_ids
from turtlemq.segment import names
from turtlemq.server.config import Config
from turtlemq.server.errors import DeadlineExceeded, Forbidden, InvalidJson, UnsupportedMediaType
from turtlemq.server.loop import Service

T = TypeVar("T")

SERVICE = web.AppKey("service", Service)
CONFIG = web.AppKey("config", Config)
BUDGET = "X-Turtlemq-Budget-Ms"
DEADLINE = "deadline"
JSON_TYPES = ("application/json", "")
ENCODINGS = ("", "identity", "gzip", "deflate")
_INDEX = re.compile(r"\[(\d+)\]")
_encode = msgspec.json.Encoder().encode


# Out


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def refusal(error: TurtleError, status: int | None = None) -> web.Response:
    """An error as the contract shapes it."""
    body = {"error": {"code": error.code, "message": str(error), **error.details}}
    response = answer(body, status or error.status)
    if "retry_after_ms" in error.details:
        response.headers["Retry-After"] = str(-(-int(str(error.details["retry_after_ms"])) // 1000))
    return response


# In


async def read(request: web.Request, types: tuple[str, ...] = JSON_TYPES) -> bytes:
    """The body, unpacked, if it is of one of these types and not too large, and the caller still has time."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    packed = request.headers.get("Content-Encoding", "").strip().lower()
    if packed not in ENCODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {packed!r:.80} is not understood; send gzip or the plain bytes")
    if kind not in types and request.can_read_body:
        wanted = ", ".join(name for name in types if name)
        raise UnsupportedMediaType(f"Content-Type {kind!r:.80} is not understood here; send {wanted} (curl: --json, or -H)")
    try:
        data = await request.read()
    except HTTPRequestEntityTooLarge:
        raise TooLarge(f"a request body has at most {request.app[CONFIG].max_body_bytes:,} bytes") from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise InvalidArgument(f"the body cannot be unpacked: {error}") from None
    if asyncio.get_running_loop().time() >= request.get(DEADLINE, float("inf")):
        raise DeadlineExceeded
    return data


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


def time_left(request: web.Request) -> float:
    """Seconds until the caller gives up; infinite if it did not say."""
    return float(request.get(DEADLINE, float("inf"))) - asyncio.get_running_loop().time()


def check_text(data: bytes) -> None:
    """JSON is UTF-8."""
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
        raise UnknownTopic(f"there is no topic {name!r}")
    return name


def group_of(request: web.Request) -> str:
    """The group of the path, or the default one."""
    return names.check_group(request.match_info.get("group", GROUP))


def id_of(request: web.Request) -> str:
    """The message id of the path."""
    id_ = request.match_info["id"]
    check_ids([id_])
    return id_
