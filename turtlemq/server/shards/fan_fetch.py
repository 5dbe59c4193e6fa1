"""Fetches from a topic with partitions: they take turns over the partitions, and wait at all of them together.

First each partition is asked without waiting, another one first each time, until there are enough messages. If there are
none, the fetch waits at all partitions at once, and takes the first answer. Messages that others send at the same moment are
given back, and so are those of a client that is gone (`named_polls`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw, Struct, structs

from turtlemq.engine import GROUP
from turtlemq.errors import Unavailable
from turtlemq.server import trace
from turtlemq.server.handlers.consume import PAUSED, Fetch, prefers_bson
from turtlemq.server.incoming.body import read_as
from turtlemq.server.incoming.bson_messages import documents
from turtlemq.server.media_types import BSON, JSON
from turtlemq.server.outgoing.reply import LEASE_HEADER, NO_WAIT_HEADER, PAUSED_HEADER, Reply, encode
from turtlemq.server.proxy import PARTITION, Misrouted
from turtlemq.server.request import DEADLINE, time_left
from turtlemq.server.shards.calls import READ_S, Calls, Part, made_of, response_of
from turtlemq.server.shards.named_polls import END_POLL, POLL
from turtlemq.server.shards.split import joined_lease

AGAIN_S = 0.05, 0.5  # between two looks for messages that cannot be given back, at first and at most
TURNS_MAX = 10_000  # topics and groups whose next partition is remembered


class _Answer(Struct):
    """The JSON answer of one partition; its messages are not decoded."""

    messages: list[Raw]
    lease: str = ""
    paused: bool = False


class _Taken(NamedTuple):
    """An answer of one partition with messages, and the name of that fetch."""

    name: str
    size: int
    lease: str
    part: Part
    messages: list[Raw]


class _Refused(Exception):
    """A partition has refused the fetch."""

    def __init__(self, part: Part) -> None:
        self.part = part


@dataclass(slots=True)
class _Fetch:
    """One fetch under way. `places`: the shards of the partitions."""

    request: web.Request
    asked: Fetch
    places: list[int]
    taken: dict[int, _Taken] = field(default_factory=dict)  # by partition
    is_paused: bool = False
    cannot_wait: bool = False  # messages could not be given back

    @property
    def room(self) -> int:
        return self.asked.max - sum(taken.size for taken in self.taken.values())


class FanFetch:
    """All fetches of one process from topics with partitions."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._turns: dict[tuple[str, str], int] = {}  # the partition that is asked first, by topic and group
        self._ending: set[asyncio.Task[None]] = set()

    async def fetch(self, request: web.Request, topic: str, places: list[int]) -> Reply | web.Response:
        """The answer to a fetch. Raises `Misrouted` if a partition is not where it should be, and nothing was fetched."""
        fetch = _Fetch(request, await read_as(request, Fetch), places)
        fetch.cannot_wait = fetch.asked.ack == "auto"
        try:
            await self._without_waiting(fetch, self._turn(topic, request.match_info.get("group", GROUP), len(places)))
            if not fetch.taken and (wait_s := min(fetch.asked.wait, time_left(request))) > 0:
                await trace.waited(request, self._waiting(fetch, wait_s))
        except _Refused as refused:
            if not fetch.taken:
                return response_of(refused.part)
        except (Misrouted, Unavailable):
            if not fetch.taken:
                raise
        except BaseException:
            self._end(fetch, [(partition, one.name) for partition, one in fetch.taken.items()])
            raise
        return self._answer(fetch)

    def _turn(self, topic: str, group: str, count: int) -> list[int]:
        """The partitions in the order in which they are asked."""
        first = self._turns.pop((topic, group), secrets.randbelow(count)) % count
        if len(self._turns) >= TURNS_MAX:
            del self._turns[next(iter(self._turns))]
        self._turns[topic, group] = first + 1
        return [(first + step) % count for step in range(count)]

    async def _without_waiting(self, fetch: _Fetch, order: Iterable[int]) -> None:
        for partition in order:
            taken = await self._ask(fetch, partition, structs.replace(fetch.asked, max=fetch.room, wait=0), _name())
            if taken is not None:
                fetch.taken[partition] = taken
                if fetch.room <= 0:
                    return

    async def _waiting(self, fetch: _Fetch, wait_s: float) -> None:
        """Wait at all partitions, until the first has messages."""
        if not fetch.cannot_wait:
            end = asyncio.get_running_loop().time() + wait_s
            await self._first_of_all(fetch, wait_s)
            wait_s = end - asyncio.get_running_loop().time()
        if fetch.cannot_wait and not fetch.taken:
            await self._looking(fetch, wait_s)

    async def _first_of_all(self, fetch: _Fetch, wait_s: float) -> None:
        asked, names = structs.replace(fetch.asked, wait=wait_s), [_name() for _ in fetch.places]
        asking = {
            asyncio.create_task(self._ask(fetch, partition, asked, names[partition])): partition
            for partition in range(len(fetch.places))
        }
        try:
            while asking and not fetch.taken:
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not fetch.taken and (taken := task.result()) is not None:
                        fetch.taken[asking[task]] = taken
                    elif fetch.taken:
                        continue  # it is ended below
                    del asking[task]
                if fetch.cannot_wait:
                    return
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            kept = {one.name for one in fetch.taken.values()}
            self._end(fetch, [(partition, names[partition]) for partition in asking.values() if names[partition] not in kept])

    async def _looking(self, fetch: _Fetch, wait_s: float) -> None:
        """Ask all partitions again and again without waiting, for messages that are settled when they are fetched."""
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + wait_s, AGAIN_S[0]
        while not fetch.taken and loop.time() < end:
            await asyncio.sleep(min(pause_s, end - loop.time()))
            pause_s = min(AGAIN_S[1], 2 * pause_s)
            await self._without_waiting(fetch, range(len(fetch.places)))

    async def _ask(self, fetch: _Fetch, partition: int, asked: Fetch, name: str) -> _Taken | None:
        """Fetch from one partition. None: it has nothing."""
        more = {PARTITION: f"{partition}/{len(fetch.places)}", POLL: name, "Content-Type": JSON}
        made = made_of(fetch.request, fetch.request.path, encode(asked), more)
        part = await self._calls.whole(made, fetch.places[partition], READ_S + asked.wait)
        if part.status != 200:
            raise _Refused(part)
        fetch.cannot_wait |= NO_WAIT_HEADER in part.headers
        if part.kind.startswith(BSON):
            count, lease, messages = max(0, len(documents(part.body)) - 1), part.headers.get(LEASE_HEADER, ""), list[Raw]()
            fetch.is_paused |= PAUSED_HEADER in part.headers
        else:
            found = msgspec.json.decode(part.body, type=_Answer)
            count, lease, messages = len(found.messages), found.lease, found.messages
            fetch.is_paused |= found.paused
        return _Taken(name, count, lease, part, messages) if count else None

    # The answer

    def _answer(self, fetch: _Fetch) -> Reply:
        taken = fetch.taken
        if not taken:
            if prefers_bson(fetch.request.headers.get("Accept", "")):
                return Reply(b"", 200, BSON, paused=fetch.is_paused)
            return Reply(PAUSED if fetch.is_paused else b'{"messages":[]}')
        names = [(partition, one.name) for partition, one in taken.items()]
        lease = joined_lease({partition: one.lease for partition, one in taken.items() if one.lease})

        def undo() -> None:
            self._end(fetch, names)

        parts = list(taken.values())
        if parts[0].part.kind.startswith(BSON):
            return Reply([one.part.body for one in parts], 200, BSON, undo, lease)
        if len(parts) == 1:
            return Reply(parts[0].part.body, 200, JSON, undo)
        messages = b",".join([bytes(message) for one in parts for message in one.messages])
        tail = b'],"lease":' + encode(lease) + b"}" if lease else b"]}"
        return Reply([b'{"messages":[' + messages + tail], 200, JSON, undo)

    def _end(self, fetch: _Fetch, names: list[tuple[int, str]]) -> None:
        """Let partitions end fetches that are not used, and give back their messages, if there are any."""
        for partition, name in names:
            task = asyncio.get_running_loop().create_task(self._end_one(fetch, partition, name))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end_one(self, fetch: _Fetch, partition: int, name: str) -> None:
        more: dict[str, Any] = {PARTITION: f"{partition}/{len(fetch.places)}", END_POLL: name, "Content-Type": JSON}
        made = made_of(fetch.request, fetch.request.path, b"{}", more)
        made.pop(DEADLINE, None)  # the time of the client does not limit this
        try:
            await self._calls.whole(made, fetch.places[partition])
        except (Unavailable, Misrouted):
            return  # the process has ended, and its leases run out


def _name() -> str:
    return secrets.token_hex(12)
