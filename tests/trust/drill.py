"""The drill: a backup is made of a folder that lives on meanwhile, and restored; all that can be known of it, messages, groups,
dead letters and settings of every topic, is compared with the state when it began. And `check`, which must find nothing in
either, is tried with caches that were forged: whole, with right checksums, but not true.
"""

from __future__ import annotations

import contextlib
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import bson
from bson.int64 import Int64

from tests.trust.damage_folders import Ram
from tests.trust.model import Broken, Figures, Part
from turtlemq import backup as b
from turtlemq.engine import Engine
from turtlemq.errors import InvalidFireAt
from turtlemq.model import Message, Priority
from turtlemq.topic.dead_letters import Filter
from turtlemq.topic.stats import GroupStats

NOW = 1_794_810_562_123
BLOCK = 4096
LOOSE = ("bytes", "segments", "live_ratio", "oldest_ready_ms", "next_due_ms")
# Of files, which a start may put in order; of a cursor, see `_group`; of a sleeper that may be over, and is met again by a start.
Key = tuple[str, str]  # a topic, and the subject


class Life:
    """An engine that lives a random life in two topics: everything that moves, seals, compacts and removes files."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random, self.now = random.Random(seed), 1_000
        self.ids: dict[str, list[str]] = {"t": [], "u": []}
        self.engine = Engine.open(root, door=Ram())
        small = {"segment_bytes": 4096, "compact_live_ratio": 0.6, "history_hours": 0.0003, "max_attempts": 2, "ttr_ms": 500}
        self.engine.configure("t", **small)
        self.engine.configure("u", **small | {"max_attempts": 3, "history_hours": 1, "ttr_ms": 20_000})

    def steps(self, count: int) -> None:
        moves = [self._put, self._put, self._consume, self._consume, self._cancel, self._later, self._care, self._change]
        for _ in range(count):
            topic = self.random.choice("ttu")
            self.random.choice(moves)(topic)

    def _put(self, topic: str) -> None:
        ids = [f"{len(self.ids[topic]) + i}" for i in range(self.random.randrange(1, 30))]
        self.ids[topic] += ids
        self.engine.submit(topic, [self._message(id_) for id_ in ids], self.now)

    def _message(self, id_: str) -> Message:
        """One with something of its own in every field."""
        dice, due = self.random, self.now + self.random.choice([0, 50, 2_000, 3_600_000])
        return Message(
            id_.encode() + b"z" * 50,
            due_ms=due,
            id=id_,
            ttr_ms=dice.choice([0, 0, 700, 30_000]),
            priority=dice.choice(list(Priority)),
            expires_ms=dice.choice([None, None, due + 3_000, due + 10_000_000]),
            headers=dice.choice([None, {"n": id_}, {"n": id_, "größe": "ä" * dice.randrange(9)}]),
        )

    def _consume(self, topic: str) -> None:
        self.now += self.random.randrange(200)
        self.engine.tick(self.now)
        held = self.engine.reserve(topic, self.random.choice(["a", "b"]), 20, self.now)
        if held.ids and self.random.random() < 0.9:
            for group in ("a", "b"):
                if group not in self.engine.topics[topic].stores.broker.groups:
                    self.engine.move_group(topic, group, "earliest", self.now)
                acks = [id_ if self.random.random() < 0.8 else f"-{id_}" for id_ in held.ids]
                delay = self.random.choice([0, 40_000])
                self.engine.ack(topic, group, acks, self.now, retry_delay_ms=delay, error=f"no, {self.now}")

    def _cancel(self, topic: str) -> None:
        if self.ids[topic]:
            self.engine.cancel(topic, self.random.choices(self.ids[topic], k=5), self.now)

    def _later(self, topic: str) -> None:
        self.now += self.random.randrange(5_000)
        self.engine.tick(self.now)

    def _care(self, topic: str) -> None:
        for _ in range(5):
            self.engine.topics[topic].maintain()

    def _change(self, topic: str) -> None:
        """A sleeper is moved, or the topic gets other settings."""
        if self.random.random() < 0.3:
            self.engine.configure(topic, backoff_max_ms=self.random.randrange(10_000, 90_000))
        elif sleepers := [one.id for one in self.engine.browse(topic, self.now + 1, limit=10)[0] if not one.group]:
            with contextlib.suppress(InvalidFireAt):  # it would be due after its expiry
                self.engine.reschedule(topic, self.random.choice(sleepers), self.now, due_ms=self.now + 7_000)

    def told(self, engine: Engine) -> dict[Key, Any]:
        """All that can be known of a folder, by topic and subject; the sizes of files excepted."""
        out: dict[Key, Any] = {("", "topics"): sorted(engine.topics)}
        for name, topic in engine.topics.items():
            views = {id_: engine.message(name, id_) for id_ in self.ids[name]}
            out |= {(name, f"message {id_}"): asdict(view) for id_, view in views.items() if view is not None}
            out |= {(name, f"dead {one.group}/{one.id}"): asdict(one) for one in topic.view.dead_letters.all(Filter())}
            out |= {(name, f"group {group}"): _group(stats) for group, stats in engine.groups(name).items()}
            out[name, "settings"] = asdict(topic.stores.broker.settings)
            out[name, "stats"] = {field: value for field, value in asdict(engine.stats(name)).items() if field not in LOOSE}
        return out


def _group(stats: GroupStats) -> dict[str, int]:
    """Figures of a group. Fetches that pass nothing but cancelled messages are not noted: after a start it stands before them
    again, and only the end of the log is the same."""
    names = ("ready", "reserve", "history", "dead", "changed_ms")
    return {"end": stats.offset + stats.lag, **{name: getattr(stats, name) for name in names}}


# Forging


def sealed_up(fields: dict[str, Any]) -> bytes:
    """A document with the checksum that it must have: docs/FORMAT.md, "the head of a file"."""
    bare = {name: value for name, value in fields.items() if name != "crc"}
    return bytes(bson.encode({**bare, "crc": Int64(zlib.crc32(bson.encode(bare)))}))


def forge_table(data: bytearray, dice: random.Random) -> str | None:
    """Change one entry of a section, and make all checksums right again."""
    fields = bson.decode(data[: int.from_bytes(data[:4], "little")])
    sections = {name: place for name, place in fields["sections"].items() if place[1]}
    name: str = dice.choice(sorted(sections))
    at, count = sections[name]
    width = 4 if name in ("positions", "buckets", "kills") else 8
    place = at + dice.randrange(count) * width
    data[place + dice.randrange(width)] ^= 1 << dice.randrange(8)
    sums_at, sums, _ = fields["checksums"]
    block = place // BLOCK * BLOCK
    struct.pack_into("<I", data, sums_at + (block // BLOCK - 1) * 4, zlib.crc32(data[block : block + BLOCK]))
    fields["checksums"][2] = zlib.crc32(data[sums_at : sums_at + 4 * sums])
    head = sealed_up(fields)
    data[: len(head)] = head
    return name


def forge_bits(data: bytearray, dice: random.Random) -> str | None:
    """Flip one bit: a sleeper counts as ended, or the other way round."""
    fields = bson.decode(data)
    bits, documents = bytearray(fields["bits"]), int(fields["cover"]["documents"])
    if not bits:
        return None
    i = dice.randrange(documents)
    bits[i // 8] ^= 1 << i % 8
    data[:] = sealed_up({**fields, "bits": bytes(bits)})
    return "bits"


def forge_checkpoint(data: bytearray, dice: random.Random) -> str | None:
    """A group has fetched more than it has, or settled more."""
    fields = bson.decode(data)
    names = [name for name, group in fields["groups"].items() if group["unfetched"] > 0]
    if not names:
        return None
    group = fields["groups"][dice.choice(names)]
    if dice.random() < 0.5:
        group["settled"] = Int64(group["settled"] + 1)
    else:
        group["cursors"] = [Int64(fields["ready_offset"])] * 3
        group["unfetched"] = Int64(0)
    data[:] = sealed_up(fields)
    return "group"


FORGERS: dict[str, Callable[[bytearray, random.Random], str | None]] = {
    ".index": forge_table,
    ".run": forge_table,
    ".dead": forge_bits,
    "": forge_checkpoint,
}


def forge(case: int, life: Life, folder: Path, work: Path, dice: random.Random) -> Figures:
    """One cache after the other is forged. Each is found by `check`, or not believed and made again; or, a bit about a message
    that had come due long before, it has no effect on any answer."""
    seen: Figures = Counter()
    caches = [p for p in sorted(folder.rglob("*")) if p.name == "offset" or p.suffix in (".index", ".run", ".dead")]
    for path in dice.sample(caches, min(3, len(caches))):
        data = bytearray(path.read_bytes())
        what = FORGERS[path.suffix](data, dice)
        if what is None:
            continue
        copytree(folder, work)
        (work / path.relative_to(folder)).write_bytes(data)
        engine = Engine.open(work, door=Ram())
        problems, told = engine.check(), life.told(engine) if what == "bits" else None
        engine.close()
        again = work / path.relative_to(folder)
        believed = again.exists() and again.read_bytes() == bytes(data)
        rmtree(work)
        outcome = "forged and found" if problems else "forged and made again"
        if believed and not problems:
            if told is None or told != _told(life, folder):
                raise Broken(f"case {case}: {path.name} with a forged entry of {what} is believed, and `check` finds nothing")
            outcome = "forged without effect"
        seen += Counter({"forged": 1, outcome: 1})
    return seen


def _told(life: Life, folder: Path) -> dict[Key, Any]:
    engine = Engine.open(folder, door=Ram())
    try:
        return life.told(engine)
    finally:
        engine.close()


# Cases


def run(cases: range, folder: Path) -> Figures:
    """Run the drill of each case; the comparison is described in the module's docstring."""
    seen: Figures = Counter()
    for case in cases:
        place = folder / str(case)
        place.mkdir()
        seen += _case(case, place)
        rmtree(place)
    return seen


def _case(case: int, place: Path) -> Figures:
    life, dice = Life(place / "data", case), random.Random(case)
    seen: Figures = Counter(drills=1)
    for n in range(2):
        life.steps(20)
        b.unpin(life.engine.door, place / "data")
        for _ in b.pin(life.engine.door, place / "data", "p"):
            pass
        told = life.told(life.engine)
        life.steps(25)
        door = Ram()  # as of another process
        name, manifest = b.make(door, b.pinned(door, place / "data", "p"), place / "bk", NOW + n, live=True)
        if manifest.damage or b.verify(door, place / "bk" / name):
            raise Broken(f"case {case}: the backup is damaged: {manifest.damage}")
        again = place / f"again{n}"
        b.restore(door, place / "bk" / name, again)
        _compare(case, life, again, told)
        kinds = Counter(what.split()[0] for _, what in told)
        seen += Counter({"backups restored": 1, "messages compared": kinds["message"], "dead letters compared": kinds["dead"]})
    if problems := life.engine.check():
        raise Broken(f"case {case}: the folder that was served meanwhile: {problems}")
    life.engine.close()
    return seen + forge(case, life, place / "again1", place / "forged", dice)


def _compare(case: int, life: Life, folder: Path, told: dict[Key, Any]) -> None:
    engine = Engine.open(folder, door=Ram())
    if problems := engine.check():
        raise Broken(f"case {case}: the restored folder: {problems}")
    found = life.told(engine)
    for key in sorted(told.keys() | found.keys()):
        if told.get(key) != found.get(key):
            raise Broken(f"case {case}: {key} was {told.get(key)}, after the restore it is {found.get(key)}")
    engine.close()


PART = Part(
    name="drill",
    unit="drills",
    about="Backups of a folder in use, restored: messages, groups, dead letters and settings are the very same; `check` "
    "finds nothing, but every forged cache.",
    run=run,
    quick=6,
    full=300,
    chunk=3,
)
