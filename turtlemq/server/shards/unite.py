"""One answer out of those of a topic's partitions. Pure.

Counts are summed, lists are put behind one another, of times the earliest or latest counts. Pages of ordered rows are merged,
with a cursor that has one for each partition.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any, NamedTuple

import msgspec

from turtlemq.errors import InvalidArgument

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """The body for one partition, and the rows of the request that are in it."""

    partition: int
    rows: list[int]
    body: bytes


def united(rows: Sequence[Any], name: str = "") -> Any:
    """Answers of partitions as one: numbers are summed, lists joined, objects united field by field, and of anything else the
    first counts, but for the fields that `_CHOSEN` names.

    >>> united([{"acked": 1, "unknown": ["a"]}, {"acked": 2, "unknown": ["b"]}])
    {'acked': 3, 'unknown': ['a', 'b']}
    >>> united([{"next_due_ms": None, "paused": True}, {"next_due_ms": 7, "paused": False}])
    {'next_due_ms': 7, 'paused': False}
    """
    known = [row for row in rows if row is not None]
    if not known:
        return None
    if name in _CHOSEN:
        return _CHOSEN[name](known)
    first = known[0]
    if isinstance(first, dict):
        names = dict.fromkeys(key for row in known for key in row)
        return {key: united([row.get(key) for row in known], key) for key in names}
    if isinstance(first, list):
        return [value for row in known for value in row]
    return sum(known) if isinstance(first, int | float) and not isinstance(first, bool) else first


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


_CHOSEN: dict[str, Callable[[Sequence[Any]], Any]] = {
    "settings": _first,
    "live_ratio": _mean,
    "oldest_ready_ms": min,
    "next_due_ms": min,
    "changed_ms": max,
    "paused": all,
    "from_ms": _first,
    "bucket_ms": _first,
    "spread_ms": _first,
    "counts": lambda columns: [sum(column) for column in zip(*columns, strict=True)],
    "outcome": lambda words: "running" if "running" in words else words[0],
}


def json_of(bodies: Iterable[bytes]) -> bytes:
    """JSON answers as one."""
    return msgspec.json.encode(united([msgspec.json.decode(body) for body in bodies]))


def causes(bodies: Iterable[bytes]) -> bytes:
    """Dead letters by error, the most common first."""
    found = united([msgspec.json.decode(body) for body in bodies])
    found["errors"] = dict(sorted(found["errors"].items(), key=lambda pair: -pair[1]))
    return msgspec.json.encode(found)


def in_order(body: bytes, sent: Sequence[str]) -> bytes:
    """An answer with lists of ids, or objects by id, in the order in which the ids were sent.

    >>> in_order(b'{"acked":1,"unknown":["c","a"]}', ["a", "b", "c"])
    b'{"acked":1,"unknown":["a","c"]}'
    """
    found = msgspec.json.decode(body)
    place = {id_: row for row, id_ in reversed(list(enumerate(sent)))}
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = sorted(value, key=lambda id_: place.get(id_, 0))
        elif isinstance(value, dict):
            found[name] = dict(sorted(value.items(), key=lambda pair: place.get(pair[0], 0)))
    return msgspec.json.encode(found)


_INDEXES = ("duplicate_indexes", "replaced_indexes", "rescheduled_indexes")


def stored(pieces: Sequence[Piece], bodies: Sequence[bytes], ids: Sequence[str]) -> bytes:
    """The answer to a batch whose parts were stored: indexes are those of the whole batch."""
    rows = [msgspec.json.decode(body) for body in bodies]
    for piece, row in zip(pieces, rows, strict=True):
        row.update({name: [piece.rows[i] for i in row[name]] for name in _INDEXES if name in row})
    found = united(rows)
    found.update({name: sorted(found[name]) for name in _INDEXES if name in found})
    return msgspec.json.encode(found | {"ids": ids} | ({"partitions": len(pieces)} if len(pieces) > 1 else {}))


def refusal(piece: Piece | None, body: bytes, done: int, count: int) -> bytes:
    """The refusal of a part: `index` is that in the whole request. `done`: parts of the request that were carried out."""
    found = msgspec.json.decode(body)
    error = found["error"]
    if piece is not None and isinstance(index := error.get("index"), int) and index < len(piece.rows):
        error["index"] = piece.rows[index]
    if done:
        error["message"] += f" This was done in {done} of {count} partitions; send it again with the same ids to do the rest."
        error["partitions_done"] = done
    return msgspec.json.encode(found)


# Pages


class Page(NamedTuple):
    """A page of one partition. `keys`: by which its rows are in order; `is_last`: no row is behind it."""

    keys: list[int]
    is_last: bool


def merged(pages: Mapping[int, Page], limit: int, newest: bool = False) -> list[tuple[int, int]]:
    """Partition and place of the first rows of all pages, in order: up to `limit`, and no further than the end of a page behind
    which there are more.

    >>> merged({0: Page([1, 5], True), 1: Page([2, 3], False)}, 9)
    [(0, 0), (1, 0), (1, 1)]
    """
    sign = -1 if newest else 1
    if any(not page.keys and not page.is_last for page in pages.values()):
        return []
    heads = [(sign * page.keys[0], partition, 0) for partition, page in pages.items() if page.keys]
    heapify(heads)
    out: list[tuple[int, int]] = []
    while heads and len(out) < limit:
        _, partition, at = heads[0]
        out.append((partition, at))
        page = pages[partition]
        if at + 1 < len(page.keys):
            heapreplace(heads, (sign * page.keys[at + 1], partition, at + 1))
        elif page.is_last:
            heappop(heads)
        else:
            break
    return out


def to_cursor(cursors: Sequence[str | None]) -> str | None:
    """The cursors of all partitions as one; None if none has one. An empty one stands for the beginning."""
    if all(cursor is None for cursor in cursors):
        return None
    return "p" + base64.urlsafe_b64encode(msgspec.json.encode(cursors)).decode().rstrip("=")


def from_cursor(text: str | None, count: int) -> list[str | None]:
    """The inverse of `to_cursor`.

    >>> from_cursor(to_cursor(["a", None]), 2)
    ['a', None]
    """
    if not text:
        return [""] * count
    try:
        if not text.startswith("p"):
            raise ValueError
        data = base64.b64decode(text[1:] + "=" * (-len(text[1:]) % 4), altchars=b"-_", validate=True)
        found = msgspec.json.decode(data, type=list[str | None])
        if len(found) != count:
            raise ValueError
    except (ValueError, msgspec.DecodeError):
        raise InvalidArgument(f"{text!r:.80} is no cursor of this listing") from None
    return found
