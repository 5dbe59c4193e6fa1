"""A gRPC client with grpcio: it schedules messages, acknowledges deliveries, and connects again after each end of its stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from turtlemq.server.grpc.messages import message

ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")
AGAIN_S = 0.05  # after the end of a stream


class Worker:
    """Schedules a message every few milliseconds until `calm`, and acknowledges deliveries until `end`."""

    def __init__(self, target: str, name: str, pause_s: float = 0.005) -> None:
        self.stored, self.delivered, self.errors = set[str](), set[str](), list[str]()
        self.ends: list[grpc.StatusCode] = []  # of the streams
        self.drains = 0
        self._target, self._name, self._pause_s = target, name, pause_s
        self._sent = dict[str, None]()  # not stored yet, as far as this client knows
        self._calm = self._over = False
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=self._receive), threading.Thread(target=self._schedule)]
        for thread in self._threads:
            thread.start()

    def calm(self) -> None:
        """Schedule nothing more."""
        self._calm = True

    @property
    def is_settled(self) -> bool:
        """Whether all that was sent is stored."""
        return self._calm and not self._sent

    def end(self) -> None:
        self._calm = self._over = True
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join()

    def _schedule(self) -> None:
        n = 0
        while not self._calm:
            id_, n = f"{self._name}-{n}", n + 1
            self._sent[id_] = None
            self._outgoing.put(_schedule(id_))
            time.sleep(self._pause_s)

    def _receive(self) -> None:
        while not self._over:
            outgoing = self._outgoing = SimpleQueue()
            outgoing.put(ClientMessage(register={"route_key": "t", "client": self._name}))
            for id_ in list(self._sent):  # perhaps for the second time: an id is stored once
                outgoing.put(_schedule(id_))
            with grpc.insecure_channel(self._target) as channel:
                connect = channel.stream_stream(
                    "/delay.DelayScheduler/Connect", ClientMessage.SerializeToString, ServerMessage.FromString
                )
                call = connect(_all(outgoing), wait_for_ready=True)
                try:
                    for answer in call:
                        self._take(answer)
                except grpc.RpcError as error:
                    self.ends.append(error.code())
                outgoing.put(None)
            time.sleep(AGAIN_S)

    def _take(self, answer: Any) -> None:
        kind = answer.WhichOneof("message")
        if kind == "delivery":
            self.delivered.add(answer.delivery.id)
            self._outgoing.put(ClientMessage(ack={"id": answer.delivery.id}))
        elif kind == "ack":
            self.stored.add(answer.ack.id)
            self._sent.pop(answer.ack.id, None)
        elif kind == "error" and answer.error.code != "UNKNOWN_MESSAGE":  # which an ack after a failover may be
            self.errors.append(f"{answer.error.code} {answer.error.message}")
        elif kind == "drain":
            self.drains += 1


def _schedule(id_: str) -> Any:
    return ClientMessage(schedule={"id": id_, "route_key": "t", "delay_ms": 300, "payload": b"x"})


def _all(outgoing: SimpleQueue[Any]) -> Iterator[Any]:
    while (one := outgoing.get()) is not None:
        yield one
