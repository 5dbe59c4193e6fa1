"""The copy of a cluster's keys: watched, read again, consistent with one revision, told when etcd went back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from turtlemq.replica import names_view
from turtlemq.replica.cluster_state import Keys, KeyValue, Lead, ShardState, Want, encode
from turtlemq.replica.etcd import Changed, Found, Unreachable
from turtlemq.replica.member_events import Seen
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.shard_view import seen_of


class Scripted:
    """An etcd whose answers are set by the test."""

    def __init__(self) -> None:
        self.now = Found(5, [kv("/tmq/p/a", 5)])
        self.changes: asyncio.Queue[Changed] = asyncio.Queue()
        self.watches: list[int] = []

    async def get(self, _: str, *, prefix: bool) -> Found:
        assert prefix
        await asyncio.sleep(0)
        return self.now

    async def watch(self, _: str, revision: int, *, prefix: bool) -> AsyncIterator[Changed]:
        assert prefix
        self.watches.append(revision)
        while (change := await self.changes.get()).revision:
            yield change
        raise Unreachable("the watch has ended")


def kv(key: str, revision: int, value: bytes = b"", lease: int = 0) -> KeyValue:
    return KeyValue(key, value, revision, revision, lease)


async def until(condition: object) -> None:
    for _ in range(1000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


async def begun(etcd: Scripted) -> tuple[NamesView, asyncio.Task[None]]:
    view = NamesView(etcd, "/tmq/p/")  # type: ignore[arg-type]
    task = asyncio.create_task(view.run())
    await until(lambda: view.is_fresh and etcd.watches)
    return view, task


def test_changes_of_a_watch_are_taken_in_order() -> None:
    async def story() -> None:
        etcd = Scripted()
        view, task = await begun(etcd)
        seen: list[tuple[int, list[str]]] = []
        view.changed.append(lambda: seen.append((view.revision, sorted(view.keys))))
        etcd.changes.put_nowait(Changed(9, []))  # the watch was made: its revision is ahead of its changes
        etcd.changes.put_nowait(Changed(9, [kv("/tmq/p/b", 7), kv("/tmq/p/c", 7)]))
        etcd.changes.put_nowait(Changed(9, [KeyValue("/tmq/p/a", b"", 0, 8, 0)]))
        await until(lambda: view.revision == 8)
        assert seen == [(7, ["/tmq/p/a", "/tmq/p/b", "/tmq/p/c"]), (8, ["/tmq/p/b", "/tmq/p/c"])]
        assert etcd.watches == [6]
        task.cancel()

    asyncio.run(story())


def test_a_late_watch_does_not_undo_a_read() -> None:
    async def story() -> None:
        etcd = Scripted()
        view, task = await begun(etcd)
        etcd.now = Found(9, [kv("/tmq/p/a", 9)])
        assert await view.read() == 9
        etcd.changes.put_nowait(Changed(9, [KeyValue("/tmq/p/a", b"", 0, 8, 0)]))
        etcd.changes.put_nowait(Changed(10, [kv("/tmq/p/d", 10)]))
        await until(lambda: view.revision == 10)
        assert sorted(view.keys) == ["/tmq/p/a", "/tmq/p/d"]
        task.cancel()

    asyncio.run(story())


def test_a_read_that_the_watch_has_overtaken_changes_nothing() -> None:
    async def story() -> None:
        etcd = Scripted()
        view, task = await begun(etcd)
        reading = asyncio.create_task(view.read())
        etcd.changes.put_nowait(Changed(6, [kv("/tmq/p/b", 6)]))
        assert await reading in (5, 6)
        await until(lambda: view.revision == 6)
        assert sorted(view.keys) == ["/tmq/p/a", "/tmq/p/b"]
        task.cancel()

    asyncio.run(story())


def test_an_etcd_that_went_back_is_told_and_taken() -> None:
    async def story() -> None:
        etcd = Scripted()
        view, task = await begun(etcd)
        told: list[int] = []
        view.unwatched.append(lambda: told.append(view.revision))
        etcd.now = Found(3, [])
        assert await view.read() == 3
        assert (told, view.keys) == ([3], {})
        task.cancel()

    asyncio.run(story())


def test_a_watch_that_ends_or_says_nothing_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_view, "READ_S", 0.02)
    monkeypatch.setattr(names_view, "LATE_S", 0.02)

    async def story() -> None:
        etcd = Scripted()
        view, task = await begun(etcd)
        told: list[bool] = []
        view.unwatched.append(lambda: told.append(view.is_fresh))
        etcd.changes.put_nowait(Changed(0, []))
        await until(lambda: etcd.watches == [6, 6])
        etcd.now = Found(8, [kv("/tmq/p/a", 8)])  # the watch does not tell it
        await until(lambda: etcd.watches == [6, 6, 9])
        assert told == [False, False]
        task.cancel()

    asyncio.run(story())


def test_the_state_machine_sees_all_keys_of_its_shard() -> None:
    keys = Keys("p")
    state = ShardState(epoch=3, leader="r1", isr=("r1", "r2"), nodes={"r1": "a", "r2": "b"}, nonce="n")
    lead = Lead(epoch=3, replica="r1", node="a", url="http://a:1", peer="a:2")
    values = {
        keys.state(0): kv(keys.state(0), 7, encode(state)),
        keys.lead(0): kv(keys.lead(0), 8, encode(lead), lease=44),
        keys.want(0): kv(keys.want(0), 2, encode(Want(nodes=("a", "b")))),
    }
    seen = seen_of(values, 9, keys, 0, "b", read=5)
    assert seen == Seen(9, 7, 3, "r1", frozenset({"r1", "r2"}), "n", "r1", 44, False, 5)
    assert seen_of({}, 9, keys, 0, "a") == Seen(9)
    assert seen_of({keys.want(0): values[keys.want(0)]}, 9, keys, 0, "a").first
