"""Care of a leader for all copies: damage that it finds, here or there, is healed from a copy whose bytes pass their checksums.

| found | own bytes | those of the other copy | remedy |
| --- | --- | --- | --- |
| copies differ | good | any | the standby compares its files, and pulls the pieces that differ |
| copies differ, or damage here | bad | good | the leader hands over to that copy, and heals as a standby |
| damage here | bad | bad on all copies | none: a backup has it, perhaps |

A leader with damage seals, compacts and drops nothing in that topic, so the good copies stay good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from pathlib import Path

from turtlemq.errors import TurtleError, describe
from turtlemq.model import Damage
from turtlemq.replica.differences import overlaps
from turtlemq.replica.examine_process import Answer
from turtlemq.replica.examiner import Examiner
from turtlemq.replica.frames import Distrust, Examine, Examined, Frame
from turtlemq.replica.inspector import ANSWER_S, examined
from turtlemq.replica.lead import Lead
from turtlemq.replica.verify import Report, Verifier
from turtlemq.storage.names import TOPICS

END = 1 << 62  # behind all bytes of a file
FILES_AT_ONCE = 100  # of a copy that are distrusted in one step
Log = Callable[..., None]


async def _no_handover(_: str) -> None:
    raise TurtleError("this leader cannot hand over")


class LeaderCare:
    """A leader's care for its copies. All methods run on the event loop.

    `handover` lets another node lead; it raises `TurtleError` if it cannot. `distrust` notes files of this copy, durably: it
    compares them when it follows next."""

    def __init__(
        self, lead: Lead, root: Path, examiner: Examiner, bytes_per_s: float, *, log: Log = lambda *_, **__: None
    ) -> None:
        self.handover: Callable[[str], Awaitable[None]] = _no_handover
        self.distrust: Callable[[list[str]], None] = lambda _: None
        self.verifier = Verifier(lead, root, bytes_per_s)
        self.differing = 0  # copies with files that are not as this leader's, by the last comparison
        self.lead, self.examiner = lead, examiner
        self._bytes_per_s, self._log = bytes_per_s, log
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._questions: dict[int, asyncio.Future[Examined]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._known: set[tuple[str, int]] = set()  # damage that no other copy can heal, by file and position
        self._examined: dict[str, set[str]] = {}  # files with damage that the engine has met, by topic
        self.verifier.done.append(lambda report: self._begin(self._compared(report)))
        lead.heard = self.heard
        lead.ending.append(self._end)

    # Frames of members

    def heard(self, member: str, frame: Frame) -> None:
        """A frame about files has come from a standby."""
        if isinstance(frame, Examine):
            self._begin(self._answer(member, frame))
        elif isinstance(frame, Examined):
            future = self._questions.get(frame.number)
            if future is not None and not future.done():
                future.set_result(frame)
        else:
            self.verifier.heard(member, frame)

    async def _answer(self, member: str, question: Examine) -> None:
        answer = await examined(self.examiner, question, self._bytes_per_s)
        if (standby := self.lead.standbys.get(member)) is not None:
            standby.link.send(answer)
        if not answer.good:
            await self.found(question.path, [(question.start, question.end - question.start, answer.why)])

    async def _ask(self, member: str, path: str, start: int, end: int) -> Examined:
        standby = self.lead.standbys.get(member)
        number = next(self._numbers)
        if standby is None:
            return Examined(number, False, "it is away")
        future = self._questions[number] = self._loop.create_future()
        standby.link.send(Examine(number, path, start, end))
        try:
            await asyncio.wait([future, standby.link.closed], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else Examined(number, False, "it did not answer")
        finally:
            self._questions.pop(number).cancel()

    # Damage of this copy

    async def scrubbed(self, path: str, answer: Answer) -> None:
        """Scrub has found damage here."""
        await self.found(path, answer.damage)

    async def engine_found(self, damage: dict[str, list[Damage]]) -> None:
        """The engine has met damage, by topic."""
        for topic, holes in damage.items():
            for name in sorted({hole.file for hole in holes} - self._examined.get(topic, set())):
                self._examined.setdefault(topic, set()).add(name)
                for path in (f"{TOPICS}/{topic}/{name}", f"{TOPICS}/{topic}/dead/{name}"):  # reports do not tell which of both
                    answer = await self.examiner.examine(path, self._bytes_per_s)
                    if answer.damage:
                        await self.found(path, answer.damage)
        await self.examiner.rest()

    async def found(self, path: str, damage: Iterable[tuple[int, int, str]]) -> None:
        """Bytes of this copy are damaged: hand over to a copy that has them. Damage that is known already counts no more."""
        async with self._turn:
            new = [hole for hole in damage if (path, hole[0]) not in self._known]
            if not new:
                return
            self._log("copy_damaged", file=path, position=new[0][0], length=new[0][1], reason=new[0][2])
            member = await self._healthy(path, new)
            if member is None:
                self._known |= {(path, position) for position, _, _ in new}
                self._log("damaged_everywhere", file=path, position=new[0][0])
                return
            await self._hand_over(member, path)

    async def _healthy(self, path: str, damage: list[tuple[int, int, str]]) -> str | None:
        """A member in sync whose bytes are good where those of this copy are not."""
        start, end = min(hole[0] for hole in damage), max(hole[0] + max(1, hole[1]) for hole in damage)
        for member in sorted(self.lead.standbys):
            if self.lead.is_required(member) and (await self._ask(member, path, start, end)).good:
                return member
        return None

    async def _hand_over(self, member: str, path: str) -> None:
        standby = self.lead.standbys.get(member)
        if standby is None:
            return
        self.distrust([path])
        try:
            await self.handover(standby.hello.node)
        except TurtleError as error:
            self._log("handover_failed", node=standby.hello.node, why=describe(error))

    # Damage of others

    async def _compared(self, report: Report) -> None:
        """Heal the copies that a comparison has found to differ."""
        self.differing = report.differing
        for copy in report.copies.values():
            if copy.state != "differs":
                continue
            self._log("copies_differ", node=copy.node, files=len(copy.files), first=copy.files[0].path)
            wrong = [file.path for file in copy.files]
            bad = {path for path in wrong if await self._is_bad_here(path)}
            standby = self.lead.standbys.get(copy.member)
            if standby is not None and (paths := [path for path in wrong if path not in bad]):
                standby.link.send(Distrust(paths[:FILES_AT_ONCE]))
            for path in sorted(bad):
                await self.found(path, [(0, END, "copies differ, and the leader's file has damage")])

    async def _is_bad_here(self, path: str) -> bool:
        answer = await self.examiner.examine(path, self._bytes_per_s)
        return any(overlaps(position, size, 0, END) for position, size, _ in answer.damage)

    # Life

    def _begin(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
