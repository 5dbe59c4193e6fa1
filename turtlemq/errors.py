"""The error tree. The docstring of a class is its default message; `code` and `status` are those of the HTTP answer.

The core only raises these errors; the server turns them into answers. Nothing else here knows HTTP.
"""

from __future__ import annotations


class TurtleError(Exception):
    """Something went wrong inside TurtleMQ; the log says what."""

    code = "INTERNAL"
    status = 500

    def __init__(self, message: str | None = None, **details: object) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        self.details = details


class InvalidTopic(TurtleError):
    """A topic is named with 1 to 200 of A-Z a-z 0-9 . _ - and starts with a letter or digit."""

    code, status = "INVALID_TOPIC", 400


class InvalidId(TurtleError):
    """An id is 1 to 200 bytes of printable text that does not start with '-' and holds no '/'."""

    code, status = "INVALID_ID", 400


class InvalidMessage(TurtleError):
    """A field of the message is not what the contract says."""

    code, status = "INVALID_MESSAGE", 400


class InvalidFireAt(TurtleError):
    """A due time is a whole number of epoch milliseconds between 1970 and May 2109."""

    code, status = "INVALID_FIRE_AT", 400


class InvalidArgument(TurtleError):
    """An argument is outside its limits."""

    code, status = "INVALID_ARGUMENT", 400


class InvalidSchedule(TurtleError):
    """A schedule has one of `cron`, `every` and `delays`, with times to come."""

    code, status = "INVALID_SCHEDULE", 400


class UnknownSchedule(TurtleError):
    """The topic has no schedule of this name."""

    code, status = "UNKNOWN_SCHEDULE", 404


class UnknownTopic(TurtleError):
    """There is no such topic."""

    code, status = "UNKNOWN_TOPIC", 404


class UnknownGroup(TurtleError):
    """There is no such group."""

    code, status = "UNKNOWN_GROUP", 404


class UnknownMessage(TurtleError):
    """The topic holds no message with this id."""

    code, status = "UNKNOWN_MESSAGE", 404


class NotKept(TurtleError):
    """The files of that moment are gone: retention has removed them."""

    code, status = "NOT_KEPT", 410


class UnknownReplay(TurtleError):
    """The topic has no replay with this id."""

    code, status = "UNKNOWN_REPLAY", 404


class UnknownShard(TurtleError):
    """There is no such shard."""

    code, status = "UNKNOWN_SHARD", 404


class UnknownNode(TurtleError):
    """There is no such node in the cluster."""

    code, status = "UNKNOWN_NODE", 404


class NoCluster(TurtleError):
    """This server is a single node: there is no cluster."""

    code, status = "NO_CLUSTER", 409


class NotInSync(TurtleError):
    """That node has no copy that is in sync: it must not lead."""

    code, status = "NOT_IN_SYNC", 409


class Conflict(TurtleError):
    """The message is not in a state that allows this."""

    code, status = "CONFLICT", 409


class TooLarge(TurtleError):
    """A message, batch or body is over its limit."""

    code, status = "TOO_LARGE", 413


class Exhausted(TurtleError):
    """A resource of the machine is used up: nothing was changed. Service resumes by itself."""


class DiskFull(Exhausted):
    """The disk is full: nothing of this request was stored. Free some room; service resumes by itself."""

    code, status = "DISK_FULL", 507


class OutOfFiles(Exhausted):
    """The server has as many files open as the system allows: nothing of this request was stored. Try again in a moment."""

    code, status = "UNAVAILABLE", 503

    def __init__(self, message: str | None = None, *, retry_after_ms: int = 1_000, **details: object) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **details)


class Unavailable(TurtleError):
    """The server cannot take this now."""

    code, status = "UNAVAILABLE", 503


class Stopped(Unavailable):
    """Writing failed and the state of the disk is unknown: this topic takes no more writes until it is opened again."""


class NotReplicated(Unavailable):
    """The required copies did not confirm this in time: it may be done, or not. Sending it again with the same ids is safe."""

    code = "NOT_REPLICATED"


class NotEnoughReplicas(Unavailable):
    """Fewer copies are in sync than min_isr demands: nothing was done. Service resumes when enough standbys are back."""

    code = "NOT_ENOUGH_REPLICAS"

    def __init__(self, message: str | None = None, *, retry_after_ms: int = 1_000, **details: object) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, **details)


class Locked(TurtleError):
    """Another process holds this data folder."""

    code, status = "UNAVAILABLE", 503


class LockLost(Unavailable):
    """The file LOCK of the data folder was removed or replaced, so that another process may write there: this one ends."""


class Corrupt(TurtleError):
    """A file does not hold what was written to it."""

    code, status = "INTERNAL", 500


class NotOurs(Corrupt):
    """This file was not written by TurtleMQ. Move it out of the data folder."""


class NewerFormat(TurtleError):
    """This data was written by a newer TurtleMQ. Run that version, or restore a backup made by this one."""


def describe(error: BaseException) -> str:
    """The text of an error. One that no code foresees is named by its type as well, since its text alone may say nothing.

    >>> describe(Conflict("it is ready")), describe(KeyError("m1"))
    ('it is ready', "KeyError: 'm1'")
    """
    return str(error) if isinstance(error, TurtleError | OSError) else f"{type(error).__name__}: {error}"


def headline(error: str) -> str:
    r"""The line of a failure's text that names its cause: the first; of a traceback as Python prints it, its last one.

    >>> headline("KeyError: 'customer'\n  File ..."), headline("Traceback (most recent call last):\n  File ...\nKeyError: 'x'\n")
    ("KeyError: 'customer'", "KeyError: 'x'")
    """
    first, _, rest = error.partition("\n")
    if not first.startswith("Traceback (most recent call last)"):
        return first
    return next((line for line in reversed(rest.split("\n")) if line and not line[0].isspace()), first)
