"""Replays: jobs that copy a range of the delivered messages of a topic into another topic, page by page.

A job is kept in the folder of its source topic when it begins and when it ends. One that a restart or another leader finds as
running has ended there: it is `interrupted`. To run it again is safe, and copies only the rest, because the id of a copy follows
from its message (`topic.copies`). Between pages other requests get their turn.

The target may be a topic of another process of the same server (shards): its pages go there as requests, with the token of the
request that began the job.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import Struct

from turtlemq.engine import Engine
from turtlemq.errors import TurtleError, Unavailable, UnknownReplay, UnknownTopic, describe
from turtlemq.model import Batch
from turtlemq.segment import format as f
from turtlemq.server import logs
from turtlemq.server.clock import now_ms
from turtlemq.server.errors import Overloaded, RateLimited
from turtlemq.server.outgoing.messages import PRIORITY_NAMES, body_fields
from turtlemq.server.proxy import HOP
from turtlemq.server.service import Service
from turtlemq.storage import names
from turtlemq.topic.copies import Page, Wanted
from turtlemq.topic.topic import Topic

KEPT = 20  # jobs of a topic that are listed
RUNNING_MAX = 4  # of a server
TRIES, PAUSE_S = 60, 0.5  # for a page that the target does not take now
State = Literal["running", "done", "cancelled", "failed", "interrupted"]


class Job(Struct):
    """One replay. `scanned` of `total` documents of the range were looked at."""

    id: str
    topic: str
    into: str
    from_ms: int
    to_ms: int
    started_ms: int
    delay_ms: int = 0
    per_s: float = 0  # copies a second; 0: no limit
    state: State = "running"
    total: int = 0
    scanned: int = 0
    copied: int = 0
    duplicates: int = 0  # that the target knew already
    ended_ms: int | None = None
    error: str = ""


class Replays:
    """The replays of a server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._jobs: dict[str, tuple[Topic, list[Job]]] = {}  # by topic
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by job
        service.on_drain.append(self._drain)

    def of(self, topic: str) -> list[Job]:
        """The newest jobs of a topic, oldest first."""
        opened = self._service.engine.topic(topic)
        known = self._jobs.get(topic)
        if known is None or known[0] is not opened:  # the topic may have been deleted and made again
            known = self._jobs[topic] = opened, _read(self._service.engine, topic)
        return known[1]

    def find(self, topic: str, id_: str) -> Job:
        """One job. Raises `UnknownReplay`."""
        for job in self.of(topic):
            if job.id == id_:
                return job
        raise UnknownReplay(f"topic {topic!r} has no replay {id_!r}; the newest {KEPT} are kept")

    def start(self, job: Job, wanted: Wanted, sender: Mapping[str, str]) -> Job:
        """Begin a job. `sender`: headers that name the client and its token, for a target in another process."""
        if len(self._tasks) >= RUNNING_MAX:
            raise Overloaded(f"{len(self._tasks)} replays run already; nothing was begun", retry_after_ms=1_000)
        view, jobs = self._service.engine.topic(job.topic).view, self.of(job.topic)
        first, end = view.offsets_between(job.from_ms, job.to_ms)
        job.id, job.total = secrets.token_hex(6), end - first
        _write(self._service.engine, job.topic, [*jobs, job][-KEPT:])
        jobs.append(job)
        del jobs[:-KEPT]
        self._tasks[job.id] = asyncio.create_task(self._run(job, wanted, range(first, end), sender))
        self._service.meter.replays = len(self._tasks)
        return job

    def cancel(self, job: Job) -> Job:
        """End a job; copies that were made stay."""
        if job.state == "running":
            self._end(job, "cancelled")
        return job

    def _drain(self) -> None:
        for topic, jobs in list(self._jobs.values()):
            for job in jobs:
                if job.state == "running" and self._service.engine.topics.get(topic.name) is topic:
                    self._end(job, "interrupted", "the server was stopped; begin it again: it copies nothing twice")

    def _end(self, job: Job, state: State, error: str = "") -> None:
        """Note the end of a job. A note that cannot be written is made again by the next start, as `interrupted`."""
        job.state, job.error, job.ended_ms = state, error, now_ms()
        task = self._tasks.pop(job.id, None)
        self._service.meter.replays = len(self._tasks)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        try:
            _write(self._service.engine, job.topic, self.of(job.topic))
        except (TurtleError, OSError) as wrong:
            logs.warning("replay_not_saved", topic=job.topic, error=wrong)

    # The work

    async def _run(self, job: Job, wanted: Wanted, offsets: range, sender: Mapping[str, str]) -> None:
        topic, loop = self._service.engine.topic(job.topic), asyncio.get_running_loop()
        target, begin, at = _Target(self._service, job.into, sender), loop.time(), offsets.start
        try:
            while at < offsets.stop:
                await self._service.turns.turn(job.topic)
                if self._service.engine.topics.get(job.topic) is not topic:
                    raise UnknownTopic(f"topic {job.topic!r} was deleted meanwhile")
                page = topic.view.copies(at, offsets.stop, wanted, now_ms() + job.delay_ms)
                if len(page.batch):
                    created = await target.put(page)
                    job.copied, job.duplicates = job.copied + created, job.duplicates + len(page.batch) - created
                    self._service.meter.replayed += created
                at = page.next
                job.scanned = at - offsets.start
                if job.per_s:
                    await asyncio.sleep(max(0.0, begin + (job.copied + job.duplicates) / job.per_s - loop.time()))
            self._end(job, "done")
        except (TurtleError, OSError, aiohttp.ClientError, TimeoutError) as error:
            if job.state == "running":
                self._end(job, "failed", describe(error))
        except Exception as error:  # noqa: BLE001 - nothing else would tell of it
            logs.error("replay_failed", error, topic=job.topic)
            self._end(job, "failed", describe(error))
        finally:
            await target.close()


class _Target:
    """The topic that gets the copies, in this process or in another one."""

    def __init__(self, service: Service, topic: str, sender: Mapping[str, str]) -> None:
        self._service, self._topic = service, topic
        siblings, router = service.siblings, service.router
        is_here = siblings is None or router is None or router.has(topic, None)
        self._path = "" if siblings is None or is_here else siblings.path_of(topic)
        self._headers = {HOP: "1", "Content-Type": "application/json", **sender}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def put(self, page: Page) -> int:
        """Store copies durably. Returns how many were new. Waits while the target is too busy."""
        for number in range(TRIES):
            try:
                return await (self._send(page.batch) if self._path else self._store(page))
            except (RateLimited, Overloaded, Unavailable, aiohttp.ClientConnectionError) as error:
                if number + 1 == TRIES:
                    raise
                after_ms = error.details.get("retry_after_ms") if isinstance(error, TurtleError) else None
                await asyncio.sleep(min(10.0, float(str(after_ms)) / 1000) if after_ms else PAUSE_S)
        raise AssertionError("the last try returns or raises")

    async def _store(self, page: Page) -> int:
        service, batch = self._service, page.batch
        engine = service.engine
        service.admit(page.size)
        known = engine.topics.get(self._topic)
        service.throttle(self._topic, engine.settings if known is None else known.settings, "replay", len(batch), page.size)
        staged_in, receipt = engine.stage(self._topic, batch, now_ms())
        await service.commit(staged_in, page.size)
        service.stored(self._topic, len(batch), page.size)
        service.answer_polls_soon(self._topic)
        return receipt.created.count(True)

    async def _send(self, batch: Batch) -> int:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._path))
        data, url = msgspec.json.encode({"messages": list(_fields(batch))}), f"http://shard/v1/topics/{self._topic}/messages"
        async with self._session.post(url, data=data, headers=self._headers) as answer:
            found: Any = msgspec.json.decode(await answer.read())
            if answer.status < 300:
                return int(found["created"])
            error = found["error"]
            kind = {429: Overloaded, 503: Unavailable}.get(answer.status, TurtleError)
            raise kind(str(error["message"]), retry_after_ms=int(error.get("retry_after_ms", 500)))


def _fields(batch: Batch) -> Any:
    """Messages of a batch as JSON has them."""
    flags, ttr_ms, ids = batch.flags, batch.ttr_ms, batch.ids
    assert ids is not None
    assert ttr_ms is not None
    assert not isinstance(flags, int | None)
    for i, body in enumerate(batch.bodies):
        ttr = {"ttr": ttr_ms[i] / 1000} if ttr_ms[i] else {}
        headers = None if batch.headers is None else batch.headers[i]
        given = {"id": ids[i], "due_ms": batch.due_ms[i], "priority": PRIORITY_NAMES[flags[i] & f.PRIORITY], **ttr}
        yield given | ({"headers": headers} if headers else {}) | body_fields(body, bool(flags[i] & f.JSON))


# The file


def _path_of(engine: Engine, topic: str) -> Path:
    return engine.root / names.TOPICS / topic / names.REPLAYS


def _write(engine: Engine, topic: str, jobs: list[Job]) -> None:
    engine.door.replace(_path_of(engine, topic), msgspec.json.encode(jobs))


def _read(engine: Engine, topic: str) -> list[Job]:
    """The jobs of a topic, as its file tells them. A job that runs there ended with the process that ran it."""
    path = _path_of(engine, topic)
    if not engine.door.exists(path):
        return []
    try:
        jobs = msgspec.json.decode(engine.door.read_all(path), type=list[Job])
    except msgspec.DecodeError as error:
        logs.warning("replays_not_read", topic=topic, error=error)
        return []
    for job in jobs:
        if job.state == "running":
            job.state, job.error = "interrupted", "the server ended meanwhile; begin it again: it copies nothing twice"
    return jobs
