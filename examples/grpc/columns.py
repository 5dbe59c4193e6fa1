"""The native gRPC service in Python: a producer of batches as columns, and a subscriber with credit and lists of acks.

It needs grpcio, and a server with a gRPC port:

    python examples/grpc/columns.py 127.0.0.1:8879 produce orders 5
    python examples/grpc/columns.py 127.0.0.1:8879 consume orders 5

Other programs make the message types with protoc from `turtlemq/server/grpc/proto/turtlemq/v1/queue.proto`; here they come from
the installed server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from turtlemq.server.grpc.messages import message

PublishRequest, PublishReply, SubscribeRequest, SubscribeReply = (
    message(f"turtlemq.v1.{name}") for name in ("PublishRequest", "PublishReply", "SubscribeRequest", "SubscribeReply")
)
CREDIT = 100  # deliveries in hand, at most
TOKEN = os.environ.get("TURTLEMQ_TOKEN")
METADATA = [("authorization", f"Bearer {TOKEN}")] if TOKEN else []


def produce(channel: grpc.Channel, topic: str, count: int) -> None:
    """Publish orders in batches of two, due in half a second. Ids of their own make a repetition harmless."""
    orders = range(1, count + 1)
    requests = [
        PublishRequest(
            topic=topic,
            number=first,
            batch={
                "bodies": [b'{"close": %d}' % n for n in orders[first : first + 2]],
                "ids": [f"order-{n}" for n in orders[first : first + 2]],
                "delay_ms": [500],  # one value: for all
                "flags": [4],  # the bodies are JSON text
            },
        )
        for first in range(0, count, 2)
    ]
    method = "/turtlemq.v1.Queue/PublishStream"
    publish = channel.stream_stream(method, PublishRequest.SerializeToString, PublishReply.FromString)
    for reply in publish(iter(requests), metadata=METADATA, wait_for_ready=True):
        if reply.HasField("error"):
            sys.exit(f"batch {reply.number}: {reply.error.code}: {reply.error.message}")
        print(f"batch {reply.number}: {len(reply.ids)} stored, {len(reply.duplicates)} known before", flush=True)


def consume(channel: grpc.Channel, topic: str, count: int) -> None:
    """Handle so many messages: acknowledge each delivery as one list, and give as much credit again."""
    outgoing: SimpleQueue[Any] = SimpleQueue()
    outgoing.put(SubscribeRequest(open={"topics": [topic], "client": "columns.py", "extend": True}))
    outgoing.put(SubscribeRequest(credit={"messages": CREDIT}))
    method = "/turtlemq.v1.Queue/Subscribe"
    subscribe = channel.stream_stream(method, SubscribeRequest.SerializeToString, SubscribeReply.FromString)
    left = count
    for reply in subscribe(_messages(outgoing), metadata=METADATA, wait_for_ready=True):
        if reply.HasField("deliveries"):
            batch, attempts = reply.deliveries.batch, list(reply.deliveries.attempts)
            if len(attempts) == 1:  # one value: for all
                attempts *= len(batch.bodies)
            for id_, body, attempt in zip(batch.ids, batch.bodies, attempts, strict=True):
                print(f"{id_}, attempt {attempt}: {body.decode()}", flush=True)
            outgoing.put(SubscribeRequest(acks={"topic": reply.deliveries.topic, "ids": batch.ids}))
            outgoing.put(SubscribeRequest(credit={"messages": len(batch.ids)}))
        elif reply.HasField("acked"):
            left -= reply.acked.acked
            if left <= 0:
                outgoing.put(None)  # half-close: the server ends the stream
        elif reply.HasField("error"):
            print(f"{reply.error.topic}: {reply.error.code}: {reply.error.message}", file=sys.stderr)


def _messages(outgoing: SimpleQueue[Any]) -> Iterator[Any]:
    """Everything that the client sends, until None."""
    while (one := outgoing.get()) is not None:
        yield one


def main(target: str, command: str, topic: str, count: str) -> None:
    """Run one of the two."""
    with grpc.insecure_channel(target) as channel:
        {"produce": produce, "consume": consume}[command](channel, topic, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
