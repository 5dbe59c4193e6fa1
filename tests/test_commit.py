"""Group commit: requests of one moment share a write and a sync, on a thread; all other writers wait for it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from pathlib import Path

import pytest

from tests.harness.committer import SMALL, Server, Slow, batch
from tests.harness.doors import Failing
from turtlemq.engine import Engine
from turtlemq.errors import Conflict, DiskFull, Stopped, UnknownMessage
from turtlemq.index.writer import CommitGroup
from turtlemq.server.clients import RegisteredClient
from turtlemq.server.commit import THREADS
from turtlemq.server.errors import Overloaded
from turtlemq.server.service import UNCOMMITTED_MAX, Service
from turtlemq.storage.door import Door


def test_requests_gather_while_a_group_is_written(tmp_path: Path) -> None:
    door = Slow()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        first = asyncio.create_task(server.put("a"))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(server.put(f"b{n}")) for n in range(50)]
        again = asyncio.create_task(server.put("a"))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (first, again, *others)), "not answered before it is durable, nor is a duplicate"
        assert server.engine.get("t", "a") is None, "nor seen"
        before = door.syncs
        door.gate.set()
        assert await first == [True]
        assert await again == [False]
        assert all([await task == [True] for task in others])
        assert door.syncs - before == 1, "fifty requests, one sync"
        assert server.engine.stats("t").sleep == 51
        server.close()

    asyncio.run(story())


def test_what_waits_for_a_thread_is_written_before_the_threads_end(tmp_path: Path) -> None:
    """More topics than threads: closing runs the groups that no thread has begun, and waits for the rest."""
    door, topics = Slow(), [f"t{n}" for n in range(THREADS + 5)]

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        tasks = [asyncio.create_task(server.put("a", topic=topic)) for topic in topics]
        await asyncio.sleep(0.05)
        threading.Timer(0.1, door.gate.set).start()
        server.close()
        assert [server.engine.stats(topic).sleep for topic in topics] == [1] * len(topics)
        await asyncio.gather(*tasks)

    asyncio.run(story())
    engine = Engine.open(tmp_path / "d")
    assert all(engine.get(topic, "a") is not None for topic in topics)
    engine.close()


def test_a_closed_committer_leaves_topics_to_another_thread(tmp_path: Path) -> None:
    """Groups that threads have written meanwhile are published by the close of their topic, not on the event loop beside it."""
    door = Slow()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        tasks = [asyncio.create_task(server.put("a"))]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(server.put("b")))  # gathers behind it
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        threading.Timer(0.1, door.gate.set).start()
        server.committer.close()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert server.engine.get("t", "a") is None
        await asyncio.to_thread(server.engine.close)

    asyncio.run(story())
    engine = Engine.open(tmp_path / "d")
    assert engine.was_clean
    assert [engine.get("t", id_) is not None for id_ in "ab"] == [True, True]
    engine.close()


def test_more_topics_than_threads_all_get_their_turn(tmp_path: Path) -> None:
    async def story() -> None:
        server = Server(tmp_path / "d", Door())
        rounds = [server.put(f"m{n}", topic=f"t{k}") for n in range(5) for k in range(3 * THREADS)]
        assert await asyncio.wait_for(asyncio.gather(*rounds), 20) == [[True]] * len(rounds)
        server.close()

    asyncio.run(story())


def test_an_urgent_write_waits_for_the_group_under_way(tmp_path: Path) -> None:
    door = Slow()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        door.gate.set()
        await server.put("a")
        door.gate.clear()
        tasks = [asyncio.create_task(server.put("b"))]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(server.put("c")))  # gathers behind it
        await asyncio.sleep(0.05)
        threading.Timer(0.1, door.gate.set).start()
        assert server.engine.cancel("t", ["a", "b", "c"], 0) == {"a": "cancelled", "b": "unknown", "c": "unknown"}
        assert server.engine.stats("t").sleep == 2, "both groups have landed on the way"
        assert [await task for task in tasks] == [[True], [True]]
        server.close()

    asyncio.run(story())


def test_two_changes_of_one_message_come_one_after_the_other(tmp_path: Path) -> None:
    async def story() -> None:
        server = Server(tmp_path / "d", Door())
        await server.put("a")
        await asyncio.gather(server.move("a", 50), server.move("a", 60), server.move("a", 70))
        found = server.engine.get("t", "a")
        assert found is not None
        assert found.due_ms == 70
        assert sorted(await asyncio.gather(server.cancel("a"), server.cancel("a"))) != ["cancelled", "cancelled"]
        assert server.engine.stats("t").sleep == 0
        server.close()

    asyncio.run(story())


def test_a_full_disk_fails_every_request_of_its_group(tmp_path: Path) -> None:
    door = Failing()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        await server.put("a")
        door.at, door.how = len(door.calls), "ENOSPC"
        heard = await asyncio.gather(*(server.put(f"b{n}") for n in range(9)), return_exceptions=True)
        assert {type(one) for one in heard} == {DiskFull}
        assert await server.put("b1") == [True], "nothing of it was stored, and room has come back"
        assert server.engine.stats("t").sleep == 2
        assert server.engine.check() == []
        server.close()

    asyncio.run(story())


def test_after_a_failed_sync_nothing_is_written_any_more(tmp_path: Path) -> None:
    door = Failing()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        await server.put("a")
        door.at, door.how = len(door.calls) + 1, "EIO"
        with pytest.raises(Stopped):
            await server.put("b")
        assert door.failed is not None
        assert "fdatasync" in door.failed
        with pytest.raises(Stopped):
            await server.put("c")
        assert await server.put("a", topic="other") == [True], "other topics go on"
        server.close()

    asyncio.run(story())
    engine = Engine.open(tmp_path / "d", settings=SMALL)
    assert engine.get("t", "a") is not None
    assert engine.get("t", "c") is None
    engine.close()


def test_a_cancelled_request_leaves_the_others_alone(tmp_path: Path) -> None:
    door = Slow()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        gone, stays = asyncio.create_task(server.put("a")), asyncio.create_task(server.put("b"))
        await asyncio.sleep(0.05)
        gone.cancel()
        door.gate.set()
        assert await stays == [True]
        assert server.engine.stats("t").sleep == 2
        server.close()

    asyncio.run(story())


def test_too_much_waiting_is_refused(tmp_path: Path) -> None:
    door = Slow()

    async def story() -> None:
        service = Service()
        service.start(Engine.open(tmp_path / "d", door=door))
        service.admit(UNCOMMITTED_MAX + 1)  # alone, anything goes that the limit on bodies let through
        found, _ = service.engine.stage("t", batch("a"), 0)
        task = asyncio.create_task(service.commit(found, UNCOMMITTED_MAX))
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded) as refused:
            service.admit(1)
        assert int(str(refused.value.details["retry_after_ms"])) >= 1
        door.gate.set()
        await task
        service.admit(1)
        engine = service.engine
        service.drain()
        service.close()
        engine.close()

    asyncio.run(story())


@pytest.mark.parametrize("other", ["connection", "stream", "callbacks"])
def test_other_clients_do_not_wait_on_the_loop_for_a_commit(tmp_path: Path, other: str) -> None:
    door = Slow()  # a commit on the loop would wait for the gate, and so would this test

    async def story() -> None:
        service = Service()
        service.start(Engine.open(tmp_path / "d", door=door))
        service.connections = lambda: 2 if other == "connection" else 1
        if other == "stream":
            service.streams = lambda: 1
        elif other == "callbacks":
            client = RegisteredClient(topic="t", group="g", client="c", name="c", transport="http", capacity=1, window=1)
            service.clients.add(client)
        found, _ = service.engine.stage("t", batch("m"), 0)
        task = asyncio.create_task(service.commit(found, 100))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done(), "a thread commits"
        door.gate.set()
        await task
        engine = service.engine
        service.drain()
        service.close()
        engine.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_only_client_is_synced_for_on_the_loop(tmp_path: Path) -> None:
    door = Slow()  # the gate is shut: every group that goes to a thread stays there

    async def story() -> None:
        service = Service()
        service.start(Engine.open(tmp_path / "d", door=door))

        async def put(id_: str) -> None:
            found, _ = service.engine.stage("t", batch(id_), 0)
            await service.commit(found, 100)

        service.connections = lambda: 1
        await asyncio.wait_for(put("alone"), 10)
        assert service.engine.get("t", "alone") is not None
        service.connections = lambda: 2
        tasks = [asyncio.create_task(put("one of two"))]
        await asyncio.sleep(0.05)
        service.connections = lambda: 1
        tasks.append(asyncio.create_task(put("behind it")))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks), "what is under way goes first"
        door.gate.set()
        await asyncio.gather(*tasks)
        door.gate.clear()
        service._observe_commit(1, 1)  # a disk that has been slow
        slow = asyncio.create_task(put("on a slow disk"))
        await asyncio.sleep(0.05)
        assert not slow.done()
        door.gate.set()
        await slow
        engine = service.engine
        stats = engine.stats("t")
        assert stats.sleep + stats.ready == 4
        service.drain()
        service.close()
        engine.close()

    asyncio.run(story())


@pytest.mark.parametrize(("how", "error"), [("EIO", Stopped), ("ENOSPC", DiskFull)])
def test_the_only_client_hears_of_a_failure(tmp_path: Path, how: str, error: type[Exception]) -> None:
    door = Failing()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        await server.put("a")
        found, _ = server.engine.stage("t", batch("b"), 0)
        door.at, door.how = len(door.calls), how
        with pytest.raises(error):
            await server.committer.commit(found, inline=True)
        assert door.failed is not None
        assert server.engine.get("t", "b") is None
        server.close()

    asyncio.run(story())


class Client:
    """One of many at once: the answers that it got must be true."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.chance, self.number = server, random.Random(number), number
        self.asleep: dict[str, int] = {}

    async def live(self, steps: int) -> None:
        for step in range(steps):
            id_ = f"{self.number}.{step}"
            known = self.chance.choice(list(self.asleep)) if self.asleep else None
            what = self.chance.random()
            if known is None or what < 0.6:
                due = self.chance.randrange(1, 2_000)
                assert await self.server.put(id_, due_ms=due) == [True]
                self.asleep[id_] = due
            elif what < 0.75:
                if await self.server.cancel(known) == "cancelled":
                    del self.asleep[known]
            elif what < 0.9:
                try:
                    await self.server.move(known, 3_000)
                    self.asleep[known] = 3_000
                except (Conflict, UnknownMessage):
                    pass
            else:
                self.server.engine.submit("t", batch(id_ + "s", due_ms=5_000), 0)
                self.asleep[id_ + "s"] = 5_000


@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_while_segments_roll_and_messages_fire(tmp_path: Path, seed: int) -> None:
    """Everything that a client was told is true, also after a restart; ready messages come once."""
    got: list[str] = []

    async def story() -> dict[str, int]:
        server = Server(tmp_path / "d", Door())
        clients = [Client(server, 100 * seed + n) for n in range(12)]
        living = [asyncio.create_task(client.live(60)) for client in clients]
        now = 0
        while not all(task.done() for task in living):
            now += 5
            server.engine.tick(min(now, 1_999))
            got.extend(server.engine.reserve("t", "g", 50, min(now, 1_999), auto=True).ids) if "t" in server.engine.topics else 0
            await asyncio.sleep(0)
        for task in living:
            await task
        assert server.engine.check() == []
        server.close()
        return {id_: due for client in clients for id_, due in client.asleep.items()}

    told = asyncio.run(story())
    engine = Engine.open(tmp_path / "d", settings=SMALL)
    assert engine.check() == []
    while engine.tick(10_000) in range(10_001):
        pass
    while len(out := engine.reserve("t", "g", 500, 10_000, auto=True)):
        got += out.ids
    assert sorted(got) == sorted(set(got)), "none twice"
    assert set(got) == set(told), "all that sleep, and nothing that was cancelled"
    engine.close()


def test_an_id_is_known_until_its_cancel_is_durable(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path)
    engine.submit("t", batch("a", due_ms=1_000_000), 0)
    topic, staged = engine.stage_cancel("t", ["a"], 1)

    def again() -> list[bool]:
        return list(engine.stage("t", batch("a", due_ms=1_000_000), 1)[1].created)

    assert again() == [False], "it may fail, and then it sleeps on"
    group = topic.stores.index.take()
    assert group is not None
    group.run()
    topic.stores.index.land(group)
    view = engine.message("t", "a")  # its requests have not been answered yet
    assert view is not None
    assert view.state == "cancelled"
    assert engine.finish_cancel(topic, staged, 2) == {"a": "cancelled"}
    assert again() == [True], "a new message under the same id"
    assert again() == [False]
    topic.commit()
    engine.changed(topic, 3)
    engine.tick(2_000_000)
    assert engine.reserve("t", "g", 10, 2_000_000).ids == ["a"]
    engine.close()


def test_the_bytes_of_a_group_go_when_it_is_stored(tmp_path: Path) -> None:
    """Not when rubbish is collected: that looks at how many things there are, not at how big they are."""

    def groups() -> int:
        return sum(type(one) is CommitGroup for one in gc.get_objects())  # isinstance would ask lazy objects of libraries

    async def story() -> None:
        before, server = groups(), Server(tmp_path, Door())
        await server.put("a", "b")
        assert await server.cancel("a") == "cancelled"
        await server.move("b", 10**9 + 1)
        await asyncio.sleep(0.01)
        assert groups() == before
        server.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(story())
    finally:
        gc.enable()
