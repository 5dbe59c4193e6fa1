"""A replica whose machine lost power gives way to members that did not: they may have records that it had not synced.

It says so in etcd. When all other members have said so as well, or have stayed away for GRACE_S without any leader, it may run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from turtlemq.errors import describe
from turtlemq.replica.cluster_state import Keys
from turtlemq.replica.etcd import Etcd, EtcdError, mod_revision_is, put
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import Event, Seen, Waited
from turtlemq.server import logs

GRACE_S = 30.0  # for members whose machines did not lose power: their processes start again within seconds


class Part(Protocol):
    """The part of a `ClusterPart` that is needed here."""

    etcd: Etcd
    keys: Keys
    shard: int


class Reboot:
    """The reaction of a replica to the lost power of its machine. All methods run on the event loop."""

    def __init__(self, part: Part, member: Member, tell: Callable[[Event], None]) -> None:
        self._part, self._member, self._tell = part, member, tell
        self._timer: asyncio.TimerHandle | None = None
        self._putting: asyncio.Task[None] | None = None

    def saw(self, seen: Seen) -> None:
        """Etcd's keys were read, or have changed."""
        waits = self._member.rebooted and seen.lead is None and self._member.me in seen.isr
        if not waits:
            self.end()
            return
        if self._timer is None:
            logs.warning("power_was_lost", replica=self._member.me, grace_s=GRACE_S)
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._waited)
        if self._member.me not in seen.rebooted and (self._putting is None or self._putting.done()):
            self._putting = asyncio.get_running_loop().create_task(self._put(seen.revision))

    def end(self) -> None:
        """There is a leader, or this process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _put(self, revision: int) -> None:
        """Say so, unless `state` has changed meanwhile: a late word would tell of power that was lost after an election."""
        part = self._part
        compares = [mod_revision_is(part.keys.state(part.shard), revision)]
        try:
            await part.etcd.transact(compares, [put(part.keys.rebooted(part.shard, self._member.me), b"{}")])
        except EtcdError as error:
            logs.warning("name_server_away", why=describe(error))

    def _waited(self) -> None:
        self._timer = None
        self._tell(Waited())
