"""A leader with an engine and standbys, all on one event loop and on loopback, for tests of replication."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.replica import replica_file
from turtlemq.replica.copy_source import CopySource
from turtlemq.replica.frames import BadPeer
from turtlemq.replica.lead import Lead
from turtlemq.replica.lead_types import LeadOptions
from turtlemq.replica.link import Identity, Turned
from turtlemq.replica.shipping import ShippingDoor
from turtlemq.replica.standby import NotTrusted, Standby, StandbyOptions
from turtlemq.replica.stream import RING_BYTES, Stream
from turtlemq.server.peer_port import PeerPort
from turtlemq.storage.door import Door

SECRET = b"a secret of the cluster"
BEAT_S = 0.05
PAUSES_S = 0.03, 0.5  # the shortest and the longest pause before the next connection


def identity(node: str, cluster: str = "prod", secret: bytes = SECRET, shard: int = 0) -> Identity:
    return Identity(cluster, shard, node, secret)


class OneProcess(ShippingDoor):
    """Seals run in this process."""

    def fresh(self) -> Door:
        return self.beside()


@dataclass
class Pair:
    """A leader of the folder `leader`, and the events that both sides have logged."""

    root: Path
    lead: Lead
    engine: Engine
    port: int
    required: set[str]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: bool = False

    def log(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def standby(self, name: str = "b", *, me: Identity | None = None, door: Door | None = None, **options: Any) -> Standby:
        """A standby with the folder of this name."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        door = door or Door()
        facts = replica_file.take(door, folder, "prod")
        return Standby(folder, door, me or identity(name), facts, StandbyOptions(**options), log=self.log)

    @asynccontextmanager
    async def following(self, name: str = "b", **more: Any) -> AsyncIterator[Standby]:
        """A standby that follows meanwhile."""
        standby = self.standby(name, **more)
        task = asyncio.ensure_future(self.follow(standby))
        try:
            yield standby
        finally:
            await standby.stop()
            await task

    async def follow(self, standby: Standby) -> None:
        """Follow this leader again and again, until the standby ceases. Raises `NotTrusted` if its disk fails."""
        pause_s = PAUSES_S[0]
        while not standby.ceased:
            before = standby.lsn
            try:
                self.log("leader_lost", why=await standby.follow("127.0.0.1", self.port))
            except NotTrusted:
                raise
            except (BadPeer, TimeoutError, OSError) as error:
                self.log("refused_by_leader" if isinstance(error, Turned) else "no_leader", why=str(error))
            pause_s = PAUSES_S[0] if standby.lsn > before else min(PAUSES_S[1], 2 * pause_s)
            await asyncio.sleep(pause_s)

    def put(self, count: int, prefix: str = "m", topic: str = "t") -> None:
        """Messages in the engine: records, that nothing has acknowledged yet."""
        batch = [Message(b"x" * 100, due_ms=10**12, id=f"{prefix}{n}") for n in range(count)]
        self.engine.submit(topic, batch, now_ms=0)

    async def end(self) -> None:
        """Close the engine, and wait until the standbys have its last records."""
        if not self.ended:
            self.ended = True
            self.engine.close()
            await self.lead.finish(5)

    async def all_covered(self) -> None:
        await self.lead.covered(self.lead.stream.lsn, 30)


@asynccontextmanager
async def leading(
    root: Path,
    required: Collection[str] = ("b",),
    ring_bytes: int = RING_BYTES,
    stream: Stream | None = None,
    copies: bool = False,
    **options: Any,
) -> AsyncIterator[Pair]:
    """A leader for a while. `copies`: a standby that cannot resume gets the leader's files; else it is refused."""
    folder = root / "leader"
    folder.mkdir(exist_ok=True)
    facts = replica_file.take(Door(), folder, "prod")
    assert facts.lsn is not None
    assert facts.chain is not None
    stream = stream or Stream(facts.epoch + 1, facts.lsn, facts.chain, ring_bytes=ring_bytes, lock=threading.Lock())
    members = set(required)
    events: list[tuple[str, dict[str, Any]]] = []
    settings = LeadOptions(**{"heartbeat_s": BEAT_S, "lag_max_s": 0.5, **options})
    lead = Lead(
        stream,
        identity("a"),
        settings,
        lambda: members,
        own="a",
        member_of=lambda hello: hello.node,
        log=lambda event, **fields: events.append((event, fields)),
    )
    engine = await asyncio.to_thread(Engine.open, folder, door=OneProcess(stream=stream, root=folder))
    lead.source = CopySource(folder, stream) if copies else None
    port = PeerPort("127.0.0.1", 0)
    port.accepts = lead.accept
    await port.open()
    lead.begin()
    pair = Pair(root, lead, engine, port.port, members, events)
    try:
        yield pair
    finally:
        await pair.end()
        lead.close()
        port.close()


async def until(condition: Any, seconds: float = 10) -> None:
    """Wait until something is true."""
    for _ in range(round(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError
