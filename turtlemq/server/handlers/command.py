"""The handler of the command protocol, for clients of Youzan-style queues: always 200, the answer tells whether it succeeded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from msgspec import UNSET, Raw, Struct, UnsetType

from turtlemq.engine import GROUP
from turtlemq.errors import InvalidArgument, TurtleError, UnknownMessage
from turtlemq.index.validate import check_ids
from turtlemq.model import TTR_MS_MAX, Batch
from turtlemq.segment import format as f
from turtlemq.server import audit
from turtlemq.server.auth import ANY, AUTH, Access
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import Forbidden, RequestTimeout
from turtlemq.server.fair_turns import Slices, in_slices
from turtlemq.server.handlers.messages import cancel_ids
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.depth import check_body_depth
from turtlemq.server.incoming.times import due_time
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.outgoing.messages import delivered
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import CONFIG, SERVICE, check_topic_limit, due_rules, engine_of, throttle
from turtlemq.server.service import Service
from turtlemq.storage import names

OPERATIONS = {  # the operation that does the same as a command, and whose right it needs
    "add": "POST /v1/topics/{topic}/messages",
    "pop": "POST /v1/topics/{topic}/fetch",
    "finish": "POST /v1/topics/{topic}/ack",
    "delete": "DELETE /v1/topics/{topic}/messages/{id}",
}


class Command(Struct, rename={"ttr": "TTR"}):
    """A request of the command protocol."""

    command: str
    topic: str | None = None
    id: str | None = None
    delay: float | None = None
    ttr: float | None = None
    body: Raw | UnsetType = UNSET


class CommandAnswer(Struct):
    """The answer to a command."""

    success: bool = True
    error: str = ""
    id: str = ""
    value: Any = None


async def command(request: web.Request) -> web.Response:
    """POST /v1/command: add, pop, finish or delete a message."""
    service = request.app[SERVICE]
    try:
        asked = await read_as(request, Command)
        names_topic = asked.command in ("add", "pop")
        if asked.topic is None and names_topic:
            raise InvalidArgument(f"{asked.command} needs a topic")
        if asked.topic is not None:
            names.check_topic(asked.topic)
            request.app[AUTH].require(request, asked.topic, _access(request, asked.command))
            creates = names_topic and request.app[CONFIG].auto_create_topics
            if asked.topic not in service.engine.topics and not creates:
                service.engine.topic(asked.topic)  # raises with the reason
            check_topic_limit(request, asked.topic)
        out = await _run(request, asked)
    except TurtleError as error:
        refused = answer(CommandAnswer(False, f"{error.code}: {error}"))
        if isinstance(error, RequestTimeout):
            refused.force_close()  # the rest of the body would be read as the next request
        return refused
    service.answer_polls_soon()
    return answer(out)


def _access(request: web.Request, command: str) -> Access:
    """The right that a command needs."""
    return request.app[AUTH].access_of(OPERATIONS[command]) if command in OPERATIONS else ANY


async def _run(request: web.Request, asked: Command) -> CommandAnswer:
    service = request.app[SERVICE]
    match asked.command:
        case "add":
            assert asked.topic is not None
            check_due(due_time(asked.delay, None, now := now_ms()), now, due_rules(request, asked.topic))
            throttle(request, asked.topic, 1, len(asked.body or ""))
            service.admit(0)
            return await _add(service, asked)
        case "pop":
            return await _pop(request, asked)
        case "finish":
            return await _finish(service, asked, await _topics(request, asked))
        case "delete":
            return await _delete(request, asked, await _topics(request, asked))
    raise InvalidArgument(f"unknown command {asked.command!r:.80}; there are: add, pop, finish, delete")


async def _add(service: Service, asked: Command) -> CommandAnswer:
    assert asked.topic is not None
    if isinstance(asked.body, UnsetType):
        raise InvalidArgument("add needs a body")
    if asked.ttr is not None and not 0 < asked.ttr <= TTR_MS_MAX / 1000:
        raise InvalidArgument(f"TTR is a number of seconds above 0, up to {TTR_MS_MAX // 1000:,}")
    await in_slices(check_body_depth(bytes(asked.body)))
    now = now_ms()
    batch = Batch(
        bodies=[bytes(asked.body)],
        due_ms=[due_time(asked.delay, None, now)],
        ids=[asked.id],
        ttr_ms=[max(1, round(asked.ttr * 1000)) if asked.ttr else 0],
        flags=[f.JSON],
    )
    staged_in, receipt = service.engine.stage(asked.topic, batch, now)
    await service.commit(staged_in)
    return CommandAnswer(id=receipt.ids[0])


async def _pop(request: web.Request, asked: Command) -> CommandAnswer:
    assert asked.topic is not None
    service = request.app[SERVICE]
    service.engine.topic(asked.topic, create=True)
    messages = delivered(await service.fetch(FetchRequest(asked.topic, GROUP, 1), 0))
    if not messages:
        return CommandAnswer()
    message = messages[0]
    return CommandAnswer(id=message.id, value=message.body_base64 if isinstance(message.body, UnsetType) else message.body)


async def _topics(request: web.Request, asked: Command) -> list[str]:
    """Topics in which to look for the message: the one that was named, else all on which the token has the right."""
    if asked.id is None:
        raise InvalidArgument(f"{asked.command} needs an id")
    check_ids([asked.id])
    if asked.topic is not None:
        return [asked.topic]
    auth = request.app[AUTH]
    topics, access = sorted(engine_of(request).topics), _access(request, asked.command)
    return await in_slices(topic for topic in topics if auth.may(request, topic, access))


async def _existing(service: Service, topics: list[str]) -> AsyncIterator[str]:
    """These topics, in slices between which the event loop does other work; without those that are deleted meanwhile."""
    slices = Slices()
    for topic in topics:
        if topic in service.engine.topics or len(topics) == 1:  # a topic that the request names must exist
            yield topic
        await slices.pause()


async def _finish(service: Service, asked: Command, topics: list[str]) -> CommandAnswer:
    assert asked.id is not None
    async for topic in _existing(service, topics):
        if await _ack(service, topic, asked.id):
            return CommandAnswer(id=asked.id)
    raise UnknownMessage(f"{asked.id!r} is not in reserve")


async def _ack(service: Service, topic: str, id_: str) -> bool:
    """Acknowledge a message for the default group, as durably as its topic promises. Returns whether it was in reserve."""
    opened = service.engine.topic(topic)
    with opened.deferring_syncs():
        acked = service.engine.ack(topic, GROUP, [id_], now_ms()).acked
    await service.synced(opened)
    return bool(acked)


async def _delete(request: web.Request, asked: Command, topics: list[str]) -> CommandAnswer:
    """Cancel a message; one that a consumer holds is acknowledged instead, for which the token needs the right of `finish`."""
    assert asked.id is not None
    service, auth = request.app[SERVICE], request.app[AUTH]
    async for topic in _existing(service, topics):
        cancelled, missed = await cancel_ids(service, topic, [asked.id])
        if cancelled:
            audit.name_target(request, [asked.id])
            audit.note(request, "cancel", topic)
            return CommandAnswer(id=asked.id)
        if auth.may(request, topic, _access(request, "finish")):
            if await _ack(service, topic, asked.id):
                return CommandAnswer(id=asked.id)
        elif asked.topic is not None and missed[asked.id] == "reserve":
            raise Forbidden(f"{asked.id!r} is in reserve: this token has no right to acknowledge it")
    raise UnknownMessage(f"{asked.id!r} is neither asleep, ready nor in reserve")
