"""Damage: bytes of a data folder have changed, or a file is gone, or has another's name. Rules that must hold then:

- Opening works, or is refused with an error that names the file, and only where a folder or topic is unreadable without it.
- No message is delivered with bytes that were never sent, before its time, in a topic or under an id that it was not sent to, or
  twice once it was acknowledged.
- Contained: only messages whose own documents were struck may be missing, or come again. The other topic is as it was, exactly.
- Found: where anything is missing or comes again, `Engine.damage` or `Engine.check` names the file.

Permitted effects of a strike, by the kind of file (docs/FORMAT.md, the section about batches, barriers and bad bytes):

- tables, dead bits, the checkpoint, CLEAN, LOCK, HASH_SEED, unfinished files: nothing at all. All of them can be made again.
- a sleeper's document: that message is lost; a tombstone's: the message it ended may sleep again; a new version's: the older
  one may come, at its own time. The same for dead letters.
- a document of the ready log: that message is lost; one about a batch, or a note: nothing. Where the end of the log is gone,
  so is the record that those messages were handed off: they may come again from where they slept.
- two exchanged pages of a growing log: documents between them may be taken for older than those before, and left out; so
  may documents behind them, as far as a document that was moved says that it reaches.
- an event of a journal: messages that it settled may be delivered again.
- the last batches of a log that was not stopped properly, if nothing behind them says that they were synced: they are cut off as
    torn, with all behind them, and this damage cannot be detected.
- a whole file that is gone: after a proper stop its name is known; after a kill nothing tells one of sleepers or dead letters
  from one that was compacted away, nor the oldest of the ready log from one that was old enough to go.
- topic.toml is written by hand: readable values count. Unreadable ones are refused by name.

A crash may leave a torn end, too, or a whole file that is gone after a kill; and where documents of one length change
places exactly, each of them is sound. Where such a thing takes messages and no file is named, the figures say so.

The number of a case says which kind of file is struck, and how: in a whole run no kind misses any way that it can be struck in.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from shutil import rmtree

from tests.harness.short_events import short_events
from tests.trust import damage_folders as ground
from tests.trust.damage_folders import FAR, GROUPS, TOPICS, Doc, Folder, Promised, Version, kind_of
from tests.trust.model import TRIED, Broken, Figures, Part
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, NewerFormat

END = FAR + 10_000_000  # everything is due
VARIANTS = 4  # folders of a chunk
LOGS = ".bson"
UNTOLD = "not recognizable"


# Strikes: a file's bytes before → after. None: it is gone.


def _flip(data: bytearray, dice: Random) -> None:
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _cut(data: bytearray, dice: Random) -> None:
    del data[dice.choice([dice.randrange(len(data)), dice.randrange(len(data)) & ~511]) :]


def _page(data: bytearray, dice: Random) -> slice:
    size = dice.choice([512, 512, 4096])
    at = dice.randrange(len(data)) // size * size
    return slice(at, min(at + size, len(data)))


def _zero(data: bytearray, dice: Random) -> None:
    where = _page(data, dice)
    data[where] = bytes(where.stop - where.start)


def _swap(data: bytearray, dice: Random) -> None:
    size = dice.choice([size for size in (512, 512, 512, 4096) if 2 * size <= len(data)] or [_unit(data)])
    one, other = (slice(i * size, (i + 1) * size) for i in dice.sample(range(len(data) // size), 2))
    data[one], data[other] = data[other], data[one]


def _unit(data: bytearray) -> int:
    """Size of the parts to exchange in a file that has no two pages."""
    return next(size for size in (64, 16, 1) if 2 * size <= len(data))


def _garbage(data: bytearray, dice: Random) -> None:
    at, length = dice.randrange(len(data)), dice.choice([1, 4, 16, 100, 700, 5000])
    data[at : at + length] = dice.randbytes(len(data[at : at + length]))


def _append(data: bytearray, dice: Random) -> None:
    length = dice.choice([1, 10, 100, 4096])
    data += dice.choice([dice.randbytes(length), bytes(length), bytes(data[-length:])])


STRIKES: dict[str, Callable[[bytearray, Random], None]] = {
    "flip": _flip,
    "cut": _cut,
    "zero page": _zero,
    "swapped pages": _swap,
    "garbage": _garbage,
    "appended": _append,
}
HOW = (*STRIKES, "missing", "exchanged")
KINDS_LOGS = ("delay.bson", "ready.bson", "reserve.bson", "history.bson", "dead letters delay.bson")
KINDS_SINGLE = ("FORMAT", "LOCK", "CLEAN", "HASH_SEED")  # one of each: there is none to exchange it for
KINDS_OTHER = (
    *KINDS_SINGLE,
    "topic.toml",
    "offset",
    "delay.index",
    "delay.run",
    "delay.dead",
    "delay.tmp",
    "dead letters delay.tmp",
    "ready.run",
    "dead letters delay.run",
    "dead letters delay.dead",
    "dead letters delay.index",
)
WALK = (*KINDS_LOGS, *KINDS_OTHER[:4], *KINDS_LOGS, *KINDS_OTHER[4:8], *KINDS_LOGS, *KINDS_OTHER[8:])  # most is in the logs
CELLS = tuple(
    f"{TRIED}{how} in {kind}"
    for kind in (*KINDS_LOGS, *KINDS_OTHER)
    for how in HOW
    if how != "exchanged" or kind not in KINDS_SINGLE
)
TRIES = 1_000  # to draw a strike that changes a byte


@dataclass
class Strike:
    """One case: the kind of damage, the struck file, and the documents concerned."""

    case: int
    folder: Folder
    name: str
    how: str
    touched: dict[str, list[Doc]] = field(default_factory=dict)  # by file: documents whose bytes are not there any more
    torn: bool = False  # a crash may have left just this
    shuffled: bool = False  # every document is whole, in the place of another

    def __str__(self) -> str:
        how = "stopped" if self.folder.clean else "killed"
        return f"case {self.case}: {self.how} in {self.name} of a folder that was {how}"

    @property
    def topic(self) -> str:
        return self.name.split("/")[1] if self.name.startswith("topic/") else ""


def strike(case: int, folder: Folder, kind: str, path: Path) -> Strike:
    """Damage a file of this kind in a copy of a folder, as the case's number says."""
    dice, how = Random(case), HOW[case % len(HOW)]
    name, after = _struck(folder, kind, how, dice)
    made = Strike(case, folder, name, how)
    folder.copy(path)
    for one, data in after.items():
        if data is None:
            os.unlink(path / one)
        else:
            (path / one).write_bytes(data)
        if one.endswith(LOGS):
            made.touched[one] = _touched(folder, one, bytes(data or b""), made)
            made.shuffled |= how == "swapped pages" and _documents(folder, one, bytes(data or b"")) == _documents(folder, one)
    return made


def _documents(folder: Folder, name: str, data: bytes | None = None) -> list[bytes]:
    """The documents of a log, one behind the other by their lengths, without regard to their order."""
    data, found = folder.files[name] if data is None else data, []
    at = folder.docs[name][0].start if folder.docs[name] else len(data)
    while at + 4 <= len(data) and (size := int.from_bytes(data[at : at + 4], "little")) > 4:
        found.append(data[at : at + size])
        at += size
    return sorted(found)


def files_of(folder: Folder) -> dict[str, list[str]]:
    """The files that may be struck, by kind."""
    kinds: dict[str, list[str]] = {}
    for name in folder.files:
        if "quiet" not in name:
            kinds.setdefault(kind_of(name), []).append(name)
    if unknown := kinds.keys() - set(WALK):
        raise Broken(f"there are files of a kind that is never struck: {sorted(unknown)}")
    return kinds


def others(folder: Folder, name: str) -> list[str]:
    """Files of the same kind, also of the other topic, with other bytes."""
    return [other for other in folder.files if kind_of(other) == kind_of(name) and folder.files[other] != folder.files[name]]


def possible(folder: Folder, kind: str, how: str) -> bool:
    """Is there such a file, and, if it is to change names, another one?"""
    mine = files_of(folder).get(kind, [])
    return any(others(folder, name) for name in mine) if how == "exchanged" else bool(mine)


def _struck(folder: Folder, kind: str, how: str, dice: Random) -> tuple[str, dict[str, bytearray | None]]:
    """A file, and those whose bytes are others now; None: it is gone."""
    mine = files_of(folder)[kind]
    if how == "exchanged":
        name = dice.choice([name for name in mine if others(folder, name)])
        other = dice.choice(others(folder, name))
        return name, {name: bytearray(folder.files[other]), other: bytearray(folder.files[name])}
    name = dice.choice(mine)
    if how == "missing":
        return name, {name: None}
    for _ in range(TRIES):
        data = bytearray(folder.files[name])
        STRIKES[how](data, dice)
        if data != folder.files[name]:
            return name, {name: data}
    raise Broken(f"{how} in {name} changes nothing, however often it is tried")


def _touched(folder: Folder, name: str, after: bytes, made: Strike) -> list[Doc]:
    """Documents that are not where they were. Where a crash may have left the file so, all behind them, and their batch, too."""
    before = folder.files[name]
    docs = folder.docs[name]
    found = [doc for doc in docs if after[doc.start : doc.end] != before[doc.start : doc.end]]
    if made.how == "swapped pages" and found:
        reach = found[-1].end + max(doc.end - doc.start for doc in found)
        found = [doc for doc in docs[docs.index(found[0]) :] if doc.start < reach]
    kind = Path(name).name.partition("_")[0]
    last = max(
        n
        for n in folder.files
        if Path(n).parent == Path(name).parent and Path(n).name.startswith(f"{kind}_") and n.endswith(".bson")
    )
    if folder.clean or name != last or not found:
        return found
    behind = docs[docs.index(found[-1]) + 1 :]
    if any(doc.flags & ground.BARRIER for doc in behind):
        return found
    first = docs.index(found[0])
    while first and docs[first - 1].flags & ground.CONTINUES:
        first -= 1
    while kind == "ready" and first and not docs[first].flags & ground.HANDOFF:
        first -= 1
    made.torn = True
    return docs[first:]


# Permitted results


@dataclass
class Allowed:
    """For one topic: ids that may be missing, and that may come though they should not, or in an older version."""

    missing: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    letters: set[str] = field(default_factory=set)


def allowed(made: Strike, topic: str) -> Allowed:
    """By the rules at the top of this file."""
    out = Allowed()
    for name, docs in made.touched.items():
        if name.split("/")[1] != topic:
            continue
        kind = kind_of(name).removesuffix(LOGS)
        if kind in ("reserve", "history"):
            out.again.update(_settled(made.folder, topic, docs))
            continue
        here = [doc for one, all_ in made.folder.docs.items() if Path(one).parent == Path(name).parent for doc in all_]
        by_seq = {doc.seq: doc.id for doc in here}
        ids = {doc.id for doc in docs} | {by_seq[doc.of] for doc in docs if doc.of in by_seq}
        if kind == "dead letters delay":
            out.letters |= ids
        else:
            out.missing |= ids
            out.again |= ids
    return out


def _settled(folder: Folder, topic: str, events: Iterable[Doc]) -> Iterable[str]:
    """The messages that events of a journal are about."""
    offsets = ground.ready_offsets(folder, topic)
    for doc in events:
        event = doc.event
        for field_ in ("offsets", "again"):
            packed = event.get(field_, b"")
            yield from (offsets[offset] for (offset,) in struct.iter_unpack("<q", packed) if offset in offsets)
        ids = event.get("ids", b"")
        yield from (id_.rpartition("/")[2] for id_ in (ids.decode().split("\0") if isinstance(ids, bytes) else ids))


# Looking


@dataclass
class Seen:
    """Everything that a topic delivers, to its end."""

    got: dict[str, list[tuple[str, Version, int]]] = field(default_factory=dict)  # by group: id, what, when
    dead: dict[str, set[str]] = field(default_factory=dict)  # letters at the begin
    died: dict[str, set[str]] = field(default_factory=dict)  # and at the end: leases have ended meanwhile
    wrong: list[str] = field(default_factory=list)


def look(engine: Engine, folder: Folder) -> dict[str, Seen]:
    """Take everything, first ready messages, then sleepers until the end."""
    seen = {topic: Seen({group: [] for group in GROUPS}) for topic in TOPICS if topic in engine.topics}
    for topic, one in seen.items():
        one.dead = _letters(engine, topic, folder.promised[topic], one)
    for when in (folder.now_ms, END, END + 100_000):
        for _ in range(50):
            wake = engine.tick(when)
            if wake is None or wake > when:
                break
        for topic, one in seen.items():
            for group in GROUPS:
                _drain(engine, topic, group, when, one.got[group])
    for topic, one in seen.items():
        one.died = _letters(engine, topic, folder.promised[topic], one)
    return seen


def _drain(engine: Engine, topic: str, group: str, when: int, got: list[tuple[str, Version, int]]) -> None:
    while batch := engine.reserve(topic, group, 1_000, when).documents():
        for document in batch:
            id_ = document.id.rpartition("/")[2]
            got.append((id_, Version(document.body, tuple(document.headers.items()), document.due_ms), when))
        engine.ack(topic, group, [id_ for id_, _, _ in got[-len(batch) :]], when)


def _letters(engine: Engine, topic: str, told: Promised, seen: Seen) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for letter in ground.letters(engine, topic):
        version = Version(letter.body, tuple(letter.headers.items()), letter.due_ms)
        if version not in told.versions.get(letter.id, ()):
            seen.wrong.append(f"dead letter {letter.id!r} is none that was sent: {version}")
        found.setdefault(letter.group, set()).add(letter.id)
    return found


def judge(made: Strike, topic: str, seen: Seen) -> bool:
    """Everything that must hold in a topic. Returns whether anything is missing, or came that should not."""
    told, may, off = made.folder.promised[topic], allowed(made, topic), False

    def broken(what: str) -> Broken:
        return Broken(f"{made}: topic {topic}: {what}")

    if seen.wrong:
        raise broken(seen.wrong[0])
    for group in GROUPS:
        ids = [id_ for id_, _, _ in seen.got[group]]
        twice = [id_ for id_, count in Counter(ids).items() if count > 1]
        if set(twice) - may.again:
            raise broken(f"group {group} got {twice} twice, though acknowledged")
        for id_, version, when in seen.got[group]:
            versions = told.versions.get(id_)
            if versions is None:
                raise broken(f"group {group} got {id_!r}, which was never sent")
            if not any((version.body, version.headers) == (v.body, v.headers) for v in versions):
                raise broken(f"group {group} got {id_} with wrong bytes: {version}")
            due = min(v.due_ms for v in versions) if id_ in may.again else versions[-1].due_ms
            if when < due and id_ not in told.acked[group]:
                raise broken(f"group {group} got {id_} at {when}, before {due}")
            off |= version.body != versions[-1].body
            if version.body != versions[-1].body and id_ not in may.again:
                raise broken(f"group {group} got an old version of {id_}")
        lost = told.to_come(group) - set(ids) - seen.died[group]
        extra = set(ids) - told.to_come(group)
        if lost - may.missing:
            raise broken(f"group {group} never got {sorted(lost - may.missing)}")
        if extra - may.again:
            raise broken(f"group {group} got {sorted(extra - may.again)} again, or though cancelled or dead")
        gone, back = told.dead[group] - seen.dead[group], seen.dead[group] - told.dead[group]
        if (gone | back) - may.letters - may.again:
            raise broken(f"group {group}: dead letters {sorted(gone)} are missing, {sorted(back)} should not be there")
        off |= bool(lost or extra or gone or back)
    return off


def run(cases: range, folder: Path) -> Figures:
    """Strike the folder of each case, and check the rules in the module's docstring."""
    seen: Figures = Counter()
    for case in cases:
        seen += _case(case, folder)
    return seen


@lru_cache(maxsize=VARIANTS)
def _folder(variant: int, where: Path) -> Folder:
    with short_events(variant):
        made = ground.make(where / "story", variant, clean=variant % 2 == 0)
    sound = Strike(-4, made, "", "nothing")
    made.copy(where / "sound")
    try:
        seen, said = _take(where / "sound", sound)
    finally:
        rmtree(where / "sound")
    if said or any(judge(sound, topic, found) for topic, found in seen.items()):
        raise Broken(f"variant {variant}: it is not as promised, without any damage: {said}")
    return made


def _take(path: Path, made: Strike) -> tuple[dict[str, Seen], list[str]]:
    """Open, look at everything, stop, and see that there is nothing more. Returns the damage found, too. In a third of the cases
    the process that opens it first is killed before it has done anything: damage must not spread with that."""
    said = _opened_in_vain(path) if Random(f"kill {made.case}").random() < 1 / 3 else []
    engine = Engine.open(path, door=ground.Ram())
    said += engine.check() + _damage(engine)
    seen = look(engine, made.folder)
    said += _damage(engine)
    engine.close()
    if made.case % 4 == 0:
        engine = Engine.open(path, door=ground.Ram())
        engine.tick(END + 200_000)
        left = [
            id_ for topic in engine.topics for group in GROUPS for id_ in engine.reserve(topic, group, 1_000, END + 200_000).ids
        ]
        said += _damage(engine)
        engine.close()
        if left:
            raise Broken(f"{made}: {left} come again after a stop, though acknowledged")
    return seen, said


def _opened_in_vain(path: Path) -> list[str]:
    engine = Engine.open(path, door=ground.Ram())
    ground.kill(engine)
    return _damage(engine)


def _damage(engine: Engine) -> list[str]:
    return [str(damage) for some in engine.damage().values() for damage in some]


def _chosen(case: int, where: Path) -> tuple[Folder, str]:
    """The folder and the kind of file for a case: the first of its turn, or else the next for which this is possible."""
    turn, how = case // len(HOW), HOW[case % len(HOW)]
    for kind in (WALK[(turn + i) % len(WALK)] for i in range(len(WALK))):
        for variant in (case // 100 * VARIANTS + (turn + i) % VARIANTS for i in range(VARIANTS)):
            folder = _folder(variant, where)
            if possible(folder, kind, how):
                return folder, kind
    raise Broken(f"case {case}: no file can be {how}")


def _case(case: int, where: Path) -> Figures:
    folder, kind = _chosen(case, where)
    path = where / "struck"
    made = strike(case, folder, kind, path)
    figures = Counter({"cases": 1, f"{TRIED}{made.how} in {kind}": 1})
    try:
        seen, said = _take(path, made)
    except (Corrupt, NewerFormat) as error:
        if made.name != "FORMAT" or "FORMAT" not in str(error):
            raise Broken(f"{made}: nothing is served any more: {error}") from error
        return figures + Counter({"found": 1, f"found in {kind}": 1})
    finally:
        rmtree(path)
    if len(seen) < len(TOPICS):
        _may_be_refused(made, set(TOPICS) - seen.keys())
    off = any({topic: judge(made, topic, found) for topic, found in seen.items()}.values())
    struck = set(made.touched) or {made.name}
    named = any(Path(name).name in line for name in struck for line in said)
    cause = _untold(made)
    if off and not named and cause is None:
        raise Broken(f"{made}: something is missing or came again, and nothing was said")
    if len(seen) < len(TOPICS) and not named:
        raise Broken(f"{made}: refused without the file's name: {said}")
    outcome = "found" if named else UNTOLD if off else "harmless"
    figures += Counter({outcome: 1, f"{outcome} in {kind}": 1, "messages lost or again": off})
    return figures + Counter({f"{UNTOLD}: {cause}": outcome == UNTOLD})


def _untold(made: Strike) -> str | None:
    """Why damage cannot be detected: a kill may leave it so, or a compaction or retention before it. None: it can be."""
    if made.how == "missing" and not made.folder.clean:
        kind = kind_of(made.name)
        mine = sorted(name for name in files_of(made.folder)[kind] if Path(name).parent == Path(made.name).parent)
        if kind.endswith("delay.bson") or (kind == "ready.bson" and made.name in (mine[0], mine[-1])):
            return "a file is gone after a kill"
    if made.shuffled:
        return "whole documents changed places"
    return "a torn end after a kill" if made.torn else None


def _may_be_refused(made: Strike, closed: Set[str]) -> None:
    """A topic is not opened if its settings cannot be read, or if a file is foreign: with another's name, or with none of its
    own bytes. Both are for the operator to decide."""
    name = Path(made.name).name
    foreign = made.how == "exchanged" or (made.how in ("garbage", "zero page") and len(made.folder.files[made.name]) < 6_000)
    if name != "topic.toml" and not (name.endswith(LOGS) and foreign):
        raise Broken(f"{made}: {sorted(closed)} is not served any more")
    if made.how != "exchanged" and closed != {made.topic}:
        raise Broken(f"{made}: {sorted(closed)} are not served any more")


PART = Part(
    name="damage",
    unit="strikes",
    about="Bits flip, pages are zeroed or exchanged, files are cut, grow, vanish or change names: found or harmless, contained.",
    run=run,
    quick=500,
    full=10_000,
    chunk=100,
    must=("cases", "found", "harmless", "messages lost or again"),
    floors=dict.fromkeys(CELLS, 1),
)
