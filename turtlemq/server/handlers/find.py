"""The handler that finds an id in all topics."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from turtlemq.index.validate import check_ids
from turtlemq.server.auth import AUTH
from turtlemq.server.fair_turns import Slices
from turtlemq.server.outgoing.answers import Found, FoundMessage
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import engine_of, query

SAME_RIGHT = "GET /v1/topics/{topic}/messages/{id}"  # the operation whose right a token needs on each topic


class FindQuery(Struct, forbid_unknown_fields=True):
    """The id to look for."""

    id: str


async def find(request: web.Request) -> web.Response:
    """GET /v1/find: each topic is looked at in turn, in slices between which the event loop does other work."""
    id_, auth, slices, found = query(request, FindQuery).id, request.app[AUTH], Slices(), list[FoundMessage]()
    check_ids([id_])
    access = auth.access_of(SAME_RIGHT)
    for name in sorted(engine_of(request).topics):
        topic = engine_of(request).topics.get(name)  # it may have been deleted meanwhile
        if topic is not None and auth.may(request, name, access) and (view := topic.view.message(id_)) is not None:
            found.append(FoundMessage(name, view.id, view.state, view.due_ms, view.next_ms))
        await slices.pause()
    return answer(Found(found))
