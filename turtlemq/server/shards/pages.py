"""Listings of a topic with partitions, a page at a time: the rows of all partitions in one order, behind one cursor.

Each partition is asked for a whole page, and the first rows of all pages are the answer. A partition whose page is used in
part is asked once more for that part, since only it knows the cursor behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from msgspec import Raw, Struct

from turtlemq.server.media_types import JSON
from turtlemq.server.request import time_left
from turtlemq.server.shards.ask import Ask
from turtlemq.server.shards.calls import Part, response_of
from turtlemq.server.shards.unite import Page, from_cursor, merged, to_cursor

_TOPIC = "/v1/topics/{topic}"
_SINCE = "@"  # begins a cursor that is a time: no row of that partition was shown so far


class _Body(Struct):
    """The answer of one partition."""

    cursor: str | None
    messages: list[Raw] = []
    events: list[Raw] = []
    missed: bool = False


class _Found(NamedTuple):
    """The rows of one partition, the keys by which they are in order, and the cursor behind them."""

    rows: list[Raw]
    keys: list[int]
    cursor: str | None
    missed: bool


class _Refused(Exception):
    """A partition has refused the request."""

    def __init__(self, part: Part) -> None:
        self.part = part


@dataclass(frozen=True, slots=True)
class Listing:
    """A listing. `rows`: the field with them; `key`: by which they are in order; `limit`: of rows, if none is given; `goes_on`:
    it has a cursor behind its last row as well, and can wait for more."""

    rows: str
    key: str
    limit: int
    goes_on: bool = False

    async def answer(self, ask: Ask) -> web.Response:
        """A page of the rows of all partitions."""
        query = dict(ask.request.query)
        wait_s = self._take_wait(ask, query)
        cursors = from_cursor(query.pop("cursor", None), ask.count)
        try:
            found = await self._ask(ask, query, cursors, {i: None for i, cursor in enumerate(cursors) if cursor is not None})
            if wait_s > 0 and not any(one.rows or one.missed for one in found.values()):
                found = await self._wait(ask, query, {i: one.cursor for i, one in found.items()}, wait_s)
            return await self._page(ask, query, cursors, found)
        except _Refused as refused:
            return response_of(refused.part)

    async def _page(
        self, ask: Ask, query: Mapping[str, str], cursors: list[str | None], found: dict[int, _Found]
    ) -> web.Response:
        limit, newest = int(query.get("limit") or self.limit), query.get("newest", "").lower() in ("1", "true")
        pages = {i: Page(one.keys, len(one.keys) < limit if self.goes_on else one.cursor is None) for i, one in found.items()}
        taken = dict.fromkeys(found, 0)
        for i, _ in merged(pages, limit, newest):
            taken[i] += 1
        found |= await self._ask(ask, query, cursors, {i: n for i, n in taken.items() if 0 < n < len(found[i].rows)})
        for i, one in found.items():
            if taken[i] or not one.rows:
                cursors[i] = one.cursor
            elif not cursors[i] and "since_ms" in query:
                cursors[i] = _SINCE + query["since_ms"]
        chosen = {i: Page(found[i].keys, True) for i in found if taken[i]}
        rows = [bytes(found[i].rows[at]) for i, at in merged(chosen, 2 * limit, newest)]
        tail = b'],"cursor":' + msgspec.json.encode(to_cursor(cursors))
        if self.goes_on:
            tail += b',"missed":' + msgspec.json.encode(any(one.missed for one in found.values()))
        return web.Response(body=b'{"%b":[' % self.rows.encode() + b",".join(rows) + tail + b"}", content_type=JSON)

    def _take_wait(self, ask: Ask, query: dict[str, str]) -> float:
        """The time that a request may wait for rows. One that is no number stays in the query, and is refused."""
        try:
            wait_s = min(float(query.get("wait") or 0), time_left(ask.request)) if self.goes_on else 0.0
        except ValueError:
            return 0.0
        if not 0 <= wait_s <= 60:
            return 0.0
        query.pop("wait", None)
        return wait_s

    async def _ask(
        self, ask: Ask, query: Mapping[str, str], cursors: list[str | None], limits: Mapping[int, int | None]
    ) -> dict[int, _Found]:
        """A page of each of these partitions, with up to so many rows."""
        asked = [ask.part(i, b"", self._path(ask, query, cursors[i], limit)) for i, limit in limits.items()]
        return {i: self._read(part) for i, part in zip(limits, await asyncio.gather(*asked), strict=True)}

    def _path(self, ask: Ask, query: Mapping[str, str], cursor: str | None, limit: int | None = None, **more: Any) -> str:
        given = dict(query) | more
        if limit is not None:
            given["limit"] = str(limit)
        if cursor and cursor.startswith(_SINCE):
            given["since_ms"] = cursor[1:]
        elif cursor:
            given["cursor"] = cursor
        return f"{ask.request.raw_path.partition('?')[0]}?{urlencode(given)}"

    async def _wait(
        self, ask: Ask, query: Mapping[str, str], cursors: Mapping[int, str | None], wait_s: float
    ) -> dict[int, _Found]:
        """Wait at all partitions for the first rows. Those of others come with the next request."""
        tasks = {
            asyncio.create_task(ask.part(i, b"", self._path(ask, query, cursor, wait=f"{wait_s:.3f}"))): i
            for i, cursor in cursors.items()
        }
        waiting, found = set(tasks), {i: _Found([], [], cursor, False) for i, cursor in cursors.items()}
        try:
            while waiting and not any(one.rows or one.missed for one in found.values()):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found |= {tasks[task]: self._read(task.result()) for task in done}
        finally:
            for task in waiting:
                task.cancel()
        return found

    def _read(self, part: Part) -> _Found:
        if part.status >= 300:
            raise _Refused(part)
        body = msgspec.json.decode(part.body, type=_Body)
        rows: list[Raw] = getattr(body, self.rows)
        keys = [int(msgspec.json.decode(row, type=dict[str, Any])[self.key]) for row in rows]
        return _Found(rows, keys, body.cursor, body.missed)


PAGES = {
    f"{_TOPIC}/messages": Listing("messages", "due_ms", 100),
    f"{_TOPIC}/dead": Listing("messages", "dropped_ms", 100),
    f"{_TOPIC}/events": Listing("events", "at_ms", 1_000, goes_on=True),
}
