"""A consumer on a gRPC stream whose effect happens once for each message, although a message may be delivered twice.

`Dedup` writes the id of a message in the transaction of its effect. The ack follows the commit: a consumer that is killed between
the two gets the message again, and changes nothing. It connects again whenever its stream ends, as at a handover of a cluster.

    python examples/grpc/exactly_once.py 127.0.0.1:8879 orders.db

It needs grpcio and turtlemq-client. It ends once COUNT orders are closed, if the environment sets that.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from turtlemq.client import Dedup, Message
from turtlemq.server.grpc.messages import message

ClientMessage, ServerMessage = message("delay.ClientMessage"), message("delay.ServerMessage")
COUNT = int(os.environ.get("COUNT", "0"))


def messages(outgoing: SimpleQueue[Any]) -> Iterator[Any]:
    """Everything that the client sends, until None."""
    while (one := outgoing.get()) is not None:
        yield one


def close_order(database: sqlite3.Connection, delivery: Any) -> None:
    """The effect and the id, in one transaction."""
    told = Message(id=delivery.id, topic=delivery.route_key, group=delivery.group)
    with Dedup(database).once(told) as first:
        if first:
            database.execute("INSERT INTO closed VALUES (?)", (delivery.payload.decode(),))


def consume(target: str, database: sqlite3.Connection) -> None:
    """Handle the deliveries of one stream, until it ends."""
    outgoing: SimpleQueue[Any] = SimpleQueue()
    outgoing.put(ClientMessage(register={"route_key": "orders", "client": "exactly-once"}))
    with grpc.insecure_channel(target) as channel:
        method = "/delay.DelayScheduler/Connect"
        connect = channel.stream_stream(method, ClientMessage.SerializeToString, ServerMessage.FromString)
        try:
            for answer in connect(messages(outgoing), wait_for_ready=True):
                if answer.HasField("delivery"):
                    close_order(database, answer.delivery)
                    outgoing.put(ClientMessage(ack={"id": answer.delivery.id}))  # after the commit
                    if COUNT and database.execute("SELECT count(*) FROM closed").fetchone()[0] >= COUNT:
                        outgoing.put(None)
        finally:
            outgoing.put(None)


def main(target: str, file: str) -> None:
    """Consume until enough orders are closed."""
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE IF NOT EXISTS closed (number)")
    while True:
        try:
            consume(target, database)
        except grpc.RpcError as error:
            print("the stream has ended:", error, file=sys.stderr)
        if COUNT and database.execute("SELECT count(*) FROM closed").fetchone()[0] >= COUNT:
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
