"""A model of etcd for walks over the membership rules: revisions, and leases that end late or begin anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.trust.model import Broken
from turtlemq.replica.member_events import Bid, Seen
from turtlemq.replica.membership import Change
from turtlemq.replica.tenure import LEASE_MS

_EMPTY = Seen(at=1)


@dataclass
class Etcd:
    """The keys `state` and `lead` of one shard. Each method is one request, carried out at once; None: refused."""

    state: Seen = _EMPTY
    leases: dict[int, int] = field(default_factory=dict)  # when each may end, in milliseconds
    history: list[Seen] = field(default_factory=lambda: [Seen(at=1)])  # for watches
    granted: int = 0
    leaders: dict[int, str] = field(default_factory=dict)  # by epoch
    rebooted: dict[str, int] = field(default_factory=dict)  # by replica: revision at which it said that its power was lost

    def read(self, _: int) -> Seen:
        return self.state

    def grant(self, now_ms: int) -> int:
        self.granted += 1
        self.leases[self.granted] = now_ms + LEASE_MS
        return self.granted

    def keep_alive(self, now_ms: int, lease: int) -> bool:
        if lease in self.leases:
            self.leases[lease] = now_ms + LEASE_MS
        return lease in self.leases

    def revoke(self, _: int, lease: int) -> bool:
        self.leases.pop(lease, None)
        if self.state.lead is not None and self.state.lease == lease:
            self._put(lead=None)
        return True

    def delete_lead(self, _: int, at: int) -> bool:
        """Delete `lead` unless it was put after this revision."""
        if self.state.lead is not None and self.lead_at <= at:
            self._put(lead=None)
        return True

    def bid(self, _: int, replica: str, bid: Bid, lease: int) -> int | None:
        if self.state.revision != bid.revision or self.state.lead is not None or lease not in self.leases:
            return None
        if self.state.epoch and replica not in self.state.isr:
            raise Broken(f"C4: {replica} is elected, and was not in the ISR {sorted(self.state.isr)}")
        return self._elect(replica, bid.epoch, bid.isr, bid.nonce, lease)

    def hand_over(self, _: int, change: Change, epoch: int, to: str, lease: int) -> int | None:
        if self.state.revision != change.revision or lease not in self.leases:
            return None
        return self._elect(to, epoch + 1, change.isr, f"handover {epoch}", lease)

    def force(self, replica: str) -> int:
        """An operator makes a replica the only member. No process leads in this epoch. Requires: `lead` is absent."""
        epoch = self.state.epoch + 1
        return self._put(revision=self.state.at + 1, epoch=epoch, leader=replica, isr=frozenset({replica}), nonce="forced")

    def _elect(self, replica: str, epoch: int, isr: frozenset[str], nonce: str, lease: int) -> int:
        if self.leaders.setdefault(epoch, replica) != replica or epoch <= self.state.epoch:
            raise Broken(f"C4: {self.leaders[epoch]} and {replica} lead in epoch {epoch}")
        revision = self.state.at + 1
        return self._put(revision=revision, epoch=epoch, leader=replica, isr=isr, nonce=nonce, lead=replica, lease=lease)

    def change(self, _: int, change: Change) -> int | None:
        if self.state.revision != change.revision:
            return None
        return self._put(revision=self.state.at + 1, isr=change.isr)

    def claim(self, _: int, replica: str, revision: int, lease: int) -> int | None:
        if self.state.revision != revision or self.state.lead is not None or lease not in self.leases:
            return None
        return self._put(lead=replica, lease=lease)

    def reboot(self, _: int, replica: str, revision: int) -> int | None:
        """A replica says that its machine has lost power, if `state` is still as it was."""
        if self.state.revision != revision:
            return None
        self.rebooted[replica] = self.state.at + 1
        return self._put()

    def _put(self, **changes: Any) -> int:
        at = self.state.at + 1
        if changes.get("lead") is not None:
            self.lead_at = at
        state = self.state._replace(at=at, **changes)
        lost = frozenset(name for name, when in self.rebooted.items() if when > state.revision and name in state.isr)
        self.state = state._replace(rebooted=lost)
        self.history.append(self.state)
        return at

    lead_at: int = 0  # revision at which `lead` was put

    def end_lease(self, lease: int) -> None:
        self.revoke(0, lease)

    def renew_all(self, now_ms: int) -> None:
        """Etcd has a new leader of its own: all leases begin anew."""
        self.leases = dict.fromkeys(self.leases, now_ms + LEASE_MS)
