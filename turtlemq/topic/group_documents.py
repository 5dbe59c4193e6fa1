"""Documents for one group alone: sleeping retries in the Index, and dead letters in theirs.

Both keep the body and the fields of the producer's message. `meta` holds the Broker's view of it: attempt, the producer's due
time, error, ready offset and epoch of the group, and its last attempts. Their id is group/id, which no producer can use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bson.int64 import Int64

from turtlemq.attempts import TEXTS_BYTES_MAX, encode
from turtlemq.broker.failures import EndedDelivery
from turtlemq.index.columns import UNHASHED, Columns
from turtlemq.message_fields import optional_of
from turtlemq.segment import format as f

_NONE: Mapping[int, f.Document] = MappingProxyType({})


def retry_columns(
    ended: Sequence[EndedDelivery], attempts: Sequence[int], renewed: bool = False, older: Mapping[int, f.Document] = _NONE
) -> Columns:
    """Retries that sleep until `when_ms`, one batch: all are stored or none. `renewed`: their expiry is a new one and
    applies to their next delivery, see `delivery.first_attempt`. `older`: by index, the versions that they replace."""
    return _columns(ended, attempts, older, "rescheduled" if older else "retried", {"renewed": True} if renewed else {})


def letter_columns(ended: Sequence[EndedDelivery], older: Mapping[int, f.Document]) -> Columns:
    """Dead letters of messages that died at `when_ms`, one batch. `older`: by index, the letters that they replace."""
    return _columns(ended, [e.attempt for e in ended], older, "appended", {})


def _columns(
    ended: Sequence[EndedDelivery],
    attempts: Sequence[int],
    older: Mapping[int, f.Document],
    purpose: str,
    noted: dict[str, Any],
) -> Columns:
    ids = [f"{e.group}/{e.id}" for e in ended]
    keep = f.USER_FLAGS | f.OPTIONAL
    flags = [e.document.flags & keep | f.META | f.CONTINUES for e in ended]
    flags[-1] &= ~f.CONTINUES
    extras = []
    for i, (e, attempt) in enumerate(zip(ended, attempts, strict=True)):
        meta: dict[str, Any] = {"attempt": attempt, "due": Int64(e.due_ms), "error": e.error}
        meta |= {"offset": Int64(e.offset), "epoch": Int64(e.epoch), **noted}
        meta |= {"attempts": encode(e.attempts, TEXTS_BYTES_MAX)} if e.attempts else {}
        of = (older[i].seq, older[i].due_ms) if i in older else None
        flags[i] |= f.REPLACES if i in older else 0
        extras.append(f.extra_elements(of, e.document.arrived, None, meta, **optional_of(e.document)))
    return Columns(
        ids=[id_.encode() for id_ in ids],
        bodies=[e.document.body for e in ended],
        due_ms=[e.when_ms for e in ended],
        ttr_ms=[e.document.ttr_ms for e in ended],
        flags=flags,
        extras=extras,
        hashes=UNHASHED,
        ends=[(document.seq, document.due_ms) for document in older.values()],
        purpose=purpose,
    )
