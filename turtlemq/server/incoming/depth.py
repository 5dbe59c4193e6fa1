"""The limit on the nesting of JSON bodies.

A body is stored as the text that came, so its consumers must decode it. Decoders recurse, and give up when their stack is used
up: how deep they come depends on the program around them. So the limit is fixed, far below that, and the same for every way in.
Messages of earlier versions may be deeper; they are served as they are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from turtlemq.errors import TurtleError
from turtlemq.model import I64
from turtlemq.segment import format as f
from turtlemq.server.errors import InvalidJson

LEVELS_MAX = 100
_TOO_MANY = f"more than {LEVELS_MAX} levels of lists and objects"
_BYTES_MIN = 2 * (LEVELS_MAX + 1)  # a shorter body cannot be too deep: each level has two brackets
_CHUNK_BYTES = 128 << 10  # looked at in one step: at most 2 ms
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))


def check_depth(bodies: Sequence[bytes], flags: Sequence[int] | int, error: type[TurtleError], first: int = 0) -> Iterator[None]:
    """Raise `error` if a JSON body has more than LEVELS_MAX levels, in steps. `flags` tell which bodies are JSON, `first` is the
    index of the first. 0.04 µs each if they are short, 0.15 µs with 300 bytes; more only if a body has many brackets."""
    lengths = np.fromiter(map(len, bodies), np.int64, len(bodies))
    if flags == 0 or lengths.max(initial=0) < _BYTES_MIN:
        return
    for i in _suspects(bodies, lengths):
        if not (flags if isinstance(flags, int) else flags[i]) & f.JSON:
            continue
        for levels in levels_so_far(bodies[i]):
            if levels > LEVELS_MAX:
                raise error(f"message {first + i}: its body has {_TOO_MANY}", index=first + i)
            yield


def check_body_depth(body: bytes) -> Iterator[None]:
    """Raise `InvalidJson` if the JSON body of a single message has more than LEVELS_MAX levels, in steps. 1 µs, and up to 20 ns a
    byte if it has many brackets."""
    if len(body) < _BYTES_MIN or (len(body) < _CHUNK_BYTES and body.count(b"[") + body.count(b"{") <= LEVELS_MAX):
        return
    for levels in levels_so_far(body):
        if levels > LEVELS_MAX:
            raise InvalidJson(f"the body of the message has {_TOO_MANY}")
        yield


def _suspects(bodies: Sequence[bytes], lengths: I64) -> list[int]:
    """Indexes of bodies with more than LEVELS_MAX opening brackets, in strings or not. Very long ones are not looked at."""
    if lengths.max() > _CHUNK_BYTES:
        return np.flatnonzero(lengths >= _BYTES_MIN).tolist()
    openings = np.flatnonzero((np.frombuffer(b"".join(bodies), np.uint8) | 0x20) == ord("{"))  # "[" becomes "{"
    if len(openings) <= LEVELS_MAX:
        return []
    before = np.searchsorted(openings, lengths.cumsum())
    return np.flatnonzero(np.diff(before, prepend=0) > LEVELS_MAX).tolist()


def levels_so_far(body: bytes) -> Iterator[int]:
    """How deep the lists and objects of a valid JSON text are nested, up to the end of each chunk.

    >>> [max(levels_so_far(body)) for body in (b'1', b'[]', b'{"a": [{}, {}]}', b'["[[", "\\\\"[", "\\\\\\\\", [1]]')]
    [0, 1, 3, 2]
    """
    at, depth, deepest, is_text = 0, 0, 0, False
    while at < len(body):
        chunk = body[at : at + _CHUNK_BYTES]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # the last one belongs to the next character
            chunk = chunk[:-1]
        at += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = np.frombuffer(chunk.translate(None, _NO_MARKS), np.uint8)
        if len(marks):
            quotes = marks == ord('"')
            in_text = np.bitwise_xor.accumulate(quotes) ^ is_text
            is_text = bool(in_text[-1])
            brackets = marks[~(in_text | quotes)] | 0x20
            depths = depth + np.where(brackets == ord("{"), 1, -1).cumsum()
            if len(depths):
                depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
        yield deepest
