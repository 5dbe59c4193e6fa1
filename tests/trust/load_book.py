"""The book of a scenario under load: accepted messages and those that came, and the HTTP requests that keep it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from tests.trust.kills_model import now_ms
from tests.trust.load_wire import Wire
from tests.trust.model import Broken, Figures, figures

FAIR = 4  # no consumer gets less than the middle one by more than this factor
TTR_S = 120  # leases do not end by themselves in most scenarios


class Book:
    """Accepted and received messages: each once, none early."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.got: Counter[str] = Counter()
        self.early = 0
        self.sending = True
        self.all_came = asyncio.Event()

    def came(self, messages: Iterable[dict[str, Any]]) -> list[str]:
        """Messages in the hands of a consumer. Their ids."""
        at, ids = now_ms(), []
        for message in messages:
            self.early += at < message["due_ms"]
            ids.append(message["id"])
        self.got.update(ids)
        self.look()
        return ids

    def look(self) -> None:
        if not self.sending and len(self.got) >= len(self.sent):
            self.all_came.set()

    async def close(self, leases_end: bool = False, **more: int) -> Figures:
        """Nothing more is sent: wait for the rest, and judge. Only where leases end may a message come twice."""
        self.sending = False
        self.look()
        await self.all_came.wait()
        lost, again = len(self.sent - self.got.keys()), sum(self.got.values()) - len(self.got)
        if self.got.keys() != self.sent or self.early or (again and not leases_end):
            unknown = len(self.got.keys() - self.sent)
            raise Broken(f"{lost} lost, {self.early} early, {again} came again, {unknown} came from nowhere")
        return figures(messages=len(self.sent), lost=lost, early=self.early, **more)


def fair(name: str, shares: Iterable[int], full: bool) -> None:
    """Each consumer got something, and none much less than the others; where there is little to share, chance decides."""
    counts = sorted(shares)
    if counts[0] < max(1, median(counts) / FAIR if full else 1):
        raise Broken(f"{name}: one got {counts[0]}, the middle one {median(counts)}, the most {counts[-1]}")


async def put(wire: Wire, book: Book, topic: str, ids: list[str], **fields: Any) -> None:
    """A batch that must be new."""
    answer = await wire.call(f"{topic}/messages", {"messages": [{"id": id_, "body": id_, **fields} for id_ in ids]})
    if answer["created"] != len(ids):
        raise Broken(f"of {len(ids)} new messages {answer['created']} were stored")
    book.sent.update(ids)


async def take(wire: Wire, book: Book, path: str, most: int, wait_s: float = 2.0) -> int:
    """Fetch once and acknowledge. How many came."""
    messages = (await wire.call(f"{path}/fetch", {"max": most, "wait": wait_s, "ttr": TTR_S}))["messages"]
    ids = book.came(messages)
    if ids and (answer := await wire.call(f"{path}/ack", ids))["acked"] != len(ids):
        raise Broken(f"{len(ids)} messages in hand, {answer['acked']} acknowledged")
    return len(ids)
