"""Failover: the stories of the simulation, told by a leader and a standby on disks of their own, and judged by the same auditor.

An answer waits until the standby has applied everything. When the leader ends, the standby takes over at any record behind the
last answer, in the midst of a write, or after a power cut of its own.
Where nothing is under way, both folders are equal, byte for byte.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.harness.index_world import Later
from tests.harness.short_events import short_events
from tests.harness.weak_hashes import weak_hashes
from tests.trust.model import Broken, Figures, Part
from tests.trust.simulation import steps_of
from tests.trust.simulation_disk import Crash, Drive, Process
from tests.trust.simulation_scenes import StoryWithScenes
from turtlemq.replica.follower import Follower
from turtlemq.replica.records import Record, parse_head
from turtlemq.replica.shared_files import is_shared
from turtlemq.replica.shipping import ShippingDoor
from turtlemq.replica.stream import Entry, Stream
from turtlemq.storage.door import Door
from turtlemq.storage.names import TMP

FAILOVERS = 0.6  # of the ends of a leader
COMPARED = 0.2  # of the answers


def run(cases: range, folder: Path) -> Figures:
    """A story for each seed."""
    seen = Figures()
    for case in cases:
        root = folder / str(case)
        root.mkdir()
        with short_events(case), weak_hashes(case):
            seen.update(StoryOfTwo(root / "0", f"seed {case}", case).tell(steps_of(case)))
        seen["stories"] += 1
        shutil.rmtree(root)
    return seen


class Leader(ShippingDoor, Process):
    """The process that leads. Its threads share its Door."""

    def beside(self) -> Door:
        return self


class Standby:
    """A second drive, and the process that follows on it."""

    def __init__(self, drive: Drive, stream: Stream, syncer: Later | None) -> None:
        self.drive, self.process = drive, Process(drive)
        self.follower = Follower(drive.root, self.process, stream.lsn, stream.chain, syncer=syncer)

    def apply(self, entry: Entry) -> None:
        head, chain = parse_head(entry.head)
        self.follower.apply(Record(head, chain, entry.path.decode(), entry.data))


class StoryOfTwo(StoryWithScenes):
    """A run over one seed with a standby."""

    standby: Standby
    stream: Stream

    def __init__(self, root: Path, case: str, seed: int, **settings: Any) -> None:
        self.drives = 0
        super().__init__(root, case, seed, **settings)
        self.replicate()

    def new_process(self) -> Process:
        """A leader, and a standby with a copy of its folder. Recovery's changes are records, too."""
        self.stream = Stream(1, self.chance.randint(0, 1_000), self.chance.randint(0, 1 << 60))
        self.drives += 1
        drive = copy_of(self.drive, self.drive.root.parent / str(self.drives))
        self.standby = Standby(drive, self.stream, Later() if self.chance.random() < 0.5 else None)
        return Leader(self.drive, self.files, stream=self.stream, root=self.drive.root)

    def replicate(self) -> None:
        """An answer waits until the standby has everything."""
        for entry in self.records():
            self.standby.apply(entry)
            self.seen["records"] += 1
        if self.chance.random() < COMPARED:
            compare(self.drive.root, self.standby.drive.root)
            self.seen["comparisons"] += 1

    def records(self) -> list[Entry]:
        """Those that the standby lacks."""
        found = self.stream.after(self.standby.follower.lsn)
        if found is None:
            raise Broken("the ring has lost records")
        return list(found)

    def after_the_end(self) -> None:
        if self.chance.random() >= FAILOVERS:
            super().after_the_end()
            return
        self.process.die()
        self.take_over()
        self.seen["failovers"] += 1
        self.drive = self.standby.drive
        if self.chance.random() < 0.3:
            self.seen["power cuts of standbys"] += 1
            self.drive.cut(self.chance)
            for audit in self.topics.values():
                audit.cut()
        self.now, self.steady = self.now + 1, self.steady + 1

    def take_over(self) -> None:
        """The standby has got some of the records behind the last answer, the last of them perhaps in part."""
        left = self.records()
        arrived = self.chance.randint(0, len(left))
        for entry in left[:arrived]:
            self.standby.apply(entry)
        if arrived < len(left) and self.chance.random() < 0.3:
            self.standby.process.ends_in = 0
            try:
                self.standby.apply(left[arrived])
            except Crash:
                self.seen["takeovers within a record"] += 1
        if arrived == len(left):
            self.seen["takeovers with all records"] += 1
        self.standby.process.die()


def copy_of(drive: Drive, root: Path) -> Drive:
    """A new drive with all shared files of another one, synced."""
    made = Drive(root)
    door = Process(made)
    for source in sorted(drive.root.rglob("*")):
        relative = str(source.relative_to(drive.root))
        if not is_shared(relative):
            continue
        target = root / relative
        if source.is_dir():
            door.make_folder(target)
            continue
        with door.durable_names(target.parent):
            fd = door.create(target)
            door.write(fd, target, 0, [source.read_bytes()])
            door.sync(fd, target)
            door.close(fd)
    door.die()
    return made


def compare(leader: Path, standby: Path, *, unfinished: bool = True) -> None:
    """All shared files are equal. Without `unfinished`, files that have not got their names yet do not count."""
    here, there = contents(leader), contents(standby)
    if not unfinished:
        here, there = ({path: data for path, data in side.items() if not path.endswith(TMP)} for side in (here, there))
    for path in here.keys() | there.keys():
        if here.get(path) != there.get(path):
            raise Broken(f"{path} differs: {_about(here.get(path))} with the leader, {_about(there.get(path))} with the standby")


def contents(root: Path) -> dict[str, bytes | None]:
    """The shared files and folders of a data folder. None for a folder."""
    paths = [path for path in root.rglob("*") if is_shared(str(path.relative_to(root)))]
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def _about(data: bytes | None) -> str:
    return "missing, or a folder" if data is None else f"{len(data):,} bytes"


def sum_up(seen: Figures) -> str:
    """A run without these has shown nothing."""
    wanted = ("failovers", "power cuts of standbys", "takeovers within a record", "takeovers with all records", "comparisons")
    missed = [name for name in wanted if not seen[name]]
    if missed and seen["stories"] >= STORIES_MIN:
        raise Broken(f"{seen['stories']} stories without {', '.join(missed)}")
    return f"{seen['failovers']:,} failovers, {seen['comparisons']:,} comparisons"


STORIES_MIN = 100
PART = Part(
    name="failover",
    unit="seeds",
    about="The stories of the simulation with a standby that takes over, anywhere behind the last answer, or after a power cut.",
    run=run,
    quick=STORIES_MIN,
    full=10_000,
    sum_up=sum_up,
)
