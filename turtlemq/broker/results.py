"""Results of the Broker: plain values that it returns to its callers. No behaviour, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from turtlemq.broker.delivery import Piece
from turtlemq.model import I64
from turtlemq.segment import format as f


@dataclass(frozen=True, slots=True)
class DeadRemoval:
    """A dead letter that is about to be removed."""

    group: str
    id: str
    seq: int  # of the letter
    requeued_seq: int  # the seq under which it sleeps again; 0: it is deleted


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """Figures of all groups together."""

    ready: int
    reserve: int
    history: int
    cancelled: int
    bytes: int
    segments: int


@dataclass(slots=True)
class Interrupted:
    """Steps that involve another store, and that the end of the last process may have left half done. The topic completes them
    when it is opened."""

    noted_seq: int = 0  # newest seq of the Index at the last checkpoint: retries up to there were journaled as sleeping
    cancelled_retry_ids: dict[str, dict[str, int]] = field(default_factory=dict)  # by group: cancelled ids that may still sleep,
    # and the newest seq of the Index then: a later retry is that of a new message with the same id
    removals: list[DeadRemoval] = field(default_factory=list)  # dead letters that were about to be removed


class ReserveTerms(TypedDict, total=False):
    """The terms on which messages are handed out."""

    ttr_ms: int | None  # of the leases; None: that of the message or the topic
    consumer: str  # a name for people
    auto: bool  # the messages are acknowledged, durably, before they are handed out
    low: int | None  # at most so many of low priority; None: any number


@dataclass(slots=True)
class Reserved:
    """The messages of a fetch: documents and their columns, piece by piece."""

    pieces: list[Piece] = field(default_factory=list)
    until_ms: list[I64] = field(default_factory=list)  # end of each lease, by piece
    bytes: int = 0  # of the documents
    lease: str = ""  # the token of the leases; empty: no message is leased
    more: bool = False  # empty only because so much was skipped: fetch again at once
    idle: bool = False  # empty, and nothing has changed

    def __len__(self) -> int:
        return sum(len(piece.which) for piece in self.pieces)

    @property
    def ids(self) -> list[str]:
        return [id_ for piece in self.pieces for id_ in piece.messages.ids]

    def documents(self) -> list[f.Document]:
        """The decoded documents. Not for hot paths."""
        return [piece.read.decode(i) for piece in self.pieces for i in piece.which.tolist()]


@dataclass(frozen=True, slots=True)
class Acked:
    """The result of a list of acks and failures."""

    acked: int
    failed: int  # to be retried
    dead: int
    unknown: list[str]  # not in flight
    late: list[str] = field(default_factory=list)  # in flight under another lease than the named one


@dataclass(frozen=True, slots=True)
class Extended:
    """The result of an extend: how many leases end later now."""

    extended: int
    unknown: list[str]  # not in flight
    late: list[str] = field(default_factory=list)  # in flight under another lease than the named one


def split_acks(acks: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Split a list of acks into handled ids and failed ids.

    >>> split_acks(["a", "-b", "c"])
    (['a', 'c'], ['b'])
    """
    joined = "\0".join(acks)  # one search tells that there is nothing to split, the usual case
    if joined[:1] != "-" and "\0-" not in joined:
        return acks, []
    return [ack for ack in acks if ack[:1] != "-"], [ack[1:] for ack in acks if ack[:1] == "-"]
