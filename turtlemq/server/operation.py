"""The type of an HTTP operation, as the tables of operations have it (`operations`, `cluster_operations`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from turtlemq.server.audit import Action
from turtlemq.server.auth import OPEN, Access
from turtlemq.server.outgoing.reply import Answered

Handler = Callable[[web.Request], Awaitable[Answered]]
MESSAGES = "messages"  # the request body of produce: one message or many, in one of three media types


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    route: str  # method and path, as "GET /v1/topics/{topic}"
    handler: Handler
    access: Access
    name: str  # operationId
    summary: str
    answer: Any  # the type of a good answer, or its media types
    description: str = ""
    status: int = 200  # of a good answer
    body: Any = None  # the type of the request body, or MESSAGES
    body_example: Any = None
    query: Any = None  # the type of the query string
    errors: tuple[int, ...] = ()
    answer_example: Any = None
    tag: str = ""  # its section in the document
    audit: Action | None = None  # the action that the audit log names, of an operation that it notes

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def is_open(self) -> bool:
        """No token is needed."""
        return self.access is OPEN


def tagged(tag: str, *operations: Operation) -> list[Operation]:
    """Operations of one section of the document."""
    return [replace(operation, tag=tag) for operation in operations]
