"""The compiled kernel, where it was built: the loops over columns of kernel.c. Pure.

`compiled` is None without it: it was not built (no compiler), is of another version, or TURTLEMQ_KERNEL=off. Each use has the
form "ask the kernel, and if it answers None, go on": the code behind it is the reference, which does the same with numpy, and
which alone reports errors. Code reads `kernel.compiled` when it decides, so that a test can set it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import numpy as np

from turtlemq import small_batches
from turtlemq.model import I64, U8, U32

_VERSION = 1  # of the functions; see the end of kernel.c
_AT_ONCE = 4096  # documents of one call: 0.2 ms if they are small


def _load() -> tuple[ModuleType | None, Literal["compiled", "not built", "off", "of another version"]]:
    """The module, and why there is none."""
    try:
        from turtlemq.segment import _kernel
    except ImportError as error:
        return None, "off" if "TURTLEMQ_KERNEL" in str(error) else "not built"
    return (_kernel, "compiled") if _kernel.VERSION == _VERSION else (None, "of another version")


compiled, status = _load()


def encode(
    ids: Sequence[bytes] | U8,
    bodies: Sequence[bytes],
    due_ms: Sequence[int] | I64,
    first_seq: int,
    ttr_ms: Sequence[int] | int,
    flags: Sequence[int] | U32,
    extras: Sequence[bytes] | None,
    bytes_max: int,
) -> tuple[memoryview, I64 | list[int]] | None:
    """`format.encode` by the kernel, in slices, so that other threads run in between. None: that is left to the reference, for
    example where a document has more than `bytes_max` bytes. Requires at least one document."""
    count = len(bodies)
    if compiled is None or (raw := compiled.document_lengths(ids, bodies, extras)) is None:
        return None
    column: I64 = np.frombuffer(raw, np.int64)
    lengths: I64 | list[int] = column.tolist() if count < small_batches.DOCUMENTS else column
    if int(column.max()) > bytes_max:
        return None
    data = np.empty(int(column.sum()), np.uint8).data
    at = 0
    for first in range(0, count, _AT_ONCE):
        last = min(first + _AT_ONCE, count)
        at = compiled.encode(data, at, first, last, ids, bodies, due_ms, first_seq, ttr_ms, flags, extras)
        if at is None:
            return None
    return data, lengths
