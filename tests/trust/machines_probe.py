"""A probe of a cluster: small puts all the time, which tell for how long the service was away, and reads that must not be stale.

A put goes to the nodes in turn, every few milliseconds, whether the one before was answered or not. A read goes to each node
directly, and asks for a message whose put was answered before: a node that does not know it has been deposed, and must not
answer. Reads wait longer than any fault lasts: a node that was stopped reads them when it goes on.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import aiohttp

from tests.trust.machines_clients import BUDGET, DIRECT, ClusterModel

TOPIC = "probe"
PUT_EVERY_S, READ_EVERY_S = 0.05, 0.1
PUT_S_MAX, READ_S_MAX = 10, 60
BUDGET_MS = 5_000
READS_MAX = 40  # without an answer, for each node
FAR_S = 3_600


class Probe:
    """Runs on a thread of its own. `answered` grows only."""

    def __init__(self, urls: Mapping[str, str], model: ClusterModel) -> None:
        self._urls, self._model = dict(urls), model
        self.answered: list[tuple[float, float, str]] = []  # sent, answered, id
        self.reads = 0
        self._pauses: list[list[float]] = []  # begin and end
        self._number = 0
        self._paused, self._avoided = False, ""
        self._under_way_to = dict.fromkeys(self._urls, 0)  # puts
        self._reading = dict.fromkeys(self._urls, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No put is under way."""
        self._paused = True
        while any(self._under_way_to.values()):
            time.sleep(0.01)
        self._pauses.append([time.monotonic(), float("inf")])
        try:
            yield
        finally:
            self._pauses[-1][1] = time.monotonic()
            self._paused = False

    @contextmanager
    def puts_elsewhere(self, node: str) -> Iterator[None]:
        """No put goes to this node; reads do."""
        self._avoided = node
        while self._under_way_to[node]:
            time.sleep(0.01)
        try:
            yield
        finally:
            self._avoided = ""

    def first_after(self, moment: float) -> float | None:
        """When the first put that was sent after a moment was answered; None: not yet."""
        return min((done for sent, done, _ in self.answered[-5_000:] if sent > moment), default=None)

    def longest_gap_s(self, begin: float, end: float) -> float:
        """The longest time without an answer, from the last one before `begin` on, or from the last pause."""
        moments = [done for _, done, _ in self.answered[-20_000:]] + [pause[1] for pause in self._pauses]
        return longest_gap_s(moments, begin, end)

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            turn = 0
            while not self._ended.is_set():
                if not self._paused:
                    nodes = sorted(self._urls.keys() - {self._avoided})
                    self._begin(self._put(session, nodes[turn % len(nodes)]))
                    if turn % round(READ_EVERY_S / PUT_EVERY_S) == 0:
                        for node in self._urls:
                            self._begin(self._read(session, node))
                turn += 1
                await asyncio.sleep(PUT_EVERY_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _put(self, session: aiohttp.ClientSession, node: str) -> None:
        self._number += 1
        self._under_way_to[node] += 1
        id_, sent = f"p{self._number}", time.monotonic()
        message = {"id": id_, "body": self._number, "delay": FAR_S}
        timeout = aiohttp.ClientTimeout(total=PUT_S_MAX)
        try:
            path = f"{self._urls[node]}/v1/topics/{TOPIC}/messages"
            async with session.post(path, json=message, headers={BUDGET: str(BUDGET_MS)}, timeout=timeout) as answer:
                await answer.read()
                if answer.status in (200, 201):
                    self.answered.append((sent, time.monotonic(), id_))
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # in doubt
        finally:
            self._under_way_to[node] -= 1

    async def _read(self, session: aiohttp.ClientSession, node: str) -> None:
        if not self.answered or self._reading[node] >= READS_MAX:
            return
        id_, sent = self.answered[-1][2], time.monotonic()
        self._reading[node] += 1
        timeout = aiohttp.ClientTimeout(total=READ_S_MAX)
        try:
            path = f"{self._urls[node]}/v1/topics/{TOPIC}/messages/{id_}"
            async with session.get(path, headers={DIRECT: "1"}, timeout=timeout) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        finally:
            self._reading[node] -= 1
        if answer.status == 404:
            waited = time.monotonic() - sent
            self._model.fault("stale reads", f"{node} does not know {id_}, {waited:.3f} s after it was asked: {data!r}")
        elif answer.status == 200 and json.loads(data)["id"] == id_:
            self.reads += 1


def longest_gap_s(answers: list[float], begin: float, end: float) -> float:
    """The longest time without an answer.

    >>> longest_gap_s([1.0, 2.0, 2.5, 6.5, 7.0], begin=2.2, end=7.0)
    4.0
    >>> longest_gap_s([1.0], begin=2.0, end=7.0)
    6.0
    """
    before = [moment for moment in answers if moment <= begin]
    moments = [max(before, default=begin), *(moment for moment in sorted(answers) if begin < moment <= end), end]
    return max(after - moment for moment, after in pairwise(moments))
