"""The leader's book of the in-sync set: which standbys must have applied a record before it may be answered. Pure.

The in-sync set (ISR) of a shard is a part of the value of one key in etcd, `state`. Only its members may become leader. It is
changed by the leader of the epoch alone, with transactions that compare the key's mod_revision. Invariants, with `Book` as the
leader's side:

- **C2** etcd's ISR is a part of `required()` of the leader of that epoch, at all times. While a transaction is in doubt, the
  larger set counts.
- **C4** An epoch has at most one leader; it was complete and in the ISR when it was elected (`replica.member`).
- **C5** Each member of the ISR has every record that was ever answered. A standby that is `wanted` is required at once, and
  comes in when it has applied the leader's whole stream as it was at that moment: records that were answered later needed it,
  all others are older.
- **C6** A deposed leader does no harm: its answers need a member that has been elected since, and its transactions compare a
  revision that is gone.

| rule | event | call |
| --- | --- | --- |
| R1 | may a record be answered? | `covered`: applied by the ISR, the ISR of every pending transaction, wanted standbys |
| R2 | a transaction is to be sent | `take_in` and `let_go` return a `Change`; it is pending from then on |
| R3 | a standby is near the end of the stream | `want`, with the leader's newest LSN; `withdraw` takes it back |
| R4 | a member is silent or far behind | `let_go`; it counts until success is known |
| R5 | a transaction succeeded, or `state` was read | `know`: settles transactions that compare with an older revision |
| R6 | a standby says HELLO | `greet`: files of a replica that is required are never replaced |

A transaction that etcd refused says so together with the present `state`; without an answer nothing is called, and the leader
reads `state`. Connections: acknowledgements of a connection count until the replica's next HELLO; later ones from the old
connection must be dropped by the caller.

>>> book = Book("a", revision=7, isr={"a", "b"})
>>> book.acknowledge("b", 40)
>>> book.covered(50)
40
>>> change = book.let_go({"b"}, min_isr=1)
>>> change
Change(revision=7, isr=frozenset({'a'}))
>>> sorted(book.required()), book.covered(50)
(['a', 'b'], 40)
>>> book.know(8, change.isr)
>>> sorted(book.required()), book.covered(50)
(['a'], 50)
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple


class Change(NamedTuple):
    """A transaction: `state` gets this ISR if its mod_revision is still this one."""

    revision: int
    isr: frozenset[str]


class Greeting(Enum):
    """The answer to a HELLO."""

    RESUME = "resume"  # records go on behind the last one that the replica has
    SYNC = "sync"  # the replica replaces its files by the leader's
    LATER = "later"  # it must leave the ISR first: send `let_go({replica}, min_isr=1)`, and let it ask again


def handed_over_isr(me: str, isr: frozenset[str], min_isr: int) -> frozenset[str]:
    """The ISR that a leader hands over. It leaves, as far as `min_isr` allows: its process restarts, and answers of the next
    leader would wait for it.

    >>> sorted(handed_over_isr("a", frozenset("abc"), 2)), sorted(handed_over_isr("a", frozenset("ab"), 2))
    (['b', 'c'], ['a', 'b'])
    """
    return isr - {me} if len(isr) > min_isr else isr


class Book:
    """The membership of one epoch, as its leader knows it. Replicas are named by their ids."""

    def __init__(self, me: str, revision: int, isr: Collection[str]) -> None:
        """Requires: the revision and ISR of the transaction that elected this leader."""
        self.me, self.revision, self.isr = me, revision, frozenset(isr)
        self._pending: set[Change] = set()  # transactions that may still be applied
        self._wanted: dict[str, int] = {}  # standbys on their way in: the LSN that each must have applied
        self._applied: dict[str, int] = {}  # LSNs that standbys have acknowledged
        self._required = self.isr | {me}

    def required(self) -> frozenset[str]:
        """R1: the replicas that must have applied a record before it is answered, the leader among them."""
        return self._required

    def _count_required(self) -> None:
        self._required = frozenset({self.me}).union(self.isr, *(change.isr for change in self._pending), self._wanted)

    def covered(self, lsn: int) -> int:
        """The LSN up to which all required replicas have applied the stream, which the leader has up to `lsn`."""
        return min((self._applied.get(replica, 0) for replica in self._required if replica != self.me), default=lsn)

    def applied(self, replica: str) -> int | None:
        """The LSN that a standby has acknowledged. None: it has never attached, or its files are being replaced."""
        return self._applied.get(replica)

    # Standbys

    def greet(self, replica: str, lsn: int | None) -> Greeting:
        """R6: a standby says HELLO. `lsn`: the one behind which it can resume; None if it cannot."""
        self.withdraw(replica)
        self._applied.pop(replica, None)
        if lsn is not None:
            self._applied[replica] = lsn
            return Greeting.RESUME
        return Greeting.LATER if replica in self._required else Greeting.SYNC

    def acknowledge(self, replica: str, lsn: int) -> None:
        """A complete standby has applied the stream up to this LSN."""
        self._applied[replica] = lsn

    def want(self, replica: str, lsn: int) -> None:
        """R3: a complete standby is to come in. `lsn`: the leader's newest record. Answers need the standby from now on."""
        if replica not in self.isr and replica not in self._wanted:
            self._wanted[replica] = lsn
            self._count_required()

    def withdraw(self, replica: str) -> None:
        """A standby is no longer wanted. It stays required if it is a member, or if a pending transaction would make it one."""
        if self._wanted.pop(replica, None) is not None:
            self._count_required()

    # Transactions

    def take_in(self) -> Change | None:
        """R3: the transaction that takes in all wanted standbys that have applied enough. None: there are none."""
        ready = {replica for replica, lsn in self._wanted.items() if self._applied.get(replica, -1) >= lsn}
        return self._propose(self.isr | ready) if ready else None

    def let_go(self, replicas: Collection[str], min_isr: int) -> Change | None:
        """R4: the transaction that removes members, as far as `min_isr` are left. None: none can go. A replica may count only
        because an earlier transaction is in doubt, and perhaps lost: then any transaction that succeeds settles it (R5)."""
        going = sorted(self.isr.intersection(replicas) - {self.me})[: max(0, len(self.isr) - min_isr)]
        in_doubt = frozenset().union(*(change.isr for change in self._pending)) - self.isr - {self.me}
        return self._propose(self.isr - set(going)) if going or in_doubt.intersection(replicas) else None

    def _propose(self, isr: frozenset[str]) -> Change:
        change = Change(self.revision, isr)
        self._pending.add(change)
        self._count_required()
        return change

    def know(self, revision: int, isr: Collection[str]) -> None:
        """R5: `state` has this mod_revision and ISR, because a transaction of this leader succeeded, or because it was read.

        A pending transaction that compares with an older revision was applied or never will be. One that compares with
        this revision may still be on its way."""
        if revision > self.revision:
            self.revision, self.isr = revision, frozenset(isr)
        self._pending = {change for change in self._pending if change.revision >= revision}
        self._wanted = {replica: lsn for replica, lsn in self._wanted.items() if replica not in self.isr}
        self._count_required()
