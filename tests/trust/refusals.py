"""Refusals: a disk that says no. At every k-th call of a story, with an error, no room, no free descriptor, or a write that
stores a part; and a real server on a real disk that is full, or whose syncs fail.

After a full disk, or without a descriptor, nothing has changed, no topic stops, and the story goes on. After any other error it
is unknown how far the step came: the topic is stopped or goes on rightly, and opened again it holds everything that was answered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.harness.doors import Failing
from tests.trust.model import Broken, Figures, Part, figures
from tests.trust.powercuts_disk import Tree
from tests.trust.powercuts_harvest import Bare, abandon, harvest, run_to_rest
from tests.trust.powercuts_ledger import Key, Ledger, audit
from tests.trust.powercuts_story import STEPS, Story
from tests.trust.refusals_server import NO_DISK, full_disk, rotten_sync
from turtlemq.engine import Engine
from turtlemq.errors import Exhausted, OutOfFiles, Stopped
from turtlemq.model import Message

HOWS = ("EIO", "ENOSPC", "EMFILE", "short", "half", "wedged", "gone")
SWEEPS = ("EIO", "ENOSPC", "EMFILE")
SERVERS = 500  # two of so many cases are real servers
FULL_DISK = 498  # which of them has a disk of its own
SWEEP = 25  # one of so many cases is about all calls of a story, from one to the next so far apart:
SLICES = 20
LATER_MS = 10_000_000
_KEPT = ("delay_", "ready_", "reserve_", "history_")


def run(cases: range, folder: Path) -> Figures:
    """Cases with these numbers."""
    total = Figures()
    for number in cases:
        place = folder / str(number)
        place.mkdir()
        try:
            total.update(_case(number)(number, place))
        except Exception as error:
            raise Broken(f"case {number}: {type(error).__name__}: {error}") from error
        shutil.rmtree(place)
    return total


def _case(number: int) -> Callable[[int, Path], Figures]:
    servers = {0: rotten_sync, FULL_DISK: full_disk}
    if number % SERVERS in servers:
        return servers[number % SERVERS]
    return _calls_fail if number % SWEEP == SWEEP - 1 else _call_fails


class End(Exception):
    """The story ends here."""


class Tale(Story):
    """A story on a disk that fails once. `pages`: the answers behind each step, and the changes that a step makes as a whole."""

    def __init__(self, seed: int, folder: Path, door: Failing) -> None:
        super().__init__(seed, folder)
        self.door = door
        self.pages: list[tuple[Ledger, tuple[Key, ...]]] = []
        self.error: BaseException | None = None
        self.step = ""
        self.refused = 0

    def run(self) -> None:
        try:
            self._tell(self._open)
            for _ in range(STEPS):
                self._tell(self.chance.choice(self._steps()))
        except End:
            return
        abandon(self.engine)

    def _open(self) -> None:
        self.engine = Engine.open(self.folder, door=self.door, settings=self.settings)
        for error in self.engine.trouble.values():  # a topic that cannot be opened: there are no others to go on for
            abandon(self.engine)
            raise error

    def _begin(self, tree: Tree) -> None:
        self._open()

    def power_cut(self) -> None:
        """Here it is a process that was killed."""
        abandon(self.engine)
        self.held.clear()
        self._open()
        self.ledger = self.ledger.settle()

    def _tell(self, step: Callable[[], None]) -> None:
        before, self.together, self.step = self.ledger.copy(), [], step.__name__
        try:
            step()
        except OutOfFiles as error:
            if step.__name__ != "cancel":
                self._refuse(before, step)
            else:  # its sleepers may be cancelled already, and only the lookup of the others was refused
                self.ledger, self.error = before, error
                self._end()
        except Exhausted:
            self._refuse(before, step)
        except (Stopped, OSError) as error:
            self.ledger, self.error = before, error
            self._end()
        self.pages.append((self.ledger.copy(), tuple(self.together)))

    def _refuse(self, before: Ledger, step: Callable[[], None]) -> None:
        """Nothing has changed. Opening is tried again, so is closing; all else need not be."""
        if self.door.failed is None:
            raise Broken("neither was the disk full, nor were there too many files")
        self.ledger, self.refused = before, self.refused + 1
        self.door.heal()
        if step.__name__ in ("_open", "reopen", "power_cut"):
            self._open()

    def tick(self) -> None:
        """The engine keeps the error for later, and goes on."""
        self.now += self.chance.choice([1, 30, 100, 100, 1_000, 6_000, 45_000, 61_000])
        self.newest = max(self.now, self.newest)
        run_to_rest(self.engine, self.now)
        for error in list(self.engine.trouble.values()):
            if not isinstance(error, Exhausted):
                raise error
            self.refused += 1
            self.door.heal()
        if not self.engine.trouble:
            self.ledger.beat(self.now)

    def _end(self) -> None:
        """An error that is not for want of room. If it was a sync of a log, there is no writing there any more."""
        failed = self.door.failed
        if failed is None or (self.door.how == "EMFILE" and not isinstance(self.error, OutOfFiles)):
            raise Broken(f"no write has failed, but {self.error}") from self.error
        self.door.heal()
        if self.step not in ("_open", "reopen", "power_cut"):
            stopped = [topic for topic in self.engine.topics.values() if topic.stopped is not None]
            if isinstance(self.error, Stopped) and not stopped:
                raise Broken(f"{failed}: {self.error}, but no topic is stopped")
            if failed.startswith("fdatasync") and self._was_writing() and not stopped:
                raise Broken(f"{failed}, and it is written on")
            for topic in stopped:
                _refuses_for_good(self.engine, topic.name, self.now)
            abandon(self.engine)
        raise End

    def _was_writing(self) -> bool:
        """Was the error about a log of a topic that is open, not about a file that was being made, and is gone again?"""
        assert self.error is not None
        path = Path(getattr(self.error, "filename", None) or "none")
        mine = bool(set(path.parts) & self.engine.topics.keys())
        return mine and path.name.startswith(_KEPT) and path.suffix == ".bson" and path.exists()


def _refuses_for_good(engine: Engine, topic: str, now_ms: int) -> None:
    """A stopped topic takes no message, now or later. If it was the Broker that stopped, it hands nothing off: that is enough."""
    parts = engine.topic(topic)
    if parts.stores.index.stopped is None:
        engine.tick(now_ms + 100_000)
        return
    for _ in range(2):
        try:
            engine.submit(topic, [Message(b"late", now_ms, "never")], now_ms)
        except Stopped:
            continue
        raise Broken(f"{topic} was stopped, and took a message")


def _call_fails(number: int, folder: Path) -> Figures:
    """A story in which one call fails; which one, and how, comes from the number."""
    chance = Random(number)
    seed, how = number // 10, chance.choice(HOWS)
    plain = Tale(seed, folder / "plain", Failing())
    plain.run()
    return _told(plain, seed, chance.choice(_can_fail(plain, how)), how, folder / "tale")


def _calls_fail(number: int, folder: Path) -> Figures:
    """A story over and over, each time another call fails. Of those that can, a case takes one in `SLICES`; the next cases take
    those beside them, so that `SLICES` cases of each way leave none out."""
    story, part = divmod(number // SWEEP, len(SWEEPS) * SLICES)
    how, first = SWEEPS[part % len(SWEEPS)], part // len(SWEEPS)
    plain, seen = Tale(story, folder / "plain", Failing()), Figures()
    plain.run()
    for at in _can_fail(plain, how)[first::SLICES]:
        seen.update(_told(plain, story, at, how, folder / "tale"))
        shutil.rmtree(folder / "tale")
    return seen


def _can_fail(plain: Tale, how: str) -> list[int]:
    return [k for k, name in enumerate(plain.door.calls) if Failing(how=how).can_fail(name)]


def _told(plain: Tale, seed: int, at: int, how: str, folder: Path) -> Figures:
    """The story once more, with a call that fails."""
    door = Failing(at, how)
    tale = Tale(seed, folder, door)
    tale.run()
    door.shut()
    if door.failed is None:
        raise Broken(f"call {at} never came")
    before = tale.pages[-1][0] if tale.pages else Ledger()
    after, together = before, tuple[Key, ...]()
    if tale.error is not None:  # up to here both went the same way
        after, together = plain.pages[len(tale.pages)]
    _audit(tale, before, after, together, f"{how} at call {at}, {door.failed}, in {tale.step}")
    kind = "refused" if tale.refused else "errors" if tale.error is not None else "unnoticed"
    return figures(stories_with_a_failed_call=1, messages_accepted=len(before.sent)) + figures(**{f"calls_{kind}": 1})


def _audit(tale: Tale, before: Ledger, after: Ledger, together: tuple[Key, ...], what: str) -> None:
    """Opened on a good disk, all is there. No power was lost, so nothing that was written is."""
    engine = Engine.open(tale.folder, door=Bare(), settings=tale.settings)
    try:
        wrong = engine.check()
        if wrong or engine.damage():
            raise Broken(f"check: {wrong}, damage: {engine.damage()}")
        groups, ids = before.groups | after.groups, [] if tale.retaining else sorted(before.sent.keys() | after.sent.keys())
        seen = harvest(engine, tale.newest + LATER_MS, sorted(groups), ids)
        audit(before.settle(), after.settle(), together, seen, tale.settings.max_attempts)
    except Broken as error:
        raise Broken(f"{what}: {error}") from error
    finally:
        abandon(engine)


def sum_up(seen: Figures) -> str:
    """Without a disk that was filled it was no whole run, whatever else passed."""
    if seen["disks that could not be had"]:
        raise Broken(f"{seen['disks that could not be had']} disks were not filled: {NO_DISK}")
    stories = seen["stories with a failed call"]
    if not stories:
        return "real servers alone"
    refused, errors = (f"{seen[name] / stories:.0%}" for name in ("calls refused", "calls errors"))
    return f"of the failed calls {refused} refused a request or a step, {errors} were an error, the rest had no effect"


PART = Part(
    name="refusals",
    unit="cases",
    about="The disk says no: an error, no room or no free descriptor at any call of the engine's work, in some stories at every "
    "one; a real disk filled to the brim under a real server; syncs that fail. Producers are refused, consumers go on, service "
    "resumes with room; after a failed sync nothing is written any more; nothing accepted is lost.",
    run=run,
    quick=150,
    full=5_000,
    chunk=25,
    sum_up=sum_up,
)
