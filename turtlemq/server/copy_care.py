"""Care of a replica process for its copy and its clock: scrub, comparison of copies, healing, and a leader whose clock is wrong.

One look a second tells whether this process follows or leads; scrub begins anew with each role. A leader compares all copies
after each pass of scrub, at the same low pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from turtlemq.errors import TurtleError, describe
from turtlemq.model import Damage
from turtlemq.replica.clock_skew import Skew
from turtlemq.replica.healing import LeaderCare
from turtlemq.replica.scrub import Scrub
from turtlemq.replica.standby import Standby
from turtlemq.replica.standby_care import StandbyCare
from turtlemq.server import logs
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.config import Config
from turtlemq.server.metrics.meter import CopyFigures
from turtlemq.server.replication import log
from turtlemq.server.service import Service

LOOK_S = 1.0
LOOK_BYTES_PER_S = 50e6  # for files that came with damage, if scrub is switched off
RETRY_S = 10.0  # before the next try to hand over for a wrong clock


class Process(Protocol):
    """The process around it (`replica_process.ReplicaProcess`)."""

    config: Config
    part: ClusterPart
    service: Service
    standby: Standby


class CopyCare:
    """The care of one process, from `run` to its end. All methods run on the event loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._limit_ms = process.config.cluster.max_clock_skew_ms
        self._bytes_per_s = process.config.cluster.scrub_mb_per_s * 1e6
        self._scrub: Scrub | None = None
        self._scrubbing: asyncio.Task[None] | None = None
        self._care: LeaderCare | None = None  # while this process leads
        self._standby_care: StandbyCare | None = None  # while it follows
        self._scrubbed = 0  # bytes, in earlier roles
        self._wrong: set[str] = set()  # nodes whose clocks are known to be wrong
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_try_s = 0.0

    # Figures

    def _figures(self) -> CopyFigures:
        scrubbed = self._scrubbed + (0 if self._scrub is None else self._scrub.bytes)
        skews = {node: skew.ms / 1000 for node, skew in self.skews().items()}
        return CopyFigures(scrubbed, self._process.standby.healed, skews)

    def skews(self) -> dict[str, Skew]:
        """The distance of clocks from the reference, by node: on a leader of all, on a standby its own."""
        node, skew = self._process.part.options.node, self._process.standby.skew
        if self._care is not None:
            lead = self._care.lead
            nodes = {member: standby.hello.node for member, standby in lead.standbys.items()}
            return {nodes.get(member, node): each for member, each in lead.clocks.skews().items()}
        return {} if skew is None else {node: skew}

    def clock_is_right(self) -> bool:
        """May this replica lead, by its clock? As long as nothing is known, it may."""
        skew = self.skews().get(self._process.part.options.node)
        return skew is None or not skew.is_beyond(self._limit_ms)

    # Life

    async def run(self) -> None:
        """Take care until it is cancelled."""
        try:
            while True:
                self._look()
                if self._care is None and self._standby_care is not None:
                    self._begin(self._standby_care.look())
                self._check_clocks()
                self._process.service.meter.copies = self._figures()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in (*self._tasks, self._scrubbing):
                if task is not None:
                    task.cancel()
            await self._process.standby.examiner.rest_now()
            if self._care is not None:
                await self._care.examiner.rest_now()

    def _look(self) -> None:
        process, care = self._process, self._process.service.care
        if self._scrubbing is not None and care is self._care and not self._scrubbing.done():
            return
        if self._scrubbing is not None:
            self._scrubbing.cancel()
        if self._scrub is not None:
            self._scrubbed += self._scrub.bytes
        self._care = care
        root = Path(process.config.data)
        if care is None:
            self._standby_care = StandbyCare(process.standby, root, self._bytes_per_s or LOOK_BYTES_PER_S, log=log)
            self._scrub = self._standby_care.scrub
        else:
            process.service.on_damage = self._engine_found
            self._scrub = Scrub(root, care.examiner, self._bytes_per_s, care.scrubbed, self._compare, log=log)
        self._scrubbing = asyncio.get_running_loop().create_task(self._run_scrub(self._scrub))

    async def _run_scrub(self, scrub: Scrub) -> None:
        if self._bytes_per_s:
            await scrub.run()
        else:
            await asyncio.Event().wait()  # it is switched off

    async def _compare(self) -> None:
        if self._care is not None:
            await self._care.verifier.verify(self._bytes_per_s)

    def _engine_found(self, topic: str, damage: list[Damage]) -> None:
        """The engine has met damage in a topic."""
        if self._care is not None:
            self._begin(self._care.engine_found({topic: damage}))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Clocks

    def _check_clocks(self) -> None:
        node, skews = self._process.part.options.node, self.skews()
        wrong = {name for name, skew in skews.items() if skew.is_beyond(self._limit_ms)}
        for name in sorted(wrong - self._wrong):
            logs.error("clock_skew", node=name, seconds=round(skews[name].ms / 1000, 3), limit_ms=self._limit_ms)
        for name in sorted(self._wrong - wrong):
            logs.info("clock_right", node=name)
        self._wrong = wrong
        now = asyncio.get_running_loop().time()
        if node in wrong and self._care is not None and now >= self._next_try_s:
            self._next_try_s = now + RETRY_S
            self._begin(self._hand_over(wrong))

    async def _hand_over(self, wrong: set[str]) -> None:
        """This leader's clock is wrong: let a member lead whose clock is right."""
        assert self._care is not None
        lead = self._care.lead
        ready = [each for member, each in lead.standbys.items() if lead.is_required(member) and each.hello.node not in wrong]
        if not ready:
            logs.warning("handover_failed", why="no other member with a right clock is in sync")
            return
        best = max(ready, key=lambda each: each.acked).hello.node
        try:
            await self._process.part.handover(best)
        except (TurtleError, TimeoutError) as error:
            logs.warning("handover_failed", node=best, why=describe(error))
