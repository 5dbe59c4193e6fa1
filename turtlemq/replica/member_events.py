"""Words of a replica's state machine (`replica.member`): states, events that it hears, actions that it asks for. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

WENT_BACK = (
    "the name server went back in time: it was restored from an old copy, or its data was exchanged. This replica stops, for "
    "answers could be lost. Give etcd its newest data again, or choose a copy with 'turtlemq cluster force-leader'; then restart "
    "all nodes"
)


class State(Enum):
    """The state of a replica's process."""

    START = "start"
    ATTACH = "attach"  # looks for the leader, or waits for its turn to run
    SYNC = "sync"  # replaces its files by the leader's
    FOLLOW = "follow"  # applies records
    IN_SYNC = "in sync"  # applies records, and is in the ISR
    RUN = "run"  # stands for election
    OPEN = "open"  # elected; the engine opens the folder
    LEAD = "lead"
    RETIRE = "retire"  # hands over to another member
    STUCK = "stuck"  # needs an operator


class Do(Enum):
    """An action for the shell, with the event that reports its end."""

    READ = "read `state`, `lead` and `want`, again and again until etcd answers; then watch from there → Seen"
    HELLO = "connect to the holder of `lead` and say HELLO → Welcomed, Refused"
    FOLLOW = "apply the records of this connection and acknowledge them"
    HANG_UP = "close the connection to the leader; drop all frames from it, and records that were not applied yet"
    STOP = "stop receiving and acknowledging, apply all received records, close the connection → Drained"
    PATIENCE = "restart the election timer with this many milliseconds → PatienceOver"
    RETRY = "start the other timer → RetryNow"
    MARK_INCOMPLETE = "write `complete = false` durably → Marked"
    MARK_COMPLETE = "write `complete = true` durably → Marked"
    NOTE = "write the epoch of the leader that this copy follows from now on, or of its own, durably"
    NOTE_STATE = "write epoch and revision of `state` durably"
    COPY = "replace files by the leader's, once for a connection → Copied"
    BID = "send the transaction of `Member.bid` once, with this process's lease → BidAnswered"
    GIVE_UP = "revoke the lease of the bid, again and again until etcd answers → GaveUp"
    REVOKE_LEAD = "delete `lead`, which an earlier process of this folder held, if it is still the one of `Member.seen`"
    LEASE = "answer HANDOVER with this process's one lease"
    OPEN = "keep LSN and chain, give LOCK to the engine, open it → Opened"
    SERVE = "begin `membership.Book`, and `Tenure` if `lead` hangs on this process's lease; accept HELLOs, answer requests"
    CLAIM = "put `lead` with a new lease if mod_revision(state) is still the one of `Member.seen` and `lead` is absent"
    RETIRE = "refuse requests, close the engine, wait for a member with the same LSN and chain, send the transaction → Retired"
    EXEC = "answer nothing more, end the worker process, exec"
    ALARM = "report `Action.text`, and stay"


class Action(NamedTuple):
    """One action, with its parameters."""

    do: Do
    wait_ms: int = 0  # of PATIENCE and RETRY
    read: int = 0  # of READ: its number, which `Seen.read` repeats
    text: str = ""  # of ALARM


class Bid(NamedTuple):
    """The transaction of a candidate: compares `revision` of `state` and the absence of `lead`, and puts the rest."""

    revision: int
    epoch: int
    isr: frozenset[str]
    nonce: str


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────


class Begin(NamedTuple):
    """The process has started."""


class Seen(NamedTuple):
    """The values of `state` and `lead` in etcd, by a read or a watch."""

    at: int  # etcd's revision at that moment
    revision: int = 0  # mod_revision of `state`; 0 and the defaults below: there is none yet
    epoch: int = 0
    leader: str = ""
    isr: frozenset[str] = frozenset()
    nonce: str = ""
    lead: str | None = None  # the replica that holds it
    lease: int = 0  # on which `lead` hangs
    first: bool = False  # this node is the first one of `want`
    read: int = 0  # the number of the READ that this answers; 0: a watch
    rebooted: frozenset[str] = frozenset()  # replicas whose machines have lost power since `state` was last changed


class Unwatched(NamedTuple):
    """The watch has ended: changes may have been missed."""


class Welcomed(NamedTuple):
    """The leader's WELCOME."""

    epoch: int
    resume: bool  # False: the files are to be replaced


class Refused(NamedTuple):
    """No leader was reached, or it said REFUSED."""


class Beat(NamedTuple):
    """The leader's BEAT. It is acknowledged after `handle` has returned."""

    epoch: int
    promise: bool = False


class Lost(NamedTuple):
    """The connection to the leader has ended. Records that were not applied yet are dropped."""


class PatienceOver(NamedTuple):
    """The election timer has run out."""


class RetryNow(NamedTuple):
    """The other timer has run out."""


class Waited(NamedTuple):
    """A replica whose machine lost power has waited long enough for those of other members."""


class Marked(NamedTuple):
    """The mark in the file REPLICA is durable."""

    complete: bool


class Copied(NamedTuple):
    """All pieces are in place and synced, and the stream was applied up to this LSN. Told again after each step."""

    applied_lsn: int
    pin_lsn: int  # the newest of all pins


class Drained(NamedTuple):
    """Receiving has stopped, and all received records are applied."""


class BidAnswered(NamedTuple):
    """Etcd's answer to the bid with this nonce. None: there was no answer. One that is no longer awaited is dropped."""

    won: bool | None
    nonce: str


class GaveUp(NamedTuple):
    """The lease of the bid is revoked."""


class HandoverOffered(NamedTuple):
    """The leader's HANDOVER. `equal`: LSN and chain are those of this copy."""

    epoch: int
    equal: bool


class Opened(NamedTuple):
    """The engine is open."""


class HandoverAsked(NamedTuple):
    """An operator, `want`, damage or a wrong clock asks this leader to hand over to another replica."""

    to: str


class Retired(NamedTuple):
    """The handover is over, however it ended: the engine is closed."""


class Met(NamedTuple):
    """A peer has seen this epoch."""

    epoch: int


class Health(NamedTuple):
    """Disk and clock allow this replica to lead, or they do not."""

    good: bool


class Failed(NamedTuple):
    """This process cannot go on. `copy_lost`: its files are not to be trusted (failed sync, chain broken twice)."""

    why: str
    copy_lost: bool


Event: TypeAlias = (
    Begin | Seen | Unwatched | Welcomed | Refused | Beat | Lost | PatienceOver | RetryNow | Waited | Marked | Copied | Drained
    | BidAnswered | GaveUp | HandoverOffered | Opened | HandoverAsked | Retired | Met | Health | Failed
)  # fmt: skip
