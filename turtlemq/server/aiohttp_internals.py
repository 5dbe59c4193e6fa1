"""The private names of aiohttp that requests to other nodes and processes need: every use of one is in this file.

tests/test_aiohttp_internals.py states what each is relied on for and fails when an upgrade changes it. Connections of clients use
public names of aiohttp alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import ClientRequest, ClientSession


def send_once(session: ClientSession) -> None:
    """Turn off a session's own retry of PUT and DELETE, which may send a request twice without notice."""
    session._retry_connection = False


class QuietRequest(ClientRequest):
    """A client's request. The task that sends its body fails beside it if the connection breaks before 100 Continue: the request
    gets the error of its answer, and the event loop would log that of the task as one that was never retrieved."""

    async def write_bytes(self, *args: Any, **options: Any) -> None:
        """Send the body."""
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)
        await super().write_bytes(*args, **options)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
