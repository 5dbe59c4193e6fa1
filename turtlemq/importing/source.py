"""The interface of all sources: batches of messages, and a count of the records that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from turtlemq.client.options import NewMessage


class Source(Protocol):
    """Reads the messages of another queue, in batches, and removes none of them.

    skipped: messages that were left out, by the reason.
    """

    skipped: Counter[str]

    def total(self) -> int | None:
        """About how many records there are, for the progress bar; None if that is unknown."""

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """All messages, about `count` at a time, each batch with the number of records that were read for it."""

    def close(self) -> None:
        """Close the connection to the source."""
