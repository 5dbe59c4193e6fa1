"""Shards and partitions of topics, as a client knows them: the addresses of partitions are from the header of an answer. Pure.

The name of a topic tells its shard and the id of a message its partition, so that requests about them go to the right process
directly. That needs xxhash; without it, and for all other requests, any process will do.

>>> known = Partitions()
>>> known.learn("clicks", ("http://a", "http://b"))
>>> known.place("clicks", ["order-17", "order-18"])
('http://a', '0/2')
>>> known.place("clicks", ["order-17", "m1"]) is None, known.place("orders", ["order-17"]) is None
(True, True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

PARTITION_HEADER, PLACES_HEADER = "X-Turtlemq-Partition", "x-turtlemq-partitions"
KNOWN_MAX = 10_000  # topics whose partitions are remembered
_FIRING = re.compile(r"@[0-9]{13}\Z")  # the end of the id of a schedule's message, which lies where its schedule does


@lru_cache(1)
def _hash() -> Callable[[bytes], int] | None:
    """The hash of ids; None if it is not installed."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest


def shard_of(topic: str, shards: int) -> int | None:
    """The shard of a topic, of so many; None if the hash is not installed."""
    digest = _hash()
    return None if digest is None else digest(topic.encode()) % shards


def partitions_of(ids: Sequence[str], partitions: int) -> list[int]:
    """The partition of each message, 0.2 µs each. Requires: the hash is installed."""
    digest = _hash()
    assert digest is not None, "xxhash is installed"
    if "@" in "".join(ids):
        ids = [_FIRING.sub("", id_) for id_ in ids]
    return [digest(id_.encode()) % partitions for id_ in ids]


class Partitions:
    """The topics with partitions that a client has met. Threads may share it: a race costs one more hop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}  # addresses by topic
        self._busy: dict[str, int] = {}  # paths of fetches that found messages last time; the partition to ask next

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, topic: str) -> bool:
        return topic in self._known

    def learn(self, topic: str, urls: Sequence[str]) -> None:
        """Remember the addresses of a topic's partitions."""
        if self._known.get(topic) != tuple(urls) and _hash() is not None and len(self._known) < KNOWN_MAX:
            self._known = {**self._known, topic: tuple(urls)}

    def forget(self, topic: str) -> None:
        """The topic was made anew, or lives elsewhere."""
        self._known = {name: urls for name, urls in self._known.items() if name != topic}

    def chooser(self, topic: str) -> Callable[[Sequence[str]], list[int]] | None:
        """A function from ids to partitions of a topic; None if it has none, as far as is known."""
        urls = self._known.get(topic)
        return None if urls is None else lambda ids: partitions_of(ids, len(urls))

    def place(self, topic: str, ids: Sequence[str]) -> tuple[str, str] | None:
        """The address of the process with these messages, and the name of their partition; None if that is not one."""
        urls = self._known.get(topic)
        if urls is None:
            return None
        found = set(partitions_of(ids, len(urls)))
        return self._named(urls, found.pop()) if len(found) == 1 else None

    # Fetches

    def next_place(self, topic: str, path: str) -> tuple[str, str] | None:
        """The place of the next partition to fetch from without waiting, if the last fetch has found messages."""
        urls, turn = self._known.get(topic), self._busy.get(path)
        if urls is None or turn is None:
            return None
        self._busy[path] = turn + 1
        return self._named(urls, turn % len(urls))

    def fetched(self, topic: str, path: str, found: bool) -> None:
        """Note whether a fetch has found messages."""
        if found and topic in self._known and len(self._busy) < KNOWN_MAX:
            self._busy.setdefault(path, len(path))
        elif not found:
            self._busy.pop(path, None)

    def _named(self, urls: tuple[str, ...], partition: int) -> tuple[str, str]:
        return urls[partition], f"{partition}/{len(urls)}"
