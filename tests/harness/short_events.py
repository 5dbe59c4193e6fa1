"""Short events and small slices: a few messages meet the bounds that a hundred thousand meet in life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from turtlemq.broker import events


@contextmanager
def short_events(seed: int) -> Iterator[None]:
    """Meanwhile most events and checkpoints of journals are split; for some seeds none is."""
    with patch.object(events, "EVENT_BYTES", Random(seed).choice([100, 300, 1_000, events.EVENT_BYTES])):
        yield
