"""The books of a soak: the promises about every message, for hours, in little memory.

A message has an entry from before it is put until every group has settled it or it is cancelled; after that a byte says how it
ended. A request that was not answered leaves a "maybe" behind, which the server is asked about later.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.trust.kills_model import now_ms

GROUPS = ("a", "b")
ALL = (1 << len(GROUPS)) - 1
OPEN, SETTLED, CANCELLED = 0, 1, 2
RECENT_S = 60.0  # a fetch is answered long before
OVERHEAD_BYTES = 110  # of a message on disk, beside its body
FAULTS = ("lost", "early", "after ack", "after cancel", "wrong bytes")


@dataclass(slots=True)
class Entry:
    """A message that is not done with."""

    earliest_ms: int  # it may not come before
    size: int  # of its body
    answered: bool = False
    left: int = ALL  # bits of groups that have not settled it
    maybe: int = 0  # bits of groups whose ack was not answered


@dataclass
class Audit:
    """Everything about one topic. Ids are numbers, counted from 0."""

    topic: str
    open: dict[str, Entry] = field(default_factory=dict)
    ends: bytearray = field(default_factory=bytearray)  # by number: OPEN, SETTLED or CANCELLED
    recent: dict[tuple[str, int], float] = field(default_factory=dict)  # when a group settled it, for a minute
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FAULTS, 0)))
    texts: list[str] = field(default_factory=list)
    late_ms: list[int] = field(default_factory=list)  # of first deliveries, since they were last taken
    live_bytes: int = 0

    def fault(self, kind: str, text: str) -> None:
        self.faults[kind] += 1
        if len(self.texts) < 20:
            self.texts.append(f"{kind}: {self.topic} {text}")

    def new(self, earliest_ms: int, size: int) -> str:
        """A message that is about to be put."""
        id_ = str(len(self.ends))
        self.ends.append(OPEN)
        self.open[id_] = Entry(earliest_ms, size)
        return id_

    def accepted(self, ids: list[str]) -> None:
        """A put was answered."""
        self.counts["accepted"] += len(ids)
        for id_ in ids:
            if (entry := self.open.get(id_)) is not None:  # else it has come and gone already
                entry.answered = True
                self.live_bytes += entry.size + OVERHEAD_BYTES

    def _end(self, id_: str, how: int) -> None:
        entry = self.open.pop(id_)
        self.ends[int(id_)] = how
        if entry.answered:
            self.live_bytes -= entry.size + OVERHEAD_BYTES

    def delivered(self, bit: int, message: dict[str, Any], asked_s: float) -> None:
        """A fetch that was sent at `asked_s` brought this just now."""
        id_, got_ms, due_ms = message["id"], now_ms(), message["due_ms"]
        self.counts["deliveries"] += 1
        entry = self.open.get(id_)
        if (entry is None or not entry.left & bit) and self.recent.get((id_, bit), 0.0) < asked_s:
            how = "after cancel" if self.ends[int(id_)] == CANCELLED else "after ack"
            self.fault(how, f"{id_} came to {bit} as attempt {message['attempt']}")
        if got_ms < due_ms or (entry is not None and due_ms < entry.earliest_ms and message["attempt"] == 1):
            self.fault("early", f"{id_} came at {got_ms}, due {due_ms}, asked for {entry}")
        if not (message["body"].startswith(f"{id_}:") and (entry is None or len(message["body"]) == entry.size)):
            self.fault("wrong bytes", f"{id_} says {message['body'][:40]}")
        if message["attempt"] == 1:
            self.late_ms.append(got_ms - due_ms)

    def settling(self, bit: int, ids: list[str]) -> None:
        """These are about to be settled: there may never be an answer."""
        for id_ in ids:
            if (entry := self.open.get(id_)) is not None:
                entry.maybe |= bit

    def settled(self, bit: int, ids: list[str]) -> None:
        """A group is done with these: acknowledged, or dead."""
        now = time.monotonic()
        for id_ in ids:
            self.recent[id_, bit] = now
            if (entry := self.open.get(id_)) is not None:
                entry.left &= ~bit
                entry.maybe &= ~bit
                if not entry.left:
                    self._end(id_, SETTLED)

    def unsettled(self, bit: int, ids: list[str]) -> None:
        """The answer says that the group does not hold them any more: they come again, or another consumer has settled them."""
        for id_ in ids:
            if (entry := self.open.get(id_)) is not None:
                entry.maybe &= ~bit

    def cancelled(self, ids: list[str]) -> None:
        """A cancel was answered."""
        now = time.monotonic()
        for id_ in ids:
            self.counts["cancelled"] += 1
            for at in range(len(GROUPS)):
                self.recent[id_, 1 << at] = now
            if id_ in self.open:
                self._end(id_, CANCELLED)

    def forget(self) -> None:
        """Messages settled long ago need no time beside them."""
        limit = time.monotonic() - RECENT_S
        for key, at in list(self.recent.items()):  # the oldest first
            if at > limit:
                return
            del self.recent[key]

    def overdue(self, for_ms: int) -> list[str]:
        """Messages that should have been settled so long ago."""
        limit = now_ms() - for_ms
        return [id_ for id_, entry in self.open.items() if entry.answered and entry.earliest_ms < limit]

    def told(self, id_: str, found: dict[str, Any] | None) -> None:
        """The server's view of a message that is overdue; None: it does not know it."""
        entry = self.open.get(id_)
        if entry is None:
            return
        states = {} if found is None else {group: told["state"] for group, told in found["groups"].items()}
        for at, group in enumerate(GROUPS):
            bit = 1 << at
            state = states.get(group, "unknown")
            if entry.left & bit and (state in ("history", "dead") or (state == "unknown" and entry.maybe & bit)):
                self.counts["settled unheard"] += 1
                self.settled(bit, [id_])
            elif entry.left & bit and found is None:
                self.fault("lost", f"{id_}, which the server does not know: {entry}")
                self.settled(bit, [id_])
