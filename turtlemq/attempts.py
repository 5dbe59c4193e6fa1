"""Attempts: the deliveries of a message to one group, with their outcomes, and their encoding in files. Pure.

The last `KEPT` ended attempts of a message go with it wherever it is: in memory while it is in flight or waits for a short
back-off (`Group.attempts`), in checkpoints, in sleeping retries, in dead letters, and in the event that settles it. So a lookup
of one message reads them at one place, and no journal is searched for them while the message goes on.

Encoded attempts are columns of packed int64, one item for each attempt, and `texts` with every outcome, consumer and error once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

KEPT = 16  # of a message in each group
ERROR_BYTES_MAX = 2_000  # of an error: its first line, and its end, where the last frames of a traceback stand
TEXTS_BYTES_MAX = (
    12 << 10
)  # of the texts of one message, nearly: a document has room for them beside the largest body and headers
_LINE_BYTES = 100  # of a text that finds no room
_CUT = " … "

ACKED = "acked"
FAILED = "failed"
EXPIRED = "expired"  # the lease ended without an answer
GIVEN_BACK = "given back"  # the delivery did not reach its consumer, and does not count
DEAD = "dead"  # it failed or expired, and was the last one

_NUMBERS = ("attempt", "reserved", "ended", "next", "outcome", "consumer", "error")  # names of the columns
_NEVER = -1  # as the next time: there is none
_INT64 = np.dtype("<i8")


class Attempt(NamedTuple):
    """One delivery of a message to a consumer."""

    attempt: int  # its number, from 1
    consumer: str
    reserved_ms: int
    ended_ms: int | None  # None: it is running
    outcome: str | None
    error: str
    next_ms: int | None  # when the next attempt was to come, as planned then

    def fields(self) -> dict[str, Any]:
        """All of it by name, as answers show it."""
        return self._asdict()

    def without_error(self) -> Attempt:
        """This attempt, for readers that may not see errors."""
        return self._replace(error="")


Attempts = tuple[Attempt, ...]  # oldest first


def latest(attempts: Iterable[Attempt]) -> Attempts:
    """The attempts that are kept: the last ones."""
    return tuple(attempts)[-KEPT:]


def shorten(error: str, limit: int = ERROR_BYTES_MAX) -> str:
    """An error of at most so many bytes: the beginning of its first line, and its end.

    >>> shorten("ValueError: no\\nframe 1\\nframe 2\\nframe 3", 32)
    'ValueError: no … frame 3'
    """
    data = error.encode()
    if len(data) <= limit:
        return error
    head = data.partition(b"\n")[0][: limit // 2]
    tail = data[len(data) - (limit - len(head) - len(_CUT.encode())) :]
    tail = tail.partition(b"\n")[2] or tail
    return head.decode(errors="ignore") + _CUT + tail.decode(errors="ignore")


def encode(attempts: Sequence[Attempt], limit: int | None = None) -> dict[str, Any]:
    """Attempts as fields of a BSON document. `limit`: of the bytes of their texts, nearly; those of the oldest are cut first."""
    texts: dict[str, int] = {}
    room = [limit]

    def number(text: str) -> int:
        if room[0] is not None and text not in texts:
            size = len(text.encode())
            if size > max(room[0], _LINE_BYTES):
                text = text.partition("\n")[0].encode()[:_LINE_BYTES].decode(errors="ignore")
            room[0] -= min(size, room[0])
        return texts.setdefault(text, len(texts))

    rows = [_row(one, number) for one in reversed(attempts)][::-1]
    columns = {name: np.array([row[i] for row in rows], _INT64).tobytes() for i, name in enumerate(_NUMBERS)}
    return columns | {"texts": list(texts)}


def _row(one: Attempt, number: Callable[[str], int]) -> tuple[int, ...]:
    next_ms, ended_ms = (_NEVER if at is None else at for at in (one.next_ms, one.ended_ms))
    return one.attempt, one.reserved_ms, ended_ms, next_ms, number(one.outcome or ""), number(one.consumer), number(one.error)


def decode(fields: Mapping[str, Any]) -> list[Attempt]:
    """The attempts that `encode` encoded."""
    texts = fields["texts"]
    columns = [np.frombuffer(fields[name], _INT64).tolist() for name in _NUMBERS]
    return [
        Attempt(number, texts[consumer], reserved, _time(ended), texts[outcome] or None, texts[error], _time(following))
        for number, reserved, ended, following, outcome, consumer, error in zip(*columns, strict=True)
    ]


def _time(at_ms: int) -> int | None:
    return None if at_ms == _NEVER else at_ms


def of_notes(meta: Mapping[str, Any]) -> Attempts:
    """The attempts in the notes of a sleeping retry or a dead letter; none in those of older versions."""
    return tuple(decode(meta["attempts"])) if "attempts" in meta else ()


# Attempts of many messages


def encode_many(by_key: Mapping[int, Attempts]) -> dict[str, Any]:
    """Attempts of several messages, by a number of each, as fields of a BSON document."""
    counts = [len(own) for own in by_key.values()]
    keys = {"of": np.array(list(by_key), _INT64).tobytes(), "counts": np.array(counts, _INT64).tobytes()}
    return keys | encode([one for own in by_key.values() for one in own])


def decode_many(fields: Mapping[str, Any]) -> dict[int, Attempts]:
    """The attempts that `encode_many` encoded."""
    keys, counts = (np.frombuffer(fields[name], _INT64).tolist() for name in ("of", "counts"))
    flat, by_key, at = decode(fields), dict[int, Attempts](), 0
    for key, count in zip(keys, counts, strict=True):
        by_key[key], at = tuple(flat[at : at + count]), at + count
    return by_key
