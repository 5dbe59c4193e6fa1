"""The contents of an engine: looking at it without changing it, and having it deliver all that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.trust.powercuts_ledger import Key, Seen
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter


class Bare(Door):
    """Syncs nothing, and takes no ballast: neither is needed here."""

    keeps_room = False

    def fresh(self) -> Door:
        return self

    def _sync_names(self, fd: int, folder: Path) -> None:
        """Nothing."""

    def sync(self, fd: int, path: Path) -> None:
        """Nothing."""


def look(engine: Engine) -> object:
    """Everything that can be seen without changing it."""
    out = {}
    for name in sorted(engine.topics):
        stats = engine.stats(name)
        figures = (stats.sleep, stats.ready, stats.reserve, stats.history, stats.dead, stats.cancelled)
        sleepers = [(found.id, found.group, found.due_ms, found.body) for found in engine.browse(name, limit=1000)[0]]
        letters = [
            (letter.group, letter.id, letter.attempts, letter.error)
            for letter in engine.topic(name).view.dead_letters.all(Filter())
        ]
        out[name] = (figures, engine.groups(name), sleepers, letters)
    return out


def abandon(engine: Engine) -> None:
    """The process ends as it stands."""
    engine.door.shut()
    engine.folder.unlock()


def run_to_rest(engine: Engine, now_ms: int) -> None:
    """Tick until nothing is left to do at this time, or something is wrong."""
    for _ in range(1_000):
        wake = engine.tick(now_ms)
        if engine.trouble or wake is None or wake > now_ms:
            return
    raise AssertionError("the engine never comes to rest")


def harvest(engine: Engine, now_ms: int, groups: Iterable[Key], ids: Sequence[Key]) -> Seen:
    """Let everything come due and be fetched by these groups, and see which of these ids would be taken a second time."""
    run_to_rest(engine, now_ms)
    assert not engine.trouble, engine.trouble
    delivered: dict[tuple[str, str, str], tuple[tuple[int, bytes], ...]] = {}
    for topic, group in groups:
        while topic in engine.topics and (out := engine.reserve(topic, group, 1000, now_ms, ttr_ms=1 << 30)):
            due = [int(at) for piece in out.pieces for at in piece.messages.due_ms]
            for id_, due_ms, document in zip(out.ids, due, out.documents(), strict=True):
                place = (topic, group, id_)
                delivered[place] = (*delivered.get(place, ()), (due_ms, document.body))
    letters = [(name, letter) for name in engine.topics for letter in engine.topic(name).view.dead_letters.all(Filter())]
    dead = {(name, letter.group, letter.id): letter.body for name, letter in letters}
    settings = {name: engine.configure(name).max_attempts for name in engine.topics}
    return Seen(delivered, dead, settings, frozenset(_taken(engine, now_ms, ids)))


def _taken(engine: Engine, now_ms: int, ids: Sequence[Key]) -> list[Key]:
    taken: list[Key] = []
    for topic in engine.topics:
        mine = [id_ for there, id_ in ids if there == topic]
        if mine:
            receipt = engine.submit(topic, [Message(b"again", now_ms, id_) for id_ in mine], now_ms)
            taken += [(topic, id_) for id_, created in zip(mine, receipt.created, strict=True) if created]
    return taken
