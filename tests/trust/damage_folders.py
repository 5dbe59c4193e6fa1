"""Data folders to be damaged: two topics that have lived, with every kind of file, and the promises made about them.

Files are read here by the description in docs/FORMAT.md alone: not a line of the product says where a document lies.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import bson

from turtlemq.engine import Engine
from turtlemq.model import Message, Priority
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter

T = TypeVar("T")
NOW = 1_000_000  # when a story begins
FAR = 500_000_000  # when its sleepers wake
GROUPS = ("a", "b")
TOPICS = ("struck", "quiet")
TOMBSTONE, REPLACES, CONTINUES, BARRIER, HANDOFF, NOTICE = 0x20, 0x40, 0x8, 0x10, 0x800, 0x2000


class Ram(Door):
    """Nothing is synced: there are no power cuts here. No ballast either."""

    keeps_room = False

    def fresh(self) -> Door:
        return self

    def random_bytes(self, count: int) -> bytes:
        return b"\x07" * count

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name in ("fdatasync", "fsync_dir"):
            return None  # type: ignore[return-value]
        return action(*args)


@dataclass(frozen=True, slots=True)
class Version:
    """A message as it was sent, or changed."""

    body: bytes
    headers: tuple[tuple[str, str], ...]
    due_ms: int


@dataclass
class Promised:
    """The promises that the users of a topic know."""

    versions: dict[str, list[Version]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    acked: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})
    dead: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})

    def to_come(self, group: str) -> set[str]:
        """Ids that must still be delivered to a group."""
        return self.versions.keys() - self.cancelled - self.acked[group] - self.dead[group]


@dataclass
class Folder:
    """A data folder as it was left."""

    path: Path
    clean: bool
    now_ms: int
    promised: dict[str, Promised]
    files: dict[str, bytes] = field(default_factory=dict)  # by relative path
    docs: dict[str, list[Doc]] = field(default_factory=dict)  # of segments

    def copy(self, to: Path) -> None:
        """Write a copy of the folder, to be damaged."""
        for name, data in self.files.items():
            path = to / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


# Stories


class Story:
    """Chance decides the steps, in an order that leaves something in every kind of file."""

    def __init__(self, root: Path, seed: int) -> None:
        self.dice, self.now, self.count = Random(seed), NOW, 0
        self.crowd = 4 if seed % 5 == 2 else 1  # so many times as many deliveries: several files of dead letters are sealed
        self.square = seed % 3 == 1  # documents of 128 bytes: whole ones fit each other's places if pages are exchanged
        self.engine = Engine.open(root, door=Ram(), settings=Settings())
        self.promised = {topic: Promised() for topic in TOPICS}
        for topic in TOPICS:
            self.engine.configure(
                topic,
                segment_bytes=self.dice.choice([4096, 6_000]),
                run_messages=self.dice.choice([8, 16]),
                max_attempts=self.dice.choice([1, 2]),
                backoff_base_ms=10,
                backoff_jitter="none",
                compact_live_ratio=0.3,
                history_hours=10_000,
                ttr_ms=50_000,
            )
            self.engine.move_group(topic, "a", "earliest", self.now)

    def put(self, topic: str, count: int, due_ms: int, step: int = 0) -> list[str]:
        """A batch. Some have headers, priorities, and bodies that hold documents."""
        told, batch = self.promised[topic], []
        for i in range(count):
            id_ = f"m{self.count:04}"
            self.count += 1
            if self.square:
                headers, body = None, self.dice.randbytes(25).hex().encode()
            else:
                headers = {"n": id_} if self.dice.random() < 0.2 else None
                body = self.dice.randbytes(self.dice.choice([0, 10, 60, 60, 300]))
            level = self.dice.choice([Priority.NORMAL] * 4 + [Priority.HIGH, Priority.LOW])
            batch.append(Message(body, due_ms + i * step, id=id_, headers=headers, priority=level))
            told.versions[id_] = [Version(body, tuple((headers or {}).items()), due_ms + i * step)]
        assert all(self.engine.submit(topic, batch, self.now).created)
        return [message.id or "" for message in batch]

    def cancel(self, topic: str, ids: list[str]) -> None:
        outcome = self.engine.cancel(topic, ids, self.now)
        assert set(outcome.values()) == {"cancelled"}, outcome
        self.promised[topic].cancelled.update(ids)

    def change(self, topic: str, ids: list[str]) -> None:
        for id_ in ids:
            old = self.promised[topic].versions[id_]
            body, due = self.dice.randbytes(40), old[-1].due_ms + self.dice.choice([-1000, 5_000])
            self.engine.reschedule(topic, id_, self.now, due_ms=due, body=body)
            old.append(Version(body, old[-1].headers, due))

    def pass_time(self, ms: int) -> None:
        self.now += ms
        for _ in range(50):
            wake = self.engine.tick(self.now)
            if wake is None or wake > self.now:
                break

    def consume(self, topic: str, group: str, most: int) -> None:
        """Most are handled; some fail, for good, for a short or a long time; some stay in reserve."""
        told, ids = self.promised[topic], self.engine.reserve(topic, group, most, self.now).ids
        good = [id_ for id_ in ids if self.dice.random() < 0.6]
        bad = [id_ for id_ in ids if id_ not in good and self.dice.random() < 0.7]
        self.engine.ack(topic, group, good, self.now)
        told.acked[group].update(good)
        if bad:
            self.engine.ack(
                topic, group, [f"-{id_}" for id_ in bad], self.now, retry_delay_ms=self.dice.choice([0, 10, 60_000]), error="no"
            )
            died = {letter.id for letter in letters(self.engine, topic) if letter.group == group}
            told.dead[group].update(set(bad) & died)

    def live(self, topic: str) -> None:
        dice, asleep = self.dice, list[str]()
        for turn in range(1 if topic == "quiet" else 3):
            asleep = self.put(topic, dice.randint(8, 20), FAR + turn * 100, dice.choice([0, 7]))
            soon = self.put(topic, self.crowd * dice.randint(6, 14), self.now + 5)
            self.cancel(topic, dice.sample(asleep, 2))
            self.change(topic, dice.sample([id_ for id_ in asleep if id_ not in self.promised[topic].cancelled], 2))
            self.pass_time(10)
            if turn == 0:
                self.engine.move_group(topic, "b", "earliest", self.now)
            ready = [id_ for id_ in soon if not any(id_ in self.promised[topic].acked[g] for g in GROUPS)]
            self.cancel(topic, dice.sample(ready, 1))
            for group in GROUPS:
                self.consume(topic, group, self.crowd * dice.randint(4, 12))
            self.pass_time(dice.choice([20, 2_000, 6_000]))
            self.consume(topic, "a", 6)
            self.bury(topic)
        self.put(topic, 5, FAR + 50)
        self.cancel(topic, [asleep[-1]] if asleep[-1] not in self.promised[topic].cancelled else self.put(topic, 1, FAR))

    def bury(self, topic: str) -> None:
        """Of the dead letters, one comes again and one is deleted."""
        told, dead = self.promised[topic], letters(self.engine, topic)
        for letter in dead[:1]:
            self.engine.requeue(topic, [letter], self.now, due_ms=FAR + 10)
            told.dead[letter.group].discard(letter.id)
        for letter in dead[2:3]:
            self.engine.delete_dead(topic, [letter], self.now)
            told.dead[letter.group].discard(letter.id)
            told.acked[letter.group].add(letter.id)  # its end, too


def letters(engine: Engine, topic: str) -> list[Any]:
    return list(engine.topic(topic).view.dead_letters.all(Filter()))


def make(root: Path, seed: int, clean: bool) -> Folder:
    """A folder, stopped properly or killed."""
    story = Story(root, seed)
    for topic in TOPICS:
        story.live(topic)
    if story.dice.random() < 0.7:
        story.pass_time(6_000)  # the checkpoint
    if clean:
        story.engine.close()
    else:
        kill(story.engine)
    found = Folder(root, clean, story.now, story.promised)
    found.files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    found.docs = {name: list(documents(data)) for name, data in found.files.items() if name.endswith(".bson")}
    shutil.rmtree(root)
    return found


def kill(engine: Engine) -> None:
    """The process ends as it stands."""
    engine.door.shut()
    engine.folder.unlock()


# Files, by their description


@dataclass(frozen=True, slots=True)
class Doc:
    """A document of a segment. `of`: the seq of the one that it ends."""

    start: int
    end: int
    seq: int
    flags: int
    id: str
    body: bytes
    of: int | None

    @property
    def event(self) -> dict[str, Any]:
        return dict(bson.decode(self.body))


def documents(data: bytes) -> Iterator[Doc]:
    """Of a whole segment. See docs/FORMAT.md."""
    (at,) = struct.unpack_from("<i", data)
    while at + 63 <= len(data):
        length, crc = struct.unpack_from("<i", data, at)[0], struct.unpack_from("<I", data, at + 9)[0]
        assert zlib.crc32(data[at + 13 : at + length]) == crc
        fields = bson.decode(data[at : at + length])
        id_ = fields["id"].rpartition("/")[2]
        yield Doc(at, at + length, fields["seq"], fields["opt"] >> 32, id_, fields["body"], fields.get("of"))
        at += length


def ready_offsets(folder: Folder, topic: str) -> dict[int, str]:
    """Which message has which ready offset."""
    found: dict[int, str] = {}
    for name, docs in folder.docs.items():
        if name.startswith(f"topic/{topic}/ready_"):
            offset = 0
            for doc in docs:
                if doc.flags & HANDOFF:
                    offset = doc.seq
                else:
                    found[offset] = doc.id
                    offset += 1
    return found


def kind_of(name: str) -> str:
    """The kind of a file, in readable words."""
    path = Path(name)
    if "_" not in path.name or not path.suffix:
        return path.name
    return f"{'dead letters ' if path.parent.name == 'dead' else ''}{path.name.partition('_')[0]}{path.suffix}"
