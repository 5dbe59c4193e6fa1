"""Request bodies decoded in one go, where the server decodes them in slices."""

from __future__ import annotations

from turtlemq.model import Batch
from turtlemq.server.incoming.batches import DueRules, decode_slices


def decode_batch(data: bytes, kind: str, now_ms: int, rules: DueRules) -> Batch:
    """A request body as a batch."""
    steps = decode_slices(data, kind, now_ms, rules)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: Batch = done.value
            return batch
