"""Puts of single messages travel together: each gets its own answer, and a refused one spoils no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from turtlemq.engine import Engine
from turtlemq.errors import DiskFull, TurtleError, UnknownTopic
from turtlemq.index.writer import CommitGroup
from turtlemq.model import Batch, Receipt
from turtlemq.server.clock import now_ms
from turtlemq.server.service import Service
from turtlemq.server.singles import TOGETHER_MAX, Singles, is_plain

BODY = b'{"n":1}'


def message(id_: str | None = None, body: bytes = BODY, **more: Any) -> Batch:
    return Batch([body], [now_ms() + 60_000], ids=None if id_ is None else [id_], **more)


def with_service(root: Path, story: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine, service = Engine.open(root), Service()
        service.connections = lambda: 2
        service.start(engine)
        try:
            await story(service)
        finally:
            service.drain()
            service.close()
            engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


async def together(service: Service, *batches: Batch) -> list[Receipt | BaseException]:
    topic = service.engine.topic("t", create=True)
    return await asyncio.gather(*(service.put(topic, one, 100) for one in batches), return_exceptions=True)


def test_puts_of_one_turn_are_one_commit(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        got = await together(service, *(message(f"m{n}" if n % 2 else None) for n in range(50)))
        receipts = [one for one in got if isinstance(one, Receipt)]
        assert [one.created for one in receipts] == [[True]] * 50
        assert [one.ids[0] for one in receipts[1::2]] == [f"m{n}" for n in range(1, 50, 2)]
        assert len({one.ids[0] for one in receipts}) == 50
        assert service.meter.commit.count == 1
        assert all(service.engine.get("t", one.ids[0]) is not None for one in receipts)

    with_service(tmp_path, story)


def test_a_refused_message_spoils_no_other(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        got = await together(service, message("a"), message("x" * 500), message("b"), message("\0"), message("c"))
        assert [isinstance(one, Receipt) for one in got] == [True, False, True, False, True]
        assert all(isinstance(one, Receipt | TurtleError) for one in got)
        assert [service.engine.get("t", id_) is not None for id_ in "abc"] == [True] * 3

    with_service(tmp_path, story)


def test_of_twins_one_is_created(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        got = await together(service, *(message("twin") for _ in range(5)), message("other"))
        assert [one.created for one in got if isinstance(one, Receipt)] == [[True], *[[False]] * 4, [True]]
        again = await together(service, message("twin"), message("new"))
        assert [one.created for one in again if isinstance(one, Receipt)] == [[False], [True]]

    with_service(tmp_path, story)


def test_more_than_travel_together_take_several_commits(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        got = await together(service, *(message() for _ in range(2 * TOGETHER_MAX + 1)))
        assert all(isinstance(one, Receipt) for one in got)
        assert service.meter.commit.count == 3

    with_service(tmp_path, story)


def test_a_topic_that_was_deleted_meanwhile_is_not_made_anew(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        topic = service.engine.topic("t", create=True)
        waiting = asyncio.gather(*(service.put(topic, message(), 100) for _ in range(3)), return_exceptions=True)
        await asyncio.sleep(0)
        service.fetches.drop_topic("t")
        assert [type(one) for one in await waiting] == [UnknownTopic] * 3
        assert "t" not in service.engine.topics

    with_service(tmp_path, story)


def test_a_request_that_is_given_up_holds_up_no_other(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        topic = service.engine.topic("t", create=True)
        gone, stays = (asyncio.ensure_future(service.put(topic, message(), 100)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await stays).created == [True]
        assert gone.cancelled()

    with_service(tmp_path, story)


def test_a_failed_commit_is_the_failure_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Service) -> None:
        await together(service, message(), message())
        monkeypatch.setattr(CommitGroup, "run", lambda group: setattr(group, "failure", DiskFull("no space")))
        assert [type(one) for one in await together(service, message("a"), message("b"))] == [DiskFull] * 2
        monkeypatch.undo()
        got = await together(service, message("a"), message("b"))
        assert [one.created for one in got if isinstance(one, Receipt)] == [[True]] * 2

    with_service(tmp_path, story)


@pytest.mark.parametrize("column", ["ttr_ms", "if_exists", "headers"])
def test_a_message_with_more_travels_alone(column: str) -> None:
    assert is_plain(message("a", flags=[1]))
    more = message("a")
    setattr(more, column, [{"a": "b"}] if column == "headers" else [1])
    assert not is_plain(more)
    assert not is_plain(Batch([BODY, BODY], [1, 1]))


def test_messages_without_a_topic_to_commit_wait_for_none() -> None:
    Singles(lambda topic, batch: Receipt([], [])).stage(object())  # type: ignore[arg-type]
