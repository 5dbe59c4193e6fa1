"""Which URLs callbacks may go to, as `push_hosts` allows: the defence against server-side request forgery. Pure.

An entry is a host (`hooks.shop.example`), the hosts below one (`*.shop.example`), an address or a network (`10.0.0.0/8`), each
with a port or `*` for all of them (`hooks.shop.example:8443`, `[fd00::/8]:*`); without one, the ports are 443 and 80.

A host that is named may have public addresses, over https. An address that is not public, and any address over http, must be in a
named network. All addresses of a host must be allowed, not one of them: the owner of the name has the choice.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from turtlemq.errors import InvalidArgument

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Ports = frozenset[int] | None  # None: all
WEB_PORTS: Ports = frozenset({443, 80})
URL_CHARS_MAX = 2_000
_ENTRY = re.compile(r"\[(?P<inner>[^\]]+)\](?::(?P<inner_port>\*|\d{1,5}))?|(?P<host>[^\[\]]+?)(?::(?P<port>\*|\d{1,5}))?")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label of this form makes a name an address in many resolvers
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_TEREDO = ipaddress.ip_network("2001::/32")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ISATAP = 0x5EFE


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that was checked as far as its text goes. `address`: of a host that is an address itself."""

    url: str
    scheme: str
    host: str
    port: int
    address: Address | None


@dataclass(frozen=True, slots=True)
class _Rule:
    ports: Ports
    name: str = ""  # ".shop.example": the hosts below
    network: Network | None = None

    def has_port(self, port: int) -> bool:
        return self.ports is None or port in self.ports

    def names(self, host: str) -> bool:
        return host.endswith(self.name) if self.name.startswith(".") else host == self.name

    def holds(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


class Refused(InvalidArgument):
    """The server sends nothing to this address: push_hosts does not allow it."""


class PushHosts:
    """The rules of a server. `is_own`: whether an address is one of this machine; `own_ports`: on which this server listens."""

    def __init__(
        self,
        entries: Iterable[str],
        is_own: Callable[[Address], bool] = lambda address: False,
        own_ports: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        rules = [_rule(entry) for entry in entries]
        self._names = [rule for rule in rules if rule.network is None]
        self._networks = [rule for rule in rules if rule.network is not None]
        self._is_own, self._own_ports = is_own, own_ports

    def target(self, url: str) -> Target:
        """Check the text of a URL. Raises `Refused`."""
        parts = _split(url)
        host = parts.hostname or ""
        address = literal(host)
        if address is None and not _is_name(host):
            raise Refused(f"{host!r:.220} is neither a host name nor an address in its usual form")
        if address is None and not self._networks and not any(rule.names(host) for rule in self._names):
            raise Refused(f"push_hosts of this server does not name {host!r}")
        target = Target(url, parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), address)
        if address is not None:
            self.check(target, [address])
        return target

    def check(self, target: Target, addresses: Sequence[Address]) -> None:
        """Check all addresses that a host has now. Raises `Refused` if there is none, or one is not allowed."""
        if not addresses:
            raise Refused(f"{target.host!r} has no address")
        for address in addresses:
            if why := self._why_not(target, unwrapped(address)):
                raise Refused(f"callbacks to {target.host!r} at port {target.port} are refused: {why}")

    def _why_not(self, target: Target, address: Address) -> str:
        """Why an address is not allowed; empty if it is. The address itself is not told: it may be a secret of the network."""
        in_network = any(rule.holds(address) for rule in self._networks)
        if self._is_own(address) and (not in_network or target.port in self._own_ports()):
            return "it is this server itself"
        if not in_network and not is_public(address):
            return "its address is not public, and in no network that push_hosts names"
        if not in_network and target.scheme != "https":
            return "http is only for networks that push_hosts names; use https"
        if any(rule.holds(address) and rule.has_port(target.port) for rule in self._networks):
            return ""
        named = [rule for rule in self._names if rule.names(target.host)]
        if not named:
            return "push_hosts names the network for other ports" if in_network else "push_hosts does not name it"
        return "" if any(rule.has_port(target.port) for rule in named) else "push_hosts does not name this port"

    def may_connect(self, address: Address) -> bool:
        """Whether a connection to an address can be right for any target: the last check, of the socket's own address."""
        plain = unwrapped(address)
        return any(rule.holds(plain) for rule in self._networks) or (is_public(plain) and not self._is_own(plain))


def _rule(entry: str) -> _Rule:
    match = _ENTRY.fullmatch(entry.strip())
    text = "" if match is None else (match["inner"] or match["host"])
    try:
        return _Rule(_ports(match), network=ipaddress.ip_network(text))
    except ValueError:
        name = text.lower().removeprefix("*")
        if match is not None and not match["inner"] and _is_name(name.removeprefix(".") if text.startswith("*.") else name):
            return _Rule(_ports(match), name=name)
    try:  # an IPv6 address or network without brackets: its last colon is no port's
        return _Rule(WEB_PORTS, network=ipaddress.ip_network(entry.strip()))
    except ValueError:
        text = "is no host (hooks.shop.example, *.shop.example), address or network (10.0.0.0/8), perhaps with :PORT or :*"
        raise InvalidArgument(f"push_hosts: {entry!r:.220} {text}") from None


def _ports(match: re.Match[str] | None) -> Ports:
    port = None if match is None else match["inner_port"] or match["port"]
    if port is None:
        return WEB_PORTS
    if port != "*" and not 0 < int(port) < 65536:
        raise InvalidArgument(f"push_hosts: {port} is no port")
    return None if port == "*" else frozenset({int(port)})


def _split(url: str) -> SplitResult:
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or any(mark in url for mark in ' \\"<>^`{|}'):
        raise Refused(f"a URL is up to {URL_CHARS_MAX} characters of ASCII, others percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise Refused(f"{url!r:.220} is no URL") from None
    if parts.scheme not in ("https", "http") or not parts.hostname or port == 0:
        raise Refused("a callback goes to a URL that begins with https://HOST, or http://HOST")
    if "@" in parts.netloc:
        raise Refused("credentials in a URL are not sent; the signature tells who calls")
    if parts.fragment:
        raise Refused("a URL of a callback has no fragment")
    return parts


def _is_name(host: str) -> bool:
    """Whether a text is a host name that no resolver takes for an address, such as 127.1 or 0x7f000001."""
    last = host.rpartition(".")[2]
    return len(host) <= 253 and _NAME.fullmatch(host) is not None and _NUMBER.fullmatch(last) is None


def literal(host: str) -> Address | None:
    """The address that a host is, in its usual form; None for any other text, and for one with a zone.

    >>> literal("10.0.0.1"), literal("::1"), literal("127.1"), literal("fe80::1%eth0")
    (IPv4Address('10.0.0.1'), IPv6Address('::1'), None, None)
    """
    try:
        return None if "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None


def unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 address (mapped, 6to4, NAT64): packets to it go there. Others are returned as they are.

    >>> [str(unwrapped(ipaddress.ip_address(a))) for a in ("::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a9fe:a9fe", "2a00::1")]
    ['10.0.0.1', '127.0.0.1', '169.254.169.254', '2a00::1']
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address if inner is None else inner


def is_public(address: Address) -> bool:
    """Whether an address, unwrapped, belongs to the internet: no loopback, private, link-local, shared (CGNAT), multicast,
    reserved or tunnelled one."""
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    is_isatap = (int(address) >> 32) & 0xFFFF == _ISATAP
    return address in _PUBLIC_V6 and address not in _TEREDO and not is_isatap
