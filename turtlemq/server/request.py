"""Helpers about one request: its application, deadline and origin, and the topic, group and id of its path.

Bodies are read in `incoming.body`, answers are made in `outgoing.reply`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from turtlemq.engine import GROUP, Engine
from turtlemq.errors import InvalidArgument
from turtlemq.index.validate import check_ids
from turtlemq.model import DUE_MS_MAX
from turtlemq.server.auth import client_name
from turtlemq.server.config import Config
from turtlemq.server.errors import DeadlineExceeded, Forbidden
from turtlemq.server.incoming.batches import DueRules
from turtlemq.server.incoming.decode import reworded
from turtlemq.server.service import Service
from turtlemq.settings import Settings
from turtlemq.storage import names

if TYPE_CHECKING:  # loaded only by a server with several shards
    from turtlemq.server.shards.siblings import Siblings

T = TypeVar("T")
_IDS_MAX = 10_000  # that are checked on the event loop
EpochMs = Annotated[int, Meta(ge=0, le=DUE_MS_MAX)]  # a time in queries and bodies

SERVICE = web.AppKey("service", Service)
CONFIG = web.AppKey("config", Config)
BUDGET = "X-Turtlemq-Budget-Ms"
DEADLINE = "deadline"


def check_origin(request: web.Request) -> None:
    """Raise `Forbidden` if a page of another site sends this. Browsers name the site in Origin; other clients send none."""
    origin = request.headers.get("Origin")
    if origin is not None and request.method not in ("GET", "HEAD") and origin.partition("://")[2] != request.host:
        raise Forbidden


def set_deadline(request: web.Request) -> None:
    """Note the deadline of a request that has a time budget. Raises `DeadlineExceeded` if the budget is 0."""
    text = request.headers.get(BUDGET)
    if text is None:
        return
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise InvalidArgument(f"{BUDGET} is a whole number of milliseconds, not {text!r:.80}")
    request[DEADLINE] = asyncio.get_running_loop().time() + int(text) / 1000
    if int(text) == 0:
        raise DeadlineExceeded


def check_deadline(request: web.Request) -> None:
    """Raise `DeadlineExceeded` if the caller no longer waits. Call it before work that changes something."""
    if DEADLINE in request and time_left(request) <= 0:
        raise DeadlineExceeded


def time_left(request: web.Request) -> float:
    """Seconds until the deadline; infinite without a time budget."""
    return float(request.get(DEADLINE, float("inf"))) - asyncio.get_running_loop().time()


def query(request: web.Request, kind: type[T]) -> T:
    """The query string as a type. Parameters without a value count as missing."""
    given = {name: value for name, value in request.query.items() if value}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as wrong:
        raise InvalidArgument(f"query: {reworded(str(wrong), kind)}") from None


def urls_of(request: web.Request, siblings: Siblings | None) -> list[str]:
    """The addresses of the processes that share the topics, by shard, under the host name that the caller uses."""
    origin = request.url.origin()
    return [str(origin)] if siblings is None else [str(origin.with_port(port)) for port in siblings.ports]


# The path


def engine_of(request: web.Request) -> Engine:
    """The engine. Raises `Unavailable` while the server starts or stops."""
    return request.app[SERVICE].engine


def topic_of(request: web.Request, may_create: bool = False) -> str:
    """The topic of the path. It must exist; with `may_create`, a new one is fine where the configuration allows it."""
    return allowed_topic(engine_of(request), request.app[CONFIG], request.match_info["topic"], may_create)


def allowed_topic(engine: Engine, config: Config, name: str, may_create: bool) -> str:
    """A topic's name, checked. It must exist; with `may_create`, a new one is fine where the configuration allows it."""
    names.check_topic(name)
    if name not in engine.topics and not (may_create and config.auto_create_topics):
        engine.topic(name)  # raises with the reason
    _check_topic_limit(engine, config, name)
    return name


def check_topic_limit(request: web.Request, name: str) -> None:
    """Raise `InvalidArgument` if this topic does not exist and there are `max_topics` already."""
    _check_topic_limit(engine_of(request), request.app[CONFIG], name)


def _check_topic_limit(engine: Engine, config: Config, name: str) -> None:
    topics, most = engine.topics, config.max_topics
    if name not in topics and len(topics) >= most:
        raise InvalidArgument(f"there are {len(topics):,} topics already, as many as max_topics allows; delete some first")


def settings_of(request: web.Request, topic: str) -> Settings:
    """The settings of a topic; of one that does not exist, the settings that it would have."""
    engine = engine_of(request)
    found = engine.topics.get(topic)
    return engine.settings if found is None else found.settings


def due_rules(request: web.Request, topic: str) -> DueRules:
    """The rules about due times: of two limits on the delay, that of the server and that of the topic, the shorter."""
    return rules_for(request.app[CONFIG], settings_of(request, topic))


def rules_for(config: Config, settings: Settings) -> DueRules:
    """The rules about due times of a topic with these settings."""
    own_ms, server_ms = settings.max_delay_ms, int(config.max_delay_days * 86_400_000)
    return DueRules(config.reject_past, min(own_ms, server_ms) if own_ms and server_ms else own_ms or server_ms)


def throttle(request: web.Request, topic: str, count: int, size: int, is_low: bool = False) -> None:
    """Admit `count` messages of this client, `size` bytes, into a topic, or raise `RateLimited`. Costs nothing without rates."""
    service, settings = request.app[SERVICE], settings_of(request, topic)
    if settings.rate_produce_per_s or service.flow.client_rate or service.tenants is not None:
        service.throttle(topic, settings, client_name(request), count, size, is_low)


def group_of(request: web.Request, may_create: bool = False) -> str:
    """The group of the path, or the default one. With `may_create`, raises if it would be more than `max_groups`."""
    name = names.check_group(request.match_info.get("group", GROUP))
    return allowed_group(engine_of(request), request.app[CONFIG], request.match_info["topic"], name) if may_create else name


def allowed_group(engine: Engine, config: Config, topic: str, name: str) -> str:
    """A group's name, checked. Raises if it would be one more than `max_groups` in its topic."""
    names.check_group(name)
    opened = engine.topics.get(topic)
    if opened is not None and opened.view.group_count >= config.max_groups and not opened.view.has_group(name):
        raise InvalidArgument(f"the topic has {opened.view.group_count:,} groups already, as many as max_groups allows")
    return name


def topic_and_group(request: web.Request) -> tuple[str, str]:
    """Topic and group of the path, which may both be new."""
    return topic_of(request, may_create=True), group_of(request, may_create=True)


async def distinct_ids(ids: list[str]) -> list[str]:
    """The ids of a request, each once. Raises for one that is no id. A long list is checked on a thread: 0.1 s for 100,000."""
    return _distinct(ids) if len(ids) <= _IDS_MAX else await asyncio.to_thread(_distinct, ids)


def _distinct(ids: list[str]) -> list[str]:
    check_ids(ids)
    return list(dict.fromkeys(ids))


def id_of(request: web.Request) -> str:
    """The message id of the path."""
    id_ = request.match_info["id"]
    check_ids([id_])
    return id_
