"""Fetches of another process of this server, which asks several partitions at once and takes the first answer: each has a name.

The other process ends those whose answers it does not use, by name. Messages that were on their way to it are ready again at once
then, and that counts as no attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

POLL, END_POLL = "X-Turtlemq-Poll", "X-Turtlemq-End-Poll"  # headers with the name of a fetch, and of one to end
KEPT_S = 60.0  # for the process that asked to end a fetch that was answered, or is still on its way
KEPT_MAX = 100_000


class NamedPolls:
    """The fetches of other processes that were answered, and names of those that were ended."""

    def __init__(self) -> None:
        self._answered: dict[str, Callable[[], None]] = {}  # how to give the messages back
        self._ended: dict[str, None] = {}

    def answered(self, name: str, undo: Callable[[], None]) -> bool:
        """Note a fetch with messages. False: it was ended before, and they are given back."""
        if name in self._ended:
            undo()
            return False
        self._keep(self._answered, name, undo)
        return True

    def end(self, name: str) -> None:
        """Give back the messages of a fetch; it may have none, or may not have come yet."""
        undo = self._answered.pop(name, None)
        self._keep(self._ended, name, None)
        if undo is not None:
            undo()

    def _keep(self, table: dict[str, Callable[[], None]] | dict[str, None], name: str, value: object) -> None:
        while len(table) >= KEPT_MAX:
            del table[next(iter(table))]
        table[name] = value  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(KEPT_S, table.pop, name, None)
