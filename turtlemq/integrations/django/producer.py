"""Producer for Django: one client for the process, with the settings of TURTLEMQ. Puts at once, or when a transaction commits."""

from __future__ import annotations

import threading
from typing import Any, Unpack

from django import conf
from django.db import transaction

from turtlemq.client import Client, new_id
from turtlemq.client.outgoing import MessageFields

_lock = threading.Lock()
_client: Client | None = None


def client() -> Client:
    """The client of this process. `TURTLEMQ` in the settings has its arguments: url, token, cacert, timeout, try_timeout."""
    global _client
    with _lock:
        if _client is None:
            _client = Client(**getattr(conf.settings, "TURTLEMQ", {}))
        return _client


def put(
    topic: str,
    body: Any,
    *,
    id: str | None = None,  # noqa: A002 - the contract's word
    **fields: Unpack[MessageFields],
) -> str:
    """Store a message durably. Returns its id. Fields as of `Client.put`: delay or due, ttr, priority, expires, headers."""
    return client().put(topic, body, id=id, **fields)


def put_on_commit(
    topic: str,
    body: Any,
    *,
    id: str | None = None,  # noqa: A002 - the contract's word
    using: str | None = None,
    **fields: Unpack[MessageFields],
) -> str:
    """Store a message when the transaction has committed; at once, if there is none. Returns its id.

    A process that dies between the commit and the put has put nothing: see docs/INTEGRATIONS.md for the other order.
    """
    id_ = new_id() if id is None else id
    transaction.on_commit(lambda: put(topic, body, id=id_, **fields), using=using)
    return id_
