"""A stream of gRPC in Python: schedules a few messages, receives them when they are due, and acknowledges them.

It needs grpcio, and a server with a gRPC port: `python examples/grpc/stream.py 127.0.0.1:8879`. Other programs make the message
types with protoc from `turtlemq/server/grpc/proto/delay.proto`; here they come from the installed server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from turtlemq.server.grpc.messages import message

ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")
COUNT = 3


def messages(outgoing: SimpleQueue[Any]) -> Iterator[Any]:
    """Everything that the client sends, until None."""
    while (one := outgoing.get()) is not None:
        yield one


def main(target: str) -> None:
    """Schedule messages that are due in half a second, and handle them."""
    outgoing: SimpleQueue[Any] = SimpleQueue()
    outgoing.put(ClientMessage(register={"route_key": "reminders"}))
    for n in range(COUNT):
        due = time.time_ns() // 1_000_000 + 500
        outgoing.put(ClientMessage(schedule={"route_key": "reminders", "fire_at_epoch_ms": due, "payload": b"call %d" % n}))
    with grpc.insecure_channel(target) as channel:
        method = "/delay.DelayScheduler/Connect"
        connect = channel.stream_stream(method, ClientMessage.SerializeToString, ServerMessage.FromString)
        handled = 0
        for answer in connect(messages(outgoing), wait_for_ready=True):
            if answer.HasField("delivery"):
                print("due:", answer.delivery.payload.decode(), flush=True)
                outgoing.put(ClientMessage(ack={"id": answer.delivery.id}))
                handled += 1
                if handled == COUNT:
                    outgoing.put(None)  # half-close: the server ends the stream
            elif answer.HasField("error"):
                print("refused:", answer.error.code, answer.error.message, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8879")
