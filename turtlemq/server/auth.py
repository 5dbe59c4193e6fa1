"""Who may do what: client addresses (`allowed_hosts`), bearer tokens, and the one table that says which right an endpoint needs.

A token is `tmq_ID_SECRET`, and 256 bits of chance are in its secret. The server keeps `sha256:ID:DIGEST`, the digest of the whole
token. One round of SHA-256 is right here: slow hashes make it dear to guess passwords, and nobody guesses 256 bits. The random ID
is the salt, and it finds the one entry to compare with: a request costs one hash however many tokens there are. The comparison
takes as long whatever it finds, and an ID that is not known is compared as well.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from time import monotonic
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.server import logs
from turtlemq.server.errors import Forbidden, HostNotAllowed, Unauthenticated

Right = Literal["produce", "consume", "admin"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK = ("127.0.0.0/8", "::1")
HOSTS_MAX, TOKENS_MAX, PATTERNS_MAX = 1_000, 10_000, 100
TOKEN_KEY = "who"  # a request's token; None where none is needed
_TOKEN = re.compile(r"tmq_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_HASH = re.compile(r"sha256:([0-9a-f]{16}):([0-9a-f]{64})")
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,200}")
_NOBODY = "0" * 64
_LOCAL = ("127.0.0.1", "::1")

# The access right that an operation requires. Rights are those of a token on the topic in the path, one of them is enough;
# `admin` includes `produce` and `consume`.
Access = tuple[str, ...]
OPEN: Access = ("open",)  # no token
TOKEN: Access = ("token",)  # any token; the handler shows only topics on which it has a right, or checks each command
ALL: Access = ("all",)  # any token whose topics hold "*"
ANY: Access = ("produce", "consume", "admin")
PRODUCE: Access = ("produce", "admin")
CONSUME: Access = ("consume", "admin")
ADMIN: Access = ("admin",)  # on all topics, where the path names none


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody with rights on topics. Patterns are names in which `*` stands for any characters."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._@ -]+$")]
    hash: str
    rights: tuple[Right, ...]
    topics: Annotated[tuple[str, ...], Meta(max_length=PATTERNS_MAX)] = ("*",)


# Tokens


def new_token() -> str:
    """A token that nobody can guess."""
    return f"tmq_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    """What a server keeps of a token.

    >>> hash_of("tmq_0123456789abcdef_" + "x" * 43)[:40]
    'sha256:0123456789abcdef:c22c779b74a68139'
    """
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise InvalidArgument("that is no token of TurtleMQ; `turtlemq token NAME` makes one")
    return f"sha256:{found[1]}:{_digest(token)}"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def check_tokens(tokens: Iterable[Token]) -> None:
    """Refuse tokens that could not work."""
    names: set[str] = set()
    ids: set[str] = set()
    for token in tokens:
        found = _HASH.fullmatch(token.hash)
        if found is None:
            raise InvalidArgument(f"token {token.name!r}: its hash is no sha256:ID:DIGEST; `turtlemq token NAME` makes one")
        if token.name in names or found[1] in ids:
            raise InvalidArgument(f"token {token.name!r}: another token has the same name or the same hash")
        if not token.topics or not all(_PATTERN.fullmatch(pattern) for pattern in token.topics):
            raise InvalidArgument(f"token {token.name!r}: topics are names in which * stands for any characters: ['orders*']")
        names.add(token.name)
        ids.add(found[1])


def pattern_of(topics: Iterable[str]) -> Callable[[str], object]:
    """Whether a name fits one of the patterns, as a function.

    >>> fits = pattern_of(["orders", "mail.*"])
    >>> bool(fits("orders")), bool(fits("orders2")), bool(fits("mail.de"))
    (True, False, True)
    """
    forms = [".*".join(re.escape(part) for part in re.split(r"\*+", topic)) for topic in topics]
    return re.compile("|".join(forms), re.ASCII).fullmatch


# Hosts


def networks_of(hosts: Iterable[str]) -> list[Network]:
    """Addresses and networks; `*` is everybody.

    >>> networks_of(["10.0.0.0/8", "::1"])
    [IPv4Network('10.0.0.0/8'), IPv6Network('::1/128')]
    """
    out: list[Network] = []
    if not (hosts := tuple(hosts)):
        raise InvalidArgument("allowed_hosts names nobody; give addresses, networks (10.0.0.0/8), or * for everybody")
    for host in hosts:
        try:
            out += [ipaddress.ip_network(one) for one in (("0.0.0.0/0", "::/0") if host == "*" else (host,))]
        except ValueError as error:
            raise InvalidArgument(f"allowed_hosts: {host!r} is no address, network (10.0.0.0/8) or *: {error}") from None
    return out


def plain_address(text: str) -> Address:
    """A client's address; one of IPv4 that came over IPv6 is the one of IPv4.

    >>> plain_address("::ffff:10.1.2.3"), plain_address("fe80::1%eth0")
    (IPv4Address('10.1.2.3'), IPv6Address('fe80::1'))
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(1_000)
def is_own_name(host: str) -> bool:
    """Whether a browser on this machine may have asked for us by this name. A name of somebody's domain that leads to 127.0.0.1
    is the trick by which a page of theirs reads what is here; addresses, localhost and names without a dot cannot be theirs.

    >>> [is_own_name(host) for host in ("127.0.0.1:8878", "[::1]:8878", "localhost", "turtle:80", "evil.example:8878")]
    [True, True, True, True, False]
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").rstrip(".").lower()
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


@lru_cache(10_000)
def client_network(remote: str) -> str:
    """What counts as one client: an address, or with IPv6 the network of 64 bits that is given to one customer."""
    try:
        address = plain_address(remote)
    except ValueError:
        return remote
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class Auth:
    """Every check of a server, with its tokens and networks."""

    def __init__(
        self, allowed_hosts: Iterable[str] = LOOPBACK, tokens: Iterable[Token] = (), access: Mapping[str, Access] | None = None
    ) -> None:
        self._access = access or {}  # by method and path; a route that it lacks needs ADMIN
        self._networks = networks_of(allowed_hosts)
        self._tokens: dict[str, tuple[str, Token, Callable[[str], object]]] = {}
        for token in tokens:
            _, id_, digest = token.hash.split(":")
            self._tokens[id_] = digest, token, pattern_of(token.topics)
        self._fits = {token.name: fits for _, token, fits in self._tokens.values()}
        self._often = logs.LogLimiter()
        self.allows = lru_cache(10_000)(self._allows)

    def _allows(self, remote: str) -> bool:
        """Whether a client of this address is served."""
        try:
            address = plain_address(remote)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def admit(self, request: web.Request) -> None:
        """Let a request pass, or raise. O(1): a look-up, and with tokens one hash."""
        try:
            self._admit(request)
        except (HostNotAllowed, Unauthenticated, Forbidden) as error:
            left_out = self._often.allow(error.code, monotonic())
            if left_out is not None:
                who: Token | None = request.get(TOKEN_KEY)
                named = {} if who is None else {"token": who.name}
                logs.warning(error.code.lower(), client=request.remote, method=request.method, path=request.path, **named)
            raise

    def _admit(self, request: web.Request) -> None:
        remote = request.remote or ""
        request[TOKEN_KEY] = None
        if not self.allows(remote):
            raise HostNotAllowed(f"clients of {remote or 'no address'} are not served here; allowed_hosts says which are")
        resource = request.match_info.route.resource
        if not self._tokens and remote in _LOCAL and not is_own_name(request.host):
            raise Forbidden(f"a page of {request.host!r:.80} cannot be one of this server; use http://127.0.0.1 or localhost")
        if not self._tokens or resource is None:
            return
        method = "GET" if request.method == "HEAD" else request.method
        needed = self._access.get(f"{method} {resource.canonical}", ADMIN)
        if needed is OPEN:
            return
        who = request[TOKEN_KEY] = self.identify(request.headers.get("Authorization"))
        if needed is TOKEN:
            return
        if needed is ALL:
            if "*" not in who.topics:
                raise Forbidden(f'token {who.name!r} is for some topics only; this needs one whose topics hold "*"')
            return
        self._check(who, request.match_info.get("topic", "*"), needed)

    def identify(self, header: str | None) -> Token:
        """Whose token this is."""
        scheme, _, text = (header or "").partition(" ")
        found = _TOKEN.fullmatch(text.strip())
        if scheme.lower() != "bearer" or found is None:
            raise Unauthenticated
        digest, token, _ = self._tokens.get(found[1], (_NOBODY, None, None))
        if not hmac.compare_digest(_digest(found[0]), digest) or token is None:
            raise Unauthenticated
        return token

    def may(self, request: web.Request, topic: str, rights: Access = ANY) -> bool:
        """Whether the sender of an admitted request has one of these rights on a topic."""
        who: Token | None = request[TOKEN_KEY]
        return who is None or (not set(rights).isdisjoint(who.rights) and bool(self._fits[who.name](topic)))

    def require(self, request: web.Request, topic: str, rights: Access) -> None:
        """Raise if it has none."""
        who: Token | None = request[TOKEN_KEY]
        if who is not None:
            self._check(who, topic, rights)

    def _check(self, who: Token, topic: str, rights: Access) -> None:
        if set(rights).isdisjoint(who.rights) or not self._fits[who.name](topic):
            raise Forbidden(f"token {who.name!r} has no right to {' or '.join(rights)} on topic {topic!r:.210}")


def client_name(request: web.Request) -> str:
    """Whom to count this request for: its token, else its address."""
    who: Token | None = request.get(TOKEN_KEY)
    return f"token {who.name}" if who is not None else client_network(request.remote or "")


AUTH = web.AppKey("auth", Auth)
