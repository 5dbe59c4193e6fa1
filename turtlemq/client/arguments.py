"""Keyword arguments of clients, producers and consumers as types, checked names, and signatures of methods. Pure."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict


class ClientArguments(TypedDict, total=False):
    """The keyword arguments of `Client`, for a producer or consumer that makes its own."""

    url: str | Sequence[str] | None
    token: str | None
    cacert: str | None
    timeout: float
    try_timeout: float
    user_agent: str | None
    retries: int


class ConsumerArguments(ClientArguments, total=False):
    """The keyword arguments of `Consumer` and `AsyncConsumer`: those of `ConsumerOptions`, and of their own client."""

    group: str
    concurrency: int
    batch: int
    prefetch: int | None
    ttr: float | timedelta
    wait: float | timedelta
    mode: Literal["at-least-once", "at-most-once"]
    ack_count: int
    ack_linger_s: float
    limit_s: float | timedelta | None
    name: str
    wire: Literal["json", "bson"]
    body: Any


CLIENT_NAMES = tuple(ClientArguments.__annotations__)
PRODUCER_NAMES = ("count", "bytes", "linger", "held_count", "held_bytes", "senders")
CONSUMER_NAMES = tuple(name for name in ConsumerArguments.__annotations__ if name not in CLIENT_NAMES)


def check_names(kind: str, own: Iterable[str], given: Mapping[str, Any], client: object) -> None:
    """Refuse keyword arguments that are none of a client, and those that are beside a client. `own`: other names to suggest.

    >>> check_names("Producer", ["linger"], {"lingr": 1}, None)
    Traceback (most recent call last):
    TypeError: Producer has no argument 'lingr'; did you mean 'linger'?
    """
    for name in given:
        if name not in CLIENT_NAMES:
            names = sorted({*own, *CLIENT_NAMES})
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise TypeError(f"{kind} has no argument {name!r}; {hint}")
    if client is not None and given:
        raise TypeError(f"{kind} takes a client, or the arguments of its own one, not both: {', '.join(given)}")


def describe_method(method: Callable[..., Any], build: Callable[..., Any]) -> None:
    """Give a method that sends a call the text and the signature that `help` shows: with self, and the result of the call."""
    method.__doc__ = (build.__doc__ or "").partition("\n\n    >>>")[0]
    signature = inspect.signature(build)
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    result = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    parameters = [self, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
