"""A leader's right to answer: its lease in etcd, or promises of all required members not to run. Pure.

Writes need neither, for they need the acknowledgements of all required members (`replica.membership`). This right is for reads:
without it, a leader that was deposed without knowing could tell an old state.

Times are those of one steady clock that goes on while the machine sleeps. The lease counts from the moment at which the last
confirmed keepalive was *sent*, and for 0.8 of its time. While the lease has less than 2 T left, BEATs ask for a promise; a
standby that acknowledges such a BEAT does not run for 2.5 T from its arrival, and the leader relies on it for 2 T from its
sending. A leader without other required members has its lease alone. So the service goes on without etcd as long as all
required members answer.

>>> tenure = Tenure("a")
>>> tenure.kept_alive(sent_ms=10_000)
>>> tenure.may_answer(12_399, {"a", "b"}), tenure.may_answer(12_400, {"a", "b"}), tenure.asks_promise(11_300)
(True, False, True)
>>> tenure.promised("b", sent_ms=12_000)
>>> tenure.may_answer(13_199, {"a", "b"}), tenure.may_answer(13_199, {"a", "b", "c"}), tenure.may_answer(13_199, {"a"})
(True, False, False)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from turtlemq.errors import Unavailable

BEAT_MS = 600  # T: a leader sends a BEAT so often
LEASE_MS = 3_000
LEASE_TRUSTED = 0.8  # of the lease: two clocks measure it
PROMISE_TRUSTED = 2.0  # T; standbys keep a promise for 2.5 T
_ASK_BELOW = 2.0  # T: with less time left on the lease, promises are asked for


class NotLeading(Unavailable):
    """This server cannot be sure that it still leads. The request may have been done; send it again with the same ids."""

    code = "NOT_REPLICATED"


@dataclass
class Tenure:
    """The right of one leader in one epoch."""

    me: str
    lease_ms: int = LEASE_MS
    beat_ms: int = BEAT_MS
    _kept_ms: int | None = None  # when the last confirmed keepalive was sent; None: `lead` hangs on no lease of this process
    _promises: dict[str, int] = field(default_factory=dict)  # by replica: when the last such BEAT was sent that it acknowledged

    def kept_alive(self, sent_ms: int) -> None:
        """Etcd confirmed a keepalive, or a grant, that was sent then. Requires: `lead` hangs on this lease."""
        self._kept_ms = max(sent_ms, self._kept_ms or sent_ms)

    def lease_lost(self) -> None:
        """Etcd does not know the lease any more."""
        self._kept_ms = None

    def promised(self, replica: str, sent_ms: int) -> None:
        """A standby acknowledged a BEAT that asked for a promise and was sent then."""
        self._promises[replica] = max(sent_ms, self._promises.get(replica, sent_ms))

    def lease_left_ms(self, now_ms: int) -> float:
        """Time until the lease no longer counts; not above 0 if it does not."""
        return 0.0 if self._kept_ms is None else self._kept_ms + LEASE_TRUSTED * self.lease_ms - now_ms

    def asks_promise(self, now_ms: int) -> bool:
        """Should a BEAT that is sent now ask for a promise?"""
        return self.lease_left_ms(now_ms) < _ASK_BELOW * self.beat_ms

    def may_answer(self, now_ms: int, required: Collection[str]) -> bool:
        """Is it certain that no other replica has been elected and has answered?"""
        if self.lease_left_ms(now_ms) > 0:
            return True
        since = now_ms - PROMISE_TRUSTED * self.beat_ms
        others = [replica for replica in required if replica != self.me]
        return bool(others) and all(self._promises.get(replica, since) > since for replica in others)

    def check_may_answer(self, now_ms: int, required: Collection[str]) -> None:
        """Raise `NotLeading` unless an answer may go out now."""
        if not self.may_answer(now_ms, required):
            raise NotLeading
