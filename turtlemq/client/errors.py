"""Errors of the client: one class for each code of the HTTP contract, and some for errors on this side. Pure.

All are `ClientError`. A refusal of the server is a `Refused`, with `code`, `status`, `details` and, for one item of many,
`index`. Without an answer it is a `ConnectionFailed`, or a `TimedOut` at the end of the time. The docstring of a class is its
default text.

>>> refused(404, "UNKNOWN_TOPIC", "there is no topic 'x'")
UnknownTopic("there is no topic 'x'")
>>> type(refused(418, "TEAPOT", "?")) is Refused  # a code that this client does not know yet
True
"""

from __future__ import annotations

from typing import Any


class ClientError(Exception):
    """Something went wrong between you and the server."""

    code = ""
    status = 0
    tries = 0  # requests that were sent
    retries_exhausted = False  # it was not tried again: the retry budget of the client is empty

    def __init__(self, message: str | None = None, **details: Any) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        self.details = details

    @property
    def index(self) -> int | None:
        """The position of the bad message or id in the request, if the error is about one."""
        return self.details.get("index")

    def at(self, index: int | None) -> ClientError:
        """A copy of the error for a caller that knows the bad item by another index.

        >>> InvalidId("no id", index=7).at(0).index
        0
        """
        details = {name: value for name, value in self.details.items() if name != "index"}
        out = type(self)(str(self), **details, **({} if index is None else {"index": index}))
        out.code, out.status, out.__cause__ = self.code, self.status, self.__cause__
        out.retries_exhausted = self.retries_exhausted
        return out


class ConnectionFailed(ClientError):
    """No answer came: the server cannot be reached, or the connection broke. Whether the request was done is not known."""

    was_sent = True  # or a part of it; otherwise there was no connection


class TimedOut(ClientError):
    """The time was over before an answer came. Whether the request was done is not known; with the same id, put it again."""


class Cancelled(ClientError):
    """The call was cancelled by its token. Whether a request under way was done is not known."""


class BufferFull(ClientError):
    """The producer holds as many messages as it may, and none of them was confirmed in time. Wait, or put fewer."""


class Closed(ClientError):
    """This client, producer or consumer was closed; make a new one."""


class BadAnswer(ClientError):
    """The answer is not one of a TurtleMQ server. Is the address right?"""


class BodyMismatch(ClientError):
    """The body of a message is not of the type that was asked for."""


class Refused(ClientError):
    """The server refused the request and changed nothing."""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before the next try, if the server asks for that."""
        after_ms = self.details.get("retry_after_ms")
        return None if after_ms is None else max(0.0, float(after_ms) / 1000)


class InvalidJson(Refused):
    """The body is not JSON."""

    code, status = "INVALID_JSON", 400


class InvalidBson(Refused):
    """The body is not a row of BSON documents."""

    code, status = "INVALID_BSON", 400


class InvalidTopic(Refused):
    """A topic or group is named with 1 to 200 of A-Z a-z 0-9 . _ - and starts with a letter or digit."""

    code, status = "INVALID_TOPIC", 400


class InvalidId(Refused):
    """An id is 1 to 200 bytes of printable text that does not start with '-' and holds no '/'."""

    code, status = "INVALID_ID", 400


class InvalidMessage(Refused):
    """A field of the message is not what the contract says."""

    code, status = "INVALID_MESSAGE", 400


class InvalidFireAt(Refused):
    """A due time is no time, or one that this server refuses."""

    code, status = "INVALID_FIRE_AT", 400


class ExceedsMaxDelay(Refused):
    """The message would sleep longer than this server allows."""

    code, status = "EXCEEDS_MAX_DELAY", 400


class InvalidAckList(Refused):
    """An ack list is a list of ids, '-' before each that failed."""

    code, status = "INVALID_ACK_LIST", 400


class InvalidArgument(Refused):
    """An argument is outside its limits."""

    code, status = "INVALID_ARGUMENT", 400


class InvalidSchedule(Refused):
    """A schedule has no times, or a cron expression or zone that is none."""

    code, status = "INVALID_SCHEDULE", 400


class Unauthenticated(Refused):
    """No token, or one that the server does not know. Give token=… or set TURTLEMQ_TOKEN."""

    code, status = "UNAUTHENTICATED", 401


class Forbidden(Refused):
    """The token has no right to this."""

    code, status = "FORBIDDEN", 403


class HostNotAllowed(Refused):
    """The server does not serve this address; see its setting allowed_hosts."""

    code, status = "HOST_NOT_ALLOWED", 403


class UnknownTopic(Refused):
    """There is no such topic."""

    code, status = "UNKNOWN_TOPIC", 404


class UnknownGroup(Refused):
    """There is no such group."""

    code, status = "UNKNOWN_GROUP", 404


class UnknownMessage(Refused):
    """The topic holds no message with this id."""

    code, status = "UNKNOWN_MESSAGE", 404


class UnknownSchedule(Refused):
    """The topic has no schedule of this name."""

    code, status = "UNKNOWN_SCHEDULE", 404


class NotKept(Refused):
    """Retention has removed the files of that moment."""

    code, status = "NOT_KEPT", 410

    @property
    def known_from_ms(self) -> int:
        """The earliest moment that is still known."""
        return int(self.details.get("known_from_ms", 0))


class UnknownReplay(Refused):
    """The topic has no replay with this id."""

    code, status = "UNKNOWN_REPLAY", 404


class UnknownShard(Refused):
    """There is no such shard."""

    code, status = "UNKNOWN_SHARD", 404


class UnknownNode(Refused):
    """There is no such node in the cluster."""

    code, status = "UNKNOWN_NODE", 404


class UnknownClient(Refused):
    """There is no such registered client: its heartbeats stopped, or the server was started anew. Register again."""

    code, status = "UNKNOWN_CLIENT", 404


class RequestTimeout(Refused):
    """The request did not come in time; nothing was done."""

    code, status = "REQUEST_TIMEOUT", 408


class Conflict(Refused):
    """The message is not in a state that allows this."""

    code, status = "CONFLICT", 409

    @property
    def state(self) -> str:
        """The state of the message."""
        return str(self.details.get("state", ""))


class NoCluster(Refused):
    """The server is a single node: there is no cluster."""

    code, status = "NO_CLUSTER", 409


class NotInSync(Refused):
    """That node has no copy that is in sync: it must not lead."""

    code, status = "NOT_IN_SYNC", 409


class TooLarge(Refused):
    """A message, batch or body is over its limit."""

    code, status = "TOO_LARGE", 413


class UnsupportedMediaType(Refused):
    """The server does not understand this kind of body."""

    code, status = "UNSUPPORTED_MEDIA_TYPE", 415


class RateLimited(Refused):
    """Too many requests: the limit of the topic or of this client is reached."""

    code, status = "RATE_LIMITED", 429


class Overloaded(Refused):
    """The server has more work than it can take now."""

    code, status = "OVERLOADED", 429


class Unavailable(Refused):
    """The server starts, stops, or is not the one that serves this topic."""

    code, status = "UNAVAILABLE", 503


class NotReplicated(Refused):
    """The required copies did not confirm this in time: it may be done, or not. Sending it again with the same ids is safe."""

    code, status = "NOT_REPLICATED", 503


class NotEnoughReplicas(Refused):
    """Fewer copies are in sync than min_isr demands: nothing was done."""

    code, status = "NOT_ENOUGH_REPLICAS", 503


class NotLeader(Refused):
    """This node of a cluster does not lead; nothing was done."""

    code, status = "NOT_LEADER", 421


class NoLeader(Refused):
    """The cluster had no leader in time; nothing was done."""

    code, status = "NO_LEADER", 503


class DeadlineExceeded(Refused):
    """The time of the request was over before the server began; nothing was done."""

    code, status = "DEADLINE_EXCEEDED", 504


class DiskFull(Refused):
    """The server's disk is full: nothing was stored."""

    code, status = "DISK_FULL", 507


BY_CODE: dict[str, type[Refused]] = {kind.code: kind for kind in Refused.__subclasses__()}


def refused(status: int, code: str, message: str, **details: Any) -> Refused:
    """The error of a refusal, by its code."""
    out = BY_CODE.get(code, Refused)(message, **details)
    out.code, out.status = code, status
    return out
