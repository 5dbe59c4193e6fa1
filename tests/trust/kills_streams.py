"""Clients of a killed server over gRPC: streams of the Hyper Delay Server, beside clients over HTTP of the same topic.

A stream schedules, takes, acknowledges, fails, extends and cancels until the server is gone, and tells the judge. An ack has no
answer of its own: the answer to a beat that was sent behind it says that it was carried out, unless an error named its id before.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc

from tests.trust.kills_clients import FAR_S, LEASES_S
from tests.trust.kills_model import GROUPS, Model, Sent, body_of, now_ms
from tests.trust.model import Broken
from turtlemq.server.grpc.messages import message

STREAMS = 2
STREAM_FIGURES = ("scheduled on streams", "delivered on streams", "acknowledged on streams")
UNKNOWN = "UNKNOWN_MESSAGE"
ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")


@dataclass
class _Asked:
    """A schedule or a cancel without an answer: it is sent again on the next stream."""

    request: dict[str, Any]
    sent: Sent | None = None  # of a schedule
    is_far: bool = False


@dataclass
class _Acks:
    """Acks without a confirmation."""

    by_beat: dict[int, list[str]] = field(default_factory=dict)  # those that were sent before each beat
    ids: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)  # errors have named them


class StreamClient:
    """One client with a stream in one group. Its messages are its own: no other client cancels them."""

    def __init__(self, model: Model, name: str, seed: int) -> None:
        self.model, self.name, self.dice = model, name, random.Random(seed)
        self.group, self.ttr_ms = GROUPS[seed % len(GROUPS)], round(1000 * LEASES_S[-1])
        self.mine: list[str] = []  # sleepers far in the future
        self.asked: dict[str, _Asked] = {}  # by id
        self.count = self.beats = 0
        self.seen = Counter[str]()
        self.acks, self._new_acks = _Acks(), list[str]()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    def work(self, port: int) -> None:
        """Do this and that until the server is gone."""
        self._stream(port, registers=True, is_done=lambda: False)

    def come_back(self, port: int) -> None:
        """To a new server: send requests without an answer again, and wait for the answers."""
        self._stream(port, registers=False, is_done=lambda: not self.asked)
        if self.asked:
            raise Broken(f"{len(self.asked)} requests of stream {self.name} have no answer")

    def _stream(self, port: int, registers: bool, is_done: Callable[[], bool]) -> None:
        self._outgoing, self.acks, self._new_acks = SimpleQueue(), _Acks(), []
        if registers:
            self._send(register={"route_key": "t", "group": self.group, "ttr_ms": self.ttr_ms, "client": self.name})
        for one in self.asked.values():
            self._send(**one.request)
        self._beat()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            connect = channel.stream_stream("/delay.DelayScheduler/Connect")
            try:
                for data in connect(iter(self._outgoing.get, None), wait_for_ready=not registers):
                    self._take(ServerMessage.FromString(data), works=registers)
                    if is_done():
                        break
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise Broken(f"stream {self.name} ended: {error}") from None
            self._outgoing.put(None)

    def _send(self, **what: Any) -> None:
        self._outgoing.put(ClientMessage(**what).SerializeToString())

    def _beat(self) -> None:
        self.beats += 1
        self.acks.by_beat[self.beats], self._new_acks = self._new_acks, []
        self._send(beat={"number": self.beats})

    def _take(self, told: Any, works: bool) -> None:
        kind = told.WhichOneof("message")
        if kind == "delivery":
            self._delivered(told.delivery)
        elif kind == "ack":
            self._stored(told.ack)
        elif kind == "cancelled":
            self._cancelled(told.cancelled)
        elif kind == "error":
            if told.error.code != UNKNOWN:
                raise Broken(f"stream {self.name}: {told.error}")
            self.acks.unknown |= {told.error.id} & self.acks.ids  # others are of extends, of leases that are over
        elif kind == "beat":
            self._confirmed(told.beat.number)
            if works:
                self.dice.choice([self._schedule, self._schedule, self._cancel, self._idle])()
                self._beat()

    # Scheduling

    def _schedule(self) -> None:
        for _ in range(self.dice.choice([1, 1, 5, 20])):
            self.count += 1
            batch, delay = int(self.name) * 1_000_000 + self.count, self.dice.choice([0.0, 0.0, 0.02, 0.3, FAR_S])
            fields = {"id": f"{batch}-0", "route_key": "t", "payload": json.dumps(body_of(batch, 0)).encode()}
            with self.model.lock:
                due_ms = now_ms() + round(1000 * delay)
                sent = self.model.sent[batch] = Sent(1, due_ms)
            request = {"schedule": {**fields, "fire_at_epoch_ms": due_ms}}
            self.asked[f"{batch}-0"] = _Asked(request, sent, delay == FAR_S)
            self._send(**request)

    def _stored(self, ack: Any) -> None:
        one = self.asked.pop(ack.id)
        if one.sent is None:
            raise Broken(f"a cancel of {ack.id} was answered as a schedule")
        self.seen["scheduled on streams"] += 1
        with self.model.lock:
            one.sent.answered = True
            self.model.accepted([ack.id], one.sent, far=one.is_far)
        if one.is_far:
            self.mine.append(ack.id)

    def _cancel(self) -> None:
        """Cancel a sleeper, with a sure answer."""
        if not self.mine:
            return
        id_ = self.mine.pop(self.dice.randrange(len(self.mine)))
        with self.model.lock:
            self.model.cancel([id_], "maybe")
        request = {"cancel": {"id": id_, "route_key": "t"}}
        self.asked[id_] = _Asked(request)
        self._send(**request)

    def _cancelled(self, told: Any) -> None:
        self.asked.pop(told.id)
        if told.state not in ("cancelled", "unknown"):
            raise Broken(f"the sleeper {told.id} could not be cancelled: {told.state}")
        with self.model.lock:
            self.model.cancel([told.id], "yes")

    def _idle(self) -> None:
        """Only take."""

    # Deliveries

    def _delivered(self, one: Any) -> None:
        got_ms = now_ms()
        # The time of the reserve, from the lease: the message may have been under way for a while.
        asked_s = time.monotonic() - (got_ms - (one.lease_until_epoch_ms - self.ttr_ms) + 2) / 1000
        seen = {"id": one.id, "due_ms": one.fire_at_epoch_ms, "body": json.loads(one.payload), "attempt": one.attempt}
        with self.model.lock:
            self.model.delivered(self.group, seen, asked_s, got_ms)
        self.seen["delivered on streams"] += 1
        deed = self.dice.random()
        if deed < 0.03:
            self._send(extend={"ids": [one.id], "ttr_ms": 500, "route_key": "t"})
        if deed < 0.08 or one.id in self.acks.ids:  # its lease ends, or an earlier ack of it has no confirmation
            return
        is_good = self.dice.random() < 0.8
        if is_good:
            with self.model.lock:
                self.model.maybe_acked[self.group] |= {one.id} - self.model.acked[self.group].keys()
        self.acks.ids.add(one.id)
        self._new_acks.append(one.id if is_good else f"-{one.id}")
        self._send(ack={"id": one.id, "route_key": "t"} | ({} if is_good else {"failed": True, "error": "by chance"}))

    def _confirmed(self, number: int) -> None:
        """The server has answered a beat: all acks before it are done."""
        acks = self.acks.by_beat.pop(number)
        ids = {ack.removeprefix("-") for ack in acks}
        unknown = ids & self.acks.unknown
        good = [ack for ack in acks if ack in ids and ack not in unknown]
        with self.model.lock:
            self.model.settled(self.group, acks, {"acked": len(good), "unknown": sorted(unknown)})
            self.model.maybe_acked[self.group] -= unknown  # others have settled those, or will
        self.seen["acknowledged on streams"] += len(good)
        self.acks.ids -= ids
        self.acks.unknown -= unknown


def new_streams(model: Model, seed: int) -> list[StreamClient]:
    return [StreamClient(model, str(50 + number), seed * 100 + 50 + number) for number in range(STREAMS)]
