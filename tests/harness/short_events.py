"""Short events and small slices: a few messages meet the bounds that a hundred thousand meet in life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from turtlemq.broker import events, failures


@contextmanager
def short_events(seed: int) -> Iterator[None]:
    """Meanwhile most events and checkpoints of journals are split, and deliveries end a few at a time; for some seeds neither."""
    chance = Random(seed)
    with (
        patch.object(events, "EVENT_BYTES", chance.choice([100, 300, 1_000, events.EVENT_BYTES])),
        patch.object(failures, "SLICE_MESSAGES", chance.choice([1, 3, failures.SLICE_MESSAGES])),
        patch.object(failures, "SLICE_BYTES", chance.choice([1, 500, failures.SLICE_BYTES])),
    ):
        yield
