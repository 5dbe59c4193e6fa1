"""Power cuts: the whole engine at work, and everything that a cut at any moment may leave of its files.

A case is one state of the disk: (story, moment, unsynced writes kept). It is opened and looked at; then the power goes
again, somewhere in that opening or behind it. Opened once more, it must look the same, be found clean by `check`, and deliver
the messages of the ledger.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random

from tests.harness.short_events import short_events
from tests.trust.model import Broken, Figures, Part, figures
from tests.trust.powercuts_disk import KILLED, Disk, Tree, cut, fill
from tests.trust.powercuts_harvest import Bare, abandon, harvest, look
from tests.trust.powercuts_ledger import Key, Ledger, Seen, audit
from tests.trust.powercuts_story import Cut, Story
from turtlemq.engine import Engine
from turtlemq.segment.table import Damaged
from turtlemq.settings import Settings

STATES = 250  # tried of one story
LATER_MS = 10_000_000  # when everything has come due
TRIES = 40  # to find a state that was not tried yet


def run(cases: range, folder: Path) -> Figures:
    """Cases with these numbers."""
    total = Figures()
    for seed, numbers in groupby(cases, lambda number: number // STATES):
        wanted = {number % STATES for number in numbers}
        story = Story(seed, folder / "story")
        with short_events(seed):
            story.run()
        shutil.rmtree(folder / "story")
        trial = Trial(story, folder)
        for index, state in enumerate(states(story, seed)):
            if index in wanted:
                try:
                    with short_events(seed):
                        trial.run(state)
                except Exception as error:
                    where = f"story {seed}, {state.cut.step}, unsynced: {state.kind}"
                    raise Broken(f"case {seed * STATES + index} ({where}): {type(error).__name__}: {error}") from error
            if index >= max(wanted):
                break
        total += trial.figures
    return total


@dataclass(frozen=True, slots=True)
class State:
    """A state that a cut has left."""

    cut: Cut
    kind: str
    tree: Tree
    again: int  # seeds the second cut


def states(story: Story, seed: int) -> Iterator[State]:
    """States of a story, each another one as long as there are such."""
    chance = Random(f"states of {seed}")
    seen: set[Hashable] = set()
    tries = 0
    while True:
        chosen = chance.choice(story.cuts)
        kind, tree = cut(chosen.disk, chance)
        key, tries = (id(chosen.before), id(chosen.after), digest(tree)), tries + 1
        if key not in seen or tries == TRIES:
            seen.add(key)
            tries = 0
            yield State(chosen, kind, tree, chance.getrandbits(32))


def digest(tree: Tree) -> bytes:
    """A hash over names and contents: equal for equal files."""
    found = hashlib.blake2b(digest_size=16)
    for path, content in tree.items():
        found.update(b"%d %d %s " % (len(path), -1 if content is None else len(content), path.encode()))
        found.update(content or b"")
    return found.digest()


class Trial:
    """Tries states of one story. The outcome of a state that was met before is known."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story, self.folder = story, folder
        self.settings: Settings = story.settings
        self.keys = [] if story.retaining else sorted({key for c in story.cuts for key in c.after.sent})
        self.groups = sorted({key for c in story.cuts for key in c.after.groups})
        self.figures = figures(stories=1, moments=len(story.cuts))
        self.known: dict[bytes, tuple[object, Seen]] = {}

    def run(self, state: State) -> None:
        first, tree = self._recover(state)
        key = digest(tree)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._finish(tree, self.keys if key[0] % 4 == 0 else [])
        second, seen = found
        if first != second:
            raise Broken(f"recovered twice: first {first}, then {second}")
        before, after = state.cut.before, state.cut.after
        if state.kind == KILLED:
            before, after = before.settle(), after.settle()
        audit(before, after, state.cut.together, seen, self.settings.max_attempts)
        self._count(state, before, seen)

    def _recover(self, state: State) -> tuple[object, Tree]:
        """Open a state, and the states that a cut during that or right behind it leaves."""
        disk = Disk(self.folder / "first", state.tree)
        engine = Engine.open(disk.root, door=disk, settings=self.settings)
        try:
            if engine.damage():
                raise Broken(f"a cut is no damage: {engine.damage()}")
            chance = Random(state.again)
            moment = disk.moments[-1] if chance.random() < 0.7 else chance.choice(disk.moments)
            return look(engine), cut(moment, chance)[1]
        finally:
            abandon(engine)

    def _finish(self, tree: Tree, ids: Sequence[Key]) -> tuple[object, Seen]:
        """Open the state after the second cut, look, check, and have all delivered. `ids` are tried a second time."""
        root = self.folder / "second"
        fill(root, tree)
        engine = Engine.open(root, door=Bare(), settings=self.settings)
        try:
            if engine.damage():
                raise Broken(f"a cut is no damage: {engine.damage()}")
            found, wrong = look(engine), engine.check()
            if wrong:
                self._check_without_caches(tree, found, wrong)
            self.figures["recoveries finished"] += 1
            return found, harvest(engine, self.story.newest + LATER_MS, self.groups, ids)
        finally:
            abandon(engine)

    def _check_without_caches(self, tree: Tree, found: object, wrong: list[str]) -> None:
        """Tables are not synced: a torn one is built again when it is used, and until then `check` says so. Without those it must
        have nothing to say, and nothing must be different."""
        torn = {line.split(":")[0].rpartition("/")[2] for line in wrong if line.endswith(str(Damaged.__doc__))}
        kept = {path: content for path, content in tree.items() if path.rpartition("/")[2] not in torn}
        root = self.folder / "third"
        fill(root, kept)
        engine = Engine.open(root, door=Bare(), settings=self.settings)
        try:
            same = look(engine) == found  # first, as before: looking repairs the damage that it meets
            left = engine.check()
            if not torn or left or not same:
                raise Broken(f"check: {wrong}, and without {sorted(torn)}: {left}{'' if same else ', and not the same'}")
            self.figures["torn tables"] += len(torn)
        finally:
            abandon(engine)

    def _count(self, state: State, before: Ledger, seen: Seen) -> None:
        self.figures["promised messages looked for"] += sum(not sent.cancelled for sent in before.sent.values())
        self.figures["deliveries compared"] += len(seen.delivered)
        self.figures[f"states: {state.kind}"] += 1


PART = Part(
    name="powercuts",
    unit="states",
    about="The power goes at any change of a file: unsynced writes are lost, kept, reordered or torn, names are lost. "
    "Everything answered is found again, nothing else, and a second cut during recovery changes nothing.",
    run=run,
    quick=5_000,
    full=200_000,
    chunk=500,
)
