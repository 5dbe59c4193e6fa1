"""Callbacks as a whole: registering endpoints, their challenges and heartbeats, and the deliveries of all groups.

Clients with a ttl are kept in memory: after a restart they learn from their heartbeat that they must register again. Endpoints
without one are kept in the folder of their topic, in a file that only the server may read; in a cluster the copies have it, too,
and only the leader delivers.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec
from aiohttp import web

from turtlemq.engine import Engine
from turtlemq.errors import Conflict, InvalidArgument, TurtleError
from turtlemq.server import logs
from turtlemq.server.clock import now_ms
from turtlemq.server.config import Config
from turtlemq.server.metrics.meter import PushFigures
from turtlemq.server.push import signature
from turtlemq.server.push.delivery import GroupDelivery
from turtlemq.server.push.endpoint import Endpoint, Stored, Terms, file_of, made, read_file
from turtlemq.server.push.hosts import PushHosts, Refused
from turtlemq.server.push.policy import OUTCOMES, Verdict
from turtlemq.server.push.sender import NoAnswer, Sender, Unreachable, is_own_address
from turtlemq.server.service import Service
from turtlemq.storage import names

LOOK_S = 1.0  # between two looks for clients without a heartbeat
CHALLENGE_S = 0.2, 60.0  # before a challenge is repeated, at first and at most
CHALLENGE_BYTES = 24
ANSWERS_S = 1.5  # time for answers to callbacks under way, once the server stops


class Push:
    """All callbacks of a server."""

    def __init__(self, service: Service, config: Config, sender: Sender | None = None) -> None:
        self.figures = PushFigures(OUTCOMES, self.breakers_open)
        self.timeout_s = config.push_timeout_s
        self._service, self._most = service, config.push_connections
        self._sender = sender or Sender(PushHosts(config.push_hosts, is_own_address, lambda: own_ports(service, config)))
        self._groups: dict[tuple[str, str], GroupDelivery] = {}
        self._under_way = 0
        self._challenges: dict[Endpoint, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        service.on_start = self._start
        service.on_drain.append(self._drain)
        service.meter.push = self.figures

    # The life of the server

    def _start(self) -> None:
        """The engine is open, and this process serves: deliver to the endpoints of all topics."""
        for topic in self._service.engine.topics:
            for stored in self._read(topic):
                self._add(made(topic, stored))
        self._looking = asyncio.get_running_loop().create_task(self._look())

    def _drain(self) -> None:
        """Fetch nothing more. Single nodes let deliveries under way come to their end; leaders of a cluster must not, for the
        next leader may deliver already."""
        for task in [*self._challenges.values(), self._looking]:
            if task is not None:
                task.cancel()
        for delivery in self._groups.values():
            delivery.drain()
        if self._service.lead is not None:
            self._close()

    async def end(self, _: web.Application) -> None:
        """The server stops: wait a moment for answers, give back the other messages, and end all connections."""
        end = asyncio.get_running_loop().time() + ANSWERS_S
        while self._under_way and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - once in the life of a process
            await asyncio.sleep(0.01)
        self._close()
        await self._sender.close()

    def _close(self) -> None:
        for delivery in self._groups.values():
            delivery.stop()
        self._groups.clear()

    # Clients

    async def register(self, topic: str, group: str, terms: Terms, secret: str | None) -> Endpoint:
        """Register a URL. Raises `InvalidArgument` if it is not allowed, `Conflict` if an endpoint has this name."""
        secret = signature.secret_of(secrets.token_bytes(signature.SECRET_BYTES)) if secret is None else secret
        signature.key_of(secret)
        await self._sender.check(terms.url)
        endpoint = made(topic, Stored(group, terms.name, terms, secret, now_ms()))
        endpoint.beat_ms = endpoint.since_ms
        for other in self._service.clients.of_group(topic, group):
            if other.client == terms.name:
                if not isinstance(other, Endpoint) or other.is_durable or endpoint.is_durable:
                    raise Conflict(f"group {group!r} has a client {terms.name!r} already; delete it first")
                self.remove(other)  # the client was started anew
        if endpoint.is_durable:
            self._write(topic, [*self._durable(topic), endpoint])
        self._add(endpoint)
        return endpoint

    def _add(self, endpoint: Endpoint) -> None:
        self._service.clients.add(endpoint)
        endpoint.removed = lambda: self._forget(endpoint)  # type: ignore[method-assign]
        key = endpoint.topic, endpoint.group
        delivery = self._groups.get(key)
        if delivery is None:
            delivery = self._groups[key] = GroupDelivery(*key, self._service, self._sender, self)
            delivery.start()
        delivery.endpoints.append(endpoint)
        if endpoint.verified:
            delivery.changed()
        else:
            self._challenge(endpoint)

    def endpoint(self, topic: str, group: str, client: str) -> Endpoint:
        """A client with a URL. Raises `UnknownClient`, or `InvalidArgument` for a stream."""
        found = self._service.clients.get(topic, group, client)
        if not isinstance(found, Endpoint):
            raise InvalidArgument(f"client {client!r} is a stream: it says everything over its own connection")
        return found

    def beat(self, endpoint: Endpoint, free: int | None, paused: bool | None) -> None:
        """A heartbeat. `paused`: deliveries stop, or begin again."""
        endpoint.beat(now_ms(), free)
        if not endpoint.verified and endpoint not in self._challenges:
            self._challenge(endpoint)
        if paused is not None and paused != endpoint.paused:
            endpoint.paused = paused
            endpoint.refresh()
            self._save(endpoint)
            self._delivery(endpoint).changed()
        self._delivery(endpoint).wake()

    def rotate(self, endpoint: Endpoint, secret: str | None, overlap_s: int) -> str:
        """Sign with another secret. Returns it."""
        secret = signature.secret_of(secrets.token_bytes(signature.SECRET_BYTES)) if secret is None else secret
        signature.key_of(secret)
        endpoint.rotate(secret, now_ms() + 1000 * overlap_s)
        self._save(endpoint)
        return secret

    def remove(self, endpoint: Endpoint) -> None:
        """Delete a client. Deliveries under way come to their end."""
        if endpoint.is_durable:
            self._write(endpoint.topic, [other for other in self._durable(endpoint.topic) if other is not endpoint])
        self._service.clients.remove(endpoint)
        self._forget(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        endpoint.is_removed = True
        challenge = self._challenges.pop(endpoint, None)
        if challenge is not None:
            challenge.cancel()
        delivery = self._groups.get((endpoint.topic, endpoint.group))
        if delivery is None:
            return
        if endpoint in delivery.endpoints:
            delivery.endpoints.remove(endpoint)
        delivery.changed()

    def _delivery(self, endpoint: Endpoint) -> GroupDelivery:
        return self._groups[endpoint.topic, endpoint.group]

    # Heartbeats

    async def _look(self) -> None:
        """Remove clients whose heartbeats stopped; their messages go to others at once."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._drop_idle()
            now = now_ms()
            for client in list(self._service.clients):
                if isinstance(client, Endpoint) and not client.is_durable and now - client.beat_ms > 1000 * client.terms.ttl:
                    self._service.clients.beats_missed += 1
                    logs.info("client_gone", topic=client.topic, group=client.group, client=client.client)
                    delivery = self._delivery(client)
                    self.remove(client)
                    delivery.forsake(client)

    def _drop_idle(self) -> None:
        for key, delivery in list(self._groups.items()):
            if delivery.is_idle:
                delivery.drain()
                del self._groups[key]

    # The challenge

    def _challenge(self, endpoint: Endpoint) -> None:
        task = asyncio.get_running_loop().create_task(self._challenged(endpoint))
        self._challenges[endpoint] = task
        task.add_done_callback(lambda _: self._challenges.pop(endpoint, None))

    async def _challenged(self, endpoint: Endpoint) -> None:
        """Ask a new endpoint until it answers: only then is it sent messages."""
        pause_s, longest_s = CHALLENGE_S
        while not await self._answers(endpoint):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        endpoint.verified = True
        endpoint.last_error = ""
        endpoint.refresh()
        self._try_save(endpoint)
        self._delivery(endpoint).changed()

    async def _answers(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint answers with the challenge, which shows that it is willing to get messages of this server."""
        challenge, now = secrets.token_urlsafe(CHALLENGE_BYTES), now_ms()
        body = msgspec.json.encode({"type": "turtlemq.challenge", "challenge": challenge})
        headers = {
            "content-type": "application/json",
            "turtlemq-topic": endpoint.topic,
            "turtlemq-group": endpoint.group,
            "turtlemq-challenge": challenge,
            **signature.signed_fields(endpoint.secrets(now), f"challenge:{challenge}", now // 1000, body),
        }
        try:
            answer = await self._sender.post(endpoint.terms.url, headers, body, endpoint.terms.timeout)
        except (Unreachable, NoAnswer, Refused) as error:
            endpoint.last_error = str(error)
            return False
        if 200 <= answer.status < 300 and challenge.encode() in answer.body:
            return True
        endpoint.last_error = f"HTTP {answer.status} to the challenge, without it in the body"
        return False

    # Files

    def _durable(self, topic: str) -> list[Endpoint]:
        clients = self._service.clients.of_topic(topic)
        return [client for client in clients if isinstance(client, Endpoint) and client.is_durable]

    def _save(self, endpoint: Endpoint) -> None:
        if endpoint.is_durable:
            self._write(endpoint.topic, self._durable(endpoint.topic))

    def _try_save(self, endpoint: Endpoint) -> None:
        """Save a change that no request waits for. If it is lost, the endpoint is challenged again, or told off again."""
        try:
            self._save(endpoint)
        except (TurtleError, OSError) as error:
            logs.warning("endpoints_not_saved", topic=endpoint.topic, error=error)

    def _write(self, topic: str, endpoints: list[Endpoint]) -> None:
        engine = self._service.engine
        engine.topic(topic, create=True)
        engine.door.replace(_path(engine, topic), file_of(endpoints), mode=0o600)

    def _read(self, topic: str) -> list[Stored]:
        engine = self._service.engine
        path = _path(engine, topic)
        if not engine.door.exists(path):
            return []
        try:
            return read_file(engine.door.read_all(path))
        except (msgspec.MsgspecError, OSError) as error:
            logs.error("endpoints_unreadable", topic=topic, error=error)
            return []

    # Slots of deliveries, for all groups together

    def free(self) -> int:
        """How many more deliveries may be under way."""
        return self._most - self._under_way

    def begun(self) -> None:
        """A delivery begins."""
        self._under_way += 1

    def ended(self, verdict: Verdict | None, seconds: float) -> None:
        """A delivery ended."""
        was_full = self._under_way >= self._most
        self._under_way -= 1
        if verdict is not None:
            self.figures.outcomes[verdict.outcome] += 1
            self.figures.seconds.add(seconds)
        if was_full:
            for delivery in self._groups.values():
                delivery.wake()

    def learned(self, endpoint: Endpoint) -> None:
        """An endpoint has another state, perhaps: one that asked for no more messages stays so after a restart."""
        if endpoint.paused and endpoint.is_durable and not endpoint.is_removed and self._service.serving:
            self._try_save(endpoint)

    def breakers_open(self) -> int:
        """How many endpoints rest, or are being probed."""
        return sum(endpoint.breaker.is_open for delivery in self._groups.values() for endpoint in delivery.endpoints)


def _path(engine: Engine, topic: str) -> Path:
    return engine.root / names.TOPICS / topic / names.ENDPOINTS


def own_ports(service: Service, config: Config) -> frozenset[int]:
    """Ports of this server, to which no callback goes: a message would come back as a request of the server itself."""
    peer = config.cluster.peer.rpartition(":")[2]
    return service.ports | ({int(peer)} if peer.isdigit() else set())
