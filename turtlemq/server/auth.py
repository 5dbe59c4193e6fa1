"""Authentication and authorisation: client addresses (`allowed_hosts`), bearer tokens, and the kinds of access rights.

A token is `tmq_ID_SECRET`, with 256 random bits in its secret. The server keeps `sha256:ID:DIGEST`, the digest of the whole
token. One round of SHA-256 is enough: slow hashes protect passwords that can be guessed, and 256 random bits cannot. The random
ID is the salt, and it finds the one entry to compare with, so a request costs one hash for any number of tokens. The comparison
takes constant time, and an unknown ID is compared as well.

The right that an operation needs stands in the table of operations, not here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from time import monotonic
from typing import Annotated, Literal, get_args

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.server import logs
from turtlemq.server.errors import Forbidden, HostNotAllowed, Unauthenticated
from turtlemq.server.topic_patterns import is_pattern, pattern_of

Right = Literal["read", "produce", "consume", "operate", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK = ("127.0.0.0/8", "::1")
ALWAYS = ("127.0.0.1", "::1")  # admitted whatever `allowed_hosts` says: tools and health checks inside a container
PROBES = ("/healthz", "/readyz")  # answered to every address: a kubelet or a balancer need not be a client
HOSTS_MAX, TOKENS_MAX, PATTERNS_MAX = 1_000, 10_000, 100
TOKEN_KEY = "token"  # of a request: its `Token`; None where none is needed
_REMOTE = "remote"  # of a request that another process has passed on: the address of its client
_TOKEN = re.compile(r"tmq_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_HASH = re.compile(r"sha256:([0-9a-f]{16}):([0-9a-f]{64})")
_NO_DIGEST = "0" * 64  # compared with the token of an unknown ID

# The access right that an operation requires. Rights are those of a token on the topic in the path, one of them is enough. These
# tuples are the one place that says which right includes which: `admin` is in all of them, `operate` in all that read.
Access = tuple[str, ...]
OPEN: Access = ("open",)  # no token
TOKEN: Access = ("token",)  # any token; the handler shows only topics on which it has a right, or checks each command
ALL: Access = ("all",)  # any token whose topics hold "*"
ANY: Access = RIGHTS  # look at a topic, or at a message whose id is known
READ: Access = ("read", "consume", "operate", "admin")  # list messages and dead letters, with their bodies
INSPECT: Access = ("read", "operate", "admin")  # look at the work of others, or of the server: the audit log
PRODUCE: Access = ("produce", "admin")
CHANGE: Access = ("produce", "operate", "admin")  # cancel and reschedule
CONSUME: Access = ("consume", "admin")
GROUP: Access = ("consume", "operate", "admin")  # create and move a group
OPERATE: Access = ("operate", "admin")
ADMIN: Access = ("admin",)  # on all topics, where the path names none


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """A token of the configuration, with its rights on topics. In `topics`, `*` stands for any characters."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._@ -]+$")]
    hash: str
    rights: tuple[Right, ...]
    topics: Annotated[tuple[str, ...], Meta(max_length=PATTERNS_MAX)] = ("*",)


# Tokens


def new_token() -> str:
    """A new random token."""
    return f"tmq_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    """The form in which the configuration keeps a token.

    >>> hash_of("tmq_0123456789abcdef_" + "x" * 43)[:40]
    'sha256:0123456789abcdef:c22c779b74a68139'
    """
    parts = _TOKEN.fullmatch(token)
    if parts is None:
        raise InvalidArgument("that is no token of TurtleMQ; `turtlemq token NAME` makes one")
    return f"sha256:{parts[1]}:{_digest(token)}"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def check_tokens(tokens: Iterable[Token]) -> None:
    """Raise `InvalidArgument` for a malformed hash or pattern, and for a name or hash that occurs twice."""
    names: set[str] = set()
    ids: set[str] = set()
    for token in tokens:
        parts = _HASH.fullmatch(token.hash)
        if parts is None:
            raise InvalidArgument(f"token {token.name!r}: its hash is no sha256:ID:DIGEST; `turtlemq token NAME` makes one")
        if token.name in names or parts[1] in ids:
            raise InvalidArgument(f"token {token.name!r}: another token has the same name or the same hash")
        if not token.topics or not all(map(is_pattern, token.topics)):
            raise InvalidArgument(f"token {token.name!r}: topics are names in which * stands for any characters: ['orders*']")
        names.add(token.name)
        ids.add(parts[1])


# Hosts


def networks_of(hosts: Iterable[str]) -> list[Network]:
    """The networks of `allowed_hosts`: addresses, networks, or `*` for all of them.

    >>> networks_of(["10.0.0.0/8", "::1"])
    [IPv4Network('10.0.0.0/8'), IPv6Network('::1/128')]
    """
    out: list[Network] = []
    if not (hosts := tuple(hosts)):
        raise InvalidArgument("allowed_hosts is empty; give addresses, networks (10.0.0.0/8), or * for all")
    for host in hosts:
        try:
            out += [ipaddress.ip_network(text) for text in (("0.0.0.0/0", "::/0") if host == "*" else (host,))]
        except ValueError as error:
            raise InvalidArgument(f"allowed_hosts: {host!r} is no address, network (10.0.0.0/8) or *: {error}") from None
    return out


def plain_address(text: str) -> Address:
    """A client's address, without its zone. An IPv4 address mapped into IPv6 becomes the IPv4 address.

    >>> plain_address("::ffff:10.1.2.3"), plain_address("fe80::1%eth0")
    (IPv4Address('10.1.2.3'), IPv6Address('fe80::1'))
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case.

    >>> [host_name(host) for host in ("127.0.0.1:8878", "[::1]:8878", "MQ.Example.:80")]
    ['127.0.0.1', '::1', 'mq.example']
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").rstrip(".").lower()


def is_own_name(name: str) -> bool:
    """Whether a name can belong to this server alone: addresses, localhost and names without a dot cannot be foreign domains.

    >>> [is_own_name(name) for name in ("127.0.0.1", "::1", "localhost", "turtle", "evil.example")]
    [True, True, True, True, False]
    """
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


@lru_cache(10_000)
def client_network(remote: str) -> str:
    """The unit of rate limits: an IPv4 address, or the /64 network of an IPv6 address, which belongs to one customer."""
    try:
        address = plain_address(remote)
    except ValueError:
        return remote
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class Auth:
    """The checks that every request passes, with the tokens and networks of a server."""

    def __init__(
        self,
        allowed_hosts: Iterable[str] = LOOPBACK,
        tokens: Iterable[Token] = (),
        access: Mapping[str, Access] | None = None,
        host_names: Iterable[str] = (),
        tls: bool = False,
    ) -> None:
        self._access = access or {}  # by method and path; a route that it lacks needs ADMIN
        self._networks = networks_of(allowed_hosts) + networks_of(ALWAYS)
        self._log_limiter = logs.LogLimiter()
        self.allows = lru_cache(10_000)(self._allows)
        self._host_names = {host_name(name) for name in (*host_names, socket.gethostname())}
        self._tls = tls
        self.use(tokens)

    def use(self, tokens: Iterable[Token]) -> None:
        """Know these tokens from now on, and no others. Requests that are admitted already lose the rights of those removed."""
        self._tokens: dict[str, tuple[str, Token]] = {}  # by ID, with the digest
        self._fits: dict[str, Callable[[str], object]] = {}  # by name of the token
        for token in tokens:
            _, id_, digest = token.hash.split(":")
            self._tokens[id_] = digest, token
            self._fits[token.name] = pattern_of(token.topics)
        self._any_name = bool(self._tokens) or self._tls or "*" in self._host_names
        self.answers_to = lru_cache(1_000)(self._answers_to)

    def _allows(self, remote: str) -> bool:
        """Whether `allowed_hosts` admits this address, or it is one of `ALWAYS`."""
        try:
            address = plain_address(remote)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _answers_to(self, host: str) -> bool:
        """Whether the Host header of a request can name this server.

        Against DNS rebinding: a foreign domain that resolves to the address of this server would let its pages, in the browser of
        an allowed host, read and write here. With tokens they cannot, since they know none; nor with TLS, since the certificate
        has another name. Only browsers are meant, and they always send the header."""
        return self._any_name or is_own_name(host_name(host)) or host_name(host) in self._host_names

    def admit(self, request: web.Request) -> None:
        """Return if a request is allowed; log and raise if not. O(1): a look-up, and with tokens one hash."""
        try:
            self._admit(request)
        except (HostNotAllowed, Unauthenticated, Forbidden) as error:
            left_out = self._log_limiter.allow(error.code, monotonic())
            if left_out is not None:
                token: Token | None = request.get(TOKEN_KEY)
                named = {} if token is None else {"token": token.name}
                logs.warning(error.code.lower(), client=remote_of(request), method=request.method, path=request.path, **named)
            raise

    def _admit(self, request: web.Request) -> None:
        remote = remote_of(request)
        request[TOKEN_KEY] = None
        resource = request.match_info.route.resource
        if not self.allows(remote) and not (resource is not None and resource.canonical in PROBES):
            raise HostNotAllowed(f"clients of {remote or 'no address'} are not served here; allowed_hosts says which are")
        if not self.answers_to(host := request.headers.get("Host", "")):
            raise Forbidden(f"a page of {host!r:.80} cannot be one of this server; use its address, or name it in host_names")
        if not self._tokens or resource is None:
            return
        method = "GET" if request.method == "HEAD" else request.method
        needed = self.access_of(f"{method} {resource.canonical}")
        if needed is OPEN:
            return
        token = request[TOKEN_KEY] = self.identify(request.headers.get("Authorization"))
        if needed is TOKEN:
            return
        if needed is ALL:
            if "*" not in token.topics:
                raise Forbidden(f'token {token.name!r} is for some topics only; this needs one whose topics hold "*"')
            return
        self._check(token, request.match_info.get("topic", "*"), needed)

    def access_of(self, route: str) -> Access:
        """The access right that an operation requires. `route`: method and path, as in the table of operations."""
        return self._access.get(route, ADMIN)

    def identify(self, header: str | None) -> Token:
        """The token of an Authorization header. Raises `Unauthenticated` if there is none or it is unknown."""
        scheme, _, text = (header or "").partition(" ")
        parts = _TOKEN.fullmatch(text.strip())
        if scheme.lower() != "bearer" or parts is None:
            raise Unauthenticated
        digest, token = self._tokens.get(parts[1], (_NO_DIGEST, None))
        if not hmac.compare_digest(_digest(parts[0]), digest) or token is None:
            raise Unauthenticated
        return token

    def may(self, request: web.Request, topic: str, rights: Access = ANY) -> bool:
        """Whether the token of an admitted request has one of these rights on a topic. Always true where no token is needed."""
        token: Token | None = request[TOKEN_KEY]
        return token is None or self._has_right(token, topic, rights)

    def require(self, request: web.Request, topic: str, rights: Access) -> None:
        """Raise `Forbidden` unless the token of an admitted request has one of these rights on a topic."""
        token: Token | None = request[TOKEN_KEY]
        if token is not None:
            self._check(token, topic, rights)

    def token_of(self, header: str | None) -> Token | None:
        """The token of a call that is no HTTP request; None where this server asks for none. Raises `Unauthenticated`."""
        return self.identify(header) if self._tokens else None

    def check(self, token: Token | None, topic: str, rights: Access) -> None:
        """Raise `Forbidden` unless a token has one of these rights on a topic. None: no token is needed."""
        if token is not None:
            self._check(token, topic, rights)

    @staticmethod
    def client_name(token: Token | None, remote: str) -> str:
        """The name under which rate limits count a client: its token's, else its address or network."""
        return f"token {token.name}" if token is not None else client_network(remote)

    def _has_right(self, token: Token, topic: str, rights: Access) -> bool:
        fits = self._fits.get(token.name)  # None: it was removed since
        return not set(rights).isdisjoint(token.rights) and fits is not None and bool(fits(topic))

    def _check(self, token: Token, topic: str, rights: Access) -> None:
        if not self._has_right(token, topic, rights):
            raise Forbidden(f"token {token.name!r} has no right to {' or '.join(rights)} on topic {topic!r:.210}")


def set_remote(request: web.Request, address: str) -> None:
    """Note the address of the client of a request that another process has passed on."""
    request[_REMOTE] = address


def remote_of(request: web.Request) -> str:
    """The address of the client of a request; empty if it has none."""
    return str(request.get(_REMOTE) or request.remote or "")


def client_name(request: web.Request) -> str:
    """The name under which rate limits count this request: its token's, else its address or network."""
    return Auth.client_name(request.get(TOKEN_KEY), remote_of(request))


AUTH = web.AppKey("auth", Auth)
