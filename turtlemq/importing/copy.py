"""Copy of a source into a topic: batches at a limited rate, a count of each outcome. A dry run only reads.

A message that the server refuses is left out, and the rest of its batch is put again; all other errors end the copy, and so do
many refusals. Since ids
are the same in every run, it goes on where it stopped when it is run again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turtlemq.client import Client, NewMessage, errors
from turtlemq.client.options import outgoing_messages
from turtlemq.client.sending import split_batch, store_batch
from turtlemq.importing.fields import Unusable
from turtlemq.importing.source import Source

SAMPLE = 5  # messages that a dry run shows
REQUEST_BYTES = 4 << 20
REFUSED_MAX = 100  # each costs a request; if there are more, something is wrong with all


@dataclass(slots=True)
class Report:
    """The outcome of a copy, so far.

    read: messages to copy; created: stored now; duplicates: stored already; refused: ids with the server's error.
    skipped: records of the source that were left out, by the reason. first_ms, last_ms: the range of due times.
    """

    read: int = 0
    created: int = 0
    duplicates: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    first_ms: int | None = None
    last_ms: int | None = None
    sample: list[NewMessage] = field(default_factory=list)

    def note(self, batch: Sequence[NewMessage]) -> None:
        """Count a batch that was read."""
        self.read += len(batch)
        self.sample += batch[: SAMPLE - len(self.sample)]
        dues = [message.due for message in batch if isinstance(message.due, int)]
        if dues:
            self.first_ms = min(dues) if self.first_ms is None else min(self.first_ms, *dues)
            self.last_ms = max(dues) if self.last_ms is None else max(self.last_ms, *dues)


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of a copy.

    per_s: messages a second at most; 0: no limit. due_from_ms, due_to_ms: others are left to the old queue.
    """

    batch: int = 1000
    per_s: float = 0.0
    due_from_ms: int | None = None
    due_to_ms: int | None = None

    def takes(self, due_ms: int) -> bool:
        """Whether a due time is in the range.

        >>> [CopyOptions(due_from_ms=5, due_to_ms=7).takes(due_ms) for due_ms in (4, 5, 6, 7)]
        [False, True, True, False]
        """
        return (self.due_from_ms or 0) <= due_ms and (self.due_to_ms is None or due_ms < self.due_to_ms)


def copy_messages(
    source: Source, topic: str, client: Client | None, options: CopyOptions, on_read: Callable[[int], Any] = lambda count: None
) -> Report:
    """Copy all messages of a source into a topic. Without a client, nothing is put. `on_read` gets the records of each batch."""
    report = Report(skipped=source.skipped)
    began_s = time.monotonic()
    for records, found in source.batches(min(options.batch, max(1, int(options.per_s or options.batch)))):
        batch = _wanted(found, options, report)
        report.note(batch)
        if client is not None and batch:
            _put(client, topic, batch, report)
            if options.per_s:
                time.sleep(max(0.0, began_s + report.read / options.per_s - time.monotonic()))
        on_read(records)
    return report


def _wanted(found: list[NewMessage], options: CopyOptions, report: Report) -> list[NewMessage]:
    """The messages in the range of due times, each id once: a cursor of Redis may show a member twice."""
    unique = {message.id: message for message in found}
    now_ms = time.time_ns() // 1_000_000
    batch = [message for message in unique.values() if options.takes(message.due if isinstance(message.due, int) else now_ms)]
    if len(batch) < len(unique):
        report.skipped["due outside of the range"] += len(unique) - len(batch)
    return batch


def _put(client: Client, topic: str, batch: list[NewMessage], report: Report) -> None:
    policy = client.options.policy
    pending = batch
    while pending:
        try:
            outgoing = outgoing_messages(pending, policy.now())
        except errors.ClientError as error:
            pending = _without(pending, error, report)
            continue
        (first, *_) = split_batch(outgoing, len(outgoing), REQUEST_BYTES)
        try:
            stored = client.run(store_batch(topic, first, policy))
        except errors.Refused as error:
            pending = _without(pending, error, report)
            continue
        created = stored.created.count(True)
        report.created += created
        report.duplicates += len(stored) - created
        pending = pending[len(first) :]


def _without(batch: list[NewMessage], error: errors.ClientError, report: Report) -> list[NewMessage]:
    """The batch without the message that was refused. Raises the error if it is not about one message."""
    if error.index is None:
        raise error
    if len(report.refused) == REFUSED_MAX:
        raise Unusable(f"more than {REFUSED_MAX} messages are refused; the last: {batch[error.index].id}: {error}")
    report.refused[str(batch[error.index].id)] = str(error)
    return [*batch[: error.index], *batch[error.index + 1 :]]
