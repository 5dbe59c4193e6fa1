"""Care of a standby for its own copy: bytes that have rotted are pulled again from the leader, if they are good there.

The file is noted as suspect, durably, and the connection ends; the next one makes the files equal to the leader's, by the same
way as for a copy that was away. Until then this copy keeps its place in the in-sync set: a rotten byte is better than no leader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from turtlemq.replica.examine_process import Answer
from turtlemq.replica.scrub import Scrub
from turtlemq.replica.standby import Standby

Log = Callable[..., None]


class StandbyCare:
    """Scrubs the data folder `root` of a standby, and heals it. All methods run on the event loop."""

    def __init__(self, standby: Standby, root: Path, bytes_per_s: float, *, log: Log = lambda *_, **__: None) -> None:
        self.scrub = Scrub(root, standby.examiner, bytes_per_s, self._damaged, log=log)
        self._standby, self._log = standby, log
        self._known: set[tuple[str, int]] = set()  # damage that the leader has as well, by file and position
        self._bytes_per_s = bytes_per_s
        self._asked: tuple[object, tuple[str, ...]] = None, ()  # a connection, and the suspect files that were looked at there

    async def look(self) -> None:
        """Files that came with damage from the leader are suspect: let it look at its own, which may have rotted since."""
        standby = self._standby
        about = standby.inspector, standby.facts.suspect
        if about == self._asked or standby.inspector is None or not standby.facts.complete:
            return
        self._asked = about
        for path in standby.facts.suspect:
            answer = await standby.examiner.examine(path, self._bytes_per_s)
            if answer.damage:
                await self._damaged(path, answer)

    async def _damaged(self, path: str, answer: Answer) -> None:
        standby = self._standby
        new = [hole for hole in answer.damage if (path, hole[0]) not in self._known]
        if not new or standby.inspector is None or not standby.facts.complete:
            return  # it is being made equal, or the next pass will find it again
        start, end = min(hole[0] for hole in new), max(hole[0] + max(1, hole[1]) for hole in new)
        self._log("copy_damaged", file=path, position=new[0][0], length=new[0][1], reason=new[0][2])
        leader = await standby.inspector.ask(path, start, end)
        if leader.good:
            standby.distrust([path])
        else:
            self._known |= {(path, hole[0]) for hole in new}
            self._log("damaged_everywhere", file=path, position=new[0][0], leader=leader.why)
