"""Status codes of gRPC: which one an error of TurtleMQ becomes, and the trailers that end a call. Pure.

>>> status_of("UNKNOWN_TOPIC"), status_of("INVALID_ID"), status_of("RATE_LIMITED"), status_of("NEVER_HEARD_OF")
(5, 3, 8, 13)
"""

from __future__ import annotations

from urllib.parse import quote

from turtlemq.errors import TurtleError

OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 0, 1, 3, 4, 5
PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNIMPLEMENTED = 7, 8, 9, 12
INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 13, 14, 16
_CODES = {
    "EXCEEDS_MAX_DELAY": INVALID_ARGUMENT,
    "FORBIDDEN": PERMISSION_DENIED,
    "HOST_NOT_ALLOWED": PERMISSION_DENIED,
    "CONFLICT": FAILED_PRECONDITION,
    "RATE_LIMITED": RESOURCE_EXHAUSTED,
    "TOO_LARGE": RESOURCE_EXHAUSTED,
    "DISK_FULL": RESOURCE_EXHAUSTED,
    "OVERLOADED": UNAVAILABLE,
    "UNAVAILABLE": UNAVAILABLE,
    "NOT_REPLICATED": UNAVAILABLE,
    "NOT_ENOUGH_REPLICAS": UNAVAILABLE,
    "NO_LEADER": UNAVAILABLE,
    "UNAUTHENTICATED": UNAUTHENTICATED,
    "DEADLINE_EXCEEDED": DEADLINE_EXCEEDED,
    "REQUEST_TIMEOUT": DEADLINE_EXCEEDED,
    "UNIMPLEMENTED": UNIMPLEMENTED,
}


class Unimplemented(TurtleError):
    """There is no such method here; reflection lists those that there are."""

    code, status = "UNIMPLEMENTED", 501


class Garbage(TurtleError):
    """The bytes of a call are no messages of its method."""

    code, status = "INTERNAL", 400


def status_of(code: str) -> int:
    """The status of a call that ends with an error, by the code of HTTP.md."""
    if code in _CODES:
        return _CODES[code]
    if code.startswith("INVALID_"):
        return INVALID_ARGUMENT
    return NOT_FOUND if code.startswith("UNKNOWN_") else INTERNAL


def retry_after_ms(error: TurtleError) -> int:
    """The pause that an error asks for; 0: none."""
    value = error.details.get("retry_after_ms", 0)
    return value if isinstance(value, int) else 0


def trailers(request_id: str, error: TurtleError | None = None) -> list[tuple[str, str]]:
    """The trailers of a call, which tell how it ended. gRPC's own retries honour `grpc-retry-pushback-ms`."""
    if error is None:
        return [("grpc-status", "0"), ("x-request-id", request_id)]
    out = [
        ("grpc-status", str(status_of(error.code))),
        ("grpc-message", quote(str(error), safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")),
        ("turtlemq-code", error.code),
        ("x-request-id", request_id),
    ]
    if isinstance(index := error.details.get("index"), int):
        out.append(("turtlemq-index", str(index)))
    if leader := error.details.get("leader"):
        out.append(("turtlemq-leader", str(leader)))
    if pause := retry_after_ms(error):
        out.append(("grpc-retry-pushback-ms", str(pause)))
    return out


def timeout_s(text: str) -> float | None:
    """The seconds of a `grpc-timeout` header; None if it is none.

    >>> timeout_s("100m"), timeout_s("2S"), timeout_s("1H"), timeout_s("soon")
    (0.1, 2.0, 3600.0, None)
    """
    units = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isascii() or not number.isdigit() or len(number) > 8:
        return None
    return int(number) * units[unit]
