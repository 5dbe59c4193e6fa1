"""Readers beside clients of a running server: each read must be one moment between its beginning and its end.

Producers put pairs of messages as atomic batches, one due at once and one later; a consumer acknowledges, or fails with a long
back-off; later ones are cancelled; compaction goes on. Each client notes an intent before a request and the result after it, so
that a read can be judged: results from before its beginning must show, and nothing may show that was not begun before its end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from tests.harness.server_process import Server
from tests.harness.standing_walk import must

TOPIC, GROUP = "t", "default"
NOW, LATER = "now", "later"


class Clients(AbstractContextManager["Clients"]):
    """Threads with clients of a server, until the block ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        server.ok("PUT", f"/v1/topics/{TOPIC}", {"segment_bytes": 1 << 16, "compact_live_ratio": 0.8})
        server.ok("PUT", f"/v1/topics/{TOPIC}/groups/{GROUP}", {"start": "earliest"})
        self.stored: list[int] = []  # numbers of pairs; the lists only grow
        self.begun: list[int] = []
        self.acking: list[str] = []
        self.acked: list[str] = []
        self.cancelling: list[str] = []
        self.cancelled: list[str] = []
        self._ended, self._errors = threading.Event(), list[BaseException]()
        works = (self._produce, self._produce, self._consume, self._cancel)
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        self._numbers, self._lock = 0, threading.Lock()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self._ended.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised when the block ends
            self._errors.append(error)
            self._ended.set()

    def _produce(self) -> None:
        with self._lock:
            number = self._numbers = self._numbers + 1
        self.begun.append(number)
        body = "x" * (number % 400)
        self._server.put(TOPIC, {"id": f"{number}.{NOW}", "body": body}, {"id": f"{number}.{LATER}", "body": body, "delay": 3600})
        self.stored.append(number)

    def _consume(self) -> None:
        ids = [message["id"] for message in self._server.fetch(TOPIC, GROUP, max=20, wait=0.05)]
        failed = [id_ for id_ in ids if int(id_.partition(".")[0]) % 5 == 0]
        good = [id_ for id_ in ids if id_ not in failed]
        if failed:
            self._server.ack(TOPIC, *(f"-{id_}" for id_ in failed), retry_delay=3600)
        if good:
            self.acking += good
            self._server.ack(TOPIC, *good)
            self.acked += good

    def _cancel(self) -> None:
        self._ended.wait(0.02)
        begin = len(self.cancelling)
        ids = [f"{number}.{LATER}" for number in self.stored[begin : begin + 3] if number % 3]
        ids += [f"{number}.nobody" for number in self.stored[begin : begin + 3] if not number % 3]
        if ids:
            self.cancelling += ids
            self._server.ok("POST", f"/v1/topics/{TOPIC}/cancel", {"ids": ids})
            self.cancelled += [id_ for id_ in ids if id_.endswith(LATER)]
        if begin % 40 < 3:
            self._server.ok("POST", f"/v1/topics/{TOPIC}/compact")

    def judge(self, read: Callable[[], Iterable[tuple[str, str | None, str]]]) -> Counter[str]:
        """Read (id, group, state) of all messages, and compare."""
        stored, acked, cancelled = (set(each) for each in (self.stored, self.acked, self.cancelled))
        found = list(read())
        begun, acking, cancelling = (set(each) for each in (self.begun, self.acking, self.cancelling))
        states = {(id_, group): state for id_, group, state in found}
        must(len(states) == len(found), "a row twice", Counter((id_, group) for id_, group, _ in found).most_common(1))
        ids = {id_ for id_, _ in states}
        numbers = {which: {int(id_.partition(".")[0]) for id_ in ids if id_.endswith(f".{which}")} for which in (NOW, LATER)}
        must(numbers[NOW] == numbers[LATER], "half of a batch", numbers[NOW] ^ numbers[LATER])
        must(stored <= numbers[NOW] <= begun, "stored and not there", stored - numbers[NOW], numbers[NOW] - begun)
        over = {id_ for (id_, _), state in states.items() if state == "history"}
        must(acked <= over <= acking, "acknowledged", acked - over, over - acking)
        gone = {id_ for (id_, _), state in states.items() if state == "cancelled"}
        must(cancelled <= gone <= cancelling, "cancelled", cancelled - gone, gone - cancelling)
        return Counter({"reads": 1, "rows": len(found), **{f"tried: {state}": 1 for state in set(states.values())}})


def rows_of(table: Any) -> list[tuple[str, str | None, str]]:
    """The three columns of an Arrow table or of Spark's rows."""
    listed = table.to_pylist() if hasattr(table, "to_pylist") else [row.asDict() for row in table]
    return [(row["id"], row["group"], row["state"]) for row in listed]
