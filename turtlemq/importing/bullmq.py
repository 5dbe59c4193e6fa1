"""Source: the waiting and delayed jobs of a BullMQ queue, read from the keys that BullMQ keeps in Redis.

A job is a hash `bull:QUEUE:ID`. Its id is in the sorted set `delayed` (the score is the due time times 4096, plus a counter), in
the lists `wait` and `paused`, or in the sorted set `prioritized`. Tested with BullMQ 6.7.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from turtlemq.client.options import NewMessage
from turtlemq.importing.fields import Unusable, body_of, message_id
from turtlemq.importing.redis_client import check_type, redis_errors, scan_zset

SCORE_STEPS = 0x1000  # a score of `delayed` counts so many steps a millisecond
_FIELDS = ("name", "data", "opts", "timestamp", "priority", "rjk")


@dataclass
class BullMq:
    """The jobs of a queue that wait. Active, completed and failed ones are left."""

    client: Any
    queue: str
    prefix: str = "bullmq-"
    redis_prefix: str = "bull"
    skipped: Counter[str] = field(default_factory=Counter)

    def _key(self, name: str) -> str:
        return f"{self.redis_prefix}:{self.queue}:{name}"

    def total(self) -> int:
        """The number of waiting jobs. Raises `Unusable` if there is no such queue."""
        with redis_errors():
            if not check_type(self.client, self._key("meta"), "hash"):
                raise Unusable(f"there is no queue {self.queue!r}: no key {self._key('meta')!r}")
            self.skipped["active: a worker has it"] = int(self.client.llen(self._key("active")))
            self.skipped["waiting for its children"] = int(self.client.zcard(self._key("waiting-children")))
            lists = sum(self.client.llen(self._key(name)) for name in ("wait", "paused"))
            return int(lists + sum(self.client.zcard(self._key(name)) for name in ("delayed", "prioritized")))

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """Delayed jobs first, then those that could run now."""
        with redis_errors():
            yield from self._jobs(count)

    def _jobs(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        for members in scan_zset(self.client, self._key("delayed"), count):
            yield self._messages([(id_, int(score) // SCORE_STEPS) for id_, score in members])
        for members in scan_zset(self.client, self._key("prioritized"), count):
            yield self._messages([(id_, None) for id_, _ in members])
        for name in ("wait", "paused"):
            for ids in self._list(name, count):
                yield self._messages([(id_, None) for id_ in ids])

    def _list(self, name: str, count: int) -> Iterator[list[bytes]]:
        """The ids of a list, from its head on, where new jobs come: they push others to places that are read later, so that a job
        may be shown twice and none is missed."""
        start = 0
        while ids := self.client.lrange(self._key(name), start, start + count - 1):
            yield ids
            start += len(ids)

    def _messages(self, jobs: list[tuple[bytes, int | None]]) -> tuple[int, list[NewMessage]]:
        pipeline = self.client.pipeline(transaction=False)
        for id_, _ in jobs:
            pipeline.hmget(self._key(id_.decode()), _FIELDS)
        found = [self._message(id_, due_ms, *values) for (id_, due_ms), values in zip(jobs, pipeline.execute(), strict=True)]
        return len(jobs), [message for message in found if message is not None]

    def _message(
        self,
        id_: bytes,
        due_ms: int | None,
        name: bytes | None,
        data: bytes | None,
        opts: bytes | None,
        timestamp: bytes | None,
        priority: bytes | None,
        repeat_key: bytes | None,
    ) -> NewMessage | None:
        if data is None or name is None:  # removed since its id was read, or a marker of an older version
            self.skipped["no job data"] += 1
            return None
        headers = {"bullmq-name": name.decode(), "bullmq-timestamp": (timestamp or b"").decode()}
        if attempts := json.loads(opts or b"{}").get("attempts"):
            headers["bullmq-attempts"] = str(attempts)
        if repeat_key:  # only this run is copied; no schedule is
            headers["bullmq-scheduler"] = repeat_key.decode()
        return NewMessage(
            body=body_of(data, "auto"),
            id=message_id(self.prefix, id_),
            due=int(timestamp or 0) if due_ms is None else due_ms,
            headers=headers,
            priority="low" if int(priority or 0) else None,  # BullMQ runs jobs without a priority first
        )
