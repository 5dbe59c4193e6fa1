"""Requests about a topic with partitions: each goes to the partitions that it is about, and their answers become one.

The table says how, for every operation on a topic. Each partition does its part as a whole or not at all; nothing spans them.
So a body that no partition would take is refused before it is split, and a refusal by some of them tells how many have done
their part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from turtlemq.errors import InvalidArgument, TooLarge
from turtlemq.index.validate import check_batch, check_expiry, check_ids
from turtlemq.model import BATCH_MESSAGES_MAX
from turtlemq.server import trace
from turtlemq.server.clock import now_ms
from turtlemq.server.handlers.command import Command
from turtlemq.server.incoming.batches import TYPES, decode_slices
from turtlemq.server.incoming.body import read
from turtlemq.server.media_types import JSON
from turtlemq.server.outbound import OutboundAnswer
from turtlemq.server.outgoing.reply import Answered, encode
from turtlemq.server.proxy import PARTITION, STALL_S
from turtlemq.server.request import CONFIG, SERVICE, check_deadline, due_rules, rules_for
from turtlemq.server.shards import merge, split, unite
from turtlemq.server.shards.ask import Ask
from turtlemq.server.shards.calls import READ_S, Part, made_of, response_of
from turtlemq.server.shards.pages import PAGES
from turtlemq.server.shards.unite import Piece
from turtlemq.settings import Settings
from turtlemq.shards import partition_of

Way = Callable[[Ask], Awaitable[Answered]]


def _refused(parts: Iterable[tuple[Piece | None, Part]]) -> web.Response | None:
    """The first refusal, if there is one."""
    found = list(parts)
    done = sum(part.status < 300 for _, part in found)
    for piece, part in found:
        if part.status >= 300:
            body = unite.refusal(piece, part.body, done, len(found))
            return response_of(Part(part.status, part.kind, body, part.headers))
    return None


def _answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type=JSON)


# To one partition


async def _by_id(ask: Ask) -> Answered:
    return await ask.whole(partition_of(ask.request.match_info["id"], ask.count))


async def _by_name(ask: Ask) -> Answered:
    return await ask.whole(partition_of(ask.request.match_info["name"], ask.count))


async def _transaction(ask: Ask) -> Answered:
    data = await read(ask.request)
    try:
        partition, body = split.transaction(data, ask.count, now_ms())
    except msgspec.DecodeError:
        partition, body = 0, data  # it is refused there
    return response_of(await ask.part(partition, body))


async def _no_callbacks(ask: Ask) -> Answered:
    raise InvalidArgument(
        f"topic {ask.topic!r} has {ask.count} partitions, and clients are registered at topics without: fetch from it, or take "
        "another topic"
    )


async def _no_replays(ask: Ask) -> Answered:
    raise InvalidArgument(
        f"topic {ask.topic!r} has {ask.count} partitions, and messages are copied out of topics without: move a group back with "
        "PUT …/groups/{group}, so that its messages come again"
    )


# To those that the ids name


async def _produce(ask: Ask) -> Answered:
    request, service = ask.request, ask.request.app[SERVICE]
    data, now = await read(request, TYPES), now_ms()
    kind = request.content_type if request.headers.get("Content-Type") else ""
    rules = due_rules(request, ask.topic) if service.serving else rules_for(request.app[CONFIG], Settings())
    steps = decode_slices(data, kind, now, rules)
    batch = await service.turns.finish(steps, lambda: check_deadline(request), ask.topic)
    check_batch(batch)
    check_expiry(batch, now)
    if not len(batch):
        return response_of(await ask.part(0, data))
    pieces, ids = split.messages(data, kind, batch.ids or [None] * len(batch), ask.count, now)
    parts = await ask.parts({piece.partition: piece.body for piece in pieces})
    if (refused := _refused(zip(pieces, parts.values(), strict=True))) is not None:
        return refused
    return _answer(unite.stored(pieces, [part.body for part in parts.values()], ids), 201)


async def _entries(ask: Ask) -> Answered:
    """An ack list, or ids whose leases get more time."""
    body = _json(await read(ask.request))
    if isinstance(body, list):
        body = {"acks": body}
    name = "acks" if isinstance(body, dict) and "acks" in body else "ids"
    return await _listed(ask, body, name)


async def _chosen(ask: Ask) -> Answered:
    """Messages by id, or by a range or filter, which is about all partitions."""
    data = await read(ask.request)
    body = _json(data)
    if isinstance(body, dict) and body.get("ids") is None:
        if isinstance(rate := body.get("per_s"), int | float) and not isinstance(rate, bool):
            data = encode(body | {"per_s": rate / ask.count})
        return await _united(ask, data)
    return await _listed(ask, body, "ids")


async def _listed(ask: Ask, body: Any, name: str) -> Answered:
    listed = body.get(name) if isinstance(body, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(id_, str) for id_ in listed):
        return response_of(await ask.part(0, encode(body)))  # it is refused there, or has nothing to do
    if len(listed) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"at most {BATCH_MESSAGES_MAX:,} ids at once, these are {len(listed):,}")
    if name == "ids":
        check_ids(listed)
    pieces = await asyncio.to_thread(split.entries, body, name, ask.count)
    if name == "acks" and ("" in listed or "-" in listed):
        return response_of(await ask.part(0, encode(body)))
    parts = await ask.parts({piece.partition: piece.body for piece in pieces})
    if (refused := _refused(zip(pieces, parts.values(), strict=True))) is not None:
        return refused
    if len(parts) == 1:
        return response_of(next(iter(parts.values())))
    joined = unite.json_of(part.body for part in parts.values())
    return _answer(unite.in_order(joined, [entry.removeprefix("-") for entry in listed]))


def _json(data: bytes) -> Any:
    """A JSON body as a value; as its text if it is none, which the first partition refuses."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None


async def command(ask: Ask) -> Answered:
    """A command about a topic: with an id to its partition; a pop to one after the other, until one has a message."""
    data = await read(ask.request)
    asked = msgspec.json.decode(data, type=Command)
    if asked.command == "pop":
        answered = None
        for partition in range(ask.count):
            answered = await ask.part(partition, data)
            if msgspec.json.decode(answered.body)["id"]:
                break
        assert answered is not None
        return response_of(answered)
    id_ = asked.id
    if id_ is None and asked.command == "add":
        (id_,) = split.new_ids(now_ms(), 1)
        data = encode(msgspec.json.decode(data, type=dict[str, msgspec.Raw]) | {"id": id_})
    return response_of(await ask.part(partition_of(id_ or "", ask.count), data))


# To all partitions


async def _united(ask: Ask, body: bytes = b"", united: Callable[[Iterable[bytes]], bytes] = unite.json_of) -> web.Response:
    """One answer of all partitions. A group that is unknown in some of them is one that has fetched nothing there so far."""
    if not body and ask.request.body_exists:
        body = await read(ask.request)
    parts = await ask.all(body)
    if ask.request.match_info.get("group") is not None and any(part.status < 300 for part in parts.values()):
        parts = {partition: part for partition, part in parts.items() if part.status != 404}
    if (refused := _refused((None, part) for part in parts.values())) is not None:
        return refused
    return _answer(united(part.body for part in parts.values()), next(iter(parts.values())).status)


async def _paused(ask: Ask) -> Answered:
    """Pause or resume a group everywhere: also in partitions from which it has fetched nothing so far."""
    path = ask.request.raw_path.rpartition("/")[0]
    found = await ask.all(path=path, method="GET")
    missing = [partition for partition, part in found.items() if part.status == 404]
    if len(missing) < ask.count:
        made = await ask.parts(dict.fromkeys(missing, b"{}"), path, "PUT")
        if (refused := _refused((None, part) for part in made.values())) is not None:
            return refused
    return await _united(ask)


async def _causes(ask: Ask) -> Answered:
    return await _united(ask, united=unite.causes)


async def _history(ask: Ask) -> Answered:
    return await _united(ask, united=lambda bodies: merge.history(list(bodies)))


async def _forecast(ask: Ask) -> Answered:
    query = dict(ask.request.query)
    if not query.get("from_ms"):
        query["from_ms"] = str(now_ms())  # the same for all
    path = f"{ask.request.raw_path.partition('?')[0]}?{urlencode(query)}"
    parts = await ask.all(path=path)
    refused = _refused((None, part) for part in parts.values())
    return refused or _answer(unite.json_of(part.body for part in parts.values()))


async def _copy(response: OutboundAnswer, out: web.StreamResponse) -> None:
    while True:
        async with asyncio.timeout(STALL_S):
            piece = await response.piece()
            if not piece:
                return
            await out.write(piece)


async def _export(ask: Ask) -> Answered:
    """The lines of all partitions, one partition behind the other."""
    out = web.StreamResponse()

    async def use(response: OutboundAnswer) -> Part | None:
        try:
            if response.status >= 300:
                return Part(response.status, response.headers.get("Content-Type", ""), await response.read(), response.headers)
            if not out.prepared:
                out.content_type = response.headers.get("Content-Type", "").partition(";")[0]
                await out.prepare(ask.request)
            if ask.request.method != "HEAD":
                await _copy(response, out)
            return None
        finally:
            response.release()

    for partition in range(ask.count):
        made = made_of(ask.request, ask.request.raw_path, b"", {PARTITION: ask.named(partition)})
        refused = await ask.calls.asked(made, ask.places[partition], READ_S, use)
        if refused is not None and not out.prepared:
            return response_of(refused)
        if refused is not None:
            raise ConnectionResetError("a partition has refused the rest")
    await out.write_eof()
    return out


async def _fetch(ask: Ask) -> Answered:
    return await ask.fetches.fetch(ask.request, ask.topic, ask.places)


async def _page(ask: Ask) -> Answered:
    resource = ask.request.match_info.route.resource
    assert resource is not None
    return await PAGES[resource.canonical].answer(ask)


_TOPIC = "/v1/topics/{topic}"
_GROUP = f"{_TOPIC}/groups/{{group}}"
_SCHEDULES = f"{_TOPIC}/schedules"
WAYS: dict[str, Way] = {
    f"POST {_TOPIC}/messages": _produce,
    **{f"{method} {_TOPIC}/messages/{{id}}": _by_id for method in ("GET", "PATCH", "DELETE")},
    f"POST {_TOPIC}/messages/{{id}}/retry": _by_id,
    f"POST {_TOPIC}/cancel": _chosen,
    f"POST {_TOPIC}/transaction": _transaction,
    **{f"POST {base}/fetch": _fetch for base in (_TOPIC, _GROUP)},
    **{f"POST {base}/{verb}": _entries for base in (_TOPIC, _GROUP) for verb in ("ack", "extend")},
    **{f"GET {path}": _page for path in PAGES},
    f"GET {_TOPIC}/forecast": _forecast,
    f"GET {_TOPIC}/history": _history,
    f"GET {_TOPIC}": _united,
    f"POST {_TOPIC}/compact": _united,
    **{f"POST {_TOPIC}/{verb}": _united for verb in ("pause", "resume")},
    **{f"POST {_GROUP}/{verb}": _paused for verb in ("pause", "resume")},
    **{f"{method} {_GROUP}": _united for method in ("PUT", "GET", "DELETE")},
    f"GET {_TOPIC}/dead/summary": _causes,
    f"GET {_TOPIC}/dead/export": _export,
    **{f"POST {_TOPIC}/dead/{verb}": _chosen for verb in ("requeue", "delete")},
    **{f"GET {base}/clients": _united for base in (_TOPIC, _GROUP)},
    f"POST {_GROUP}/clients": _no_callbacks,
    **{f"{method} {_GROUP}/clients/{{client}}": _no_callbacks for method in ("GET", "PUT", "DELETE")},
    f"PUT {_GROUP}/clients/{{client}}/secret": _no_callbacks,
    f"POST {_TOPIC}/replay": _no_replays,
    f"GET {_TOPIC}/replays": _united,
    **{f"{method} {_TOPIC}/replays/{{replay}}": _no_replays for method in ("GET", "DELETE")},
    f"GET {_SCHEDULES}": _united,
    **{f"{method} {_SCHEDULES}/{{name}}": _by_name for method in ("GET", "PUT", "DELETE")},
    **{f"POST {_SCHEDULES}/{{name}}/{verb}": _by_name for verb in ("trigger", "pause", "resume")},
    f"GET {_SCHEDULES}/{{name}}/next": _by_name,
}


async def topic(ask: Ask) -> web.Response:
    """A topic with its settings and figures."""
    parts = await ask.all(path=f"/v1/topics/{ask.topic}", method="GET")
    refused = _refused((None, part) for part in parts.values())
    return refused or _answer(unite.json_of(part.body for part in parts.values()))


async def answer(ask: Ask) -> Answered:
    """The answer to a request about a topic with partitions."""
    resource = ask.request.match_info.route.resource
    assert resource is not None
    method = "GET" if ask.request.method == "HEAD" else ask.request.method
    return await trace.waited(ask.request, WAYS[f"{method} {resource.canonical}"](ask))
