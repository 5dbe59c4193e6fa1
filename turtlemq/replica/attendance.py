"""Attendance: which members of the in-sync set the leader lets go, because answers would wait for them in vain. Pure.

A member is let go if its connection is closed for a moment, if it does not come soon after an election, or if it is silent or
behind for too long. It counts until etcd has the smaller set (`replica.membership`, R4); it may come back at any time (R3).
"""

from __future__ import annotations

from dataclasses import dataclass

CLOSED_MS = 300  # a standby that restarts its connection is faster
COME_MS = 1_000  # for a member to come to a new leader
NEAR_BYTES = 4 << 20  # of records: a standby that lacks fewer can be taken in, and answers wait for it from then on


@dataclass(frozen=True, slots=True)
class Attendance:
    """A member, as its leader sees it.

    >>> Attendance(attached=True, lag_ms=2_999).must_go(3_000), Attendance(attached=True, silent_ms=3_001).must_go(3_000)
    (False, True)
    >>> [Attendance(attached=False, has_come=came, away_ms=301).must_go(3_000) for came in (True, False)]
    [True, False]
    """

    attached: bool
    has_come: bool = False  # since this leader was elected
    away_ms: int = 0  # since the end of its last connection, or since the election
    lag_ms: int = 0  # for so long it has lacked records
    silent_ms: int = 0  # since it was last heard of

    def must_go(self, lag_max_ms: int) -> bool:
        """Should the leader let it go?"""
        if self.attached:
            return max(self.lag_ms, self.silent_ms) > lag_max_ms
        return self.away_ms > (CLOSED_MS if self.has_come else COME_MS)
