"""Topics with partitions: how many each has, and the topics in all its shards that make it up.

The shard of partition 0, the owner, is where such a topic is made and deleted; its settings say how many partitions there
are. The owner makes its own part first, and deletes it last. If it is interrupted, it makes the missing parts as soon as a
request meets one, and at its next start: so a message is never stored in a part of a topic that does not exist.

A request for one partition names it (PARTITION). A process that has not got it, or has one of another number of partitions,
refuses the request: then the sender asks the owner (`agree`).
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from turtlemq.data_folder import read_settings
from turtlemq.errors import Corrupt, InvalidArgument, TurtleError, Unavailable
from turtlemq.server import logs
from turtlemq.server.incoming import body
from turtlemq.server.outgoing.reply import answer, encode
from turtlemq.server.proxy import INTERNAL, PARTITION, Misrouted
from turtlemq.server.request import DEADLINE
from turtlemq.server.service import Service
from turtlemq.server.shards.calls import Calls, Part, made_of
from turtlemq.server.topic_settings import TopicSettings, to_flat, to_nested
from turtlemq.shards import shard_of, shards_of
from turtlemq.storage import names

KNOWN_MAX = 10_000  # topics of other processes whose partitions are remembered
_AGREE = "agree"  # in place of a partition, in a question to the owner


def parse(text: str) -> tuple[int, int]:
    """The partition that a header names, and the number of all. Raises `InvalidArgument`.

    >>> parse("2/4")
    (2, 4)
    """
    number, sign, count = text.partition("/")
    if not sign or not number.isdecimal() or not count.isdecimal() or not int(number) < int(count) <= 64:
        raise InvalidArgument(f"{PARTITION} is a number and the number of all, such as 2/4, not {text!r:.80}")
    return int(number), int(count)


class Partitions:
    """The topics with partitions, as one process knows them."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service, self._calls = service, calls
        self._known: dict[str, int] = {}  # topics with partitions of other owners
        self._confirmed: set[str] = set()  # own topics whose other partitions are there, and set as partition 0 is
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: dict[str, asyncio.Lock] = {}  # of own topics that are made or deleted

    def of(self, topic: str) -> int:
        """How many partitions a topic has, as far as this process knows: 1 at least."""
        own = self._own(topic) if self._service.serving else 0
        return own or (1 if self._calls.has(self.owner(topic)) else self._known.get(topic, 1))

    def met(self) -> dict[str, int]:
        """Topics with partitions that this process has, or has met."""
        topics = self._service.engine.topics if self._service.serving else {}
        return self._known | {name: topic.settings.partitions for name, topic in topics.items() if topic.settings.partitions > 1}

    def owner(self, topic: str) -> int:
        """The shard of a topic, or of its partition 0."""
        return shard_of(topic, self._calls.shards)

    def _own(self, topic: str) -> int:
        """The number of partitions that the settings in this shard tell; 0: the topic is not there, or they cannot be read."""
        engine = self._service.engine
        if (found := engine.topics.get(topic)) is not None:
            return found.settings.partitions
        if topic not in engine.trouble:
            return 0
        try:
            return read_settings(engine.door, engine.root / names.TOPICS / topic, engine.settings).partitions
        except Corrupt:
            return 0

    def learn(self, topic: str, count: int) -> None:
        """Note the number that the owner gives for one of its topics."""
        if count == 1:
            self._known.pop(topic, None)
        elif len(self._known) < KNOWN_MAX:
            self._known[topic] = count

    def places(self, topic: str, count: int) -> list[int]:
        """The shards of all partitions."""
        return shards_of(topic, count, self._calls.shards)

    def has(self, topic: str, number: int, count: int, may_make: bool) -> bool:
        """Whether this process has a partition of a topic. `may_make`: of a request that would make it."""
        own = self._own(topic)
        return (own == count if own else may_make) and self._calls.has(self.places(topic, count)[number])

    # The owner

    def is_question(self, request: web.Request) -> bool:
        """Whether a request asks the owner how many partitions a topic has."""
        return request.headers.get(PARTITION) == _AGREE

    async def agree(self, request: web.Request, topic: str) -> int:
        """Ask the owner how many partitions a topic has, and let it make those that are missing. 0: there is no such topic."""
        question = made_of(request, f"/v1/topics/{topic}", b"", {PARTITION: _AGREE}, "PUT")
        question[INTERNAL] = True
        told = await self._calls.whole(question, self.owner(topic))
        count = int(msgspec.json.decode(told.body)["partitions"]) if told.status == 200 else 0
        if told.status != 200:
            raise Unavailable(f"the partitions of topic {topic!r} do not agree, and their owner cannot help now. Try again.")
        self.learn(topic, max(1, count))
        return count

    async def answer_question(self, request: web.Request, topic: str) -> web.Response:
        """The owner's answer to `agree`."""
        async with self._lock(topic):
            found = self._service.engine.topics.get(topic)
            if found is not None and found.settings.partitions > 1:
                await self._make_others(request, topic)
            return answer({"partitions": 0 if found is None else found.settings.partitions})

    def confirm_soon(self, request: web.Request, topic: str) -> None:
        """Make and set the other partitions of an own topic as partition 0 is, once in the life of a process: the one before may
        have been interrupted. Requires: the request is for partition 0 of it."""
        if topic not in self._confirmed:
            self._confirmed.add(topic)
            task = asyncio.get_running_loop().create_task(self._confirm(request, topic))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _confirm(self, request: web.Request, topic: str) -> None:
        try:
            async with self._lock(topic):
                if topic in self._service.engine.topics:
                    await self._make_others(request, topic)
        except (TurtleError, Misrouted) as error:
            self._confirmed.discard(topic)
            logs.warning("partitions_not_confirmed", topic=topic, error=str(error))

    async def put(self, request: web.Request, topic: str) -> Part | None:
        """Make a topic with partitions, or change its settings. None: it has none. Requires: this process is the owner."""
        await body.keep(request)
        try:
            changes = to_flat(msgspec.json.decode(await body.read(request), type=TopicSettings))
        except (msgspec.DecodeError, TurtleError):
            return None  # it is refused by the handler
        found = self._service.engine.topics.get(topic)
        count = changes.get("partitions", 1 if found is None else found.settings.partitions)
        if count > (most := self._calls.shards):
            raise InvalidArgument(f"partitions is at most {most}, the number of shards, not {count}")
        if count == 1 or (found is not None and found.settings.partitions != count):
            return None
        async with self._lock(topic):
            own = await self._part(request, topic, 0, count, await body.keep(request), "PUT")
            if own.status == 200:
                await self._make_others(request, topic)
            return own

    async def _make_others(self, request: web.Request, topic: str) -> None:
        """Make the other partitions of an own topic as partition 0 is. Raises `Unavailable` if one is not made."""
        settings = self._service.engine.topic(topic).settings
        data = encode(to_nested(settings))
        for number in range(1, settings.partitions):
            made = await self._part(request, topic, number, settings.partitions, data, "PUT")
            if made.status != 200:
                why = made.body[:300].decode(errors="replace")
                raise Unavailable(f"partition {number} of topic {topic!r} could not be set: {why}. Send it again.")

    async def delete(self, request: web.Request, topic: str) -> Part:
        """Delete a topic with partitions, partition 0 last. Requires: this process is the owner."""
        async with self._lock(topic):
            count = self.of(topic)
            for number in reversed(range(count)):
                try:
                    done = await self._part(request, topic, number, count, b"", "DELETE")
                except Misrouted:  # it was deleted before
                    continue
                if done.status != 200:
                    return done
            self._confirmed.discard(topic)
            return Part(200, "application/json", b'{"outcome":"deleted"}')

    async def _part(self, request: web.Request, topic: str, number: int, count: int, data: bytes, method: str) -> Part:
        named = {PARTITION: f"{number}/{count}", "Content-Type": "application/json"}
        made = made_of(request, f"/v1/topics/{topic}", data, named, method)
        if number:
            made.pop(DEADLINE, None)
            made[INTERNAL] = True  # the right was checked for partition 0, or the owner repairs
        return await self._calls.whole(made, self.places(topic, count)[number])

    def _lock(self, topic: str) -> asyncio.Lock:
        """The lock of a topic, which is forgotten when nothing uses it."""
        for name, lock in list(self._locks.items()):
            if not lock.locked():
                del self._locks[name]
        return self._locks.setdefault(topic, asyncio.Lock())
