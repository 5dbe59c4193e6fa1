"""A client of etcd 3 through its JSON gateway: keys, transactions, leases and watches, over several endpoints.

Keys are text, values bytes. Reads are linearizable. A read goes to the next endpoint if one fails; a request that changes
something is sent once: if it may have arrived and no answer came, `InDoubt` is raised, and only a read can tell. Etcd 3.4
leaves zeros and false values out of its answers; a keepalive of a lease that has ended is a success without a TTL; a
transaction that names such a lease is refused as a whole (`Refused`).
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from turtlemq.errors import TurtleError, describe
from turtlemq.replica.cluster_state import KeyValue

_LEASE_GONE, _UNAUTHENTICATED, _UNAVAILABLE = 5, 16, 14  # codes of gRPC
_LINE_BYTES_MAX = 16 << 20  # of one message of a watch


class EtcdError(TurtleError):
    """The name server (etcd) failed a request."""


class Unreachable(EtcdError):
    """No endpoint of etcd can be reached. Nothing was changed."""


class InDoubt(EtcdError):
    """Etcd did not answer. The request may have been carried out, or may still be."""


class Refused(EtcdError):
    """Etcd refused the request. Nothing was changed."""


class LeaseGone(Refused):
    """The lease has ended, or was revoked."""


class Compacted(EtcdError):
    """The revision from which a watch should begin is no longer kept. Read the keys, and watch from there."""


class Found(NamedTuple):
    """The keys of a read, at one revision of etcd."""

    revision: int
    keys: list[KeyValue]


class Outcome(NamedTuple):
    """The answer to a transaction. `found`: the keys that it read because its comparisons failed."""

    succeeded: bool
    revision: int
    found: list[KeyValue]


class Changed(NamedTuple):
    """Changes that a watch has seen. A deleted key has no value, and create_revision 0."""

    revision: int
    keys: list[KeyValue]


Request = dict[str, Any]  # a part of a transaction, as the functions below make it


def mod_revision_is(key: str, revision: int) -> Request:
    """A comparison. Revision 0: the key does not exist."""
    return {"target": "MOD", "result": "EQUAL", "key": _encode(key), "mod_revision": str(revision)}


def create_revision_is(key: str, revision: int) -> Request:
    """A comparison. Revision 0: the key does not exist."""
    return {"target": "CREATE", "result": "EQUAL", "key": _encode(key), "create_revision": str(revision)}


def put(key: str, value: bytes, lease: int = 0) -> Request:
    """Set a key, and the lease on which it hangs."""
    return {"request_put": {"key": _encode(key), "value": base64.b64encode(value).decode(), "lease": str(lease)}}


def delete(key: str) -> Request:
    """Delete a key."""
    return {"request_delete_range": {"key": _encode(key)}}


def read(key: str, *, prefix: bool = False) -> Request:
    """Read a key, or all that begin so."""
    return {"request_range": _range(key, prefix)}


class Etcd:
    """A connection to etcd, for one event loop. Use as an asynchronous context manager, or call `close`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        if not endpoints:
            raise EtcdError("no endpoint of etcd is given")
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._at = 0  # the endpoint that answered last
        self._user, self._password, self._token = user, password, ""
        self._tls: ssl.SSLContext | bool = tls or True
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(read_bufsize=_LINE_BYTES_MAX)

    async def __aenter__(self) -> Etcd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    # Keys

    async def get(self, key: str, *, prefix: bool = False) -> Found:
        """A key, or all keys that begin so, as they are now."""
        answer = await self._ask("kv/range", _range(key, prefix), again=True)
        return Found(_revision(answer), _keys(answer))

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Set a key. Returns etcd's revision."""
        return _revision(await self._ask("kv/put", put(key, value, lease)["request_put"]))

    async def delete(self, key: str) -> bool:
        """Delete a key. False: it did not exist."""
        answer = await self._ask("kv/deleterange", {"key": _encode(key)})
        return int(answer.get("deleted", 0)) > 0

    async def transact(self, compares: Sequence[Request], then: Sequence[Request], otherwise: Sequence[Request] = ()) -> Outcome:
        """IF all comparisons hold THEN carry out these requests, ELSE those, in one step."""
        body = {"compare": list(compares), "success": list(then), "failure": list(otherwise)}
        answer = await self._ask("kv/txn", body)
        found = [key for one in answer.get("responses", ()) for key in _keys(one.get("response_range", {}))]
        return Outcome(bool(answer.get("succeeded")), _revision(answer), found)

    # Leases

    async def grant(self, ttl_s: int) -> int:
        """A new lease. Etcd may make its time longer, and ends it up to half a second late."""
        return int((await self._ask("lease/grant", {"TTL": str(ttl_s)}, again=True))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Begin the time of a lease anew. False: it has ended."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)}, again=True)
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease; keys that hang on it are deleted. One that has ended already is no error."""
        try:
            await self._ask("lease/revoke", {"ID": str(lease)}, again=True)
        except LeaseGone:
            return

    # Watches

    async def watch(self, key: str, from_revision: int, *, prefix: bool = False) -> AsyncIterator[Changed]:
        """Changes from a revision on, in order. Ends with an error when the connection does; then read, and watch anew."""
        body = {"create_request": {**_range(key, prefix), "start_revision": str(from_revision)}}
        await self._authenticate()
        url = f"{self._endpoints[self._at]}/v3/watch"
        silent = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        try:
            async with self._session.post(url, json=body, headers=self._headers(), ssl=self._tls, timeout=silent) as response:
                async for line in response.content:
                    yield _changed(_parsed(line))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._next_endpoint()
            raise Unreachable(f"the watch of {key!r} at {url} has ended: {describe(error)}") from error
        self._next_endpoint()
        raise Unreachable(f"the watch of {key!r} at {url} has ended")

    # Requests

    async def _ask(self, path: str, body: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
        """One request. `again`: carried out twice, it does no harm, so that each endpoint may be asked."""
        why: list[str] = []
        for _ in self._endpoints:
            endpoint = self._endpoints[self._at]
            try:
                await self._authenticate()
                return await self._post(path, body)
            except aiohttp.ClientConnectorError as error:
                why.append(f"{endpoint}: {error}")
            except (aiohttp.ClientError, TimeoutError, ValueError, InDoubt) as error:
                why.append(f"{endpoint}: {describe(error)}")
                if not again:
                    self._next_endpoint()
                    raise InDoubt(f"etcd did not answer {path}: {why[-1]}") from error
            self._next_endpoint()
        raise Unreachable(f"no endpoint of etcd answers {path}: {'; '.join(why)}")

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        for attempt in (1, 2):
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            url = f"{self._endpoints[self._at]}/v3/{path}"
            async with self._session.post(url, json=body, headers=self._headers(), ssl=self._tls, timeout=timeout) as response:
                text = await response.text()
            answer = _object(text)
            error = answer.get("error")
            if error is None:
                return answer
            code = answer.get("code")
            if attempt == 1 and self._user and (code == _UNAUTHENTICATED or "invalid auth token" in str(error)):
                self._token = ""  # tokens end, and etcd forgets them when it restarts
                await self._authenticate()
                continue
            _raise(path, code, str(answer.get("message") or error))
        raise Refused(f"etcd refused {path}: it does not accept the token that it gave")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    async def _authenticate(self) -> None:
        """Get a token for user and password, unless there is one."""
        if not self._user or self._token:
            return
        url = f"{self._endpoints[self._at]}/v3/auth/authenticate"
        body = {"name": self._user, "password": self._password}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with self._session.post(url, json=body, ssl=self._tls, timeout=timeout) as response:
            answer = _object(await response.text())
        if "token" not in answer:
            raise Refused(f"etcd does not accept user {self._user!r}: {answer.get('message') or answer.get('error')}")
        self._token = str(answer["token"])

    def _next_endpoint(self) -> None:
        self._at = (self._at + 1) % len(self._endpoints)


def _raise(path: str, code: object, message: str) -> None:
    if code == _LEASE_GONE:
        raise LeaseGone(f"etcd refused {path}: {message}")
    if code == _UNAVAILABLE or "timed out" in message or "leader changed" in message:
        raise InDoubt(f"etcd did not finish {path}: {message}")
    raise Refused(f"etcd refused {path}: {message}")


def _encode(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _range(key: str, prefix: bool) -> dict[str, str]:
    """A key, or all keys with this prefix: up to the key whose last byte is one higher."""
    if not prefix:
        return {"key": _encode(key)}
    data = key.encode()
    return {"key": _encode(key), "range_end": base64.b64encode(data[:-1] + bytes([data[-1] + 1])).decode()}


def _object(text: str) -> dict[str, Any]:
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise TypeError("the answer is no JSON object")
    return answer


def _parsed(line: bytes) -> dict[str, Any]:
    return _object(line.decode())


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer.get("header", {}).get("revision", 0))


def _keys(answer: Mapping[str, Any]) -> list[KeyValue]:
    return [_key(kv) for kv in answer.get("kvs", ())]


def _key(kv: Mapping[str, Any]) -> KeyValue:
    key, value = (base64.b64decode(kv.get(name, "")) for name in ("key", "value"))
    create, mod, lease = (int(kv.get(name, 0)) for name in ("create_revision", "mod_revision", "lease"))
    return KeyValue(key.decode(), value, create, mod, lease)


def _changed(message: Mapping[str, Any]) -> Changed:
    if "error" in message:
        raise Unreachable(f"the watch has ended: {message['error']}")
    result = message.get("result", {})
    if result.get("compact_revision"):
        raise Compacted
    if result.get("canceled"):
        raise Unreachable(f"etcd ended the watch: {result.get('cancel_reason', 'it does not say why')}")
    return Changed(_revision(result), [_key(event["kv"]) for event in result.get("events", ())])
