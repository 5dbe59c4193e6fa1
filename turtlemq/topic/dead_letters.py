"""Dead letters: an Index of its own in the topic's folder `dead/`, in which "due" is when a message died.

So they cost no memory, are listed by time a page at a time, deleted by tombstones, compacted like sleepers, and the oldest go
first when they are too old or too many. An entry's id is group/id; what happened to it is in its `meta`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bson.int64 import Int64

from turtlemq.broker.failures import EndedDelivery
from turtlemq.errors import Corrupt
from turtlemq.index.columns import Columns, tombstones
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.index.seal import seal
from turtlemq.message_fields import optional_of
from turtlemq.model import DUE_MS_MAX, Progress
from turtlemq.segment import format as f
from turtlemq.segment.ids import hash_id
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

_PAGE = 1_000
_PAGES_MAX = 10  # looked through in one call: about 10 ms for 1,000 letters


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that nobody could handle."""

    id: str
    group: str
    body: bytes
    json: bool
    due_ms: int  # as the producer asked
    created_ms: int
    dropped_ms: int
    attempts: int
    error: str
    document: f.Document

    @property
    def headers(self) -> dict[str, str]:
        return self.document.headers


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters: every field that is given must match."""

    group: str | None = None
    from_ms: int = 0
    to_ms: int = DUE_MS_MAX
    error: str | None = None

    def matches(self, letter: DeadLetter) -> bool:
        return (self.group is None or letter.group == self.group) and (self.error is None or letter.error == self.error)


class DeadLetters:
    """The dead letters of one topic."""

    def __init__(self, door: Door, folder: Path, topic: str, settings: Settings, clean_end: int | None = None) -> None:
        self.settings, self.door = settings, door
        self.index: Index = open_index(door, folder / "dead", topic, settings, Progress(), clean_end)
        self.dropped = 0  # by age or number, since the topic was opened
        self.requeued = 0

    def configure(self, settings: Settings) -> None:
        """Settings for what comes from now on."""
        self.settings = settings
        self.index.configure(settings)

    def __len__(self) -> int:
        return self.index.stats().sleep

    def store(self, ended: Sequence[EndedDelivery]) -> int:
        """Keep messages, durably. One that is here already, from before its group was moved back, takes the place of the older.
        Returns how many did."""
        if not ended:
            return 0
        held = self.holds([(e.group, e.id) for e in ended])
        columns = for_group(ended, [e.attempt for e in ended], held)
        columns.purpose = "appended"
        self.index.store(columns)
        return len(held)

    def holds(self, asked: Sequence[tuple[str, str]]) -> dict[int, f.Document]:
        """Which of these (group, id) are here, as index → document."""
        if not asked or not len(self):
            return {}
        return self.index.find_many([f"{group}/{id_}" for group, id_ in asked])

    def get(self, group: str, id_: str) -> DeadLetter | None:
        """One of them."""
        found = self.index.find(f"{group}/{id_}")
        return None if found is None else read_letter(found)

    def page(self, asked: Filter, limit: int = 100, cursor: str | None = None) -> tuple[list[DeadLetter], str | None]:
        """Dead letters in the order in which they died, a page at a time. It may be short, or empty, where few match: there is
        more as long as there is a cursor."""
        found: list[DeadLetter] = []
        for _ in range(_PAGES_MAX):
            documents, cursor = self.index.browse_documents(asked.from_ms, asked.to_ms, max(limit, 100), cursor)
            for document in documents:
                letter = read_letter(document)
                if asked.matches(letter):
                    found.append(letter)
                if len(found) == limit:
                    return found, f"{document.due_ms}-{document.seq}"
            if cursor is None:
                break
        return found, cursor

    def all(self, asked: Filter) -> Iterator[DeadLetter]:
        """Every one that matches."""
        cursor: str | None = None
        while True:
            found, cursor = self.page(asked, _PAGE, cursor)
            yield from found
            if cursor is None:
                return

    def summary(self, asked: Filter) -> dict[str, int]:
        """How many died of what, the most common first."""
        return dict(Counter(letter.error for letter in self.all(asked)).most_common())

    def by_group(self) -> Counter[str]:
        """How many there are of each group. All are read: about 10 µs each."""
        return Counter(letter.group for letter in self.all(Filter()))

    def remove(self, letters: Sequence[f.Document]) -> None:
        """Delete them, durably."""
        if letters:
            self.index.store(tombstones(letters))

    def too_many(self, now_ms: int) -> list[DeadLetter]:
        """The oldest ones that are to go, by age or by number; not all at once, so that nobody waits long."""
        limit_ms = now_ms - int(self.settings.dead_ttl_hours * 3_600_000)
        if limit_ms > 0 and (old := self.page(Filter(to_ms=limit_ms), _PAGE)[0]):
            return old
        excess = len(self) - self.settings.dead_max_count
        return self.page(Filter(), min(excess, _PAGE))[0] if excess > 0 else []

    def maintain(self) -> None:
        """Keep house after letters have gone."""
        order, _ = self.index.maintenance.step(_PAGE, None)
        if order is not None:
            self.index.maintenance.adopt(seal(self.door, order))

    def close(self) -> int:
        """Returns where the active segment ends, for the clean-shutdown mark."""
        return self.index.close()


def read_letter(document: f.Document) -> DeadLetter:
    """The dead letter that a document of this Index holds."""
    if not document.meta.keys() >= {"due", "attempt", "error"}:
        raise Corrupt(f"dead/: {document.id!r} is no dead letter: a file stands where it does not belong. Move it back.")
    group, _, id_ = document.id.partition("/")
    return DeadLetter(
        id=id_,
        group=group,
        body=document.body,
        json=bool(document.flags & f.JSON),
        due_ms=int(document.meta["due"]),
        created_ms=document.created_ms,
        dropped_ms=document.due_ms,
        attempts=int(document.meta["attempt"]),
        error=str(document.meta["error"]),
        document=document,
    )


def for_group(
    ended: Sequence[EndedDelivery], attempts: Sequence[int], older: Mapping[int, f.Document] = MappingProxyType({})
) -> Columns:
    """Messages of one group alone, as documents due at `when_ms`. Their ids are group/id, which no producer can use.
    `older`: by index, the documents that they end."""
    ids = [f"{e.group}/{e.id}" for e in ended]
    keep = f.USER_FLAGS | f.OPTIONAL
    flags = [e.document.flags & keep | f.META | f.CONTINUES for e in ended]
    flags[-1] &= ~f.CONTINUES
    extras = []
    for i, (e, attempt) in enumerate(zip(ended, attempts, strict=True)):
        meta: dict[str, Any] = {"attempt": attempt, "due": Int64(e.due_ms), "error": e.error}
        meta |= {"offset": Int64(e.offset), "epoch": Int64(e.epoch)}
        document = e.document
        of = (older[i].seq, older[i].due_ms) if i in older else None
        flags[i] |= f.REPLACES if i in older else 0
        extras.append(f.extra_elements(of, document.arrived, None, meta, **optional_of(document)))
    return Columns(
        ids=[id_.encode() for id_ in ids],
        bodies=[e.document.body for e in ended],
        due_ms=[e.when_ms for e in ended],
        ttr_ms=[e.document.ttr_ms for e in ended],
        flags=flags,
        extras=extras,
        hashes=[hash_id(id_) for id_ in ids],
        ends=[(document.seq, document.due_ms) for document in older.values()],
        purpose="retried",
    )
