"""The dead letters of a topic: messages that a group has given up, in a second Index in the folder `dead/`.

In this Index the due time of a document is the time of death, and its id is group/id. So dead letters cost no memory, are listed
by time a page at a time, deleted by tombstones and compacted like sleepers. Their documents are made in `group_documents`;
requeue and delete, which the Broker journals, are in `requeue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turtlemq.broker.failures import EndedDelivery
from turtlemq.errors import Corrupt, headline
from turtlemq.index.columns import tombstones
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.model import DUE_MS_MAX, Progress
from turtlemq.segment import format as f
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door
from turtlemq.topic.group_documents import letter_columns

_PAGE = 1_000
_PAGES_MAX = 10  # pages of the Index read for one page of letters: about 10 ms for 1,000 letters


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that failed its last attempt in a group, or expired."""

    id: str
    group: str
    body: bytes
    json: bool
    due_ms: int  # as the producer asked
    created_ms: int
    dropped_ms: int  # when it died
    attempts: int
    error: str
    document: f.Document

    @property
    def headers(self) -> dict[str, str]:
        return self.document.headers


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of dead letters: every given field must match. `from_ms` and `to_ms` are times of death, both included."""

    group: str | None = None
    from_ms: int = 0
    to_ms: int = DUE_MS_MAX
    error: str | None = None
    prefix: str = ""

    def matches(self, letter: DeadLetter) -> bool:
        """Do group, error and the beginning of the id match? The whole error, or its headline. The times are left
        to `DeadLetters.page`."""
        has_error = self.error is None or self.error in (letter.error, headline(letter.error))
        return has_error and (self.group is None or letter.group == self.group) and letter.id.startswith(self.prefix)


class DeadLetters:
    """The dead letters of one topic."""

    def __init__(
        self, door: Door, folder: Path, topic: str, settings: Settings, clean_end: int | None = None, seed: int = 0
    ) -> None:
        self._settings, self._door = settings, door
        self.index: Index = open_index(door, folder / names.DEAD, topic, settings, Progress(), clean_end, seed=seed)
        self.dropped = 0  # by age or number, since the topic was opened
        self.requeued = 0  # since the topic was opened

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._settings = settings
        self.index.configure(settings)

    def __len__(self) -> int:
        return self.index.stats().sleep

    def store(self, ended: Sequence[EndedDelivery]) -> int:
        """Store letters of messages that died, durably. A message may have a letter from before its group was moved back: it is
        replaced. Returns how many were."""
        if not ended:
            return 0
        older = self.find_many([(e.group, e.id) for e in ended])
        self.index.store(letter_columns(ended, older))
        return len(older)

    def find_many(self, pairs: Sequence[tuple[str, str]]) -> dict[int, f.Document]:
        """The documents of many letters, given as (group, id), by index in `pairs`; those that do not exist are left out."""
        if not pairs or not len(self):
            return {}
        return self.index.find_many([f"{group}/{id_}" for group, id_ in pairs])

    def find_of_groups(
        self, ids: Sequence[str], names: Collection[str], count_max: int | None = None, bodies: bool = False
    ) -> tuple[dict[tuple[str, str], GroupDocument], int]:
        """All letters of these messages, as (group, id) → document, with their `bodies` if asked for. `names`: the groups that
        have letters. Also for how many of the ids, from the first on: fewer than all if there may be more than `count_max`
        letters."""
        documents, count = self.index.find_of_groups(ids, names, count_max, bodies) if names else ([], len(ids))
        return {document.pair: document for document in documents}, count

    def get(self, group: str, id_: str) -> DeadLetter | None:
        """The letter of one message and group."""
        document = self.index.find(f"{group}/{id_}")
        return None if document is None else read_letter(document)

    def page(
        self, asked: Filter, limit: int = 100, cursor: str | None = None, newest: bool = False
    ) -> tuple[list[DeadLetter], str | None]:
        """Dead letters by time of death, a page at a time, the last ones first if `newest`. If few match, a page may be short, or
        empty, and still have a cursor: None means that there is no more."""
        letters: list[DeadLetter] = []
        for _ in range(_PAGES_MAX):
            documents, cursor = self.index.browse_documents(asked.from_ms, asked.to_ms, max(limit, 100), cursor, newest)
            for document in documents:
                letter = read_letter(document)
                if asked.matches(letter):
                    letters.append(letter)
                if len(letters) == limit:
                    return letters, f"{document.due_ms}-{document.seq}"
            if cursor is None:
                break
        return letters, cursor

    def all(self, asked: Filter) -> Iterator[DeadLetter]:
        """Every letter that matches, by time of death."""
        cursor: str | None = None
        while True:
            letters, cursor = self.page(asked, _PAGE, cursor)
            yield from letters
            if cursor is None:
                return

    def by_group(self) -> Counter[str]:
        """The number of letters of each group. Reads all of them: about 10 µs each."""
        return Counter(letter.group for letter in self.all(Filter()))

    def remove(self, letters: Sequence[f.Document]) -> None:
        """Delete letters, durably. The Broker must have journaled it: see `requeue.delete`."""
        if letters:
            self.index.store(tombstones(letters))

    def beyond_limits(self, now_ms: int) -> list[DeadLetter]:
        """The oldest letters that are to be deleted, by age or by number; a page of them, so that requests do not wait long."""
        limit_ms = now_ms - int(self._settings.dead_ttl_hours * 3_600_000)
        if limit_ms > 0 and (old := self.page(Filter(to_ms=limit_ms), _PAGE)[0]):
            return old
        excess = len(self) - self._settings.dead_max_count
        return self.page(Filter(), min(excess, _PAGE))[0] if excess > 0 else []

    def close(self) -> int:
        """Close the files. Returns the end of the active segment, for the clean-shutdown mark."""
        return self.index.close()


def read_letter(document: f.Document) -> DeadLetter:
    """The dead letter that a document of this Index holds."""
    meta = notes_of(document)
    group, _, id_ = document.id.partition("/")
    return DeadLetter(
        id=id_,
        group=group,
        body=document.body,
        json=bool(document.flags & f.JSON),
        due_ms=int(meta["due"]),
        created_ms=document.created_ms,
        dropped_ms=document.due_ms,
        attempts=int(meta["attempt"]),
        error=str(meta["error"]),
        document=document,
    )


def notes_of(letter: f.Document | GroupDocument) -> dict[str, Any]:
    """The Broker's notes on a dead letter: due, attempt, error. Raises `Corrupt` if it is none."""
    meta = letter.meta
    if not meta.keys() >= {"due", "attempt", "error"}:
        raise Corrupt(f"dead/: {letter.id!r} is no dead letter: a file stands where it does not belong. Move it back.")
    return meta
