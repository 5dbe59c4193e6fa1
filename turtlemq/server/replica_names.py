"""Requests of a replica to the name server: its lease, and the transactions of elections, of the in-sync set and of handovers.

A process has one lease. It is granted when it is first needed, and kept alive until it is revoked or lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turtlemq.histogram import Histogram
from turtlemq.replica.cluster_state import Lead, ShardState, encode
from turtlemq.replica.etcd import (
    EtcdError,
    InDoubt,
    LeaseGone,
    Outcome,
    create_revision_is,
    delete,
    mod_revision_is,
    put,
    read,
)
from turtlemq.replica.frames import Ready
from turtlemq.replica.interventions import nodes_of
from turtlemq.replica.lead import boot_s
from turtlemq.replica.member_events import Bid
from turtlemq.replica.membership import Change
from turtlemq.replica.shard_view import state_of
from turtlemq.server.cluster_part import ClusterPart

RETRY_S = 0.1  # before a request is repeated that etcd did not answer
T = TypeVar("T")


def boot_ms() -> int:
    """Milliseconds of the steady clock that goes on while the machine sleeps."""
    return int(1000 * boot_s())


class ReplicaNames:
    """Requests of one replica to etcd. `url` and `peer`: the addresses of its process."""

    def __init__(self, part: ClusterPart, replica: str, url: str, peer: str, seconds: Histogram) -> None:
        self.replica, self.url, self.peer = replica, url, peer
        self.lease, self.lease_sent_ms = 0, 0  # 0: none; when the last confirmed keepalive, or the grant, was sent
        self.kept: Callable[[int, int], None] = lambda _, __: None  # a lease was kept alive by a request that was sent then
        self.lost: Callable[[int], None] = lambda _: None  # a lease has ended
        self._part, self._etcd, self._keys, self._shard = part, part.etcd, part.keys, part.shard
        self._node = part.options.node
        self._seconds = seconds
        self._granting = asyncio.Lock()

    async def _timed(self, request: Awaitable[T]) -> T:
        begun = time.perf_counter()
        try:
            return await request
        finally:
            self._seconds.add(time.perf_counter() - begun)

    async def until_answered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until etcd answers it."""
        while True:
            try:
                return await self._timed(request())
            except EtcdError:
                await asyncio.sleep(RETRY_S)

    # The lease

    async def get_lease(self, anew: bool = False) -> int:
        """The lease of this process. `anew`: the one that it had has ended. Raises `EtcdError`."""
        async with self._granting:
            if anew or not self.lease:
                sent_ms = boot_ms()
                self.lease = await self._timed(self._etcd.grant(self._part.options.lease_s))
                self.lease_sent_ms = sent_ms
            return self.lease

    async def keep_alive(self) -> None:
        """Keep the lease alive until this is cancelled."""
        while True:
            await asyncio.sleep(min(self._part.options.heartbeat_ms / 1000, self._part.options.lease_s / 5))
            if lease := self.lease:
                await self._keep_alive(lease)

    async def _keep_alive(self, lease: int) -> None:
        sent_ms = boot_ms()
        try:
            alive = await self._timed(self._etcd.keep_alive(lease))
        except EtcdError:
            return
        if alive:
            if lease == self.lease:
                self.lease_sent_ms = max(sent_ms, self.lease_sent_ms)
            self.kept(lease, sent_ms)
        else:
            self._forget(lease)

    def _forget(self, lease: int) -> None:
        if lease == self.lease:
            self.lease = 0
        self.lost(lease)

    async def revoke(self) -> None:
        """End the lease, and with it every bid that names it."""
        if lease := self.lease:
            await self.until_answered(lambda: self._etcd.revoke(lease))
            self._forget(lease)

    # Transactions

    async def bid(self, bid: Bid) -> tuple[bool | None, int]:
        """Stand for election. Returns whether it was won (None: that is not known), and the revision of `state` then."""
        try:
            lease = await self.get_lease()
        except EtcdError:
            return False, 0
        state = self._state(bid.epoch, self.replica, bid.isr, bid.nonce, "elected")
        compares = [mod_revision_is(self._state_key, bid.revision), create_revision_is(self._lead_key, 0)]
        try:
            outcome = await self._transact(compares, state, lease, self._own_lead(bid.epoch))
        except LeaseGone:
            self._forget(lease)
            return False, 0
        except InDoubt:
            return None, 0
        except EtcdError:
            return False, 0
        return outcome.succeeded, outcome.revision

    async def claim(self, epoch: int, revision: int) -> int:
        """Put `lead` again, with a new lease, if `state` is unchanged. Returns the lease; 0: it did not succeed, or may not have.
        Raises `EtcdError`."""
        lease = await self.get_lease(anew=True)
        compares = [mod_revision_is(self._state_key, revision), create_revision_is(self._lead_key, 0)]
        then = [put(self._lead_key, encode(self._own_lead(epoch)), lease)]
        outcome = await self._timed(self._etcd.transact(compares, then))
        return lease if outcome.succeeded else 0

    async def change(self, change: Change, epoch: int, nonce: str, nodes: dict[str, str], why: str) -> Outcome:
        """Change the in-sync set. `nodes`: of standbys that are attached. Raises `EtcdError`."""
        state = self._state(epoch, self.replica, change.isr, nonce, why, nodes)
        compares = [mod_revision_is(self._state_key, change.revision)]
        return await self._timed(self._etcd.transact(compares, [put(self._state_key, encode(state))], [read(self._state_key)]))

    async def hand_over(self, change: Change, to: str, node: str, ready: Ready, nonce: str) -> bool:
        """Make another member the leader. Raises `EtcdError`: then it may have succeeded, or not."""
        epoch = ready.epoch + 1
        state = self._state(epoch, to, change.isr, nonce, "handed over", {to: node})
        lead = Lead(epoch=epoch, replica=to, node=node, url=ready.url, peer=ready.peer)
        compares = [mod_revision_is(self._state_key, change.revision)]
        return (await self._transact(compares, state, ready.lease, lead)).succeeded

    async def delete_lead(self, lease: int) -> None:
        """Delete `lead`, which hung on this lease of an earlier process, if it still does."""
        held = self._part.view.keys.get(self._lead_key)
        if held is not None and held.lease == lease:
            compares = [mod_revision_is(self._lead_key, held.mod_revision)]
            await self.until_answered(lambda: self._etcd.transact(compares, [delete(self._lead_key)]))

    async def _transact(self, compares: list[dict[str, object]], state: ShardState, lease: int, lead: Lead) -> Outcome:
        then = [put(self._state_key, encode(state)), put(self._lead_key, encode(lead), lease)]
        return await self._timed(self._etcd.transact(compares, then))

    # Values

    @property
    def _state_key(self) -> str:
        return self._keys.state(self._shard)

    @property
    def _lead_key(self) -> str:
        return self._keys.lead(self._shard)

    def _own_lead(self, epoch: int) -> Lead:
        return Lead(epoch=epoch, replica=self.replica, node=self._node, url=self.url, peer=self.peer)

    def _state(
        self, epoch: int, leader: str, isr: frozenset[str], nonce: str, why: str, nodes: dict[str, str] | None = None
    ) -> ShardState:
        """The next value of `state`. Every member's node is known: from the last one, or because it is attached."""
        before = state_of(self._part.view.keys, self._keys, self._shard)
        known = {**(before.nodes if before is not None else {}), **(nodes or {}), self.replica: self._node}
        shard = self._part.decoded().shard(self._shard)
        at_ms = time.time_ns() // 1_000_000
        kept = nodes_of(shard, isr | {self.replica}, known)
        return ShardState(epoch=epoch, leader=leader, isr=tuple(sorted(isr)), nodes=kept, nonce=nonce, why=why, at_ms=at_ms)
