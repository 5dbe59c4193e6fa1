"""Comparison of all copies of a shard: checksums of every file, of each copy at the same LSN, read from the disks.

The leader links the files of some units while it holds the lock of the stream, and sends the question to each standby right
behind the newest record, so that all copies are pictured in exactly the same state. They are read at a limited pace; then come
the next units. Topics are independent of each other, so each has an LSN of its own. Writes go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from turtlemq.replica import pictures
from turtlemq.replica.differences import Difference, differences
from turtlemq.replica.frames import Frame, Verified, Verify
from turtlemq.replica.lead import Lead
from turtlemq.replica.lead_types import Attached
from turtlemq.replica.manifest import FileState, unit_of
from turtlemq.replica.pins import Pins, pin_some, units
from turtlemq.storage.door import Door

TRIES = 3  # a file that is cut back after a failed write may differ once
GRACE_S = 60.0  # for the answer about a group of units, beside the time that reading takes
DIFFERENCES_MAX = 1_000  # of one copy that are listed


@dataclass(slots=True)
class CopyFound:
    """One copy: "equal", "differs", or "not reached", with the reason."""

    member: str
    node: str = ""  # not known of a copy that is away
    state: str = "equal"
    why: str = ""
    files: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """A comparison. Its figures grow while it is under way. `lsn` and `last_lsn`: of the first and the last picture."""

    state: str = "running"  # or "done", or "failed"
    lsn: int = 0
    last_lsn: int = 0
    files: int = 0  # of the leader
    bytes: int = 0  # that the leader has read
    bytes_total: int = 0
    seconds: float = 0.0
    why: str = ""  # it has failed
    copies: dict[str, CopyFound] = field(default_factory=dict)  # by member

    @property
    def differing(self) -> int:
        """Copies with files that are not as the leader's."""
        return sum(copy.state == "differs" for copy in self.copies.values())


@dataclass(slots=True)
class _Question:
    """A question to one member that has no answer yet."""

    member: str
    answered: asyncio.Future[str]  # the reason, if it cannot tell
    files: list[FileState] = field(default_factory=list)


class Verifier:
    """Compares the copies of a leader. All methods run on the event loop. `heard` gets the frames of members."""

    def __init__(self, lead: Lead, root: Path, bytes_per_s: float, door: Callable[[], Door] = Door) -> None:
        self.report: Report | None = None  # of the comparison under way, or of the last one
        self.done: list[Callable[[Report], None]] = []  # called with each report that is done
        self._lead, self._root, self._door = lead, root, door()
        self._most_per_s = self._bytes_per_s = bytes_per_s  # usually, and in the comparison under way
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}
        self._task: asyncio.Task[Report] | None = None
        pictures.clear(self._door, root)
        lead.ending.append(self.close)

    def heard(self, member: str, frame: Frame) -> bool:
        """A member has answered. Returns whether the frame was for this object."""
        if not isinstance(frame, Verified):
            return False
        question = self._questions.get(frame.number)
        if question is not None and question.member == member and not question.answered.done():
            question.files += frame.files
            if frame.last:
                question.answered.set_result(frame.why)
        return True

    def begin(self, bytes_per_s: float | None = None) -> asyncio.Task[Report]:
        """Begin a comparison; if one is under way, join it. `bytes_per_s`: on each node, if not as fast as usual."""
        if self._task is None or self._task.done():
            self.report = Report()
            self._task = self._loop.create_task(self._run(self.report, bytes_per_s or self._most_per_s))
        return self._task

    async def verify(self, bytes_per_s: float | None = None) -> Report:
        """Compare all copies that are attached. The result lists others as not reached."""
        return await asyncio.shield(self.begin(bytes_per_s))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, report: Report, bytes_per_s: float) -> Report:
        began, self._bytes_per_s = self._loop.time(), bytes_per_s
        try:
            await self._compare_all(report)
            report.state = "done"
            for tell in self.done:
                tell(report)
        except asyncio.CancelledError:
            report.state, report.why = "failed", "this node does not lead any more"
            raise
        except Exception as error:  # noqa: BLE001 - the report tells it
            report.state, report.why = "failed", str(error)
        finally:
            report.seconds = self._loop.time() - began
        return report

    async def _compare_all(self, report: Report) -> None:
        lead = self._lead
        attached = dict(lead.standbys)
        names = {member: standby.hello.node for member, standby in (lead.standbys | lead.copying).items()}
        report.copies = {member: CopyFound(member, names.get(member, "")) for member in sorted({*lead.members, *names})}
        for member, copy in report.copies.items():
            if member not in attached:
                copy.state, copy.why = "not reached", "its files are being made equal" if member in lead.copying else "it is away"
        left, tries = deque(units(self._door, self._root)), Counter[str]()
        report.lsn = lead.stream.lsn
        while left:
            await self._compare_some(report, attached, left, tries)

    async def _compare_some(self, report: Report, attached: dict[str, Attached], left: deque[str], tries: Counter[str]) -> None:
        """Compare the next units. Those that differ for the first time are compared again."""
        pins = self._pin(left)
        asked = {
            member: self._ask(standby, pins) for member, standby in attached.items() if self._counts(report, member, standby)
        }
        size = sum(size for _, size in pins.files)
        report.last_lsn, report.bytes_total = pins.lsn, report.bytes_total + size
        own = await asyncio.to_thread(pictures.sums_of, pins, self._bytes_per_s, partial(_add, report))
        report.files += len(own)
        again: set[str] = set()
        tries.update(pins.units.keys())
        end = self._loop.time() + GRACE_S + 4 * size / self._bytes_per_s
        for member, question in asked.items():
            if why := await self._answer(question, attached[member], end):
                report.copies[member].state, report.copies[member].why = "not reached", why
                continue
            for found in differences(own, question.files):
                if tries[unit := unit_of(found.path)] < TRIES:
                    again.add(unit)
                else:
                    _note(report.copies[member], found)
        left.extend(sorted(again))

    def _pin(self, left: deque[str]) -> Pins:
        with self._lead.stream.lock:
            lsn = self._lead.stream.lsn
            pins = pictures.empty(self._door, self._root, lsn)
            pin_some(self._door, self._root, left, lsn, pins)
        return pins

    def _counts(self, report: Report, member: str, standby: Attached) -> bool:
        """Is a copy still attached, over the same connection?"""
        if report.copies[member].state != "not reached" and self._lead.standbys.get(member) is not standby:
            report.copies[member].state, report.copies[member].why = "not reached", "its connection has ended"
        return report.copies[member].state != "not reached"

    def _ask(self, standby: Attached, pins: Pins) -> _Question:
        """Requires: nothing was awaited since the files were linked."""
        number = next(self._numbers)
        question = self._questions[number] = _Question(standby.member, self._loop.create_future())
        question.answered.add_done_callback(lambda _: self._questions.pop(number))
        standby.send_behind(pins.lsn, Verify(number, list(pins.units), pins.lsn, self._bytes_per_s))
        return question

    async def _answer(self, question: _Question, standby: Attached, end: float) -> str:
        """Wait for an answer. Returns why there is none."""
        timeout = max(0.0, end - self._loop.time())
        await asyncio.wait([question.answered, standby.link.closed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if question.answered.done():
            return question.answered.result()
        question.answered.cancel()
        return "its connection has ended" if standby.link.closed.done() else "it did not answer in time"


def _add(report: Report, size: int) -> None:
    report.bytes += size


def _note(copy: CopyFound, found: Difference) -> None:
    copy.state, copy.why = "differs", "its files are not as the leader's"
    if len(copy.files) < DIFFERENCES_MAX:
        copy.files.append(found)
