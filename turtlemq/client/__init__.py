"""The Python client: put messages that sleep until they are due, and consume them.

    from turtlemq.client import Client, Consumer, Producer

    with Producer("orders") as producer:
        producer.put({"close": 17}, id="order-17", delay=1800)

    Consumer("orders", lambda message: print(message.body)).run()

`AsyncClient`, `AsyncProducer` and `AsyncConsumer` do the same with asyncio. Each name is loaded at its first use, so that a
program which needs few of them starts faster. The protocol is pure code, which both shells run: `wire`, `outgoing` and `fetched`
(encoding), `http_answers`, `calls`, `sending` (retries), `batching`, `consumer_state` and `consumer_flows`. The shells are `sync`
with its `pool`, `producer`, `consumer`, and for asyncio the `aio` modules.
User guide: docs/CLIENT.md. Words: docs/GLOSSARY.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turtlemq.client import errors
from turtlemq.client.errors import ClientError

if TYPE_CHECKING:
    from turtlemq.client.aio import AsyncClient
    from turtlemq.client.aio_consumer import AsyncConsumer
    from turtlemq.client.aio_producer import AsyncProducer, AsyncPut
    from turtlemq.client.cancel import CancelToken
    from turtlemq.client.consumer import Consumer
    from turtlemq.client.consumer_state import ConsumerOptions, Retry
    from turtlemq.client.dedup import Dedup
    from turtlemq.client.fetched import Message
    from turtlemq.client.options import NewMessage, new_id
    from turtlemq.client.producer import Producer, Put
    from turtlemq.client.results import StoredId, StoredIds
    from turtlemq.client.sync import Client

_MODULES = {  # name: module, imported at the first use
    "AsyncClient": "aio",
    "AsyncConsumer": "aio_consumer",
    "AsyncProducer": "aio_producer",
    "AsyncPut": "aio_producer",
    "CancelToken": "cancel",
    "Client": "sync",
    "Consumer": "consumer",
    "ConsumerOptions": "consumer_state",
    "Dedup": "dedup",
    "Message": "fetched",
    "NewMessage": "options",
    "Producer": "producer",
    "Put": "producer",
    "Retry": "consumer_state",
    "StoredId": "results",
    "StoredIds": "results",
    "new_id": "options",
}

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
    "StoredId",
    "StoredIds",
    "Retry",
    "ConsumerOptions",
    "Dedup",
    "CancelToken",
    "ClientError",
    "errors",
    "new_id",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"turtlemq.client.{_MODULES[name]}"), name)
    return found
