"""kill -9 of a real server under grpcio clients of `turtlemq.v1.Queue`: no answered publish is lost, no answered ack undone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from tests.harness.cluster_process import eventually
from tests.harness.grpc_process import grpc_running
from turtlemq.server.grpc.messages import message

PublishRequest, PublishReply, SubscribeRequest, SubscribeReply = (
    message(f"turtlemq.v1.{name}") for name in ("PublishRequest", "PublishReply", "SubscribeRequest", "SubscribeReply")
)
LIVES, WORK = 3, 300  # kills of one folder; messages stored, and settled, before each
BATCH, UNANSWERED, CREDIT = 7, 5, 100
LEASE_MS = 1_000  # deliveries of a killed server come again soon; an open stream extends its leases


class Ledger:
    """The answers of the server, over all its lives, and each one that was broken."""

    def __init__(self) -> None:
        self.stored, self.settled = set[str](), set[str]()
        self.acked = set[str]()  # without an answer so far: settled or not
        self.faults = list[str]()

    def has(self, stored: int, settled: int) -> bool:
        """Whether so many were stored and settled, or something is wrong."""
        return bool(self.faults) or (len(self.stored) >= stored and len(self.settled) >= settled)


class Stream(threading.Thread):
    """One stream of a client, from its first request until the server is gone, or the client has closed it."""

    def __init__(self, port: int, method: str, kinds: tuple[Any, Any], take: Callable[[Any], object], ledger: Ledger) -> None:
        super().__init__()
        self.outgoing: SimpleQueue[Any] = SimpleQueue()
        self._port, self._method, self._kinds, self._take, self._ledger = port, method, kinds, take, ledger

    def run(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            asked, answered = self._kinds
            begin = channel.stream_stream(f"/turtlemq.v1.Queue/{self._method}", asked.SerializeToString, answered.FromString)
            try:
                for reply in begin(self._requests(), wait_for_ready=True):
                    self._take(reply)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    self._ledger.faults.append(str(error))
            except Exception as error:
                self._ledger.faults.append(repr(error))
                raise
        self.outgoing.put(None)

    def _requests(self) -> Iterator[Any]:
        while (one := self.outgoing.get()) is not None:
            yield one


def publisher(port: int, name: str, ledger: Ledger) -> Stream:
    """Publishes batches, a few of them without an answer so far."""
    sent, numbers = dict[int, list[str]](), iter(range(1_000_000))

    def more() -> None:
        number = next(numbers)
        ids = sent[number] = [f"{name}-{number}-{i}" for i in range(BATCH)]
        batch = {"ids": ids, "bodies": [id_.encode() for id_ in ids]}
        stream.outgoing.put(PublishRequest(topic="t", number=number, batch=batch))

    def take(reply: Any) -> None:
        if reply.HasField("error"):
            ledger.faults.append(f"{reply.error.code} {reply.error.message}")
        ledger.stored |= set(sent.pop(reply.number))
        more()

    stream = Stream(port, "PublishStream", (PublishRequest, PublishReply), take, ledger)
    for _ in range(UNANSWERED):
        more()
    return stream


def subscriber(port: int, ledger: Ledger) -> Stream:
    """Acknowledges all that comes. An answered ack is for ever: nothing of it may come later on this stream, or on another."""
    unanswered = deque[list[str]]()

    def take(reply: Any) -> None:
        if reply.HasField("deliveries"):
            batch = reply.deliveries.batch
            ids = list(batch.ids)
            ledger.faults += [f"{id_} came after its ack" for id_ in ids if id_ in ledger.settled]
            ledger.faults += [f"{id_} has {body!r}" for id_, body in zip(ids, batch.bodies, strict=True) if body != id_.encode()]
            ledger.acked |= set(ids)
            unanswered.append(ids)
            stream.outgoing.put(SubscribeRequest(acks={"topic": "t", "ids": ids}))
            stream.outgoing.put(SubscribeRequest(credit={"messages": len(ids)}))
        elif reply.HasField("acked"):
            ledger.settled |= set(unanswered.popleft()) - set(reply.acked.unknown)
        elif reply.HasField("error"):
            ledger.faults.append(f"{reply.error.code} {reply.error.message}")

    stream = Stream(port, "Subscribe", (SubscribeRequest, SubscribeReply), take, ledger)
    stream.outgoing.put(SubscribeRequest(open={"topics": ["t"], "ttr_ms": LEASE_MS, "extend": True}))
    stream.outgoing.put(SubscribeRequest(credit={"messages": CREDIT}))
    return stream


@pytest.mark.slow
def test_what_a_killed_server_answered_over_grpc_holds(tmp_path: Path) -> None:
    ledger = Ledger()
    for life in range(LIVES):
        with grpc_running(tmp_path / "data") as (server, port):
            server.ok("PUT", "/v1/topics/t", {})
            grown = partial(ledger.has, len(ledger.stored) + WORK, len(ledger.settled) + WORK)
            streams = [subscriber(port, ledger), *(publisher(port, f"{life}-{n}", ledger) for n in range(2))]
            for stream in streams:
                stream.start()
            eventually(grown)
            server.process.kill()
            server.process.wait()
            for stream in streams:
                stream.join()
        assert ledger.faults == []
    with grpc_running(tmp_path / "data") as (server, port):
        last = subscriber(port, ledger)
        last.start()
        eventually(lambda: ledger.faults or ledger.stored <= ledger.settled | ledger.acked)
        last.outgoing.put(None)
        last.join()
    assert ledger.faults == []
