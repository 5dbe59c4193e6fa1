"""The client: put messages that wait, and handle them when they are due.

    from turtlemq.client import Client, Consumer, Producer

    with Producer("orders") as producer:
        producer.put({"close": 17}, id="order-17", delay=1800)

    Consumer("orders", lambda message: print(message.body)).run()

`AsyncClient`, `AsyncProducer` and `AsyncConsumer` are the same for asyncio; they need aiohttp, which is loaded only for them.
See docs/CLIENT.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turtlemq.client import errors
from turtlemq.client.consumer import Consumer
from turtlemq.client.consumer_state import ConsumerOptions, Retry
from turtlemq.client.dedup import Dedup
from turtlemq.client.errors import ClientError
from turtlemq.client.options import NewMessage, new_id
from turtlemq.client.producer import Producer, Put
from turtlemq.client.sync import Client
from turtlemq.client.wire import Message

if TYPE_CHECKING:
    from turtlemq.client.aio import AsyncClient
    from turtlemq.client.aio_workers import AsyncConsumer, AsyncProducer, AsyncPut

_ASYNC = ("AsyncClient", "AsyncConsumer", "AsyncProducer", "AsyncPut")  # loaded when they are asked for

__all__ = [
    "Client",
    "Producer",
    "Consumer",
    "AsyncClient",
    "AsyncProducer",
    "AsyncConsumer",
    "AsyncPut",
    "Message",
    "NewMessage",
    "Put",
    "Retry",
    "ConsumerOptions",
    "Dedup",
    "ClientError",
    "errors",
    "new_id",
]


def __getattr__(name: str) -> Any:
    if name in _ASYNC:
        from turtlemq.client import aio_workers

        return getattr(aio_workers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
