"""Types of kernel.c, the compiled module. None as an answer: the reference decides."""

from collections.abc import Sequence

from turtlemq.model import I64, U8, U32, U64
from turtlemq.segment.buffers import Buffer

VERSION: int

def are_plain_ids(ids: Sequence[object], bytes_max: int, /) -> bool: ...
def checksums(buffer: Buffer, starts: I64, ends: I64, /) -> bytes | None: ...
def document_lengths(ids: Sequence[bytes] | U8, bodies: Sequence[bytes], extras: Sequence[bytes] | None, /) -> bytes | None: ...
def encode(
    into: Buffer | U8,
    at: int,
    first: int,
    last: int,
    ids: Sequence[bytes] | U8,
    bodies: Sequence[bytes],
    due_ms: Sequence[int] | I64,
    first_seq: int,
    ttr_ms: Sequence[int] | int,
    flags: Sequence[int] | U32,
    extras: Sequence[bytes] | None,
    /,
) -> int | None: ...
def enter(slots: U32, hashes: U64, entries: U32, /) -> list[tuple[int, int, int]] | None: ...
def find(slots: U32, hashes: U64, wanted: U64, /) -> bytes | None: ...
def gather(buffer: Buffer, at: I64, lengths: I64, /) -> bytes | None: ...
def interleave(parts: list[tuple[Buffer, I64, I64 | int]], /) -> tuple[bytes, bytes] | None: ...
def sizes(bodies: Sequence[object], /) -> tuple[int, int] | None: ...
