"""The way from a process to those of other shards, as the rest of the server sees it."""

from __future__ import annotations

from typing import Any, Protocol


class Router(Protocol):
    """The way to the processes of other shards (`shards.router`, `cluster_router`). Requests are aiohttp's."""

    @property
    def shards(self) -> int: ...

    def partitioned(self) -> dict[str, int]: ...

    def receive(self, request: Any) -> bool: ...

    def has(self, topic: str, named: str | None) -> bool: ...

    async def elsewhere(self, request: Any) -> Any: ...
