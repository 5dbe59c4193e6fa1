"""Errors of the HTTP server alone: bodies that cannot be decoded, missing rights, exceeded rates, budgets and limits.

A class has code and status of the answer; its docstring is the default message, which users see. Errors of the engine are in
`turtlemq.errors`.
"""

from __future__ import annotations

from turtlemq.errors import TurtleError, Unavailable


class InvalidJson(TurtleError):
    """The body is not JSON."""

    code, status = "INVALID_JSON", 400


class InvalidBson(TurtleError):
    """The body is not a row of BSON documents."""

    code, status = "INVALID_BSON", 400


class InvalidAckList(TurtleError):
    """An ack list is a JSON list of ids, '-' before each that failed, or an object that holds it as "acks"."""

    code, status = "INVALID_ACK_LIST", 400


class ExceedsMaxDelay(TurtleError):
    """A message would sleep longer than this server allows."""

    code, status = "EXCEEDS_MAX_DELAY", 400


class UnsupportedMediaType(TurtleError):
    """This content type or content encoding is not understood here."""

    code, status = "UNSUPPORTED_MEDIA_TYPE", 415


class DeadlineExceeded(TurtleError):
    """The time that X-Turtlemq-Budget-Ms allowed was over before the work began; nothing was done."""

    code, status = "DEADLINE_EXCEEDED", 504


class Unauthenticated(TurtleError):
    """This server wants a token, and this one is missing or not known: send the header Authorization: Bearer TOKEN."""

    code, status = "UNAUTHENTICATED", 401


class Forbidden(TurtleError):
    """A page of another site may not use this server through a browser."""

    code, status = "FORBIDDEN", 403


class HostNotAllowed(TurtleError):
    """Clients of this address are not served; allowed_hosts of the server's configuration says which are."""

    code, status = "HOST_NOT_ALLOWED", 403


class UnknownClient(TurtleError):
    """There is no such registered client: its heartbeats stopped, or the server was started anew. Register again."""

    code, status = "UNKNOWN_CLIENT", 404


class RequestTimeout(TurtleError):
    """The body came too slowly; nothing was done."""

    code, status = "REQUEST_TIMEOUT", 408


class RateLimited(TurtleError):
    """This is faster than the rate that was set; nothing was stored. Try again after retry_after_ms."""

    code, status = "RATE_LIMITED", 429

    def __init__(self, message: str | None = None, *, retry_after_ms: int, **details: object) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **details)


class Overloaded(TurtleError):
    """The server has more to do than it can; nothing was done. Try again after retry_after_ms."""

    code, status = "OVERLOADED", 429

    def __init__(self, message: str | None = None, *, retry_after_ms: int, **details: object) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **details)


class NotLeader(TurtleError):
    """This node does not lead, and was asked not to forward the request: nothing was done. Send it to leader_url."""

    code, status = "NOT_LEADER", 421

    def __init__(self, message: str | None = None, *, leader_url: str | None, revision: int, **details: object) -> None:
        super().__init__(message, leader_url=leader_url, revision=revision, **details)


class NoLeader(Unavailable):
    """No leader was found in time: nothing was done. Try again after retry_after_ms, here or at another node."""

    code = "NO_LEADER"

    def __init__(self, message: str | None = None, *, retry_after_ms: int = 200, **details: object) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **details)
