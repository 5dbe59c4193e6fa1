"""A connection between two replicas: frames and records in, bytes out, and the proof of the secret on both sides.

The first frames are awaited one by one (`frame`), then a callback gets everything (`receive`).
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from turtlemq.replica import frames
from turtlemq.replica.frames import PROTOCOL, BadPeer, Challenge, Frame, Parser, Proof, Refused, is_proof, proof
from turtlemq.replica.records import Record
from turtlemq.replica.stream import Entry

T = TypeVar("T")
Items = Sequence[Record | Frame]
SHAKE_S = 5  # time for a peer to prove that it knows the secret
_WRITE_BYTES_MAX = 4 << 20  # that wait in a connection before no more are given to it


@dataclass(frozen=True, slots=True)
class PeerTls:
    """TLS of a replica that accepts connections, and of one that makes them; None: connections are not encrypted."""

    accepts: ssl.SSLContext | None = None
    calls: ssl.SSLContext | None = None


PLAIN = PeerTls()


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of a replica among others, the secret that they share, and the encryption of their connections."""

    cluster: str
    shard: int
    node: str
    secret: bytes
    tls: PeerTls = PLAIN


class Turned(BadPeer):
    """One side has refused the other, with a reason that an operator has to look at."""

    def __init__(self, frame: Refused) -> None:
        super().__init__(frame.why)
        self.frame = frame


class Link(asyncio.Protocol):
    """One side of a connection. `closed` is done, with the reason, when it has ended."""

    def __init__(self, resumed: Callable[[], None] = lambda: None) -> None:
        self.parser = Parser()
        self.paused = False  # the peer does not read as fast as this side writes
        self.heard_s = 0.0  # when the last bytes came, by the loop's clock
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self._resumed = resumed
        self._items: deque[Record | Frame] = deque()
        self._came = asyncio.Event()
        self._received: Callable[[Items], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self.peer = ""  # the address of the other side, for the log

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_BYTES_MAX)
        if address := transport.get_extra_info("peername"):
            self.peer = f"{address[0]}:{address[1]}"
        self.heard_s = self._loop.time()
        if self._why:  # closed before it was made
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        try:
            items = self.parser.feed(data)
        except BadPeer as error:
            self.close(str(error))
            return
        if self._received is not None:
            self._received(items)
        else:
            self._items.extend(items)
            self._came.set()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(self._why or ("the connection was closed" if exc is None else str(exc)))
        self._came.set()

    # Called by its owner

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reading(self) -> bool:
        return self._transport is not None and self._transport.is_reading()

    async def frame(self, kind: type[T]) -> T:
        """The next frame, which must be of this kind. Raises `Turned` if the other side refuses, and `BadPeer`."""
        while not self._items:
            if self.closed.done():
                raise BadPeer(self.closed.result())
            self._came.clear()
            await self._came.wait()
        item = self._items.popleft()
        if isinstance(item, Refused):
            raise Turned(item)
        if not isinstance(item, kind):
            raise BadPeer(f"{type(item).__name__} came, {kind.__name__} was expected")
        return item

    def receive(self, received: Callable[[Items], None]) -> None:
        """From now on, give all records and frames to this function."""
        self._received = received
        if self._items:
            received(list(self._items))
            self._items.clear()

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode(frame))

    def send_records(self, entries: Sequence[Entry]) -> None:
        if self._transport is not None:
            self._transport.writelines([part for entry in entries for part in entry[1:4] if part])

    def pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def close(self, why: str, *, at_once: bool = False) -> None:
        """End the connection: when everything is sent, or at once."""
        self._why = self._why or why
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()


async def prove_to_leader(link: Link, me: Identity) -> None:
    """The standby's side of the proof. Raises `Turned` if the leader does not know the secret, or refuses, and `BadPeer`."""
    own = secrets.token_hex(16)
    link.send(Challenge(PROTOCOL, me.cluster, own))
    leader = await link.frame(Challenge)
    if not is_proof(leader.proof, proof(me.secret, "leader", me.cluster, leader.nonce, own)):
        link.send(Refused("its secret of the cluster is another one: secret_file must be equal on all nodes."))
        why = f"{link.peer} does not know the secret of cluster {me.cluster!r}: secret_file must be equal on all nodes"
        raise Turned(Refused(why))
    link.parser.trusted = True
    link.send(Proof(proof(me.secret, "standby", me.cluster, own, leader.nonce)))


async def prove_to_standby(link: Link, me: Identity) -> None:
    """The leader's side of the proof. Raises `BadPeer` if the standby is none of this cluster; it was told why."""
    first = await link.frame(Challenge)
    if first.protocol != PROTOCOL:
        raise _refuse(link, f"protocol {first.protocol} is not spoken here, but {PROTOCOL}. Run the same version on all nodes.")
    if first.cluster != me.cluster:
        raise _refuse(link, f"this node belongs to cluster {me.cluster!r}, not to {first.cluster!r}. Correct name or address.")
    own = secrets.token_hex(16)
    link.send(Challenge(PROTOCOL, me.cluster, own, proof(me.secret, "leader", me.cluster, own, first.nonce)))
    answer = await link.frame(Proof)
    if not is_proof(answer.proof, proof(me.secret, "standby", me.cluster, first.nonce, own)):
        raise _refuse(link, "the secret of the cluster is another one here: secret_file must be equal on all nodes.")
    link.parser.trusted = True


def _refuse(link: Link, why: str) -> BadPeer:
    link.send(Refused(why))
    return BadPeer(why)
