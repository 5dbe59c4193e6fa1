"""The standby's part of a replica process: it calls the leader, follows it as its state machine decides, and hangs up.

There is at most one connection. A call that has not begun when the process hangs up does not begin any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turtlemq.errors import describe
from turtlemq.logical_clock import PeerTime
from turtlemq.replica import member_events
from turtlemq.replica.cluster_state import Lead
from turtlemq.replica.frames import BadPeer, Beat, Ready, Welcome
from turtlemq.replica.link import Turned
from turtlemq.replica.member_events import Drained, Event, Failed, HandoverOffered, Lost, Refused, Welcomed
from turtlemq.replica.shard_view import lead_of
from turtlemq.replica.standby import NotTrusted, Standby
from turtlemq.server.clock import now_ms
from turtlemq.server.cluster_config import parse_address
from turtlemq.server.cluster_part import ClusterPart
from turtlemq.server.replica_names import ReplicaNames
from turtlemq.server.replication import log


class Following:
    """Connections of a standby to its leaders. `tell`: tells the state machine of an event."""

    def __init__(self, part: ClusterPart, names: ReplicaNames, standby: Standby, tell: Callable[[Event], None]) -> None:
        self._part, self._names, self._standby, self._tell = part, names, standby, tell
        self._decision: asyncio.Future[bool] | None = None  # whether the connection goes on after WELCOME
        self._hung_up = 0  # how often
        self._called = 0  # `_hung_up` when the last call was asked for
        self._turn = asyncio.Lock()
        self._logged = ""
        self._stopped = False
        self.leader_time = PeerTime()  # of the last leader
        standby.decide, standby.saw_beat = self._decide, self._saw_beat
        standby.offered = lambda epoch, equal: tell(HandoverOffered(epoch, equal))

    async def call(self) -> None:
        """Call the holder of `lead`, and follow it until the connection ends."""
        called = self._hung_up
        async with self._turn:
            self._called, self._decision = called, None
            event: Event = Refused()
            lead = lead_of(self._part.view.keys, self._part.keys, self._part.shard)
            try:
                if self._may_call(called) and lead is not None and lead.replica != self._names.replica:
                    why = await self._standby.follow(*parse_address(lead.peer))
                    log("leader_lost", why=why, lsn=self._standby.lsn, epoch=lead.epoch)
            except NotTrusted as error:
                event = Failed(f"{error}. This copy is not used any more: mend the disk, empty the folder.", copy_lost=True)
            except asyncio.CancelledError:
                if called == self._hung_up:
                    raise
            except Turned as refused:
                self._part.refusal = str(refused)
                self._log_once("refused_by_leader", str(refused), lead)
            except (BadPeer, TimeoutError, OSError) as error:
                self._log_once("no_leader", str(error) or "it was silent", lead)
        self._tell(Lost() if self._was_welcomed() and isinstance(event, Refused) else event)

    def _may_call(self, called: int) -> bool:
        return called == self._hung_up and not self._stopped

    def _was_welcomed(self) -> bool:
        return self._decision is not None

    def _log_once(self, event: str, why: str, lead: Lead | None) -> None:
        """Log why there is no connection, and not again with each try."""
        about = f"{event} {why} {lead}"
        if about != self._logged:
            self._logged = about
            log(event, why=why, leader=lead and lead.peer)

    async def _decide(self, welcome: Welcome) -> bool:
        if self._called != self._hung_up:
            return False
        self._decision, self._logged = asyncio.get_running_loop().create_future(), ""
        self._part.refusal, self.leader_time = "", PeerTime()
        self._tell(Welcomed(welcome.epoch, welcome.mode == "resume"))
        return await self._decision

    def go_on(self) -> None:
        """Follow the leader that has welcomed this copy, or make its files equal to the leader's."""
        self._decide_now(True)

    def _decide_now(self, goes_on: bool) -> None:
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(goes_on)

    async def hang_up(self) -> None:
        """End the connection. Records that were not applied yet are dropped."""
        self._hung_up += 1
        self._decide_now(False)
        await self._standby.hang_up(drop=True)

    async def settle(self) -> None:
        """End the connection, apply everything that has arrived, and wait for syncs under way."""
        self._hung_up += 1
        self._decide_now(False)
        try:
            await self._standby.settle()
        except OSError as error:
            self._tell(Failed(f"{NotTrusted.__doc__} ({describe(error)})", copy_lost=True))
            return
        self._tell(Drained())

    async def stop(self) -> None:
        """End the connection for good, and write down the position. Raises `OSError`."""
        self._stopped = True
        self._hung_up += 1
        self._decide_now(False)
        await self._standby.stop()

    async def take_over(self, epoch: int) -> None:
        """Answer HANDOVER with the lease of this process."""
        lease = await self._names.until_answered(self._names.get_lease)
        if self._standby.link is not None:
            self._standby.link.send(Ready(epoch, lease, self._names.url, self._names.peer))

    def _saw_beat(self, beat: Beat) -> None:
        self.leader_time.heard(beat.clock_ms, now_ms())
        self._tell(member_events.Beat(beat.epoch, beat.promise))
