"""Sends callbacks: one POST to an address that was checked in the same moment. No redirects, proxies or cookies.

A host is resolved for each new connection; all its addresses are checked, and the connection goes to one of them, not to the
name: a second answer of the name server cannot lead elsewhere. A literal address, which aiohttp does not resolve, is checked
with the URL; and the socket's own address once more when the socket is made.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from turtlemq import __version__
from turtlemq.server.push.hosts import Address, PushHosts, Refused, Target, literal

CONNECT_S = 5.0  # for a connection: its name, TCP and TLS
BODY_BYTES = 64 << 10  # of an answer that are read
KEPT_S = 1.5  # that a connection without a request is kept: shorter than common servers do, which close it without a word
_HEADERS = {"User-Agent": f"TurtleMQ/{__version__}", "Accept-Encoding": "identity"}  # answers are read as they come
BODY_S = 1.0  # for the rest of an answer, once its status is known
Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an endpoint. `body`: its beginning, as far as it came in time."""

    status: int
    retry_after: str | None
    retry: str | None  # the field turtlemq-retry
    body: bytes


class Unreachable(Exception):
    """No connection: nothing of the message was sent."""


class NoAnswer(Exception):
    """The time was over before an answer came. The endpoint may have seen the message."""


class Lost(NoAnswer):
    """The connection was lost before an answer came. The endpoint may have seen the message."""


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own_address(address: Address) -> bool:
    """Whether an address belongs to this machine: the kernel then sends from the address itself. No packet is sent."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False
        return bool(probe.getsockname()[0] == str(address))


class Sender:
    """The HTTP client of callbacks. `resolve`: a host's addresses."""

    def __init__(self, hosts: PushHosts, resolve: Resolve = resolve) -> None:
        self._hosts, self._resolve = hosts, resolve
        self._sessions: dict[str, aiohttp.ClientSession] = {}  # by scheme

    async def check(self, url: str) -> None:
        """Check a URL and the addresses that its host has now. Raises `Refused`; a host that is not resolved in time may pass."""
        target = self._hosts.target(url)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.addresses(target)
        except OSError:
            return

    async def addresses(self, target: Target) -> list[Address]:
        """The addresses of a host, each of them allowed. Raises `Refused`, or `OSError` if it cannot be resolved."""
        found = [str(target.address)] if target.address is not None else await self._resolve(target.host, target.port)
        addresses = [address for text in found if (address := literal(text)) is not None]
        if len(addresses) < len(found):
            raise Refused(f"callbacks to {target.host!r} are refused: one of its addresses needs a zone")
        self._hosts.check(target, addresses)
        return addresses

    async def post(self, url: str, headers: dict[str, str], body: bytes, timeout_s: float) -> Answer:
        """Send a POST. Raises `Refused`, `Unreachable`, `Lost` or `NoAnswer`."""
        target, parsed = self._hosts.target(url), yarl.URL(url, encoded=True)
        if (parsed.scheme, parsed.host, parsed.port) != (target.scheme, target.host, target.port):
            raise Refused(f"{url!r:.220} can be read in two ways")
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(CONNECT_S, timeout_s))
        try:
            client = await self._client(target.scheme)
            async with client.post(parsed, headers=headers, data=body, timeout=timeout, allow_redirects=False) as response:
                return await _answer(response)
        except aiohttp.ConnectionTimeoutError:
            raise Unreachable(f"no connection within {min(CONNECT_S, timeout_s):g} s") from None
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, _NotAllowed):
                raise Refused(str(error.os_error)) from None
            raise Unreachable(f"no connection: {error.os_error.strerror or error.os_error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Lost(f"the connection was lost: {type(error).__name__}") from None

    async def _client(self, scheme: str) -> aiohttp.ClientSession:
        """The session of a scheme: http and https have different rules, and the resolver of a session is not told which it is."""
        # aiohttp's own context has no certificates in a server: see `cli.start`. They are read on a thread: it takes 0.05 s.
        tls = await asyncio.to_thread(ssl.create_default_context) if scheme == "https" and scheme not in self._sessions else True
        if scheme not in self._sessions:
            resolver = _Resolver(self, scheme)
            connector = aiohttp.TCPConnector(
                limit=0, ssl=tls, use_dns_cache=False, resolver=resolver, socket_factory=self._socket, keepalive_timeout=KEPT_S
            )
            self._sessions[scheme] = aiohttp.ClientSession(
                connector=connector,
                headers=_HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._sessions[scheme]

    def _socket(self, address: Any) -> socket.socket:
        """The socket of a connection: the last look at where it really goes."""
        family, kind, protocol, _, place = address
        found = literal(str(place[0]))
        if found is None or not self._hosts.may_connect(found):
            raise _NotAllowed("the address of the connection is not allowed")
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    async def close(self) -> None:
        """End all connections."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


class _NotAllowed(OSError):
    """An address that `push_hosts` does not allow, in the form of error that aiohttp passes on."""


class _Resolver(AbstractResolver):
    """The resolver of the HTTP client: it returns checked addresses alone."""

    def __init__(self, sender: Sender, scheme: str) -> None:
        self._sender, self._scheme = sender, scheme

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        """The addresses to which a connection may be made. Raises `OSError`, which aiohttp passes on."""
        try:
            addresses = await self._sender.addresses(Target("", self._scheme, host, port, None))
        except Refused as error:
            raise _NotAllowed(str(error)) from None
        return [_resolved(host, port, address) for address in addresses]

    async def close(self) -> None:
        """Nothing is held."""


def _resolved(host: str, port: int, address: Address) -> ResolveResult:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return ResolveResult(hostname=host, host=str(address), port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST)


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    """The status, and the beginning of the body. An endless or slow body ends the connection, not the delivery."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while len(body) < BODY_BYTES and (piece := await response.content.read(BODY_BYTES - len(body))):
                body += piece
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()
    if len(body) >= BODY_BYTES:
        response.close()
    fields = response.headers
    return Answer(response.status, fields.get("Retry-After"), fields.get("turtlemq-retry"), bytes(body))
