"""A request about a topic with partitions, and the ways to put parts of it to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from turtlemq.errors import Unavailable
from turtlemq.server.outbound import OutboundAnswer
from turtlemq.server.outgoing.reply import Answered
from turtlemq.server.proxy import INTERNAL, PARTITION, Misrouted, pass_back
from turtlemq.server.shards.calls import READ_S, Calls, Part, made_of
from turtlemq.server.shards.fan_fetch import FanFetch


class Ask:
    """A request about a topic with partitions. `places`: their shards. `agree`: asks the owner how many there are, and lets it
    make those that are missing."""

    def __init__(
        self,
        request: web.Request,
        topic: str,
        places: Sequence[int],
        calls: Calls,
        fetches: FanFetch,
        agree: Callable[[], Awaitable[int]],
    ) -> None:
        self.request, self.topic, self.places, self.calls, self.fetches = request, topic, list(places), calls, fetches
        self._agree = agree

    @property
    def count(self) -> int:
        return len(self.places)

    def named(self, partition: int) -> str:
        """The partition, as the header names it."""
        return f"{partition}/{self.count}"

    async def whole(self, partition: int) -> Answered:
        """The answer of one partition to the request as it came."""
        self.request[PARTITION] = self.named(partition)

        async def use(response: OutboundAnswer) -> web.StreamResponse:
            return await pass_back(self.request, response)

        return await self.calls.asked(self.request, self.places[partition], READ_S, use)

    async def part(self, partition: int, body: bytes, path: str = "", method: str = "") -> Part:
        """The answer of one partition to its part of the request. With `method`, to another request, which is a step of
        the answer to this one."""
        more = {PARTITION: self.named(partition)}
        made = made_of(self.request, path or self.request.raw_path, body, more, method)
        if method:
            made[INTERNAL] = True  # the right to the request was checked; this one is a step of it
        try:
            return await self.calls.whole(made, self.places[partition])
        except Misrouted:
            if await self._agree() != self.count:
                raise
            return await self.calls.whole(made, self.places[partition])

    async def parts(self, bodies: Mapping[int, bytes], path: str = "", method: str = "") -> dict[int, Part]:
        """The answers of several partitions. Raises `Misrouted` if one was elsewhere and nothing was done, `Unavailable` if one
        did not answer."""
        asked = [self.part(partition, body, path, method) for partition, body in bodies.items()]
        answers: list[Part | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        done = sum(isinstance(answer, Part) and answer.status < 300 for answer in answers)
        other = next((error for error in failed if not isinstance(error, Misrouted | Unavailable)), None)
        if other is not None:
            raise other
        if failed and (not done or self.request.method in ("GET", "HEAD")):
            raise next((error for error in failed if isinstance(error, Unavailable)), failed[0])
        if failed:
            text = f"{failed[0]} This was done in {done} of {len(bodies)} partitions; send it again with the same ids."
            raise Unavailable(text, partitions_done=done)
        return {partition: answer for partition, answer in zip(bodies, answers, strict=True) if isinstance(answer, Part)}

    async def all(self, body: bytes = b"", path: str = "", method: str = "") -> dict[int, Part]:
        """The answers of all partitions to the same request."""
        return await self.parts(dict.fromkeys(range(self.count), body), path, method)
