"""Facts about commits, long polls and answers in the moments between two of their steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.committer import Server, Slow
from tests.harness.engine_disk import Disk
from tests.harness.server_process import running
from turtlemq.engine import Engine
from turtlemq.errors import DiskFull
from turtlemq.model import Message
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import DeadlineExceeded
from turtlemq.server.long_polls import FetchRequest
from turtlemq.server.request import DEADLINE, check_deadline
from turtlemq.server.service import Service


def test_a_duplicate_is_not_answered_before_what_it_repeats_is_durable(tmp_path: Path) -> None:
    door = Slow()

    async def story() -> None:
        server = Server(tmp_path / "d", door)
        first = asyncio.create_task(server.put("a"))
        await asyncio.sleep(0.1)  # it is being synced, and nothing gathers behind it
        second = asyncio.create_task(server.put("a"))
        await asyncio.sleep(0.1)
        assert not second.done(), "a power cut now would take what it was told is there"
        door.gate.set()
        assert (await first, await second) == ([True], [False])
        server.close()

    asyncio.run(story())


def test_messages_whose_cancel_found_no_room_still_fire(tmp_path: Path) -> None:
    door = Disk()
    engine = Engine.open(tmp_path / "data", door=door)
    engine.submit("t", [Message(b"", 10, id=id_) for id_ in "ab"], 0)
    door.full = True
    with pytest.raises(DiskFull):
        engine.cancel("t", ["a"], 1)
    door.full = False
    engine.tick(10)
    assert engine.reserve("t", "g", 9, 10).ids == ["a", "b"]
    engine.close()


def test_messages_of_a_cut_off_poll_come_again_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        service, engine = Service(), Engine.open(tmp_path / "d")
        engine.topic("t", create=True)
        service.start(engine)
        want = FetchRequest("t", "g", 10)
        poll = asyncio.create_task(service.fetch(want, 20))
        await asyncio.sleep(0.1)
        assert service.polls == 1
        engine.submit("t", [Message(b"", 0, id="a")], now_ms())
        service.answer_polls_soon("t")
        service._tick()
        assert engine.stats("t").reserve == 1
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll
        out = await service.fetch(want, 5)
        assert (out.ids, out.pieces[0].messages.attempts.tolist()) == (["a"], [1])
        service.drain()
        service.close()
        engine.close()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_nothing_is_begun_for_a_caller_whose_time_is_over() -> None:
    async def story() -> None:
        clock = asyncio.get_running_loop().time
        check_deadline({})  # type: ignore[arg-type]
        check_deadline({DEADLINE: clock() + 9})  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceeded):
            check_deadline({DEADLINE: clock() - 0.001})  # type: ignore[arg-type]

    asyncio.run(story())


def test_many_dead_letters_come_back_at_the_requested_rate(tmp_path: Path) -> None:
    """They are requeued a page at a time, which no client must notice."""
    with running(tmp_path / "data") as server:
        server.ok("PUT", "/v1/topics/graves", {"max_attempts": 1})
        ids = server.put("graves", *({"body": n} for n in range(510)))
        assert len(server.fetch("graves", max=1_000, wait=10)) == 510
        server.ack("graves", *(f"-{id_}" for id_ in ids))
        assert server.ok("POST", "/v1/topics/graves/dead/requeue", {"filter": {}, "delay": 60, "per_s": 100})["requeued"] == 510
        due = [message["due_ms"] for message in server.ok("GET", "/v1/topics/graves/messages?limit=1000")["messages"]]
        assert [at - due[0] for at in due] == [10 * n for n in range(510)]
