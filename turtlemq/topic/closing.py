"""Closing many topics: their checkpoints are written side by side, a bounded number at once, so that a stop takes little longer
with thousands of topics than with one. Topics that nothing was written to since their last checkpoint need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from turtlemq.errors import Exhausted, TurtleError
from turtlemq.storage.workers import Worker
from turtlemq.topic.topic import Topic


def close_topics(topics: Mapping[str, Topic], worker: Worker, most: int) -> tuple[dict[str, Any], list[Exception]]:
    """Sync and close topics. `worker` writes checkpoints, `most` at once. Returns the marks for the clean-shutdown file, and the
    errors; a topic that fails does not keep the others from being closed."""
    marks: dict[str, Any] = {}
    failed: list[Exception] = []
    begun: deque[Topic] = deque()

    def finish(topic: Topic) -> None:
        try:
            marks[topic.name] = topic.close()
        except (TurtleError, OSError) as error:
            failed.append(error)

    for topic in topics.values():
        if len(begun) == most:
            finish(begun.popleft())
        try:
            topic.checkpoint(worker)
        except Exhausted:
            pass  # `close` tries again
        except (TurtleError, OSError) as error:
            failed.append(error)
        begun.append(topic)
    while begun:
        finish(begun.popleft())
    return marks, failed
