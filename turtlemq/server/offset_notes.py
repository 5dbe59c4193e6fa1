"""A leader's notes for people and tools in the name server: its last record, and the committed offsets of all groups.

Written every WRITE_S if they have changed, and only while this process holds `lead`. The truth is replicated with the shard;
these notes tell how far it was, if all copies in sync are lost.
"""

from __future__ import annotations

import asyncio
import time

from turtlemq.errors import TurtleError
from turtlemq.replica.cluster_state import offsets
from turtlemq.replica.etcd import mod_revision_is, put
from turtlemq.replica.lead import Lead
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.fair_turns import in_slices
from turtlemq.server.service import Service

WRITE_S = 10.0


class OffsetNotes:
    """The notes of one leader. All methods run on the event loop."""

    def __init__(self, part: ClusterPart, lead: Lead, service: Service) -> None:
        self._part, self._lead, self._service = part, lead, service
        self._written: tuple[int, dict[str, dict[str, int]]] | None = None

    async def run(self) -> None:
        """Write the notes, again and again, while this process serves."""
        failed = False
        while self._service.serving:
            try:
                await self.write()
                failed = False
            except TurtleError as error:
                if not failed:
                    logs.warning("offsets_not_written", error=error)
                failed = True
            await asyncio.sleep(WRITE_S)

    async def write(self) -> bool:
        """Write the notes. False: they have not changed, or this process does not hold `lead`. Raises `EtcdError`."""
        part, lsn = self._part, self._lead.stream.lsn
        topics = dict(await in_slices((name, self._groups(name)) for name in sorted(self._service.engine.topics)))
        held = part.view.keys.get(part.keys.lead(part.shard))
        if held is None or self._written == (lsn, topics):
            return False
        value = offsets(lsn, topics, time.time_ns() // 1_000_000)
        compares = [mod_revision_is(held.key, held.mod_revision)]
        outcome = await part.etcd.transact(compares, [put(part.keys.seen(part.shard), value)])
        if outcome.succeeded:
            self._written = lsn, topics
        return outcome.succeeded

    def _groups(self, topic: str) -> dict[str, int]:
        """Committed offsets of the groups of a topic; of one that was deleted meanwhile, none."""
        found = self._service.engine.topics.get(topic)
        return {} if found is None else {name: stats.offset for name, stats in found.view.group_stats().items()}
