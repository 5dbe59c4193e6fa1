"""Calls about registered clients, to which the server delivers by itself: methods of `Client` and `AsyncClient`. Pure.

The examples run as doctests, each with a `client` of an empty server whose `push_hosts` allows 127.0.0.0/8.
"""

from __future__ import annotations

from msgspec import Struct

from turtlemq.client.calls import GROUP
from turtlemq.client.errors import UnknownClient
from turtlemq.client.results import RegisteredClient, Registration
from turtlemq.client.sending import Call
from turtlemq.client.wire import Request, Seconds, json_request, parser_of, path, seconds_of, without_none


class _Clients(Struct):
    clients: list[RegisteredClient]


class _Secret(Struct):
    secret: str


_parse_registration = parser_of(Registration)
_parse_client = parser_of(RegisteredClient)
_parse_clients = parser_of(_Clients)
_parse_secret = parser_of(_Secret)


def register_client(
    topic: str,
    url: str,
    *,
    group: str = GROUP,
    name: str | None = None,
    capacity: int = 16,
    ttl: int = 30,
    timeout: Seconds | None = None,
    at_most_once: bool = False,
    secret: str | None = None,
) -> Call[Registration]:
    """Let the server send the messages of a group to a URL, signed with the secret in the answer. `ttl`: seconds without a
    heartbeat (`beat_client`) until it is removed; 0: it stays until `drop_client`.

    >>> made = client.register_client("jobs", "http://127.0.0.1:9/jobs", name="w1", ttl=60)
    >>> made.client, made.beat_s, made.secret[:6]
    ('w1', 20.0, 'whsec_')
    """
    fields = without_none(
        url=url,
        name=name,
        capacity=capacity,
        ttl=ttl,
        timeout=seconds_of("timeout", timeout),
        at_most_once=at_most_once or None,
        secret=secret,
    )
    return Call(json_request(path(topic, "groups", group, "clients"), fields), _parse_registration)


def registered_clients(topic: str, *, group: str | None = None) -> Call[list[RegisteredClient]]:
    """The registered clients of a group, or of all groups.

    >>> _ = client.register_client("jobs", "http://127.0.0.1:9/jobs", name="w1")
    >>> [(one.client, one.transport, one.state) for one in client.registered_clients("jobs")]
    [('w1', 'http', 'pending')]
    """
    target = path(topic, "clients") if group is None else path(topic, "groups", group, "clients")
    return Call(Request("GET", target), lambda answer: _parse_clients(answer).clients)


def beat_client(
    topic: str, client: str, *, group: str = GROUP, free: int | None = None, paused: bool | None = None
) -> Call[RegisteredClient]:
    """A heartbeat. `free`: how many more deliveries the client could begin; `paused`: send nothing for now. Raises
    `UnknownClient` if it must register again.

    >>> _ = client.register_client("jobs", "http://127.0.0.1:9/jobs", name="w1")
    >>> client.beat_client("jobs", "w1", free=2, paused=True).state
    'paused'
    """
    fields = without_none(free=free, paused=paused)
    return Call(json_request(path(topic, "groups", group, "clients", client), fields, "PUT"), _parse_client)


def rotate_secret(topic: str, client: str, *, group: str = GROUP, secret: str | None = None, overlap: int = 86_400) -> Call[str]:
    """Give a client another secret, which is returned. For `overlap` seconds callbacks have the signatures of both.

    >>> old = client.register_client("jobs", "http://127.0.0.1:9/jobs", name="w1").secret
    >>> client.rotate_secret("jobs", "w1") == old
    False
    """
    target = path(topic, "groups", group, "clients", client, "secret")
    fields = without_none(secret=secret, overlap=overlap)
    return Call(json_request(target, fields, "PUT"), lambda answer: _parse_secret(answer).secret)


def drop_client(topic: str, client: str, *, group: str = GROUP) -> Call[None]:
    """Send nothing more to a client. Deliveries under way come to their end.

    >>> _ = client.register_client("jobs", "http://127.0.0.1:9/jobs", name="w1")
    >>> client.drop_client("jobs", "w1")
    """
    request = Request("DELETE", path(topic, "groups", group, "clients", client))
    return Call(request, lambda answer: None, lambda error: isinstance(error, UnknownClient))
