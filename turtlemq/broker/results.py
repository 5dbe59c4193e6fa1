"""What the Broker tells its callers, and what its parts tell each other. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turtlemq.broker import delivery
from turtlemq.broker.delivery import Piece
from turtlemq.model import I64
from turtlemq.segment import format as f


@dataclass(frozen=True, slots=True)
class DeadRemoval:
    """A dead letter that is about to go."""

    group: str
    id: str
    seq: int  # of the letter
    requeued_seq: int  # the seq under which it sleeps again; 0: it is deleted


@dataclass(slots=True)
class Interrupted:
    """Steps between the Broker and its neighbours that the end of the last process may have cut in half. The topic completes
    them when it is opened."""

    noted_seq: int = 0  # of the Index at the last checkpoint: what came to sleep up to there, the checkpoint knew
    cancelled_retry_ids: dict[str, list[str]] = field(default_factory=dict)  # by group: cancelled ids that may still sleep for it
    removals: list[DeadRemoval] = field(default_factory=list)  # dead letters that were about to go


@dataclass(slots=True)
class Reserved:
    """What a fetch hands out: documents by piece, with the columns that a shell needs for its answer."""

    pieces: list[Piece] = field(default_factory=list)
    until_ms: list[I64] = field(default_factory=list)  # for each piece, for each message
    more: bool = False  # nothing is here because so much was passed over: ask again at once
    idle: bool = False  # nothing was there, and nothing has changed

    def __len__(self) -> int:
        return sum(len(piece.which) for piece in self.pieces)

    @property
    def ids(self) -> list[str]:
        return [id_ for piece in self.pieces for id_ in piece.messages.ids]

    @property
    def lease_ends(self) -> list[int]:
        """When the lease of each ends."""
        return [end for until in self.until_ms for end in until.tolist()]

    def documents(self) -> list[f.Document]:
        """Decoded. Not for hot paths."""
        return [delivery.document(piece.read, i) for piece in self.pieces for i in piece.which.tolist()]


@dataclass(frozen=True, slots=True)
class Acked:
    """The answer to a grouped ack list."""

    acked: int
    failed: int
    dead: int
    unknown: list[str]


def split_acks(acks: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Ids that were handled, and ids that failed.

    >>> split_acks(["a", "-b", "c"])
    (['a', 'c'], ['b'])
    """
    joined = "\0".join(acks)  # usually there is nothing to split, which is seen at once
    if joined[:1] != "-" and "\0-" not in joined:
        return acks, []
    return [ack for ack in acks if ack[:1] != "-"], [ack[1:] for ack in acks if ack[:1] == "-"]
